"""A comparison by the indexes of both sides, or by their listings where that fails.

It only finds keys, as a comparison by listings does: whatever differs is applied as a
change is, which asks the source, and a verified target, once more.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

from merkle.errors import ReconcileError
from replicator.difference import Action
from replicator.proven_plan import ProvenStep
from replicator.stores.errors import SnapshotLostError
from replicator.stores.port import Change, ChangeKind
from replicator.syncer.comparing import NAMED_MAX, WAITING_MAX, Comparing, ComparisonFindings
from replicator.syncer.differences_found import DifferenceSink
from replicator.syncer.index_proofs import DOUBTED, IndexFindings, IndexProofs, ProofRequest
from replicator.syncer.lease import LeaseLostError
from replicator.syncer.schedule import Work
from runtime.errors import OperationInterruptedError

# Of one unit of work, for the thread that compares.
_WAIT_S = 0.02


class ProvenComparing:
    """One comparison by indexes. All methods belong to one thread."""

    def __init__(
        self,
        proofs: IndexProofs,
        request: ProofRequest,
        sink: DifferenceSink,
        *,
        listed: Callable[[], Comparing],
        wait_s: float = _WAIT_S,
    ) -> None:
        """What differs goes to `sink`. `listed` begins a comparison by listings
        instead.
        """
        self._proofs = proofs
        self._request = request
        self._sink = sink
        self._new_listed = listed
        self._wait_s = wait_s
        self._listed: Comparing | None = None
        self._running: Future[IndexFindings | None] | None = None
        self._found: IndexFindings | None = None
        self._steps: Iterator[ProvenStep] = iter(())
        self._is_read = False
        self._waiting = list[Work]()
        self._named = list[str]()
        self._count = 0

    @property
    def is_done(self) -> bool:
        """See Comparing."""
        if self._listed is not None:
            return self._listed.is_done
        return self._is_read and not self._waiting

    @property
    def is_waiting(self) -> bool:
        """See Comparing; a comparison by indexes waits within `advance`."""
        return self._listed is not None and self._listed.is_waiting

    def cancel(self) -> None:
        """See Comparing."""
        if self._listed is not None:
            self._listed.cancel()
        self._proofs.cancel()

    @property
    def last_key(self) -> str:
        """See Comparing; a comparison by indexes begins anew after a crash."""
        return self._listed.last_key if self._listed is not None else ""

    def advance(self) -> None:
        """See Comparing.

        Raises:
            LeaseLostError: another syncer works on this.
            SnapshotLostError: the snapshot is gone.
            StoreError: a side did not answer; call it again.
            OperationInterruptedError: it is interrupted.
        """
        if self._listed is None and self._found is None:
            self._prove()
        if self._listed is not None:
            self._listed.advance()
        elif self._found is not None:
            self._take()

    def result(self) -> ComparisonFindings:
        """See Comparing."""
        if self._listed is not None:
            return self._listed.result()
        found = self._found
        assert found is not None
        return ComparisonFindings(
            found.began_ms,
            self._count,
            tuple(self._named),
            found.level,
            found.in_flight,
            found.is_certain,
        )

    def _prove(self) -> None:
        """Begin the comparison, or look whether it has come to its end."""
        running = self._running
        if running is None:
            running = self._running = self._proofs.start(self._request)
        wait((running,), timeout=self._wait_s)
        if not running.done():
            return
        self._running = None
        try:
            self._found = running.result()
        except (LeaseLostError, SnapshotLostError, OperationInterruptedError):
            raise
        except ReconcileError:
            # Whatever is wrong with a store, its listing says it as well.
            self._found = None
        if self._found is None:
            self._listed = self._new_listed()
        else:
            self._steps = iter(self._found.steps)

    def _take(self) -> None:
        """Let what differs be applied, some at a time."""
        held = self._sink.is_held
        self._waiting = [one for one in self._waiting if not (one.is_done or held(one))]
        while not self._is_read and len(self._waiting) < WAITING_MAX:
            step = next(self._steps, None)
            if step is None:
                self._is_read = True
                assert self._found is not None
                self._found.steps.close()
                break
            if step.action is not Action.NOTHING:
                self._count += 1
                if len(self._named) < NAMED_MAX:
                    self._named.append(step.key)
            if step.action is Action.LEAVE:
                continue
            kind = ChangeKind.DELETE if step.action is Action.DELETE else ChangeKind.PUT
            change = Change(0, step.key, "", kind)
            work = self._sink.take(change, is_doubted=step.reason == DOUBTED)
            if work is not None:
                self._waiting.append(work)

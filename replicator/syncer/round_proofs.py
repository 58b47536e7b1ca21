"""When a source that is read in rounds is compared with its target, and what it shows.

A comparison runs beside the rounds, so that no change waits for it. A key that a round
has found meanwhile is in flight, as one is that the log tells of: it is no difference,
and nothing is proven of it.
"""

from dataclasses import replace

from replicator.cut import CutCheck
from replicator.syncer.comparing import Comparing, ComparisonFindings, StoreComparing
from replicator.syncer.differences_found import AppliedDifferences, DifferenceSink
from replicator.syncer.phase import SyncPhase, Tools
from replicator.syncer.proof import ProofState
from replicator.syncer.workers import ChangeWorkers
from runtime.rate_limit import Clock

# A first proof need not wait as long as the later ones: it also finds what a syncer did
# that had the lease before.
FIRST_PROOF_S = 5.0
# A comparison that did not prove equality is repeated after this time, then after twice
# as long each time: on a bucket that is written to, none may ever do.
_RETRY_S = 60.0


class RoundProofs:
    """The comparisons of one replication in rounds. Owned by one thread."""

    def __init__(self, clock: Clock, every_s: float) -> None:
        """One is due soon, and then after `every_s` each."""
        self._clock = clock
        self._every_s = every_s
        self._due_s = clock.monotonic_s() + min(FIRST_PROOF_S, every_s)
        self._unproven = 0
        self.beside: Comparing | None = None
        """The comparison that runs beside the rounds."""
        self.state = ProofState()
        """What the last comparison has shown."""

    @property
    def is_due(self) -> bool:
        """Whether all is to be compared."""
        return self._clock.monotonic_s() >= self._due_s

    @property
    def awaits_answer(self) -> bool:
        """Whether keys are being read that are compared beside the rounds."""
        return self.beside is not None and self.beside.is_waiting

    def forget(self) -> None:
        """Nothing is proven any more, and a comparison is due soon. Until then
        differences that are known stay.
        """
        self.state = ProofState(differences=self.state.differences or None)
        self._unproven = 0
        soon_s = self._clock.monotonic_s() + min(FIRST_PROOF_S, self._every_s)
        self._due_s = min(self._due_s, soon_s)

    def cancel(self) -> None:
        """End what runs beside the rounds."""
        if self.beside is not None:
            self.beside.cancel()
        self.beside = None

    def note(
        self,
        result: ComparisonFindings,
        *,
        moved: set[str] | None,
        failed: int,
        is_whole: bool = True,
        names_moved: bool = False,
    ) -> None:
        """Note what a comparison has found. `moved` are keys that were found changed
        while it ran, None for more than can be told; `names_moved` says that no other
        was. Unless it `is_whole` it proves nothing.
        """
        if is_whole:
            count = result.in_flight
            if moved and count is not None and not names_moved:
                result = replace(result, in_flight=count + len(moved))
            self.state = self.state.after(result, position=None, moved=moved, failed=failed)
        is_proven = self.state.proven_ms == result.began_ms
        self._unproven = 0 if is_proven else self._unproven + 1
        retry_s = _RETRY_S * 2 ** min(self._unproven - 1, 10)
        wait_s = self._every_s if is_proven else min(retry_s, self._every_s)
        self._due_s = self._clock.monotonic_s() + wait_s


def begin_comparison(
    tools: Tools,
    phase: SyncPhase,
    workers: ChangeWorkers,
    clock: Clock,
    *,
    prefixes: tuple[str, ...],
    start_after: str,
    spares_foreign: bool,
    watched: bool,
    sink: DifferenceSink | None = None,
) -> Comparing:
    """Begin to compare. With `spares_foreign` only keys that were copied before are
    deleted, with `watched` what changes meanwhile is counted. What differs is applied,
    unless there is a `sink` for it. With a verifier it is done by indexes, from the
    first key on.
    """
    sink = sink or AppliedDifferences(workers, phase.applier, clock)

    def new_cut(prefix: str) -> CutCheck:
        source, target = phase.source, tools.target
        return CutCheck(source, target, prefix, rows_are_fresh=False, retried=tools.retried)

    def listed() -> StoreComparing:
        return StoreComparing(
            phase.comparison,
            sink,
            tools.ledger,
            clock,
            reader=tools.comparer,
            wake=tools.wake,
            prefixes=prefixes,
            start_after=start_after,
            spares_foreign=spares_foreign,
            new_cut=new_cut if watched else None,
        )

    if tools.proofs is None:
        return listed()
    # gRPC takes most of the start of a process.
    from replicator.syncer.index_proofs import ProofRequest
    from replicator.syncer.proven_comparing import ProvenComparing

    kept = (phase.source.capabilities, tools.target.capabilities)
    request = ProofRequest(
        phase.source,
        prefixes,
        may_delete=all(one.lists_all_keys for one in kept),
        spares_foreign=spares_foreign,
        must_settle=watched,
        needs_rows=watched and phase.snapshot is None,
    )
    return ProvenComparing(tools.proofs, request, sink, listed=listed)

"""Applies the changes of a schedule in several threads, and keeps those that fail.

While a store does not answer, everything is tried again for ever, after growing waits.
A key that fails by itself is held back and tried again later, while others go on: also
one that a store never answers for, once both stores were seen to answer for others.
What no other attempt can mend stops everything until somebody has looked at it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TypeAlias

from merkle.errors import ReconcileError
from replicator.replication import FAILED_KEYS_MAX, FailedKey
from replicator.stores.errors import SnapshotLostError, StoreError
from replicator.stores.port import Change, ChangeKind
from replicator.syncer.applier import ChangeApplier, Effect, KeysLeftError, Outcome
from replicator.syncer.failing_keys import FailingKeys
from replicator.syncer.faults import FaultVerdict, verdict
from replicator.syncer.lease import LeaseLostError
from replicator.syncer.schedule import ChangeSchedule, Work
from replicator.syncer.store_health import HealthAnswer, StoreHealth, is_unavailable
from replicator.syncer.tally import ReplicationTally
from runtime.errors import InternalError, OperationInterruptedError
from runtime.rate_limit import Clock

_Applying: TypeAlias = Future[Sequence[Outcome | StoreError]]
# Changes taken from the queue ahead of those that are applied.
WINDOW = 1_024
_DELETES_AT_ONCE = 500
# Waits after a failure of everything, and of one key.
_FIRST_WAIT_S = 0.5
_WAIT_MAX_S = 5.0
_KEY_WAIT_S = 5.0
_KEY_WAIT_MAX_S = 600.0
# More keys than these have one cause, which somebody should look at.
_HELD_MAX = 1_000


@dataclass(frozen=True, slots=True)
class _Held:
    """What failed by itself, why, and when it is tried again. `is_slow`: no answer came
    of it, for which nobody should wait often.
    """

    due_s: float
    work: Work
    verdict: FaultVerdict
    is_slow: bool

    def is_later(self, now_s: float) -> bool:
        """Whether it need not be tried now."""
        return self.is_slow and self.due_s > now_s


class ChangeWorkers:
    """Applies what is in its schedule. All methods but `wake` belong to one thread."""

    def __init__(
        self,
        executor: Executor,
        *,
        threads: int,
        clock: Clock,
        tally: ReplicationTally,
        judge: Callable[[ReconcileError], FaultVerdict],
        health: StoreHealth,
        prober: Executor,
        wait_s: float,
    ) -> None:
        """`judge` says what follows from an error; `prober` asks for the health of the
        stores; `pump` waits up to `wait_s` for what runs.
        """
        self._executor = executor
        self._health = health
        self._prober = prober
        self._threads = threads
        self._clock = clock
        self._tally = tally
        self._judge = judge
        self._wait_s = wait_s
        self._running = dict[_Applying, list[Work]]()
        self._ended = SimpleQueue[_Applying | None]()
        self._held = list[_Held]()
        # By key, until it is carried out, also while it is tried again.
        self._failed = dict[str, _Held]()
        self._failing = FailingKeys()
        # Whether the stores have to be asked before anything is begun.
        self._must_ask = False
        self._asking: Future[HealthAnswer] | None = None
        self._applier: ChangeApplier | None = None
        self._not_before_s = 0.0
        self._failures = 0
        self.schedule = ChangeSchedule()
        self.waiting: FaultVerdict | None = None
        """Why everything waits now."""
        self.stopped: FaultVerdict | None = None
        """Why nothing is begun any more."""
        self.lost: LeaseLostError | SnapshotLostError | None = None
        """What ends this phase."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs."""
        return not self._running and self._asking is None

    @property
    def held(self) -> int:
        """Keys that failed and wait to be tried again."""
        return sum(one.work.is_held for one in self._held)

    @property
    def failed(self) -> int:
        """Keys that failed by themselves and were not carried out since."""
        return len(self._failed)

    @property
    def key_fault(self) -> FaultVerdict | None:
        """Of the key that failed last, of those that are tried again."""
        return next(reversed(self._failed.values())).verdict if self._failed else None

    @property
    def failed_keys(self) -> tuple[FailedKey, ...]:
        """Up to FAILED_KEYS_MAX of those that are tried again."""
        return tuple(
            FailedKey(key, one.verdict.fault, one.verdict.message)
            for key, one in islice(self._failed.items(), FAILED_KEYS_MAX)
        )

    @property
    def has_only_held(self) -> bool:
        """Whether all is done but for what failed, or waits behind it."""
        return self.is_idle and not self.schedule.has_ready

    @property
    def room(self) -> int:
        """How many more changes the window takes."""
        return max(0, WINDOW - len(self.schedule))

    def is_held(self, work: Work) -> bool:
        """Whether this has failed by itself and waits, or waits behind what has."""
        held = (one.work for one in self._held if one.work.is_held)
        return any(one is work or one.holds_up(work) for one in held)

    def begin(self, applier: ChangeApplier) -> None:
        """Begin a phase with the keys that have failed, and nothing else."""
        assert self.is_idle
        failed, self._failed, self._held = self._failed, {}, []
        self.schedule = ChangeSchedule()
        self._applier, self.lost, self.waiting = applier, None, None
        self._not_before_s, self._failures, self._must_ask = 0.0, 0, False
        self._failing.keep(failed)
        now_s, now_ms = self._clock.monotonic_s(), self._clock.now_ms()
        for key, one in sorted(failed.items(), key=lambda item: not item[1].is_later(now_s)):
            # What is below a prefix, comparisons find.
            if key.endswith("/") or not applier.wants(key):
                continue
            change = Change(0, key, "", ChangeKind.DELETE)
            work = self.schedule.touch(change, now_ms=now_ms)
            work.tries = one.work.tries
            self._failed[key] = replace(one, work=work)
            if one.is_later(now_s) and self.schedule.start(1):
                # Others need not wait for it at each beginning.
                self._held.append(self._failed[key])
                self.schedule.hold(work)

    def resume(self) -> None:
        """Try everything again now."""
        self.stopped, self.waiting, self._not_before_s = None, None, 0.0
        self._held = [replace(one, due_s=0.0) for one in self._held]

    def end(self) -> None:
        """End the phase: take back what was not begun, and wait for what runs."""
        self.settle()
        self._applier = None
        if isinstance(self.lost, SnapshotLostError):
            self.lost = None

    def settle(self) -> None:
        """Take back what was not begun, and wait for what runs."""
        for future in [one for one in self._running if one.cancel()]:
            for work in self._running.pop(future):
                self.schedule.give_back(work)
        if self._asking is not None and self._asking.cancel():
            self._asking = None
            self._failing.note(both_answer=False)
        while not self.is_idle:
            self._collect(None)

    def wake(self) -> None:
        """Let a `pump` that waits come to its end. Any thread may call this."""
        self._ended.put(None)

    def pump(self, *, may_start: bool) -> int:
        """Begin what may be done, wait a little for what runs; how much was done."""
        if may_start and self.stopped is None and self.lost is None:
            self._start()
        return self._collect(self._wait_s)

    def _start(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._applier is None or now_s < self._not_before_s:
            return
        if self._must_ask:
            self._ask()
            return
        held = [one for one in self._held if one.work.is_held]
        due = [one.work for one in held if one.due_s <= now_s]
        self._held = [one for one in held if one.due_s > now_s]
        for work in due:
            # Its facts may be old by now: what counts is what the source has.
            work.change = replace(work.change, facts=None)
            self.schedule.give_back(work)
        deletes = list[Work]()
        while len(self._running) < 2 * self._threads and (found := self.schedule.start(1)):
            (work,) = found
            # One that fails must not fail others that are deleted with it.
            if work.change.kind is not ChangeKind.DELETE or work.change.key in self._failing:
                self._submit([work])
                continue
            deletes.append(work)
            if len(deletes) >= _DELETES_AT_ONCE:
                self._submit(deletes)
                deletes = []
        if deletes:
            self._submit(deletes)

    def _ask(self) -> None:
        """Ask for the health of the stores, if that is not being done."""
        if self._asking is None:
            self._failing.ask()
            avoided = frozenset(self._failed)
            self._asking = self._prober.submit(self._health.ask, avoided)
            self._asking.add_done_callback(lambda _: self.wake())

    def _note_health(self, asking: Future[HealthAnswer]) -> None:
        self._asking, answer = None, None
        try:
            answer = asking.result()
        except LeaseLostError as error:
            self.lost = self.lost or error
        except OperationInterruptedError:
            # It is asked again.
            pass
        except Exception as error:  # noqa: BLE001 - a defect ends the work, not the process
            self.stopped = self._judge(InternalError(f"{type(error).__name__}: {error}"))
        both_answer = answer is not None and answer.both_answer
        self._failing.note(both_answer=both_answer)
        if answer is None:
            return
        self._must_ask = not both_answer
        failure = answer.source or answer.target
        if failure is None:
            if self.held < _HELD_MAX:
                self.waiting = None
            # Single keys fail: nobody need wait longer and longer for those.
            self._failures = min(self._failures, 1)
        else:
            self.waiting = verdict(failure, source_answers=answer.source is None)
            self._wait_longer()

    def _wait_longer(self) -> None:
        """Begin nothing for a while."""
        wait_s = min(_FIRST_WAIT_S * 2 ** min(self._failures, 10), _WAIT_MAX_S)
        self._not_before_s = self._clock.monotonic_s() + wait_s
        self._failures += 1

    def _submit(self, works: list[Work]) -> None:
        applier = self._applier
        assert applier is not None
        changes = [work.change for work in works]

        def run() -> Sequence[Outcome | StoreError]:
            if len(changes) == 1:
                return [applier.apply(changes[0])]
            return applier.delete(changes)

        applying = self._executor.submit(run)
        self._running[applying] = works
        applying.add_done_callback(self._ended.put)

    def _collect(self, wait_s: float | None) -> int:
        ended, count = list[_Applying | None](), 0
        with suppress(Empty):
            ended.append(self._ended.get(timeout=0.0 if self.is_idle else wait_s))
            while True:
                ended.append(self._ended.get_nowait())
        for future in ended:
            if future is None or future not in self._running:
                # Others had something to do, or it was taken back before it was begun.
                continue
            works = self._running.pop(future)
            try:
                outcomes: Sequence[Outcome | ReconcileError] = future.result()
            except OperationInterruptedError:
                for work in works:
                    self.schedule.give_back(work)
                continue
            except ReconcileError as error:
                outcomes = [error] * len(works)
            except Exception as error:  # noqa: BLE001 - a defect ends the work, not the process
                outcomes = [InternalError(f"{type(error).__name__}: {error}")] * len(works)
            for work, outcome in zip(works, outcomes, strict=True):
                count += self._settle(work, outcome)
        if self._asking is not None and self._asking.done():
            self._note_health(self._asking)
        return count

    def _settle(self, work: Work, outcome: Outcome | ReconcileError) -> int:
        if isinstance(outcome, Outcome):
            work.has_effect = outcome.effect not in (Effect.NOTHING, Effect.GONE, Effect.CONFLICT)
            # An object that was equal already says nothing of how late a round is.
            has_lag = work.numbers or (work.change.time_ms and work.has_effect)
            since_ms = work.since_ms if has_lag else None
            count = self.schedule.finish(work, is_settled=outcome.effect is not Effect.GONE)
            self._tally.applied(outcome, since_ms, count, self._clock.now_ms())
            self._forget(work)
            self._failures, self.waiting = 0, None
            return 1
        if isinstance(outcome, LeaseLostError | SnapshotLostError):
            self.lost = self.lost or outcome
            self.schedule.give_back(work)
        elif isinstance(outcome, KeysLeftError):
            self._keys_left(work, outcome)
        elif is_unavailable(outcome):
            self._unanswered(work, outcome)
        else:
            self._refused(work, self._judge(outcome))
        return 0

    def _forget(self, work: Work) -> None:
        """Forget that it has failed."""
        for name in work.names:
            self._failed.pop(name, None)
        self._failing.forget(work.change.key)

    def _unanswered(self, work: Work, error: ReconcileError) -> None:
        """Hold a key back that fails by itself; else ask the stores before anything
        more is begun.
        """
        fails_alone = self._failing.fails_alone(work.change.key)
        if fails_alone and self.held < _HELD_MAX:
            found = verdict(error, source_answers=True, fails_alone=True)
            self._hold(work, found, is_slow=True)
            return
        self._wait_for_stores(work)
        if fails_alone:
            # So many are a fault of a store, whatever it answers for others.
            self.waiting = verdict(error, source_answers=True)

    def _wait_for_stores(self, work: Work) -> None:
        """Begin this again, and all else, once the stores were asked."""
        self.schedule.give_back(work)
        if not self._must_ask:
            self._must_ask = True
            self._wait_longer()

    def _keys_left(self, work: Work, error: KeysLeftError) -> None:
        """Hold back the keys of an operation on a prefix that fail by themselves. With
        any other fault all of it is tried again.
        """
        failures = [one for _, one in error.left]
        if any(map(is_unavailable, failures)) and not self._failing.fails_alone(work.change.key):
            self._wait_for_stores(work)
            return
        # Keys of one request share its error.
        judged = {id(one): self._judged_alone(one) for one in failures}
        found = [judged[id(one)] for one in failures]
        other = next((one for one in found if not one.is_of_key), None)
        if other is not None or self.held + len(found) > _HELD_MAX:
            self._refused(work, other or found[0])
            return
        self._forget(work)
        parts = self.schedule.split(work, [change for change, _ in error.left])
        silent = [p for p, one in zip(parts, failures, strict=True) if is_unavailable(one)]
        self._failing.blame(part.change.key for part in silent)
        for part, one in zip(parts, found, strict=True):
            self._hold(part, one, is_slow=part in silent)

    def _judged_alone(self, error: StoreError) -> FaultVerdict:
        if is_unavailable(error):
            return verdict(error, source_answers=True, fails_alone=True)
        return self._judge(error)

    def _refused(self, work: Work, found: FaultVerdict) -> None:
        if found.is_of_key and self.held < _HELD_MAX:
            self._hold(work, found)
            return
        self.schedule.give_back(work)
        if found.waits:
            self.waiting = found
            self._wait_longer()
        else:
            self.stopped = found

    def _hold(self, work: Work, found: FaultVerdict, *, is_slow: bool = False) -> None:
        wait_s = min(_KEY_WAIT_S * 2 ** min(work.tries, 10), _KEY_WAIT_MAX_S)
        work.tries += 1
        held = _Held(self._clock.monotonic_s() + wait_s, work, found, is_slow)
        self._held.append(held)
        self._failed |= dict.fromkeys(work.names, held)
        self.schedule.hold(work)

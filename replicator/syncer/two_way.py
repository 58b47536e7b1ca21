"""May this object, or this deletion, be applied where the target is written to as well?

Reads the origins of both objects, which costs a request for each, and asks the rules of
replicator.syncer.conflict.
"""

from proof.item import EvidenceLevel
from replicator.deletes import Retrying
from replicator.difference import Action, KeyState
from replicator.origin import Origin, OriginMarks
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError
from replicator.stores.port import Change, ObjectFacts
from replicator.syncer.conflict import KeySides, Standing, delete_wins, wins
from runtime.rate_limit import Clock

# Keys that the target alone has changed: of more the oldest is forgotten.
_WAITING_MAX = 100_000


class SupersededKeys:
    """Since when the target alone was seen to have changed a key. Of one process: after
    a restart the time counts anew, so that nothing is decided too soon.
    """

    def __init__(self, clock: Clock, wait_s: float) -> None:
        """After `wait_s` seconds no other direction is expected to bring the change."""
        self._clock, self._wait_s = clock, wait_s
        self._since = dict[str, tuple[ObjectFacts | None, ObjectFacts | None, float]]()

    def has_waited(self, state: KeyState) -> bool:
        """Note that a comparison has found the key so; whether that is long ago."""
        now_s, sides = self._clock.monotonic_s(), (state.source, state.target)
        known = self._since.get(state.key)
        if known is None or known[:2] != sides:
            self._since.pop(state.key, None)
            self._since[state.key] = (*sides, now_s)
            if len(self._since) > _WAITING_MAX:
                self._since.pop(next(iter(self._since)), None)
            return False
        return now_s - known[2] >= self._wait_s


class TwoWayRules:
    """Decides for one replication. Thread-safe, if no two calls are about one key."""

    def __init__(
        self,
        source: OriginMarks,
        target: OriginMarks,
        superseded: SupersededKeys,
        retried: Retrying,
        *,
        is_first: bool,
    ) -> None:
        """`is_first`: it is the initial batch, which brings all that the target lacks:
        a way back may be to a bucket that was lost.
        """
        self._source, self._target, self._superseded = source, target, superseded
        self._retried = retried
        self._is_first = is_first

    def may_put(self, state: KeyState, action: Action, *, is_found: bool) -> bool:
        """Whether the source's object is the newer one. `is_found`: a comparison has
        found the difference, no change of the log.

        Raises:
            PreconditionFailedError: a side has another object by now.
            StoreError: a side did not say.
        """
        facts, target, row = state.source, state.target, state.row
        assert facts is not None
        if row is not None and row.level is EvidenceLevel.LISTED:
            # Of one size, and nobody has shown that they were equal.
            row = None
        source = self._read(self._source, facts)
        target_was_seen = row is not None and target is not None and row.target.agrees(target)
        if target_was_seen and not source.is_copy and action is not Action.PROPERTIES:
            # A client wrote it over what the target has still: the rank does not count.
            return True
        theirs = self._read(self._target, target) if target is not None else None
        source_was_seen = row is not None and row.source.agrees(facts)
        agreed = b""
        if row is not None and (source_was_seen or target_was_seen):
            agreed = row.properties
        if not agreed and is_found and theirs is not None:
            # The other direction may not see it, where stamps do not tell.
            agreed = theirs.properties
        sides = KeySides(
            source=source,
            target=theirs,
            target_bucket=self._target.bucket,
            source_was_seen=source_was_seen,
            target_was_seen=target_was_seen,
            agreed=agreed,
        )
        standing = sides.standing()
        may_decide = is_found and standing is Standing.SUPERSEDED
        if may_decide and (self._is_first or self._superseded.has_waited(state)):
            standing = sides.by_rank()
        return standing is Standing.NEWER

    def may_delete(self, change: Change, target: ObjectFacts) -> bool:
        """Whether a key that the source lacks is to be deleted although the target has
        not the object that both were seen with.

        Raises:
            PreconditionFailedError: the target has another object by now.
            StoreError: it did not say.
        """
        if not change.index:
            # The source may have lost it, or never had it.
            return False
        origin = self._read(self._target, target)
        return delete_wins(change.time_ms, origin, self._source.bucket)

    def mark_is_older(self, state: KeyState) -> bool:
        """Whether the target's equal object counts as an older write than the source's,
        which was written once more with the same bytes: another bucket could take
        something between them for newer than the one and older than the other.

        Raises:
            PreconditionFailedError: a side has another object by now.
            StoreError: a side did not say.
        """
        source, target, row = state.source, state.target, state.row
        if source is None or target is None or row is None or row.source.agrees(source):
            return False
        return wins(self._read(self._source, source), self._read(self._target, target))

    def _read(self, marks: OriginMarks, facts: ObjectFacts) -> Origin:
        try:
            return self._retried(lambda: marks.read(facts))
        except ObjectMissingError as error:
            raise PreconditionFailedError(f"{facts.key} was deleted meanwhile") from error

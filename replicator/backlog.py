"""What the target is not known to have, by the source's own log of changes."""

from dataclasses import dataclass, replace

from replicator.replication import Checkpoint, Condition, FailedKey, ReplicationReport, Stage
from replicator.stores.errors import FeedGapError
from replicator.stores.port import Change, FeedPosition, Store
from replicator.syncer.prefixes import uncovered

_FIRST_COPY = "the first copy has not ended: any key may be missing"
# Prefixes in one line.
_NAMED_MAX = 10


@dataclass(frozen=True, slots=True)
class ReplicationBacklog:
    """Changes after a checkpoint's position, oldest first. `is_whole` says that there
    are no others; otherwise `reason` says why it is not known, or that there are more.
    `failed` are keys that fail by themselves, as far as the syncer names them, whatever
    the log says: `failed_count` is how many there are.
    """

    changes: tuple[Change, ...]
    is_whole: bool
    reason: str = ""
    failed: tuple[FailedKey, ...] = ()
    failed_count: int = 0


def read_backlog(
    source: Store, report: ReplicationReport | None, prefixes: tuple[str, ...], *, limit: int
) -> ReplicationBacklog:
    """Read the source's log from where a replication is by its last report; up to
    `limit` changes of keys below the prefixes, or of all keys if there is none.

    Raises:
        StoreError: the source did not say.
    """
    if report is None:
        report = ReplicationReport(Condition.UNKNOWN, Checkpoint())
    found = _changes_since(source, report.checkpoint.position, prefixes, limit)
    # The log says nothing of what was there before it was followed.
    if found.is_whole and (reason := _unknown_keys(report, prefixes)):
        found = replace(found, is_whole=False, reason=reason)
    return replace(found, failed=report.failed_keys, failed_count=report.failed)


def _unknown_keys(report: ReplicationReport, prefixes: tuple[str, ...]) -> str:
    """Why keys may be missing of which the log tells nothing; empty if none may."""
    at = report.checkpoint
    if at.stage is Stage.INITIAL_BATCH:
        return _FIRST_COPY
    if missing := uncovered(prefixes, at.prefixes):
        if "" in missing:
            return "the keys of other prefixes have not been compared: any may be missing"
        named = ", ".join(missing[:_NAMED_MAX]) + (", ..." if len(missing) > _NAMED_MAX else "")
        return f"keys below {named} have not been compared: any may be missing"
    if report.differences:
        return f"the last comparison found {report.differences} differences"
    if at.has_failed and not report.failed:
        return "keys have failed, and which ones only a comparison will tell"
    return ""


def _changes_since(
    source: Store, position: FeedPosition | None, prefixes: tuple[str, ...], limit: int
) -> ReplicationBacklog:
    if source.feed is None:
        return ReplicationBacklog((), False, "the source has no log of changes")
    if position is None:
        return ReplicationBacklog((), False, _FIRST_COPY)
    found: list[Change] = []
    try:
        while True:
            batch = source.feed.read(position)
            found += [one for one in batch.changes if _concerns(one, prefixes)]
            if len(found) > limit:
                return ReplicationBacklog(
                    tuple(found[:limit]), False, f"there are more than {limit}"
                )
            if batch.position == position:
                return ReplicationBacklog(tuple(found), True)
            position = batch.position
    except FeedGapError as error:
        return ReplicationBacklog(
            tuple(found), False, f"the log does not go on from there: {error.message}"
        )


def _concerns(change: Change, prefixes: tuple[str, ...]) -> bool:
    keys = (change.key, change.previous_key)
    return not prefixes or any(key.startswith(prefixes) for key in keys if key)

"""What the target is not known to have, by the source's own log of changes."""

from dataclasses import dataclass

from replicator.replication import Checkpoint, FailedKey
from replicator.stores.errors import FeedGapError
from replicator.stores.port import Change, Store


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
    source: Store, checkpoint: Checkpoint, prefixes: tuple[str, ...], *, limit: int
) -> ReplicationBacklog:
    """Read the source's log from where a replication is; up to `limit` changes of keys
    below the prefixes, or of all keys if there is none.

    Raises:
        StoreError: the source did not say.
    """
    if source.feed is None:
        return ReplicationBacklog((), False, "the source has no log of changes")
    position = checkpoint.position
    if position is None:
        return ReplicationBacklog((), False, "the first copy has not ended: any key may be missing")
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

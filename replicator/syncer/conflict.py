"""Which of two objects of one key counts, where both sides are written to (OZ-158)."""

from replicator.stores.port import ObjectFacts


def wins(source: ObjectFacts, target: ObjectFacts) -> bool:
    """Whether the source's object is the newer one. Of two from the same second it is
    the larger, and then the one with the larger ETag, so that both directions of a pair
    choose the same one. S3 tells whole seconds, so that no clock of it tells more.
    """
    return _rank(source) > _rank(target)


def delete_wins(time_ms: int, target: ObjectFacts) -> bool:
    """Whether a delete at this time is newer than the target's object; one of unknown
    time is not.
    """
    return time_ms // 1000 > target.modified_ms // 1000


def _rank(facts: ObjectFacts) -> tuple[int, int, str]:
    return facts.modified_ms // 1000, facts.size_bytes, facts.etag.strip('"')

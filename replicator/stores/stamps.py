"""Whether two descriptions of an object are of the same state."""

from replicator.stores.port import ObjectFacts


def same_stamp(ours: ObjectFacts, theirs: ObjectFacts) -> bool:
    """Whether both describe the same state of a key, as far as both say; times agree if
    they differ in their ms only and one of them has none.
    """
    times = ours.modified_ms, theirs.modified_ms
    known = ours.modified_ms and theirs.modified_ms
    whole = any(time % 1000 == 0 for time in times)
    return (
        (ours.key, ours.size_bytes, ours.etag) == (theirs.key, theirs.size_bytes, theirs.etag)
        and (not ours.version or not theirs.version or ours.version == theirs.version)
        and (not known or times[0] == times[1] or (whole and times[0] // 1000 == times[1] // 1000))
    )

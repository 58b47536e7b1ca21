"""Whether two descriptions of an object are of the same state."""

from replicator.stores.port import ObjectFacts


def same_stamp(ours: ObjectFacts, theirs: ObjectFacts) -> bool:
    """Whether both describe the same state of a key, as far as both say."""
    return (
        (ours.key, ours.size_bytes, ours.etag) == (theirs.key, theirs.size_bytes, theirs.etag)
        and (not ours.version or not theirs.version or ours.version == theirs.version)
        and _same_time(ours.modified_ms, theirs.modified_ms)
    )


def _same_time(ours_ms: int, theirs_ms: int) -> bool:
    """Whether both are times of one write, where 0 is none and a whole second may be
    rounded: to its own second, or to the next one.

    A bucket of Ceph that keeps versions lists a copied or a multipart object with the
    time when its write began. HEAD has the time when that ended, up to 62 ms later.
    """
    if not ours_ms or not theirs_ms or ours_ms == theirs_ms:
        return True
    early_ms, late_ms = sorted((ours_ms, theirs_ms))
    if late_ms % 1000 == 0 and early_ms % 1000:
        return late_ms - early_ms < 1000
    return early_ms % 1000 == 0 and late_ms - early_ms < 1000

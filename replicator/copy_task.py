"""What every way of copying one object shares: the task, and looks at both sides.

The source is pinned: the same version or ETag is asked for by each read. The target is
never overwritten when it is not the object that was listed. What the target answers
must agree with what was sent, or the copy has failed.
"""

from dataclasses import dataclass, field, replace

from proof.item import ContentHash
from replicator.copy_requests import (
    Answer,
    CopyFailedError,
    FailureReason,
    ReadRange,
    ReadSourceFacts,
    ReadSourceProperties,
    ReadTargetFacts,
    ReadTargetProperties,
    ReadWhole,
    Steps,
    UploadRecord,
)
from replicator.crossing import Crossing
from replicator.hashing import WholeCrc, declared_crc
from replicator.origin import OriginMarks
from replicator.stores.capabilities import Capabilities
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError, StoreError
from replicator.stores.port import ObjectFacts, ObjectProperties, WholeObject, WriteCondition
from replicator.stores.stamps import same_stamp
from replicator.windows import WindowTable

_PART_BYTES = 8 << 20
# What a cut of the link may cost once.
_PIECES_BYTES_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Of one object: larger ones than `part_bytes` are sent in parts of at least that
    size, one at a time. Up to `pieces_bytes_max` an object may be sent in one request.
    """

    part_bytes: int = _PART_BYTES
    pieces_bytes_max: int = _PIECES_BYTES_MAX


@dataclass(frozen=True, slots=True)
class CopyTask:
    """What to copy and what is known of it.

    `target` is the object to replace, None where the key must be absent. `upload` is
    what an earlier run left. `windows` and `content` describe the bytes of `target`, as
    the ledger knows them. `source_etags_prove`: an ETag of the source may be made of
    the MD5s of its parts, or its MD5, as S3 does it. `source_records_hashes`: the
    source has hashes of an object that the listing did not tell. `sends_pieces`: the
    target takes an object as it is read, and checks its MD5. `origins` marks the copy;
    None where nobody asks where it was written first. Without `reads_acl` a small
    object is taken to have the default ACL, if that takes a request.
    """

    source: ObjectFacts
    target: ObjectFacts | None
    capabilities: Capabilities
    crossing: Crossing
    window_key: bytes
    limits: CopyLimits = field(default_factory=CopyLimits)
    upload: UploadRecord | None = None
    windows: WindowTable | None = None
    content: tuple[ContentHash, ...] = ()
    properties: bytes = b""
    source_etags_prove: bool = False
    source_records_hashes: bool = False
    sends_pieces: bool = False
    origins: OriginMarks | None = None
    reads_acl: bool = True

    @property
    def key(self) -> str:
        """The key at both sides."""
        return self.source.key


class SourceChangedError(StoreError):
    """The source is not the version that was being copied any more."""

    code = "source_changed"


def read_properties(task: CopyTask) -> Steps[ObjectProperties]:
    """The properties that will cross.

    Raises:
        SourceChangedError: the object is gone.
        CopyFailedError: the target cannot keep them.
    """
    try:
        answer = yield ReadSourceProperties(task.source)
    except (ObjectMissingError, PreconditionFailedError) as error:
        raise SourceChangedError(f"{task.key} is gone") from error
    assert isinstance(answer, ObjectProperties)
    return _crossing(task, answer)


def read_whole(task: CopyTask) -> Steps[WholeObject]:
    """All bytes of just this version, and the properties that will cross.

    Raises:
        SourceChangedError: the source has another version by now, or is gone.
        CopyFailedError: the target cannot keep the properties.
    """
    try:
        answer = yield ReadWhole(task.source, with_acl=task.reads_acl)
    except (PreconditionFailedError, ObjectMissingError) as error:
        raise SourceChangedError(f"{task.key} changed before it was read") from error
    assert isinstance(answer, WholeObject)
    assert len(answer.body) == task.source.size_bytes
    return replace(answer, properties=_crossing(task, answer.properties))


def _crossing(task: CopyTask, found: ObjectProperties) -> ObjectProperties:
    """The part of the source's properties that crosses.

    Raises:
        CopyFailedError: the target cannot keep it.
    """
    return properties_at_target(task.source, found, task.crossing, task.origins, task.capabilities)


def properties_at_target(
    source: ObjectFacts,
    found: ObjectProperties,
    crossing: Crossing,
    origins: OriginMarks | None,
    target: Capabilities,
) -> ObjectProperties:
    """What a copy gets of the properties of the source's object, with the mark of its
    origin.

    Raises:
        CopyFailedError: the target cannot keep it.
    """
    plain = properties = crossing.of(found)
    if origins is not None:
        properties = origins.marked(source, found, plain)
        if origins.may_leave_out and _length(properties) > target.metadata_bytes_max:
            properties = plain
    length = _length(properties)
    if length > target.metadata_bytes_max:
        raise CopyFailedError(
            FailureReason.UNSUPPORTED,
            f"{source.key} has {length} bytes of metadata; the target keeps up to"
            f" {target.metadata_bytes_max}",
        )
    return properties


def _length(properties: ObjectProperties) -> int:
    """Bytes of the user metadata, as S3 counts them."""
    return sum(len(name.encode()) + len(text.encode()) for name, text in properties.metadata)


def read_range(
    task: CopyTask, first: int, end: int, *, until: int | None = None
) -> Steps[memoryview]:
    """Bytes of just this version. Their memory is that of the next read, unless a part
    with them was started. Bytes up to `until` will be read next.

    Raises:
        SourceChangedError: the source has another version by now.
    """
    try:
        answer = yield ReadRange(task.source, first, end, end if until is None else until)
    except (PreconditionFailedError, ObjectMissingError) as error:
        raise SourceChangedError(f"{task.key} changed while it was read") from error
    assert isinstance(answer, memoryview)
    assert answer.nbytes == end - first
    return answer


def source_facts(key: str) -> Steps[ObjectFacts | None]:
    """The source's object as it is now."""
    return _facts((yield ReadSourceFacts(key)))


def with_recorded_hashes(task: CopyTask) -> Steps[CopyTask]:
    """The task with the hashes that the source's clients have recorded of this version:
    what is read of it has to have them.

    Raises:
        SourceChangedError: the source has another version by now.
    """
    if task.source.hashes or not task.source_records_hashes or not task.source.size_bytes:
        return task
    now = yield from source_facts(task.key)
    if now is None or not same_stamp(now, task.source):
        raise SourceChangedError(f"{task.key} changed before it was read")
    return replace(task, source=replace(task.source, hashes=now.hashes))


def recorded_crc(task: CopyTask) -> WholeCrc:
    """Computes the CRC that is recorded of the source, but for CRC32C, which every copy
    computes.
    """
    return WholeCrc(declared_crc(task.source.hashes))


def target_facts(key: str) -> Steps[ObjectFacts | None]:
    """The target's object as it is now."""
    return _facts((yield ReadTargetFacts(key)))


def target_properties(task: CopyTask, facts: ObjectFacts) -> Steps[bytes]:
    """The digest of the properties that an object of the target has.

    Raises:
        CopyFailedError: it is gone.
    """
    try:
        answer = yield ReadTargetProperties(facts)
    except ObjectMissingError as error:
        raise target_changed(task.key) from error
    assert isinstance(answer, ObjectProperties)
    return task.crossing.digest(answer)


def guard(task: CopyTask, *, is_guarded: bool) -> Steps[WriteCondition]:
    """The condition of a write. Where the store checks none, the target is looked at
    once more instead.

    Raises:
        CopyFailedError: the target is not the object that was listed.
    """
    if is_guarded:
        return WriteCondition(
            absent=task.target is None, etag=task.target.etag if task.target else ""
        )
    now = yield from target_facts(task.key)
    if not is_same_object(now, task.target):
        raise target_changed(task.key)
    return WriteCondition()


def check_answer(task: CopyTask, facts: ObjectFacts, hashes: tuple[ContentHash, ...]) -> None:
    """Compare what the target says with what was sent.

    Raises:
        CopyFailedError: they differ.
    """
    sent = {one.algorithm: one.digest for one in hashes}
    wrong = [
        one.algorithm.value
        for one in facts.hashes
        if sent.get(one.algorithm, one.digest) != one.digest
    ]
    if facts.size_bytes != task.source.size_bytes:
        wrong.append("size")
    if wrong:
        raise CopyFailedError(
            FailureReason.TARGET_DISAGREES,
            f"{task.key}: the target has another {' and '.join(wrong)} than what was sent",
        )


def check_source(now: ObjectFacts, hashes: tuple[ContentHash, ...]) -> None:
    """Compare what was read of the source with what its store declares.

    Raises:
        CopyFailedError: it has other hashes.
    """
    read = {one.algorithm: one.digest for one in hashes}
    for one in now.hashes:
        if read.get(one.algorithm, one.digest) != one.digest:
            raise CopyFailedError(
                FailureReason.SOURCE_DISAGREES,
                f"{now.key}: the source declares another {one.algorithm.value} than what was read"
                " of it has",
            )


def target_changed(key: str) -> CopyFailedError:
    """Somebody else wrote the key."""
    return CopyFailedError(
        FailureReason.TARGET_CHANGED, f"{key} was changed at the target by somebody else"
    )


def is_same_object(now: ObjectFacts | None, listed: ObjectFacts | None) -> bool:
    """Whether a key is as it was, as far as the store says."""
    if now is None or listed is None:
        return now is listed
    return same_stamp(now, listed)


def _facts(answer: Answer) -> ObjectFacts | None:
    assert answer is None or isinstance(answer, ObjectFacts)
    return answer

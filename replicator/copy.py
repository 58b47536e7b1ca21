"""Copy one object: small in one request, large in parts, resumed at the part.

The source is pinned: the same version or ETag is asked for by each read, and before a
large object appears at the target the source's facts are read once more. The target is
never overwritten when it is not the object that was listed. What the target answers
must agree with what was sent, or the copy has failed.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from merkle.errors import ReconcileError
from proof.item import ContentHash, HashAlgorithm
from replicator.copy_requests import (
    AbortUpload,
    Answer,
    BeginUpload,
    CompleteUpload,
    CopyFailedError,
    CopyResult,
    FailureReason,
    JoinPart,
    ListParts,
    ObjectStamp,
    PutObject,
    ReadRange,
    ReadSourceFacts,
    ReadSourceProperties,
    ReadTargetFacts,
    SavePart,
    SaveUpload,
    SentPart,
    StartPart,
    Steps,
    UploadRecord,
)
from replicator.crossing import Crossing
from replicator.hashing import ContentHasher, blake3_of, md5_of, parts_etag
from replicator.stores.port import (
    Capabilities,
    ObjectFacts,
    ObjectMissingError,
    ObjectProperties,
    PreconditionFailedError,
    StoreError,
    UploadedPart,
    UploadId,
    WriteCondition,
    same_stamp,
)
from replicator.windows import WindowHasher, WindowTable

PART_BYTES = 8 << 20
PARTS_MAX = 10_000
_MIB = 1 << 20
# Part sizes of common clients, tried in this order when an ETag says how many parts an
# object has: boto3 and the AWS tools, rclone, the least, s3cmd, Hadoop.
_USUAL_PART_BYTES = tuple(size * _MIB for size in (8, 5, 16, 15, 32, 64, 100, 128, 256, 512))
_MD5_DIGITS = 32


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Of one object: larger ones than `part_bytes` are sent in parts of at least that
    size, at most `parts_in_flight` at a time.
    """

    part_bytes: int = PART_BYTES
    parts_in_flight: int = 4


@dataclass(frozen=True, slots=True)
class CopyTask:
    """What to copy and what is known of it.

    `target` is the object to replace, None where the key must be absent. `upload` is
    what an earlier run left. `windows` and `content` describe the bytes of `target`, as
    the ledger knows them.
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

    @property
    def key(self) -> str:
        """The key at both sides."""
        return self.source.key


class SourceChangedError(StoreError):
    """The source is not the version that was being copied any more."""

    code = "source_changed"


CopyAttempt: TypeAlias = Callable[[CopyTask], Steps[CopyResult]]


def copy_object(task: CopyTask) -> Steps[CopyResult | None]:
    """Copy one object; None if the source was deleted meanwhile.

    Raises:
        CopyFailedError: it was not copied, or the target disagrees.
        ReconcileError: a request failed and may succeed in a later run, which resumes.
    """
    return (yield from with_restart(task, copy_once))


def with_restart(task: CopyTask, attempt: CopyAttempt) -> Steps[CopyResult | None]:
    """Try, and once more with fresh facts if the source changed meanwhile.

    Raises:
        CopyFailedError: it changed twice, or the attempt failed.
    """
    try:
        return (yield from attempt(task))
    except SourceChangedError:
        fresh = yield from source_facts(task.key)
    if fresh is None:
        return None
    try:
        return (yield from attempt(replace(task, source=fresh)))
    except SourceChangedError as error:
        raise CopyFailedError(
            FailureReason.SOURCE_CHANGED, f"{task.key} changed twice while it was copied"
        ) from error


def copy_once(task: CopyTask) -> Steps[CopyResult]:
    """Copy this version of the source.

    Raises:
        SourceChangedError: the source has another version by now.
    """
    properties = yield from read_properties(task)
    if task.source.size_bytes <= task.limits.part_bytes:
        if task.upload is not None:
            yield from drop_upload(task.key, task.upload)
        return (yield from _copy_small(task, properties))
    try:
        return (yield from copy_large(task, properties))
    except ObjectMissingError:
        # Somebody aborted our upload: its parts are gone, and the next one begins anew.
        return (yield from copy_large(replace(task, upload=None), properties))


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
    properties = task.crossing.of(answer)
    length = sum(len(name.encode()) + len(text.encode()) for name, text in properties.metadata)
    if length > task.capabilities.metadata_bytes_max:
        raise CopyFailedError(
            FailureReason.UNSUPPORTED,
            f"{task.key} has {length} bytes of metadata; the target keeps up to"
            f" {task.capabilities.metadata_bytes_max}",
        )
    return properties


def _copy_small(task: CopyTask, properties: ObjectProperties) -> Steps[CopyResult]:
    body = yield from read_range(task, 0, task.source.size_bytes)
    hasher = ContentHasher()
    hasher.update(body)
    hashes = hasher.hashes()
    capabilities = task.capabilities
    is_guarded = (
        capabilities.creates_conditionally
        if task.target is None
        else capabilities.replaces_conditionally
    )
    condition = yield from guard(task, is_guarded=is_guarded)
    try:
        answer = yield PutObject(task.key, body, properties, condition)
        assert isinstance(answer, ObjectFacts)
        facts = answer
    except PreconditionFailedError as error:
        # The store may have written an earlier attempt and lost its answer.
        written = yield from target_facts(task.key)
        if written is None or not _is_what_was_sent(written, task.target, hashes, hasher.md5.hex()):
            raise target_changed(task.key) from error
        facts = written
    check_answer(task, facts, hashes)
    return CopyResult(
        source=task.source,
        target=facts,
        hashes=hashes,
        properties=task.crossing.digest(properties),
        sent_bytes=len(body),
    )


def copy_large(task: CopyTask, properties: ObjectProperties) -> Steps[CopyResult]:
    """Copy in parts; those that an earlier run has sent are proven and kept.

    Raises:
        SourceChangedError: the source has another version by now.
        ObjectMissingError: the upload is gone.
    """
    digest = task.crossing.digest(properties)
    part_bytes = part_bytes_of(task.source, task.limits.part_bytes)
    resumed = yield from _resume(task, digest, part_bytes)
    if resumed is None:
        upload = yield from begin_upload(task, properties, part_bytes)
        held = dict[int, UploadedPart]()
        sent = dict[int, SentPart]()
    else:
        upload, held, sent = resumed
    hasher = ContentHasher()
    windows = WindowHasher(task.window_key, task.source.size_bytes)
    transfer = PartTransfer(task, upload)
    try:
        for number, (first, end) in enumerate(_ranges(task.source.size_bytes, part_bytes), 1):
            body = yield from read_range(task, first, end)
            hasher.update(body)
            windows.update(body)
            part = held.get(number)
            if part is not None and _is_held(task.capabilities, part, sent.get(number), body):
                transfer.parts[number] = part
            else:
                yield from transfer.send(number, body)
        yield from transfer.join_all()
        facts = yield from complete_upload(task, upload, transfer, properties)
    except SourceChangedError:
        yield from transfer.abandon()
        raise
    except CopyFailedError as error:
        if error.reason is FailureReason.TARGET_CHANGED:
            yield from transfer.abandon()
        raise
    check_answer(task, facts, hasher.hashes())
    return CopyResult(
        source=task.source,
        target=facts,
        hashes=hasher.hashes(),
        properties=digest,
        sent_bytes=transfer.sent_bytes,
        windows=windows.table(),
    )


class PartTransfer:
    """The parts of one upload: those that the target has, and how many are on their
    way.
    """

    def __init__(self, task: CopyTask, upload: UploadId) -> None:
        self._task = task
        self._upload = upload
        self._on_their_way = dict[int, tuple[bytes, int]]()
        self.parts = dict[int, UploadedPart]()
        self.sent_bytes = 0

    def send(self, number: int, body: bytes) -> Steps[None]:
        """Start a part; wait for others first where too many are on their way."""
        while len(self._on_their_way) >= self._task.limits.parts_in_flight:
            yield from self._join()
        yield StartPart(self._task.key, self._upload, number, body)
        self._on_their_way[number] = (blake3_of(body), len(body))

    def join_all(self) -> Steps[None]:
        """Wait until the target has acknowledged every part."""
        while self._on_their_way:
            yield from self._join()

    def abandon(self) -> Steps[None]:
        """Give the upload up."""
        while self._on_their_way:
            # The parts are thrown away with the upload, however they ended.
            with suppress(ReconcileError):
                yield JoinPart()
            self._on_their_way.popitem()
        yield AbortUpload(self._task.key, self._upload)
        yield SaveUpload(self._task.key, None)

    def _join(self) -> Steps[None]:
        answer = yield JoinPart()
        assert isinstance(answer, UploadedPart)
        blake3, length_bytes = self._on_their_way.pop(answer.number)
        if answer.size_bytes != length_bytes:
            raise CopyFailedError(
                FailureReason.TARGET_DISAGREES,
                f"{self._task.key}: part {answer.number} has {answer.size_bytes} bytes at the"
                f" target; {length_bytes} were sent",
            )
        self.parts[answer.number] = answer
        self.sent_bytes += length_bytes
        yield SavePart(self._task.key, SentPart(answer, blake3))


def begin_upload(task: CopyTask, properties: ObjectProperties, part_bytes: int) -> Steps[UploadId]:
    """Begin an upload that a later run will find, whenever this one is killed."""
    record = yield from record_upload(task, properties, part_bytes)
    answer = yield BeginUpload(task.key, properties)
    assert isinstance(answer, str)
    upload = UploadId(answer)
    yield SaveUpload(task.key, replace(record, upload=upload))
    return upload


def record_upload(
    task: CopyTask, properties: ObjectProperties, part_bytes: int
) -> Steps[UploadRecord]:
    """Record that an upload is about to begin."""
    record = UploadRecord(
        upload=None,
        source=ObjectStamp.of(task.source),
        target=ObjectStamp.of(task.target) if task.target else None,
        properties=task.crossing.digest(properties),
        part_bytes=part_bytes,
    )
    yield SaveUpload(task.key, record)
    return record


def drop_upload(key: str, record: UploadRecord) -> Steps[None]:
    """Abort an upload that cannot be continued."""
    # Without an ID the run was killed while it began: a whole copy has no parts then.
    yield AbortUpload(key, record.upload, with_parts=not record.is_whole)
    yield SaveUpload(key, None)


def complete_upload(
    task: CopyTask, upload: UploadId, transfer: PartTransfer, properties: ObjectProperties
) -> Steps[ObjectFacts]:
    """Check both sides once more, and make the object from its parts.

    Raises:
        SourceChangedError: the source has another version by now.
        CopyFailedError: the target changed meanwhile.
    """
    now = yield from source_facts(task.key)
    if now is None or not same_stamp(now, task.source):
        raise SourceChangedError(f"{task.key} changed before its copy was complete")
    parts = tuple(part for _, part in sorted(transfer.parts.items()))
    is_guarded = task.capabilities.completes_conditionally
    condition = yield from guard(task, is_guarded=is_guarded)
    try:
        answer = yield CompleteUpload(task.key, upload, parts, properties, condition)
    except (PreconditionFailedError, ObjectMissingError) as error:
        # The store may have completed an earlier attempt and lost its answer.
        written = yield from target_facts(task.key)
        etags = _multipart_etags(parts)
        if written is not None and _is_written_by(written, task, etags):
            return written
        if isinstance(error, ObjectMissingError):
            raise
        raise target_changed(task.key) from error
    assert isinstance(answer, ObjectFacts)
    return answer


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
    if not _is_same(now, task.target):
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


def read_range(task: CopyTask, first: int, end: int) -> Steps[bytes]:
    """Bytes of just this version.

    Raises:
        SourceChangedError: the source has another version by now.
    """
    try:
        answer = yield ReadRange(task.source, first, end)
    except (PreconditionFailedError, ObjectMissingError) as error:
        raise SourceChangedError(f"{task.key} changed while it was read") from error
    assert isinstance(answer, bytes)
    assert len(answer) == end - first
    return answer


def source_facts(key: str) -> Steps[ObjectFacts | None]:
    """The source's object as it is now."""
    return _facts((yield ReadSourceFacts(key)))


def target_facts(key: str) -> Steps[ObjectFacts | None]:
    """The target's object as it is now."""
    return _facts((yield ReadTargetFacts(key)))


def part_bytes_of(source: ObjectFacts, part_bytes_min: int) -> int:
    """The size of all parts but the last: that of the source's own parts where its ETag
    allows to guess it, so that both ETags agree; else as small as PARTS_MAX allows.
    """
    least = -(-source.size_bytes // PARTS_MAX)
    _, dash, count = source.etag.strip('"').rpartition("-")
    if dash and count.isdigit():
        for size in _USUAL_PART_BYTES:
            if size >= part_bytes_min and -(-source.size_bytes // size) == int(count):
                return size
    return part_bytes_min if least <= part_bytes_min else -(-least // _MIB) * _MIB


def target_changed(key: str) -> CopyFailedError:
    """Somebody else wrote the key."""
    return CopyFailedError(
        FailureReason.TARGET_CHANGED, f"{key} was changed at the target by somebody else"
    )


def _resume(
    task: CopyTask, digest: bytes, part_bytes: int
) -> Steps[tuple[UploadId, dict[int, UploadedPart], dict[int, SentPart]] | None]:
    """The upload of an earlier run with the parts that the target has, if it was of
    this very source; any other one is aborted.
    """
    record = task.upload
    if record is None:
        return None
    replaces = record.target.facts(task.key) if record.target else None
    is_same = (
        record.source.agrees(task.source)
        and _is_same(replaces, task.target)
        and (record.properties, record.part_bytes) == (digest, part_bytes)
    )
    if record.upload is None or not is_same:
        yield from drop_upload(task.key, record)
        return None
    try:
        answer = yield ListParts(task.key, record.upload)
    except ObjectMissingError:
        yield SaveUpload(task.key, None)
        return None
    assert isinstance(answer, tuple)
    held = {part.number: part for part in answer}
    return record.upload, held, {one.part.number: one for one in record.sent}


def _is_held(
    capabilities: Capabilities, part: UploadedPart, sent: SentPart | None, body: bytes
) -> bool:
    """Whether a part that the target lists has these very bytes: by our own record of
    it, or by an MD5 where the store's ETags are MD5s.
    """
    if part.size_bytes != len(body):
        return False
    if sent is not None and sent.part == part:
        return sent.blake3 == blake3_of(body)
    return declares_md5(capabilities) and part.etag.strip('"') == md5_of(body).hex()


def declares_md5(capabilities: Capabilities) -> bool:
    """Whether the store's ETags of single parts are MD5s."""
    return HashAlgorithm.MD5.value in capabilities.whole_hashes


def _is_what_was_sent(
    written: ObjectFacts,
    before: ObjectFacts | None,
    hashes: tuple[ContentHash, ...],
    md5: str,
) -> bool:
    """Whether an object that we did not expect is our own write, whose answer was lost:
    new since the listing, and with a hash or an ETag of what was sent.
    """
    if _is_same(written, before):
        return False
    return bool(set(written.hashes) & set(hashes)) or written.etag.strip('"') == md5


def _is_written_by(written: ObjectFacts, task: CopyTask, etags: frozenset[str]) -> bool:
    """Whether an object is the one that our upload made, by the ETag of its parts."""
    if _is_same(written, task.target):
        return False
    return written.size_bytes == task.source.size_bytes and written.etag.strip('"') in etags


def _multipart_etags(parts: tuple[UploadedPart, ...]) -> frozenset[str]:
    """The ETags that stores give an object of these parts."""
    texts = [part.etag.strip('"') for part in parts]
    as_text = f"{md5_of(''.join(texts).encode()).hex()}-{len(parts)}"
    if all(len(text) == _MD5_DIGITS and not set(text) - set("0123456789abcdef") for text in texts):
        return frozenset({as_text, parts_etag([bytes.fromhex(text) for text in texts])})
    return frozenset({as_text})


def _ranges(size_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    for first in range(0, size_bytes, part_bytes):
        yield first, min(first + part_bytes, size_bytes)


def _facts(answer: Answer) -> ObjectFacts | None:
    assert answer is None or isinstance(answer, ObjectFacts)
    return answer


def _is_same(now: ObjectFacts | None, listed: ObjectFacts | None) -> bool:
    """Whether a key is as it was, as far as the store says."""
    if now is None or listed is None:
        return now is listed
    return same_stamp(now, listed)

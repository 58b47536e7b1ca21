"""Uploads in parts that outlive a killed run.

An upload is recorded before it begins and each part after the target acknowledged it. A
later run proves the parts that the target still has against the source, and sends only
the others.
"""

from contextlib import suppress
from dataclasses import replace

from merkle.errors import ReconcileError
from proof.item import HashAlgorithm
from replicator.copy_requests import (
    AbortUpload,
    BeginUpload,
    CompleteUpload,
    CopyFailedError,
    CopyResult,
    FailureReason,
    JoinPart,
    ListParts,
    ObjectStamp,
    PutProperties,
    SavePart,
    SaveUpload,
    SentPart,
    StartPart,
    Steps,
    UploadRecord,
)
from replicator.copy_task import (
    CopyTask,
    SourceChangedError,
    guard,
    is_same_object,
    read_range,
    source_facts,
    target_changed,
    target_facts,
    target_properties,
)
from replicator.crossing import differ_in_tags_only
from replicator.hashing import ContentHasher, blake3_of, md5_of, parts_etag
from replicator.stores.port import (
    Capabilities,
    ObjectFacts,
    ObjectMissingError,
    ObjectProperties,
    PreconditionFailedError,
    UploadedPart,
    UploadId,
    same_stamp,
)
from replicator.windows import WindowHasher

_MD5_DIGITS = 32


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
    # Without an ID it has no parts. Looking for it could find those of others.
    if record.upload is not None:
        yield AbortUpload(key, record.upload)
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
            return (yield from _with_properties(task, written, properties))
        if isinstance(error, ObjectMissingError):
            raise
        raise target_changed(task.key) from error
    assert isinstance(answer, ObjectFacts)
    return answer


def resume_upload(
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
        and is_same_object(replaces, task.target)
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


def adopt_finished(task: CopyTask, properties: ObjectProperties) -> Steps[CopyResult | None]:
    """What an earlier run has brought to the target, if it was killed between the end
    of its upload and its record of it; None if that is not known.

    The object has the ETag that the parts of that upload give, and they were of this
    very source; what was sent is compared with the source once more.

    Raises:
        SourceChangedError: the source has another version by now.
    """
    record, target, digest = task.upload, task.target, task.crossing.digest(properties)
    if record is None or target is None or record.properties != digest:
        return None
    parts = tuple(one.part for one in record.sent)
    is_ours = (
        bool(parts)
        and [part.number for part in parts] == list(range(1, len(parts) + 1))
        and sum(part.size_bytes for part in parts) == task.source.size_bytes == target.size_bytes
        and target.etag.strip('"') in _multipart_etags(parts)
        and record.source.agrees(task.source)
        and not (record.target is not None and record.target.agrees(target))
    )
    if not is_ours:
        return None
    hasher = ContentHasher()
    windows = WindowHasher(task.window_key, task.source.size_bytes)
    first = 0
    for one in record.sent:
        end = first + one.part.size_bytes
        is_sent = bool(one.blake3)
        # Parts that were copied inside the target may be as large as the object.
        for at in range(first, end, end - first if is_sent else task.limits.part_bytes):
            body = yield from read_range(
                task, at, end if is_sent else min(at + task.limits.part_bytes, end)
            )
            if is_sent and blake3_of(body) != one.blake3:
                return None
            hasher.update(body)
            windows.update(body)
        first = end
    facts = yield from _with_properties(task, target, properties)
    return CopyResult(
        source=task.source,
        target=facts,
        hashes=hasher.hashes(),
        properties=digest,
        sent_bytes=0,
        windows=windows.table(),
    )


def is_held(
    capabilities: Capabilities, part: UploadedPart, sent: SentPart | None, body: bytes
) -> bool:
    """Whether a part that the target lists has these very bytes: by our own record of
    it, or by an MD5 where the store's ETags are MD5s.
    """
    if part.size_bytes != len(body):
        return False
    if sent is not None and sent.part == part:
        return sent.blake3 == blake3_of(body)
    return _declares_md5(capabilities) and part.etag.strip('"') == md5_of(body).hex()


def _with_properties(
    task: CopyTask, written: ObjectFacts, properties: ObjectProperties
) -> Steps[ObjectFacts]:
    """An object that our upload has made, with these properties: some stores take the
    tags only after it exists, and what came between may have ended the request.
    """
    ours, theirs = task.crossing.digest(properties), (yield from target_properties(task, written))
    if ours == theirs:
        return written
    try:
        answer = yield PutProperties(written, properties, differ_in_tags_only(ours, theirs))
    except (PreconditionFailedError, ObjectMissingError) as error:
        raise target_changed(task.key) from error
    assert isinstance(answer, ObjectFacts)
    return answer


def _declares_md5(capabilities: Capabilities) -> bool:
    """Whether the store's ETags of single parts are MD5s."""
    return HashAlgorithm.MD5.value in capabilities.whole_hashes


def _is_written_by(written: ObjectFacts, task: CopyTask, etags: frozenset[str]) -> bool:
    """Whether an object is the one that our upload made, by the ETag of its parts."""
    if is_same_object(written, task.target):
        return False
    return written.size_bytes == task.source.size_bytes and written.etag.strip('"') in etags


def _multipart_etags(parts: tuple[UploadedPart, ...]) -> frozenset[str]:
    """The ETags that stores give an object of these parts."""
    texts = [part.etag.strip('"') for part in parts]
    as_text = f"{md5_of(''.join(texts).encode()).hex()}-{len(parts)}"
    if all(len(text) == _MD5_DIGITS and not set(text) - set("0123456789abcdef") for text in texts):
        return frozenset({as_text, parts_etag([bytes.fromhex(text) for text in texts])})
    return frozenset({as_text})

"""Uploads in parts that outlive a killed run.

An upload is recorded before it begins and each part after the target acknowledged it. A
later run proves the parts that the target still has against the source, and sends only
the others.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from merkle.checksum import Buffer
from merkle.errors import ReconcileError
from proof.item import ContentHash
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
    StreamPart,
    UploadRecord,
)
from replicator.copy_task import (
    CopyTask,
    SourceChangedError,
    check_source,
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
from replicator.stores.capabilities import Capabilities
from replicator.stores.errors import (
    DigestMismatchError,
    ObjectMissingError,
    PreconditionFailedError,
    StoreError,
)
from replicator.stores.port import ObjectFacts, ObjectProperties, UploadedPart, UploadId
from replicator.stores.stamps import same_stamp
from replicator.windows import WindowHasher

_MD5_DIGITS = 32


class PartTransfer:
    """The parts of one upload: those that the target has, and the one on its way.

    The next part is sent once the target has acknowledged the last. So whatever is cut
    or killed, no more than one part crosses twice: what the target has not acknowledged
    may have to be sent again, and a store whose ETags prove nothing cannot even show
    that it has it. `send` takes a part from memory, while the source is read on;
    `stream` sends it as it is read.

    Without `with_digest` no part is proven as it is sent; `has_etag` proves all.
    """

    def __init__(self, task: CopyTask, upload: UploadId, *, with_digest: bool) -> None:
        self._task = task
        self.upload = upload
        self.with_digest = with_digest
        self._on_its_way: tuple[int, bytes, int] | None = None
        self.parts = dict[int, UploadedPart]()
        self.sent_bytes = 0

    def send(self, number: int, body: memoryview) -> Steps[None]:
        """Start a part, once the one before it is acknowledged."""
        yield from self.join()
        # Before it is on its way: then its memory may be another part's at any moment.
        blake3 = blake3_of(body) if self.with_digest else b""
        yield StartPart(self._task.key, self.upload, number, body, self.with_digest)
        self._on_its_way = number, blake3, body.nbytes

    def has_etag(self, etag: str) -> bool:
        """Whether the parts that the target has make an object of this ETag, which is
        one of MD5s of parts: then they are the bytes of which it was made.
        """
        etags = [part.etag.strip('"') for _, part in sorted(self.parts.items())]
        return all(map(_is_md5, etags)) and etag == parts_etag([*map(bytes.fromhex, etags)])

    def join(self) -> Steps[None]:
        """Wait until the target has acknowledged what was sent."""
        if self._on_its_way is None:
            return
        (number, blake3, length_bytes), self._on_its_way = self._on_its_way, None
        answer = yield JoinPart()
        assert isinstance(answer, UploadedPart)
        yield from self._acknowledged(number, answer, length_bytes, blake3)

    def stream(
        self, number: int, first: int, end: int, take: Callable[[Buffer], None]
    ) -> Steps[bool]:
        """Send a part as it is read; False where it must be sent by `send`, because the
        link was cut or a side did not answer. `take` may have got some of it then.

        Raises:
            SourceChangedError: the source has another version by now.
        """
        yield from self.join()
        source = self._task.source
        request = StreamPart(source, self.upload, number, first, end, source.size_bytes, take)
        try:
            answer = yield request
        except StoreError as error:
            if error.retryable:
                return False
            raise
        assert isinstance(answer, UploadedPart)
        yield from self._acknowledged(number, answer, end - first, b"")
        return True

    def _acknowledged(
        self, number: int, answer: UploadedPart, length_bytes: int, blake3: bytes
    ) -> Steps[None]:
        """Take in that the target has a part."""
        assert answer.number == number
        if answer.size_bytes != length_bytes:
            raise CopyFailedError(
                FailureReason.TARGET_DISAGREES,
                f"{self._task.key}: part {number} has {answer.size_bytes} bytes at the"
                f" target; {length_bytes} were sent",
            )
        self.parts[number] = answer
        self.sent_bytes += length_bytes
        yield SavePart(self._task.key, SentPart(answer, blake3))

    def abandon(self) -> Steps[None]:
        """Give the upload up."""
        if self._on_its_way is not None:
            self._on_its_way = None
            # The part is thrown away with the upload, however it ended.
            with suppress(ReconcileError):
                yield JoinPart()
        yield AbortUpload(self._task.key, self.upload)
        yield SaveUpload(self._task.key, None)


def _begin_upload(task: CopyTask, properties: ObjectProperties, part_bytes: int) -> Steps[UploadId]:
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
        properties=_upload_digest(task, properties),
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
    task: CopyTask,
    transfer: PartTransfer,
    properties: ObjectProperties,
    whole: ContentHash | None,
    hashes: tuple[ContentHash, ...] = (),
) -> Steps[ObjectFacts]:
    """Check both sides once more, and make the object from its parts. Where the target
    declares a CRC of the whole object, it compares that with `whole`. Where the source
    declares one of `hashes`, which are of what was read of it, it must be equal.

    Raises:
        SourceChangedError: the source has another version by now.
        CopyFailedError: the target changed meanwhile, or the source declares another
            hash.
        DigestMismatchError: the parts are other bytes than `whole` is the hash of. They
            are given up.
    """
    now = yield from source_facts(task.key)
    if now is None or not same_stamp(now, task.source):
        raise SourceChangedError(f"{task.key} changed before its copy was complete")
    check_source(now, hashes)
    parts = tuple(part for _, part in sorted(transfer.parts.items()))
    is_guarded = task.capabilities.completes_conditionally
    condition = yield from guard(task, is_guarded=is_guarded)
    try:
        answer = yield CompleteUpload(
            task.key, transfer.upload, parts, properties, condition, whole
        )
    except DigestMismatchError:
        # One of them is wrong, and nobody knows which.
        yield from transfer.abandon()
        raise
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


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """An upload to be continued: the parts that the target lists, and those of them
    that an earlier run recorded, by number.
    """

    upload: UploadId
    held: dict[int, UploadedPart] = field(default_factory=dict)
    sent: dict[int, SentPart] = field(default_factory=dict)

    def take_over(
        self, task: CopyTask, number: int, body: memoryview
    ) -> Steps[UploadedPart | None]:
        """A part that need not be sent: the target has it with these very bytes."""
        part, sent = self.held.get(number), self.sent.get(number)
        if part is None or not _is_held(task.capabilities, part, sent, body):
            return None
        if sent is None or sent.part != part or not sent.blake3:
            yield SavePart(task.key, SentPart(part, blake3_of(body)))
        return part


def open_upload(task: CopyTask, properties: ObjectProperties, part_bytes: int) -> Steps[OpenUpload]:
    """The upload of an earlier run with the parts that the target has, if it was of
    this very source; any other one is aborted, and a new one is begun.
    """
    resumed = yield from _resume_upload(task, properties, part_bytes)
    if resumed is not None:
        return resumed
    return OpenUpload((yield from _begin_upload(task, properties, part_bytes)))


def _resume_upload(
    task: CopyTask, properties: ObjectProperties, part_bytes: int
) -> Steps[OpenUpload | None]:
    record = task.upload
    if record is None:
        return None
    replaces = record.target.facts(task.key) if record.target else None
    begun_as = _upload_digest(task, properties), part_bytes
    is_same = (
        record.source.agrees(task.source)
        and is_same_object(replaces, task.target)
        and (record.properties, record.part_bytes) == begun_as
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
    return OpenUpload(record.upload, held, {one.part.number: one for one in record.sent})


def adopt_finished(task: CopyTask, properties: ObjectProperties) -> Steps[CopyResult | None]:
    """What an earlier run has brought to the target, if it was killed between the end
    of its upload and its record of it; None if that is not known.

    The object has the ETag that the parts of that upload give, and they were of this
    very source; what was sent is compared with the source once more.

    Raises:
        SourceChangedError: the source has another version by now.
    """
    record, target = task.upload, task.target
    if record is None or target is None:
        return None
    if record.properties != _upload_digest(task, properties):
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
        is_sent = bool(one.blake3) or record.is_whole
        # Parts that were copied inside the target may be as large as the object.
        for at in range(first, end, end - first if is_sent else task.limits.part_bytes):
            body = yield from read_range(
                task,
                at,
                end if is_sent else min(at + task.limits.part_bytes, end),
                until=task.source.size_bytes,
            )
            if is_sent and not _is_held(task.capabilities, one.part, one, body):
                return None
            hasher.update(body)
            windows.update(body)
        first = end
    facts = yield from _with_properties(task, target, properties)
    return CopyResult(
        source=task.source,
        target=facts,
        hashes=hasher.hashes(),
        properties=task.crossing.digest(properties),
        sent_bytes=0,
        windows=windows.table(),
    )


def _is_held(
    capabilities: Capabilities, part: UploadedPart, sent: SentPart | None, body: memoryview
) -> bool:
    """Whether a part that the target lists has these very bytes: by our own record of
    it, or by an MD5 where the store's ETags are MD5s.
    """
    if part.size_bytes != body.nbytes:
        return False
    if sent is not None and sent.part == part and sent.blake3:
        return sent.blake3 == blake3_of(body)
    # Sent without a digest, or the run was killed before its answer was recorded.
    are_md5 = capabilities.part_etags_are_md5 is True
    return are_md5 and part.etag.strip('"') == md5_of(body).hex()


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


def _upload_digest(task: CopyTask, properties: ObjectProperties) -> bytes:
    """What an upload was begun with: only one that was begun so is continued."""
    digest, crc = task.crossing.digest(properties), task.capabilities.upload_crc
    return blake3_of(digest + crc.encode()) if crc else digest


def _is_written_by(written: ObjectFacts, task: CopyTask, etags: frozenset[str]) -> bool:
    """Whether an object is the one that our upload made, by the ETag of its parts."""
    if is_same_object(written, task.target):
        return False
    return written.size_bytes == task.source.size_bytes and written.etag.strip('"') in etags


def _multipart_etags(parts: tuple[UploadedPart, ...]) -> frozenset[str]:
    """The ETags that stores give an object of these parts."""
    texts = [part.etag.strip('"') for part in parts]
    as_text = f"{md5_of(''.join(texts).encode()).hex()}-{len(parts)}"
    if all(map(_is_md5, texts)):
        return frozenset({as_text, parts_etag([bytes.fromhex(text) for text in texts])})
    return frozenset({as_text})


def _is_md5(etag: str) -> bool:
    return len(etag) == _MD5_DIGITS and not set(etag) - set("0123456789abcdef")

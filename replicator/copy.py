"""Copy one object: small in one request, large in parts, resumed at the part.

Before a large object appears at the target, the source's facts are read once more.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from merkle.checksum import Buffer
from proof.item import ContentHash, HashAlgorithm
from replicator.copy_requests import (
    AclSeen,
    CopyFailedError,
    CopyResult,
    DoubtSourceEtags,
    FailureReason,
    PutObject,
    PutPieces,
    SaveUpload,
    Steps,
)
from replicator.copy_task import (
    CopyTask,
    SourceChangedError,
    check_answer,
    check_source,
    guard,
    is_same_object,
    read_properties,
    read_range,
    read_whole,
    recorded_crc,
    source_facts,
    target_changed,
    target_facts,
    target_properties,
    with_recorded_hashes,
)
from replicator.hashing import ContentHasher, WholeCrc, with_whole
from replicator.stores.errors import (
    DigestMismatchError,
    ObjectMissingError,
    PreconditionFailedError,
    StoreError,
)
from replicator.stores.port import ObjectFacts, ObjectProperties, WholeObject, WriteCondition
from replicator.uploads import (
    OpenUpload,
    PartTransfer,
    adopt_finished,
    complete_upload,
    drop_upload,
    open_upload,
    record_upload,
)
from replicator.windows import WindowHasher

PARTS_MAX = 10_000
_MIB = 1 << 20
# Part sizes of common clients, tried in this order when an ETag says how many parts an
# object has: boto3 and the AWS tools, rclone, the least, s3cmd, Hadoop.
_USUAL_PART_BYTES = tuple(size * _MIB for size in (8, 5, 16, 15, 32, 64, 100, 128, 256, 512))

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
        CopyFailedError: what was read is not what the source's store has recorded;
            nothing is written.
    """
    task = yield from with_recorded_hashes(task)
    is_small = task.source.size_bytes <= task.limits.part_bytes
    if is_small and task.upload is None:
        return (yield from _copy_small(task, (yield from read_whole(task))))
    properties = yield from read_properties(task)
    adopted = yield from adopt_finished(task, properties)
    if adopted is None and _may_send_pieces(task):
        adopted = yield from _copy_pieces(task, properties)
    if adopted is not None:
        return adopted
    if is_small and task.upload is not None:
        yield from drop_upload(task.key, task.upload)
        body = yield from read_range(task, 0, task.source.size_bytes)
        return (yield from _copy_small(task, WholeObject(properties, bytes(body))))
    try:
        return (yield from copy_large(task, properties))
    except ObjectMissingError:
        # Somebody aborted our upload: its parts are gone, and the next one begins anew.
        return (yield from copy_large(replace(task, upload=None), properties))


def _copy_small(task: CopyTask, whole: WholeObject) -> Steps[CopyResult]:
    properties, body = whole.properties, whole.body
    hasher, recorded = ContentHasher(), recorded_crc(task)
    hasher.update(body)
    recorded.update(body)
    hashes = with_whole(hasher.hashes(), recorded.hash())
    check_source(task.source, hashes)
    condition = yield from _put_condition(task)
    try:
        answer = yield PutObject(task.key, body, properties, condition)
        assert isinstance(answer, ObjectFacts)
        facts = answer
    except PreconditionFailedError as error:
        # The store may have written an earlier attempt and lost its answer.
        written = yield from target_facts(task.key)
        if written is None or not _is_what_was_sent(written, task.target, hashes, hasher.md5.hex()):
            raise target_changed(task.key) from error
        # Others may have written the same bytes, but hardly with the same properties.
        if (yield from target_properties(task, written)) != task.crossing.digest(properties):
            raise target_changed(task.key) from error
        facts = written
    check_answer(task, facts, hashes)
    seen = AclSeen.OTHER if properties.acl else AclSeen.DEFAULT
    made = _result(task, facts, hashes, properties, len(body))
    return replace(made, acl=seen if whole.has_acl else AclSeen.ASSUMED)


def _put_condition(task: CopyTask) -> Steps[WriteCondition]:
    """The condition of a PUT."""
    capabilities = task.capabilities
    is_guarded = (
        capabilities.creates_conditionally
        if task.target is None
        else capabilities.replaces_conditionally
    )
    return (yield from guard(task, is_guarded=is_guarded))


def _may_send_pieces(task: CopyTask) -> bool:
    """Whether to send an object as it is read: the target checks its MD5, the ETag of
    the source may be that, and no earlier attempt was cut.
    """
    is_in_one_put = re.fullmatch("[0-9a-f]{32}", task.source.etag.strip('"')) is not None
    return (
        task.sends_pieces
        and task.source_etags_prove
        and is_in_one_put
        and task.upload is None
        and task.limits.part_bytes < task.source.size_bytes <= task.limits.pieces_bytes_max
    )


def _copy_pieces(task: CopyTask, properties: ObjectProperties) -> Steps[CopyResult | None]:
    """Copy in one PUT, as it is read; None where it must go in parts.

    It is tried once. The record of it makes a later run send parts: a link that is cut
    more often than an object of this size crosses would never get one across.

    Raises:
        SourceChangedError: the source has another version by now.
    """
    md5, content = bytes.fromhex(task.source.etag.strip('"')), _Content(task, with_md5=False)
    condition = yield from _put_condition(task)
    yield from record_upload(task, properties, task.limits.part_bytes)
    try:
        answer = yield PutPieces(task.source, md5, properties, condition, content.update)
    except PreconditionFailedError as error:
        raise target_changed(task.key) from error
    except DigestMismatchError:
        # It is no MD5, or other bytes were read or have arrived. There is no object.
        yield DoubtSourceEtags()
        return None
    except SourceChangedError:
        yield SaveUpload(task.key, None)
        raise
    except StoreError as error:
        if error.retryable:
            return None
        raise
    assert isinstance(answer, ObjectFacts)
    # The target has computed it, of what has arrived.
    hashes = (ContentHash(HashAlgorithm.MD5, md5), *content.hashes())
    check_answer(task, answer, hashes)
    made = _result(task, answer, hashes, properties, task.source.size_bytes)
    return replace(made, windows=content.windows.table())


def copy_large(task: CopyTask, properties: ObjectProperties) -> Steps[CopyResult]:
    """Copy in parts; those that an earlier run has sent are proven and kept.

    An MD5 takes most of the CPU of a copy. None is computed where the target's ETags of
    the parts must make that of the source: both stores have computed them.

    Raises:
        SourceChangedError: the source has another version by now.
        ObjectMissingError: the upload is gone.
    """
    part_bytes = part_bytes_of(task.source, task.limits.part_bytes)
    opened = yield from open_upload(task, properties, part_bytes)
    may_prove = _may_prove_by_etag(task, part_bytes)
    transfer = PartTransfer(task, opened.upload, with_digest=not may_prove)
    try:
        content = yield from _send_parts(task, part_bytes, opened, transfer)
        if may_prove and not transfer.has_etag(task.source.etag.strip('"')):
            # The source's parts have other sizes, or one of ours has arrived changed:
            # each of them is proven by itself, and sent again if need be.
            yield DoubtSourceEtags()
            transfer.with_digest = True
            held = OpenUpload(opened.upload, dict(transfer.parts))
            content = yield from _send_parts(task, part_bytes, held, transfer)
        hashes = content.hashes()
        facts = yield from complete_upload(task, transfer, properties, content.whole.hash(), hashes)
    except SourceChangedError:
        yield from transfer.abandon()
        raise
    except DigestMismatchError as error:
        raise CopyFailedError(FailureReason.TARGET_DISAGREES, error.message) from error
    except CopyFailedError as error:
        if error.reason in (FailureReason.TARGET_CHANGED, FailureReason.SOURCE_DISAGREES):
            yield from transfer.abandon()
        raise
    check_answer(task, facts, hashes)
    made = _result(task, facts, hashes, properties, transfer.sent_bytes)
    return replace(made, windows=content.windows.table())


class _Content:
    """What is computed of all bytes of an object as they are read."""

    def __init__(self, task: CopyTask, *, with_md5: bool) -> None:
        self.hasher = ContentHasher(with_md5=with_md5)
        self.windows = WindowHasher(task.window_key, task.source.size_bytes)
        self.whole = WholeCrc(task.capabilities.upload_crc)
        self._recorded = recorded_crc(task)

    def checkpoint(self) -> Callable[[], None]:
        """What takes back all bytes that are added from now on."""
        parts = (self.hasher, self.windows, self.whole, self._recorded)
        undos = [one.checkpoint() for one in parts]

        def undo() -> None:
            for one in undos:
                one()

        return undo

    def hashes(self) -> tuple[ContentHash, ...]:
        """All hashes of the bytes so far."""
        found = with_whole(self.hasher.hashes(), self.whole.hash())
        return with_whole(found, self._recorded.hash())

    def update(self, body: Buffer) -> None:
        """Add the next bytes."""
        self.hasher.update(body)
        self.windows.update(body)
        self.whole.update(body)
        self._recorded.update(body)


def _send_parts(
    task: CopyTask, part_bytes: int, opened: OpenUpload, transfer: PartTransfer
) -> Steps[_Content]:
    """Read the source from its beginning, and send the parts that the target lacks."""
    # An object in parts has no MD5 of the whole that ours could be compared with.
    content = _Content(task, with_md5=not _part_count(task.source))
    # A CRC of each part goes before its bytes.
    streams = task.sends_pieces and not transfer.with_digest and not task.capabilities.upload_crc
    for number, (first, end) in enumerate(_ranges(task.source.size_bytes, part_bytes), 1):
        if streams and number not in opened.held:
            undo = content.checkpoint()
            if (yield from transfer.stream(number, first, end, content.update)):
                continue
            undo()
        body = yield from read_range(task, first, end, until=task.source.size_bytes)
        content.update(body)
        part = yield from opened.take_over(task, number, body)
        if part is not None:
            transfer.parts[number] = part
        else:
            yield from transfer.send(number, body)
    yield from transfer.join()
    return content


def _may_prove_by_etag(task: CopyTask, part_bytes: int) -> bool:
    """Whether the ETag of the source may prove all parts together: the target's ETags
    are the parts' MD5s, the source's may be made of such, and it has as many parts.
    """
    return (
        task.source_etags_prove
        and task.capabilities.part_etags_are_md5 is True
        and _part_count(task.source) == -(-task.source.size_bytes // part_bytes)
    )


def part_bytes_of(source: ObjectFacts, part_bytes_min: int) -> int:
    """The size of all parts but the last: that of the source's own parts where its ETag
    allows to guess it, so that both ETags agree; else as small as PARTS_MAX allows.
    """
    least = -(-source.size_bytes // PARTS_MAX)
    if count := _part_count(source):
        for size in _USUAL_PART_BYTES:
            if size >= part_bytes_min and -(-source.size_bytes // size) == count:
                return size
    return part_bytes_min if least <= part_bytes_min else -(-least // _MIB) * _MIB


def _part_count(source: ObjectFacts) -> int:
    """Of how many parts an object was made, by its ETag; 0 where it does not say."""
    _, dash, count = source.etag.strip('"').rpartition("-")
    # S3 takes 10,000 parts.
    is_count = len(count) <= 5 and count.isascii() and count.isdigit()
    return int(count) if dash and is_count else 0


def _result(
    task: CopyTask,
    facts: ObjectFacts,
    hashes: tuple[ContentHash, ...],
    properties: ObjectProperties,
    sent_bytes: int,
) -> CopyResult:
    digest = task.crossing.digest(properties)
    return CopyResult(task.source, facts, hashes, digest, sent_bytes)


def _is_what_was_sent(
    written: ObjectFacts,
    before: ObjectFacts | None,
    hashes: tuple[ContentHash, ...],
    md5: str,
) -> bool:
    """Whether an object that we did not expect is our own write, whose answer was lost:
    new since the listing, and with a hash or an ETag of what was sent.
    """
    if is_same_object(written, before):
        return False
    return bool(set(written.hashes) & set(hashes)) or written.etag.strip('"') == md5


def _ranges(size_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    for first in range(0, size_bytes, part_bytes):
        yield first, min(first + part_bytes, size_bytes)

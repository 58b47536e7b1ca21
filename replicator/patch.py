"""Send only what changed of a large object; the target copies the rest from itself.

The windows that the ledger kept of the last copy say where the source differs from what
the target holds. The object is then made anew from parts: ranges of the old object,
copied inside the target, and the changed bytes. Where the target wants parts of some
least size, a range is widened to it, or stitched (see the adapter of S3).
"""

import zlib
from dataclasses import dataclass, replace
from itertools import pairwise

from proof.item import ContentHash
from replicator.copy import copy_large, copy_once, with_restart
from replicator.copy_requests import (
    CopyFailedError,
    CopyPart,
    CopyResult,
    FailureReason,
    PutProperties,
    SavePart,
    SentPart,
    Steps,
    StitchObject,
)
from replicator.copy_task import (
    CopyTask,
    SourceChangedError,
    check_answer,
    check_source,
    read_properties,
    read_range,
    recorded_crc,
    source_facts,
    target_changed,
    target_facts,
    with_recorded_hashes,
)
from replicator.crossing import differ_in_tags_only
from replicator.hashing import ContentHasher, WholeCrc, with_whole
from replicator.stitching import BytePatch, StitchRefusal, plan_stitch
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError, StoreError
from replicator.stores.port import CopySource, ObjectFacts, ObjectProperties, UploadedPart
from replicator.stores.stamps import same_stamp
from replicator.uploads import (
    PartTransfer,
    adopt_finished,
    complete_upload,
    drop_upload,
    open_upload,
    record_upload,
)
from replicator.windows import ChangedRange, WindowHasher, WindowTable, changed_ranges

# S3's limits.
_COPIED_PART_BYTES_MAX = 1 << 30
_PARTS_MAX = 10_000
# A patch costs a request for each part, so that one of more than half of the object
# gains nothing.
_NEW_SHARE_MAX = 2
# What the requests of one stitched patch cost, and the most that is held in memory.
_STITCHED_PATCH_COST_BYTES = 14_000
_STITCHED_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class PatchPart:
    """A part of the object to be made: the bytes `first` to `end`, of the old object
    where `is_kept`, else of the source.
    """

    first: int
    end: int
    is_kept: bool


def patch_object(task: CopyTask) -> Steps[CopyResult | None]:
    """Bring a changed large object to the target by its changed windows, and whole
    where that is not possible. None if the source was deleted meanwhile.

    Raises:
        CopyFailedError: it was not copied, or the target disagrees.
        ReconcileError: a request failed and may succeed in a later run.
    """
    assert task.target is not None
    assert task.windows is not None
    return (yield from with_restart(task, _patch_once))


def put_properties(task: CopyTask) -> Steps[CopyResult | None]:
    """Replace the properties of an object whose bytes are equal; None if the source was
    deleted meanwhile.

    Raises:
        CopyFailedError: the target changed meanwhile.
    """
    assert task.target is not None
    return (yield from with_restart(task, _properties_once))


def patch_parts(
    size_bytes: int, changes: tuple[ChangedRange, ...], part_bytes_min: int, part_bytes: int
) -> tuple[PatchPart, ...]:
    """The parts of the object to be made, in order: every changed byte is new, and each
    part but the last has at least `part_bytes_min` bytes.
    """
    parts = list[PatchPart]()
    at = 0
    for change in changes:
        # What is new begins at the change, or before it where too little lies between.
        if change.first - at >= max(part_bytes_min, 1):
            parts.append(PatchPart(at, change.first, is_kept=True))
            at = change.first
        if parts and not parts[-1].is_kept:
            at = parts.pop().first
        end = max(change.new_end, min(at + part_bytes_min, size_bytes))
        if end > at:
            parts.append(PatchPart(at, end, is_kept=False))
        at = end
    if at < size_bytes:
        parts.append(PatchPart(at, size_bytes, is_kept=True))
    return tuple(piece for part in parts for piece in _pieces(part, part_bytes_min, part_bytes))


def _patch_once(task: CopyTask) -> Steps[CopyResult]:
    """Patch to this version of the source.

    Raises:
        SourceChangedError: the source has another version by now.
    """
    assert task.target is not None
    base_windows = task.windows
    assert base_windows is not None
    properties = yield from read_properties(task)
    adopted = yield from adopt_finished(task, properties)
    if adopted is not None:
        return adopted
    if task.source.size_bytes <= task.limits.part_bytes:
        return (yield from copy_once(task))
    if task.upload is not None and task.upload.is_whole:
        # An earlier run was sending the whole object, and has sent a part of it.
        return (yield from copy_once(task))
    task = yield from with_recorded_hashes(task)
    whole = yield from _read_whole(task, properties)
    changes = changed_ranges(base_windows, whole.windows)
    parts = _plan(task, changes) if changes else ()
    is_stitched = bool(changes) and _is_stitched(task, changes or (), parts)
    try:
        if parts and not is_stitched:
            return (yield from _send_patch(task, parts, whole))
        if task.upload is not None:
            yield from drop_upload(task.key, task.upload)
            task = replace(task, upload=None)
        if changes == () and set(whole.hashes) & set(task.content):
            return (yield from _same_bytes(task, whole))
        if is_stitched:
            return (yield from _stitch(task, changes or (), whole))
    except _PatchRefusedError:
        # It can be sent whole all the same.
        task = replace(task, upload=None)
    return (yield from copy_large(task, properties))


@dataclass(frozen=True, slots=True)
class _Whole:
    """What is known of the whole source after it was read; `crc` is by the algorithm
    that the target declares for uploads.
    """

    properties: ObjectProperties
    hashes: tuple[ContentHash, ...]
    windows: WindowTable
    crc: ContentHash | None


class _PatchRefusedError(StoreError):
    """The target does not copy these ranges; it can be sent the whole object."""

    code = "patch_refused"


def _plan(task: CopyTask, changes: tuple[ChangedRange, ...]) -> tuple[PatchPart, ...]:
    """The parts of the patch; none where the whole object is cheaper."""
    if not task.capabilities.copies_ranges:
        return ()
    size_bytes = task.source.size_bytes
    parts = patch_parts(
        size_bytes, changes, task.capabilities.part_bytes_min, task.limits.part_bytes
    )
    new_bytes = sum(part.end - part.first for part in parts if not part.is_kept)
    if len(parts) > _PARTS_MAX or new_bytes * _NEW_SHARE_MAX > size_bytes:
        return ()
    return parts


def _read_whole(task: CopyTask, properties: ObjectProperties) -> Steps[_Whole]:
    """Read the whole source.

    Raises:
        CopyFailedError: it is not what the source's store has recorded.
    """
    hasher, crc = ContentHasher(), WholeCrc(task.capabilities.upload_crc)
    recorded = recorded_crc(task)
    windows = WindowHasher(task.window_key, task.source.size_bytes)
    step = task.limits.part_bytes
    for first in range(0, task.source.size_bytes, step):
        end = min(first + step, task.source.size_bytes)
        body = yield from read_range(task, first, end, until=task.source.size_bytes)
        hasher.update(body)
        windows.update(body)
        crc.update(body)
        recorded.update(body)
    hashes = with_whole(with_whole(hasher.hashes(), crc.hash()), recorded.hash())
    check_source(task.source, hashes)
    return _Whole(properties, hashes, windows.table(), crc.hash())


def _same_bytes(task: CopyTask, whole: _Whole) -> Steps[CopyResult]:
    """The object was only touched: its properties cross, if they differ."""
    assert task.target is not None
    facts = task.target
    if task.crossing.digest(whole.properties) != task.properties:
        facts = yield from _replace_properties(task, whole.properties)
    return replace(_result(task, facts, whole, 0), properties_only=True)


def _properties_once(task: CopyTask) -> Steps[CopyResult]:
    properties = yield from read_properties(task)
    now = yield from source_facts(task.key)
    if now is None or not same_stamp(now, task.source):
        raise SourceChangedError(f"{task.key} changed while its properties were read")
    facts = yield from _replace_properties(task, properties)
    return CopyResult(
        source=task.source,
        target=facts,
        hashes=task.content,
        properties=task.crossing.digest(properties),
        sent_bytes=0,
        windows=task.windows,
        properties_only=True,
    )


def _replace_properties(task: CopyTask, properties: ObjectProperties) -> Steps[ObjectFacts]:
    assert task.target is not None
    tags_only = differ_in_tags_only(task.crossing.digest(properties), task.properties)
    try:
        answer = yield PutProperties(task.target, properties, tags_only)
    except (PreconditionFailedError, ObjectMissingError) as error:
        raise target_changed(task.key) from error
    assert isinstance(answer, ObjectFacts)
    if answer.size_bytes != task.target.size_bytes:
        raise CopyFailedError(
            FailureReason.TARGET_DISAGREES, f"{task.key}: its size changed with its properties"
        )
    return answer


def _send_patch(task: CopyTask, parts: tuple[PatchPart, ...], whole: _Whole) -> Steps[CopyResult]:
    base = task.target
    assert base is not None
    opened = yield from open_upload(task, whole.properties, _fingerprint(parts))
    transfer = PartTransfer(task, opened.upload, with_digest=True)
    try:
        for number, part in enumerate(parts, 1):
            if part.is_kept:
                source = CopySource(base.key, base.version, base.etag, part.first, part.end)
                # Once more in a run that resumes: hardly a byte of it crosses.
                answer = yield CopyPart(task.key, opened.upload, number, source)
                assert isinstance(answer, UploadedPart)
                transfer.parts[number] = answer
                yield SavePart(task.key, SentPart(answer, b""))
            else:
                body = yield from read_range(task, part.first, part.end)
                held = yield from opened.take_over(task, number, body)
                if held is not None:
                    transfer.parts[number] = held
                else:
                    yield from transfer.send(number, body)
        yield from transfer.join()
        yield from _check_base(task)
        facts = yield from complete_upload(task, transfer, whole.properties, whole.crc)
        check_answer(task, facts, whole.hashes)
    except StoreError as error:
        if not error.retryable:
            yield from transfer.abandon()
        raise _named(task, error) from error
    return _result(task, facts, whole, transfer.sent_bytes)


def _fingerprint(parts: tuple[PatchPart, ...]) -> int:
    """A number that stands for these parts in the record of their upload, below 0."""
    cuts = ",".join(f"{part.end}{'=' * part.is_kept}" for part in parts)
    return ~zlib.crc32(cuts.encode())


def _is_stitched(
    task: CopyTask, changes: tuple[ChangedRange, ...], parts: tuple[PatchPart, ...]
) -> bool:
    """Whether scratch objects at the target cost less than parts of the least size."""
    if not task.capabilities.copies_ranges or not task.capabilities.part_bytes_min:
        return False
    new_bytes = sum(change.new_end - change.first for change in changes)
    cost = new_bytes + _STITCHED_PATCH_COST_BYTES * len(changes)
    in_parts = sum(part.end - part.first for part in parts if not part.is_kept)
    return new_bytes <= _STITCHED_BYTES_MAX and cost < (in_parts or task.source.size_bytes)


def _stitch(task: CopyTask, changes: tuple[ChangedRange, ...], whole: _Whole) -> Steps[CopyResult]:
    base = task.target
    assert base is not None
    patches = list[BytePatch]()
    for change in changes:
        body = b""
        if change.new_end > change.first:
            body = bytes((yield from read_range(task, change.first, change.new_end)))
        patches.append(BytePatch(change.first, change.old_end - change.first, body))
    plan = plan_stitch(base.size_bytes, patches, part_bytes_min=task.capabilities.part_bytes_min)
    if isinstance(plan, StitchRefusal):
        raise _PatchRefusedError(f"{task.key}: {plan.value}")
    now = yield from source_facts(task.key)
    if now is None or not same_stamp(now, task.source):
        raise SourceChangedError(f"{task.key} changed before its copy was complete")
    yield from record_upload(task, whole.properties, 0)
    try:
        answer = yield StitchObject(base, plan, whole.properties, whole.crc)
    except StoreError as error:
        raise _named(task, error) from error
    assert isinstance(answer, ObjectFacts)
    check_answer(task, answer, whole.hashes)
    return _result(task, answer, whole, plan.sent_bytes)


def _named(task: CopyTask, error: StoreError) -> StoreError:
    """What the failure of a patch means for the object."""
    if isinstance(error, PreconditionFailedError):
        return target_changed(task.key)
    if error.retryable or isinstance(error, SourceChangedError | CopyFailedError):
        return error
    return _PatchRefusedError(f"{task.key}: {error.message}")


def _result(task: CopyTask, facts: ObjectFacts, whole: _Whole, sent_bytes: int) -> CopyResult:
    return CopyResult(
        source=task.source,
        target=facts,
        hashes=whole.hashes,
        properties=task.crossing.digest(whole.properties),
        sent_bytes=sent_bytes,
        windows=whole.windows,
    )


def _check_base(task: CopyTask) -> Steps[None]:
    """Some stores ignore the condition on what is copied: was it replaced meanwhile?"""
    assert task.target is not None
    if task.target.version:
        return
    now = yield from target_facts(task.key)
    if now is None or not same_stamp(now, task.target):
        raise target_changed(task.key)


def _pieces(part: PatchPart, part_bytes_min: int, part_bytes: int) -> list[PatchPart]:
    """The part in pieces that fit one request and are none too short."""
    step = _COPIED_PART_BYTES_MAX if part.is_kept else max(part_bytes, part_bytes_min)
    count = max((part.end - part.first) // step, 1)
    cuts = [part.first + step * number for number in range(count)] + [part.end]
    return [PatchPart(first, end, part.is_kept) for first, end in pairwise(cuts)]

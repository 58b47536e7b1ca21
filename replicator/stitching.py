"""Change byte ranges of a large object so that only the new bytes cross the link.

The new object is a multipart upload whose parts are copied inside the store, from the
old object wherever it is unchanged. Stores take parts below 5 MiB only as the last part
of an upload. A small patch therefore becomes the last part of a *scratch* object, whose
first part is 5 MiB or more of neighbouring bytes, and a range of the scratch object is
then copied as a part of the new one.

`plan_stitch` is pure: it turns patches into steps. `stitch` executes them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, assert_never

from proof.item import ContentHash
from replicator.stores.errors import PreconditionFailedError, StoreError
from replicator.stores.port import (
    CopySource,
    ObjectFacts,
    ObjectProperties,
    Store,
    UploadedPart,
    UploadId,
    WriteCondition,
)
from replicator.stores.stamps import same_stamp

# What S3 asks of every part but the last.
PART_BYTES_MIN = 5 << 20
# A copied part may have 5 GiB; smaller ones are copied side by side in the store.
_COPY_BYTES_MAX = 1 << 30
# Each patch costs some 7 requests; above this many, parts are sent instead.
PATCHES_MAX = 16


@dataclass(frozen=True, slots=True)
class BytePatch:
    """`data` stands in the new object for `old_length_bytes` bytes of the old one from
    `offset`.
    """

    offset: int
    old_length_bytes: int
    data: bytes


class StitchRefusal(Enum):
    """Why an object is not stitched; it is sent as a whole or in parts."""

    SMALL_BASE = "small_base"
    """Below 10 MiB sending costs less."""
    MANY_PATCHES = "many_patches"
    INVALID_PATCHES = "invalid_patches"
    """They are not in order, overlap, or reach beyond the end."""
    EMPTY_RESULT = "empty_result"
    """An upload has at least one byte."""


@dataclass(frozen=True, slots=True)
class NewBytes:
    """Bytes that are sent."""

    data: bytes

    @property
    def length_bytes(self) -> int:
        """How many."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Bytes `first` to `end` (exclusive) of scratch object number `scratch`, or of the
    old object where that is None.
    """

    scratch: int | None
    first: int
    end: int

    @property
    def length_bytes(self) -> int:
        """How many."""
        return self.end - self.first


Piece: TypeAlias = NewBytes | StoredRange


@dataclass(frozen=True, slots=True)
class MakeScratch:
    """Make scratch object `number` of two parts; later steps use no earlier one."""

    number: int
    first: Piece
    last: Piece


@dataclass(frozen=True, slots=True)
class AddPart:
    """Add the next part to the new object."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class StitchPlan:
    """The steps, in order, from an old object to the new one; sizes in bytes."""

    base_size_bytes: int
    size_bytes: int
    steps: tuple[MakeScratch | AddPart, ...]

    @property
    def sent_bytes(self) -> int:
        """Object bytes that cross the link."""
        pieces = [
            piece
            for step in self.steps
            for piece in ((step.piece,) if isinstance(step, AddPart) else (step.first, step.last))
        ]
        return sum(len(piece.data) for piece in pieces if isinstance(piece, NewBytes))


def plan_stitch(
    size_bytes: int,
    patches: Sequence[BytePatch],
    *,
    part_bytes_min: int = PART_BYTES_MIN,
    copy_bytes_max: int = _COPY_BYTES_MAX,
) -> StitchPlan | StitchRefusal:
    """How to make the new object from an old one of `size_bytes`.

    Patches ascend and do not overlap. Neighbours less than 7 kB apart cost less as one
    patch that repeats the bytes between them.
    """
    assert copy_bytes_max >= 2 * part_bytes_min
    if size_bytes < 2 * part_bytes_min:
        return StitchRefusal.SMALL_BASE
    if len(patches) > PATCHES_MAX:
        return StitchRefusal.MANY_PATCHES
    at = 0
    for patch in patches:
        if patch.offset < at or patch.old_length_bytes < 0:
            return StitchRefusal.INVALID_PATCHES
        at = patch.offset + patch.old_length_bytes
    if at > size_bytes:
        return StitchRefusal.INVALID_PATCHES
    pieces = _pieces(size_bytes, patches, part_bytes_min, copy_bytes_max)
    if not pieces:
        return StitchRefusal.EMPTY_RESULT
    result_bytes = sum(piece.length_bytes for piece in pieces)
    return StitchPlan(size_bytes, result_bytes, tuple(_Seam(part_bytes_min).steps(pieces)))


def stitch(
    store: Store,
    base: ObjectFacts,
    plan: StitchPlan,
    properties: ObjectProperties,
    whole: ContentHash | None = None,
) -> ObjectFacts:
    """Replace the object `base` by the one that the plan makes of it, with all these
    properties; whatever was made on the way is removed again. A store that declares
    CRCs of uploads compares `whole`, the hash of all bytes by its `upload_crc`.

    The base is pinned by its version. Where the store keeps none, it is looked at again
    before the new object appears: a change in that instant is caught only where the
    store completes conditionally. Whether the bytes are right is for the caller to
    check.

    Raises:
        PreconditionFailedError: the base is another object by now; nothing changed.
        StoreError: the store refused, or cannot stitch.
    """
    if store.scratch is None:
        raise StoreError(f"{store.address} cannot make parts from ranges of objects")
    if base.size_bytes != plan.base_size_bytes:
        raise PreconditionFailedError(f"{base.key} has {base.size_bytes} bytes, not as planned")
    made: list[ObjectFacts] = []
    try:
        return _execute(store, base, plan, properties, whole, store.scratch.new_key(), made)
    finally:
        # What is left here is removed by `clean`; the outcome is known all the same.
        with suppress(StoreError):
            store.scratch.discard(made)


class _Seam:
    """Turns pieces of any size into steps in which only last parts are small.

    `_held` is the part in the making. Its first `_filler_bytes` bytes are not part of
    the result: they only make a scratch object's first part large enough.
    """

    def __init__(self, part_bytes_min: int) -> None:
        self._min = part_bytes_min
        self._held: Piece | None = None
        self._filler_bytes = 0
        self._steps: list[MakeScratch | AddPart] = []
        self._scratches = 0

    def steps(self, pieces: Sequence[Piece]) -> list[MakeScratch | AddPart]:
        for number, piece in enumerate(pieces):
            self._take(piece, is_last=number == len(pieces) - 1)
        self._add_held()
        return self._steps

    def _take(self, piece: Piece, *, is_last: bool) -> None:
        is_short = piece.length_bytes < self._min and not is_last
        if self._held is not None:
            shown = self._held.length_bytes - self._filler_bytes
            if shown < self._min or is_short:
                rest = self._join_held(piece, shown)
                if rest is None:
                    return
                piece, is_short = rest, False
            self._add_held()
        self._held, self._filler_bytes = piece, 0
        if is_short:
            # At the start of the object: bytes in front that are never copied.
            self._join(StoredRange(None, 0, self._min), piece)
            self._filler_bytes = self._min

    def _join_held(self, piece: Piece, shown: int) -> Piece | None:
        """Put a piece, or the beginning of a large one, behind what is held; returns
        what is left of it.
        """
        assert self._held is not None
        taken = piece.length_bytes
        if shown < self._min:
            # Too short for a part of its own: fill it up, or take all.
            taken = self._min if taken >= 2 * self._min else taken
        elif shown >= 2 * self._min:
            # The smallest part is enough to carry the piece; what is before it is done.
            front, carrier = _cut(self._held, self._held.length_bytes - self._min)
            self._held = front
            self._add_held()
            self._held, self._filler_bytes = carrier, 0
        small, rest = _cut(piece, taken)
        self._join(self._held, small)
        return rest if rest.length_bytes else None

    def _join(self, first: Piece, last: Piece) -> None:
        self._steps.append(MakeScratch(self._scratches, first, last))
        self._held = StoredRange(self._scratches, 0, first.length_bytes + last.length_bytes)
        self._scratches += 1

    def _add_held(self) -> None:
        assert self._held is not None
        self._steps.append(AddPart(_cut(self._held, self._filler_bytes)[1]))


def _pieces(
    size_bytes: int, patches: Sequence[BytePatch], part_bytes_min: int, copy_bytes_max: int
) -> list[Piece]:
    """The new object, piece by piece; no piece is empty or too large for a copy."""
    pieces: list[Piece] = []
    at = 0
    for patch in (*patches, BytePatch(size_bytes, 0, b"")):
        while at < patch.offset:
            end = min(at + copy_bytes_max, patch.offset)
            if 0 < patch.offset - end < part_bytes_min:
                end -= part_bytes_min
            pieces.append(StoredRange(None, at, end))
            at = end
        at = patch.offset + patch.old_length_bytes
        if patch.data:
            pieces.append(NewBytes(patch.data))
    return pieces


def _cut(piece: Piece, at: int) -> tuple[Piece, Piece]:
    match piece:
        case NewBytes(data):
            return NewBytes(data[:at]), NewBytes(data[at:])
        case StoredRange(scratch, first, end):
            return StoredRange(scratch, first, first + at), StoredRange(scratch, first + at, end)
        case _:
            assert_never(piece)


def _execute(
    store: Store,
    base: ObjectFacts,
    plan: StitchPlan,
    properties: ObjectProperties,
    whole: ContentHash | None,
    scratch_key: str,
    made: list[ObjectFacts],
) -> ObjectFacts:
    # The same key each time: an upload may copy from the object that it replaces.
    sources: dict[int | None, ObjectFacts] = {None: base}
    anything = WriteCondition()
    with _upload(store, base.key, properties) as upload:
        parts: list[UploadedPart] = []
        for step in plan.steps:
            if isinstance(step, AddPart):
                parts.append(_add(store, base.key, upload, len(parts) + 1, step.piece, sources))
                continue
            with _upload(store, scratch_key, ObjectProperties()) as scratch:
                pair = [
                    _add(store, scratch_key, scratch, number, piece, sources)
                    for number, piece in enumerate((step.first, step.last), start=1)
                ]
                facts = store.upload_writer.complete(
                    scratch_key, scratch, pair, ObjectProperties(), anything
                )
            made.append(facts)
            sources[step.number] = facts
        if not base.version:
            now = store.reader.facts(base.key)
            if now is None or not same_stamp(now, base):
                raise PreconditionFailedError(f"{base.key} changed while it was stitched")
        return store.upload_writer.complete(
            base.key, upload, parts, properties, WriteCondition(etag=base.etag), whole
        )


@contextmanager
def _upload(store: Store, key: str, properties: ObjectProperties) -> Iterator[UploadId]:
    """An upload that is aborted if anything fails before it is completed."""
    upload = store.upload_writer.begin(key, properties)
    try:
        yield upload
    except BaseException:
        with suppress(StoreError):
            store.upload_writer.abort(key, upload)
        raise


def _add(
    store: Store,
    key: str,
    upload: UploadId,
    number: int,
    piece: Piece,
    sources: dict[int | None, ObjectFacts],
) -> UploadedPart:
    if isinstance(piece, NewBytes):
        return store.upload_writer.write_part(key, upload, number, piece.data)
    # No ETag: most stores ignore it here, and the base is looked at again at the end.
    source = sources[piece.scratch]
    return store.upload_writer.copy_part(
        key,
        upload,
        number,
        CopySource(source.key, source.version, "", piece.first, piece.end),
    )

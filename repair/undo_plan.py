"""What an undo of a job would put back, window by window: values and pure decisions.

A repair overwrote bytes that did not match their record, and kept them. An undo puts
them back, so it mostly replaces good bytes by bad ones on purpose: for whoever doubts
the repair, and wants the replica as it was. It may never cost the last good copy:

- Bytes that match their record are replaced by others only if another replica holds
  the window whole, now.
- Bytes that do not match are not those that a repair wrote: somebody changed them
  since. They are replaced only by bytes that match, as a repair would. This is the undo
  of an undo. One exception: if each byte is either the good or the old one, an undo was
  cut short in the middle of the window, and is repeated.
- What a repair added beyond the end of a file, or as a new file, has no old bytes. It
  stays: only a delete of the cluster removes bytes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias

from merkle.checksum import fingerprint, window_checksums
from merkle.errors import ReconcileError
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ChunkTree, ContainerId, root_hex
from merkle.windows import prove
from repair.replica_plan import canonical_json, plan_digest
from runtime.json_numbers import exact

_FORMAT = "treefold-undo-1"

# Block, offset of the chunk, and index of a window.
WindowPlace: TypeAlias = tuple[BlockId, int, int]


class UndoIncompleteError(ReconcileError):
    """An undo failed after it had begun: some windows may have their old bytes, and the
    replica is UNHEALTHY.
    """

    code = "undo_incomplete"
    exit_status = 5


class UndoTooLargeError(ReconcileError):
    """A job overwrote more than an undo holds in memory."""

    code = "undo_too_large"
    exit_status = 6


class UndoDecision(StrEnum):
    """What becomes of a window; all but the first two leave it as it is."""

    RESTORE = "restore"
    """Its old bytes are put back; another replica holds the good ones."""
    REPAIR = "repair"
    """Its old bytes are the good ones."""
    SAME = "same"
    CHANGED = "changed_since"
    LAST_COPY = "last_good_copy"
    NO_RECORD = "no_record"

    @property
    def writes(self) -> bool:
        """Whether the old bytes are put back."""
        return self in (UndoDecision.RESTORE, UndoDecision.REPAIR)

    @property
    def refuses(self) -> bool:
        """Whether old bytes are kept back, because they would do harm."""
        return not self.writes and self is not UndoDecision.SAME


@dataclass(frozen=True, slots=True)
class OldBytes:
    """Bytes that a job overwrote, at an offset of the block's file."""

    block_id: BlockId
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True)
class UndoWindow:
    """A window that a job wrote: the bytes that are there now, those that would be
    there, and what becomes of it. `offset` is in bytes from the start of the block.
    """

    block_id: BlockId
    chunk: ChunkRecord | None
    index: int
    offset: int
    present: bytes
    after: bytes
    decision: UndoDecision

    @property
    def place(self) -> WindowPlace | None:
        """Which window it is; None if no record has it."""
        return (self.block_id, self.chunk.offset, self.index) if self.chunk else None


@dataclass(frozen=True)
class UndoPlan:
    """All that an undo would do to one replica. `rows` are the database rows that the
    job replaced because they could not be parsed; they are not put back.
    """

    container_id: ContainerId
    datanode: PeerId
    job: str
    root: int | None
    state: ReplicaState
    windows: tuple[UndoWindow, ...]
    rows: int

    @property
    def to_write(self) -> tuple[UndoWindow, ...]:
        """The windows that get their old bytes."""
        return tuple(one for one in self.windows if one.decision.writes)

    @cached_property
    def document(self) -> bytes:
        """The plan in its one JSON form."""
        return canonical_json(
            {
                "format": _FORMAT,
                "container": self.container_id,
                "datanode": self.datanode,
                "job": self.job,
                "root": None if self.root is None else root_hex(self.root),
                "state": self.state.value,
                "bytes": sum(len(one.after) for one in self.to_write),
                "refused": sum(one.decision.refuses for one in self.windows),
                "rows": self.rows,
                "windows": [
                    {
                        "block": exact(one.block_id),
                        "offset": one.offset,
                        "length": len(one.after),
                        "present": fingerprint(one.present).hex(),
                        "after": fingerprint(one.after).hex(),
                        "decision": one.decision.value,
                    }
                    for one in self.windows
                ],
            }
        )

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the document: the plan's name."""
        return plan_digest(self.document)


def decide(*, is_same: bool, present_matches: bool, after_matches: bool) -> UndoDecision:
    """What becomes of a window, before it is known whether another replica holds it.

    A RESTORE needs that too (`with_holders`).
    """
    if is_same:
        return UndoDecision.SAME
    if after_matches:
        return UndoDecision.REPAIR
    return UndoDecision.RESTORE if present_matches else UndoDecision.CHANGED


def with_holders(
    windows: Iterable[UndoWindow], held: Mapping[WindowPlace, bytes]
) -> tuple[UndoWindow, ...]:
    """The decisions, now that it is known what other replicas hold: `held` has the good
    bytes of each window that one of them holds whole.
    """
    return tuple(
        replace(one, decision=_with_holder(one, held.get(one.place) if one.place else None))
        for one in windows
    )


def _with_holder(window: UndoWindow, good: bytes | None) -> UndoDecision:
    match window.decision:
        case UndoDecision.RESTORE if good is None:
            return UndoDecision.LAST_COPY
        case UndoDecision.CHANGED if good is not None and _is_torn(window, good):
            # A crash in the middle of an undo: it is repeated.
            return UndoDecision.RESTORE
        case decision:
            return decision


def _is_torn(window: UndoWindow, good: bytes) -> bool:
    """Whether each byte is either the good or the old one."""
    if not len(window.present) == len(window.after) == len(good):
        return False
    both = zip(window.present, window.after, good, strict=True)
    return all(now in (old, new) for now, old, new in both)


def windows_of(
    record: BlockRecord | None, block_id: BlockId, file: bytes, copies: Sequence[OldBytes]
) -> Iterator[UndoWindow]:
    """The windows that these copies concern, without a look at other replicas.

    `copies` are in the order in which they are put back: the oldest last, because it
    has the original bytes.
    """
    recorded = record.chunks if record else ()
    for copy in copies:
        if not any(chunk.offset < copy.end and copy.offset < chunk.end for chunk in recorded):
            present = file[copy.offset : copy.end]
            yield UndoWindow(
                block_id, None, 0, copy.offset, present, copy.data, UndoDecision.NO_RECORD
            )
    for chunk in recorded:
        near = [c for c in copies if c.offset < chunk.end and chunk.offset < c.end]
        for index in range(len(chunk.checksums) if near else 0):
            start, length = chunk.window(index)
            offset = chunk.offset + start
            touching = [c for c in near if c.offset < offset + length and offset < c.end]
            if not touching:
                continue
            present = file[offset : offset + length]
            after = _with_copies(present, offset, touching)
            yield UndoWindow(
                block_id,
                chunk,
                index,
                offset,
                present,
                after,
                decide(
                    is_same=after == present,
                    present_matches=_matches(chunk, index, present),
                    after_matches=_matches(chunk, index, after),
                ),
            )


def damaged_entries(
    windows: Iterable[UndoWindow], record: BlockRecord, file: bytes
) -> Iterator[ChunkTree]:
    """The tree's entries of the block's chunks once the windows have their old bytes,
    for those that no longer match.
    """
    image = bytearray(file)
    touched = set[int]()
    for one in windows:
        if one.decision is UndoDecision.RESTORE and one.chunk is not None:
            image[one.offset : one.offset + len(one.after)] = one.after
            touched.add(one.chunk.offset)
    for chunk in record.chunks:
        if chunk.offset in touched:
            data = bytes(image[chunk.offset : chunk.end])
            observed = window_checksums(data, chunk.checksum_type, chunk.bytes_per_checksum)
            width = len(observed) // max(1, -(-len(data) // chunk.bytes_per_checksum))
            entries = tuple(observed[i : i + width] for i in range(0, len(observed), width))
            found = replace(chunk, length_bytes=len(data), checksums=entries)
            yield ChunkTree(chunk.offset, len(data), found.data_checksum, checksum_matches=False)


def _with_copies(present: bytes, offset: int, copies: Sequence[OldBytes]) -> bytes:
    """The bytes of a window with the copies put back, as far as the file reaches."""
    after = bytearray(present)
    for copy in copies:
        low, high = max(copy.offset, offset), min(copy.end, offset + len(present))
        if low < high:
            after[low - offset : high - offset] = copy.data[low - copy.offset : high - copy.offset]
    return bytes(after)


def _matches(chunk: ChunkRecord, index: int, data: bytes) -> bool:
    _, length = chunk.window(index)
    return len(data) == length and bool(prove(chunk, index, data))

"""What may go wrong in a simulated cluster: chances, damage to a disk, a forging peer.

This is the catalogue only. `storm` says when faults happen in a seed, and `scenario`
lets a test choose them by hand.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from merkle.record import BlockRecord, ChunkRecord
from merkle.tree import BlockId, ContainerId
from tests.support.peers import Evil, EvilPeer, MemoryReplica, chunk_record


class Fault(Enum):
    """A fault that may happen at a step of the storm, or at a request."""

    LOSS = "a request to a peer is lost"
    CRASH = "an agent crashes"
    TEAR = "an agent crashes within a write"
    DAMAGE = "a disk loses or changes data"
    DELETE = "the cluster deletes a block"
    DELETE_CONTAINER = "a replica is deleted"
    REPLICATE = "a replica is copied to a datanode without one"
    DISK = "a disk refuses a request"
    CANCEL = "a job is cancelled"
    HEARTBEAT_LOSS = "a heartbeat or its answer is lost"
    HEARTBEAT_DOUBLE = "a heartbeat arrives twice"
    CONTROLLER_CRASH = "the controller crashes"
    SAVE = "the controller crashes before or after a save"
    LEAD = "another controller leads for a while"
    PAUSE = "nobody is heard of for a while"
    ONE_WAY = "a datanode is heard and hears nothing for a while"
    CLOCK = "the clock of a machine is set"
    LATE_DAMAGE = "a disk fails between a repair's last scan and the return to service"
    LATE_DELETE = "a block is deleted between its repair and the tree"


# How likely each is by default.
CHANCES = {
    Fault.LOSS: 0.10,
    Fault.CRASH: 0.04,
    Fault.TEAR: 0.05,
    Fault.DAMAGE: 0.08,
    Fault.DELETE: 0.012,
    Fault.DELETE_CONTAINER: 0.004,
    Fault.REPLICATE: 0.05,
    Fault.DISK: 0.02,
    Fault.CANCEL: 0.015,
    Fault.HEARTBEAT_LOSS: 0.10,
    Fault.HEARTBEAT_DOUBLE: 0.15,
    Fault.CONTROLLER_CRASH: 0.012,
    Fault.SAVE: 0.02,
    Fault.LEAD: 0.006,
    Fault.PAUSE: 0.003,
    Fault.ONE_WAY: 0.01,
    Fault.CLOCK: 0.008,
    Fault.LATE_DAMAGE: 0.2,
    Fault.LATE_DELETE: 0.1,
}


class DamageKind(Enum):
    """How a disk can fail its replica; the values are what a trace prints."""

    FLIP = "flips a bit of block {block_id} at {offset}"
    TRUNCATE = "loses the file of block {block_id} from {offset} on"
    LOSE_FILE = "loses the file of block {block_id}"
    LOSE_RECORD = "loses the record of block {block_id}"
    LOSE_BLOCK = "loses block {block_id}"
    SHIFT_CHUNK = "lists block {block_id} from {offset} on as another chunk, without its bytes"
    LOSE_TREE = "loses its tree"
    BREAK_TREE = "cannot read its tree any more"


# What counts as reached in a run once it happened.
_MARKS = {
    DamageKind.FLIP: "bit flipped",
    DamageKind.TRUNCATE: "file truncated",
    DamageKind.LOSE_FILE: "file lost",
    DamageKind.LOSE_RECORD: "record lost",
    DamageKind.LOSE_BLOCK: "record lost",
    DamageKind.SHIFT_CHUNK: "chunk shifted",
    DamageKind.LOSE_TREE: "tree lost",
    DamageKind.BREAK_TREE: "tree unreadable",
}
_OF_TREE = {DamageKind.LOSE_TREE, DamageKind.BREAK_TREE}


@dataclass(frozen=True, slots=True)
class Damage:
    """One change of a disk that no agent makes."""

    kind: DamageKind
    block_id: BlockId | None = None
    offset: int = 0
    bit: int = 0

    def __post_init__(self) -> None:
        assert (self.block_id is None) == (self.kind in _OF_TREE)
        assert 0 <= self.bit < 8

    @property
    def mark(self) -> str:
        """What a run has reached by this damage."""
        return _MARKS[self.kind]

    def apply(self, stored: MemoryReplica) -> None:
        """Change the disk; the tree does not show it before the next scan."""
        block_id = self.block_id
        match self.kind:
            case DamageKind.LOSE_TREE:
                stored.tree = None
                return
            case DamageKind.BREAK_TREE:
                stored.tree = b"\x01\x02\x03"
                return
        assert block_id is not None
        match self.kind:
            case DamageKind.FLIP:
                stored.files[block_id][self.offset] ^= 1 << self.bit
            case DamageKind.TRUNCATE:
                del stored.files[block_id][self.offset :]
            case DamageKind.LOSE_FILE:
                del stored.files[block_id]
            case DamageKind.LOSE_RECORD:
                del stored.records[block_id]
            case DamageKind.LOSE_BLOCK:
                del stored.records[block_id]
                del stored.files[block_id]
            case DamageKind.SHIFT_CHUNK:
                _shift_last_chunk(stored, block_id)

    def __str__(self) -> str:
        return self.kind.value.format(block_id=self.block_id, offset=self.offset)


def _shift_last_chunk(stored: MemoryReplica, block_id: BlockId) -> None:
    """A bit of the record flips, so that the last chunk begins a byte later. Its bytes
    are gone, so that no tree shows it.
    """
    record = stored.records[block_id]
    *kept, last = record.chunks
    shifted = replace(last, offset=last.offset + 1)
    stored.records[block_id] = replace(record, chunks=(*kept, shifted))
    del stored.files[block_id][last.offset :]


def drawn_damage(stored: MemoryReplica, block_id: BlockId, rng: random.Random) -> Damage | None:
    """Damage that hits a block or its replica's tree; None where it finds nothing to
    hit, or where only a scan is due.
    """
    file = stored.files[block_id]
    kind = rng.choice(
        ("flip",) * 6
        + ("truncate", "lose file", "lose record", "lose tree", "break tree", "scan")
        + ("shift chunk",)
    )
    match kind:
        case "flip" if file:
            offset = rng.randrange(len(file))
            return Damage(DamageKind.FLIP, block_id, offset, rng.randrange(8))
        case "truncate" if file:
            return Damage(DamageKind.TRUNCATE, block_id, rng.randrange(len(file)))
        case "lose file":
            return Damage(DamageKind.LOSE_FILE, block_id)
        case "lose record" if block_id in stored.records:
            has_file_too = rng.random() < 0.5
            return Damage(
                DamageKind.LOSE_BLOCK if has_file_too else DamageKind.LOSE_RECORD, block_id
            )
        case "shift chunk" if block_id in stored.records:
            last = stored.records[block_id].chunks[-1]
            return Damage(DamageKind.SHIFT_CHUNK, block_id, last.offset)
        case "lose tree":
            return Damage(DamageKind.LOSE_TREE)
        case "break tree":
            return Damage(DamageKind.BREAK_TREE)
        case _:
            return None


@dataclass(frozen=True, slots=True)
class Lie:
    """How a peer misbehaves until peace; one that forges sends records for its bad
    bytes.
    """

    evil: Evil
    forges: bool = False

    def __str__(self) -> str:
        return "forged records" if self.forges else self.evil.value


class Forger(EvilPeer):
    """Sends bad bytes, and records that fit them; its tree is as it should be."""

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        """Records of the bad bytes that `read` sends."""
        honest = super().records(container_id, block_ids)
        return {
            block_id: replace(record, chunks=self._forged(container_id, record))
            for block_id, record in honest.items()
        }

    def _forged(self, container_id: ContainerId, record: BlockRecord) -> tuple[ChunkRecord, ...]:
        file = self.source.replicas[container_id].files.get(record.block_id, bytearray())
        bad = bytes(byte ^ 0x55 for byte in file)
        # A commit is no lie of its own: it comes with as many chunks as it should.
        return tuple(
            chunk_record(bad[c.offset : c.end], c.offset, c.checksum_type, c.bytes_per_checksum)
            if c.offset < len(bad)
            else c
            for c in record.chunks
        )

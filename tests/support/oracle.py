"""What must come of damaged replicas, worked out from bytes and records alone, with
other code than the product's.

A window can be had if any replica's file holds bytes that match the recorded checksum,
of a chunk that is in some tree. A block that any tree calls deleted is passed over. All
that can be had must be on every replica afterwards.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import crcmod.predefined

from merkle.checksum import ChecksumType
from merkle.errors import RecordInvalidError, TreeRefusedError
from merkle.record import BlockRecord, ChunkRecord
from merkle.tree import BlockId, ContainerId
from ozone.containers import ContainerStore
from protos.convert import tree_from_bytes

_crc32c = crcmod.predefined.mkPredefinedCrcFun("crc-32c")
_HASHES: Mapping[ChecksumType, Callable[[bytes], bytes]] = {
    ChecksumType.CRC32: lambda data: zlib.crc32(data).to_bytes(4, "big"),
    ChecksumType.CRC32C: lambda data: int(_crc32c(data)).to_bytes(4, "big"),
    ChecksumType.SHA256: lambda data: hashlib.sha256(data).digest(),
    ChecksumType.MD5: lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
}


@dataclass
class Seen:
    """One replica as it lies on disk."""

    records: dict[BlockId, BlockRecord] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    tree: bytes | None = None
    deleted: frozenset[BlockId] = frozenset()
    bcs_id: int = 0

    def file(self, block_id: BlockId) -> bytes:
        return self.files.get(f"{block_id}.block", b"")


def look(store: ContainerStore, container_id: int) -> Seen:
    """Everything of one replica that a repair may change."""
    container = store.get(ContainerId(container_id))
    seen = Seen(bcs_id=container.counters().bcs_id or 0)
    for block_id in container.block_ids():
        with suppress(RecordInvalidError):
            record = container.record(block_id)
            if record is not None:
                seen.records[block_id] = record
    if container.chunks_folder.is_dir():
        seen.files = {path.name: path.read_bytes() for path in container.chunks_folder.iterdir()}
    if container.tree_path.exists():
        seen.tree = container.tree_path.read_bytes()
        with suppress(TreeRefusedError):
            blocks = tree_from_bytes(seen.tree, container.container_id).blocks
            seen.deleted = frozenset(block.block_id for block in blocks if block.deleted)
    return seen


def good_windows(chunk: ChunkRecord, file: bytes) -> set[int]:
    """The windows of a chunk that a block's file holds as recorded."""
    good = set()
    for index, recorded in enumerate(chunk.checksums):
        low = chunk.offset + index * chunk.bytes_per_checksum
        high = min(low + chunk.bytes_per_checksum, chunk.end)
        if len(file) >= high and _HASHES[chunk.checksum_type](file[low:high]) == recorded:
            good.add(index)
    return good


def lost_windows(replicas: Mapping[str, Seen]) -> set[tuple[BlockId, int, int]]:
    """Block, chunk offset and window of everything that no replica holds, of all blocks
    that have a record at all.
    """
    lost = set()
    for block_id, chunks in _live_chunks(replicas).items():
        for chunk in chunks:
            held = set[int]().union(
                *(good_windows(chunk, replica.file(block_id)) for replica in replicas.values())
            )
            lost |= {
                (block_id, chunk.offset, index)
                for index in range(len(chunk.checksums))
                if index not in held
            }
    return lost


def faults(before: Mapping[str, Seen], after: Mapping[str, Seen]) -> list[str]:
    """What a repair did wrong, or left undone, in a container all of whose replicas
    took part.
    """
    found = []
    for name, was in before.items():
        now = after[name]
        for file_name, data in was.files.items():
            block_id = BlockId(int(file_name.removesuffix(".block")))
            found += [
                f"{name} {file_name}: {fault}"
                for fault in _file_faults(before, block_id, data, now)
            ]
        found += [
            f"{name}: record of {block_id} is gone"
            for block_id in was.records.keys() - now.records.keys()
        ]
        if not was.deleted <= now.deleted:
            found.append(f"{name}: a deletion was forgotten")
    if lost_windows(before):
        return found
    for block_id, chunks in _live_chunks(before).items():
        for name, now in after.items():
            record = now.records.get(block_id)
            if record is None or [c.offset for c in record.chunks] != [c.offset for c in chunks]:
                found.append(f"{name}: another record of {block_id}")
            found += [
                f"{name}: block {block_id} is not whole at {chunk.offset}"
                for chunk in chunks
                if len(good_windows(chunk, now.file(block_id))) < len(chunk.checksums)
            ]
    if len({now.tree for now in after.values()}) > 1:
        found.append("trees differ")
    return found


def _live_chunks(replicas: Mapping[str, Seen]) -> dict[BlockId, list[ChunkRecord]]:
    deleted = set[BlockId]().union(*(replica.deleted for replica in replicas.values()))
    found: dict[BlockId, dict[int, ChunkRecord]] = {}
    for replica in replicas.values():
        for block_id, record in replica.records.items():
            if block_id not in deleted:
                found.setdefault(block_id, {}).update(
                    {chunk.offset: chunk for chunk in record.chunks}
                )
    return {
        block_id: [chunks[offset] for offset in sorted(chunks)]
        for block_id, chunks in sorted(found.items())
    }


def _file_faults(before: Mapping[str, Seen], block_id: BlockId, was: bytes, now: Seen) -> list[str]:
    """Only bad windows may change, and only to good ones."""
    after = now.file(block_id)
    if len(after) < len(was):
        return ["shorter than before"]
    changed = []
    expected = bytearray(after)
    expected[: len(was)] = was
    record = next((r.records[block_id] for r in before.values() if block_id in r.records), None)
    for chunk in record.chunks if record else ():
        had, has = good_windows(chunk, was), good_windows(chunk, after)
        if not had <= has:
            changed.append(f"good windows of the chunk at {chunk.offset} were changed")
        for index in has:
            low = chunk.offset + index * chunk.bytes_per_checksum
            high = min(low + chunk.bytes_per_checksum, chunk.end)
            expected[low:high] = after[low:high]
    return (
        changed if bytes(expected) == after else [*changed, "bytes changed that no record proves"]
    )

"""The speed of checksumming windows, folding trees and encoding trees: `python -m
benchmarks.bench_kernels [--json]`.

Windows: one call per chunk, with data in the second-level cache and in memory, compared
with one library call per window.
Folds: from joined window entries and from columns, compared with code without kernels.
Encoding: from columns, compared with building and serialising protobuf messages.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import fastcrc
import google_crc32c
import numpy as np

from benchmarks.measure import Report, interleaved
from merkle.checksum import ChecksumType, fold, implementations, library_windows, window_checksums
from merkle.columns import (
    TreeColumns,
    encode_columns,
    encode_tree,
    fold_blocks,
    fold_root,
    fold_windows,
)
from merkle.tree import BlockId, ChunkTree, ContainerId, ContainerTree, TreeBuilder
from protos.ozone_datanode_pb2 import (
    BlockMerkleTree,
    ChecksumData,
    ChunkInfo,
    ChunkMerkleTree,
    ContainerChecksumInfo,
    ContainerMerkleTree,
)

WINDOW_BYTES = 16 << 10
CHUNK_BYTES = 4 << 20
CACHED_BYTES = 256 << 10
MEMORY_BYTES = 256 << 20
GB = 1e9
# A container of 5 GiB in full blocks of 256 MiB, and one of small objects.
SHAPES = {"20 blocks of 64 chunks": (20, 64), "20,000 blocks of 1 chunk": (20_000, 1)}


def main(as_json: bool) -> None:
    report = Report("kernels", [f"{name}: {serves}" for name, serves in implementations().items()])
    memory = memoryview(np.random.default_rng(1).bytes(MEMORY_BYTES))
    for checksum_type in (
        ChecksumType.CRC32,
        ChecksumType.CRC32C,
        ChecksumType.SHA256,
        ChecksumType.MD5,
    ):
        _windows(report, memory, checksum_type)
    _threads(report, memory)
    _folds(report)
    for shape, (blocks, chunks) in SHAPES.items():
        _trees(report, shape, blocks, chunks)
    report.show(as_json=as_json)


def _windows(report: Report, memory: memoryview, checksum_type: ChecksumType) -> None:
    slow = checksum_type in (ChecksumType.SHA256, ChecksumType.MD5)
    places = [("in cache", CACHED_BYTES, CACHED_BYTES, 4 if slow else 200)]
    places.append(("from memory", MEMORY_BYTES >> (4 if slow else 0), CHUNK_BYTES, 1))
    for place, total_bytes, chunk_bytes, repeat in places:
        chunks = _cut(memory[:total_bytes], chunk_bytes)
        variants: dict[str, Callable[[], object]] = {
            "ours": partial(_each_chunk, window_checksums, chunks, checksum_type),
            "library a window": partial(_each_chunk, library_windows, chunks, checksum_type),
        }
        if checksum_type is ChecksumType.CRC32C:
            # google-crc32c accepts arrays, but not every memoryview.
            windows = [
                np.asarray(window) for chunk in chunks for window in _cut(chunk, WINDOW_BYTES)
            ]
            variants["google-crc32c a window"] = partial(_each, google_crc32c.value, windows)
        if place == "from memory" and not slow:
            words = np.frombuffer(memory, np.uint64)
            variants["memory read, numpy's xor"] = partial(np.bitwise_xor.reduce, words)
        rates = interleaved(total_bytes / GB, variants, repeat=repeat)
        for name, peer in rates.items():
            if name != "ours":
                report.add(f"{checksum_type.name} windows {place}", "GB/s", rates["ours"], peer)


def _cut(view: memoryview, piece_bytes: int) -> list[memoryview]:
    return [view[i : i + piece_bytes] for i in range(0, len(view), piece_bytes)]


def _each(one: Callable[..., object], pieces: Sequence[object]) -> None:
    for piece in pieces:
        one(piece)


def _each_chunk(
    windows: Callable[[memoryview, ChecksumType, int], bytes],
    chunks: Sequence[memoryview],
    checksum_type: ChecksumType,
) -> None:
    for chunk in chunks:
        windows(chunk, checksum_type, WINDOW_BYTES)


def _threads(report: Report, memory: memoryview) -> None:
    """Kernels release the GIL, so two threads should be faster than one."""
    chunks = _cut(memory, CHUNK_BYTES)
    checked = partial(_each_chunk, window_checksums, checksum_type=ChecksumType.CRC32C)
    with ThreadPoolExecutor(2) as pool:
        rates = interleaved(
            MEMORY_BYTES / GB,
            {
                "one thread": lambda: checked(chunks),
                "two threads": lambda: list(pool.map(checked, (chunks[::2], chunks[1::2]))),
            },
        )
    report.add(
        "CRC32C windows from memory, two threads", "GB/s", rates["two threads"], rates["one thread"]
    )


def _folds(report: Report) -> None:
    """Chunk checksums and root of a container with 1,280 full chunks of 256 window
    entries each.
    """
    blocks, chunks = SHAPES["20 blocks of 64 chunks"]
    count, row = blocks * chunks, 4 * (CHUNK_BYTES // WINDOW_BYTES)
    entries = np.random.default_rng(2).integers(0, 256, count * row, np.uint8).tobytes()
    rows = [entries[i : i + row] for i in range(0, len(entries), row)]
    starts = np.arange(count + 1) * row
    chunk_starts, ids = np.arange(blocks + 1) * chunks, np.arange(blocks)
    messages = [
        ChunkInfo(
            chunkName=f"chunk_{i}",
            offset=i % chunks * CHUNK_BYTES,
            len=CHUNK_BYTES,
            checksumData=ChecksumData(
                type="CRC32C",
                bytesPerChecksum=WINDOW_BYTES,
                checksums=[entry[j : j + 4] for j in range(0, row, 4)],
            ),
        )
        for i, entry in enumerate(rows)
    ]

    def by_columns() -> int | None:
        return fold_root(fold_blocks(ids, chunk_starts, fold_windows(entries, starts)))

    def by_builder() -> int | None:
        builder = TreeBuilder(ContainerId(1))
        for i, message in enumerate(messages):
            checksum = fold(b"".join(message.checksumData.checksums))
            builder.add_chunk(
                BlockId(i // chunks), ChunkTree(message.offset, message.len, checksum)
            )
        return builder.build().data_checksum

    assert by_columns() == by_builder()
    million = count / 1e6
    rates = interleaved(
        million,
        {
            "ours": lambda: fold_windows(entries, starts),
            "google-crc32c a chunk": lambda: [google_crc32c.value(row) for row in rows],
            "fastcrc a chunk": lambda: [fastcrc.crc32.iscsi(row) for row in rows],
        },
        repeat=20,
    )
    for peer in ("google-crc32c a chunk", "fastcrc a chunk"):
        report.add("fold 256 window entries a chunk", "M chunks/s", rates["ours"], rates[peer], 3)
    rates = interleaved(
        million, {"ours": by_columns, "chunk messages to TreeBuilder": by_builder}, repeat=3
    )
    report.add(
        "window entries to root",
        "M chunks/s",
        rates["ours"],
        rates["chunk messages to TreeBuilder"],
        20,
    )


def _trees(report: Report, shape: str, blocks: int, chunks: int) -> None:
    """Block checksums and root from chunk checksums, and the encoding of the tree."""
    count = blocks * chunks
    checksums = np.random.default_rng(3).integers(0, 1 << 32, count)
    columns = TreeColumns(
        ContainerId(1),
        None,
        np.arange(blocks),
        np.zeros(blocks, np.int64),
        np.zeros(blocks, np.bool_),
        np.arange(blocks + 1) * chunks,
        np.tile(np.arange(chunks) * CHUNK_BYTES, blocks),
        np.full(count, CHUNK_BYTES),
        checksums,
        np.ones(count, np.bool_),
    ).computed()
    tree = columns.to_tree()
    messages = [(block.block_id, block.chunks) for block in tree.blocks]

    def by_builder() -> int | None:
        builder = TreeBuilder(ContainerId(1))
        for block_id, block_chunks in messages:
            for chunk in block_chunks:
                builder.add_chunk(block_id, chunk)
        return builder.build().data_checksum

    arguments = columns.block_ids, columns.chunk_starts, columns.chunk_checksums
    assert fold_root(fold_blocks(*arguments)) == by_builder()
    assert encode_columns(columns) == encode_tree(tree) == _by_protobuf(tree)
    rates = interleaved(
        count / 1e6,
        {"ours": lambda: fold_root(fold_blocks(*arguments)), "chunks to TreeBuilder": by_builder},
        repeat=3,
    )
    report.add(
        f"chunk checksums to root, {shape}",
        "M chunks/s",
        rates["ours"],
        rates["chunks to TreeBuilder"],
    )
    rates = interleaved(
        count / 1e6,
        {
            "columns": lambda: encode_columns(columns),
            "values": lambda: encode_tree(tree),
            "protobuf messages": lambda: _by_protobuf(tree),
        },
    )
    for ours in ("columns", "values"):
        report.add(
            f"encode from {ours}, {shape}", "M chunks/s", rates[ours], rates["protobuf messages"]
        )


def _by_protobuf(tree: ContainerTree) -> bytes:
    """The encoded tree, by protobuf messages."""
    blocks = [
        BlockMerkleTree(
            blockID=block.block_id,
            dataChecksum=block.data_checksum,
            deleted=block.deleted,
            chunkMerkleTree=[
                ChunkMerkleTree(
                    offset=chunk.offset,
                    length=chunk.length_bytes,
                    dataChecksum=chunk.data_checksum,
                    checksumMatches=chunk.checksum_matches,
                )
                for chunk in block.chunks
            ],
        )
        for block in tree.blocks
    ]
    container = ContainerMerkleTree(dataChecksum=tree.data_checksum, blockMerkleTree=blocks)
    return ContainerChecksumInfo(
        containerID=tree.container_id, containerMerkleTree=container
    ).SerializeToString()


if __name__ == "__main__":
    main("--json" in sys.argv[1:])

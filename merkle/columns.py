"""A tree as numpy columns: checksums and Ozone's encoding for many chunks at once.

There is one row per block and one per chunk; `chunk_starts[i]:chunk_starts[i + 1]` are
the chunks of block i. With kernels (merkle.checksum) no Python loop runs over blocks or
chunks. The encoding is a serialised `ContainerChecksumInfo` as Ozone's writer fills it:
every field of a block and of a chunk is present, even if false or zero; the root only
if it is known; a negative number takes ten bytes.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np

from merkle.checksum import Buffer, Kernels, fingerprint, fold, kernels_for
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

Int64s: TypeAlias = "NDArray[np.int64]"
Bools: TypeAlias = "NDArray[np.bool_]"

# Work per row, in bytes, for `kernels_for`: encoding a row in plain Python takes about
# 2 us, as long as the libraries take for the checksum of 20 KB.
_ROW_BYTES = 20_000
# Of fewer chunks, the first steps of numpy take longer than plain Python does.
_ARRAY_CHUNKS_MIN = 256
# Chunks whose bytes are laid out at a time, each in some hundred bytes.
_ARRAY_CHUNKS = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class TreeColumns:
    """One replica's tree: blocks in ascending ID order, the chunks of each block in
    ascending offset order; offsets and lengths in bytes.
    """

    container_id: ContainerId
    data_checksum: int | None
    block_ids: Int64s
    block_checksums: Int64s
    block_deleted: Bools
    chunk_starts: Int64s
    chunk_offsets: Int64s
    chunk_lengths: Int64s
    chunk_checksums: Int64s
    chunk_matches: Bools

    def __post_init__(self) -> None:
        assert len(self.block_ids) == len(self.block_checksums) == len(self.block_deleted)
        assert len(self.chunk_offsets) == len(self.chunk_lengths) == len(self.chunk_checksums)
        assert len(self.chunk_offsets) == len(self.chunk_matches)
        assert len(self.chunk_starts) == len(self.block_ids) + 1
        # A tombstone has no chunks.
        assert not np.any(self.block_deleted & (self.chunk_starts[1:] > self.chunk_starts[:-1]))
        assert (int(self.chunk_starts[0]), int(self.chunk_starts[-1])) == (
            0,
            len(self.chunk_offsets),
        )

    @classmethod
    def of(cls, tree: ContainerTree) -> Self:
        """The columns of a tree. Chunks under a tombstone are dropped, as in Ozone."""
        blocks = tree.blocks
        counts = [0 if block.deleted else len(block.chunks) for block in blocks]
        chunks = [chunk for block in blocks if not block.deleted for chunk in block.chunks]
        return cls(
            tree.container_id,
            tree.data_checksum,
            np.array([block.block_id for block in blocks], np.int64),
            np.array([block.data_checksum for block in blocks], np.int64),
            np.array([block.deleted for block in blocks], np.bool_),
            _starts(np.array(counts, np.int64)),
            np.array([chunk.offset for chunk in chunks], np.int64),
            np.array([chunk.length_bytes for chunk in chunks], np.int64),
            np.array([chunk.data_checksum for chunk in chunks], np.int64),
            np.array([chunk.checksum_matches for chunk in chunks], np.bool_),
        )

    def to_tree(self) -> ContainerTree:
        """The tree of these columns."""
        chunks = tuple(
            map(
                ChunkTree,
                self.chunk_offsets.tolist(),
                self.chunk_lengths.tolist(),
                self.chunk_checksums.tolist(),
                self.chunk_matches.tolist(),
            )
        )
        starts = self.chunk_starts.tolist()
        blocks = zip(
            self.block_ids.tolist(),
            self.block_checksums.tolist(),
            self.block_deleted.tolist(),
            strict=True,
        )
        return ContainerTree(
            self.container_id,
            self.data_checksum,
            tuple(
                BlockTree(BlockId(block_id), checksum, deleted, chunks[starts[i] : starts[i + 1]])
                for i, (block_id, checksum, deleted) in enumerate(blocks)
            ),
        )

    def computed(self) -> Self:
        """The same tree with the checksums of live blocks and the root recomputed;
        tombstones keep theirs.
        """
        folded = fold_blocks(self.block_ids, self.chunk_starts, self.chunk_checksums)
        checksums = np.where(self.block_deleted, self.block_checksums, folded)
        return replace(self, block_checksums=checksums, data_checksum=fold_root(checksums))


def fold_windows(entries: Buffer, starts: Int64s) -> Int64s:
    """The checksums of many chunks; `entries[starts[i]:starts[i + 1]]` are the joined
    window entries of chunk i.

    `starts` holds byte positions in `entries` in ascending order; the first need not be
    0, and two may be equal.
    """
    view = memoryview(entries)
    kernel = kernels_for(view.nbytes)
    if kernel and view.nbytes:
        return kernel.crc32c_ranges(view.cast("B"), np.ascontiguousarray(starts, np.int64))
    return library_fold_windows(view, starts)


def library_fold_windows(entries: memoryview, starts: Int64s) -> Int64s:
    """Like `fold_windows`, but by one library call per chunk."""
    _check_starts(starts, entries.nbytes)
    return np.array([fold(entries[a:b]) for a, b in pairwise(starts.tolist())], np.int64)


def fold_blocks(block_ids: Int64s, chunk_starts: Int64s, chunk_checksums: Int64s) -> Int64s:
    """The checksum of every block, over its ID and its chunks' checksums (any
    int64).
    """
    kernel = kernels_for(block_ids.nbytes + chunk_checksums.nbytes)
    if kernel:
        return kernel.blocks(
            *(np.ascontiguousarray(a, np.int64) for a in (block_ids, chunk_starts, chunk_checksums))
        )
    return library_fold_blocks(block_ids, chunk_starts, chunk_checksums)


def library_fold_blocks(block_ids: Int64s, chunk_starts: Int64s, chunk_checksums: Int64s) -> Int64s:
    """Like `fold_blocks`, but by one library call per block, over one array with the
    input of all blocks.
    """
    assert len(chunk_starts) == len(block_ids) + 1
    _check_starts(chunk_starts, len(chunk_checksums))
    first, last = chunk_starts[:-1], chunk_starts[1:]
    # Block i begins after i IDs and the chunks of all earlier blocks.
    at = first - chunk_starts[0] + np.arange(len(block_ids))
    image = np.empty(int(last[-1] - first[0]) + len(block_ids) if len(block_ids) else 0, ">i8")
    is_chunk = np.ones(len(image), np.bool_)
    is_chunk[at] = False
    image[at] = block_ids
    image[is_chunk] = chunk_checksums[chunk_starts[0] : chunk_starts[-1]]
    view = memoryview(image.tobytes())
    ends = zip((at * 8).tolist(), ((at + (last - first) + 1) * 8).tolist(), strict=True)
    return np.array([fold(view[a:b]) for a, b in ends], np.int64)


def fold_root(block_checksums: Int64s) -> int:
    """The container's checksum, over the checksums of all blocks, also deleted ones; 0
    without blocks.
    """
    return fold(block_checksums.astype(">i8").tobytes())


def encode_tree(tree: ContainerTree) -> bytes:
    """The serialised `ContainerChecksumInfo`, byte for byte as Ozone writes it."""
    return _checksum_info(tree.container_id, tree.data_checksum, _encode_tree_blocks(tree))


def encode_columns(columns: TreeColumns) -> bytes:
    """Like `encode_tree`, from columns."""
    kernel = kernels_for(_ROW_BYTES * (len(columns.block_ids) + len(columns.chunk_offsets)))
    if kernel:
        blocks = _encode_by(kernel, columns)
    elif len(columns.chunk_offsets) >= _ARRAY_CHUNKS_MIN:
        blocks = array_encode_blocks(columns)
    else:
        blocks = library_encode_blocks(columns.to_tree())
    return _checksum_info(columns.container_id, columns.data_checksum, blocks)


def state_fingerprint(tree: ContainerTree) -> bytes:
    """A 128-bit fingerprint (16 bytes) over every field of all blocks and chunks; the
    root is not part of it.

    A root has 32 bits and does not cover lengths, offsets or flags.
    """
    return fingerprint(_encode_tree_blocks(tree))


def library_encode_blocks(tree: ContainerTree) -> bytes:
    """All serialised `blockMerkleTree` fields, in plain Python."""
    out = []
    for block in tree.blocks:
        body = [b"\x08", _varint(block.block_id), b"\x10", _varint(block.data_checksum)]
        for chunk in () if block.deleted else block.chunks:
            offset, length, checksum = map(
                _varint, (chunk.offset, chunk.length_bytes, chunk.data_checksum)
            )
            fields = b"\x08%b\x10%b\x18%b\x20%c" % (
                offset,
                length,
                checksum,
                chunk.checksum_matches,
            )
            body += [b"\x1a", _varint(len(fields)), fields]
        body.append(b"\x20%c" % block.deleted)
        joined = b"".join(body)
        out += [b"\x12", _varint(len(joined)), joined]
    return b"".join(out)


def array_encode_blocks(columns: TreeColumns) -> bytes:
    """Like `library_encode_blocks`, with numpy: a tenth of its time for many chunks."""
    pieces, ends = [], [np.zeros(1, np.int64)]
    for start in range(0, len(columns.chunk_offsets), _ARRAY_CHUNKS):
        piece, lengths = _encode_chunks(columns, slice(start, start + _ARRAY_CHUNKS))
        pieces.append(piece)
        ends.append(ends[-1][-1] + np.cumsum(lengths))
    chunks = b"".join(pieces)
    bounds = np.concatenate(ends)[columns.chunk_starts].tolist()
    out = []
    blocks = zip(
        columns.block_ids.tolist(),
        columns.block_checksums.tolist(),
        columns.block_deleted.tolist(),
        pairwise(bounds),
        strict=True,
    )
    for block_id, checksum, deleted, (start, end) in blocks:
        head = b"\x08%b\x10%b" % (_varint(block_id), _varint(checksum))
        length = _varint(len(head) + end - start + 2)
        out += [b"\x12", length, head, chunks[start:end], b"\x20%c" % deleted]
    return b"".join(out)


def _encode_chunks(columns: TreeColumns, rows: slice) -> tuple[bytes, Int64s]:
    """These chunks, and the length of each: every byte that one may need in a row of
    its own, of which those are taken that it does.
    """
    matches = columns.chunk_matches[rows]
    parts, used = [], []
    for tag, column in (
        (b"\x08", columns.chunk_offsets),
        (b"\x10", columns.chunk_lengths),
        (b"\x18", columns.chunk_checksums),
    ):
        number, is_used = _varints(column[rows])
        parts += [_constant(tag, len(matches)), number]
        used += [np.ones((len(matches), 1), np.bool_), is_used]
    # At most 35 bytes, whose number is one byte.
    lengths = np.hstack(used).sum(axis=1) + 2
    parts = [
        _constant(b"\x1a", len(matches)),
        lengths.astype(np.uint8)[:, None],
        *parts,
        _constant(b"\x20", len(matches)),
        matches.astype(np.uint8)[:, None],
    ]
    both = np.ones((len(matches), 2), np.bool_)
    return np.hstack(parts)[np.hstack([both, *used, both])].tobytes(), lengths + 2


def _varints(values: Int64s) -> "tuple[NDArray[np.uint8], Bools]":
    """Each value in a row of as many bytes as the longest takes, and which of them it
    does.
    """
    words, parts, used = values.astype(np.uint64), [], [np.ones(len(values), np.bool_)]
    while True:
        low, words = (words & np.uint64(0x7F)).astype(np.uint8), words >> np.uint64(7)
        has_more = words > 0
        parts.append(low | has_more.astype(np.uint8) << 7)
        if not has_more.any():
            return np.stack(parts, axis=1), np.stack(used, axis=1)
        used.append(has_more)


def _constant(byte: bytes, count: int) -> "NDArray[np.uint8]":
    return np.full((count, 1), byte[0], np.uint8)


def _encode_tree_blocks(tree: ContainerTree) -> bytes:
    kernel = kernels_for(_ROW_BYTES * sum(1 + len(block.chunks) for block in tree.blocks))
    return _encode_by(kernel, TreeColumns.of(tree)) if kernel else library_encode_blocks(tree)


def _encode_by(kernel: Kernels, columns: TreeColumns) -> bytes:
    return kernel.encode_blocks(
        columns.block_ids,
        columns.block_checksums,
        columns.block_deleted,
        columns.chunk_starts,
        columns.chunk_offsets,
        columns.chunk_lengths,
        columns.chunk_checksums,
        columns.chunk_matches,
    )


def _checksum_info(container_id: int, data_checksum: int | None, blocks: bytes) -> bytes:
    root = b"" if data_checksum is None else b"\x08" + _varint(data_checksum)
    return (
        b"\x08" + _varint(container_id) + b"\x12" + _varint(len(root) + len(blocks)) + root + blocks
    )


def _varint(value: int) -> bytes:
    word, out = value & 0xFFFF_FFFF_FFFF_FFFF, bytearray()
    while word > 0x7F:
        out.append(word & 0x7F | 0x80)
        word >>= 7
    out.append(word)
    return bytes(out)


def _check_starts(starts: Int64s, end: int) -> None:
    # The kernels assert the same while they run.
    assert np.all(starts[1:] >= starts[:-1])
    assert starts[0] >= 0
    assert starts[-1] <= end


def _starts(counts: Int64s) -> Int64s:
    """The start index of each group of these sizes, and the end of the last."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts

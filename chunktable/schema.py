"""The columns of the chunk table, and the rows of a replica's tree.

A row is one chunk. Two kinds of rows are not chunks:

- A block without chunks, or a tombstone whose chunks are unknown, is one row at offset
  BLOCK_ROW. Its `checksum` is the block's.
- A replica without blocks is one row at offset CONTAINER_ROW, block 0. Its `source` is
  "none" if no tree could be built: an unknown root is not the root of an empty tree.

`deleted` is set in all rows of a deleted block. If these rows are chunks, the
tombstone's checksum is the fold of theirs.

Rows ascend by (datanode, volume, container_id, block_id, chunk_offset), and the rows of
a replica are contiguous in one file. Readers are faster for it but do not rely on it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from merkle.checksum import RunningFingerprint
from merkle.columns import TreeColumns
from merkle.replica import ReplicaState

# Values of `chunk_offset` in a row that describes a block or a replica, not a chunk.
BLOCK_ROW = -1
CONTAINER_ROW = -2

FORMAT = "treefold-chunk-table"
# Of what we write; we read all versions up to it. An added column does not change it.
# In version 1 the checksums of chunks were int64, packed as differences. In version 2
# they are uint32 unless one needs more, and the order of the rows is declared.
VERSION = 2
CHECKSUM_MAX = 0xFFFF_FFFF

# Values of `source`: what the tree was built from; "none" where there is no tree.
SOURCES = ("tree", "metadata", "data", "none")
# Rows of one batch: enough for array operations to pay off, few enough to buffer dozens
# of batches.
_BATCH_ROWS = 1 << 17

CHUNK_SCHEMA = pa.schema(
    [
        # UUID of the datanode, and the storage ID of its volume.
        pa.field("datanode", pa.string(), nullable=False),
        pa.field("volume", pa.string(), nullable=False),
        pa.field("container_id", pa.int64(), nullable=False),
        # The name of a ReplicaState.
        pa.field("state", pa.string(), nullable=False),
        pa.field("bcs_id", pa.int64(), nullable=False),
        # Above 0 in erasure-coded containers.
        pa.field("replica_index", pa.int32(), nullable=False),
        pa.field("block_id", pa.int64(), nullable=False),
        pa.field("chunk_offset", pa.int64(), nullable=False),
        # Bytes.
        pa.field("length", pa.int64(), nullable=False),
        # The data checksum of the tree: the window checksums folded into one integer.
        pa.field("checksum", pa.int64(), nullable=False),
        pa.field("matches", pa.bool_(), nullable=False),
        pa.field("deleted", pa.bool_(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        # Changes whenever any other column of the replica's rows does, except
        # `scanned_at`.
        pa.field("generation", pa.int64(), nullable=False),
        # When the data were last scanned in full; null if never.
        pa.field("scanned_at", pa.timestamp("ms", tz="UTC")),
    ]
)

# Constant over all rows of a replica.
REPLICA_COLUMNS = (
    "datanode",
    "volume",
    "container_id",
    "state",
    "bcs_id",
    "replica_index",
    "source",
    "generation",
    "scanned_at",
)

# The columns by which the rows of a file ascend.
ROW_ORDER = ("datanode", "volume", "container_id", "block_id", "chunk_offset")

# Changes that the datanode's own agent made to its replicas since the previous table.
EVENT_SCHEMA = pa.schema(
    [
        pa.field("datanode", pa.string(), nullable=False),
        pa.field("time", pa.timestamp("ms", tz="UTC"), nullable=False),
        # "repair" or "delete".
        pa.field("kind", pa.string(), nullable=False),
        pa.field("container_id", pa.int64(), nullable=False),
        # Null if the event is about the whole container.
        pa.field("block_id", pa.int64()),
        # Where in the block the written bytes begin, perhaps inside a chunk; null if
        # the event is about the whole block.
        pa.field("chunk_offset", pa.int64()),
        # Bytes written; 0 for "delete".
        pa.field("length", pa.int64(), nullable=False),
        # Empty if no job of a controller caused it.
        pa.field("job", pa.string(), nullable=False),
    ]
)

# The inventory: each replica of the table once, with the file that holds its live rows.
CONTAINER_SCHEMA = pa.schema(
    [
        pa.field("volume", pa.string(), nullable=False),
        pa.field("container_id", pa.int64(), nullable=False),
        pa.field("generation", pa.int64(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
    ]
)

# Faults found while the trees were read or built.
FAULT_SCHEMA = pa.schema(
    [
        pa.field("datanode", pa.string(), nullable=False),
        # The path of a volume that could not be opened.
        pa.field("volume", pa.string(), nullable=False),
        # Null if the fault is of the whole volume.
        pa.field("container_id", pa.int64()),
        # See ozone.survey.ReplicaFault.
        pa.field("kind", pa.string(), nullable=False),
        pa.field("block_id", pa.int64()),
        pa.field("chunk_offset", pa.int64()),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class ReplicaAttributes:
    """The values that all rows of a replica share.

    `source` is one of SOURCES; `scanned_at_ms` is in ms since the epoch.
    """

    datanode: str
    volume: str
    container_id: int
    state: ReplicaState
    bcs_id: int
    replica_index: int
    source: str
    scanned_at_ms: int | None = None

    def __post_init__(self) -> None:
        assert self.source in SOURCES


class ReplicaRows:
    """The rows of one replica: its attributes, and arrays of the columns that vary."""

    def __init__(self, replica: ReplicaAttributes, columns: Mapping[str, "NDArray[Any]"]) -> None:
        """Internal: use `rows_of`."""
        self.replica = replica
        self.count = len(columns["block_id"])
        self._columns = columns

    @cached_property
    def generation(self) -> int:
        """A fingerprint of all rows as an int64, without the time of the last scan."""
        attributes = asdict(self.replica) | {"state": self.replica.state.name}
        del attributes["scanned_at_ms"]
        running = RunningFingerprint()
        running.update(json.dumps(attributes).encode())
        for column in self._columns.values():
            running.update(np.ascontiguousarray(column))
        return int.from_bytes(running.digest()[:8], "big", signed=True)

    @property
    def has_wide_checksums(self) -> bool:
        """Whether a checksum has more than 32 bits."""
        checksums = self._columns["checksum"]
        return bool(checksums.min() < 0 or checksums.max() > CHECKSUM_MAX)

    def batches(self, rows_max: int = _BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """The rows in order, with CHUNK_SCHEMA, at most `rows_max` per batch."""
        replica = self.replica
        scanned = pa.scalar(replica.scanned_at_ms, CHUNK_SCHEMA.field("scanned_at").type)
        constants: dict[str, Any] = asdict(replica) | {
            "state": replica.state.name,
            "generation": self.generation,
        }
        constants["scanned_at"] = scanned
        # One array per column serves all batches: each batch takes a slice.
        width = min(self.count, rows_max)
        repeated = {
            name: pa.repeat(pa.scalar(constants[name], CHUNK_SCHEMA.field(name).type), width)
            for name in REPLICA_COLUMNS
        }
        for start in range(0, self.count, rows_max):
            length = min(rows_max, self.count - start)
            arrays = [
                (
                    repeated[field.name].slice(0, length)
                    if field.name in repeated
                    else pa.array(self._columns[field.name][start : start + length], field.type)
                )
                for field in CHUNK_SCHEMA
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=CHUNK_SCHEMA)


def rows_of(replica: ReplicaAttributes, tree: TreeColumns | None) -> ReplicaRows:
    """The rows of a replica with this tree.

    `tree` is None if and only if the source is "none". Its chunk offsets are not
    negative.
    """
    assert (tree is None) == (replica.source == "none")
    if tree is None or not len(tree.block_ids):
        return ReplicaRows(replica, _single_row(CONTAINER_ROW))
    counts = np.diff(tree.chunk_starts)
    widths = np.maximum(counts, 1)
    without_chunks = counts == 0
    # The row of each block without chunks.
    block_rows = (np.cumsum(widths) - widths)[without_chunks]
    total = int(widths.sum())
    is_chunk = np.ones(total, np.bool_)
    is_chunk[block_rows] = False
    offsets = np.full(total, BLOCK_ROW, np.int64)
    lengths, checksums = np.zeros(total, np.int64), np.empty(total, np.int64)
    matches = np.ones(total, np.bool_)
    assert not len(tree.chunk_offsets) or int(tree.chunk_offsets.min()) >= 0
    offsets[is_chunk] = tree.chunk_offsets
    lengths[is_chunk] = tree.chunk_lengths
    checksums[is_chunk] = tree.chunk_checksums
    checksums[block_rows] = tree.block_checksums[without_chunks]
    matches[is_chunk] = tree.chunk_matches
    columns = {
        "block_id": np.repeat(tree.block_ids, widths),
        "chunk_offset": offsets,
        "length": lengths,
        "checksum": checksums,
        "matches": matches,
        "deleted": np.repeat(tree.block_deleted, widths),
    }
    return ReplicaRows(replica, columns)


def _single_row(offset: int) -> dict[str, "NDArray[Any]"]:
    numbers = {"block_id": 0, "chunk_offset": offset, "length": 0, "checksum": 0}
    flags = {"matches": True, "deleted": False}
    return {name: np.array([value], np.int64) for name, value in numbers.items()} | {
        name: np.array([value], np.bool_) for name, value in flags.items()
    }


def replica_stretches(batch: pa.RecordBatch) -> Iterator[tuple[str, int, int, int]]:
    """The runs of rows of one replica in a batch: volume, container, start row, end row
    (exclusive).
    """
    if not batch.num_rows:
        return
    ids = batch.column("container_id").to_numpy()
    volumes = batch.column("volume")
    encoded = volumes if isinstance(volumes, pa.DictionaryArray) else volumes.dictionary_encode()
    codes = encoded.indices.to_numpy()
    cuts = np.flatnonzero((ids[1:] != ids[:-1]) | (codes[1:] != codes[:-1])) + 1
    starts = [0, *cuts.tolist()]
    for start, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        yield encoded.dictionary[int(codes[start])].as_py(), int(ids[start]), start, end

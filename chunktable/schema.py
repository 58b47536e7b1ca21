"""The columns of the chunk table, and the rows of a replica's tree.

A row is one chunk. A block without chunks, and a tombstone whose chunks are not known,
is one row at offset BLOCK_ROW whose `checksum` is the block's own. A replica without
blocks is one row at offset CONTAINER_ROW, block 0; where no tree could be made of it at
all, the row's `source` is "none", for an unknown root is not that of an empty tree. All
rows of a deleted block say `deleted`; where they are chunks, the tombstone's checksum
is what they fold to.

Rows ascend by (datanode, volume, container_id, block_id, chunk_offset), and a replica
lies in one file, in one piece. Readers profit from that and rely on it nowhere.
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

# Offsets that are none: what the row speaks of instead of a chunk.
BLOCK_ROW = -1


CONTAINER_ROW = -2


# Changed only when a reader of the old version would misread a table; added columns are
# no such change.
VERSION = 1


# `source` is one of these: which truth of the replica the row was taken from; "none"
# where there is no tree.
_SOURCES = ("tree", "metadata", "data", "none")


CHUNK_SCHEMA = pa.schema(
    [
        # UUID of the datanode, and the storage ID of its volume.
        pa.field("datanode", pa.string(), nullable=False),
        pa.field("volume", pa.string(), nullable=False),
        pa.field("container_id", pa.int64(), nullable=False),
        # A ReplicaState's name.
        pa.field("state", pa.string(), nullable=False),
        pa.field("bcs_id", pa.int64(), nullable=False),
        # Above 0: erasure-coded.
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
        # Changes whenever anything else of the replica's rows does, but for
        # `scanned_at`.
        pa.field("generation", pa.int64(), nullable=False),
        # When the data were last read whole; unknown where they never were.
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


# What happened to the data of a datanode's replicas since the table before, by its
# agent's own doing.
EVENT_SCHEMA = pa.schema(
    [
        pa.field("datanode", pa.string(), nullable=False),
        pa.field("time", pa.timestamp("ms", tz="UTC"), nullable=False),
        # "repair" or "delete".
        pa.field("kind", pa.string(), nullable=False),
        pa.field("container_id", pa.int64(), nullable=False),
        # Null: the whole container.
        pa.field("block_id", pa.int64()),
        # Where in the block the bytes written begin, which may be inside of a chunk;
        # null: the whole block.
        pa.field("chunk_offset", pa.int64()),
        # Bytes written; 0 for a delete.
        pa.field("length", pa.int64(), nullable=False),
        # Empty where no job of a controller did it.
        pa.field("job", pa.string(), nullable=False),
    ]
)


# The inventory: each replica of the table once, with the file that holds its rows now.
CONTAINER_SCHEMA = pa.schema(
    [
        pa.field("volume", pa.string(), nullable=False),
        pa.field("container_id", pa.int64(), nullable=False),
        pa.field("generation", pa.int64(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
    ]
)


# Faults met while the trees were taken.
FAULT_SCHEMA = pa.schema(
    [
        pa.field("datanode", pa.string(), nullable=False),
        # A volume that could not be opened is named by its path.
        pa.field("volume", pa.string(), nullable=False),
        # Null for a fault of a whole volume.
        pa.field("container_id", pa.int64()),
        # See ozone.survey.Fault.
        pa.field("kind", pa.string(), nullable=False),
        pa.field("block_id", pa.int64()),
        pa.field("chunk_offset", pa.int64()),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


FORMAT = "treefold-chunk-table"


# Rows of one batch: enough for arrays to pay, few enough to wait in memory by the
# dozen.
_BATCH_ROWS = 1 << 17


@dataclass(frozen=True, slots=True)
class ReplicaAttributes:
    """What all rows of a replica say alike; `source` is one of _SOURCES,
    `scanned_at_ms` ms since the epoch.
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
        assert self.source in _SOURCES


class ReplicaRows:
    """The rows of one replica, kept as arrays of what is not alike in all of them."""

    def __init__(self, replica: ReplicaAttributes, columns: Mapping[str, "NDArray[Any]"]) -> None:
        """Not for callers: see `rows_of`."""
        self.replica = replica
        self.count = len(columns["block_id"])
        self._columns = columns

    @cached_property
    def generation(self) -> int:
        """A fingerprint of all rows, as an int64; the time of the last scan is not in
        it.
        """
        said = asdict(self.replica) | {"state": self.replica.state.name}
        del said["scanned_at_ms"]
        running = RunningFingerprint()
        running.update(json.dumps(said).encode())
        for column in self._columns.values():
            running.update(np.ascontiguousarray(column))
        return int.from_bytes(running.digest()[:8], "big", signed=True)

    def batches(self, rows_max: int = _BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """The rows in order, by CHUNK_SCHEMA, at most `rows_max` a batch."""
        replica = self.replica
        scanned = pa.scalar(replica.scanned_at_ms, CHUNK_SCHEMA.field("scanned_at").type)
        alike: dict[str, Any] = asdict(replica) | {
            "state": replica.state.name,
            "generation": self.generation,
        }
        alike["scanned_at"] = scanned
        # One array for all batches: each has a slice of it.
        width = min(self.count, rows_max)
        same = {
            name: pa.repeat(pa.scalar(alike[name], CHUNK_SCHEMA.field(name).type), width)
            for name in REPLICA_COLUMNS
        }
        for start in range(0, self.count, rows_max):
            length = min(rows_max, self.count - start)
            arrays = [
                (
                    same[field.name].slice(0, length)
                    if field.name in same
                    else pa.array(self._columns[field.name][start : start + length], field.type)
                )
                for field in CHUNK_SCHEMA
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=CHUNK_SCHEMA)


def rows_of(replica: ReplicaAttributes, tree: TreeColumns | None) -> ReplicaRows:
    """The rows of a replica; `tree` is None exactly where the source is "none". Chunks'
    offsets are not negative.
    """
    assert (tree is None) == (replica.source == "none")
    if tree is None or not len(tree.block_ids):
        return ReplicaRows(replica, _single(CONTAINER_ROW))
    counts = np.diff(tree.chunk_starts)
    widths = np.maximum(counts, 1)
    lacking = counts == 0
    # The row of each block without chunks.
    at = (np.cumsum(widths) - widths)[lacking]
    total = int(widths.sum())
    is_chunk = np.ones(total, np.bool_)
    is_chunk[at] = False
    offsets = np.full(total, BLOCK_ROW, np.int64)
    lengths, checksums = np.zeros(total, np.int64), np.empty(total, np.int64)
    matches = np.ones(total, np.bool_)
    assert not len(tree.chunk_offsets) or int(tree.chunk_offsets.min()) >= 0
    offsets[is_chunk] = tree.chunk_offsets
    lengths[is_chunk] = tree.chunk_lengths
    checksums[is_chunk] = tree.chunk_checksums
    checksums[at] = tree.block_checksums[lacking]
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


def _single(offset: int) -> dict[str, "NDArray[Any]"]:
    numbers = {"block_id": 0, "chunk_offset": offset, "length": 0, "checksum": 0}
    flags = {"matches": True, "deleted": False}
    return {name: np.array([value], np.int64) for name, value in numbers.items()} | {
        name: np.array([value], np.bool_) for name, value in flags.items()
    }


def replica_stretches(batch: pa.RecordBatch) -> Iterator[tuple[str, int, int, int]]:
    """Where one replica's rows begin and end in a batch: volume, container, first row,
    row behind the last.
    """
    if not batch.num_rows:
        return
    ids = batch.column("container_id").to_numpy()
    volumes = batch.column("volume")
    codes = volumes if isinstance(volumes, pa.DictionaryArray) else volumes.dictionary_encode()
    places = codes.indices.to_numpy()
    cuts = np.flatnonzero((ids[1:] != ids[:-1]) | (places[1:] != places[:-1])) + 1
    starts = [0, *cuts.tolist()]
    for start, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        yield codes.dictionary[int(places[start])].as_py(), int(ids[start]), start, end

"""Trees of many replicas in a few Parquet files: what a sweep writes and agents import.

A row is one replica's tree as the bytes of Ozone's tree file, with what the replica was
when it was read. A file for each tree would be as many files, and as many syncs, as
there are replicas.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from chunktable.errors import ChunkTableError
from chunktable.manifest import TableRefusal
from chunktable.schema import CHUNK_SCHEMA, REPLICA_COLUMNS
from merkle.limits import MESSAGE_BYTES_MAX

TREE_SCHEMA = pa.schema(
    [
        *(CHUNK_SCHEMA.field(name) for name in REPLICA_COLUMNS if name != "generation"),
        pa.field("root", pa.int64(), nullable=False),
        # A serialised ContainerChecksumInfo.
        pa.field("tree", pa.binary(), nullable=False),
    ]
)
# No agent stores a larger one, so that none is written.
PACKED_TREE_BYTES_MAX = MESSAGE_BYTES_MAX
# Trees read at a time; a row group may have thousands, of 20 KB or of 20 MB each.
_BATCH_TREES = 16


@dataclass(frozen=True, slots=True)
class PackedTree:
    """One row; nothing of it is checked but its types."""

    datanode: str
    volume: str
    container_id: int
    state: str
    bcs_id: int
    replica_index: int
    source: str
    # Null where the data were never read whole.
    scanned_at_ms: int | None
    root: int
    tree: bytes


def tree_files(folder: Path) -> list[Path]:
    """The files of packed trees in a folder, sorted.

    Raises:
        ChunkTableError: there is none, or the folder cannot be read.
    """
    try:
        found = sorted(
            path for path in folder.iterdir() if path.suffix == ".parquet" and path.name[0] != "."
        )
    except OSError as error:
        raise ChunkTableError(
            TableRefusal.UNREADABLE.value, f"{folder} cannot be read: {error}"
        ) from error
    if not found:
        raise ChunkTableError(
            TableRefusal.FILE_MISSING.value,
            f"{folder} has no trees of a sweep",
            hint=(
                "Give the folder that `treefold sweep run --write-trees` wrote:"
                " DIR/trees/sweep_id=ID."
            ),
        )
    return found


def read_trees(path: Path, datanodes: Collection[str]) -> Iterator[PackedTree]:
    """The rows of one file that are of these datanodes; a row group that has none of
    them is passed over.

    Raises:
        ChunkTableError: it cannot be read, or is none of packed trees; what came before
            was whole.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            missing = [name for name in TREE_SCHEMA.names if name not in file.schema_arrow.names]
            if missing:
                text = f"{path} has no column {', '.join(missing)}"
                raise ChunkTableError(TableRefusal.SCHEMA.value, text)
            groups = [
                i for i in range(file.metadata.num_row_groups) if _may_hold(file, i, datanodes)
            ]
            for batch in file.iter_batches(
                _BATCH_TREES, groups, TREE_SCHEMA.names, use_threads=False
            ):
                table = pa.Table.from_batches([batch]).select(TREE_SCHEMA.names).cast(TREE_SCHEMA)
                table = table.set_column(7, "scanned_at", table["scanned_at"].cast(pa.int64()))
                for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
                    if row[0] in datanodes:
                        yield PackedTree(*row)
    # pyarrow says what is wrong with a Parquet file, or with a cast, by ArrowInvalid, a
    # ValueError, and others of its.
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ChunkTableError(
            TableRefusal.UNREADABLE.value, f"{path} cannot be read: {error}"
        ) from error


def _may_hold(file: pq.ParquetFile, group: int, datanodes: Collection[str]) -> bool:
    place = file.schema_arrow.get_field_index("datanode")
    statistics = file.metadata.row_group(group).column(place).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return any(statistics.min <= datanode <= statistics.max for datanode in datanodes)

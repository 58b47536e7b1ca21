"""Many trees in a few Parquet files, written by a sweep and imported by agents.

A row is one replica: its tree as the bytes of Ozone's tree file, and its attributes at
the time of the read. One file per tree would cost one sync per replica.
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
# Agents do not store a larger tree, so none is written.
PACKED_TREE_BYTES_MAX = MESSAGE_BYTES_MAX
# Trees read at a time: a row group may hold thousands, of 20 KB to 20 MB each.
_BATCH_TREES = 16


@dataclass(frozen=True, slots=True)
class PackedTree:
    """One row. Only its types are checked."""

    datanode: str
    volume: str
    container_id: int
    state: str
    bcs_id: int
    replica_index: int
    source: str
    # In ms since the epoch; None if the data were never scanned in full.
    scanned_at_ms: int | None
    root: int
    tree: bytes


def tree_files(folder: Path) -> list[Path]:
    """The files of packed trees in a folder, sorted.

    Raises:
        ChunkTableError: the folder has no such file or cannot be read.
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
    """The rows of these datanodes in one file. Row groups without any are skipped.

    Raises:
        ChunkTableError: the file cannot be read or does not hold packed trees. Rows
            yielded before are valid.
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
    # For a bad file or cast, pyarrow raises ArrowInvalid, which is a ValueError,
    # and other errors of its own.
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ChunkTableError(
            TableRefusal.UNREADABLE.value, f"{path} cannot be read: {error}"
        ) from error


def _may_hold(file: pq.ParquetFile, group: int, datanodes: Collection[str]) -> bool:
    index = file.schema_arrow.get_field_index("datanode")
    statistics = file.metadata.row_group(group).column(index).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return any(statistics.min <= datanode <= statistics.max for datanode in datanodes)

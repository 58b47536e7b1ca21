"""What passes between the stages of a sweep: parts of the input, and the tables made of
them.

    parts  --fold-->  runs  --settle-->  replicas  --compare-->  verdicts, candidates
    --inspect-->  findings

A stage takes Arrow tables and gives Arrow tables, knows neither Spark nor threads, and
treats every container by itself, so that an engine may cut its input between containers
anywhere. Nothing here imports pyspark.
"""

from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from chunktable.schema import CHUNK_SCHEMA, REPLICA_COLUMNS
from merkle.replica import TreeSource


class PartKind(Enum):
    """What a part is read from."""

    # Row groups `first` to `last` (exclusive) of one Parquet file with chunk rows; in
    # an export, whose footers nobody parses before the file is verified, the row groups
    # that begin at rows `first` to `last` (exclusive).
    FILE = "file"
    # Containers at the places `first` to `last` (exclusive) of a volume's ascending
    # IDs.
    VOLUME = "volume"


@dataclass(frozen=True, slots=True)
class Part:
    """The unit of work that is done once: small enough to be redone, large enough to be
    worth a task.

    `part_id` is made of what it reads (place, size, time of change, range), so that a
    resumed sweep knows it again. `location` is the root of a volume, or a file as
    pyarrow's filesystems take it (path or URI); `manifest` is the one of the export
    that a file belongs to, if any: its content is verified against it, and rows of a
    replica for which it names another file are superseded.
    """

    part_id: str
    kind: PartKind
    location: str
    first: int
    last: int
    rows: int
    source: TreeSource = TreeSource.TREE
    manifest: str | None = None


class RootMethod(Enum):
    """How a replica's root was computed."""

    # In one pass over the rows of one part.
    FILE_WISE = "filewise"
    # Merged from ordered fragments of several parts.
    FRAGMENTS = "fragments"
    # As an XOR aggregate, in Spark SQL.
    SQL = "sql"
    # From sorted rows: irregular blocks, interleaved fragments, rows in no order.
    EXACT = "exact"


_IDENTITY = [CHUNK_SCHEMA.field(name) for name in REPLICA_COLUMNS if name != "scanned_at"]

# One row a replica. Two replicas of one container with equal root and fingerprint hold
# the same tree in every field. Along the path SQL fingerprints are others than along
# the other paths, and are compared among themselves alone.
REPLICA_SCHEMA = pa.schema(
    [
        *_IDENTITY,
        CHUNK_SCHEMA.field("scanned_at"),
        # Null where there is no tree.
        pa.field("root", pa.int64()),
        pa.field("fingerprint", pa.int64(), nullable=False),
        pa.field("blocks", pa.int64(), nullable=False),
        pa.field("deleted_blocks", pa.int64(), nullable=False),
        pa.field("chunks", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        # Chunks that do not match their record.
        pa.field("corrupt", pa.int64(), nullable=False),
        # Empty live blocks, and matching chunks without checksums: set aside in a
        # comparison.
        pa.field("unverifiable", pa.int64(), nullable=False),
        # A Path's value.
        pa.field("path", pa.string(), nullable=False),
    ]
)

# One row a container that was compared.
VERDICT_SCHEMA = pa.schema(
    [
        pa.field("container_id", pa.int64(), nullable=False),
        # Of merkle.outcome.Verdict.
        pa.field("verdict", pa.string(), nullable=False),
        pa.field("replicas", pa.int32(), nullable=False),
        # Replicas that took no part: open, erasure-coded, deleted.
        pa.field("excluded", pa.int32(), nullable=False),
        pa.field("diverged", pa.bool_(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)

# One row a fault: of replicas (kinds of merkle.comparison.DifferenceKind), silent
# changes, and inputs that cannot be read.
FINDING_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        # Null for a fault of a whole file or volume.
        pa.field("container_id", pa.int64()),
        pa.field("block_id", pa.int64()),
        pa.field("chunk_offset", pa.int64()),
        # Datanodes to be mended, and those that have it right.
        pa.field("lacking", pa.list_(pa.string()), nullable=False),
        pa.field("sources", pa.list_(pa.string()), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


class FindingKind(Enum):
    """Findings of a sweep beyond the differences of replicas."""

    SILENT_CHANGE = "silent_change"
    # The root that a stored tree claims is not what its blocks fold to.
    ROOT_DIFFERS = "root_differs"
    # Rows of one replica that contradict each other: two at one place, two states.
    ROWS_CONTRADICT = "rows_contradict"
    # A tree, record or container that cannot be read; the others are.
    UNREADABLE = "unreadable"

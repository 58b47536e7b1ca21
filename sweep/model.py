"""The values that the stages of a sweep exchange: parts of the input, and tables.

    parts  --fold-->  runs  --settle-->  replicas  --compare-->  verdicts, candidates
    --inspect-->  findings

A stage is a function from Arrow tables to Arrow tables. It handles each container
independently, so an engine may split its input between any two containers. Stages use
neither Spark nor threads.
"""

from dataclasses import dataclass, field, fields
from enum import Enum

import pyarrow as pa

from chunktable.manifest import Manifest
from chunktable.schema import CHUNK_SCHEMA, REPLICA_COLUMNS
from merkle.replica import TreeSource


class PartKind(Enum):
    """What a part is read from. It defines the meaning of the part's `first` and
    `last`; `last` is exclusive.
    """

    # One Parquet file with chunk rows. The range counts row groups. In an export it
    # counts rows and selects the row groups that begin there: the footer is not parsed
    # before the file is verified.
    FILE = "file"
    # One volume. The range counts containers by ascending ID.
    VOLUME = "volume"


@dataclass(frozen=True, slots=True)
class Part:
    """The unit of work: small enough to be redone after a crash, large enough to be
    worth a task.

    `part_id` is a hash of what the part reads (location, size, modification time,
    range), so a resumed sweep recognizes it. `location` is the root of a volume, or the
    path or URI of a file. `manifest` is the location of the manifest of the export that
    the file belongs to, if any. The file is verified against it, and rows of a replica
    that the manifest lists in another file are superseded. If `volumes` is set, rows of
    other volumes are superseded by another export. `table` is the folder of plain files
    that the file is a piece of, if any. `replicas` is about their number, 0 if unknown.
    `export` is the manifest, if it was read before; it is not stored.
    """

    part_id: str
    kind: PartKind
    location: str
    first: int
    last: int
    rows: int
    source: TreeSource = TreeSource.TREE
    manifest: str | None = None
    volumes: tuple[str, ...] | None = None
    table: str | None = None
    replicas: int = 0
    export: Manifest | None = field(default=None, compare=False, repr=False)

    def document(self) -> dict[str, object]:
        """The part as it is stored: its JSON object."""
        found = {name: getattr(self, name) for name in _STORED}
        return found | {"kind": self.kind.value, "source": self.source.value}


# asdict copies each value, and a fleet has thousands of parts.
_STORED = tuple(one.name for one in fields(Part) if one.name != "export")


class RootMethod(Enum):
    """How a replica's root was computed."""

    # In one pass over the rows of one part.
    FILE_WISE = "filewise"
    # Joined from the ordered runs of several parts.
    FRAGMENTS = "fragments"
    # As an XOR aggregate, in Spark SQL.
    SQL = "sql"
    # From sorted rows, because runs overlap, rows are unordered, or blocks are
    # irregular.
    EXACT = "exact"


_IDENTITY = [CHUNK_SCHEMA.field(name) for name in REPLICA_COLUMNS if name != "scanned_at"]

# One row per replica. Two replicas of one container with equal root and fingerprint
# have trees that are equal in every field. RootMethod.SQL computes fingerprints in its
# own way, so they are comparable only with each other.
REPLICA_SCHEMA = pa.schema(
    [
        *_IDENTITY,
        CHUNK_SCHEMA.field("scanned_at"),
        # Null if the replica has no tree.
        pa.field("root", pa.int64()),
        pa.field("fingerprint", pa.int64(), nullable=False),
        pa.field("blocks", pa.int64(), nullable=False),
        pa.field("deleted_blocks", pa.int64(), nullable=False),
        pa.field("chunks", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        # Chunks that do not match their recorded checksum.
        pa.field("corrupt", pa.int64(), nullable=False),
        # Live blocks without chunks, and matching chunks without checksums: a
        # comparison cannot verify them.
        pa.field("unverifiable", pa.int64(), nullable=False),
        # A value of RootMethod.
        pa.field("path", pa.string(), nullable=False),
    ]
)


# Containers whose rows must be read, and about how many rows each has.
REQUEST_SCHEMA = pa.schema(
    [
        pa.field("container_id", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
    ]
)


class NotCompared(Enum):
    """Verdicts that only a sweep has: containers about which it must not say more."""

    # An expected replica was not read (sweep.ledger).
    UNSEEN = "UNSEEN"
    # All replicas are excluded by design: open, erasure-coded or deleted.
    EXCLUDED = "EXCLUDED"


# One row per container that was compared, as the engines return it.
VERDICT_SCHEMA = pa.schema(
    [
        pa.field("container_id", pa.int64(), nullable=False),
        # A value of merkle.outcome.Verdict, or of NotCompared.
        pa.field("verdict", pa.string(), nullable=False),
        pa.field("replicas", pa.int32(), nullable=False),
        # Replicas that were not compared: open, erasure-coded, deleted or duplicate.
        pa.field("excluded", pa.int32(), nullable=False),
        pa.field("diverged", pa.bool_(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)

# As stored: with the number of expected replicas that were not read.
FINAL_VERDICT_SCHEMA = VERDICT_SCHEMA.append(pa.field("unread", pa.int32(), nullable=False))

# One row per expected replica that was not read (sweep.ledger).
UNSEEN_SCHEMA = pa.schema(
    [
        *(CHUNK_SCHEMA.field(name) for name in ("container_id", "datanode", "volume")),
        # The last sweep that read it, or the first that expected it.
        pa.field("last_sweep", pa.string(), nullable=False),
        # When reading it began in that sweep: removals from then on count. Null if
        # unknown.
        pa.field("since", pa.timestamp("ms", tz="UTC")),
        pa.field("reason", pa.string(), nullable=False),
    ]
)

# One row per finding. `kind` is a value of merkle.comparison.DifferenceKind for a
# difference between replicas, otherwise of FindingKind.
FINDING_SCHEMA = pa.schema(
    [
        pa.field("kind", pa.string(), nullable=False),
        # Null if the finding concerns a whole file or volume.
        pa.field("container_id", pa.int64()),
        pa.field("block_id", pa.int64()),
        pa.field("chunk_offset", pa.int64()),
        # Datanodes to be repaired, and datanodes that have correct data.
        pa.field("lacking", pa.list_(pa.string()), nullable=False),
        pa.field("sources", pa.list_(pa.string()), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


class FindingKind(Enum):
    """Kinds of findings other than differences between replicas."""

    # A live chunk's checksum changed since an earlier sweep, and no agent wrote to it.
    SILENT_CHANGE = "silent_change"
    # The stored root of a tree differs from the root computed from its blocks.
    ROOT_DIFFERS = "root_differs"
    # Rows of one replica contradict each other, for example two rows for one chunk.
    ROWS_CONTRADICT = "rows_contradict"
    # Another replica of the container on the same datanode counts (sweep.duplicates).
    DUPLICATE_REPLICA = "duplicate_replica"
    # A file, volume, container or tree cannot be read.
    UNREADABLE = "unreadable"

"""The chunk table: every chunk of a datanode's replicas as rows of Parquet, which agents write and sweeps read.

A row is one chunk. A block without chunks, and a tombstone whose chunks are not known, is one row at offset BLOCK_ROW
whose `checksum` is the block's own. A replica without blocks is one row at offset CONTAINER_ROW, block 0; where no
tree could be made of it at all, the row's `source` is "none", for an unknown root is not that of an empty tree. All
rows of a deleted block say `deleted`; where they are chunks, the tombstone's checksum is what they fold to.

Rows ascend by (datanode, volume, container_id, block_id, chunk_offset), and a replica lies in one file, in one piece.
Readers profit from that and rely on it nowhere.
"""

import pyarrow as pa

# Offsets that are none: what the row speaks of instead of a chunk.
BLOCK_ROW = -1
CONTAINER_ROW = -2

# Changed only when a reader of the old version would misread a table; added columns are no such change.
VERSION = 1

# `source` is one of these: which truth of the replica the row was taken from; "none" where there is no tree.
SOURCES = ("tree", "metadata", "data", "none")

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
        # Changes whenever anything else of the replica's rows does, but for `scanned_at`.
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

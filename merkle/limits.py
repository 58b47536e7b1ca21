"""Limits on input from disks and peers; larger input is refused."""

# Ozone's limit for a gRPC message, and so for a tree in one message
# (OZONE_SCM_CHUNK_MAX_SIZE).
MESSAGE_BYTES_MAX = 32 << 20
# Ozone's hard limit for a chunk (ozone.scm.chunk.size).
CHUNK_BYTES_MAX = 32 << 20
# All pages of a paged tree together: 1,000,000 blocks of a few chunks each, as
# protobuf.
TREE_BYTES_MAX = 256 << 20
# A container of 5 GiB with objects of 5 KiB has about this many blocks.
TREE_BLOCKS_MAX = 1_000_000
# A 256 MiB block of 4 KiB chunks.
BLOCK_CHUNKS_MAX = 65_536
# Of all records that a peer sends for one request; a page of a repair is planned for
# half as many chunks. A parsed chunk takes some 300 bytes of memory.
RECORDS_CHUNKS_MAX = 2 * BLOCK_CHUNKS_MAX
RECORDS_BYTES_MAX = 128 << 20
# Larger than any block of Ozone (256 MiB), and far from overflowing signed arithmetic.
BLOCK_BYTES_MAX = 1 << 40
# Of one text that somebody wrote: a reason, a message, a detail.
TEXT_CHARACTERS_MAX = 1_000
# More than any replication factor; a longer list is a mistake or an attack.
PEERS_MAX = 64
# A descriptor has some twenty short lines.
DESCRIPTOR_BYTES_MAX = 1 << 20
# Ozone's container IDs are longs in Java.
CONTAINER_ID_MAX = (1 << 63) - 1
CHECKSUM_MAX = 0xFFFF_FFFF

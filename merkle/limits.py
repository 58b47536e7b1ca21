"""Bounds on what we accept from disks and peers; what exceeds one is refused by
name.
"""

# Ozone's own cap on a gRPC message, and so on a tree sent as one
# (OZONE_SCM_CHUNK_MAX_SIZE).
MESSAGE_BYTES_MAX = 32 << 20
# A chunk is at most 32 MiB in Ozone (ozone.scm.chunk.size has this hard limit).
CHUNK_BYTES_MAX = 32 << 20
# A tree that comes in pages, all pages together: 1,000,000 blocks of a few chunks each,
# as protobuf.
TREE_BYTES_MAX = 256 << 20
# A container of 5 GiB that held nothing but 5 KiB objects has about this many blocks.
TREE_BLOCKS_MAX = 1_000_000
# A 256 MiB block of 4 KiB chunks.
BLOCK_CHUNKS_MAX = 65_536
# Beyond any block that Ozone makes (256 MiB), far below what overflows signed
# arithmetic.
BLOCK_BYTES_MAX = 1 << 40
# More replicas than any replication factor; a longer list is a mistake or an attack.
PEERS_MAX = 64
# The descriptor is some twenty short lines.
DESCRIPTOR_BYTES_MAX = 1 << 20
CHECKSUM_MAX = 0xFFFF_FFFF

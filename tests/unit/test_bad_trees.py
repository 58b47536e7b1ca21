"""Tree files that are none, or not to be believed: each is refused by name, offline,
and left as it is.

`tree show` demands only what Ozone demands of the bytes; `tree check` proves every sum.
Rows of the table: what is wrong, the bytes, the reason, and whether it still can be
shown.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from merkle.limits import BLOCK_BYTES_MAX, BLOCK_CHUNKS_MAX, CHUNK_BYTES_MAX, MESSAGE_BYTES_MAX
from protos.ozone_datanode_pb2 import BlockMerkleTree, ChunkMerkleTree, ContainerChecksumInfo
from tests.support.bad_input import refused, run, unchanged
from tests.support.trees import block, chunk, container, corrupt, deleted, encode_by_protobuf

TREE = encode_by_protobuf(container(block(20, chunk(0), corrupt(chunk(4096))), deleted(30, 7)))
MAX, MIN = (1 << 63) - 1, -(1 << 63)

Spoil = Callable[[ContainerChecksumInfo], object]


def changed(spoil: Spoil) -> bytes:
    info = ContainerChecksumInfo.FromString(TREE)
    spoil(info)
    return info.SerializeToString()


def a_block(name: str, value: int) -> bytes:
    """The tree with this field of its live block set."""
    return changed(lambda info: setattr(_live(info), name, value))


def a_chunk(name: str, value: int, *, at: int = 0) -> bytes:
    """The tree with this field of its first, healthy chunk set, or of its second,
    corrupt one.
    """
    return changed(lambda info: setattr(_live(info).chunkMerkleTree[at], name, value))


def _live(info: ContainerChecksumInfo) -> BlockMerkleTree:
    return info.containerMerkleTree.blockMerkleTree[0]


def _again(info: ContainerChecksumInfo) -> None:
    _live(info).chunkMerkleTree.append(_live(info).chunkMerkleTree[0])


def _twice(info: ContainerChecksumInfo) -> None:
    info.containerMerkleTree.blockMerkleTree.append(_live(info))


def _swapped(info: ContainerChecksumInfo) -> None:
    blocks = info.containerMerkleTree.blockMerkleTree
    reverse = list(reversed(blocks))
    del blocks[:]
    blocks.extend(reverse)


def _many(info: ContainerChecksumInfo) -> None:
    del _live(info).chunkMerkleTree[:]
    _live(info).chunkMerkleTree.extend(
        ChunkMerkleTree(offset=i) for i in range(BLOCK_CHUNKS_MAX + 1)
    )


def _tombstone_with_chunks(info: ContainerChecksumInfo) -> None:
    _live(info).deleted = True


def _overlap(info: ContainerChecksumInfo) -> None:
    _live(info).chunkMerkleTree[1].checksumMatches = True
    _live(info).chunkMerkleTree[1].offset -= 1


# What the bytes must be to be a tree at all.
NO_TREES = [
    ("garbage", b"\xff\x00 no tree", "unparsable"),
    ("text", b"containerID: 12\n", "unparsable"),
    ("cut in half", TREE[: len(TREE) // 2], "unparsable"),
    ("last byte lost", TREE[:-1], "unparsable"),
    ("an endless number", b"\x08" + b"\xff" * 20, "unparsable"),
    ("a length beyond the end", b"\x08\x0c\x12\xff\xff\xff\xff\x0f", "unparsable"),
    ("a group never closed", b"\x0b" * 1000, "unparsable"),
    ("32 MiB and a byte", TREE + b"\x1a" + bytes(MESSAGE_BYTES_MAX), "too_large"),
    (
        "of another container",
        changed(lambda info: setattr(info, "containerID", 13)),
        "wrong_container",
    ),
    ("of container -1", changed(lambda info: setattr(info, "containerID", -1)), "wrong_container"),
    ("of no container", changed(lambda info: info.ClearField("containerID")), "wrong_container"),
    ("blocks in reverse", changed(_swapped), "blocks_unsorted"),
    ("a block twice", changed(_twice), "blocks_unsorted"),
    ("a block behind a larger one", a_block("blockID", 31), "blocks_unsorted"),
    ("a chunk twice", changed(_again), "chunks_unsorted"),
    ("a chunk behind a larger one", a_chunk("offset", 8192), "chunks_unsorted"),
    ("one chunk too many", changed(_many), "too_many_chunks"),
]

# What Ozone would read, and we would not act on.
DISTRUSTED = [
    ("block ID -1", a_block("blockID", -1), "block_id_range"),
    ("block ID -2^63", a_block("blockID", MIN), "block_id_range"),
    ("a deleted block with chunks", changed(_tombstone_with_chunks), "tombstone_with_chunks"),
    ("chunk at -1", a_chunk("offset", -1), "chunk_offset_range"),
    ("chunk at -2^63", a_chunk("offset", MIN), "chunk_offset_range"),
    ("chunk length -1", a_chunk("length", -1), "chunk_length_range"),
    ("chunk length 2^63-1", a_chunk("length", MAX), "chunk_length_range"),
    ("chunk of 32 MiB and a byte", a_chunk("length", CHUNK_BYTES_MAX + 1), "chunk_length_range"),
    ("chunk checksum -1", a_chunk("dataChecksum", -1), "chunk_checksum_range"),
    ("chunk checksum 2^32", a_chunk("dataChecksum", 1 << 32), "chunk_checksum_range"),
    ("chunk checksum -2^63", a_chunk("dataChecksum", MIN), "chunk_checksum_range"),
    ("an empty chunk with a checksum", a_chunk("length", 0), "empty_chunk_with_checksum"),
    ("a chunk checksum that is off by one", a_chunk("dataChecksum", 1), "block_checksum"),
    ("block checksum 2^63-1", a_block("dataChecksum", MAX), "block_checksum"),
    ("a root of 2^63-1", changed(lambda i: setattr(i.containerMerkleTree, "dataChecksum", MAX)),
    "root_checksum"),
    ("a root of 0", changed(lambda i: setattr(i.containerMerkleTree, "dataChecksum", 0)),
    "root_checksum"),
    ("a chunk that ends beyond any block", a_chunk("offset", BLOCK_BYTES_MAX, at=1),
    "block_too_long"),
    ("a chunk at 2^63-1", a_chunk("offset", MAX, at=1), "chunk_offset_range"),
    ("healthy chunks that overlap", changed(_overlap), "chunks_overlap"),
]  # fmt: skip


def checked(path: Path) -> list[str]:
    result = run("tree", "check", path, "--json")
    assert result.exit_code == 3, result.output
    reasons = json.loads(result.stdout)["reasons"]
    assert isinstance(reasons, list)
    return reasons


def test_the_tree_that_is_spoiled_below_is_right(tmp_path: Path) -> None:
    path = tmp_path / "12.tree"
    path.write_bytes(TREE)
    assert [run("tree", command, path).exit_code for command in ("show", "check")] == [0, 0]


@pytest.mark.parametrize(
    ("raw", "reason"), [pytest.param(*rest, id=name) for name, *rest in NO_TREES]
)
def test_bytes_that_are_no_tree_are_refused(tmp_path: Path, raw: bytes, reason: str) -> None:
    path = tmp_path / "12.tree"
    path.write_bytes(raw)
    with unchanged(tmp_path):
        refused("tree_refused", 1, "tree", "show", path)
        assert checked(path) == [reason]


@pytest.mark.parametrize(
    ("raw", "reason"), [pytest.param(*rest, id=name) for name, *rest in DISTRUSTED]
)
def test_a_tree_that_cannot_be_is_shown_but_not_believed(
    tmp_path: Path, raw: bytes, reason: str
) -> None:
    path = tmp_path / "12.tree"
    path.write_bytes(raw)
    with unchanged(tmp_path):
        assert run("tree", "show", path).exit_code == 0
        assert checked(path) == [reason]


@pytest.mark.parametrize(
    "name", ["0.tree", "9223372036854775807.tree", "9999999999999999999.tree", "-1.tree"]
)
def test_a_file_named_after_a_container_that_cannot_be_is_not_believed(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(changed(lambda info: setattr(info, "containerID", 0)))
    with unchanged(tmp_path):
        assert checked(path) in (["container_id_range"], ["wrong_container"])


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_tree_file_that_leads_elsewhere_is_not_followed(tmp_path: Path, command: str) -> None:
    (tmp_path / "there").write_bytes(TREE)
    (tmp_path / "12.tree").symlink_to("there")
    with unchanged(tmp_path):
        result = run("tree", command, tmp_path / "12.tree")
    assert (result.exit_code, "error [disk_failed]" in result.stderr) == (1, True)

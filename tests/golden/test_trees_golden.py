"""Replays trees that Ozone's own writer made: same values, same bytes.

`TREEFOLD_GOLDEN_DIR` names a further folder whose `trees*.json` are replayed too.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from merkle.checksum import fold
from merkle.columns import encode_tree
from merkle.merge import merge
from merkle.tree import BlockId, ChunkTree, ContainerId, ContainerTree, TreeBuilder
from protos.ozone_datanode_pb2 import ContainerChecksumInfo

OWN = Path(__file__).parent / "data"
FURTHER = os.environ.get("TREEFOLD_GOLDEN_DIR")
FOLDERS = [OWN, Path(FURTHER)] if FURTHER else [OWN]

# A case of a golden file: JSON whose shape its README gives.
Case = dict[str, Any]


@dataclass(frozen=True)
class GoldenFile:
    """One file of cases; a case may build on another of the same file."""

    container_id: ContainerId
    cases: dict[str, Case]

    def tree(self, name: str) -> ContainerTree:
        """Replay one case's operations."""
        builder, tree = TreeBuilder(self.container_id), None
        for op in self.cases[name]["ops"]:
            match op["op"]:
                case "chunk":
                    chunk = op["chunk"]
                    builder.add_chunk(
                        BlockId(op["block_id"]),
                        ChunkTree(
                            chunk["offset"], chunk["len"], _data_checksum(chunk), op["matches"]
                        ),
                    )
                case "block":
                    builder.add_block(BlockId(op["block_id"]))
                case "set_deleted":
                    builder.set_deleted(BlockId(op["block_id"]), op["checksum"])
                case "add_deleted_blocks":
                    for block_id, chunks in op["blocks"]:
                        in_order = sorted(chunks, key=lambda chunk: chunk["offset"])
                        builder.delete_recorded(
                            BlockId(block_id), [_data_checksum(chunk) for chunk in in_order]
                        )
                    tree = builder.build(compute_root=op["compute_checksum"])
                case "from":
                    builder = TreeBuilder(self.container_id, self.tree(op["case"]))
                case "update":
                    tree = merge(builder.build(), self.tree(op["case"]))
                    builder = TreeBuilder(self.container_id, tree)
                case "to_proto":
                    tree = builder.build()
                case unknown:
                    pytest.fail(f"unknown operation {unknown}")
        assert tree is not None
        return tree


def _data_checksum(chunk: Case) -> int:
    return fold(bytes.fromhex("".join(chunk["checksums"])))


@cache
def _golden(path: Path) -> GoldenFile:
    content = json.loads(path.read_text())
    return GoldenFile(
        ContainerId(content["container_id_in_checksum_info"]),
        {case["name"]: case for case in content["cases"]},
    )


def _all_cases() -> Iterator[Any]:
    for folder in FOLDERS:
        for path in sorted(folder.glob("trees*.json")):
            for name in _golden(path).cases:
                yield pytest.param(path, name, id=f"{folder.name}-{path.stem}-{name}")


@pytest.mark.parametrize(("path", "name"), list(_all_cases()))
def test_a_tree_replayed_equals_the_reference_writers(path: Path, name: str) -> None:
    """W1-W22, E1: values and bytes are those of Ozone's tree writer."""
    golden = _golden(path)
    case, tree = golden.cases[name], golden.tree(name)
    expected = case["expected"]

    assert tree.data_checksum == (
        expected["data_checksum"] if expected["has_data_checksum"] else None
    )
    assert [_as_json(tree, i) for i in range(len(tree.blocks))] == expected["blocks"]
    raw = encode_tree(tree)
    assert raw.hex() == case["checksum_info_hex"]
    message = ContainerChecksumInfo.FromString(raw)
    assert message.containerMerkleTree.SerializeToString().hex() == case["tree_hex"]


def _as_json(tree: ContainerTree, i: int) -> Case:
    block = tree.blocks[i]
    return {
        "block_id": block.block_id,
        "data_checksum": block.data_checksum,
        "deleted": block.deleted,
        "chunks": [
            {
                "offset": chunk.offset,
                "length": chunk.length_bytes,
                "data_checksum": chunk.data_checksum,
                "checksum_matches": chunk.checksum_matches,
            }
            for chunk in block.chunks
        ],
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_golden_folder_holds_vectors(folder: Path) -> None:
    """A folder that is named but holds nothing to replay proves nothing, and must not
    pass.
    """
    files = [*folder.glob("trees*.json"), *folder.glob("slices*.json")]
    assert files, f"{folder} holds neither trees*.json nor slices*.json"
    for path in folder.glob("trees*.json"):
        assert _golden(path).cases, f"{path} holds no cases"


def test_the_own_vectors_are_all_replayed() -> None:
    """The reference file has 31 cases; fewer means that it was not read."""
    assert len(_golden(OWN / "trees.json").cases) == 31

"""`treefold agent import-trees`: replicas without a tree get one; no claim of a file
replaces what is known here.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from admin.cli import treefold
from chunktable.packed_trees import TREE_SCHEMA, PackedTree
from merkle.columns import encode_tree
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from ozone.containers import ContainerStore
from ozone.scan import build_from_metadata
from ozone.treefile import TreeFiles
from ozone.volume import Hold, Volume, open_volume
from runtime.disk import Disk
from tests.support.handmade import NODE, STORAGE, VolumeMaker, whole
from tests.support.sweeps import run as sweep
from tests.support.volumes import state_of

Change = Callable[[PackedTree], PackedTree]


class Place:
    """A volume with containers 1 and 2, each with blocks 20 and 21, an agent's
    settings, and packed trees.
    """

    def __init__(self, folder: Path, hold: Hold) -> None:
        self.folder = folder
        self.volume = folder / "v"
        with VolumeMaker(self.volume) as made:
            for container_id in (1, 2):
                made.container(container_id)
                for block_id in (20, 21):
                    made.block(container_id, block_id, whole(3000), whole(3000, 3000))
        self.hold = hold
        self.config = folder / "agent.toml"
        self.config.write_text(
            f'state_folder = "{folder}/state"\n[[volumes]]\npath = "{self.volume}"\nhold ='
            f' "{hold.value}"\n[repair]\nenabled = {str(hold is Hold.OWNER).lower()}\n'
        )
        with self.opened() as volume:
            store = ContainerStore(volume, Disk())
            self.trees = [build_from_metadata(store.get(ContainerId(i))) for i in (1, 2)]

    def opened(self) -> Volume:
        return open_volume(
            self.volume, hold=self.hold, state_folder=self.folder / "state", disk=Disk()
        )

    def pack(self, *trees: ContainerTree, change: Change = lambda packed: packed) -> Path:
        rows = [
            change(
                PackedTree(
                    NODE, STORAGE, tree.container_id, "CLOSED", 7, 0, "metadata", None,
                    tree.data_checksum or 0,
                    encode_tree(tree),
                )
            )
            for tree in trees
        ]  # fmt: skip
        packed = self.folder / "packed"
        packed.mkdir(exist_ok=True)
        columns = {
            name: [asdict(row)["scanned_at_ms" if name == "scanned_at" else name] for row in rows]
            for name in TREE_SCHEMA.names
        }
        pq.write_table(
            pa.table(columns, TREE_SCHEMA),
            packed / "trees.parquet",
            compression="none",
            write_page_checksum=True,
        )
        return packed

    def stored(self, container_id: int) -> bytes | None:
        with self.opened() as volume:
            return TreeFiles(volume, Disk()).raw(ContainerId(container_id))

    def store(self, tree: ContainerTree) -> None:
        with self.opened() as volume:
            TreeFiles(volume, Disk()).update(tree.container_id, tree)

    def run(self, packed: Path, status: int = 0) -> Result:
        words = ["agent", "import-trees", str(packed), "--config", str(self.config), "--json"]
        result = CliRunner().invoke(treefold, words)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert "Traceback" not in result.output
        assert result.exit_code == status, result.output
        return result


@pytest.fixture(params=list(Hold), ids=lambda hold: hold.value)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, request.param)


@pytest.fixture
def read_only(tmp_path: Path) -> Place:
    return Place(tmp_path, Hold.READ_ONLY)


def test_replicas_without_a_tree_get_theirs_once(place: Place) -> None:
    packed, before = place.pack(*place.trees), state_of(place.volume)
    said = json.loads(place.run(packed).stdout)
    assert (said["imported"], said["unchanged"], said["refused"]) == (2, 0, {})
    assert [place.stored(i) for i in (1, 2)] == [encode_tree(tree) for tree in place.trees]
    if place.hold is Hold.READ_ONLY:
        assert state_of(place.volume) == before
    said = json.loads(place.run(packed).stdout)
    assert (said["imported"], said["unchanged"]) == (0, 2)


def test_what_a_sweep_wrote_is_imported(read_only: Place) -> None:
    out = read_only.folder / "out"
    sweep_id = sweep(out, volumes=[read_only.volume], write_trees=True).sweep_id
    assert json.loads(read_only.run(out / "trees" / f"sweep_id={sweep_id}").stdout)["imported"] == 2
    assert [read_only.stored(i) for i in (1, 2)] == [encode_tree(tree) for tree in read_only.trees]


def test_known_tombstones_stay(place: Place) -> None:
    """A block was deleted since the tree was made; all that is left of it is its
    tombstone.
    """
    tombstone = BlockTree.tombstone(BlockId(21), 99)
    place.store(ContainerTree.of(ContainerId(1), [tombstone]))
    found = list(place.folder.rglob("metadata/1.tree")) or list(
        place.folder.glob("state/*/trees/1.tree")
    )
    found[0].unlink()
    assert json.loads(place.run(place.pack(place.trees[0])).stdout)["imported"] == 1
    expected = ContainerTree.of(ContainerId(1), [place.trees[0].blocks[0], tombstone])
    assert place.stored(1) == encode_tree(expected)


def test_a_stored_tree_is_replaced_only_by_that_of_a_later_scan_that_is_known_here(
    read_only: Place,
) -> None:
    other = ContainerTree.of(ContainerId(1), [replace(read_only.trees[0].blocks[0])])
    read_only.store(other)
    (path,) = read_only.folder.glob("state/*/trees/1.tree")
    scans = path.parents[1] / "scans"
    scans.mkdir()
    (scans / "1.json").write_text(json.dumps({"at_ms": 5_000, "findings": []}))

    def refused(scanned_at_ms: int | None) -> dict[str, int]:
        packed = read_only.pack(
            read_only.trees[0], change=lambda p: replace(p, scanned_at_ms=scanned_at_ms)
        )
        found: dict[str, int] = json.loads(read_only.run(packed, 5).stdout)["refused"]
        return found

    os.utime(path, (6, 6))
    assert refused(None) == refused(5_000) == refused(1 << 50) == {"stored_not_older": 1}
    os.utime(path, (4, 4))
    assert refused(4_999) == {"stored_not_older": 1}
    assert read_only.stored(1) == encode_tree(other)
    packed = read_only.pack(read_only.trees[0], change=lambda p: replace(p, scanned_at_ms=5_000))
    assert json.loads(read_only.run(packed).stdout)["imported"] == 1
    assert read_only.stored(1) == encode_tree(read_only.trees[0])


def with_blocks(*blocks: BlockTree) -> Change:
    tree = ContainerTree.of(ContainerId(1), blocks)
    return lambda packed: replace(packed, root=tree.data_checksum or 0, tree=encode_tree(tree))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda packed: replace(packed, tree=b""), "no_root"),
        (lambda packed: replace(packed, tree=packed.tree[:-1]), "tree_unparsable"),
        (lambda packed: replace(packed, tree=os.urandom(50) + b"\xff" * 20), "tree_unparsable"),
        (lambda packed: replace(packed, container_id=2), "tree_wrong_container"),
        (lambda packed: replace(packed, container_id=-1), "tree_wrong_container"),
        (lambda packed: replace(packed, root=packed.root ^ 1), "root_differs"),
        (lambda packed: replace(packed, volume="DS-other"), "unknown_volume"),
        (lambda packed: replace(packed, volume="../../etc"), "unknown_volume"),
        (lambda packed: replace(packed, state="QUASI_CLOSED"), "state_differs"),
        (lambda packed: replace(packed, state="nonsense"), "state_differs"),
        (lambda packed: replace(packed, bcs_id=6), "bcs_id_differs"),
        (lambda packed: replace(packed, replica_index=1), "replica_index_differs"),
        (with_blocks(BlockTree.live(BlockId(99), [ChunkTree(0, 1, 1)])), "unknown_block"),
        (with_blocks(BlockTree.live(BlockId(20), [ChunkTree(0, 3000, 1)])), "record_differs"),
        (with_blocks(BlockTree.live(BlockId(20), [ChunkTree(50, 10, 1)])), "record_differs"),
        (with_blocks(BlockTree.tombstone(BlockId(20), 1)), "tombstone_of_live_block"),
    ],
)
def test_a_tree_that_is_not_of_the_replica_here_is_refused_by_name(
    read_only: Place, change: Change, reason: str
) -> None:
    said = json.loads(read_only.run(read_only.pack(read_only.trees[0], change=change), 5).stdout)
    assert said["refused"] == {reason: 1}
    assert [refusal["reason"] for refusal in said["refusals"]] == [reason]
    assert (read_only.stored(1), read_only.stored(2)) == (None, None)


def test_a_container_that_is_not_here_and_one_of_another_datanode(read_only: Place) -> None:
    stranger = ContainerTree.of(ContainerId(77), [])
    packed = read_only.pack(stranger)
    assert json.loads(read_only.run(packed, 5).stdout)["refused"] == {"container_not_here": 1}
    packed = read_only.pack(
        *read_only.trees, change=lambda packed: replace(packed, datanode="somebody")
    )
    said = json.loads(read_only.run(packed).stdout)
    assert (said["imported"], said["refused"]) == (0, {})


def test_what_is_no_folder_of_trees_is_an_error(read_only: Place) -> None:
    empty = read_only.folder / "empty"
    empty.mkdir()
    assert "has no trees of a sweep" in read_only.run(empty, 1).output
    assert "cannot be read" in read_only.run(read_only.folder / "nothing", 1).output
    (empty / "x.parquet").write_bytes(b"PAR1 nonsense")
    assert "cannot be read" in read_only.run(empty, 1).output
    pq.write_table(pa.table({"tree": [b""]}), empty / "x.parquet")
    assert "has no column" in read_only.run(empty, 1).output
    packed = read_only.pack(*read_only.trees) / "trees.parquet"
    raw = bytearray(packed.read_bytes())
    raw[raw.index(encode_tree(read_only.trees[0])) + 10] ^= 1
    packed.write_bytes(raw)
    assert "cannot be read" in read_only.run(packed.parent, 1).output
    assert read_only.stored(1) is None

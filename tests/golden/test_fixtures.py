"""The volumes that real Ozone datanodes wrote: roots, findings and tree bytes as Ozone
and an independent reader have them, and not a byte changed by reading (rows S2, S3,
S15, R1, R2).

`TREEFOLD_FIXTURES_DIR` names a further folder with `expected.json` and `MOMENT.tar.xz`
that is replayed likewise.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from merkle.check import check_tree
from merkle.columns import encode_tree
from merkle.errors import TreeRefusedError
from merkle.merge import merge
from merkle.tree import ContainerId, ContainerTree, root_hex
from ozone.containers import Container, ContainerStore
from ozone.rocks import OzoneTable, block_key, container_prefix
from ozone.scan import FindingType, ScanResult, build_from_metadata, scan
from ozone.volume import Hold, open_volume
from protos.convert import record_from_bytes, record_to_bytes, tree_from_bytes
from runtime.disk import Disk
from tests.support.volumes import ERASURE_CODED, OZONE, state_of, unpack

# What the independent reader calls by one name.
KINDS = {
    FindingType.CORRUPT_CHUNK: "corrupt or short",
    FindingType.INCONSISTENT_CHUNK_LENGTH: "corrupt or short",
    FindingType.MISSING_CHUNK: "corrupt or short",
    FindingType.MISSING_DATA_FILE: "missing block file",
}


@dataclass(frozen=True)
class Moment:
    """One archive, unpacked, and what is expected of each replica in it."""

    name: str
    folder: Path
    rows: list[dict[str, object]]
    # Ours, of which we know more than a further folder tells.
    packaged: bool


def archives() -> list[tuple[Path, str]]:
    folders = [OZONE, ERASURE_CODED]
    if further := os.environ.get("TREEFOLD_FIXTURES_DIR"):
        folders.append(Path(further))
    return [
        (folder, name)
        for folder in folders
        for name in json.loads((folder / "expected.json").read_text())
    ]


@pytest.fixture(scope="module", params=archives(), ids=lambda found: f"{found[0].name}-{found[1]}")
def moment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Moment]:
    folder, name = request.param
    unpacked = unpack(name, tmp_path_factory.mktemp("fixture"), fixture=folder)
    before = state_of(unpacked)
    rows = json.loads((folder / "expected.json").read_text())[name]
    yield Moment(name, unpacked, rows, packaged=folder in (OZONE, ERASURE_CODED))
    assert state_of(unpacked) == before


@pytest.fixture
def replicas(moment: Moment, tmp_path: Path) -> Iterator[list[tuple[dict[str, object], Container]]]:
    disk = Disk()
    found: dict[tuple[str, int], Container] = {}
    with ExitStack() as stack:
        for root in sorted(moment.folder.glob("*/volume*")):
            state = tmp_path / root.parent.name / root.name
            volume = stack.enter_context(
                open_volume(root, hold=Hold.READ_ONLY, state_folder=state, disk=disk)
            )
            store = ContainerStore(volume, disk)
            found |= {
                (root.parent.name, container_id): store.get(container_id)
                for container_id in store.ids()
            }
        yield [
            (row, found[str(row["datanode"]), int(str(row["containerID"]))]) for row in moment.rows
        ]


def stored_tree(container: Container) -> ContainerTree | None:
    """The stored tree; one that cannot be read counts as absent."""
    try:
        return tree_from_bytes(container.tree_path.read_bytes(), container.container_id)
    except (FileNotFoundError, TreeRefusedError):
        return None


def where(row: dict[str, object]) -> str:
    return f"{row['datanode']}, container {row['containerID']}"


def by_place(chunks: object) -> list[dict[str, object]]:
    assert isinstance(chunks, list)
    return sorted(chunks, key=lambda chunk: (chunk["blockID"], chunk["offset"] or 0))


def damaged_chunks(result: ScanResult) -> list[dict[str, object]]:
    return [
        {"blockID": f.block_id, "offset": f.offset, "kind": KINDS[f.type]} for f in result.findings
    ]


def test_roots_from_data_damage_and_deletions_are_those_of_ozone(
    moment: Moment, replicas: list[tuple[dict[str, object], Container]]
) -> None:
    for row, container in replicas:
        result = scan(container)
        tree = merge(result.tree, stored_tree(container))

        assert root_hex(tree.data_checksum) == row["rootFromData"], where(row)
        assert by_place(damaged_chunks(result)) == by_place(row["damagedChunks"]), where(row)
        assert sum(block.deleted for block in tree.blocks) == row["deletedBlocks"], where(row)
        assert container.state.value == row["state"], where(row)
        assert container.replica_index == row.get("replicaIndex", 0), where(row)
        # Elsewhere the stored tree is older than the damage.
        if row["treeFileRoot"] == row["rootFromData"]:
            assert encode_tree(tree) == container.tree_path.read_bytes(), where(row)
            if moment.packaged:
                assert container.counters().data_checksum == tree.data_checksum, where(row)


def test_roots_from_records_are_those_of_ozone(
    replicas: list[tuple[dict[str, object], Container]],
) -> None:
    for row, container in replicas:
        tree = merge(build_from_metadata(container), stored_tree(container))

        assert root_hex(tree.data_checksum) == row["rootFromMetadata"], where(row)


def test_stored_trees_are_read_and_written_byte_for_byte(
    moment: Moment,
    replicas: list[tuple[dict[str, object], Container]],
) -> None:
    for row, container in replicas:
        tree = stored_tree(container)
        if tree is None:
            assert row["treeFileRoot"] is None, where(row)
            continue
        if moment.packaged:
            check_tree(tree)
        assert root_hex(tree.data_checksum) == row["treeFileRoot"], where(row)
        assert encode_tree(tree) == container.tree_path.read_bytes(), where(row)


def test_records_are_read_and_written_byte_for_byte(
    replicas: list[tuple[dict[str, object], Container]],
) -> None:
    for _, container in replicas:
        database = container.volume.database
        rows = dict(database.items(OzoneTable.BLOCK_DATA, container_prefix(container.container_id)))
        for record in container.records():
            raw = rows.pop(block_key(container.container_id, record.block_id))
            assert record_to_bytes(record) == raw
            assert record_from_bytes(raw) == record
        assert rows == {}


def test_a_scan_of_the_damage_gives_what_ozones_scanner_got(tmp_path: Path) -> None:
    unpack("damaged", tmp_path)
    detected = json.loads((OZONE / "expected.json").read_text())["detected"]
    for datanode in ("dn1", "dn2", "dn3"):
        state = tmp_path / "state" / datanode
        with open_volume(
            tmp_path / datanode / "volume1", hold=Hold.READ_ONLY, state_folder=state, disk=Disk()
        ) as volume:
            store = ContainerStore(volume, Disk())
            for row in detected:
                if row["datanode"] == datanode:
                    container = store.open(ContainerId(row["containerID"]))
                    result = scan(container)
                    # Findings mark a replica UNHEALTHY, as Ozone did.
                    assert ("UNHEALTHY" if result.findings else "CLOSED") == row["state"], where(
                        row
                    )
                    tree = merge(result.tree, stored_tree(container))
                    assert root_hex(tree.data_checksum) == row["treeFileRoot"], where(row)

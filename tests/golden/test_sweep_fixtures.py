"""Sweeps over the volumes that real Ozone datanodes wrote name the containers whose
roots differ, and no others.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from admin.sweep import exit_status
from merkle.outcome import Verdict
from merkle.replica import TreeSource
from ozone.volume import parse_version
from sweep.output import SweepTable
from tests.support.sweeps import run, table_of, verdicts_of
from tests.support.volumes import ERASURE_CODED, MOMENTS, OZONE, state_of, unpack


def expected(fixture: Path, moment: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((fixture / "expected.json").read_text())[moment]
    return rows


def differing(rows: list[dict[str, Any]], root: str) -> tuple[int, ...]:
    """Containers of which replicas have different roots."""
    roots: dict[int, set[str]] = {}
    for row in rows:
        roots.setdefault(row["containerID"], set()).add(row[root])
    return tuple(sorted(container_id for container_id, found in roots.items() if len(found) > 1))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("source", "root"), [(TreeSource.TREE, "treeFileRoot"), (TreeSource.DATA, "rootFromData")]
)
def test_diverged_are_the_containers_whose_roots_differ(
    tmp_path: Path, moment: str, source: TreeSource, root: str
) -> None:
    folder = unpack(moment, tmp_path / "cluster")
    before = state_of(folder)
    volumes = sorted(folder.glob("dn*/volume1"))
    summary = run(tmp_path / "out", volumes=volumes, source=source)
    rows = expected(OZONE, moment)
    assert summary.diverged == differing(rows, root)
    assert (summary.containers, summary.replicas) == (6, 18)
    assert not summary.skipped
    assert state_of(folder) == before
    # Nothing can be said of a container without recorded checksums, whatever is wrong
    # with it.
    assert verdicts_of(tmp_path / "out", summary.sweep_id)[5] == Verdict.UNKNOWN.value


def test_roots_are_those_of_the_tree_files_and_datanodes_those_of_the_volumes(
    tmp_path: Path,
) -> None:
    folder = unpack("healthy", tmp_path / "cluster")
    volumes = sorted(folder.glob("dn*/volume1"))
    names = {
        parse_version((path / "hdds" / "VERSION").read_bytes()).datanode_id: path.parent.name
        for path in volumes
    }
    summary = run(tmp_path / "out", volumes=volumes)
    # As `ctime` in their VERSION files has it.
    assert sorted(summary.volumes_created_ms.values()) == [
        1795313269105,
        1795313269371,
        1795313269645,
    ]
    assert {names[datanode] for datanode, _ in summary.volumes_created_ms} == set(names.values())
    found = {
        (names[row["datanode"]], row["container_id"]): f"{row['root']:x}"
        for row in table_of(tmp_path / "out", SweepTable.ROOTS, summary.sweep_id)
    }
    assert found == {
        (row["datanode"], row["containerID"]): row["treeFileRoot"]
        for row in expected(OZONE, "healthy")
    }


@pytest.mark.parametrize("source", list(TreeSource))
def test_erasure_coded_replicas_never_diverge(tmp_path: Path, source: TreeSource) -> None:
    folder = unpack("healthy", tmp_path / "cluster", fixture=ERASURE_CODED)
    summary = run(tmp_path / "out", volumes=sorted(folder.glob("dn*/volume1")), source=source)
    assert differing(expected(ERASURE_CODED, "healthy"), "treeFileRoot")
    assert (summary.diverged, summary.verdicts, summary.excluded) == (
        (),
        {"EXCLUDED": 3},
        summary.replicas,
    )
    assert exit_status(summary) == 0


def test_a_volume_that_cannot_be_read_is_skipped_by_name_and_not_taken_for_empty(
    tmp_path: Path,
) -> None:
    folder = unpack("healthy", tmp_path / "cluster")
    (folder / "dn3" / "volume1" / "hdds" / "VERSION").unlink()
    summary = run(
        tmp_path / "out",
        volumes=[*sorted(folder.glob("dn*/volume1")), folder / "dn1" / "volume1" / "."],
    )
    assert summary.skipped[0].input.endswith("dn3/volume1")
    assert summary.skipped[0].reason.startswith("volume_invalid")
    assert (summary.diverged, summary.replicas) == ((), 12)


def test_volumes_and_tables_are_compared_with_each_other(tmp_path: Path) -> None:
    """The rows that one sweep took of a volume serve another as a table."""
    folder = unpack("detected", tmp_path / "cluster")
    first, *others = sorted(folder.glob("dn*/volume1"))
    alone = run(tmp_path / "one", volumes=[first])
    rows = tmp_path / "one" / "chunks" / alone.sweep_id
    mixed = run(tmp_path / "out", rows, volumes=others)
    assert mixed.diverged == differing(expected(OZONE, "detected"), "treeFileRoot")

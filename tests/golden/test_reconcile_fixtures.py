"""Three datanodes with the volumes that real Ozone wrote and damaged heal each other,
as Ozone did or better.
"""

from pathlib import Path
from threading import Event

import pytest

from merkle.outcome import OutcomeState, Verdict
from merkle.replica import ReplicaState
from merkle.tree import ContainerId
from repair.requests import ReconcileOptions
from tests.support.in_process import Datanode, datanodes, reconcile
from tests.support.volumes import container_folder, copy_volume, unpack

NAMES = ("dn1", "dn2", "dn3")
CONTAINERS = (1, 2, 3, 4, 5, 6)
# Type NONE: nothing was recorded that could tell good bytes from bad.
UNVERIFIABLE = 5


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        moment: unpack(moment, tmp_path_factory.mktemp(moment))
        for moment in ("healthy", "damaged", "detected", "reconciled")
    }


def _copies(moment: Path, target: Path) -> dict[str, Path]:
    return {name: copy_volume(moment, name, target / name / "volume1") for name in NAMES}


def _blocks(volume: Path, container_id: int) -> dict[str, bytes]:
    folder = container_folder(volume, container_id) / "chunks"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.block"))}


def _tree(volume: Path, container_id: int) -> bytes:
    return (
        container_folder(volume, container_id) / "metadata" / f"{container_id}.tree"
    ).read_bytes()


def _records(node: Datanode, container_id: int) -> dict[int, object]:
    container = node.store.volume_of(ContainerId(container_id)).containers.get(
        ContainerId(container_id)
    )
    return {record.block_id: record for record in container.records()}


def test_detected_damage_heals_as_far_as_ozone_healed_it_and_container_3_too(
    moments: dict[str, Path], tmp_path: Path
) -> None:
    """E1, E2: one round, return to service off; Ozone left container 3 diverged."""
    roots = _copies(moments["detected"], tmp_path)
    unverifiable = {name: _blocks(roots[name], UNVERIFIABLE) for name in NAMES}
    with datanodes(roots, tmp_path / "state") as nodes:
        before = {
            name: {r.container_id: r.state for r in node.store.replicas()}
            for name, node in nodes.items()
        }
        for container_id in CONTAINERS:
            outcomes = {name: reconcile(nodes, name, container_id) for name in NAMES}
            assert all(outcome.state is OutcomeState.DONE for outcome in outcomes.values()), (
                outcomes
            )
            wanted = Verdict.UNKNOWN if container_id == UNVERIFIABLE else None
            for outcome in outcomes.values():
                assert outcome.verdict is wanted or outcome.verdict in (
                    Verdict.MATCH,
                    Verdict.REPAIRABLE,
                )
        healthy = _copies(moments["healthy"], tmp_path / "healthy")
        with datanodes(healthy, tmp_path / "healthy-state") as originals:
            for name in NAMES:
                for container_id in CONTAINERS:
                    assert _records(nodes[name], container_id) == _records(
                        originals[name], container_id
                    )
        after = {
            name: {r.container_id: r.state for r in node.store.replicas()}
            for name, node in nodes.items()
        }
        assert after == before
    for container_id in set(CONTAINERS) - {UNVERIFIABLE}:
        for name in NAMES:
            healthy_volume = moments["healthy"] / name / "volume1"
            assert _blocks(roots[name], container_id) == _blocks(healthy_volume, container_id)
            assert _tree(roots[name], container_id) == _tree(healthy_volume, container_id)
    # Nothing is written by vote.
    assert {name: _blocks(roots[name], UNVERIFIABLE) for name in NAMES} == unverifiable


def test_trees_are_those_that_ozone_ended_with_where_it_succeeded(
    moments: dict[str, Path], tmp_path: Path
) -> None:
    roots = _copies(moments["detected"], tmp_path)
    with datanodes(roots, tmp_path / "state") as nodes:
        for container_id in (1, 2, 4, 6):
            for name in NAMES:
                reconcile(nodes, name, container_id)
    for container_id in (1, 2, 4, 6):
        for name in NAMES:
            assert _tree(roots[name], container_id) == _tree(
                moments["reconciled"] / name / "volume1", container_id
            )


def test_a_healed_replica_returns_to_service_where_asked(
    moments: dict[str, Path], tmp_path: Path
) -> None:
    """CR-001"""
    roots = _copies(moments["detected"], tmp_path)
    options = ReconcileOptions(return_to=ReplicaState.CLOSED)
    with datanodes(roots, tmp_path / "state") as nodes:
        for container_id in CONTAINERS:
            for name in NAMES:
                reconcile(nodes, name, container_id, options=options)
        states = {r.state for node in nodes.values() for r in node.store.replicas()}
    assert states == {ReplicaState.CLOSED}


def test_damage_that_nobody_has_noticed_yet_needs_a_scan_first_and_then_heals(
    moments: dict[str, Path], tmp_path: Path
) -> None:
    """The trees of `damaged` still call all data good, so nobody repairs; after a scan
    everybody does.
    """
    roots = _copies(moments["damaged"], tmp_path)
    with datanodes(roots, tmp_path / "state") as nodes:
        for name in NAMES:
            for container_id in CONTAINERS:
                node = nodes[name]
                node.store.open_replica(
                    ContainerId(container_id), "scan", cancelled=Event(), on_bytes=lambda _: None
                ).scan()
        for container_id in CONTAINERS:
            for name in NAMES:
                reconcile(nodes, name, container_id)
    for container_id in set(CONTAINERS) - {UNVERIFIABLE}:
        for name in NAMES:
            assert _blocks(roots[name], container_id) == _blocks(
                moments["healthy"] / name / "volume1", container_id
            )


def test_a_second_round_writes_nothing(moments: dict[str, Path], tmp_path: Path) -> None:
    """inv-I8."""
    roots = _copies(moments["detected"], tmp_path)
    written, lines = list[int](), list[int]()
    with datanodes(roots, tmp_path / "state") as nodes:
        for _ in range(2):
            outcomes = [
                reconcile(nodes, name, container_id)
                for container_id in CONTAINERS
                for name in NAMES
            ]
            written.append(sum(outcome.progress.bytes_written for outcome in outcomes))
            lines.append(sum(len(node.audit) for node in nodes.values()))
    assert written[0] > 0 == written[1]
    assert lines[0] == lines[1] > 0


def test_every_write_has_its_audit_line(moments: dict[str, Path], tmp_path: Path) -> None:
    roots = _copies(moments["detected"], tmp_path)
    with datanodes(roots, tmp_path / "state") as nodes:
        outcome = reconcile(nodes, "dn1", 3)
        lines = nodes["dn1"].audit
        assert sum(length for _, _, _, length, _, _ in lines) == outcome.progress.bytes_written > 0
        assert {(container, source, job) for container, _, _, _, source, job in lines} <= {
            (3, "dn2", "job-1"),
            (3, "dn3", "job-1"),
        }

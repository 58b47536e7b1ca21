"""`treefold sweep run --cluster`: the verdicts of a diagnosis, by way of tables."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from merkle.columns import encode_tree
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.scm_client import NodeHealth
from runtime.errors import PeerRefusedError
from tests.support.live_twin import PEERS, LiveTwin, live_twin
from tests.support.peers import MemoryReplica

BLOCK = BlockId(20)


@pytest.fixture
def cluster() -> Iterator[LiveTwin]:
    with live_twin() as found:
        yield found


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "client.toml"
    file.touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(file))


def sweep(cluster: LiveTwin, out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    given = ("sweep", "run", "--cluster", cluster.address, "--out", str(out), "--json", *words)
    done = CliRunner().invoke(treefold, given)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


def rows_of(out: Path) -> dict[int, dict[str, Any]]:
    """The rows of the last sweep's verdicts, by container."""
    import pyarrow.parquet as pq

    [*_, last] = sorted((out / "verdicts").iterdir())
    rows = pq.read_table(last, partitioning=None).to_pylist()
    return {row["container_id"]: row for row in rows}


def verdicts(out: Path) -> dict[int, str]:
    """The verdicts of the last sweep that it wrote a row of."""
    return {number: str(row["verdict"]) for number, row in rows_of(out).items()}


def lose(cluster: LiveTwin, number: int, *datanodes: int) -> None:
    """SCM no longer knows these replicas, and nobody has them."""
    for datanode in datanodes:
        cluster.sources[datanode - 1].replicas.pop(ContainerId(number), None)
    cluster.report(number)


def damage(replica: MemoryReplica) -> None:
    replica.flip(BLOCK, 100)
    replica.tree = encode_tree(replica.scanned_tree())


def make_containers(cluster: LiveTwin) -> None:
    """One container of each verdict, and one that is not compared."""
    cluster.add(1)
    damage(cluster.add(2)[0])
    for replica in cluster.add(3):
        damage(replica)
    without_tree = cluster.add(4)[1]
    without_tree.tree = PeerRefusedError("no tree")
    cluster.add_erasure_coded(5, {30: 9_000})
    cluster.add(6)
    for source in cluster.sources:
        source.replicas[6].state = ReplicaState.OPEN  # type: ignore[index]
    for number in range(1, 7):
        cluster.report(number)


def test_a_sweep_gives_each_container_the_verdict_of_a_diagnosis(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    make_containers(cluster)
    diagnosed = {number: one.verdict.value for number, one in cluster.diagnose().items()}
    status, document = sweep(cluster, tmp_path)
    assert status == 3
    found = verdicts(tmp_path)
    for number in (1, 2, 3, 4):
        assert found[number] == diagnosed[number], number
    assert document["cluster"] == {
        "clusterID": "CID-twin", "datanodes": 3, "containers": 6, "replicas": 18,
        "incompleteContainers": 0,
    }  # fmt: skip


def test_a_silent_datanode_leaves_its_containers_unknown(cluster: LiveTwin, tmp_path: Path) -> None:
    cluster.add(1)
    cluster.stop(2)
    cluster.set_health(2, NodeHealth.DEAD)
    status, _ = sweep(cluster, tmp_path)
    assert status == 5
    assert verdicts(tmp_path)[1] == "UNKNOWN"
    assert cluster.diagnose()[1].verdict.value == "UNKNOWN"


def test_a_replica_that_scm_requires_and_does_not_know_is_missed_in_the_first_sweep(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    """Those of a closed container that are left may well be equal."""
    for number in (1, 2, 3, 4):
        cluster.add(number)
    lose(cluster, 2, 3)
    lose(cluster, 3, 1, 2, 3)
    damage(cluster.sources[0].replicas[ContainerId(4)])
    lose(cluster, 4, 3)
    status, document = sweep(cluster, tmp_path)
    assert status == 3
    found = rows_of(tmp_path)
    # What differs differs, whatever the third one has.
    assert verdicts(tmp_path) == {1: "MATCH", 2: "UNSEEN", 3: "UNSEEN", 4: "REPAIRABLE"}
    assert [found[number]["unread"] for number in (1, 2, 3, 4)] == [0, 1, 3, 1]
    assert found[2]["detail"] == (
        "1 of 3 expected replicas was not read: SCM requires 3 replicas, and 2 were read"
    )
    assert document["unseen"] == 5
    assert document["cluster"]["incompleteContainers"] == 3
    assert "unknown" in next(tmp_path.rglob("report*.html")).read_text()


def test_a_lost_replica_is_named_by_its_place_and_counted_once(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    cluster.add(1)
    assert sweep(cluster, tmp_path)[0] == 0
    lose(cluster, 1, 2)
    assert sweep(cluster, tmp_path)[0] == 5
    [row] = rows_of(tmp_path).values()
    assert (row["verdict"], row["unread"]) == ("UNSEEN", 1)
    assert PEERS[1] in str(row["detail"])
    # It is back: nothing of what SCM said last time is left.
    cluster.add(1)
    assert sweep(cluster, tmp_path)[0] == 0
    assert verdicts(tmp_path) == {1: "MATCH"}


def test_a_replica_without_a_place_is_forgotten_once_scm_knows_all(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    cluster.add(1)
    lose(cluster, 1, 2)
    assert sweep(cluster, tmp_path)[0] == 5
    first = rows_of(tmp_path)
    assert sweep(cluster, tmp_path)[0] == 5
    assert rows_of(tmp_path) == first
    cluster.add(1)
    assert sweep(cluster, tmp_path)[0] == 0
    assert verdicts(tmp_path) == {1: "MATCH"}


def test_a_replica_that_scm_replaced_elsewhere_is_not_missed(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    """Nobody reports the removal of what a dead datanode had."""
    cluster.add(1)
    number = ContainerId(1)
    one = replace(cluster.scm.containers[number], required_replicas=1, replication="RATIS/ONE")
    cluster.scm.containers[number] = one
    lose(cluster, 1, 2, 3)
    before, _ = sweep(cluster, tmp_path)
    verdict = verdicts(tmp_path)
    cluster.sources[1].replicas[number] = cluster.sources[0].replicas[number]
    lose(cluster, 1, 1)
    status, document = sweep(cluster, tmp_path)
    assert (status, document["unseen"]) == (before, 0)
    assert verdicts(tmp_path) == verdict != {1: "UNSEEN"}


def test_a_container_that_was_removed_on_purpose_misses_no_replica(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    cluster.add(1)
    lose(cluster, 1, 3)
    assert sweep(cluster, tmp_path, "--gone", "container=1")[0] == 0


def test_an_interrupted_reading_goes_on_with_the_datanodes_that_are_left(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    for number in range(1, 6):
        cluster.add(number)
    folder = tmp_path / "clusters" / "CID-twin"
    folder.mkdir(parents=True)
    # The table of the last datanode cannot be written.
    (folder / PEERS[2]).write_text("in the way")
    given = ("sweep", "run", "--cluster", cluster.address, "--out", str(tmp_path))
    failed = CliRunner().invoke(treefold, given)
    assert failed.exit_code != 0
    done = json.loads((folder / "progress.json").read_text())["done"]
    assert done == sorted(PEERS[:2])
    (folder / PEERS[2]).unlink()
    for source in cluster.sources:
        source.trees = 0
    status, _ = sweep(cluster, tmp_path)
    assert status == 0
    assert [source.trees for source in cluster.sources] == [0, 0, 5]
    assert not (folder / "progress.json").exists()
    # The next sweep reads all again, and finds what changed.
    damage(cluster.sources[0].replicas[min(cluster.sources[0].replicas)])
    status, _ = sweep(cluster, tmp_path)
    assert status == 3


def test_options_of_a_cluster_need_one(tmp_path: Path) -> None:
    done = CliRunner().invoke(treefold, ["sweep", "run", "--out", str(tmp_path), "--rate", "1MB/s"])
    assert done.exit_code == 2

"""`treefold diagnose` and `container --cluster`: exit status, documents, resuming."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from admin.cli import treefold
from live.results import ResultsError, ResultsFile
from merkle.columns import encode_tree
from merkle.replica import ContainerState
from merkle.tree import BlockId, ContainerId
from ozone.scm_client import NodeHealth
from runtime.disk import Disk
from runtime.errors import UsageError
from tests.support.live_twin import PEERS, LiveTwin, live_twin
from tests.support.peers import MemoryReplica

BLOCK = BlockId(20)


@pytest.fixture
def cluster() -> Iterator[LiveTwin]:
    with live_twin() as found:
        yield found


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "client.toml"
    file.touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(file))
    return file


def damage(replica: MemoryReplica) -> None:
    replica.flip(BLOCK, 100)
    replica.tree = encode_tree(replica.scanned_tree())


def run(*words: str) -> Result:
    return CliRunner().invoke(treefold, words)


def diagnose(cluster: LiveTwin, *words: str) -> tuple[int, dict[str, object]]:
    result = run("diagnose", "--cluster", cluster.address, "--json", *words)
    return result.exit_code, json.loads(result.stdout)


def test_equal_replicas_end_with_0(cluster: LiveTwin) -> None:
    cluster.add(1)
    status, document = diagnose(cluster)
    assert (status, document["ok"]) == (0, True)
    assert document["data"]["verdicts"]["MATCH"] == 1
    assert document["data"]["findings"] == []


def test_a_difference_ends_with_3_and_names_both_sides(cluster: LiveTwin) -> None:
    damage(cluster.add(1)[0])
    status, document = diagnose(cluster)
    assert status == 3
    [finding] = document["data"]["findings"]
    assert finding["verdict"] == "REPAIRABLE"
    [difference] = finding["differences"]
    assert difference["blockID"] == str(BLOCK)
    assert difference["lacking"] == [PEERS[0]]
    assert [one["datanode"]["hostname"] for one in finding["replicas"]] == [
        "host1", "host2", "host3",
    ]  # fmt: skip
    text = run("diagnose", "--cluster", cluster.address).stdout
    assert "corrupt_chunk: block 20 at 0: 1fffffff (host1) <- 2fffffff (host2)" in text
    assert "1 containers: 1 REPAIRABLE" in text


def test_damage_beyond_repair_ends_with_4(cluster: LiveTwin) -> None:
    for replica in cluster.add(1):
        replica.flip(BLOCK, 100)
    assert diagnose(cluster)[0] == 0
    assert diagnose(cluster, "--deep")[0] == 4


def test_a_silent_datanode_ends_with_7_and_missing_replicas_with_5(cluster: LiveTwin) -> None:
    cluster.add(1, replicas=2)
    assert diagnose(cluster)[0] == 5
    cluster.add(2)
    cluster.stop(3)
    status, document = diagnose(cluster)
    assert status == 7
    assert {one["containerID"]: one["unreachable"] for one in document["data"]["findings"]} == {
        1: False, 2: True,
    }  # fmt: skip


def test_without_scm_it_ends_with_7() -> None:
    result = run("diagnose", "--cluster", "127.0.0.1:1", "--json")
    assert result.exit_code == 7
    assert json.loads(result.stdout)["errors"][0]["code"] == "peer_unavailable"


def test_only_the_named_containers(cluster: LiveTwin) -> None:
    for number in (1, 2, 3):
        cluster.add(number)
    status, document = diagnose(cluster, "3", "1")
    assert (status, document["data"]["containers"]) == (0, 2)
    status, document = diagnose(cluster, "2", "9")
    assert status == 1
    assert document["errors"][0]["code"] == "container_not_found"


def test_a_cluster_has_a_name_in_the_settings(cluster: LiveTwin, settings: Path) -> None:
    cluster.add(1)
    settings.write_text(f'[clusters]\nprod = ["127.0.0.1:1", "{cluster.address}"]\n')
    assert run("diagnose", "--cluster", "prod").exit_code == 0
    result = run("diagnose", "--cluster", "prd", "--json")
    assert result.exit_code == 2
    assert "prod" in json.loads(result.stdout)["errors"][0]["hint"]


def test_an_interrupted_diagnosis_goes_on_where_it_was(cluster: LiveTwin, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in range(1, 5):
        cluster.add(number)
    damage(cluster.sources[0].replicas[ContainerId(2)])
    whole = diagnose(cluster, "--out", str(out))
    lines = out.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    # Killed within the line of the third container.
    out.write_bytes(b"".join(lines[:3]) + lines[3][:9])
    before = cluster.sources[0].trees
    again = diagnose(cluster, "--out", str(out))
    assert cluster.sources[0].trees == before + 2
    assert again[0] == whole[0] == 3
    assert again[1]["data"] == whole[1]["data"]
    assert out.read_bytes() == b"".join(lines)


def test_a_file_of_another_diagnosis_is_left_alone(cluster: LiveTwin, tmp_path: Path) -> None:
    cluster.add(1)
    out = tmp_path / "out"
    assert diagnose(cluster, "--out", str(out))[0] == 0
    content = out.read_bytes()
    assert diagnose(cluster, "--deep", "--out", str(out))[0] == 2
    (tmp_path / "notes").write_text("my notes\n")
    assert diagnose(cluster, "--out", str(tmp_path / "notes"))[0] == 1
    assert (tmp_path / "notes").read_text() == "my notes\n"
    assert out.read_bytes() == content


def test_any_end_of_a_file_leaves_a_prefix_of_its_results(tmp_path: Path) -> None:
    """Whatever a power cut leaves of the last lines."""
    path, asked = tmp_path / "out", {"clusterID": "CID-1"}
    file = ResultsFile(path, Disk(), asked)
    results = [{"containerID": number, "verdict": "MATCH"} for number in range(3)]
    file.add(results)
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    for end in range(begin, len(whole)):
        for rest in (b"", bytes(20), b"\n{]\n"):
            path.write_bytes(whole[:end] + rest)
            again = ResultsFile(path, Disk(), asked)
            found = list(again.results())
            assert found == results[: len(found)]
            again.add(results[len(found) :])
            assert list(ResultsFile(path, Disk(), asked).results()) == results
    with pytest.raises(UsageError):
        ResultsFile(path, Disk(), {"clusterID": "CID-2"})
    path.write_bytes(whole[: begin - 2])
    with pytest.raises(ResultsError):
        ResultsFile(path, Disk(), asked)


@pytest.mark.parametrize("words", [["--rate", "fast"], ["--after", "3", "1"], ["0"], ["x"]])
def test_bad_arguments_are_refused(cluster: LiveTwin, words: list[str]) -> None:
    assert diagnose(cluster, *words)[0] == 2


def container(cluster: LiveTwin, *words: str) -> tuple[int, dict[str, object]]:
    result = run("container", *words, "--cluster", cluster.address, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_containers_are_listed_as_scm_knows_them(cluster: LiveTwin) -> None:
    for number in (1, 2, 3):
        cluster.add(number)
    damage(cluster.sources[0].replicas[ContainerId(2)])
    cluster.report(2)
    status, document = container(cluster, "list")
    assert status == 0
    assert [(one["containerID"], one["comparison"]) for one in document["data"]["containers"]] == [
        (1, "match"), (2, "diverged"), (3, "match"),
    ]  # fmt: skip
    assert run("container", "list", "--diverged", "--ids", "--cluster", cluster.address).stdout == (
        "2\n"
    )
    _, document = container(cluster, "list", "--limit", "1", "--after", "1")
    assert [one["containerID"] for one in document["data"]["containers"]] == [2]
    assert document["data"]["more"]
    assert container(cluster, "list", "--state", "OPEN")[1]["data"]["containers"] == []


def test_a_container_is_shown_with_its_replicas(cluster: LiveTwin) -> None:
    cluster.add(1)
    cluster.set_health(3, NodeHealth.DEAD)
    status, document = container(cluster, "info", "1", "9")
    assert status == 1
    [one] = document["data"]
    assert [replica["health"] for replica in one["replicas"]] == ["HEALTHY", "HEALTHY", "DEAD"]
    assert one["comparison"] == "unknown"
    assert document["errors"][0]["code"] == "container_not_found"
    text = run("container", "info", "1", "--cluster", cluster.address).stdout
    assert "datanode 3fffffff (host3): DEAD, IN_SERVICE" in text


@pytest.mark.parametrize(
    ("case", "expected"),
    [("equal", 0), ("damaged", 3), ("silent", 7), ("missing", 5), ("open", 1), ("unknown", 1)],
)
def test_the_trees_of_a_container_are_compared(cluster: LiveTwin, case: str, expected: int) -> None:
    replicas = cluster.add(1, replicas=2 if case == "missing" else 3)
    match case:
        case "damaged":
            damage(replicas[0])
        case "silent":
            cluster.stop(1)
        case "open":
            number = ContainerId(1)
            cluster.scm.containers[number] = replace(
                cluster.scm.containers[number], state=ContainerState.OPEN
            )
        case "unknown":
            cluster.scm.containers.clear()
    status, document = container(cluster, "diff", "1")
    assert status == expected
    assert bool(document["errors"]) == (expected == 1)
    assert run("container", "diff", "1", "--cluster", cluster.address).exit_code == expected


def test_doctor_reads_a_tree_of_each_datanode(cluster: LiveTwin) -> None:
    cluster.add(1)
    result = run("doctor", "--cluster", cluster.address, "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)["data"]
    assert data["clusterID"] == "CID-twin"
    assert all(one["treeSeconds"] > 0 for one in data["datanodes"])
    assert [source.trees for source in cluster.sources] == [1, 1, 1]


def test_doctor_names_what_stands_in_the_way(cluster: LiveTwin) -> None:
    cluster.add(1)
    cluster.stop(1)
    cluster.set_health(2, NodeHealth.DEAD)
    cluster.scm.nodes[2] = replace(cluster.scm.nodes[2], version=2)
    cluster.scm.in_safe_mode = True
    result = run("doctor", "--cluster", cluster.address)
    assert result.exit_code == 3
    for text in (
        "SCM is in safe mode",
        "datanode 1fffffff (host1): peer_unavailable",
        "datanode 2fffffff (host2): SCM calls it DEAD",
        "datanode 3fffffff (host3): its protocol has version 2",
    ):
        assert f"problem: {text}" in result.stdout
    # A request to a dead datanode would only wait.
    assert cluster.sources[1].trees == 0


def test_doctor_of_an_empty_cluster(cluster: LiveTwin) -> None:
    result = run("doctor", "--cluster", cluster.address)
    assert result.exit_code == 0
    assert "no closed replica" in result.stdout


def test_status_says_what_scm_knows_and_what_to_do(cluster: LiveTwin) -> None:
    cluster.add(1)
    assert run("status", "--cluster", cluster.address).exit_code == 0
    cluster.add(2)
    cluster.set_health(3, NodeHealth.STALE)
    result = run("status", "--cluster", cluster.address)
    assert result.exit_code == 7
    assert "unknown: datanode 3fffffff (host3) is STALE" in result.stdout
    damage(cluster.sources[0].replicas[ContainerId(2)])
    cluster.report(2)
    result = run("status", "--cluster", cluster.address)
    assert result.exit_code == 3
    assert f"treefold diagnose --cluster {cluster.address} 2" in result.stdout
    document = json.loads(run("status", "--cluster", cluster.address, "--json").stdout)
    assert document["data"]["containers"]["diverged"] == 1
    assert [source.trees for source in cluster.sources] == [0, 0, 0]


@pytest.mark.parametrize(
    "words", [["doctor", "--volume", "/x"], ["status", "--verifier", "127.0.0.1:1"]]
)
def test_a_cluster_goes_alone(words: list[str]) -> None:
    assert run(*words, "--cluster", "127.0.0.1:1").exit_code == 2


def test_a_damaged_stripe_is_printed_with_the_index_that_lacks_it(cluster: LiveTwin) -> None:
    cluster.add_erasure_coded(1, {20: 40_000})[1].flip(BLOCK, 100)
    assert diagnose(cluster)[1]["data"]["notCompared"] == 1
    status, document = diagnose(cluster, "--deep")
    [found] = document["data"]["findings"]
    assert (status, found["verdict"]) == (3, "REPAIRABLE")
    assert found["stripes"] == {
        "count": 2,
        "readable": 2,
        "damaged": [
            {
                "blockID": "20",
                "stripe": 0,
                "lackingIndexes": [2],
                "conflictingIndexes": [],
                "readable": True,
            }
        ],
    }
    assert [one["replicaIndex"] for one in found["replicas"]] == [1, 2, 3]
    printed = run("diagnose", "--deep", "--cluster", cluster.address).stdout
    assert "2 of 2 stripes are readable" in printed
    assert "block 20 stripe 0: lacked by replica index 2; readable" in printed

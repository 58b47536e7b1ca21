"""`treefold reconcile --plan FILE` and `--apply FILE`, with real agents and volumes:
what is planned is written, and nothing else; a replica that changed since is refused
by name.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from admin.jobs import exit_status_of
from merkle.outcome import RepairReport
from merkle.replica import PeerId, ReplicaState
from merkle.tree import ContainerId
from repair.replica_plan import PlanShelf, PlanUnknownError, ReplicaPlan
from scm.jobs import JobState
from tests.support.bad_input import another_user
from tests.support.small_cluster import (
    BLOCK_BYTES,
    UUIDS,
    SmallCluster,
    listed,
    small_cluster,
    whole_block,
)

# More than the tests use.
CONTAINERS = range(1, 20)
_IDS = count(CONTAINERS.start)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    with small_cluster(tmp_path_factory.mktemp("cluster"), CONTAINERS) as running:
        yield running


@pytest.fixture
def container_id() -> int:
    """A container that no other test uses."""
    return next(_IDS)


def planned(cluster: SmallCluster, container_id: int, path: Path) -> dict[str, object]:
    data = cluster.json("reconcile", str(container_id), "--plan", str(path))
    assert data["exit"] == 0, data
    return data


def test_a_plan_names_every_range_and_is_carried_out_exactly(
    cluster: SmallCluster, container_id: int, tmp_path: Path
) -> None:
    """Operator rule R17."""
    cluster.damage("dn1", container_id, container_id, 10, 2050)
    cluster.damage("dn2", container_id, container_id + 100, 4999)
    before = cluster.block_file("dn1", container_id, container_id).read_bytes()
    data = planned(cluster, container_id, tmp_path / "plan.json")
    replicas = listed(data["replicas"])
    writes = {
        one["datanode"]: [
            (w["block"], w["offset"], w["length"], w["source"]) for w in one["writes"]
        ]
        for one in replicas
    }
    assert [write[:3] for write in writes[UUIDS["dn1"]]] == [
        (str(container_id), 0, 1024),
        (str(container_id), 2048, 1024),
    ]
    assert [write[:3] for write in writes[UUIDS["dn2"]]] == [(str(container_id + 100), 4096, 904)]
    assert writes[UUIDS["dn3"]] == []
    # Nothing was written so far.
    assert cluster.block_file("dn1", container_id, container_id).read_bytes() == before
    path = str(tmp_path / "plan.json")
    done = cluster.json("reconcile", "--apply", path, "--yes", "--wait", "--reason", "ticket")
    assert (done["exit"], done["errors"]) == (0, [])
    for name in ("dn1", "dn2"):
        for block in (container_id, container_id + 100):
            file = cluster.block_file(name, container_id, block)
            assert file.read_bytes() == whole_block(block)
        lines = [line for line in cluster.audit(name) if line.get("container") == container_id]
        assert [
            (line["block"], line["offset"], line["length"], line["source"])
            for line in lines
            if line["kind"] == "write"
        ] == writes[UUIDS[name]]
        [begun] = [line for line in lines if line["kind"] == "reconcile"]
        assert begun["plan"] in [one["digest"] for one in replicas]
    assert not any(line.get("container") == container_id for line in cluster.audit("dn3"))


def test_a_plan_of_changed_roots_is_refused_before_a_job_starts(
    cluster: SmallCluster, container_id: int, tmp_path: Path
) -> None:
    cluster.damage("dn1", container_id, container_id, 10)
    planned(cluster, container_id, tmp_path / "plan.json")
    cluster.damage("dn1", container_id, container_id, 3000)
    done = cluster.json("reconcile", "--apply", str(tmp_path / "plan.json"), "--yes")
    assert done["exit"] == 6
    [error] = listed(done["errors"])
    assert error["code"] == "plan_changed"
    assert UUIDS["dn1"] in error["message"]
    assert done["jobs"] == []


def test_a_plan_of_a_changed_peer_is_refused_by_name(
    cluster: SmallCluster, container_id: int, tmp_path: Path
) -> None:
    cluster.damage("dn1", container_id, container_id, 10)
    planned(cluster, container_id, tmp_path / "plan.json")
    cluster.damage("dn3", container_id, container_id, 3000)
    done = cluster.json("reconcile", "--apply", str(tmp_path / "plan.json"), "--yes")
    assert done["exit"] == 6
    [error] = listed(done["errors"])
    assert (error["code"], UUIDS["dn3"] in error["message"]) == ("plan_changed", True)


def test_the_agent_itself_refuses_what_changed_with_the_same_root(
    cluster: SmallCluster, container_id: int, tmp_path: Path
) -> None:
    cluster.damage("dn1", container_id, container_id, 10)
    planned(cluster, container_id, tmp_path / "plan.json")
    file = cluster.block_file("dn1", container_id, container_id)
    volume = cluster.agents["dn1"]._store.volumes[0]
    # A change of blocks that leaves the tree as it is: only the generation shows it.
    volume.trees.blocks_changed(ContainerId(container_id))
    before = file.read_bytes()
    done = cluster.json("reconcile", "--apply", str(tmp_path / "plan.json"), "--yes", "--wait")
    [job] = listed(done["jobs"])
    assert job["state"] == "FAILED"
    assert "its generation was" in job["detail"]
    assert file.read_bytes() == before
    assert [line["kind"] for line in cluster.audit("dn1")][-1] == "refused"


def test_a_file_from_which_something_was_taken_is_refused(
    cluster: SmallCluster, container_id: int, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    cluster.damage("dn1", container_id, container_id, 10)
    planned(cluster, container_id, path)
    document = json.loads(path.read_bytes())
    [container] = document["containers"]
    for changed in (
        {"containers": []},
        {"containers": [{**container, "replicas": []}]},
        {"containers": [{**container, "replicas": container["replicas"][1:]}]},
        {"containers": [{**container, "unplanned": {"dn-9": "it is held read-only"}}]},
        {"made_at": None},
        {"digest": "0" * 64},
    ):
        path.write_text(json.dumps({**document, **changed}))
        refused = cluster.run("reconcile", "--apply", str(path), "--yes")
        assert (refused.exit_code, "was changed after" in refused.output) == (2, True)
    path.write_text(json.dumps(document, indent=7))
    assert cluster.run("reconcile", "--apply", str(path), "--yes", "--wait").exit_code == 0


def test_a_changed_file_and_a_plan_that_the_agent_lost_are_refused(
    cluster: SmallCluster, container_id: int, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    cluster.damage("dn1", container_id, container_id, 10)
    planned(cluster, container_id, path)
    text = path.read_text()
    path.write_text(text.replace('"length": 1024', '"length": 2048'))
    refused = cluster.run("reconcile", "--apply", str(path), "--yes")
    assert refused.exit_code == 2
    assert "was changed" in refused.output
    path.write_text("{}")
    assert "is no plan file" in cluster.run("reconcile", "--apply", str(path)).output
    path.write_text(text)
    with pytest.raises(PlanUnknownError, match=f"on {datetime.now(UTC):%Y-}"):
        cluster.agents["dn1"]._plans.get("0" * 64)
    # As after a restart.
    cluster.agents["dn1"]._plans._shelf = PlanShelf(1_700_000_000)
    done = cluster.json("reconcile", "--apply", str(path), "--yes", "--wait")
    [job] = listed(done["jobs"])
    assert "plan_unknown" in job["detail"]
    assert "since its start on 2023-11-14 22:13 UTC, and a restart loses" in job["detail"]
    assert len(cluster.block_file("dn1", container_id, container_id).read_bytes()) == BLOCK_BYTES


def test_a_plan_says_what_it_does_not_know_and_a_file_is_never_overwritten(
    cluster: SmallCluster, container_id: int, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    cluster.damage("dn1", container_id, container_id, 10)
    volume = cluster.agents["dn3"]._store.volumes[0]
    tree = volume.trees.path(ContainerId(container_id))
    kept = tree.read_bytes()
    tree.unlink()
    data = cluster.json("reconcile", str(container_id), "--plan", str(path))
    tree.write_bytes(kept)
    # An agent that was asked for a plan made none.
    assert data["exit"] == 5
    warnings = list(map(str, listed(data["warnings"])))
    assert any(f"lacks {UUIDS['dn3']}: peer_refused" in text for text in warnings), warnings
    again = cluster.run("reconcile", str(container_id), "--plan", str(path))
    assert (again.exit_code, "exists" in again.output) == (2, True)


def test_a_plan_that_stands_elsewhere_is_refused_by_name(
    cluster: SmallCluster, container_id: int, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    cluster.damage("dn1", container_id, container_id, 10)
    planned(cluster, container_id, path)
    document = json.loads(path.read_text())
    [stored] = document["containers"]
    first = stored["replicas"][0]
    for containers, says in (
        ([stored | {"containerID": 70}], f"is for container {container_id}, and not for 70"),
        ([stored, stored], f"container {container_id} is there twice"),
        ([stored | {"replicas": [first, first]}], "is there twice"),
    ):
        path.write_text(json.dumps(document | {"containers": containers}))
        refused = cluster.run("reconcile", "--apply", str(path), "--yes")
        assert (refused.exit_code, says in refused.stderr) == (2, True), refused.output


def test_a_plan_file_that_cannot_be_written_is_refused_before_plans_are_made(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "locked").mkdir(mode=0o555)
    names = ["file", "link", "locked", "none/plan", "file/plan", "x" * 300, "/proc/plan", "."]
    before = sorted(tmp_path.iterdir())
    for name in names:
        # There is no controller: whoever asks one ends with 7.
        words = ["reconcile", "1", "--plan", str(tmp_path / name), "--controller", "127.0.0.1:1"]
        result = CliRunner().invoke(treefold, words)
        assert (result.exit_code, "--plan: " in result.stderr) == (2, True), result.output
    with another_user():
        words = ["reconcile", "1", "--plan", "/plan.json", "--controller", "127.0.0.1:1"]
        result = CliRunner(env={"HOME": "/nowhere"}).invoke(treefold, words)
    assert (result.exit_code, "Permission denied" in result.stderr) == (2, True), result.output
    assert sorted(tmp_path.iterdir()) == before


def test_a_job_that_fails_after_it_has_written_is_partly_done(
    cluster: SmallCluster, container_id: int
) -> None:
    cluster.damage("dn1", container_id, container_id, 10)
    done = cluster.json("reconcile", str(container_id), "--yes", "--wait")
    job = cluster.client.job(listed(done["jobs"])[0]["jobID"])
    failed = replace(job, state=JobState.FAILED)
    assert exit_status_of([failed]) == 5
    idle = tuple(replace(one, progress=RepairReport()) for one in job.orders)
    assert exit_status_of([replace(failed, orders=idle)]) == 1


def test_a_plan_without_all_datanodes_is_partly_done_and_one_without_any_is_no_file(
    tmp_path: Path,
) -> None:
    path, none = tmp_path / "plan.json", tmp_path / "none.json"
    with small_cluster(tmp_path, range(1, 2)) as cluster:
        cluster.damage("dn1", 1, 1, 10)
        cluster.agents["dn3"].stop()
        data = cluster.json("reconcile", "1", "--plan", str(path))
        assert data["exit"] == 5
        assert any(f"{UUIDS['dn3']} has no plan: " in str(one) for one in listed(data["warnings"]))
        done = cluster.json("reconcile", "--apply", str(path), "--yes", "--wait")
        assert cluster.block_file("dn1", 1, 1).read_bytes() == whole_block(1)
        assert (done["exit"], listed(done["jobs"])[0]["state"]) == (5, "DONE")
        for name in ("dn1", "dn2"):
            cluster.agents[name].stop()
        nothing = cluster.json("reconcile", "1", "--plan", str(none))
        assert (nothing["exit"], listed(nothing["errors"])[0]["code"]) == (1, "no_plan")
        assert not none.exists()


@pytest.mark.parametrize(
    "words",
    [
        "--status 1 --dry-run",
        "--status 1 --wait",
        "--status 1 --reason x",
        "--status 1 --plan plan.json",
        "--status --apply pyproject.toml",
        "1 --plan plan.json --wait",
    ],
)
def test_options_that_would_be_ignored_are_refused(words: str) -> None:
    asked = ["reconcile", *words.split(), "--controller", "127.0.0.1:1"]
    assert CliRunner().invoke(treefold, asked).exit_code == 2


def test_a_plan_without_work_starts_nothing(
    cluster: SmallCluster, container_id: int, tmp_path: Path
) -> None:
    planned(cluster, container_id, tmp_path / "plan.json")
    done = cluster.run("reconcile", "--apply", str(tmp_path / "plan.json"), "--yes")
    assert (done.exit_code, "nothing to write" in done.stdout) == (0, True)
    mixed = cluster.run("reconcile", "--apply", str(tmp_path / "plan.json"), "1")
    assert mixed.exit_code == 2


def test_a_plan_that_made_way_for_others_is_refused_as_such() -> None:
    plan, other = (
        ReplicaPlan(
            ContainerId(1), PeerId("dn1"), made_at, b"", 0, ReplicaState.CLOSED, {}, {}, None
        )
        for made_at in ("before", "after")
    )
    shelf = PlanShelf(0.0, plans_max=1)
    shelf.add(plan)
    assert shelf.get(plan.digest) is plan
    shelf.add(other)
    with pytest.raises(PlanUnknownError, match="it made too many others since"):
        shelf.get(plan.digest)

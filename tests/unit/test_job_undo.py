"""`treefold job undo` with real agents and volumes: what a job overwrote is put back
where that does no harm, the audit has it, and it can be taken back.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from admin.job_undo import exit_status_of_refusals, exit_status_of_undo
from merkle.errors import ReconcileError
from merkle.replica import ReplicaState
from merkle.tree import ContainerId
from tests.support.small_cluster import (
    NAMES,
    UUIDS,
    SmallCluster,
    listed,
    small_cluster,
    whole_block,
)
from tests.support.volumes import flip

_IDS = count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    with small_cluster(tmp_path_factory.mktemp("cluster"), range(1, 9)) as running:
        yield running


@pytest.fixture
def container_id() -> int:
    """A container that no other test uses."""
    return next(_IDS)


def healed(cluster: SmallCluster, container_id: int, *places: int) -> tuple[str, bytes]:
    """A job that repaired these bytes on dn1, and what it overwrote."""
    cluster.damage("dn1", container_id, container_id, *places)
    damaged = cluster.block_file("dn1", container_id, container_id).read_bytes()
    done = cluster.json("reconcile", str(container_id), "--yes", "--wait")
    assert done["exit"] == 0, done
    jobs = done["jobs"]
    assert isinstance(jobs, list)
    assert cluster.block_file("dn1", container_id, container_id).read_bytes() == whole_block(
        container_id
    )
    return str(jobs[0]["jobID"]), damaged


def undo(cluster: SmallCluster, job: str, *options: str) -> dict[str, object]:
    return cluster.json("job", "undo", job, "--reason", "ticket 9", *options)


def test_an_undo_puts_back_what_was_overwritten_and_can_be_taken_back(
    cluster: SmallCluster, container_id: int
) -> None:
    """Operator rule R16."""
    job, damaged = healed(cluster, container_id, 10, 3000)
    file = cluster.block_file("dn1", container_id, container_id)
    plan = undo(cluster, job, "--dry-run")
    assert plan["exit"] == 0
    # A beginning of its ID names the same job, at the agents too.
    assert undo(cluster, job[:5], "--dry-run")["replicas"] == plan["replicas"]
    [ours] = [one for one in listed(plan["replicas"]) if one["datanode"] == UUIDS["dn1"]]
    assert [(w["offset"], w["length"], w["decision"]) for w in listed(ours["windows"])] == [
        (0, 1024, "restore"),
        (2048, 1024, "restore"),
    ]
    refused = undo(cluster, job)
    assert (refused["exit"], file.read_bytes()) == (6, whole_block(container_id))
    done = undo(cluster, job, "--yes")
    assert (done["exit"], done["errors"]) == (0, [])
    assert file.read_bytes() == damaged
    [undone] = listed(done["undone"])
    assert (undone["undoID"], undone["state"]) == (f"{job}.undo1", "UNHEALTHY")
    lines = [line for line in cluster.audit("dn1") if line.get("job") == f"{job}.undo1"]
    assert [line["kind"] for line in lines] == ["undo", "write", "write", "end"]
    assert (lines[0]["why"], lines[0]["undone"]) == ("ticket 9", job)
    assert [line["offset"] for line in lines[1:3]] == [0, 2048]
    assert lines[3]["root"] == f"{(cluster.root('dn1', container_id) or 0) & (1 << 64) - 1:x}"
    assert lines[0]["root"] != lines[3]["root"]
    # Taken back, the bytes are good; the replica is UNHEALTHY until it is reconciled.
    back = undo(cluster, f"{job}.undo1", "--yes")
    assert back["exit"] == 0
    assert file.read_bytes() == whole_block(container_id)
    state = cluster.agents["dn1"]._store.head(ContainerId(container_id)).state
    assert state is ReplicaState.UNHEALTHY
    cluster.settle(container_id)


def test_what_changed_since_the_job_stays(cluster: SmallCluster, container_id: int) -> None:
    job, _ = healed(cluster, container_id, 10, 3000)
    file = cluster.block_file("dn1", container_id, container_id)
    flip(file, 20)
    before = file.read_bytes()
    done = undo(cluster, job, "--yes")
    assert done["exit"] == 5
    after = file.read_bytes()
    assert after[:2048] == before[:2048]
    assert after[2048:3072] != before[2048:3072]


def test_the_last_good_copy_is_never_given_up(cluster: SmallCluster, container_id: int) -> None:
    job, _ = healed(cluster, container_id, 10)
    for name in NAMES[1:]:
        flip(cluster.block_file(name, container_id, container_id), 100)
    done = undo(cluster, job, "--yes")
    assert (done["exit"], listed(done["errors"])[0]["code"]) == (6, "nothing_to_undo")
    [ours] = [one for one in listed(done["replicas"]) if one["datanode"] == UUIDS["dn1"]]
    assert [one["decision"] for one in listed(ours["windows"])] == ["last_good_copy"]
    file = cluster.block_file("dn1", container_id, container_id)
    assert file.read_bytes() == whole_block(container_id)


def test_of_two_undos_at_once_one_finds_the_other_silent(
    cluster: SmallCluster, container_id: int
) -> None:
    job, _ = healed(cluster, container_id, 10)
    flip(cluster.block_file("dn3", container_id, container_id), 100)
    # As an undo at dn2 does before it asks anybody.
    with cluster.agents["dn2"]._store.withheld(ContainerId(container_id)):
        plan = undo(cluster, job, "--dry-run")
    assert plan["exit"] == 6
    assert undo(cluster, job, "--dry-run")["exit"] == 0


def test_a_plan_that_no_longer_holds_is_refused_at_the_agent(
    cluster: SmallCluster, container_id: int
) -> None:
    job, _ = healed(cluster, container_id, 10, 3000)
    undos = cluster.agents["dn1"]._undos
    plan = undos.undo(ContainerId(container_id), job, (), digest="", who="", why="").plan
    # Without a peer there is nobody who holds the good bytes.
    assert {window.decision.value for window in plan.windows} == {"last_good_copy"}
    before = cluster.block_file("dn1", container_id, container_id).read_bytes()
    result = cluster.run("job", "undo", job, "--yes")
    assert result.exit_code == 2
    assert "--reason" in result.output
    for digest, why, code in (("0" * 64, "x", "plan_changed"), (plan.digest, " ", "usage")):
        with pytest.raises(ReconcileError) as refusal:
            undos.undo(ContainerId(container_id), job, (), digest=digest, who="", why=why)
        assert refusal.value.code == code
    assert cluster.block_file("dn1", container_id, container_id).read_bytes() == before


def test_a_job_without_copies_has_nothing_to_undo(cluster: SmallCluster, container_id: int) -> None:
    done = cluster.json("reconcile", str(container_id), "--yes", "--wait")
    [job] = listed(done["jobs"])
    nothing = undo(cluster, job["jobID"], "--yes")
    assert (nothing["exit"], listed(nothing["errors"])[0]["code"]) == (6, "nothing_to_undo")
    assert cluster.run("job", "undo", "nope", "--reason", "x").exit_code == 1


def test_an_undo_that_fails_after_it_has_begun_is_partly_done(
    cluster: SmallCluster, container_id: int
) -> None:
    job, _ = healed(cluster, container_id, 10)
    store = cluster.agents["dn1"]._store.volumes[0].undo
    # Where its undo copies would be, so that it fails at its first write.
    (store._folder / str(container_id) / f"{job}.undo1").touch()
    done = undo(cluster, job, "--yes")
    codes = [one["code"] for one in listed(done["errors"])]
    assert (done["exit"], codes) == (5, ["undo_incomplete"])
    assert cluster.audit("dn1")[-1]["state"] == "failed"


def test_a_job_that_has_not_ended_is_not_undone(cluster: SmallCluster, container_id: int) -> None:
    cluster.damage("dn1", container_id, container_id, 10)
    # Agents that get no order: the job stays queued.
    order = cluster.server._controller._dispatcher
    rules, order._rules = order._rules, replace(order._rules, orders_per_datanode=0)
    done = cluster.json("reconcile", str(container_id), "--yes")
    [job] = listed(done["jobs"])
    before = cluster.block_file("dn1", container_id, container_id).read_bytes()
    for options in (["--dry-run"], ["--yes"]):
        refused = undo(cluster, job["jobID"], *options)
        [error] = listed(refused["errors"])
        assert (refused["exit"], error["code"]) == (8, "job_running")
        assert f"treefold job cancel {job['jobID']}" in error["hint"]
    assert cluster.block_file("dn1", container_id, container_id).read_bytes() == before
    order._rules = rules
    assert cluster.run("job", "watch", job["jobID"]).exit_code == 0


@pytest.mark.parametrize(
    ("done", "failed", "status"),
    [
        (2, [], 5),
        (1, [6], 5),
        (0, [5], 5),
        # What was asked may have been done before the connection was lost.
        (0, [7], 5),
        (0, [1, 6], 5),
        (0, [6], 6),
        (0, [8, 8], 8),
        (0, [2, 6], 2),
        (0, [6, 8], 7),
    ],
)
def test_the_exit_status_of_an_undo_says_whether_something_was_written(
    done: int, failed: list[int], status: int
) -> None:
    assert exit_status_of_undo(done, failed) == status


@pytest.mark.parametrize(
    ("statuses", "status"), [([7], 7), ([8], 8), ([6, 7], 7), ([2, 7], 2), ([1], 7)]
)
def test_the_exit_status_of_a_plan_that_nobody_made(statuses: list[int], status: int) -> None:
    assert exit_status_of_refusals(statuses) == status


def test_where_a_datanode_does_not_answer_an_undo_is_not_whole(tmp_path: Path) -> None:
    with small_cluster(tmp_path, range(1, 2)) as cluster:
        job, _ = healed(cluster, 1, 10)
        cluster.agents["dn1"].stop()
        plan = undo(cluster, job, "--dry-run")
        codes = [one["code"] for one in listed(plan["errors"])]
        assert (plan["exit"], codes[-1:]) == (7, ["undo_unknown"])

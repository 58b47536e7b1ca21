"""`treefold status`: what is wrong, how sure, and what to do next, on one screen."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from admin.cli import treefold
from admin.cluster_status import (
    AgentAnswer,
    ClusterAnswer,
    Health,
    SweepAnswer,
    VerifierAnswer,
    answer_json,
    exit_status_of,
    health_of,
    lines,
    problems_of,
)
from admin.datanode_names import DatanodeNames, unique_prefixes
from admin.jobs import progress_line
from dnagent.ports import AgentStatus, VolumeStatus
from merkle.outcome import RepairReport, Verdict
from merkle.replica import PeerId
from merkle.tree import ContainerId
from runtime.live_limits import LiveLimit
from scm.config import ControllerConfig
from scm.datanodes import Datanode
from scm.jobs import JobLimit, JobState, OrderState, Pause
from scm.policy import ComparisonResult, RootComparison
from scm.server import ControllerServer
from scm.views import ControllerStatus, DatanodeView, JobStatus, OrderStatus
from sweep.model import NotCompared
from tests.support.cluster_reports import replica
from tests.support.reporting_agents import ReportingAgent

NOW_S = 1_790_000_000.0
UUID = "0f3c2f1e-8a8a-4c6d-9a57-1f6b2c3d4e5f"
RATE = LiveLimit("scan.bytes_per_second", 5 << 20, "/etc/treefold/agent.toml", NOW_S - 60)
ORDERS = LiveLimit("orders_per_datanode", 2, "default", NOW_S - 7200)
CONTROLLER = ControllerStatus(
    7200.0,
    "",
    12,
    0,
    0,
    0,
    0,
    (),
    3600.0,
    {},
    (LiveLimit("orders_per_datanode", 2, "default", 1.0),),
    False,
    roles_enforced=True,
)
VOLUME = VolumeStatus("/data/1", "DS-1", "owner", 4, 1, 1, "", 4 << 20, 86_400.0, 0)
VIEW = DatanodeView(Datanode(PeerId(UUID), "dn1.example.com", "10.0.0.7:9893"), True, 3.0, 4)
STATUS = AgentStatus(PeerId(UUID), True, (VOLUME,), (), (RATE,), 2048.0, roles_enforced=True)
AGENT = AgentAnswer(VIEW, STATUS, short_id=UUID[:8])
SWEEP = SweepAnswer("/var/sweeps", "20260921-1", NOW_S - 3600, (("MATCH", 12),))
VERIFIER = VerifierAnswer("10.0.0.9:9899", "s3://bucket", NOW_S - 60, roles_enforced=True)
JOB = JobStatus(
    "4f1c2ab09d3e",
    ContainerId(7),
    JobState.RUNNING,
    "",
    None,
    "peak",
    "root@vm",
    created_at_s=NOW_S - 100,
    started_at_s=NOW_S - 90,
    finished_at_s=0,
    last_progress_at_s=NOW_S,
    bytes_done=1 << 20,
    bytes_planned=3 << 20,
    rate_bytes_per_s=1 << 20,
    eta_s=2.0,
    orders=(OrderStatus(PeerId(UUID), OrderState.RUNNING, RepairReport(), 1),),
    compared=ComparisonResult(RootComparison.DIVERGED, ""),
    bytes_per_second=JobLimit(5 << 20, "root@vm", NOW_S),
)
HEALTHY = ClusterAnswer(NOW_S, "127.0.0.1:9896", CONTROLLER, "", (AGENT,), (), SWEEP, (VERIFIER,))


def with_agent(**changes: object) -> ClusterAnswer:
    status = AGENT.status
    assert status is not None
    return replace(HEALTHY, agents=(replace(AGENT, status=replace(status, **changes)),))


def with_controller(**changes: object) -> ClusterAnswer:
    return replace(HEALTHY, controller=replace(CONTROLLER, **changes))


def with_job(**changes: object) -> ClusterAnswer:
    job = replace(JOB, **changes)
    return replace(with_controller(jobs={job.state: 1}), jobs=(job,))


SILENT = replace(AGENT, status=None, error="peer_unavailable: did not answer")
GONE = replace(SILENT, view=replace(VIEW, is_live=False, heartbeat_age_s=400.0))
# What is wrong, the words that say so, and the command to copy.
WRONG: dict[str, tuple[ClusterAnswer, str, str]] = {
    "diverged": (
        with_controller(diverged=3),
        "3 containers diverged",
        "treefold reconcile --all-diverged",
    ),
    "unserved": (
        with_controller(unserved=7, unserved_ids=(ContainerId(3), ContainerId(5))),
        "7 containers that no client can read: every known replica is UNHEALTHY",
        "treefold reconcile 3 5",
    ),
    "automatic": (with_controller(diverged=1, automatic=True), "1 container diverged", "job list"),
    "thread": (with_controller(fault="thread ticker has ended"), "ticker", "journalctl"),
    "agent": (with_agent(fault="thread heartbeat has ended"), "dn1.example.com 0f3c2f1e", "ssh"),
    "volume": (
        with_agent(volumes=(replace(VOLUME, storage_id="", last_error="bad disk"),)),
        "/data/1: bad disk",
        "treefold doctor --volume /data/1",
    ),
    "stalled": (
        with_job(state=JobState.STALLED, detail="no progress for 300 s"),
        "stalled",
        "treefold job show 4f1c2ab09d3e",
    ),
    "failed": (with_job(state=JobState.FAILED), "ended as FAILED", "treefold job show"),
    "lost": (
        with_job(state=JobState.PARTIAL, verdict=Verdict.UNRECOVERABLE),
        "UNRECOVERABLE damage remains",
        "treefold job show",
    ),
    "diverged by another name": (
        replace(HEALTHY, sweep=replace(SWEEP, diverged=1)),
        "1 container of the last sweep diverged",
        "treefold sweep show latest --out /var/sweeps",
    ),
    "sweep": (
        replace(HEALTHY, sweep=replace(SWEEP, verdicts=(("REPAIRABLE", 2), ("MATCH", 1)))),
        "2 REPAIRABLE",
        "treefold sweep show latest --out /var/sweeps",
    ),
}
UNKNOWN: dict[str, tuple[ClusterAnswer, str]] = {
    "controller": (
        ClusterAnswer(NOW_S, "c:1", None, "controller_unavailable: no answer"),
        "controller c:1: controller_unavailable: no answer",
    ),
    "no agents": (replace(with_controller(containers=0), agents=()), "no container is known"),
    "containers": (with_controller(unknown=2), "2 containers: not known whether"),
    "never scanned": (with_controller(unscanned=1), "no scan ever read"),
    "silent agent": (replace(HEALTHY, agents=(SILENT,)), "did not answer"),
    "dead agent": (replace(HEALTHY, agents=(GONE,)), "last heartbeat 7m ago"),
    "no sweep": (replace(HEALTHY, sweep=SweepAnswer("/x", error="sweep_not_found")), "/x"),
    "empty sweep": (replace(HEALTHY, sweep=replace(SWEEP, verdicts=())), "compared no container"),
    "sweep of excluded": (
        replace(HEALTHY, sweep=replace(SWEEP, verdicts=(("EXCLUDED", 9),))),
        "compared no container",
    ),
    "unseen containers": (
        replace(HEALTHY, sweep=replace(SWEEP, verdicts=(("MATCH", 1), ("UNSEEN", 2)))),
        "2 containers unknown",
    ),
    "sweep of a later version": (
        replace(HEALTHY, sweep=replace(SWEEP, verdicts=(("MATCH", 1), ("MELTED", 2)))),
        "this version does not know: 2 MELTED",
    ),
    "sweep of tomorrow": (
        replace(HEALTHY, sweep=replace(SWEEP, ended_at_s=NOW_S + 86_400)),
        "in the future",
    ),
    "old sweep": (
        replace(HEALTHY, sweep=replace(SWEEP, ended_at_s=NOW_S - 5 * 86_400)),
        "ended 5d ago",
    ),
    "unseen": (replace(HEALTHY, sweep=replace(SWEEP, unseen=4)), "4 replicas unseen"),
    "verifier": (replace(HEALTHY, verifiers=(replace(VERIFIER, error="silent"),)), "silent"),
    "never listed": (
        replace(HEALTHY, verifiers=(replace(VERIFIER, listed_at_s=None),)),
        "never listed",
    ),
}


def text_of(answer: ClusterAnswer) -> str:
    """All words, whatever line they stand on."""
    return " ".join(" ".join(lines(answer)).split())


def test_a_healthy_cluster_says_so_and_shows_each_part() -> None:
    """Operator rule R10: rates stand beside their limits."""
    health = health_of(problems_of(HEALTHY))
    assert (health, exit_status_of(health)) == (Health.HEALTHY, 0)
    text = text_of(HEALTHY)
    for part in (
        "state: HEALTHY",
        "controller: up 2h",
        "limit orders_per_datanode = 2, set by default",
        "agents: 1 of 1 answer",
        "dn1.example.com 0f3c2f1e: heartbeat 3s ago, repairs 2.0 KiB/s",
        "/data/1: owner, 4 replicas, all data read 1d ago or later",
        "scan 4.0 MiB/s (limit 5.0 MiB/s)",
        "last sweep: 20260921-1, ended 1h ago: 12 MATCH",
        "verifier 10.0.0.9:9899: s3://bucket, listed as a whole: 1m ago",
    ):
        assert part in text


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_a_command_to_copy(name: str) -> None:
    answer, words, action = WRONG[name]
    health = health_of(problems_of(answer))
    assert (health, exit_status_of(health)) == (Health.DIVERGED, 3)
    assert words in text_of(answer)
    [line] = [line for line in lines(answer) if line.startswith("  action: ")]
    assert action in line


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_never_called_healthy(name: str) -> None:
    """Operator rule R11: with the reason, and the age of what is known."""
    answer, words = UNKNOWN[name]
    health = health_of(problems_of(answer))
    assert (health, exit_status_of(health)) == (Health.UNKNOWN, 7)
    assert words in text_of(answer)
    assert "HEALTHY" not in text_of(answer)
    assert answer_json(answer)["state"] == "UNKNOWN"


parts = st.fixed_dictionaries(
    {
        "controller": st.sampled_from([None, CONTROLLER, replace(CONTROLLER, unknown=1)]),
        "agents": st.lists(
            st.sampled_from([AGENT, SILENT, GONE, with_agent(fault="x").agents[0]]), max_size=40
        ).map(tuple),
        "jobs": st.lists(
            st.builds(
                replace,
                st.just(JOB),
                state=st.sampled_from(JobState),
                detail=st.text(max_size=200),
                pause=st.one_of(st.none(), st.builds(Pause, st.text(), st.text(), st.just(1.0))),
            ),
            max_size=30,
        ).map(tuple),
        "sweep": st.sampled_from([None, SWEEP, SweepAnswer("/x", error="none")]),
        "verifiers": st.lists(
            st.sampled_from([VERIFIER, replace(VERIFIER, error="no")]), max_size=2
        ).map(tuple),
    }
)


@settings(max_examples=25)
@given(parts)
def test_no_part_that_is_missing_leaves_a_healthy_word(part: dict[str, object]) -> None:
    """Operator rule R11: a law. Whatever did not answer, the whole is not healthy."""
    answer = replace(HEALTHY, **part)
    missing = (
        answer.controller is None
        or answer.controller.unknown
        or any(agent.status is None for agent in answer.agents)
        or (answer.sweep is not None and answer.sweep.error)
        or any(one.error for one in answer.verifiers)
    )
    if missing:
        assert health_of(problems_of(answer)) is not Health.HEALTHY
    json.dumps(answer_json(answer))


@settings(max_examples=25)
@given(parts)
def test_a_screen_is_80_columns_wide_and_breaks_no_word(part: dict[str, object]) -> None:
    answer = replace(HEALTHY, **part)
    shown = lines(answer)
    for line in shown:
        is_command = line.startswith("  action: ")
        assert len(line) <= 80 or is_command or len(line.split()) <= 2
        assert line.isprintable()
    assert len(shown) < 200


def test_a_job_shows_rate_limit_and_eta() -> None:
    """Operator rules R1, R9: bytes, rate and ETA, and the limit beside it."""
    text = text_of(with_job())
    assert "jobs: 1 RUNNING 4f1c2ab09d3e: container 7 RUNNING" in text
    assert "1.0 MiB/3.0 MiB 1.0 MiB/s (limit 5.0 MiB/s) ETA 2s" in text


@pytest.mark.parametrize(
    "without",
    [
        with_controller(roles_enforced=False),
        replace(HEALTHY, agents=(AgentAnswer(VIEW, replace(STATUS, roles_enforced=False)),)),
        replace(HEALTHY, verifiers=(replace(VERIFIER, roles_enforced=False),)),
    ],
    ids=["controller", "agent", "verifier"],
)
def test_whoever_has_no_roles_says_so(without: ClusterAnswer) -> None:
    assert "no TLS, so no roles" in text_of(without)
    assert "no TLS" not in text_of(replace(HEALTHY, verifiers=(VERIFIER,)))


def test_many_problems_are_cut_and_the_rest_is_counted() -> None:
    answer = replace(HEALTHY, agents=(GONE,) * 30)
    text = text_of(answer)
    assert "and 20 more" in text
    assert "and 18 more" in text
    problems = answer_json(answer)["problems"]
    assert isinstance(problems, list)
    assert len(problems) == 30


def invoke(*words: str) -> Result:
    return CliRunner().invoke(treefold, ["status", *words])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControllerServer]:
    config = ControllerConfig(listen="127.0.0.1:0", state_folder=tmp_path / "state")
    running = ControllerServer(config)
    yield running
    running.stop()


def test_the_command_asks_the_controller_and_its_agents(
    server: ControllerServer, tmp_path: Path
) -> None:
    agent = ReportingAgent(server.address, "dn-1")
    try:
        agent.report(replica("dn-1", 1, root=1))
        done = invoke("--controller", server.address, "--sweep", str(tmp_path / "none"), "--json")
    finally:
        agent.close()
    document = json.loads(done.stdout)
    assert (done.exit_code, document["ok"], document["data"]["state"]) == (7, False, "UNKNOWN")
    assert [one["error"] for one in document["data"]["agents"]] == [None]
    assert document["data"]["controller"]["status"]["containers"] == 1
    assert not document["data"]["controller"]["hasRoles"]
    assert "there is no sweep latest" in document["data"]["sweep"]["error"]


def test_an_agent_that_is_gone_is_unknown_though_its_heartbeat_is_young(
    server: ControllerServer,
) -> None:
    agent = ReportingAgent(server.address, "dn-1")
    agent.report(replica("dn-1", 1, root=1))
    agent.close()
    done = invoke("--controller", server.address)
    assert done.exit_code == 7
    assert "host-dn-1 dn-1: UNKNOWN" in done.stdout


def test_without_a_controller_all_is_unknown() -> None:
    done = invoke("--controller", "127.0.0.1:9", "--verifier", "127.0.0.1:9")
    assert done.exit_code == 7
    assert "controller: UNKNOWN" in done.stdout
    assert "verifier 127.0.0.1:9: UNKNOWN" in done.stdout
    assert done.stdout.startswith("state:   UNKNOWN\n")


def test_a_job_is_watched_with_uuids_that_can_be_pasted() -> None:
    ids = [f"{UUID[:30]}{number:06}" for number in (1, 2, 13)]
    names = DatanodeNames(Datanode(PeerId(one), one, "10.0.0.7:9893") for one in ids)
    orders = tuple(OrderStatus(PeerId(one), OrderState.RUNNING, RepairReport(), 1) for one in ids)
    line = progress_line(replace(JOB, orders=orders), names)
    assert line.endswith(f"{ids[0]} running, {ids[1]} running, {ids[2][:-1]} running")


@given(st.lists(st.text("0af-", min_size=1, max_size=14), max_size=12))
def test_a_prefix_is_of_one_id_alone_and_no_longer_than_needed(ids: list[str]) -> None:
    for one, prefix in unique_prefixes(ids).items():
        others = [other for other in ids if other != one]
        if not any(other.startswith(one) for other in others):
            assert not any(other.startswith(prefix) for other in others)
        assert one.startswith(prefix)
        shorter = prefix[:-1]
        assert len(shorter) < 8 or any(other.startswith(shorter) for other in others)


def test_a_sweep_has_no_verdict_that_status_does_not_know() -> None:
    verdicts = [("MATCH", 1), *((one.value, 1) for one in NotCompared)]
    answer = replace(HEALTHY, sweep=replace(SWEEP, verdicts=tuple(verdicts)))
    assert not any("does not know" in problem.text for problem in problems_of(answer))

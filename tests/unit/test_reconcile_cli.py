"""`treefold reconcile`, `container`, `job` and `scan` against a real controller on
loopback.

Rows T11-T19 are Ozone's tests of its own command; where we differ on purpose the test
says so. The exit codes are ours.
"""

import json
import re
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from admin.cli import treefold
from admin.reconcile_status import ozone_json
from merkle.columns import encode_tree
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId
from protos import controller_pb2 as pb
from scm.config import ControllerConfig
from scm.eligibility import INVALID_HINT
from scm.job_store import SqliteJobStore
from scm.server import ControllerServer
from tests.support.cluster_reports import replica
from tests.support.peers import MemoryReplica, replica_of
from tests.support.reporting_agents import DoWork, ReportingAgent, done, report_of
from tests.support.short_ids import shortest
from tests.support.waiting import wait_until

DNS = ("dn-1", "dn-2", "dn-3")
NOWHERE = "127.0.0.1:1"


@dataclass
class Cluster:
    """A controller and three agents that report what a test tells them to."""

    server: ControllerServer
    agents: dict[str, ReportingAgent]

    def run(self, *arguments: str, stdin: str = "") -> Result:
        words = [*arguments, "--controller", self.server.address]
        return CliRunner().invoke(treefold, words, input=stdin)

    def json(self, *arguments: str) -> dict[str, object]:
        """The document, which must be there whatever the exit status, and be alone on
        stdout.
        """
        result = self.run(*arguments, "--json")
        document = json.loads(result.stdout)
        assert document.keys() == {
            "schema_version",
            "command",
            "as_of",
            "ok",
            "data",
            "warnings",
            "errors",
        }
        assert document["command"] == " ".join(
            word for word in arguments[:2] if word in COMMAND_WORDS
        )
        for error in document["errors"]:
            assert error.keys() == {"code", "message", "hint"}
        document["exit"] = result.exit_code
        assert isinstance(document, dict)
        return document

    def report(self, *replicas: ContainerReplica) -> None:
        for peer, agent in self.agents.items():
            agent.report(*(one for one in replicas if one.peer == peer))

    def roots(self, *roots: int | None, container_id: int = 1) -> list[ContainerReplica]:
        return [
            replica(peer, container_id, root=root) for peer, root in zip(DNS, roots, strict=False)
        ]


COMMAND_WORDS = {
    "reconcile",
    "container",
    "list",
    "info",
    "diff",
    "job",
    "show",
    "watch",
    "cancel",
    "pause",
    "resume",
    "throttle",
    "scan",
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    server = ControllerServer(
        ControllerConfig(listen="127.0.0.1:0", state_folder=tmp_path / "state")
    )
    agents = {peer: ReportingAgent(server.address, peer) for peer in DNS}
    yield Cluster(server, agents)
    for agent in agents.values():
        agent.close()
    server.stop()


def work(cluster: Cluster, verdict: str = "REPAIRABLE", **verdicts: str) -> None:
    """All agents heal what they are told to, and report equal roots."""
    for peer, agent in cluster.agents.items():

        def heal(
            command: pb.ReconcileCommand, peer: str = peer, agent: ReportingAgent = agent
        ) -> None:
            agent.report(replica(peer, command.container_id, root=42), full=False)

        agent.work(done(verdicts.get(peer[3:], verdict), chunks_repaired=1), heal)


@pytest.mark.parametrize("mode", [[], ["--status"]], ids=["trigger", "status"])
class TestIds:
    def test_t12_no_ids_is_a_missing_parameter(self, cluster: Cluster, mode: list[str]) -> None:
        result = cluster.run("reconcile", *mode)
        assert result.exit_code == 2
        assert "Missing required parameter: '<container ID>'" in result.stderr
        assert result.stdout == ""

    def test_t12_empty_standard_input_does_nothing(self, cluster: Cluster, mode: list[str]) -> None:
        result = cluster.run("reconcile", "-", *mode, stdin="")
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr == "Standard input has no container ID: there is nothing to do.\n"
        assert cluster.run("reconcile", "-", "--status", "--json").stdout == "[ ]\n"

    def test_t13_a_dash_among_ids_is_an_invalid_id(self, cluster: Cluster, mode: list[str]) -> None:
        cluster.report(*cluster.roots(1, 2, 3))
        result = cluster.run("reconcile", "1", "-", "--yes", *mode)
        assert result.exit_code == 2
        assert (
            "Container IDs must be positive integers. Invalid container IDs: -\n" in result.stderr
        )
        assert result.stdout == ""

    def test_t18_all_invalid_ids_are_named_and_valid_ones_not_processed(
        self, cluster: Cluster, mode: list[str]
    ) -> None:
        cluster.report(*cluster.roots(1, 2, 3))
        result = cluster.run(
            "reconcile", "a", "1", "0", "1.5", "9223372036854775808", "--yes", *mode
        )
        assert result.exit_code == 2
        assert "Invalid container IDs: a 0 1.5 9223372036854775808\n" in result.stderr
        assert result.stdout == ""
        assert cluster.json("job", "list")["data"] == {"jobs": []}

    def test_ids_come_from_standard_input_each_once(
        self, cluster: Cluster, mode: list[str]
    ) -> None:
        cluster.report(*cluster.roots(7, 7, 7), *cluster.roots(7, 7, 7, container_id=2))
        result = cluster.run("reconcile", "-", "--status", "--json", *mode, stdin="2\n\n 1 \n2\n")
        assert [one["containerID"] for one in json.loads(result.stdout)] == [2, 1]


def test_the_status_has_ozones_shape_to_the_character(cluster: Cluster) -> None:
    cluster.report(
        replica("dn-1", 100, root=0xF8062E72),
        replica("dn-2", 100, ReplicaState.UNHEALTHY, root=None),
    )
    result = cluster.run("reconcile", "--status", "100", "--json")
    assert (
        result.stdout == "[ {\n"
        '  "containerID" : 100,\n'
        '  "state" : "CLOSED",\n'
        '  "replicationConfig" : {\n'
        '    "replicationFactor" : "THREE",\n'
        '    "requiredNodes" : 3,\n'
        '    "minimumNodes" : 1,\n'
        '    "replicationType" : "RATIS"\n'
        "  },\n"
        '  "replicasMatch" : null,\n'
        '  "replicas" : [ {\n'
        '    "datanode" : {\n'
        '      "id" : "dn-1",\n'
        '      "hostname" : "host-dn-1",\n'
        '      "ipAddress" : "127.0.0.1"\n'
        "    },\n"
        '    "state" : "CLOSED",\n'
        '    "dataChecksum" : "f8062e72"\n'
        "  }, {\n"
        '    "datanode" : {\n'
        '      "id" : "dn-2",\n'
        '      "hostname" : "host-dn-2",\n'
        '      "ipAddress" : "127.0.0.1"\n'
        "    },\n"
        '    "state" : "UNHEALTHY",\n'
        '    "dataChecksum" : "0"\n'
        "  } ]\n"
        "} ]\n"
    )


@pytest.mark.parametrize(
    ("roots", "match", "exit_code"),
    [
        ((7, 7, 7), True, 0),
        ((7, 7, 8), False, 3),
        ((7, None, 7), None, 0),
        ((None, None), None, 0),
        ((7,), None, 0),
    ],
)
def test_t11_replicas_match_is_true_false_or_unknown(
    cluster: Cluster, roots: tuple[int | None, ...], match: bool | None, exit_code: int
) -> None:
    """On purpose null where Ozone says true: unknown roots, and nothing to compare
    with.
    """
    cluster.report(*cluster.roots(*roots))
    result = cluster.run("reconcile", "--status", "1", "--json")
    assert json.loads(result.stdout)[0]["replicasMatch"] is match
    assert result.exit_code == exit_code
    assert "1" in cluster.run("reconcile", "--status", "1").stdout


def test_t14_open_and_erasure_coded_containers_have_no_status(cluster: Cluster) -> None:
    cluster.report(replica("dn-1", 1, ReplicaState.OPEN), replica("dn-1", 2, index=1))
    result = cluster.run("reconcile", "--status", "1", "2", "--json")
    assert result.stdout == "[ ]\n"
    assert result.stderr.splitlines() == [
        "Cannot get status of container 1. Reconciliation is not supported for open containers",
        (
            "Cannot get status of container 2. Reconciliation is only supported for Ratis"
            " replicated containers"
        ),
        "Failed to process reconciliation status for 2 containers",
    ]
    assert result.exit_code == 1


def test_t15_the_status_of_the_valid_one_of_four_is_shown(cluster: Cluster) -> None:
    cluster.report(
        *cluster.roots(7, 7, 7), replica("dn-1", 2, ReplicaState.OPEN), replica("dn-1", 3, index=1)
    )
    result = cluster.run("reconcile", "--status", "1", "2", "3", "4", "--json")
    assert [one["containerID"] for one in json.loads(result.stdout)] == [1]
    assert "Failed to get reconciliation status of container 4: " in result.stderr
    assert result.stderr.endswith("Failed to process reconciliation status for 3 containers\n")
    assert result.exit_code == 5


def test_t17_t19_an_unreachable_controller_ends_the_command_at_once() -> None:
    """On purpose once and not per container: all are asked about in one call."""
    runner = CliRunner()
    status = runner.invoke(
        treefold, ["reconcile", "--status", "1", "2", "--json", "--controller", NOWHERE]
    )
    assert status.exit_code == 7
    [error] = json.loads(status.stdout)["errors"]
    assert error["code"] == "controller_unavailable"
    trigger = runner.invoke(
        treefold, ["reconcile", "1", "--yes", "--json", "--controller", NOWHERE]
    )
    assert trigger.exit_code == 7
    document = json.loads(trigger.stdout)
    assert (document["ok"], document["errors"][0]["code"]) == (False, "controller_unavailable")


def test_an_array_is_printed_as_ozones_library_does() -> None:
    assert ozone_json([]) == "[ ]"
    assert ozone_json({}) == "{ }"
    assert (
        ozone_json([{"a": [1, 2], "b": {}}, {"c": None}])
        == '[ {\n  "a" : [ 1, 2 ],\n  "b" : { }\n}, {\n  "c" : null\n} ]'
    )


def test_without_yes_and_without_a_terminal_the_plan_is_shown_and_refused(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    result = cluster.run("reconcile", "1")
    assert result.exit_code == 6
    assert "Plan" in result.stdout
    assert "--yes" in result.stderr
    refused = cluster.run("reconcile", "1", "9")
    assert refused.exit_code == 6
    # What would be left out is told before the question, not after the answer.
    assert refused.stderr.index(
        "Container #9 not found for reconciliation."
    ) < refused.stderr.index("not confirmed")
    assert cluster.json("job", "list")["data"] == {"jobs": []}


def test_a_dry_run_shows_the_plan_and_starts_nothing(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    document = cluster.json("reconcile", "1", "--dry-run", "--yes")
    assert (document["exit"], document["ok"]) == (0, True)
    data = document["data"]
    assert isinstance(data, dict)
    assert data["plan"][0]["datanodes"] == list(DNS)
    assert data["jobs"] == []
    assert cluster.json("job", "list")["data"] == {"jobs": []}


def test_the_plan_says_what_differs_by_the_trees_of_the_agents(tmp_path: Path) -> None:
    """Operator rule R16."""
    with healing_cluster(tmp_path) as (cluster, replicas):
        document = cluster.json("reconcile", "1", "--dry-run")
        data = document["data"]
        assert isinstance(data, dict)
        assert data["plan"][0]["trees"]["verdict"] == "REPAIRABLE"
        assert [
            (d["kind"], d["blockID"], d["lacking"]) for d in data["plan"][0]["trees"]["differences"]
        ] == [("corrupt_chunk", "20", ["dn-2"])]
        assert "REPAIRABLE: 1 corrupt_chunk" in " ".join(
            cluster.run("reconcile", "1", "--dry-run").stdout.split()
        )
        # Their files have outlived their records, so that a reconciliation would still
        # mend it.
        for peer in ("dn-1", "dn-3"):
            del replicas[peer].records[BlockId(20)]
            store_tree(replicas[peer])
        shown = " ".join(cluster.run("reconcile", "1", "--dry-run").stdout.split())
        assert "UNRECOVERABLE by the trees alone: 1 corrupt_chunk" in shown


def test_reconcile_waits_and_shows_what_came_of_it(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    work(cluster)
    result = cluster.run("reconcile", "1", "--yes", "--wait", "--reason", "drill")
    assert result.exit_code == 0, result.output
    assert re.search(
        r"^Reconciliation has been triggered for container 1 \(job \w+\)$",
        result.stdout,
        re.MULTILINE,
    )
    assert "DONE" in result.stdout
    assert (
        json.loads(cluster.run("reconcile", "--status", "1", "--json").stdout)[0]["replicasMatch"]
        is True
    )
    [job] = jobs(cluster.json("job", "list"))
    assert (job["state"], job["verdict"], job["reason"]) == ("DONE", "REPAIRABLE", "drill")
    assert [one["chunksRepaired"] for one in datanodes(job)] == [1, 1, 1]


def test_the_plan_says_which_unhealthy_replicas_return_to_service(cluster: Cluster) -> None:
    cluster.agents["dn-2"].returns_to_service = False
    unhealthy = ReplicaState.UNHEALTHY
    cluster.report(
        replica("dn-1", state=unhealthy, root=1),
        replica("dn-2", state=unhealthy, root=2),
        replica("dn-3", state=unhealthy, root=1, read_only=True),
    )
    plan = cluster.json("reconcile", "1", "--dry-run")["data"]
    assert isinstance(plan, dict)
    [one] = plan["plan"]
    # Nobody writes a read-only replica, whatever its agent would do.
    assert one["returnToService"] == ["dn-1"]
    assert one["stayUnhealthy"] == {"dn-2": "return_to_closed is off", "dn-3": "read-only"}
    shown = " ".join(cluster.run("reconcile", "1", "--dry-run").stdout.split())
    assert (
        "1 UNHEALTHY return to service once proven clean;"
        " dn-2 stays UNHEALTHY: return_to_closed is off; dn-3 stays UNHEALTHY: read-only;"
    ) in shown


@pytest.mark.parametrize("returns", [True, False])
def test_what_is_still_out_of_service_after_a_reconciliation_is_said(
    cluster: Cluster, returns: bool
) -> None:
    cluster.agents["dn-2"].returns_to_service = returns
    cluster.report(
        *cluster.roots(1, None, 1)[::2], replica("dn-2", state=ReplicaState.UNHEALTHY, root=2)
    )

    def heal(command: pb.ReconcileCommand) -> None:
        healed = replica("dn-2", state=ReplicaState.UNHEALTHY, root=1)
        cluster.agents["dn-2"].report(healed, full=False)

    for peer, agent in cluster.agents.items():
        agent.work(done(chunks_repaired=1), heal if peer == "dn-2" else lambda _: None)
    document = cluster.json("reconcile", "1", "--yes", "--wait")
    assert document["exit"] == 0
    [warning] = warnings_of_state(document)
    assert "container 1: still UNHEALTHY, so out of service: dn-2" in warning
    assert ("treefold job show" in warning) is returns
    assert ("dn-2 (host-dn-2): return_to_closed is off" in warning) is not returns


def test_nothing_is_said_of_replicas_that_are_in_service(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 1))
    plan = cluster.run("reconcile", "1", "--dry-run").stdout
    assert "UNHEALTHY" not in plan
    work(cluster)
    assert warnings_of_state(cluster.json("reconcile", "1", "--yes", "--wait")) == []


def warnings_of_state(document: dict[str, object]) -> list[str]:
    warnings = document["warnings"]
    assert isinstance(warnings, list)
    # These agents serve no trees.
    return [warning for warning in warnings if "the plan lacks the tree" not in warning]


def test_one_command_goes_on_until_all_have_what_one_put_together(cluster: Cluster) -> None:
    """The third holds its end back until the others have gone empty-handed."""
    cluster.report(*cluster.roots(1, 1, 2))
    empty_handed = {peer: threading.Event() for peer in DNS[:2]}

    def carry_out(
        peer: str, agent: ReportingAgent, command: pb.ReconcileCommand
    ) -> pb.ReconcileProgress:
        is_first = command.job_id.isalnum()
        if peer in empty_handed and is_first:
            empty_handed[peer].set()
            return done("UNRECOVERABLE")(command)
        assert all(event.wait(20) for event in empty_handed.values())
        agent.report(replica(peer, root=7), full=False)
        return done(chunks_repaired=1)(command)

    for peer, agent in cluster.agents.items():
        agent.work(partial(carry_out, peer, agent))
    document = cluster.json("reconcile", "1", "--yes", "--wait")
    assert document["exit"] == 0
    [job] = jobs(document)
    assert (job["state"], job["verdict"], job["comparison"]) == ("DONE", "REPAIRABLE", "match")
    assert [(one["round"], one["chunksRepaired"]) for one in datanodes(job)] == [
        (2, 1),
        (2, 1),
        (1, 1),
    ]
    shown = cluster.run("job", "show", str(job["jobID"])).stdout
    assert "datanode dn-1 (host-dn-1): done in round 2, verdict REPAIRABLE" in shown
    assert "datanode dn-3 (host-dn-3): done, verdict REPAIRABLE" in shown


def jobs(document: dict[str, object]) -> list[dict[str, object]]:
    data = document["data"]
    assert isinstance(data, dict)
    return list(data["jobs"])


def datanodes(job: dict[str, object]) -> list[dict[str, object]]:
    found = job["datanodes"]
    assert isinstance(found, list)
    return found


def test_reconcile_json_has_plan_jobs_and_comparison(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3), *cluster.roots(1, 2, 3, container_id=2))
    work(cluster)
    document = cluster.json("reconcile", "--all-diverged", "--yes", "--wait")
    assert (document["exit"], document["ok"], document["errors"]) == (0, True, [])
    assert [(job["containerID"], job["state"], job["comparison"]) for job in jobs(document)] == [
        (1, "DONE", "match"),
        (2, "DONE", "match"),
    ]


@pytest.mark.parametrize("verdict", ["UNRECOVERABLE", "CONFLICT"])
def test_damage_beyond_repair_ends_with_4(cluster: Cluster, verdict: str) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    work(cluster, **{"2": verdict})
    document = cluster.json("reconcile", "1", "--yes", "--wait")
    assert document["exit"] == 4
    [job] = jobs(document)
    assert (job["state"], job["verdict"]) == ("PARTIAL", verdict)


def test_an_empty_container_is_not_said_to_hold_what_has_no_checksums(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    for agent in cluster.agents.values():
        agent.work(done("UNKNOWN", evidence=[UNVERIFIABLE]))
    warnings = str(cluster.json("reconcile", "1", "--yes", "--wait")["warnings"])
    assert "unverifiable: no replica reports any blocks" in warnings
    assert "nobody recorded" not in warnings


UNVERIFIABLE = pb.Evidence(
    kind="unverifiable", detail="without recorded checksums, wholly or in part: block 20"
)
UNREADABLE = pb.Evidence(kind="file_unreadable", block_id=20, offset=0, detail="Permission\ndenied")
SHARED = pb.Evidence(
    kind="bad_windows_shared", block_id=20, offset=0, detail="beyond repair, if nobody else has it"
)
GONE = pb.PeerOutcome(datanode_id="dn-3", outcome="peer_unavailable")


@pytest.mark.parametrize(
    ("does", "why"),
    [
        (
            done("UNKNOWN", evidence=[UNVERIFIABLE]),
            "unverifiable: it holds data without recorded checksums",
        ),
        (
            done("UNKNOWN", evidence=[UNVERIFIABLE, UNREADABLE]),
            (
                "file_unreadable block 20 at 0: Permission denied (reported by dn-1, dn-2, dn-3); "
                "unverifiable: it holds data without recorded checksums"
            ),
        ),
        (
            done("UNKNOWN", evidence=[SHARED], peers=[GONE]),
            "peer_unavailable: datanode dn-3 (reported by dn-1, dn-2, dn-3)",
        ),
        (
            done("UNKNOWN", evidence=[UNVERIFIABLE, UNREADABLE], peers=[GONE]),
            (
                "peer_unavailable: datanode dn-3 (reported by dn-1, dn-2, dn-3); file_unreadable"
                " block 20 at 0: Permission denied (reported by dn-1, dn-2, dn-3) and 1 more"
            ),
        ),
        (done("UNKNOWN"), "its datanodes reported no reason"),
    ],
    ids=["unverifiable", "unreadable", "silent peer", "all of it", "nothing"],
)
def test_why_a_verdict_is_unknown_is_named_and_no_failure(
    cluster: Cluster, does: DoWork, why: str
) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    for peer, agent in cluster.agents.items():

        def heal(
            command: pb.ReconcileCommand, peer: str = peer, agent: ReportingAgent = agent
        ) -> None:
            agent.report(
                replace(replica(peer, command.container_id, root=42), block_count=1), full=False
            )

        agent.work(does, heal)
    document = cluster.json("reconcile", "1", "--yes", "--wait")
    assert document["exit"] == 0
    [job] = jobs(document)
    assert isinstance(document["warnings"], list)
    # The plan warns too: these agents have no trees to show.
    warnings = [warning for warning in document["warnings"] if "the plan lacks" not in warning]
    assert warnings == [
        f"container 1: the verdict is UNKNOWN: {why}: see `treefold job show {job['jobID']}`"
    ]


def test_replicas_that_still_differ_are_only_partly_done(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    for agent in cluster.agents.values():
        agent.work(done())
    document = cluster.json("reconcile", "1", "--yes", "--wait")
    assert document["exit"] == 5
    assert "still differ" in str(document["warnings"])


def test_t16_a_refusal_is_named_and_the_others_are_processed(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3), replica("dn-1", 2, ReplicaState.OPEN))
    result = cluster.run("reconcile", "2", "1", "--yes")
    assert result.exit_code == 5
    assert "Cannot reconcile container 2 in state OPEN." in result.stderr.splitlines()
    assert result.stderr.endswith("Failed to trigger reconciliation for 1 container\n")
    assert "triggered for container 1 " in result.stdout
    assert "triggered for container 2" not in result.stdout


@pytest.mark.parametrize(
    ("found", "code", "exit_code"),
    [
        ([], "CONTAINER_NOT_FOUND", 1),
        ([replica("dn-1", state=ReplicaState.OPEN)], "INELIGIBLE_CONTAINER_STATE", 6),
        (
            [replica("dn-1"), replica("dn-2", state=ReplicaState.CLOSING)],
            "INELIGIBLE_REPLICA_STATES",
            6,
        ),
        ([replica("dn-1", index=1), replica("dn-2", index=2)], "INELIGIBLE_REPLICATION_TYPE", 6),
        ([replica("dn-1")], "NO_LIVE_PEERS", 6),
        ([replica("dn-1", read_only=True), replica("dn-2", read_only=True)], "READ_ONLY", 6),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_refusal_has_its_code_and_exit_status(
    cluster: Cluster, found: list[ContainerReplica], code: str, exit_code: int
) -> None:
    cluster.report(*found)
    document = cluster.json("reconcile", "1", "--yes")
    assert (document["exit"], document["ok"]) == (exit_code, False)
    assert [error["code"] for error in errors(document)] == [code.lower()]
    assert cluster.json("reconcile", "1", "--dry-run")["exit"] == exit_code


def test_a_replica_that_stands_in_the_way_is_named_and_what_to_do_about_it(
    cluster: Cluster,
) -> None:
    invalid = replica("dn-2", state=ReplicaState.INVALID, root=None)
    cluster.report(replica("dn-1"), invalid, replica("dn-3"))
    [error] = errors(cluster.json("reconcile", "1", "--yes"))
    assert "INVALID on datanode dn-2" in str(error["message"])
    assert error["hint"] == INVALID_HINT
    assert INVALID_HINT in cluster.run("reconcile", "1", "--yes").stderr
    assert (
        f"(not closed: INVALID on datanode dn-2; {INVALID_HINT})"
        in cluster.run("container", "info", "1").stdout
    )
    # Where the others differ, that is what the note says.
    cluster.report(replica("dn-1", root=1), invalid, replica("dn-3", root=2))
    shown = cluster.run("container", "info", "1").stdout
    assert "diverged (roots differ)" in shown
    assert shown.endswith(f"\n  {INVALID_HINT}\n")
    cluster.report(replica("dn-1"), replica("dn-2", state=ReplicaState.OPEN), replica("dn-3"))
    [error] = errors(cluster.json("reconcile", "1", "--yes"))
    assert "OPEN on datanode dn-2" in str(error["message"])
    assert error["hint"] == ""


def errors(document: dict[str, object]) -> list[dict[str, object]]:
    found = document["errors"]
    assert isinstance(found, list)
    return found


def test_a_container_under_way_is_busy_and_its_job_is_named(cluster: Cluster) -> None:
    """CR-019"""
    cluster.report(*cluster.roots(1, 2, 3))
    first = cluster.json("reconcile", "1", "--yes")
    second = cluster.json("reconcile", "1", "--yes")
    assert second["exit"] == 8
    [error] = errors(second)
    assert error["code"] == "already_running"
    assert str(jobs(first)[0]["jobID"]) in str(error["message"])


def test_waiting_for_a_container_under_way_joins_its_job(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    first = cluster.json("reconcile", "1", "--yes")
    work(cluster)
    joined = cluster.json("reconcile", "1", "--yes", "--wait")
    assert joined["exit"] == 0
    assert [job["jobID"] for job in jobs(joined)] == [job["jobID"] for job in jobs(first)]


def test_the_metrics_of_a_controller_are_served_at_an_ipv6_address_too(tmp_path: Path) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        port = free.getsockname()[1]
    config = ControllerConfig(
        listen="[::1]:0", metrics=f"[::1]:{port}", state_folder=tmp_path / "state"
    )
    server = ControllerServer(config)
    try:
        with urllib.request.urlopen(f"http://[::1]:{port}/metrics") as page:
            assert b"scm_containers" in page.read()
        # Its own address is one that others can be given.
        listed = CliRunner().invoke(
            treefold, ["job", "list", "--json", "--controller", server.address]
        )
        assert json.loads(listed.stdout)["ok"]
    finally:
        server.stop()


def test_ids_and_all_diverged_together_are_a_mistake(cluster: Cluster) -> None:
    assert cluster.run("reconcile", "1", "--all-diverged").exit_code == 2


def test_all_diverged_of_nothing_is_done(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(7, 7, 7))
    document = cluster.json("reconcile", "--all-diverged", "--yes", "--wait")
    assert (document["exit"], document["data"]) == (0, {"plan": [], "jobs": []})
    for options in ([], ["--status"], ["--dry-run"]):
        said = cluster.run("reconcile", "--all-diverged", *options)
        assert (said.exit_code, said.stdout) == (0, "No container is known to be diverged.\n")
    assert cluster.run("reconcile", "--all-diverged", "--status", "--json").stdout == "[ ]\n"


@pytest.mark.parametrize(
    "words",
    [
        ("reconcile", "--all-diverged", "--yes"),
        ("reconcile", "--all-diverged", "--dry-run"),
        ("reconcile", "1", "--yes"),
        ("reconcile", "--status", "--all-diverged"),
        ("reconcile", "--status", "1"),
        ("container", "list"),
        ("container", "list", "--diverged"),
        ("container", "info", "1"),
        ("container", "diff", "1"),
        ("scan", "1"),
    ],
)
def test_without_agents_nothing_is_known_and_nothing_is_fine(
    cluster: Cluster, words: tuple[str, ...]
) -> None:
    document = cluster.json(*words)
    assert document["exit"] == 7
    [error] = errors(document)
    assert error["code"] == "no_agent"
    assert f"No live agent reports to the controller at {cluster.server.address}" in str(
        error["message"]
    )
    if words[:2] == ("container", "list"):
        assert document["data"] == {"containers": [], "more": False}
    shown = cluster.run(*words)
    assert shown.exit_code == 7
    assert "diverged" not in shown.stdout
    assert "No live agent" in str(shown.exception) + shown.output


def test_nothing_diverged_is_said_with_what_was_not_compared(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(7, 7, 7), *cluster.roots(7, 7, container_id=2))
    said = cluster.run("reconcile", "--all-diverged", "--dry-run")
    assert (said.exit_code, said.stdout) == (0, "No container is known to be diverged.\n")
    assert "1 container not compared" in said.stderr


def test_a_container_says_how_much_is_known_and_how_old_that_is(cluster: Cluster) -> None:
    cluster.report(
        *cluster.roots(7, 7),
        *cluster.roots(7, 7, 7, container_id=2),
        *(
            replace(one, data_scan_timestamp_ms=None)
            for one in cluster.roots(7, 7, 7, container_id=3)
        ),
    )
    data = cluster.json("container", "list")["data"]
    assert isinstance(data, dict)
    said = [
        (one["comparison"], one["comparisonNote"], one["knownReplicas"], one["expectedReplicas"])
        for one in data["containers"]
    ]
    never = "the data of 3 of 3 replicas was never scanned"
    assert said == [
        ("unknown", "2 of 3 known", 2, 3), ("match", "", 3, 3), ("unknown", never, 3, 3),
    ]  # fmt: skip
    ages = [one["rootsAgeSeconds"] for one in data["containers"]]
    assert all(0 <= age < 60 for age in ages[:2])
    assert ages[2] is None
    assert [one["rootsScannedAt"] is None for one in data["containers"]] == [False, False, True]
    table = cluster.run("container", "list").stdout
    assert re.search(r"unknown +2/3 +\d+s ago .*2 of 3 known", table)
    assert re.search(r"unknown +3/3 +never", table)
    info = cluster.run("container", "info", "1", "3").stdout
    assert re.search(r"known: +2 of 3 replicas, data scanned \d+s ago", info)
    assert re.search(r"known: +3 of 3 replicas, data scanned never", info)


def test_a_job_is_not_done_while_replicas_that_it_could_not_write_differ(cluster: Cluster) -> None:
    first, *others = cluster.roots(1, 2, 2)
    cluster.report(first, *(replace(one, read_only=True) for one in others))
    plan = cluster.json("reconcile", "1", "--dry-run")["data"]
    assert isinstance(plan, dict)
    assert plan["plan"][0]["notWritten"] == {"dn-2": "read-only", "dn-3": "read-only"}
    assert "dn-2 (host-dn-2) is not written: read-only" in " ".join(
        cluster.run("reconcile", "1", "--dry-run").stdout.split()
    )
    work(cluster)
    document = cluster.json("reconcile", "1", "--yes", "--wait")
    assert document["exit"] == 5
    [job] = jobs(document)
    assert (job["state"], job["verdict"], job["comparison"]) == (
        "PARTIAL",
        "REPAIRABLE",
        "diverged",
    )
    assert job["detail"] == (
        "dn-2 still differs: it is held read-only; dn-3 still differs: it is held read-only"
    )


def test_a_job_that_ended_says_what_it_found_and_what_is_true_now(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    work(cluster)
    [job] = jobs(cluster.json("reconcile", "1", "--yes", "--wait"))
    assert (job["state"], job["verdict"], job["comparison"]) == ("DONE", "REPAIRABLE", "match")
    shown = cluster.run("job", "show", str(job["jobID"])).stdout
    assert re.search(r"found: +REPAIRABLE\n +now: +match\n", shown)
    assert re.search(r"DONE +REPAIRABLE +match", cluster.run("job", "list").stdout)


def test_containers_are_listed_by_state_and_comparison(cluster: Cluster) -> None:
    cluster.report(
        *cluster.roots(7, 7, 7),
        *cluster.roots(7, 8, 7, container_id=2),
        replica("dn-1", 3, ReplicaState.OPEN),
    )

    def listed(*options: str) -> list[int]:
        data = cluster.json("container", "list", *options)["data"]
        assert isinstance(data, dict)
        return [one["containerID"] for one in data["containers"]]

    assert listed() == [1, 2, 3]
    assert listed("--diverged") == [2]
    assert listed("--state", "OPEN") == [3]
    assert listed("--comparison", "match") == [1]
    assert listed("--after", "1", "--limit", "1") == [2]
    assert cluster.run("container", "list", "--ids", "--limit", "2").stdout == "1\n2\n"
    assert "--after 2" in cluster.run("container", "list", "--ids", "--limit", "2").stderr
    assert "diverged" in cluster.run("container", "list").stdout


def test_info_tells_unknown_from_zero(cluster: Cluster) -> None:
    """CR-020"""
    cluster.report(*cluster.roots(0, None, 0xABC))
    document = cluster.json("container", "info", "1", "9")
    assert document["exit"] == 1
    data = document["data"]
    assert isinstance(data, list)
    assert [one["dataChecksum"] for one in data[0]["replicas"]] == ["0", None, "abc"]
    assert [error["code"] for error in errors(document)] == ["container_not_found"]
    text = cluster.run("container", "info", "1").stdout
    assert "unknown" in text
    assert "diverged (roots differ)" in text


@contextmanager
def healing_cluster(folder: Path) -> Iterator[tuple[Cluster, dict[str, MemoryReplica]]]:
    """A controller and three agents that serve real trees of container 1; the second
    has a corrupt chunk.
    """
    server = ControllerServer(ControllerConfig(listen="127.0.0.1:0", state_folder=folder / "state"))
    replicas = {peer: replica_of(1, {10: 5000, 20: 70_000}) for peer in DNS}
    replicas["dn-2"].flip(20, 100)
    agents = {}
    for peer, held in replicas.items():
        store_tree(held)
        agents[peer] = ReportingAgent(server.address, peer, held)
        agents[peer].report(report_of(peer, held))
    try:
        yield Cluster(server, agents), replicas
    finally:
        for agent in agents.values():
            agent.close()
        server.stop()


def store_tree(held: MemoryReplica) -> None:
    held.tree = encode_tree(held.scanned_tree())


def test_diff_compares_the_trees_of_the_agents(tmp_path: Path) -> None:
    with healing_cluster(tmp_path) as (cluster, replicas):
        document = cluster.json("container", "diff", "1")
        assert document["exit"] == 3
        data = document["data"]
        assert isinstance(data, dict)
        named = {one["id"]: one["hostname"] for one in data.pop("datanodes")}
        assert named == {peer: f"host-{peer}" for peer in DNS}
        assert data == {
            "containerID": 1,
            "verdict": "REPAIRABLE",
            "differences": [
                {
                    "kind": "corrupt_chunk",
                    "blockID": "20",
                    "offset": 0,
                    "lacking": ["dn-2"],
                    "sources": ["dn-1", "dn-3"],
                }
            ],
        }
        shown = cluster.run("container", "diff", "1").stdout
        assert "at 0: dn-2 (host-dn-2) <- dn-1 (host-dn-1), dn-3 (host-dn-3)" in shown
        assert re.search(r"^dn-1 +host-dn-1 +[0-9a-f]+ +\d", shown, re.M)
        for held in replicas.values():
            held.files = replicas["dn-1"].files
            store_tree(held)
        equal = cluster.json("container", "diff", "1")
        assert (equal["exit"], equal["ok"]) == (0, True)
        replicas["dn-3"].tree = b"nonsense"
        refused = cluster.json("container", "diff", "1")
        assert refused["exit"] == 1
        assert errors(refused)[0]["code"] == "tree_refused"


def test_equal_trees_are_no_match_while_a_replica_is_unknown_or_never_scanned(
    tmp_path: Path,
) -> None:
    with healing_cluster(tmp_path) as (cluster, replicas):
        for held in replicas.values():
            held.files = replicas["dn-1"].files
            store_tree(held)
        equal = cluster.run("container", "diff", "1")
        assert equal.exit_code == 0
        assert re.search(r"Container 1: MATCH \(data scanned \d+s ago\)", equal.stdout)
        cluster.agents["dn-3"].report()
        document = cluster.json("container", "diff", "1")
        assert (document["exit"], document["ok"]) == (5, False)
        assert document["warnings"] == ["container 1: 2 of 3 expected replicas were compared"]
        data, plan = document["data"], cluster.json("reconcile", "1", "--dry-run")["data"]
        assert isinstance(data, dict)
        assert isinstance(plan, dict)
        assert data["verdict"] == plan["plan"][0]["trees"]["verdict"] == "UNKNOWN"
        # A replica that nobody fetched may hold what is lost on these two.
        record = replicas["dn-2"].records.pop(BlockId(20))
        replicas["dn-1"].flip(20, 100)
        for held in replicas.values():
            store_tree(held)
        document = cluster.json("container", "diff", "1")
        data = document["data"]
        assert isinstance(data, dict)
        assert (document["exit"], data["verdict"]) == (3, "UNKNOWN")
        replicas["dn-2"].records[BlockId(20)] = record
        replicas["dn-1"].flip(20, 100)
        for peer, held in replicas.items():
            store_tree(held)
            cluster.agents[peer].report(report_of(peer, held))
        never = replace(report_of("dn-3", replicas["dn-3"]), data_scan_timestamp_ms=None)
        cluster.agents["dn-3"].report(never)
        document = cluster.json("container", "diff", "1")
        assert document["exit"] == 5
        assert document["warnings"] == [
            "container 1: the data of 1 of 3 replicas was never scanned"
        ]


def test_a_container_without_replicas_has_nothing_to_compare(tmp_path: Path) -> None:
    with healing_cluster(tmp_path) as (cluster, _):
        for agent in cluster.agents.values():
            agent.report()
        document = cluster.json("container", "diff", "1")
        assert document["exit"] == 1
        assert [error["code"] for error in errors(document)] == ["no_replicas_found"]


@pytest.mark.parametrize(
    "words",
    [
        ("reconcile", "--status", "1"),
        ("container", "diff", "1"),
        ("container", "list"),
        ("container", "info", "1"),
    ],
)
def test_what_an_earlier_controller_knew_is_no_answer_without_agents(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    store = SqliteJobStore(tmp_path / "controller.db")
    store.save(holders={ContainerId(1): {PeerId(peer) for peer in DNS}})
    store.close()
    server = ControllerServer(ControllerConfig(listen="127.0.0.1:0", state_folder=tmp_path))
    try:
        document = Cluster(server, {}).json(*words)
    finally:
        server.stop()
    assert document["exit"] == 7
    assert [error["code"] for error in errors(document)] == ["no_agent"]


def test_diff_of_what_is_not_comparable_or_not_known(cluster: Cluster) -> None:
    cluster.report(replica("dn-1", 2, index=1), replica("dn-2", 2, index=2))
    assert [error["code"] for error in errors(cluster.json("container", "diff", "2"))] == [
        "not_applicable"
    ]
    assert [error["code"] for error in errors(cluster.json("container", "diff", "9"))] == [
        "container_not_found"
    ]


def test_a_job_is_shown_watched_and_cancelled(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    for agent in cluster.agents.values():
        agent.work(None)
    job_id = str(jobs(cluster.json("reconcile", "1", "--yes"))[0]["jobID"])
    shown = cluster.json("job", "show", job_id)
    assert isinstance(shown["data"], dict)
    assert shown["data"]["state"] == "RUNNING"
    # Else it may be cancelled without a word of the agents.
    agents = cluster.agents.values()
    wait_until(lambda: all(agent.commands for agent in agents), "every agent has its order")
    assert cluster.json("job", "cancel", job_id)["exit"] == 0
    watched = cluster.json("job", "watch", job_id)
    assert isinstance(watched["data"], dict)
    assert (watched["exit"], watched["data"]["state"]) == (1, "CANCELLED")
    assert "CANCELLED" in cluster.run("job", "show", job_id).stdout
    assert job_id in cluster.run("job", "list", "--state", "CANCELLED").stdout


def test_a_job_that_ended_keeps_its_volume_rate_and_limits(cluster: Cluster) -> None:
    """Operator rules R1, R19."""
    cluster.report(*cluster.roots(1, 2, 3))
    job_id = str(jobs(cluster.json("reconcile", "1", "--yes"))[0]["jobID"])
    cluster.json("job", "throttle", job_id, "--bytes-per-second", "1GiB")
    for agent in cluster.agents.values():
        agent.work(done("REPAIRABLE", bytes_fetched=4 << 20))
    cluster.json("job", "watch", job_id)
    data = cluster.json("job", "show", job_id)["data"]
    assert isinstance(data, dict)
    assert data["bytesDone"] == 12 << 20
    assert data["meanRateBytesPerSecond"] > 0
    assert data["lastProgressAt"]
    assert data["limits"]["bytesPerSecond"]["value"] == 1 << 30
    text = cluster.run("job", "show", job_id).stdout
    assert "fetched 12.0 MiB at " in text
    assert "1.0 GiB/s for all datanodes together, set by" in text


def test_a_job_is_paused_limited_and_goes_on_by_commands(cluster: Cluster) -> None:
    """Operator rules R4, R9: who paused or limited it, and why, is said."""
    cluster.report(*cluster.roots(1, 2, 3))
    job_id = str(jobs(cluster.json("reconcile", "1", "--yes"))[0]["jobID"])
    paused = cluster.run("job", "pause", job_id, "--reason", "peak hours")
    assert (paused.exit_code, "PAUSED" in paused.stdout) == (0, True)
    data = cluster.json("job", "show", job_id)["data"]
    assert isinstance(data, dict)
    assert data["state"] == "PAUSED"
    assert (data["pause"]["reason"], data["limits"]) == (
        "peak hours",
        {"bytesPerSecond": None, "maxContainers": None},
    )
    limits = ("--bytes-per-second", "20MiB", "--max-containers", "2")
    data = cluster.json("job", "throttle", job_id, *limits)["data"]
    assert isinstance(data, dict)
    assert data["limits"]["bytesPerSecond"]["value"] == 20 << 20
    assert data["limits"]["maxContainers"] == {
        "value": 2,
        "setBy": data["pause"]["by"],
        "setAt": data["limits"]["bytesPerSecond"]["setAt"],
    }
    shown = cluster.run("job", "show", job_id).stdout
    assert f"20.0 MiB/s for all datanodes together, set by {data['pause']['by']}" in shown
    assert "2 replicas at once, set by" in shown
    assert "peak hours" in shown
    agent = cluster.agents["dn-1"]
    assert list(agent.beat().commands) == []
    assert "QUEUED" in cluster.run("job", "resume", job_id).stdout or agent.beat().commands
    [command] = agent.beat().commands
    # Two replicas at once share it.
    assert command.reconcile.bytes_per_second == 10 << 20
    assert cluster.json("job", "throttle", job_id)["exit"] == 2
    wrong = cluster.run("job", "throttle", job_id, "--bytes-per-second", "fast")
    assert (wrong.exit_code, "--bytes-per-second" in wrong.stderr) == (2, True)


def test_a_change_of_a_job_that_has_nothing_to_change_is_no_success(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    job_id = str(jobs(cluster.json("reconcile", "1", "--yes"))[0]["jobID"])
    document = cluster.json("job", "resume", job_id)
    assert (document["exit"], errors(document)[0]["code"]) == (6, "job_not_paused")
    cluster.run("job", "pause", job_id, "--reason", "peak hours")
    again = cluster.run("job", "pause", job_id, "--reason", "other")
    assert again.exit_code == 0
    assert "warning: the job is paused already, by " in again.stderr
    assert again.stderr.endswith(": peak hours\n")
    assert cluster.run("job", "cancel", job_id).exit_code == 0
    assert cluster.run("job", "cancel", job_id).exit_code == 0
    for words in (["pause"], ["resume"], ["throttle", "--max-containers", "1"]):
        document = cluster.json("job", *words, job_id)
        [error] = errors(document)
        assert (document["exit"], error["code"]) == (6, "job_ended"), words
        assert "CANCELLED; nothing was changed" in error["message"]
        plain = cluster.run("job", *words, job_id)
        assert (plain.exit_code, plain.stdout) == (6, "")


@pytest.mark.parametrize(
    "words", [["show"], ["watch"], ["cancel"], ["pause"], ["resume"]], ids=lambda words: words[0]
)
def test_an_unknown_job_is_an_error_with_a_code(cluster: Cluster, words: list[str]) -> None:
    document = cluster.json("job", *words, "nope")
    assert (document["exit"], errors(document)[0]["code"]) == (1, "job_not_found")
    assert "job_not_found" in cluster.run("job", *words, "nope").stderr


def test_a_job_is_named_by_a_beginning_that_no_other_has(cluster: Cluster) -> None:
    cluster.report(*(one for number in (1, 2) for one in cluster.roots(1, 2, container_id=number)))
    ids = [str(one["jobID"]) for one in jobs(cluster.json("reconcile", "1", "2", "--yes"))]
    short = {one: shortest(one, ids) for one in ids}
    for one in ids:
        document = cluster.json("job", "show", short[one])
        assert isinstance(document["data"], dict)
        assert document["data"]["jobID"] == one
    assert f"job {ids[0]} of container 1" in cluster.run("job", "cancel", short[ids[0]]).stdout
    states = {str(one["jobID"]): one["state"] for one in jobs(cluster.json("job", "list"))}
    assert (states[ids[0]], states[ids[1]] == "CANCELLED") == ("CANCELLED", False)
    # Nobody means a job by nothing.
    assert errors(cluster.json("job", "show", ""))[0]["code"] == "job_not_found"


def test_a_beginning_of_several_jobs_is_refused_with_them(cluster: Cluster) -> None:
    numbers = range(1, 20)
    cluster.report(*(one for number in numbers for one in cluster.roots(1, 2, container_id=number)))
    ids = [
        str(one["jobID"]) for one in jobs(cluster.json("reconcile", *map(str, numbers), "--yes"))
    ]
    # 19 IDs of 16 possible first digits.
    digit, most = Counter(one[0] for one in ids).most_common(1)[0]
    assert most > 1
    for words in (["show"], ["watch"], ["cancel"]):
        document = cluster.json("job", *words, digit)
        (error,) = errors(document)
        assert (document["exit"], error["code"]) == (2, "ambiguous_id")
        named = re.findall(r"\b[0-9a-f]{12}\b", str(error["message"]))
        assert sorted(named) == sorted(one for one in ids if one[0] == digit)


def test_host_names_are_beside_the_ids_of_datanodes(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    work(cluster)
    document = cluster.json("reconcile", "1", "--yes", "--wait")
    (job,) = jobs(document)
    for shown in (job, cluster.json("job", "show", str(job["jobID"]))["data"]):
        assert isinstance(shown, dict)
        assert {one["id"]: one["hostname"] for one in shown["datanodes"]} == {
            peer: f"host-{peer}" for peer in DNS
        }
    text = cluster.run("job", "show", str(job["jobID"])).stdout
    for peer in DNS:
        assert f"datanode {peer} (host-{peer}): done" in text


def test_a_scan_reaches_every_agent(cluster: Cluster) -> None:
    cluster.report(*cluster.roots(1, 2, 3))
    document = cluster.json("scan", "1", "9")
    data = document["data"]
    assert isinstance(data, dict)
    assert (data["scansOrdered"], data["unknownContainerIDs"]) == (3, [9])
    assert document["exit"] == 1
    for agent in cluster.agents.values():
        [command] = agent.beat().commands
        assert command.scan.container_id == 1


def test_a_scan_says_how_old_the_result_is_that_is_shown_until_it_ends(cluster: Cluster) -> None:
    hour_ago_ms = round((time.time() - 3600) * 1000)
    old = (
        replace(one, data_scan_timestamp_ms=hour_ago_ms + number * 60_000)
        for number, one in enumerate(cluster.roots(1, 1, 1))
    )
    never = (
        replace(one, data_scan_timestamp_ms=None) for one in cluster.roots(1, 1, container_id=2)
    )
    cluster.report(*old, *never)
    shown = cluster.run("scan", "1", "2").stdout
    assert "container 1: until then its result is the old one, data scanned 1h ago" in shown
    assert "container 2: until then its result is the old one, data scanned never" in shown
    data = cluster.json("scan", "1", "2")["data"]
    assert isinstance(data, dict)
    first, second = data["lastScans"]
    assert (first["containerID"], round(first["rootsAgeSeconds"] / 60)) == (1, 60)
    assert (second["containerID"], second["rootsScannedAt"]) == (2, None)


@contextmanager
def scanning(cluster: Cluster, *, but: str = "") -> Iterator[None]:
    """Each agent that is ordered to scan container 1 reports a scan of this moment."""

    def work(peer: str, agent: ReportingAgent) -> None:
        wait_until(lambda: any(one.HasField("scan") for one in agent.beat().commands), "an order")
        if peer != but:
            agent.report(replica(peer, 1, root=2 if peer == "dn-2" else 1))

    threads = [threading.Thread(target=work, args=item) for item in cluster.agents.items()]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def test_a_scan_that_is_waited_for_tells_what_it_found(cluster: Cluster) -> None:
    hour_ago_ms = round((time.time() - 3600) * 1000)
    cluster.report(
        *(replace(one, data_scan_timestamp_ms=hour_ago_ms) for one in cluster.roots(1, 1, 1))
    )
    with scanning(cluster):
        result = cluster.run("scan", "1", "--wait", "--timeout", "60")
    assert result.stdout.splitlines()[0] == "3 scans ordered"
    assert "container 1: diverged" in result.stdout
    assert "old one" not in result.stdout
    assert result.exit_code == 3


def test_a_replica_that_is_not_scanned_in_time_is_named(cluster: Cluster) -> None:
    hour_ago_ms = round((time.time() - 3600) * 1000)
    cluster.report(
        *(replace(one, data_scan_timestamp_ms=hour_ago_ms) for one in cluster.roots(1, 1, 1))
    )
    with scanning(cluster, but="dn-3"):
        document = cluster.json("scan", "1", "--wait", "--timeout", "1s")
    assert document["exit"] == 5
    assert "container 1 on host-dn-3 (dn-3) was not scanned within 1s" in str(document["warnings"])
    assert cluster.run("scan", "1", "--wait", "--timeout", "soon").exit_code == 2


def test_a_scan_of_nothing_says_so(cluster: Cluster) -> None:
    result = cluster.run("scan", "-", stdin="")
    assert (result.exit_code, result.stdout) == (0, "0 scans ordered\n")
    assert result.stderr == "Standard input has no container ID: there is nothing to do.\n"


EVERY_COMMAND = [
    ["reconcile", "1", "--yes"],
    ["reconcile", "--all-diverged"],
    ["container", "list"],
    ["container", "info", "1"],
    ["container", "diff", "1"],
    ["job", "list"],
    ["job", "show", "x"],
    ["job", "watch", "x"],
    ["job", "cancel", "x"],
    ["job", "pause", "x"],
    ["job", "resume", "x"],
    ["job", "throttle", "x", "--max-containers", "1"],
    ["scan", "1"],
]


@pytest.mark.parametrize("words", EVERY_COMMAND, ids=lambda words: " ".join(words))
@pytest.mark.parametrize(
    ("options", "code", "exit_code"),
    [
        (["--controller", NOWHERE], "controller_unavailable", 7),
        (["--controller", "192.0.2.1:9"], "config_invalid", 2),
        (["--controller", NOWHERE, "--tls-cert", "x"], "usage", 2),
    ],
    ids=["unreachable", "not loopback", "half of TLS"],
)
def test_every_error_is_a_document_with_json_and_a_sentence_without(
    words: list[str], options: list[str], code: str, exit_code: int
) -> None:
    """Operator rule R14."""
    plain = CliRunner().invoke(treefold, [*words, *options])
    assert (plain.exit_code, plain.stdout) == (exit_code, "")
    assert f"error [{code}]" in plain.stderr
    assert "Traceback" not in plain.stderr
    result = CliRunner().invoke(treefold, [*words, *options, "--json"])
    document = json.loads(result.stdout)
    assert (result.exit_code, document["ok"], document["errors"][0]["code"]) == (
        exit_code,
        False,
        code,
    )
    assert words[0] in document["command"]


def test_the_controller_is_taken_from_the_environment(cluster: Cluster) -> None:
    environment = {"TREEFOLD_CONTROLLER": cluster.server.address}
    assert CliRunner().invoke(treefold, ["job", "list"], env=environment).exit_code == 0


def test_a_heartbeat_that_cannot_be_is_refused_by_name(cluster: Cluster) -> None:
    agent = cluster.agents["dn-1"]
    good = replica("dn-1")
    with pytest.raises(grpc.RpcError) as refused:
        agent.report(replace(good, container_id=type(good.container_id)(-1)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

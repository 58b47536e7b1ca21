"""Real replication masters on loopback: what a syncer and an operator see when one is
killed, stopped or cut off from its database.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from replicator.master.client import MasterClient, SyncerClient
from replicator.master.records import SyncerCapacity
from replicator.master.syncer_rules import Caller, HeldReport
from replicator.replication import (
    Checkpoint,
    Condition,
    DesiredState,
    Policy,
    PolicyId,
    ReplicationReport,
    Stage,
    SyncerId,
)
from replicator.stores.local import LocalBucket
from runtime.disk import Disk
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.processes import TreefoldProcess
from tests.support.stand_in_syncers import StandInSyncer, assert_one_at_a_time
from tests.support.stores import put
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
P1 = PolicyId("p1")
LEASE_S = 1.5


def master(
    folder: Path, *, database: str = "", listen: str = "127.0.0.1:0", lease_s: float = LEASE_S
) -> TreefoldProcess:
    """A master whose records lie in `folder`, or in a database."""
    folder.mkdir(exist_ok=True)
    path = folder / "master.toml"
    lines = [
        f'state_folder = "{folder / "state"}"', f'listen = "{listen}"', f"lease_s = {lease_s}",
        'metrics = "127.0.0.1:0"',
    ]  # fmt: skip
    if database:
        lines.append(f'database = "{database}"')
    path.write_text("\n".join(lines))
    return TreefoldProcess(folder / "run", "replication-master", "run", "--config", str(path))


def add(client: MasterClient, policy_id: PolicyId = P1) -> None:
    client.add_policy(Policy(policy_id, f"local:/{policy_id}", f"local:/to/{policy_id}"), "test")


def run(*words: str) -> tuple[int, dict[str, object]]:
    """A command with --json; its exit status and document."""
    done = CliRunner().invoke(treefold, [*words, "--json"])
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return done.exit_code, document


def listed(*words: str) -> list[object]:
    """The IDs that `bucket list` prints."""
    data = run("bucket", "list", *words)[1]["data"]
    assert isinstance(data, dict)
    return [one["id"] for one in data["replications"]]


def test_a_killed_master_loses_nothing_and_the_same_syncer_goes_on(tmp_path: Path) -> None:
    """OZ-038, OZ-047: holder and reports are on disk before they are answered."""
    with ExitStack() as stack:
        first = stack.enter_context(master(tmp_path / "m"))
        address = first.address()
        client = MasterClient([address])
        stack.callback(client.close)
        add(client)
        syncer = stack.enter_context(StandInSyncer("s1", [address]))
        syncer.await_work(P1)
        wait_until(lambda: syncer.acknowledged.get(P1, 0) > 2, "acknowledgements")
        before = client.replication(P1)
        first.stop(SIGKILL)
        again = stack.enter_context(master(tmp_path / "m", listen=address))
        assert again.address() == address
        after = client.replication(P1)
        assert after.state.report is not None
        position = after.state.report.checkpoint.position
        assert position is not None
        acknowledged = syncer.acknowledged[P1]
        assert position.index >= acknowledged - 1
        assert after.state.holder
        assert before.state.holder
        assert after.state.holder.syncer_id == before.state.holder.syncer_id == "s1"
        wait_until(lambda: syncer.acknowledged[P1] > acknowledged + 2, "work to go on")
        assert again.stop(SIGTERM) == 0


def test_a_dead_syncer_is_replaced_after_its_lease_and_no_earlier(tmp_path: Path) -> None:
    """OZ-040, OZ-043, OZ-048; work goes on within 10 s."""
    with ExitStack() as stack:
        address = stack.enter_context(master(tmp_path / "m")).address()
        client = MasterClient([address])
        stack.callback(client.close)
        add(client)
        one = stack.enter_context(StandInSyncer("s1", [address]))
        one.await_work(P1)
        two = stack.enter_context(StandInSyncer("s2", [address]))
        wait_until(lambda: one.acknowledged.get(P1, 0) > 2, "acknowledgements")
        one.die()
        died_s = time.monotonic()
        two.await_work(P1)
        assert time.monotonic() - died_s < 10
        wait_until(lambda: two.acknowledged.get(P1, 0) > one.acknowledged[P1], "work to go on")
        assert_one_at_a_time([one, two])


def test_a_process_of_the_same_syncer_waits_for_the_lease_of_the_one_before(
    tmp_path: Path,
) -> None:
    """OZ-035, OZ-037: a copied folder must not give two processes one replication."""
    with ExitStack() as stack:
        address = stack.enter_context(master(tmp_path / "m")).address()
        client = MasterClient([address])
        stack.callback(client.close)
        add(client)
        one = stack.enter_context(StandInSyncer("s1", [address]))
        one.await_work(P1)
        copied = stack.enter_context(StandInSyncer("s1", [address]))
        wait_until(lambda: bool(copied.failures), "a refusal")
        assert copied.failures[0].code == "busy"
        assert not copied.beliefs
        one.leave()
        copied.await_work(P1)
        assert_one_at_a_time([one, copied])


def test_what_operators_order_reaches_the_syncer_and_is_on_record(tmp_path: Path) -> None:
    """OZ-124 to OZ-130, OZ-168: with the audit file checked."""
    with ExitStack() as stack:
        address = stack.enter_context(master(tmp_path / "m")).address()
        for name in ("a", "b"):
            document = tmp_path / "properties.json"
            document.write_text(
                '{"format": "treefold-bucket-properties/1", "properties": {}, "address": "x"}'
            )
            status, _ = run("bucket", "import", str(document), f"local:{tmp_path / name}", "--yes")
            assert status == 0
        pair = (f"local:{tmp_path / 'a'}", f"local:{tmp_path / 'b'}")
        to = ("--master", address)
        assert run("bucket", "add", *pair, "--name", "p1", *to)[0] == 6
        assert run("bucket", "add", *pair, "--name", "p1", *to, "--yes")[0] == 0
        assert run("bucket", "add", *pair, "--name", "p2", *to, "--yes")[0] == 6
        status, document_of = run("bucket", "add", *pair, "--name", "p2", *to, "--dry-run")
        assert status == 6
        assert "by p1" in json.dumps(document_of)
        assert run("bucket", "status", *to)[0] == 5
        syncer = stack.enter_context(StandInSyncer("s1", [address]))
        syncer.await_work(P1)
        wait_until(lambda: run("bucket", "status", "p1", *to)[0] == 0, "it to be ACTIVE")
        assert listed("--active", *to) == listed(*to) == ["p1"]
        assert run("bucket", "pause", "p1", *to)[0] == 0
        paused_s = time.monotonic()
        wait_until(lambda: syncer.desired[P1] is DesiredState.PAUSED, "the pause")
        assert time.monotonic() - paused_s < 2
        wait_until(lambda: listed("--active", *to) == [], "it to be listed as PAUSED")
        assert listed(*to) == ["p1"]
        assert run("bucket", "resume", "p1", *to)[0] == 0
        assert run("bucket", "disable", *to, "--yes")[0] == 0
        wait_until(lambda: syncer.desired[P1] is DesiredState.PAUSED, "the end of all")
        assert run("bucket", "enable", *to)[0] == 0
        wait_until(lambda: syncer.desired[P1] is DesiredState.ENABLED, "the beginning of all")
        status, document_of = run("bucket", "failover", "p1", *to, "--yes")
        assert status == 5
        data = document_of["data"]
        assert isinstance(data, dict)
        assert data["isFenced"]
        assert not syncer.has(P1)
        assert run("bucket", "resume", "p1", *to)[0] == 6
        assert run("bucket", "cancel", "p1", *to, "--yes")[0] == 0
        assert run("bucket", "resume", "p1", *to)[0] == 6
        wait_until(lambda: run("bucket", "delete", "p1", *to, "--yes")[0] in (0, 1), "its end")
        assert run("bucket", "get", "p1", *to)[0] == 1
        assert run("audit", "verify", str(tmp_path / "m" / "state" / "audit.jsonl"))[0] == 0


def test_a_failover_names_what_was_written_while_it_waited(tmp_path: Path) -> None:
    """OZ-147: the exit status is that of what is missing once nothing is written."""
    with ExitStack() as stack:
        address = stack.enter_context(master(tmp_path / "m", lease_s=20.0)).address()
        client = MasterClient([address])
        stack.callback(client.close)
        source = stack.enter_context(LocalBucket(tmp_path / "a", Disk(), create=True)).store()
        put(source, "early", b"x")
        assert source.feed is not None
        policy = Policy(P1, f"local:{tmp_path / 'a'}", f"local:{tmp_path / 'b'}")
        client.add_policy(policy, "test")
        syncer = SyncerClient([address], Caller(SyncerId("s1"), "session"))
        stack.callback(syncer.close)
        syncer.register("localhost", 1, SyncerCapacity(8))
        wait_until(lambda: bool(syncer.heartbeat(SyncerCapacity(8), ()).assignments), "work")
        [given] = syncer.heartbeat(SyncerCapacity(8), ()).assignments
        at = Checkpoint(Stage.LIVE, position=source.feed.position(), prefixes=("",))
        report = ReplicationReport(Condition.ACTIVE, at)
        syncer.save_report(HeldReport(P1, given.epoch, 1, report))
        assert run("bucket", "backlog", "p1", "--master", address)[0] == 0
        orders = stack.enter_context(ThreadPoolExecutor(1))
        words = ("bucket", "failover", "p1", "--master", address, "--yes")
        ordered = orders.submit(run, *words)
        wait_until(lambda: client.replication(P1).record.failed_over_ms is not None, "the fence")
        put(source, "late", b"x")
        syncer.release([(P1, given.epoch)])
        status, document = ordered.result()
        data = document["data"]
        assert isinstance(data, dict)
        assert [one["key"] for one in data["missing"]["changes"]] == ["late"]
        assert (status, data["isFenced"]) == (3, True)
        text = CliRunner().invoke(treefold, words)
        assert text.exit_code == 3
        assert "late" in text.stdout.partition("Now that nothing is replicated")[2]


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    with postgres_server(Path(tempfile.mkdtemp(prefix="pg-"))) as server:
        yield server


@pytest.fixture
def masters(database: PostgresServer, tmp_path: Path) -> Iterator[list[TreefoldProcess]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(master(tmp_path / f"m{number}", database=database.url))
            for number in range(3)
        ]


@pytest.mark.peers
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_one_of_three_masters_is_lost_and_the_lease_stays_unique(
    masters: list[TreefoldProcess], how: str
) -> None:
    """OZ-146: work goes on, and a master that wakes up decides nothing of its own."""
    addresses = [one.address() for one in masters]
    policies = [PolicyId(f"p{number}") for number in range(3)]
    with ExitStack() as stack:
        client = MasterClient(addresses[::-1])
        stack.callback(client.close)
        for policy_id in policies:
            add(client, policy_id)
        # Each asks another master first.
        syncers = [
            stack.enter_context(StandInSyncer(f"s{n}", addresses[n:] + addresses[:n]))
            for n in range(3)
        ]
        await_all(syncers, policies)
        if how == "killed":
            masters[0].stop(SIGKILL)
        else:
            os.kill(masters[0].process.pid, SIGSTOP)
        acknowledged = [dict(one.acknowledged) for one in syncers]
        time.sleep(2 * LEASE_S)
        if how == "stopped":
            os.kill(masters[0].process.pid, SIGCONT)
        await_all(syncers, policies)
        wait_until(
            lambda: all(
                best(syncers, policy_id) > best_of(acknowledged, policy_id)
                for policy_id in policies
            ),
            "work to go on",
        )
        syncers[0].die()
        await_all(syncers[1:], policies)
        check_positions(client, syncers, policies)
        assert_one_at_a_time(syncers)


@pytest.mark.peers
def test_a_database_that_is_killed_loses_nothing_that_was_acknowledged(
    masters: list[TreefoldProcess], database: PostgresServer
) -> None:
    addresses = [one.address() for one in masters]
    with ExitStack() as stack:
        client = MasterClient(addresses)
        stack.callback(client.close)
        add(client)
        syncers = [stack.enter_context(StandInSyncer(f"s{n}", addresses)) for n in range(2)]
        await_all(syncers, [P1])
        database.stop(SIGKILL)
        time.sleep(LEASE_S)
        database.start()
        wait_until(lambda: client.status().policies == 1, "a master to answer")
        before = best(syncers, P1)
        wait_until(lambda: best(syncers, P1) > before, "work to go on")
        check_positions(client, syncers, [P1])
        assert_one_at_a_time(syncers)
        assert client.replication(P1).condition is Condition.ACTIVE


def await_all(syncers: Sequence[StandInSyncer], policies: Sequence[PolicyId]) -> None:
    """Wait until some syncer has each replication."""
    for policy_id in policies:
        wait_until(lambda name=policy_id: any(one.has(name) for one in syncers), policy_id)


def best(syncers: Sequence[StandInSyncer], policy_id: PolicyId) -> int:
    return best_of([one.acknowledged for one in syncers], policy_id)


def best_of(acknowledged: Sequence[dict[PolicyId, int]], policy_id: PolicyId) -> int:
    return max(one.get(policy_id, 0) for one in acknowledged)


def check_positions(
    client: MasterClient, syncers: Sequence[StandInSyncer], policies: Sequence[PolicyId]
) -> None:
    """OZ-135: what was acknowledged is at the masters."""
    for policy_id in policies:
        acknowledged = best(syncers, policy_id)
        report = client.replication(policy_id).state.report
        assert report is not None
        position = report.checkpoint.position
        assert position is not None
        assert position.index >= acknowledged

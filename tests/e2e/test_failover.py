"""A source is lost and comes back, with a real master, a real syncer and the commands
of an operator (OZ-148 to OZ-151): what is missing is named, nothing writes to the
target beside its clients, and what these wrote comes back.
"""

import json
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from replicator.master.client import MasterClient
from replicator.replication import Condition, PolicyId, ReplicationOptions
from tests.support.stores import put
from tests.support.syncers import ReplicatedPair, master_process, syncer_process
from tests.support.verifiers import config_of, verifier_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e


def run(address: str, *words: str) -> tuple[int, dict[str, object]]:
    """A command of an operator; its exit status and data, or its errors."""
    done = CliRunner().invoke(treefold, ["bucket", *words, "--json", "--master", address])
    document = json.loads(done.stdout)
    found = document["data"] if document["data"] else {"errors": document["errors"]}
    assert isinstance(found, dict)
    return done.exit_code, found


def keys_of(missing: object) -> list[object]:
    assert isinstance(missing, dict)
    return [one["key"] for one in missing["changes"]]


def test_an_order_changes_which_keys_cross_while_it_runs(tmp_path: Path) -> None:
    """OZ-161: with the command, a real master and a real syncer."""
    with (
        master_process(tmp_path / "m") as master,
        closing(MasterClient([master.address()])) as client,
        ReplicatedPair(tmp_path, client) as pair,
        syncer_process(tmp_path / "s", [master.address()]) as syncer,
    ):
        syncer.address()
        address = master.address()
        source, target = pair.source.store(), pair.target.store()
        for key in ("a/1", "b/1", "c/1"):
            put(source, key, key.encode())
        pair.add()
        pair.await_equal()
        assert run(address, "prefixes", "p1")[0] == 2
        assert run(address, "prefixes", "p1", "--all", "--prefix", "a/")[0] == 2
        assert run(address, "prefixes", "p2", "--all")[0] == 1
        assert run(address, "prefixes", "p1", "--prefix", "a/")[0] == 6
        status, planned = run(address, "prefixes", "p1", "--prefix", "a/", "--dry-run")
        assert (status, planned["added"], planned["removed"]) == (0, [], [""])
        assert pair.view().record.policy.prefixes == ()
        assert run(address, "prefixes", "p1", "--prefix", "a/", "--yes")[0] == 0
        wait_until(lambda: reported_prefixes(pair) == ("a/",), "the syncer to follow it")

        put(source, "a/2", b"followed")
        put(source, "b/2", b"not followed")
        wait_until(lambda: "a/2" in pair.objects(pair.target), "what is followed")
        assert "b/2" not in pair.objects(pair.target)
        # What was there before stays, and what others put there is not overwritten.
        put(target, "c/1", b"of somebody else")
        words = ("--prefix", "a/", "--prefix", "c/", "--yes")
        assert run(address, "prefixes", "p1", *words)[0] == 6
        assert pair.view().record.policy.prefixes == ("a/",)
        words = ("--prefix", "a/", "--prefix", "b/", "--allow-nonempty", "--yes")
        assert run(address, "prefixes", "p1", *words)[0] == 0
        wait_until(lambda: "b/2" in pair.objects(pair.target), "what was added")
        wait_until(lambda: reported_prefixes(pair) == ("a/", "b/"), "the end of the comparison")
        assert pair.objects(pair.target)["c/1"] == b"of somebody else"
        status, unchanged = run(address, "prefixes", "p1", *words)
        assert (status, unchanged["added"], unchanged["removed"]) == (0, [], [])
    assert '"kind":"prefixes"' in (tmp_path / "m/state/audit.jsonl").read_text().replace(" ", "")


def test_an_order_changes_the_options_while_it_runs(tmp_path: Path) -> None:
    """OZ-152: with the command, a real master, a real syncer and real verifiers."""
    with ExitStack() as stack:
        master = stack.enter_context(master_process(tmp_path / "m", lease_s=10.0))
        address = master.address()
        client = stack.enter_context(closing(MasterClient([address])))
        pair = stack.enter_context(ReplicatedPair(tmp_path, client))
        stack.enter_context(syncer_process(tmp_path / "s", [address])).address()
        target = f"local:{pair.folders[1]}"
        verifier, other, reader = (
            stack.enter_context(verifier_of(config)).address
            for config in (
                config_of(tmp_path / "v", target),
                config_of(tmp_path / "v2", f"local:{pair.folders[0]}"),
                config_of(tmp_path / "v3", target, writes=False),
            )
        )
        put(pair.source.store(), "a", b"first")
        pair.add()
        pair.await_equal()

        # Nobody listens, another bucket, no writes, another service.
        for wrong in ("127.0.0.1:1", other, reader, address):
            status, refused = run(address, "change", "p1", "--verifier", wrong)
            assert (status, refusals(refused)) == (6, ["verifier"])
            words = (target, f"local:{tmp_path / 'far'}", "--verifier", wrong, "--dry-run")
            assert run(address, "add", *words)[0] == 6
        assert run(address, "change", "p1")[0] == 2
        assert run(address, "change", "p1", "--verifier", verifier, "--no-verifier")[0] == 2
        words = ("--verifier", "127.0.0.1:1", "--allow-silent", "--dry-run")
        assert run(address, "change", "p1", *words)[0] == 0
        assert pair.view().record.policy.options == ReplicationOptions()

        words = ("--verifier", verifier, "--rate", "20MiB/s", "--reason", "a test")
        status, changed = run(address, "change", "p1", *words)
        assert (status, changed["changes"]) == (
            0,
            {
                "bytesPerSecond": {"before": 0, "after": 20 << 20},
                "verifier": {"before": None, "after": verifier},
            },
        )
        written = tmp_path / "v/audit.jsonl"

        def has_written() -> bool:
            put(pair.source.store(), "b", time.monotonic_ns().to_bytes(8))
            return '"kind": "put"' in written.read_text()

        wait_until(has_written, "a write by the verifier")
        pair.await_equal()
        revision = pair.view().record.policy.revision
        assert run(address, "change", "p1", *words)[1]["changes"] == {}
        assert pair.view().record.policy.revision == revision
        assert run(address, "change", "p1", "--no-verifier", "--no-live")[0] == 0
        found = pair.view().record.policy.options
        assert found == ReplicationOptions(bytes_per_second=20 << 20, is_live=False)
        put(pair.source.store(), "c", b"without it")
        pair.await_equal()
    lines = map(json.loads, (tmp_path / "m/state/audit.jsonl").read_text().splitlines())
    orders = [one for one in lines if one["kind"] == "options"]
    assert [one["options"]["verifier"] for one in orders] == [verifier, ""]
    assert (orders[0]["replication"], orders[0]["why"]) == ("p1", "a test")


def refusals(data: dict[str, object]) -> list[object]:
    checked = data["precheck"]
    assert isinstance(checked, dict)
    return [one["check"] for one in checked["findings"] if one["refusal"]]


def reported_prefixes(pair: ReplicatedPair) -> tuple[str, ...]:
    report = pair.view().state.report
    return report.checkpoint.prefixes if report is not None else ()


def test_a_source_fails_and_all_comes_back(tmp_path: Path) -> None:
    with (
        master_process(tmp_path / "m") as master,
        closing(MasterClient([master.address()])) as client,
        ReplicatedPair(tmp_path, client) as pair,
        syncer_process(tmp_path / "s", [master.address()]) as syncer,
    ):
        syncer.address()
        address = master.address()
        source, target = pair.source.store(), pair.target.store()
        put(source, "both", b"first")
        put(source, "only-at-source", b"kept")
        pair.add()
        pair.await_condition(Condition.ACTIVE)
        pair.await_equal()
        wait_until(lambda: run(address, "backlog", "p1")[0] == 0, "all to be acknowledged")

        # The syncer is gone, so that what follows is not replicated.
        assert run(address, "pause", "p1")[0] == 0
        wait_until(lambda: pair.view().condition is Condition.PAUSED, "the pause")
        put(source, "missing", b"not replicated")
        put(source, "both", b"older, not replicated")
        status, planned = run(address, "failover", "p1", "--dry-run")
        assert status == 0
        assert keys_of(planned["missing"]) == ["missing", "both"]
        assert not planned["isFenced"]

        status, done = run(address, "failover", "p1", "--yes")
        # Fenced, and changes are missing at the target.
        assert status == 3
        assert done["isFenced"]
        assert pair.view().state.is_free
        assert run(address, "resume", "p1")[0] == 6

        # Clients write to the target; nothing of the source gets there any more.
        # Of two objects from the same second, the larger would count.
        time.sleep(1.1)
        put(target, "both", b"newer, of the target")
        put(target, "new", b"of the target")
        put(source, "late", b"of a client that has not moved")
        # A fence that leaks would let it through within this time.
        time.sleep(3)
        assert set(pair.objects(pair.target)) == {"both", "only-at-source", "new"}

        assert run(address, "failback", "p1", "--finish", "--yes")[0] == 6
        status, begun = run(address, "failback", "p1", "--yes")
        assert status == 0
        way_back = begun["back"]
        assert isinstance(way_back, dict)
        back_id = PolicyId(str(way_back["id"]))

        def finished() -> bool:
            return run(address, "failback", "p1", "--finish", "--dry-run")[0] == 0

        wait_until(finished, "all to be back, and proven", timeout_s=90)
        assert run(address, "failback", "p1", "--finish", "--yes")[0] == 0
        # Whatever either side wrote is there, and of one key the newer object.
        assert pair.objects(pair.source) == {
            "both": b"newer, of the target",
            "only-at-source": b"kept",
            "new": b"of the target",
            "missing": b"not replicated",
            "late": b"of a client that has not moved",
        }

        # From the source again; it was paused before.
        assert run(address, "resume", "p1")[0] == 0
        put(source, "after", b"the failback")
        pair.await_equal()
        # Its snapshots are removed, then it can be forgotten.
        wait_until(lambda: client.replication(back_id).condition is Condition.CANCELLED, "its end")
        assert run(address, "delete", back_id, "--yes")[0] == 0

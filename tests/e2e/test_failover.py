"""A source is lost and comes back, with a real master, a real syncer and the commands
of an operator (OZ-148 to OZ-151): what is missing is named, nothing writes to the
target beside its clients, and what these wrote comes back.
"""

import json
import time
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from replicator.master.client import MasterClient
from replicator.replication import Condition, PolicyId
from tests.support.stores import put
from tests.support.syncers import ReplicatedPair, master_process, syncer_process
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

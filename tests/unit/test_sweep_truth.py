"""A sweep says what it read, and how much of that it compared."""

from datetime import UTC, datetime
from pathlib import Path

from merkle.replica import ReplicaState, TreeSource
from runtime.disk import Disk
from sweep.output import Summary, SweepStore
from sweep.truth import compared_truth
from tests.support.sweeps import run
from tests.support.tables import blocks, replica
from tests.unit.test_sweep_inputs import Agents


def truth(out: Path, summary: Summary) -> str:
    return compared_truth(SweepStore(out, Disk()), summary.sweep_id, datetime.now(UTC))


def test_what_was_read_and_not_compared_is_not_called_compared(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    walk = agents.walks[0]
    walk.put(*(replica(number, *blocks(2), source=TreeSource.DATA) for number in range(1, 6)))
    agents.export(0)
    summary = run(out, agents.to)
    assert (summary.compared, summary.verdicts) == (0, {"UNKNOWN": 5})
    assert truth(out, summary) == (
        "read: the data of 5 replicas; compared: 0 of them; in UNKNOWN containers: 5"
        " (5: only one replica takes part)"
    )


def test_of_what_was_read_each_replica_that_was_not_compared_has_a_reason(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    for walk in agents.walks:
        walk.put(*(replica(number, *blocks(2), source=TreeSource.DATA) for number in range(1, 6)))
    agents.export(0, 1, 2)
    assert truth(out, run(out, agents.to)) == (
        "read: the data of 15 replicas; compared: 15 of them"
    )
    one, two, three = agents.walks
    one.put(replica(2, *blocks(2), source=TreeSource.DATA, state=ReplicaState.OPEN))
    two.put(replica(3, source=None))
    three.put(replica(9, *blocks(2), source=TreeSource.DATA))
    Disk().remove_folder(agents.to / "dn-2")
    del three.replicas_held[5]
    agents.export(0, 1, 2)
    summary = run(out, agents.to)
    text = truth(out, summary)
    assert summary.compared == 8
    assert text.startswith(
        "read: the data of 14 replicas; nothing of 1 replica without a tree; compared: 8 of them;"
        " excluded by design: 1; in containers with an unread replica: 2; in UNKNOWN containers:"
        " 4 (3: 1 of 3 replicas have no root, 1: only one replica takes part). To compare"
    )

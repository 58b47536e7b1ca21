"""The local engine on synthetic clusters: what it finds is what was done to them, however the rows lie."""

from pathlib import Path

import pytest

from merkle.plan import Verdict
from spark.output import Table
from spark.synthetic import Cluster, Order, Truth, synthetic
from tests.support.sweeps import OnePartWaves, findings_of, run, table_of, verdicts_of

SMALL = Cluster(seed=3, datanodes=5, containers=120, blocks=6, chunks=8)


def holds(out: Path, sweep_id: str, truth: Truth) -> None:
    assert findings_of(out, sweep_id) == {damage.finding for damage in truth.damages}
    bad = (Verdict.REPAIRABLE.value, Verdict.CONFLICT.value, Verdict.UNRECOVERABLE.value)
    told = {container_id: verdict for container_id, verdict in verdicts_of(out, sweep_id).items() if verdict in bad}
    assert told == {damage.container_id: damage.verdict.value for damage in truth.damages}


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("chunks", [1, 8])
def test_all_damages_are_found_and_nothing_else(tmp_path: Path, order: Order, chunks: int) -> None:
    cluster = Cluster(seed=3, datanodes=5, containers=120, blocks=6, chunks=chunks, order=order)
    truth = synthetic(tmp_path / "table", cluster)
    summary = run(tmp_path / "out", tmp_path / "table")
    holds(tmp_path / "out", summary.sweep_id, truth)
    assert (summary.rows, summary.containers, summary.replicas) == (truth.rows, truth.containers, truth.replicas)
    assert summary.diverged == tuple(damage.container_id for damage in truth.damages)
    assert set(truth.without_tree) <= {
        container_id
        for container_id, verdict in verdicts_of(tmp_path / "out", summary.sweep_id).items()
        if verdict == Verdict.UNKNOWN.value
    }
    assert set(summary.paths) == ({"filewise"} if order is Order.CLUSTERED else {"exact"})


@pytest.mark.parametrize("order", list(Order))
def test_a_container_larger_than_memory_is_judged_in_ranges_of_blocks(tmp_path: Path, order: Order) -> None:
    cluster = Cluster(seed=8, datanodes=3, containers=6, blocks=3, chunks=4, largest_blocks=600, order=order)
    truth = synthetic(tmp_path / "table", cluster)
    assert 1 in {damage.container_id for damage in truth.damages}
    whole = run(tmp_path / "whole", tmp_path / "table", engine=OnePartWaves(tmp_path / "spill", group_rows=1 << 20))
    parts = run(tmp_path / "parts", tmp_path / "table", engine=OnePartWaves(tmp_path / "spill", group_rows=500))
    for out, summary in ((tmp_path / "whole", whole), (tmp_path / "parts", parts)):
        holds(out, summary.sweep_id, truth)
    roots = [
        [{k: v for k, v in row.items() if k != "path"} for row in table_of(out, Table.ROOTS, summary.sweep_id)]
        for out, summary in ((tmp_path / "whole", whole), (tmp_path / "parts", parts))
    ]
    assert roots[0] == roots[1]


def test_what_was_right_the_night_before_and_is_wrong_now_changed_in_silence(tmp_path: Path) -> None:
    synthetic(tmp_path / "before", SMALL, healthy=True)
    truth = synthetic(tmp_path / "after", SMALL)
    first = run(tmp_path / "out", tmp_path / "before")
    second = run(tmp_path / "out", tmp_path / "after")
    assert not first.diverged
    assert second.previous == first.sweep_id
    silent = {
        finding[1:5] for finding in findings_of(tmp_path / "out", second.sweep_id) if finding[0] == "silent_change"
    }
    changed = [
        damage for damage in truth.damages if damage.kind.value in ("corrupt_chunk", "conflicting_chunk", "lost_chunk")
    ]
    assert silent == {(d.container_id, d.block_id, d.offset, (node,)) for d in changed for node in d.datanodes}
    assert run(tmp_path / "out", tmp_path / "after").findings.get("silent_change") is None

"""The synthetic cluster holds the damage that its truth names, and no other."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

import admin.demo.synthetic as module
from admin.demo.ground_truth import DamageKind
from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from merkle.outcome import Verdict
from tests.support.chunk_rows import compared, rows_in, trees_in

SMALL = SyntheticCluster(seed=5, datanodes=4, containers=150, blocks=4, chunks=3)


@pytest.mark.parametrize("order", list(RowOrder))
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_truth_is_what_plain_trees_tell(tmp_path: Path, order: RowOrder, chunks: int) -> None:
    cluster = SyntheticCluster(
        seed=5, datanodes=4, containers=150, blocks=4, chunks=chunks, order=order
    )
    truth = synthetic(tmp_path, cluster)
    rows = rows_in(tmp_path)
    assert len(rows) == truth.rows
    found, unknown, verdicts = set(), [], {}
    for container_id, replicas in trees_in(rows).items():
        comparison = compared(replicas)
        if comparison is None:
            continue
        if comparison.verdict is Verdict.UNKNOWN:
            unknown.append(container_id)
        elif comparison.verdict is not Verdict.MATCH:
            verdicts[container_id] = comparison.verdict
        found |= {
            (d.kind.value, container_id, d.block_id, d.offset, d.lacking, d.sources)
            for d in comparison.differences
        }
    assert found == {damage.finding for damage in truth.damages}
    assert {damage.kind for damage in truth.damages} == set(DamageKind)
    assert verdicts == {damage.container_id: damage.verdict for damage in truth.damages}
    assert tuple(unknown) == truth.without_tree


def test_a_seed_makes_the_same_cluster_again_and_another_seed_another(tmp_path: Path) -> None:
    truths = [
        synthetic(tmp_path / str(i), SyntheticCluster(seed=seed, containers=40))
        for i, seed in enumerate((1, 1, 2))
    ]
    assert truths[0] == truths[1] != truths[2]
    assert rows_in(tmp_path / "0") == rows_in(tmp_path / "1")


def test_the_night_before_differs_in_the_damaged_replicas_alone(tmp_path: Path) -> None:
    truth = synthetic(tmp_path / "after", SMALL)
    assert synthetic(tmp_path / "before", SMALL, healthy=True).damages == ()
    before, after = (trees_in(rows_in(tmp_path / name)) for name in ("before", "after"))
    differing = {
        (c, key[0])
        for c, replicas in before.items()
        for key in replicas
        if replicas[key][1] != after[c][key][1]
    }
    assert differing == {
        (damage.container_id, name) for damage in truth.damages for name in damage.datanodes
    }


def test_one_container_may_be_far_larger_than_the_others(tmp_path: Path) -> None:
    synthetic(
        tmp_path,
        SyntheticCluster(containers=3, blocks=2, chunks=1, largest_blocks=5_000, damage={}),
    )
    (first, *others) = trees_in(rows_in(tmp_path)).values()
    assert all(len(tree.blocks) == 5_000 for _, tree in first.values())
    assert all(len(tree.blocks) <= 3 for replicas in others for _, tree in replicas.values())


def test_an_export_of_many_is_written_as_an_agent_writes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row group, with its own names alone in the dictionaries."""
    # Each writer has little memory.
    monkeypatch.setattr(module, "_PENDING_ROWS", 400)
    monkeypatch.setattr(module, "_SLAB_ROWS", 200)
    truth = synthetic(tmp_path, SMALL)
    for path in tmp_path.glob("*/chunks-*"):
        file = pq.ParquetFile(path, read_dictionary=["datanode", "volume"])
        assert file.num_row_groups == 1
        assert file.metadata.num_rows > 400
        for name in ("datanode", "volume"):
            assert len(file.read()[name].chunk(0).dictionary) == 1
    assert len(rows_in(tmp_path)) == truth.rows

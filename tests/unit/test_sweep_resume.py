"""A sweep that ends anywhere goes on where it was, and comes to the same."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from merkle.errors import BusyError, DiskError, SweepInputError, SweepNotFoundError
from ozone.disk import Disk
from spark.output import Output, Table
from spark.synthetic import Cluster, Order, synthetic
from tests.support.sweeps import Killed, OnePartWaves, Quiet, run, table_of

SMALL = Cluster(seed=4, datanodes=4, containers=80, blocks=5, chunks=6)
SHUFFLED = replace(SMALL, order=Order.SHUFFLED)
TABLES = (Table.ROOTS, Table.VERDICTS, Table.FINDINGS)


@pytest.mark.parametrize("order", list(Order))
def test_killed_after_any_stored_result_the_next_run_comes_to_the_same_and_folds_no_part_again(
    tmp_path: Path, order: Order
) -> None:
    synthetic(tmp_path / "table", replace(SMALL, order=order))
    whole = run(tmp_path / "whole", tmp_path / "table")
    expected = [table_of(tmp_path / "whole", table, whole.sweep_id) for table in TABLES]
    deaths = 0
    while True:
        out = tmp_path / f"out-{deaths}"
        dying = OnePartWaves(tmp_path / "spill", dies_after=deaths)
        try:
            run(out, tmp_path / "table", engine=dying)
        except Killed:
            assert Output(out, Disk()).sweeps() == []
            watcher, again = Quiet(), OnePartWaves(tmp_path / "spill")
            resumed = run(out, tmp_path / "table", engine=again, watcher=watcher)
            assert any(note.startswith(f"going on with sweep {resumed.sweep_id}") for note in watcher.notes)
            assert not set(dying.folded) & set(again.folded)
            assert [table_of(out, table, resumed.sweep_id) for table in TABLES] == expected
            assert (resumed.rows, resumed.diverged) == (whole.rows, whole.diverged)
            assert list((out / "work").glob("*/plan.json")) == []
            deaths += 1
        else:
            break
    # Each part, and the groups of the later stages.
    assert deaths > 4


def test_fresh_begins_anew(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SMALL)
    with pytest.raises(Killed):
        run(tmp_path / "out", tmp_path / "table", engine=OnePartWaves(tmp_path / "spill", dies_after=2))
    engine = OnePartWaves(tmp_path / "spill")
    run(tmp_path / "out", tmp_path / "table", engine=engine, fresh=True)
    assert len(engine.folded) == 4


def test_what_a_sweep_that_was_given_up_had_written_goes_with_the_next(tmp_path: Path) -> None:
    """It died for want of room for its findings, when its roots were there."""
    synthetic(tmp_path / "table", SMALL)
    blocked = tmp_path / "out" / Table.FINDINGS.value
    blocked.parent.mkdir()
    blocked.touch()
    with pytest.raises(DiskError):
        run(tmp_path / "out", tmp_path / "table")
    (given_up,) = (tmp_path / "out" / Table.ROOTS.value).iterdir()
    blocked.unlink()
    summary = run(tmp_path / "out", tmp_path / "table", fresh=True)
    for table in Table:
        assert [path.name for path in (tmp_path / "out" / table.value).iterdir()] == [f"sweep_id={summary.sweep_id}"]
    assert given_up.name != f"sweep_id={summary.sweep_id}"


def test_other_inputs_are_another_sweep(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SHUFFLED)
    with pytest.raises(Killed):
        run(tmp_path / "out", tmp_path / "table", engine=OnePartWaves(tmp_path / "spill", dies_after=2))
    (changed, *_) = sorted((tmp_path / "table").rglob("*.parquet"))
    table = pq.read_table(changed)
    pq.write_table(table.slice(0, table.num_rows - 1), changed)
    engine = OnePartWaves(tmp_path / "spill")
    run(tmp_path / "out", tmp_path / "table", engine=engine)
    assert len(engine.folded) == 4


def test_only_the_last_sweeps_are_kept_and_the_rows_of_two(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SMALL)
    ids = [run(tmp_path / "out", tmp_path / "table", keep=3).sweep_id for _ in range(5)]
    output = Output(tmp_path / "out", Disk())
    assert output.sweeps() == ids[2:]
    for table in Table:
        kept = {path.name for path in (tmp_path / "out" / table.value).iterdir()}
        assert kept == {f"sweep_id={sweep_id}" for sweep_id in ids[2:]}
    assert sorted(path.name for path in (tmp_path / "out" / "chunks").iterdir()) == ids[3:]
    assert output.sweep("latest") == ids[-1]
    with pytest.raises(SweepNotFoundError):
        output.sweep(ids[0])


def test_two_sweeps_do_not_write_to_one_folder_at_a_time(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SMALL)

    class Second(Quiet):
        def begin(self, what: str, total: int, unit: str) -> None:
            with pytest.raises(BusyError):
                run(tmp_path / "out", tmp_path / "table")
            super().begin(what, total, unit)

    watcher = Second()
    run(tmp_path / "out", tmp_path / "table", watcher=watcher)
    assert watcher.begun


def test_nothing_to_read_is_an_error_that_names_the_inputs_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SweepInputError, match="missing"):
        run(tmp_path / "out", tmp_path / "missing")
    assert not (tmp_path / "out").exists()
    (tmp_path / "kept").mkdir()
    with pytest.raises(SweepInputError, match="missing"):
        run(tmp_path / "kept", tmp_path / "missing")
    assert (tmp_path / "kept").exists()

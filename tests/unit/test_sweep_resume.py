"""A sweep that ends anywhere goes on where it was, and comes to the same."""

import errno
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from runtime.disk import Disk, Operation
from runtime.errors import BusyError, DiskError, UsageError
from sweep.errors import SweepInputError, SweepNotFoundError
from sweep.output import Summary, SweepStore, SweepTable
from tests.support.disk import FailingDisk
from tests.support.sweeps import Killed, OnePartWaves, Quiet, run, table_of, tear
from tests.support.volumes import unpack

SMALL = SyntheticCluster(seed=4, datanodes=4, containers=80, blocks=5, chunks=6)
SHUFFLED = replace(SMALL, order=RowOrder.SHUFFLED)
TABLES = (SweepTable.ROOTS, SweepTable.VERDICTS, SweepTable.FINDINGS)


@pytest.mark.parametrize("order", list(RowOrder))
def test_killed_after_any_stored_result_the_next_run_comes_to_the_same_and_folds_no_part_again(
    tmp_path: Path, order: RowOrder
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
            assert SweepStore(out, Disk()).sweeps() == []
            progress, again = Quiet(), OnePartWaves(tmp_path / "spill")
            resumed = run(out, tmp_path / "table", engine=again, progress=progress)
            assert any(
                note.startswith(f"resuming sweep {resumed.sweep_id}") for note in progress.notes
            )
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
        run(
            tmp_path / "out",
            tmp_path / "table",
            engine=OnePartWaves(tmp_path / "spill", dies_after=2),
        )
    engine = OnePartWaves(tmp_path / "spill")
    run(tmp_path / "out", tmp_path / "table", engine=engine, fresh=True)
    assert len(engine.folded) == 4


def test_what_a_sweep_that_was_given_up_had_written_goes_with_the_next(tmp_path: Path) -> None:
    """It died for want of room for its findings, when its roots were there."""
    synthetic(tmp_path / "table", SMALL)
    blocked = tmp_path / "out" / SweepTable.FINDINGS.value
    blocked.parent.mkdir()
    blocked.touch()
    with pytest.raises(DiskError):
        run(tmp_path / "out", tmp_path / "table")
    (given_up,) = (tmp_path / "out" / SweepTable.ROOTS.value).iterdir()
    blocked.unlink()
    summary = run(tmp_path / "out", tmp_path / "table", fresh=True)
    for table in SweepTable:
        assert [path.name for path in (tmp_path / "out" / table.value).iterdir()] == [
            f"sweep_id={summary.sweep_id}"
        ]
    assert given_up.name != f"sweep_id={summary.sweep_id}"


def test_other_inputs_are_another_sweep(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SHUFFLED)
    with pytest.raises(Killed):
        run(
            tmp_path / "out",
            tmp_path / "table",
            engine=OnePartWaves(tmp_path / "spill", dies_after=2),
        )
    (changed, *_) = sorted((tmp_path / "table").rglob("*.parquet"))
    table = pq.read_table(changed)
    pq.write_table(table.slice(0, table.num_rows - 1), changed)
    engine = OnePartWaves(tmp_path / "spill")
    run(tmp_path / "out", tmp_path / "table", engine=engine)
    assert len(engine.folded) == 4


def test_only_the_last_sweeps_are_kept_and_the_rows_of_two(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SMALL)
    ids = [run(tmp_path / "out", tmp_path / "table", keep=3).sweep_id for _ in range(5)]
    output = SweepStore(tmp_path / "out", Disk())
    assert output.sweeps() == ids[2:]
    for table in SweepTable:
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

    progress = Second()
    run(tmp_path / "out", tmp_path / "table", progress=progress)
    assert progress.begun


def test_nothing_to_read_is_an_error_that_names_the_inputs_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    with pytest.raises(SweepInputError, match="missing"):
        run(tmp_path / "out", tmp_path / "missing")
    assert not (tmp_path / "out").exists()
    (tmp_path / "kept").mkdir()
    with pytest.raises(SweepInputError, match="missing"):
        run(tmp_path / "kept", tmp_path / "missing")
    assert (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "name",
    ["folded/000000.json", "folded/000001/replicas.parquet", "folded/000001/runs.parquet"],
)
@pytest.mark.parametrize("order", list(RowOrder))
def test_what_is_finished_and_cannot_be_read_again_is_done_again(
    tmp_path: Path, name: str, order: RowOrder
) -> None:
    synthetic(tmp_path / "table", replace(SMALL, order=order))
    whole = run(tmp_path / "whole", tmp_path / "table")
    with pytest.raises(Killed):
        run(
            tmp_path / "out",
            tmp_path / "table",
            engine=OnePartWaves(tmp_path / "spill", dies_after=2),
        )
    (plan,) = (tmp_path / "out" / "work").glob("*/plan.json")
    tear(plan.parent / name)
    progress = Quiet()
    again = run(tmp_path / "out", tmp_path / "table", progress=progress)
    assert any(note.startswith("starting over: ") and name in note for note in progress.notes)
    assert again.sweep_id != plan.parent.name
    for table in TABLES:
        assert table_of(tmp_path / "out", table, again.sweep_id) == table_of(
            tmp_path / "whole", table, whole.sweep_id
        )


def test_copied_rows_of_a_volume_that_cannot_be_read_again_are_copied_again(tmp_path: Path) -> None:
    """They are no table that could be left out: the volume is there."""
    volume = next(unpack("healthy", tmp_path / "cluster").glob("dn1/volume1"))
    with pytest.raises(Killed):
        run(
            tmp_path / "out",
            volumes=[volume],
            engine=OnePartWaves(tmp_path / "spill", dies_after=0),
        )
    (rows,) = (tmp_path / "out" / "chunks").glob("*/*.parquet")
    tear(rows)
    (folded,) = (tmp_path / "out" / "work").glob("*/folded")
    Disk().remove_folder(folded)
    progress = Quiet()
    again = run(tmp_path / "out", volumes=[volume], progress=progress)
    assert any(note.startswith("starting over: ") for note in progress.notes)
    assert (again.skipped, again.containers) == ((), 6)


@pytest.mark.parametrize("text", ['{"ver', "{}", "[]", '{"version": 1}', "\xff"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_plan_that_cannot_be_read_is_put_aside(tmp_path: Path, text: str, fresh: bool) -> None:
    synthetic(tmp_path / "table", SMALL)
    plan = tmp_path / "out" / "work" / "20260101T000000Z-0000" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text(text, "latin-1")
    progress = Quiet()
    assert (
        run(tmp_path / "out", tmp_path / "table", progress=progress, fresh=fresh).containers == 80
    )
    assert any("20260101T000000Z-0000 cannot be resumed" in note for note in progress.notes)
    assert not plan.parent.exists()


@pytest.mark.parametrize("moment", ["report", "summary"])
def test_killed_at_its_end_a_sweep_is_ended_by_the_same_command(
    tmp_path: Path, moment: str
) -> None:
    synthetic(tmp_path / "before", SMALL, healthy=True)
    synthetic(tmp_path / "after", SMALL)
    run(tmp_path / "out", tmp_path / "before")
    told = list[Summary]()

    def report(summary: Summary) -> tuple[str, ...]:
        if moment == "report" and not told:
            told.append(summary)
            raise Killed
        told.append(summary)
        return ("a note of the report",)

    def watch(operation: Operation, path: Path) -> bool:
        if moment == "summary" and operation is Operation.REMOVE and path.name == "plan.json":
            raise Killed
        return False

    with pytest.raises(Killed):
        run(tmp_path / "out", tmp_path / "after", report=report, disk=FailingDisk(errno.EIO, watch))
    again = run(tmp_path / "out", tmp_path / "after", report=report)
    # The one that was killed: with what changed since the night before, and once in
    # all.
    assert again.sweep_id == told[0].sweep_id
    assert again.findings["silent_change"]
    assert again.notes == ("a note of the report",)
    assert len(told) == (2 if moment == "report" else 1)
    assert len(SweepStore(tmp_path / "out", Disk()).sweeps()) == 2
    assert not list((tmp_path / "out" / "work").glob("*/plan.json"))
    assert again.sweep_id != run(tmp_path / "out", tmp_path / "after").sweep_id


def test_the_folder_of_sweeps_is_not_in_a_table(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SMALL)
    with pytest.raises(UsageError, match="is inside --table"):
        run(tmp_path / "table" / "out", tmp_path / "table")
    assert not (tmp_path / "table" / "out").exists()

"""The stages of a sweep on a real local Spark: what is planned, what is committed, and
what a sweep that was killed does again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from runtime.disk import Disk
from spark.by_range import RangeJob
from spark.commits import Commit, SharedFolders, commits_of
from spark.engine import Scattered, SparkEngine, fold_tasks
from spark.errors import FolderNotSharedError
from sweep.engine import FoldedWave, LocalEngine, Places, RangeResult
from sweep.errors import EarlierRowsError, SweepWorkError
from sweep.gather import Gatherer
from sweep.inputs import table_parts
from sweep.model import (
    FINDING_SCHEMA,
    REPLICA_SCHEMA,
    REQUEST_SCHEMA,
    UNSEEN_SCHEMA,
    VERDICT_SCHEMA,
    Part,
    PartKind,
)
from sweep.output import SweepStore, SweepTable
from sweep.pieces import Range, StoredFile, StoredTable, TableFileWriter, TablePlace
from sweep.runs import RUN_SCHEMA
from sweep.stages import CompareStage, ContainerStage, FindingsStage, requests
from sweep.totals import SweepTotals
from tests.support.sweeps import Killed, OnePartWaves, Quiet, run, table_of

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

SMALL = SyntheticCluster(seed=4, datanodes=4, containers=80, blocks=5, chunks=6)
TABLES = (SweepTable.ROOTS, SweepTable.VERDICTS, SweepTable.FINDINGS, SweepTable.UNSEEN)


class SmallRanges(SparkEngine):
    """Spark with ranges so small that a small cluster has many. It dies after some of
    the results of stages.
    """

    range_rows = 60

    def __init__(self, session: SparkSession, *, dies_after: int | None = None) -> None:
        super().__init__(session)
        self._left = dies_after
        self.finished: list[tuple[str, Range]] = []

    def by_range(
        self,
        stage: ContainerStage,
        inputs: Mapping[str, StoredTable],
        wanted: Sequence[Range],
        places: Places,
    ) -> Iterator[RangeResult]:
        for result in super().by_range(stage, inputs, wanted, places):
            if self._left == 0:
                raise Killed
            self._left = None if self._left is None else self._left - 1
            self.finished.append((",".join(sorted(inputs)), result.range))
            yield result


def sweep_twice(out: Path, tables: Path, engine: SmallRanges | OnePartWaves) -> tuple[object, ...]:
    """Sweep the nights "before" and "after", and return all that the second says."""
    run(out, tables / "before", engine=engine)
    summary = run(out, tables / "after", engine=engine)
    return said(out, summary.sweep_id), summary.findings, summary.verdicts, summary.diverged


def said(out: Path, sweep_id: str) -> list[list[dict[str, object]]]:
    found = [table_of(out, table, sweep_id) for table in TABLES]
    found[0].sort(key=lambda row: (row["container_id"], row["datanode"], row["volume"]))
    for row in found[0]:
        # Only the SQL of an engine differs in these.
        del row["path"], row["fingerprint"]
    return found


@pytest.mark.parametrize("order", list(RowOrder))
def test_in_many_ranges_spark_says_what_one_machine_says(
    tmp_path: Path, session: SparkSession, order: RowOrder
) -> None:
    for name, healthy in (("before", True), ("after", False)):
        synthetic(tmp_path / name, replace(SMALL, order=order), healthy=healthy)
    engine = SmallRanges(session)
    theirs = sweep_twice(tmp_path / "spark", tmp_path, engine)
    assert theirs == sweep_twice(tmp_path / "local", tmp_path, OnePartWaves(tmp_path / "spill"))
    assert theirs[0] != [[]] * len(TABLES)
    assert len(engine.finished) > 8
    # Executors wrote them, in several files, and other programs read them as one table.
    sweep_id = SweepStore(tmp_path / "spark", Disk()).sweeps()[-1]
    folder = tmp_path / "spark" / "verdicts" / f"sweep_id={sweep_id}"
    assert len(list(folder.glob("verdicts-*.parquet"))) > 1
    verdicts = session.read.parquet(str(folder.parent))
    assert {"container_id", "verdict", "sweep_id"} <= set(verdicts.columns)
    assert verdicts.where(verdicts.sweep_id == sweep_id).count() == 80


def test_runs_of_plain_files_travel_as_replicas_do(tmp_path: Path, session: SparkSession) -> None:
    """No inventory says how many rows a replica has, so runs are joined."""
    synthetic(tmp_path / "made", SMALL)
    (tmp_path / "table").mkdir()
    for number, path in enumerate(sorted((tmp_path / "made").rglob("chunks-*.parquet"))):
        path.rename(tmp_path / "table" / f"{number}.parquet")
    summaries, found = [], []
    for name, engine in (
        ("spark", SmallRanges(session)),
        ("local", OnePartWaves(tmp_path / "spill")),
    ):
        summaries.append(run(tmp_path / name, tmp_path / "table", engine=engine))
        found.append(said(tmp_path / name, summaries[-1].sweep_id))
    assert found[0] == found[1]
    assert summaries[0].paths == summaries[1].paths
    assert summaries[0].paths["filewise"] > 200


def test_killed_after_any_range_spark_finishes_only_the_others(
    tmp_path: Path, session: SparkSession
) -> None:
    synthetic(tmp_path / "table", SMALL)
    whole = run(tmp_path / "whole", tmp_path / "table", engine=OnePartWaves(tmp_path / "spill"))
    expected = said(tmp_path / "whole", whole.sweep_id)
    for deaths in (0, 2, 5):
        out, dying = tmp_path / f"out-{deaths}", SmallRanges(session, dies_after=deaths)
        with pytest.raises(Killed):
            run(out, tmp_path / "table", engine=dying)
        store, again, progress = SweepStore(out, Disk()), SmallRanges(session), Quiet()
        assert store.sweeps() == []
        (plan,) = (out / "work").glob("*/plan.json")
        folder = store.path(SweepTable.ROOTS, plan.parent.name).parent
        # As a task would leave it that ran when its driver was killed.
        pieces = list(folder.glob("roots-*.parquet"))
        for piece in pieces:
            (folder / f"roots-{piece.name[-6:]}-again.parquet").write_bytes(piece.read_bytes())
        resumed = run(out, tmp_path / "table", engine=again, progress=progress)
        assert any(note.startswith("resuming sweep") for note in progress.notes)
        assert "reading" not in progress.begun
        assert not set(dying.finished) & set(again.finished)
        assert said(out, resumed.sweep_id) == expected
        assert (resumed.rows, resumed.diverged) == (whole.rows, whole.diverged)
        assert not list(folder.glob("*-again.parquet"))


def stored(folder: Path, *container_ids: int) -> StoredTable:
    """A table of REQUEST_SCHEMA in one file."""
    task = TableFileWriter({"requested": TablePlace(folder, REQUEST_SCHEMA)}, Disk())
    ids = pa.array(container_ids).to_numpy()
    task.add({"requested": requests(ids, ids)})
    return StoredTable(
        [], REQUEST_SCHEMA, {folder / file.name: file for file in task.close().values()}
    )


def test_a_stage_is_one_exchange_between_two_nodes_of_python_and_no_sort(
    tmp_path: Path, session: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    schemas = {"requested": REQUEST_SCHEMA, "judged": VERDICT_SCHEMA, "unread": UNSEEN_SCHEMA}
    shared = SharedFolders({}, "")
    job = RangeJob(CompareStage(), schemas, [Range(None, 5), Range(6, 9)], shared)
    job.frame(session, [[("requested", tmp_path)]] * 3).explain()
    plan = capsys.readouterr().out
    assert plan.count("Exchange") == 1
    assert plan.count("MapInArrow") == 2
    assert "Sort" not in plan
    # What travels has types: no column of bytes that only Python could read.
    assert {kind for _, kind in job.read_frame(session, [[]]).dtypes} == {
        "int",
        "array<int>",
        "array<bigint>",
        "array<string>",
        "array<boolean>",
    }


@dataclass(frozen=True, slots=True)
class FailingStage:
    """A stage whose tasks do not see the folder of the sweep."""

    @property
    def schemas(self) -> Mapping[str, pa.Schema]:
        return {"findings": FINDING_SCHEMA}

    def __call__(self, tables: Mapping[str, pa.Table]) -> Mapping[str, pa.Table]:
        raise FolderNotSharedError("executors do not see /srv/sweeps")


def test_a_folder_that_executors_do_not_see_is_named(tmp_path: Path, session: SparkSession) -> None:
    shared = SharedFolders.of({"rows": TablePlace(tmp_path / "rows", REQUEST_SCHEMA)}, Disk())
    shared.check()
    shared.remove(Disk())
    with pytest.raises(FolderNotSharedError, match=str(tmp_path / "rows")):
        shared.check()
    inputs = {"requested": stored(tmp_path / "rows", 1, 2)}
    results = SparkEngine(session).by_range(FailingStage(), inputs, [Range(None, 9)], {})
    with pytest.raises(FolderNotSharedError, match=r"^executors do not see /srv/sweeps$"):
        list(results)


def test_a_stored_file_that_is_damaged_is_named_so_that_the_sweep_starts_over(
    tmp_path: Path, session: SparkSession
) -> None:
    table = stored(tmp_path / "rows", 1, 2)
    table.paths[0].write_bytes(table.paths[0].read_bytes()[:-20])
    places = {"findings": TablePlace(tmp_path / "findings", FINDING_SCHEMA)}
    results = SparkEngine(session).by_range(
        FindingsStage(), {"findings": table}, [Range(None, 9)], places
    )
    with pytest.raises(SweepWorkError, match=rf"^\S*{table.paths[0].name} cannot be read"):
        list(results)


def no_findings(earlier: pa.Table, rows: pa.Table, changed: pa.Table) -> pa.Table:
    return FINDING_SCHEMA.empty_table()


def test_rows_of_an_earlier_sweep_that_are_gone_are_told_apart(
    tmp_path: Path, session: SparkSession
) -> None:
    for name in ("before", "after"):
        synthetic(tmp_path / name, SMALL)
    before, after = (table_parts([str(tmp_path / name)]).parts for name in ("before", "after"))
    requested = stored(tmp_path / "rows", 1, 2)
    ids = np.array([1, 2])
    places = {"findings": TablePlace(tmp_path / "findings", FINDING_SCHEMA)}
    engines = SparkEngine(session), LocalEngine(Gatherer(tmp_path / "spill", threads=1))
    for engine in engines:
        judged = engine.revisit(no_findings, after, before, (ids, ids), requested, places)
        assert sum(one.containers for one in judged) == 2
    for path in (tmp_path / "before").rglob("containers-*"):
        path.unlink()
    for engine in engines:
        with pytest.raises(EarlierRowsError, match="containers-"):
            list(engine.revisit(no_findings, after, before, (ids, ids), requested, places))


def test_the_replicas_of_sql_go_from_tasks_to_files(tmp_path: Path, session: SparkSession) -> None:
    synthetic(tmp_path / "table", replace(SMALL, order=RowOrder.SHUFFLED))
    schemas = {"runs": RUN_SCHEMA, "replicas": REPLICA_SCHEMA, "requested": REQUEST_SCHEMA}
    places = {name: TablePlace(tmp_path / name, schema) for name, schema in schemas.items()}
    waves, parts = list[FoldedWave](), table_parts([str(tmp_path / "table")]).parts
    engine = SparkEngine(session, scattered=Scattered.SQL)
    engine.fold(parts, places, waves.append, lambda _: None)
    (wave,) = waves
    assert (wave.rows, wave.replicas.num_rows) == (sum(part.rows for part in parts), 0)
    paths = {tmp_path / "replicas" / file.name: file for file in wave.files["replicas"]}
    found = pa.concat_tables(StoredTable([], REPLICA_SCHEMA, paths).tables())
    assert set(found["path"].to_pylist()) == {"sql"}
    assert found.num_rows > 200


def test_a_commit_is_the_same_on_the_other_side() -> None:
    totals = SweepTotals()
    totals.add_counts({"replicas": 3, "paths/exact": 2, "verdicts/MATCH": 1}, [4, 7])
    files = {"roots": StoredFile("roots-1.parquet", 3, ((1, 2), (9, 1)), 12)}
    commits = [Commit(0), Commit(1, 5, "", totals, files), Commit(2, skipped="torn")]
    (first, second, third) = commits_of(pa.Table.from_batches([one.batch() for one in commits]))
    assert (first.count, first.skipped, dict(first.files)) == (0, "", {})
    assert (second.number, second.count, dict(second.files)) == (1, 5, files)
    assert second.totals.counts() == totals.counts()
    assert second.totals.diverged == [4, 7]
    assert third.skipped == "torn"


def test_the_files_of_a_sweep_on_spark_have_the_types_of_one_machine(
    tmp_path: Path, session: SparkSession
) -> None:
    synthetic(tmp_path / "table", SMALL)
    summary = run(tmp_path / "out", tmp_path / "table", engine=SmallRanges(session))
    store = SweepStore(tmp_path / "out", Disk())
    for table in TABLES:
        schemas = [pq.read_schema(path) for path in store.files(table, summary.sweep_id)]
        assert all(schema.remove_metadata() == schemas[0].remove_metadata() for schema in schemas)


def test_small_exports_share_a_task_and_files_in_perhaps_no_order_do_not() -> None:
    small = Part("", PartKind.FILE, "a.parquet", 0, 20_000, 20_000, manifest="m", replicas=20)
    tiny = replace(small, replicas=10_000)
    large, plain = replace(small, rows=4 << 20), replace(small, manifest=None)
    # A replica costs as much as 60 rows.
    assert [len(task) for task in fold_tasks([small] * 98)] == [49, 49]
    assert [len(task) for task in fold_tasks([tiny] * 4)] == [1, 1, 1, 1]
    assert fold_tasks([small, large, small, plain, plain, small]) == [[0], [1], [2], [3], [4], [5]]
    assert fold_tasks([]) == []

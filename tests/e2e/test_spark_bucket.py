"""Spark with a bucket to write to: tasks write there what the driver commits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from chunktable.files import Files, ObjectPath
from runtime.disk import Disk
from spark.engine import SparkEngine
from spark.errors import FolderNotSharedError
from sweep.engine import SweepRequest
from sweep.output import SweepStore, SweepTable
from sweep.run import sweep
from tests.support.s3_servers import S3Bucket
from tests.support.sweeps import Killed, Quiet, packed_trees, run, table_of

pytestmark = [pytest.mark.spark, pytest.mark.peers]

TABLES = (SweepTable.ROOTS, SweepTable.VERDICTS, SweepTable.FINDINGS, SweepTable.UNSEEN)


@pytest.fixture
def out(
    session: SparkSession, ministack_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectPath]:
    """A folder of a bucket, for whose store driver and workers have the key."""
    given = dict(session.sparkContext.environment)
    for name, value in ministack_bucket.endpoint.environment.items():
        monkeypatch.setenv(name, value)
        session.sparkContext.environment[name] = value
    endpoint = ministack_bucket.endpoint.url
    yield ObjectPath.of(f"s3://{ministack_bucket.name}/out?endpoint_url={endpoint}")
    session.sparkContext.environment.clear()
    session.sparkContext.environment.update(given)


@pytest.mark.parametrize("order", [RowOrder.CLUSTERED, RowOrder.SHUFFLED])
def test_a_bucket_gets_from_tasks_what_a_folder_gets_from_one_machine(
    tmp_path: Path, session: SparkSession, out: ObjectPath, order: RowOrder
) -> None:
    """The driver dies after some commits, and the next run goes on from them."""
    cluster = SyntheticCluster(seed=4, datanodes=4, containers=60, blocks=4, chunks=4, order=order)
    synthetic(tmp_path / "first", cluster, healthy=True)
    synthetic(tmp_path / "second", cluster)
    ids = [
        run(tmp_path / "out", tmp_path / night, write_trees=True).sweep_id
        for night in ("first", "second")
    ]

    class Dying(Quiet):
        def begin(self, what: str, total: int | None, unit: str) -> None:
            if what == "writing trees" and not self.begun:
                self.begun.append(what)
                raise Killed

    def swept(night: str, progress: Quiet) -> str:
        request = SweepRequest(out, (str(tmp_path / night),), write_trees=True)
        return sweep(request, SparkEngine(session), progress).sweep_id

    swept("first", Quiet())
    with pytest.raises(Killed):
        swept("second", Dying())
    progress = Quiet()
    swept("second", progress)
    assert any("resuming sweep" in note for note in progress.notes)
    assert "reading" not in progress.begun
    ours = SweepStore(out, Disk()).sweeps()
    for mine, theirs in zip(ours, ids, strict=True):
        for table in TABLES:
            left = ("path", "fingerprint", "last_sweep", "since")
            held, expected = (
                sorted(
                    str({name: value for name, value in row.items() if name not in left})
                    for row in table_of(place, table, sweep_id)
                )
                for place, sweep_id in ((out, mine), (tmp_path / "out", theirs))
            )
            assert held == expected, table
        assert packed_trees(out, mine) == packed_trees(tmp_path / "out", theirs)
    names = Files(Disk()).files_below(out)
    assert not [name for name in names if ".shared" in name or name.startswith("work/")]
    # Tasks wrote the tables; the manifest names their files.
    assert any(name.startswith("roots/") and name.endswith("_manifest.json") for name in names)


def test_executors_that_the_store_does_not_let_in_are_named(
    tmp_path: Path,
    session: SparkSession,
    signing_ministack_bucket: S3Bucket,
    out: ObjectPath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = signing_ministack_bucket.endpoint
    endpoint.set_environment(monkeypatch)
    synthetic(tmp_path / "table", SyntheticCluster(seed=4, datanodes=3, containers=5))
    place = ObjectPath.of(f"s3://{signing_ministack_bucket.name}/out?endpoint_url={endpoint.url}")
    session.sparkContext.environment["AWS_ACCESS_KEY_ID"] = "unknown"
    request = SweepRequest(place, (str(tmp_path / "table"),))
    with pytest.raises(FolderNotSharedError, match="403 AccessDenied"):
        sweep(request, SparkEngine(session), Quiet())


@pytest.mark.usefixtures("out")
@pytest.mark.parametrize("order", [RowOrder.CLUSTERED, RowOrder.SHUFFLED])
def test_tasks_read_tables_from_a_bucket(
    tmp_path: Path, session: SparkSession, ministack_bucket: S3Bucket, order: RowOrder
) -> None:
    table = tmp_path / "table"
    cluster = SyntheticCluster(seed=5, datanodes=4, containers=60, blocks=4, chunks=4, order=order)
    damaged = {one.container_id for one in synthetic(table, cluster).damages}
    with ministack_bucket.endpoint.client() as client:
        for path in (one for one in table.rglob("*") if one.is_file()):
            key = str(path.relative_to(tmp_path))
            client.put_object(Bucket=ministack_bucket.name, Key=key, Body=path.read_bytes())
    place = f"s3://{ministack_bucket.name}/table?endpoint_url={ministack_bucket.endpoint.url}"
    request = SweepRequest(tmp_path / "out", (place,))
    ours, theirs = (
        sweep(request, SparkEngine(session), Quiet()),
        run(tmp_path / "local", table),
    )
    assert set(ours.diverged) == damaged
    for name in ("rows", "replicas", "diverged", "verdicts", "findings"):
        assert getattr(ours, name) == getattr(theirs, name), name

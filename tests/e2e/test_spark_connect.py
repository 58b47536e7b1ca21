"""Sweeps by a server of Spark Connect: what one machine says, resumed by another
session, followed, cancelled, and errors by name.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from admin.cli import treefold
from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from merkle.columns import encode_tree
from runtime.errors import ProcessFailedError, UsageError
from spark.connect import connect_session
from spark.datasources import register
from spark.engine import SparkEngine
from spark.errors import PackagesMissingError, SparkFailedError
from spark.jobs import cores, is_remote, watched
from spark.session import spark_session
from sweep.engine import Places, RangeResult
from sweep.output import SweepTable
from sweep.pieces import Range, StoredTable
from sweep.stages import ContainerStage
from tests.support.sweeps import Killed, OnePartWaves, Quiet, run, table_of
from tests.support.trees import block, chunk, container, deleted
from tests.support.volumes import unpack
from tests.support.waiting import wait_until
from tests.support.watched_tasks import reports_of_two_tasks

pytestmark = [pytest.mark.spark, pytest.mark.peers]

ROOT = Path(__file__).resolve().parents[2]
OURS = {"spark.pyspark.python": sys.executable, "spark.sql.shuffle.partitions": "2"}
TABLES = (SweepTable.ROOTS, SweepTable.VERDICTS, SweepTable.FINDINGS)


@pytest.fixture(scope="module")
def remote(server: str) -> Iterator[SparkSession]:
    """A session of the server, whose workers have our interpreter."""
    with spark_session(server, settings=OURS) as session:
        yield session


def said(out: Path, sweep_id: str) -> list[list[dict[str, object]]]:
    """All that a sweep says, without what depends on the engine."""
    found = [table_of(out, table, sweep_id) for table in TABLES]
    for row in found[0]:
        del row["path"], row["fingerprint"]
    return [sorted(rows, key=str) for rows in found]


def test_a_server_says_of_real_volumes_what_one_machine_says(
    tmp_path: Path, remote: SparkSession
) -> None:
    volumes = sorted(unpack("detected", tmp_path / "cluster").glob("dn*/volume1"))
    summaries = {
        name: run(tmp_path / name, volumes=volumes, engine=engine)
        for name, engine in (("local", None), ("spark", SparkEngine(remote)))
    }
    assert is_remote(remote)
    assert summaries["spark"].engine == "spark"
    assert summaries["spark"].diverged == summaries["local"].diverged == (1, 2, 3, 4, 6)
    ours, theirs = (said(tmp_path / name, one.sweep_id) for name, one in summaries.items())
    assert ours == theirs
    assert all(ours)


class Dying(SparkEngine):
    """Spark with ranges so small that a small cluster has many, which dies after one of
    them.
    """

    range_rows = 60

    def by_range(
        self,
        stage: ContainerStage,
        inputs: Mapping[str, StoredTable],
        wanted: Sequence[Range],
        places: Places,
    ) -> Iterator[RangeResult]:
        for number, result in enumerate(super().by_range(stage, inputs, wanted, places)):
            if number:
                raise Killed
            yield result


def test_what_one_session_left_another_finishes(
    tmp_path: Path, server: str, remote: SparkSession
) -> None:
    synthetic(
        tmp_path / "table",
        SyntheticCluster(
            seed=4, datanodes=4, containers=80, blocks=5, chunks=6, order=RowOrder.SHUFFLED
        ),
    )
    whole = run(tmp_path / "local", tmp_path / "table", engine=OnePartWaves(tmp_path / "spill"))
    with spark_session(server, settings=OURS) as first, pytest.raises(Killed):
        run(tmp_path / "out", tmp_path / "table", engine=Dying(first))
    progress = Quiet()
    summary = run(
        tmp_path / "out", tmp_path / "table", engine=SparkEngine(remote), progress=progress
    )
    assert any(note.startswith("resuming sweep") for note in progress.notes)
    assert "reading" not in progress.begun
    assert set(summary.paths) == {"sql", "exact"}
    assert (summary.diverged, summary.notes) == (whole.diverged, ())
    assert said(tmp_path / "out", summary.sweep_id) == said(tmp_path / "local", whole.sweep_id)


def test_jobs_of_a_server_are_told_of_as_they_run(tmp_path: Path, remote: SparkSession) -> None:
    assert (1, 2) in reports_of_two_tasks(remote, tmp_path / "stop")
    assert cores(remote) == 2


def test_ctrl_c_cancels_jobs_of_a_server(
    tmp_path: Path, session: SparkSession, remote: SparkSession
) -> None:
    begun = tmp_path / "begun"

    def sleep(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begun.touch()
        # Only being cancelled ends it.
        threading.Event().wait()
        yield from batches

    def interrupt() -> None:
        wait_until(begun.exists, "the task begins")
        main = threading.main_thread().ident
        assert main
        signal.pthread_kill(main, signal.SIGINT)

    asleep = remote.range(0, 1, 1, 1).mapInArrow(sleep, "id long")
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        watched(remote, "sleeping", asleep.collect, lambda *_: None)
    interrupter.join()
    tracker = session.sparkContext.statusTracker()
    wait_until(lambda: not tracker.getActiveJobsIds(), "the job is gone")
    assert remote.range(3).count() == 3


def test_a_server_reads_data_sources(tmp_path: Path, remote: SparkSession) -> None:
    register(remote)
    volumes = sorted(unpack("detected", tmp_path).glob("dn*/volume1"))
    rows = remote.read.format("ozonevolume").load([str(volume) for volume in volumes])
    tree = container(block(1, chunk(0)), deleted(2, 7), container_id=5)
    (tmp_path / "5.tree").write_bytes(encode_tree(tree))
    stored = remote.read.format("ozonetree").load(str(tmp_path / "5.tree"))
    found = {(row.container_id, row.block_id, row.deleted) for row in stored.collect()}
    assert found == {(5, 1, False), (5, 2, True)}
    (counts,) = rows.selectExpr("count(DISTINCT datanode) AS nodes", "count(*) AS rows").collect()
    assert counts.nodes == len(volumes)
    assert counts.rows > len(volumes)


def test_the_command_needs_no_java_and_brings_all_that_a_bare_python_lacks(
    tmp_path: Path, server: str, bare: Path, pack: Path
) -> None:
    truth = synthetic(
        tmp_path / "table", SyntheticCluster(seed=9, datanodes=3, containers=30, blocks=4, chunks=4)
    )
    words = ["sweep", "run", "--engine", "spark", "--pack", str(pack), "--json"]
    words += ["--conf", f"spark.pyspark.python={bare}"]
    words += ["--table", str(tmp_path / "table"), "--out", str(tmp_path / "out")]
    environment = {"PATH": str(tmp_path), "SPARK_REMOTE": server, "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "admin.cli", *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["engine"], summary["skipped"]) == ("spark", [])
    assert summary["diverged"] == [damage.container_id for damage in truth.damages]


def test_a_server_whose_python_lacks_ours_is_told_apart(
    tmp_path: Path, server: str, bare: Path
) -> None:
    synthetic(tmp_path / "table", SyntheticCluster(seed=9, datanodes=3, containers=3))
    settings = {**OURS, "spark.pyspark.python": str(bare)}
    with (
        pytest.raises(PackagesMissingError, match="executors cannot import spark"),
        spark_session(server, settings=settings) as session,
    ):
        run(tmp_path / "out", tmp_path / "table", engine=SparkEngine(session))


def test_a_python_that_is_not_there_is_named(tmp_path: Path, server: str) -> None:
    synthetic(tmp_path / "table", SyntheticCluster(seed=9, datanodes=3, containers=3))
    settings = {**OURS, "spark.pyspark.python": "/nonexistent/python"}
    with (
        pytest.raises(SparkFailedError, match="/nonexistent/python"),
        spark_session(server, settings=settings) as session,
    ):
        run(tmp_path / "out", tmp_path / "table", engine=SparkEngine(session))


def test_a_server_that_is_not_there_is_named_at_once() -> None:
    with socket.socket() as bound:
        # Nobody listens.
        bound.bind(("127.0.0.1", 0))
        place = f"sc://127.0.0.1:{bound.getsockname()[1]}"
        words = ["sweep", "run", "--engine", "spark", "--table", "x", "--out", "y"]
        done = CliRunner().invoke(treefold, words, env={"SPARK_REMOTE": f"{place}/;token=secret"})
    assert done.exit_code == 1
    assert f"error [process_failed]: no server of Spark Connect answers at {place}: " in done.stderr
    assert "secret" not in done.stderr


def test_a_server_of_something_else_is_named() -> None:
    def hang_up() -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        hanging_up = threading.Thread(target=hang_up)
        hanging_up.start()
        place = f"sc://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ProcessFailedError, match=f"Spark Connect answers at {place}$"):
            connect_session(place, {}, None).__enter__()
        listener.shutdown(socket.SHUT_RDWR)
    hanging_up.join()


@pytest.mark.parametrize(
    ("place", "settings", "text"),
    [
        ("sc://", {}, "is not the address of a server of Spark Connect"),
        ("sc://host:port", {}, "is not the address of a server of Spark Connect"),
        ("SERVER/;user", {}, "is followed by what Spark Connect does not know"),
        ("SERVER", {"spark.executor.memory": "1g"}, "spark.executor.memory cannot be set"),
        ("SERVER", {"spark.sql.warehouse.dir": "/x"}, "spark.sql.warehouse.dir cannot be set"),
    ],
)
def test_what_a_session_cannot_have_is_refused(
    server: str, place: str, settings: dict[str, str], text: str
) -> None:
    with (
        pytest.raises(UsageError, match=text),
        spark_session(place.replace("SERVER", server), settings=settings),
    ):
        pass


def test_a_server_in_the_environment_does_not_matter_to_one_machine(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SyntheticCluster(seed=9, datanodes=3, containers=3))
    words = ["sweep", "run", "--table", str(tmp_path / "table"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(treefold, words, env={"SPARK_REMOTE": "sc://127.0.0.1:1"})
    assert done.exit_code in (0, 3), done.stderr
    assert "SPARK_CONNECT_MODE_ENABLED" not in os.environ

"""The session: our own interpreter whatever the path holds, quiet, named errors, retries, cancelled jobs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from spark.session import watched

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

ROOT = Path(__file__).resolve().parents[2]


def python_of_workers(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"python": [sys.executable] * batch.num_rows})


def test_tasks_run_on_our_own_interpreter(session: SparkSession) -> None:
    (row,) = session.range(1).mapInArrow(python_of_workers, "python string").collect()
    assert row.python == sys.executable


def test_a_task_that_dies_is_tried_again(tmp_path: Path, session: SparkSession) -> None:
    died = tmp_path / "died"

    def die_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not died.exists():
                died.touch()
                os._exit(1)
            yield batch

    assert session.range(3).mapInArrow(die_once, "id long").count() == 3
    assert died.exists()


def test_jobs_are_told_of_as_they_run_and_end_with_their_block(tmp_path: Path, session: SparkSession) -> None:
    stop = tmp_path / "stop"
    said = list[tuple[int, int]]()

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            while batch.column(0)[0].as_py() == 1 and not stop.exists():
                time.sleep(0.05)
            yield batch

    def tell(done: int, total: int) -> None:
        said.append((done, total))
        if done == 1:
            stop.touch()

    assert len(watched(session, "waiting", session.range(0, 2, 1, 2).mapInArrow(wait, "id long").collect, tell)) == 2
    assert (1, 2) in said


@pytest.mark.parametrize("java", ["", "#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\ntest $1 = -version\n"])
def test_a_missing_or_old_java_is_named(tmp_path: Path, java: str) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "sh", "dirname", "ps", "cat", "head", "env", "python3"):
        (tools / tool).symlink_to(f"/usr/bin/{tool}")
    if java:
        (tools / "java").write_text(java)
        (tools / "java").chmod(0o755)
    words = ["sweep", "run", "--engine", "spark", "--table", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "admin.cli", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": str(tools)},
        check=False,
    )
    assert done.returncode == 1
    what, hint = done.stderr.splitlines()
    assert what == f"error [spark_missing]: Spark needs Java 17 or newer, {'not 11' if java else 'and there is none'}"
    assert "openjdk-17-jre-headless" in hint


def test_ctrl_c_ends_a_job_and_the_command(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    script = f"""
import pathlib, time
from spark.session import spark_session, watched
def sleep(batches):
    pathlib.Path({str(begun)!r}).touch()
    time.sleep(600)
    yield from batches
with spark_session("local[1]") as session:
    try:
        watched(session, "sleeping", session.range(1).mapInArrow(sleep, "id long").collect, lambda *_: None)
    except KeyboardInterrupt:
        tracker = session.sparkContext.statusTracker()
        while tracker.getActiveJobsIds():
            time.sleep(0.05)
        print("no job is left")
"""
    process = subprocess.Popen(
        # Whoever runs tests in the background has SIGINT ignored, and so has what they start.
        ["env", "--default-signal=INT", sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        while not begun.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "no job is left\n", "")


def test_ctrl_c_while_spark_starts_is_told_by_nobody_else() -> None:
    script = """
import os, signal, sys, threading, time
from spark.session import spark_session
def interrupt():
    # Until the JVM is asked for what takes it long: a context.
    waited = 0
    while waited < 10:
        time.sleep(0.02)
        asks = any(frame.f_code.co_name == "readinto" for frame in sys._current_frames().values())
        waited = waited + 1 if asks else 0
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try:
    with spark_session("local[1]"):
        pass
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run(
        ["env", "--default-signal=INT", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")

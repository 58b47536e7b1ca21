"""The session: our own interpreter whatever the path holds, quiet, named errors,
retries, cancelled jobs.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from runtime.errors import ProcessFailedError, UsageError
from spark.session import spark_session
from tests.support.waiting import wait_until
from tests.support.watched_tasks import reports_of_two_tasks

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

ROOT = Path(__file__).resolve().parents[2]


def test_tasks_run_on_our_own_interpreter_which_has_imported_what_they_need(
    session: SparkSession,
) -> None:
    def tell(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        has = "sweep.kernels" in sys.modules
        for batch in batches:
            told = {"python": [sys.executable] * batch.num_rows, "has": [has] * batch.num_rows}
            yield pa.RecordBatch.from_pydict(told)

    (row,) = session.range(1).mapInArrow(tell, "python string, has boolean").collect()
    assert (row.python, row.has) == (sys.executable, True)


def test_what_workers_are_forked_from_has_no_thread_that_takes_locks() -> None:
    """A fork would hold them for ever. The allocator's thread sees to its own."""
    code = (
        "import os, spark.daemon\n"
        "for one in os.listdir('/proc/self/task'):\n"
        "    print(one == str(os.getpid()) or open(f'/proc/self/task/{one}/comm').read().strip())"
    )
    # As Spark sets it for the workers of an executor.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) <= {"True", "jemalloc_bg_thd"}


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


def test_jobs_are_told_of_as_they_run_and_end_with_their_block(
    tmp_path: Path, session: SparkSession
) -> None:
    assert (1, 2) in reports_of_two_tasks(session, tmp_path / "stop")


def test_a_master_that_does_not_answer_is_named_at_once() -> None:
    with socket.socket() as bound:
        # Nobody listens.
        bound.bind(("127.0.0.1", 0))
        master = f"spark://127.0.0.1:{bound.getsockname()[1]}"
        with (
            pytest.raises(ProcessFailedError, match=f"no Spark master answers at {master}"),
            spark_session(master),
        ):
            pass


@pytest.mark.parametrize(
    "master",
    [
        "spark://",
        "spark://host",
        "spark://:7077",
        "spark://host:port",
        "spark://a:1,b",
        "spark://a..b:7077",
        f"spark://{70 * 'x'}:7077",
    ],
)
def test_what_names_no_master_is_refused(master: str) -> None:
    with (
        pytest.raises(UsageError, match="is not the address of a Spark master"),
        spark_session(master),
    ):
        pass


@pytest.mark.parametrize(
    "java", ["", "#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\ntest $1 = -version\n"]
)
def test_a_missing_or_old_java_is_named(tmp_path: Path, java: str) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "sh", "dirname", "ps", "cat", "head", "env", "python3"):
        (tools / tool).symlink_to(f"/usr/bin/{tool}")
    if java:
        (tools / "java").write_text(java)
        (tools / "java").chmod(0o755)
    words = [
        "sweep",
        "run",
        "--engine",
        "spark",
        "--table",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
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
    assert (
        what == "error [spark_missing]: Spark needs Java 17 or newer,"
        f" {'not 11' if java else 'and none was found'}"
    )
    assert "openjdk-17-jre-headless" in hint


@pytest.mark.peers
def test_a_java_that_ends_without_a_word_is_started_once_more(tmp_path: Path) -> None:
    """As it does now and then on a busy machine, whatever ails it."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    # Spark's scripts ask one Java for the command line of the other.
    java.write_text(f"""#!/bin/sh
case "$*" in *launcher.Main*) ;; *) mkdir {tmp_path}/ended 2>/dev/null && exit 1 ;; esac
exec {shutil.which("java")} "$@"
""")
    java.chmod(0o755)
    script = (
        "from spark.session import spark_session\nwith spark_session('local[1]') as s:"
        " print(s.range(3).count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
        check=False,
    )
    assert (tmp_path / "ended").is_dir()
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


@pytest.mark.peers
def test_ctrl_c_ends_a_job_and_the_command(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    script = f"""
import pathlib, threading
from spark.jobs import watched
from spark.session import spark_session
from tests.support.waiting import wait_until
def sleep(batches):
    pathlib.Path({str(begun)!r}).touch()
    # Only being cancelled ends it.
    threading.Event().wait()
    yield from batches
with spark_session("local[1]") as session:
    try:
        asleep = session.range(1).mapInArrow(sleep, "id long")
        watched(session, "sleeping", asleep.collect, lambda *_: None)
    except KeyboardInterrupt:
        tracker = session.sparkContext.statusTracker()
        wait_until(lambda: not tracker.getActiveJobsIds(), "the job is gone")
        print("no job is left")
"""
    process = subprocess.Popen(
        # Whoever runs tests in the background has SIGINT ignored, and so has what they
        # start.
        ["env", "--default-signal=INT", sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with process:
        wait_until(
            lambda: begun.exists() or process.poll() is not None, "the task begins", timeout_s=120
        )
        assert begun.exists(), process.communicate()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "no job is left\n", "")


@pytest.mark.peers
def test_ctrl_c_while_spark_starts_is_told_by_nobody_else() -> None:
    script = """
import os, signal, sys, threading
from spark.session import spark_session
from tests.support.waiting import wait_until
waited = [0]
def asks():
    # Looked at so often without a break, it is what takes the JVM long: a context.
    asked = any(frame.f_code.co_name == "readinto" for frame in sys._current_frames().values())
    waited[0] = waited[0] + 1 if asked else 0
    return waited[0] == 20
def interrupt():
    wait_until(asks, "the JVM is asked for a context", timeout_s=120)
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


@pytest.mark.peers
def test_one_process_starts_a_session_after_another() -> None:
    """`sweep demo` has one to see whether Spark comes up, and one to sweep: its own,
    whatever server the environment names.
    """
    words = ["sweep", "demo", "--containers", "30", "--chunks", "4", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "admin.cli", *words],
        env={**os.environ, "SPARK_REMOTE": "sc://127.0.0.1:1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["wrong"] == []
    assert set(said["engines"]) == {"local", "spark"}

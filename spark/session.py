"""The Spark session of a sweep: quiet, on our own interpreter, and ended with the
command that started it.

The JVM's own talk goes to a file; what it says there is told when it does not come up.
Jobs run under `watched`, which tells how they go on, and cancels them on Ctrl-C.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import IO, TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from runtime.errors import ProcessFailedError, UsageError
from spark.errors import SparkMissingError
from spark.pack import ARCHIVE, CODE, ENVIRONMENT

try:
    from py4j.protocol import Py4JError
    from pyspark import InheritableThread, SparkConf, SparkContext
    from pyspark.errors import PySparkException, PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession
except ModuleNotFoundError as missing:
    raise SparkMissingError(
        f"{missing.name} is not installed",
        hint="pip install 'treefold[spark,fast]', or leave out --engine spark",
    ) from missing

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway

T = TypeVar("T")

LOCAL = "local[*]"

_PROGRESS_EVERY_S = 0.5
# A task of a cluster is given up when it has failed so often; a local one, unless Spark
# is told, at once.
_FAILURES_MAX = 4
_STANDALONE = "spark://"
_CONNECT_S = 5.0
_JAVA_MIN = 17
_LOG_TAIL_BYTES = 20_000
_REASONS_MAX = 4

_ALWAYS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # 64 Ki rows a batch keep the arrays of a task in the cache and the calls few.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # How much comes to the driver, waves see to.
    "spark.driver.maxResultSize": "0",
    # Beyond so many groups in memory Spark sorts them, which is slower; ours are small.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "65536",
    # The checks of every single operation would cost a third; sums that may be too
    # large are tried by name.
    "spark.sql.ansi.enabled": "false",
    # So many groups are found without a search: more than there are blocks in most
    # parts of a table.
    "spark.sql.codegen.aggregate.fastHashMap.capacityBit": "20",
    # Times of scans are given in UTC, whatever the machine thinks.
    "spark.sql.session.timeZone": "UTC",
    # Without it Spark takes a damaged page of a Parquet file at its word.
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
    # Spark refuses a data source that could take filters unless this is on.
    "spark.sql.python.filterPushdown.enabled": "true",
}


@contextmanager
def spark_session(
    master: str = LOCAL, *, settings: Mapping[str, str] | None = None, pack: Path | None = None
) -> Iterator[SparkSession]:
    """A session for one command; one at a time in a process.

    A machine that cannot resolve its own name wants SPARK_LOCAL_IP in the environment,
    127.0.0.1 for a local master: Spark asks for its address before it reads any
    setting.

    `settings` are Spark's own and win over ours; `spark.pyspark.python` is the
    executors' Python, on a cluster `python3` unless told. `pack` is a folder made by
    spark.pack, for executors that have neither our code nor our libraries.

    Raises:
        SparkMissingError: There is no Java, or one that is too old.
        UsageError: `master` or `pack` is not what it has to be.
        ProcessFailedError: Spark does not come up, or a job fails; what its log says of
            it is in the message.
    """
    wanted = {
        **_ALWAYS,
        **(_of_local(master) if is_local(master) else _of_cluster(master, pack)),
        **(settings or {}),
    }
    if master.startswith(_STANDALONE):
        _hear_from(master)
    conf = SparkConf().setAppName("treefold sweep").setAll(list(wanted.items()))
    log = _log()

    def started() -> SparkSession:
        # A master that does not answer ends the context behind our back, and the
        # session is who hears of it.
        return SparkSession(SparkContext(conf=conf, gateway=_gateway(conf)))

    try:
        session = _apart(started)
    except (PySparkException, Py4JError) as error:
        text = f"Spark did not start on {master}: {_reasons(_tail(log)) or error}"
        raise _java_trouble() or ProcessFailedError(text) from error
    context = session.sparkContext
    # pyspark itself would take what the path calls python3, which need not have our
    # packages.
    context.pythonExec = wanted["spark.pyspark.python"]
    try:
        yield session
    except (PySparkException, Py4JError) as error:
        raise ProcessFailedError(
            f"Spark failed: {_reasons(str(error)) or type(error).__name__}"
        ) from error
    finally:
        context.stop()


def watched(
    session: SparkSession, what: str, work: Callable[[], T], tell: Callable[[int, int], None]
) -> T:
    """What `work` returns; its jobs are one group, and `tell` hears of tasks done and
    known of, now and then.

    Both run in other threads: an answer of the JVM that Ctrl-C cut short would be taken
    for that to the next question. Interrupted, the jobs are cancelled on the cluster.
    """
    context = session.sparkContext
    group = f"{what}-{uuid4()}"
    outcome, cancelled = Future[T](), Event()

    def run() -> None:
        try:
            context.setJobGroup(group, what, interruptOnCancel=True)
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            outcome.set_exception(error)

    def follow() -> None:
        tracker, seen = context.statusTracker(), (0, 0)
        while not outcome.done():
            if cancelled.wait(_PROGRESS_EVERY_S):
                if outcome.done():
                    return
                # Again and again: the next job may be about to begin.
                context.cancelJobGroup(group)
                sleep(_PROGRESS_EVERY_S)
                continue
            jobs = [job for i in tracker.getJobIdsForGroup(group) if (job := tracker.getJobInfo(i))]
            stages = [
                stage for job in jobs for i in job.stageIds if (stage := tracker.getStageInfo(i))
            ]
            now = (
                sum(stage.numCompletedTasks for stage in stages),
                sum(stage.numTasks for stage in stages),
            )
            if now != seen:
                seen = now
                tell(*now)

    threads = [
        InheritableThread(target=target, name=f"{what} on Spark", daemon=True)
        for target in (run, follow)
    ]
    try:
        for thread in threads:
            thread.start()
        return outcome.result()
    finally:
        cancelled.set()
        for thread in threads:
            thread.join()


def _apart(work: Callable[[], T]) -> T:
    """What `work` returns, done by another thread: an answer of the JVM that Ctrl-C cut
    short would be told of.
    """
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            outcome.set_exception(error)

    # Not Spark's own kind of thread, which takes over what a context holds: there is
    # none yet.
    Thread(target=run, name="Spark's start", daemon=True).start()
    return outcome.result()


def _hear_from(master: str) -> None:
    """Raise unless a standalone master listens: Spark itself would try for a minute and
    a half.
    """
    reason: OSError | None = None
    for place in master.removeprefix(_STANDALONE).split(","):
        try:
            address = urlsplit(f"//{place}")
            host, port = address.hostname or "", address.port
            # As a lookup writes it: what cannot be written so is no name, which a
            # lookup would say less clearly.
            host.encode("idna")
        except ValueError:
            host, port = "", None
        if not host or not port:
            raise UsageError(
                f"{master!r} names no Spark master", hint="it looks like spark://HOST:PORT"
            )
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
        except OSError as error:
            reason = error
        else:
            return
    raise ProcessFailedError(f"no Spark master answers at {master}: {reason}") from reason


def is_local(master: str) -> bool:
    """Whether all of Spark is to run in this machine's one JVM."""
    return master == "local" or master.startswith("local[")


def _of_local(master: str) -> dict[str, str]:
    cores = re.fullmatch(r"local\[(\d+|\*)\]", master)
    return {
        "spark.master": f"local[{cores[1]},{_FAILURES_MAX}]" if cores else master,
        "spark.pyspark.python": sys.executable,
        # The JVM's share: as much for the workers, and half for the pages of files.
        "spark.driver.memory": f"{max(1, (_memory_bytes() >> 30) // 4)}g",
        # A machine by itself needs no name and no network.
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # For a cluster 200 are meant; a machine would spend its time on empty ones.
        "spark.sql.shuffle.partitions": "16",
    }


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_cluster(master: str, pack: Path | None) -> dict[str, str]:
    settings = {"spark.master": master, "spark.pyspark.python": "python3"}
    if pack:
        for made in (pack / CODE, pack / ARCHIVE):
            if not made.is_file():
                raise UsageError(
                    f"{made} is missing", hint="treefold sweep pack --out DIR makes it"
                )
        settings |= {
            "spark.files": str(pack / CODE),
            "spark.archives": f"{pack / ARCHIVE}#{ENVIRONMENT}",
            # Both lie in the folder that an executor starts its workers in.
            "spark.executorEnv.PYTHONPATH": f"{CODE}:{ENVIRONMENT}",
        }
    return settings


@cache
def _log() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="treefold-spark-")


_started: "list[JavaGateway]" = []


def _gateway(conf: SparkConf) -> "JavaGateway":
    """The JVM of this process; sessions that follow each other share it."""
    # pyspark does not say what it takes and gives.
    launch: Callable[[SparkConf, dict[str, object]], JavaGateway] = launch_gateway
    if not _started:
        streams: dict[str, object] = {"stdout": _log(), "stderr": _log()}
        try:
            _started.append(launch(conf, streams))
        except PySparkRuntimeError:
            # Now and then, on a busy machine, Java ends before it has said a word. What
            # is wrong for good it says.
            if _tail(_log()):
                raise
            _started.append(launch(conf, streams))
    return _started[0]


def _tail(log: IO[bytes]) -> str:
    log.seek(0, 2)
    log.seek(max(log.tell() - _LOG_TAIL_BYTES, 0))
    return log.read().decode(errors="replace").strip()


def _reasons(text: str) -> str:
    """Of what Spark says, the lines that say why, without those that say where."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith(("\t", " "))]
    telling = [line for line in lines if re.search(r"Exception\b|Error\b|\bERROR\b", line)]
    return "\n".join(list(dict.fromkeys(telling or lines))[:_REASONS_MAX])


def _java_trouble() -> SparkMissingError | None:
    """What is wrong with the Java that Spark's scripts would take, if that is what is
    wrong.
    """
    hint = f"install Java {_JAVA_MIN}: sudo apt-get install openjdk-17-jre-headless"
    # Spark's own rule; the shell knows JAVA_HOME.
    command = '"${JAVA_HOME:+$JAVA_HOME/bin/}java" -version'
    told = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    if told.returncode:
        return SparkMissingError(
            f"Spark needs Java {_JAVA_MIN} or newer, and there is none", hint=hint
        )
    version = re.search(r'version "(?:1\.)?(\d+)', told.stderr)
    if version and int(version[1]) < _JAVA_MIN:
        return SparkMissingError(
            f"Spark needs Java {_JAVA_MIN} or newer, not {version[1]}", hint=hint
        )
    return None

"""The Spark session of a sweep: it uses our interpreter and stops with the command.

The JVM logs to a temporary file, whose errors are quoted if Spark does not start. A
server of Spark Connect has both elsewhere (spark.connect).
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, TypeVar

from runtime.errors import ProcessFailedError
from spark.addresses import check_listening
from spark.errors import SparkMissingError, reasons_of
from spark.pack import ENVIRONMENT, PYTHONPATH, SOURCES, files_of

try:
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    from spark.connect import SCHEME, connect_session
    from spark.jobs import SPARK_ERRORS
except ModuleNotFoundError as missing:
    raise SparkMissingError(
        f"{missing.name} is not installed",
        hint="pip install 'treefold[spark,fast]', or leave out --engine spark",
    ) from missing

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway

T = TypeVar("T")

LOCAL = "local[*]"

# Attempts of one task. It is Spark's default on a cluster; on a local master Spark's
# default is one.
_FAILURES_MAX = 4
_STANDALONE = "spark://"
_JAVA_MIN = 17
_LOG_TAIL_BYTES = 20_000

# Of a session, wherever it is.
_SQL = {
    # 64 Ki rows a batch keep the arrays of a task in the cache and the calls few.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # With any other limit Spark adds up the size of the batch after each row, which
    # takes most of the CPU time of an exchange.
    "spark.sql.execution.arrow.maxBytesPerBatch": "2147483647",
    # Above this number of groups Spark falls back to sorting, which is slower. Ours are
    # small enough for more.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "65536",
    # Checked arithmetic costs a third more time; sums that may overflow use try_sum.
    "spark.sql.ansi.enabled": "false",
    # The fast hash map then holds 2**20 groups, more than most parts of a table have
    # blocks.
    "spark.sql.codegen.aggregate.fastHashMap.capacityBit": "20",
    # Scan times are in UTC, whatever the machine's time zone.
    "spark.sql.session.timeZone": "UTC",
    # Without it Spark does not detect a damaged page of a Parquet file.
    "spark.hadoop.parquet.page.verify-checksum.enabled": "true",
}


@contextmanager
def spark_session(
    master: str = LOCAL, *, settings: Mapping[str, str] | None = None, pack: Path | None = None
) -> Iterator[SparkSession]:
    """A session for one command; a process may have one at a time, and more of servers
    of Spark Connect (sc://HOST:PORT).

    `settings` are Spark's own and override ours. `spark.pyspark.python` is the
    executors' Python, by default `python3` on a cluster. `pack` is a folder written by
    spark.pack, for executors that have neither our code nor our libraries.

    A machine that cannot resolve its own name needs SPARK_LOCAL_IP in the environment
    (127.0.0.1 for a local master): Spark looks its address up before it reads settings.

    Raises:
        SparkMissingError: Java is missing or too old, or what Spark Connect needs.
        UsageError: `master` is malformed, `pack` lacks a file, or only a server can set
            one of the settings.
        ProcessFailedError: Spark does not start, or a job fails; the message quotes the
            errors of its log.
    """
    if is_served(master):
        with connect_session(master, {**_SQL, **(settings or {})}, pack) as served:
            yield served
        return
    merged = {
        **_SQL,
        "spark.ui.showConsoleProgress": "false",
        "spark.python.daemon.module": "spark.daemon",
        **(_of_local(master) if is_local(master) else _of_cluster(master, pack)),
        **(settings or {}),
    }
    if master.startswith(_STANDALONE):
        check_listening(master, _STANDALONE, "Spark master")
    conf = SparkConf().setAppName("treefold sweep").setAll(list(merged.items()))
    log = _log()

    def start() -> SparkSession:
        # A master that does not answer stops the context without an error; only making
        # the session raises one.
        return SparkSession(SparkContext(conf=conf, gateway=_gateway(conf)))

    try:
        session = _in_thread(start)
    except SPARK_ERRORS as error:
        text = f"Spark did not start on {master}: {reasons_of(_tail(log)) or error}"
        raise _java_error() or ProcessFailedError(text) from error
    context = session.sparkContext
    # By default pyspark runs the python3 on PATH, which need not have our packages.
    context.pythonExec = merged["spark.pyspark.python"]
    try:
        yield session
    except SPARK_ERRORS as error:
        raise ProcessFailedError(
            f"Spark failed: {reasons_of(str(error)) or type(error).__name__}"
        ) from error
    finally:
        context.stop()


def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` in another thread and return its result, so that Ctrl-C cannot cut a
    JVM reply short.
    """
    outcome = Future[T]()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised again where it is waited for
            outcome.set_exception(error)

    # Not an InheritableThread: it copies a context's properties, and there is none yet.
    Thread(target=run, name="Spark's start", daemon=True).start()
    return outcome.result()


def is_local(master: str) -> bool:
    """Whether all of Spark runs in one JVM on this machine."""
    return master == "local" or master.startswith("local[")


def is_served(master: str) -> bool:
    """Whether a server of Spark Connect has the session."""
    return master.startswith(SCHEME)


def _of_local(master: str) -> dict[str, str]:
    cores = re.fullmatch(r"local\[(\d+|\*)\]", master)
    return {
        "spark.master": f"local[{cores[1]},{_FAILURES_MAX}]" if cores else master,
        "spark.pyspark.python": sys.executable,
        # A quarter for the JVM, a quarter for the Python workers, half for the page
        # cache.
        "spark.driver.memory": f"{max(1, (_memory_bytes() >> 30) // 4)}g",
        # A local master needs neither a host name nor a network, nor a port of its own.
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # Spark's default of 200 is for clusters; here most partitions would be empty.
        "spark.sql.shuffle.partitions": "16",
    }


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_cluster(master: str, pack: Path | None) -> dict[str, str]:
    settings = {"spark.master": master, "spark.pyspark.python": "python3"}
    if pack:
        code, archive = files_of(pack)
        settings |= {
            # Spark unpacks both into the working folder of an executor's workers.
            "spark.archives": f"{code}#{SOURCES},{archive}#{ENVIRONMENT}",
            "spark.executorEnv.PYTHONPATH": PYTHONPATH,
        }
    return settings


@cache
def _log() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="treefold-spark-")


_started: "list[JavaGateway]" = []


def _gateway(conf: SparkConf) -> "JavaGateway":
    """The JVM of this process, which consecutive sessions share."""
    # pyspark has no annotations here.
    launch: Callable[[SparkConf, dict[str, object]], JavaGateway] = launch_gateway
    if not _started:
        streams: dict[str, object] = {"stdout": _log(), "stderr": _log()}
        try:
            _started.append(launch(conf, streams))
        except PySparkRuntimeError:
            # On a busy machine Java sometimes exits without any output. A permanent
            # fault is logged.
            if _tail(_log()):
                raise
            _started.append(launch(conf, streams))
    return _started[0]


def _tail(log: IO[bytes]) -> str:
    log.seek(0, 2)
    log.seek(max(log.tell() - _LOG_TAIL_BYTES, 0))
    return log.read().decode(errors="replace").strip()


def _java_error() -> SparkMissingError | None:
    """The error of a missing or old Java; None if the Java that Spark runs is new
    enough.
    """
    hint = f"install Java {_JAVA_MIN}: sudo apt-get install openjdk-17-jre-headless"
    # Spark's scripts choose Java by the same rule.
    command = '"${JAVA_HOME:+$JAVA_HOME/bin/}java" -version'
    run = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    if run.returncode:
        return SparkMissingError(
            f"Spark needs Java {_JAVA_MIN} or newer, and none was found", hint=hint
        )
    version = re.search(r'version "(?:1\.)?(\d+)', run.stderr)
    if version and int(version[1]) < _JAVA_MIN:
        return SparkMissingError(
            f"Spark needs Java {_JAVA_MIN} or newer, not {version[1]}", hint=hint
        )
    return None

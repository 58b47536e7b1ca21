"""Sessions of a server of Spark Connect: without Java, and without a driver, here.

The server has its own settings and its own Python. A session brings along settings of
SQL, and its pack (spark.pack), which the server gives to executors as long as it lasts.
"""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from runtime.errors import ProcessFailedError, UsageError
from spark.addresses import CONNECT_S, check_listening
from spark.errors import SparkMissingError, reasons_of
from spark.pack import ENVIRONMENT, SOURCES, files_of

if TYPE_CHECKING:
    from pyspark.sql.connect.session import SparkSession as ServedSession

SCHEME = "sc://"
_PORT = 15_002
_PYTHON = "spark.pyspark.python"
_SESSION_PYTHON = "spark.sql.execution.pyspark.python"
_ISOLATION = "spark.sql.artifact.isolation.enabled"
_HADOOP = "spark.hadoop."
# What runs a worker of a session with a pack. Spark starts it in the folder of the
# session's files, and nothing but its name can be given with it.
_LAUNCHER = "treefold-python"
_LAUNCHER_TEXT = """#!/bin/sh
PYTHONPATH="$PWD/{sources}:$PWD/{environment}${{PYTHONPATH:+:$PYTHONPATH}}" exec {python} "$@"
"""


@contextmanager
def connect_session(
    url: str, settings: Mapping[str, str], pack: Path | None
) -> Iterator[SparkSession]:
    """A session of the server at `url` (sc://HOST:PORT, and what Spark lets follow),
    which ends with the context. The others are as for spark.session.spark_session.

    Raises:
        SparkMissingError: what pyspark needs for Spark Connect is not installed.
        UsageError: `url` is malformed, or only the server can set one of `settings`.
        ProcessFailedError: no server answers there, or a call fails.
    """
    chosen, python = _session_settings(settings)
    session = _open(url)
    try:
        for key, value in chosen.items():
            _set(session, key, value)
        if pack:
            _send(session, pack, python or "python3")
        elif python:
            session.conf.set(_SESSION_PYTHON, python)
        yield cast(SparkSession, session)
    except PySparkException as error:
        raise ProcessFailedError(f"Spark failed: {reasons_of(str(error))}") from error
    finally:
        session.stop()


def _session_settings(settings: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """What a session sets of Spark's settings, and the workers' Python, "" if it is the
    server's.

    Raises:
        UsageError: only a server can set one.
    """
    chosen = {key.removeprefix(_HADOOP): value for key, value in settings.items()}
    python = chosen.pop(_SESSION_PYTHON, chosen.pop(_PYTHON, ""))
    for key in chosen:
        # Spark would take some of them, and pass them over.
        if key.startswith("spark.") and not key.startswith("spark.sql."):
            raise _refusal(key)
    return chosen, python


def _refusal(key: str) -> UsageError:
    return UsageError(
        f"{key} cannot be set for a session of Spark Connect",
        hint="Set it where the server is started.",
    )


def _open(url: str) -> "ServedSession":
    # What follows the address may be secret.
    place = SCHEME + url.removeprefix(SCHEME).partition("/")[0]
    try:
        import grpc
        from pyspark.sql.connect.client import DefaultChannelBuilder
        from pyspark.sql.connect.session import SparkSession as ServedSession
    except ImportError as missing:
        raise SparkMissingError(
            f"Spark Connect needs more than pyspark: {missing}",
            hint="pip install 'treefold[connect,fast]'",
        ) from missing
    check_listening(place, SCHEME, "server of Spark Connect", port=_PORT)
    try:
        builder = DefaultChannelBuilder(url)
    except PySparkException as error:
        raise UsageError(f"{place} is followed by what Spark Connect does not know") from error
    with builder.toChannel() as channel:
        try:
            # Otherwise Spark would try for minutes.
            grpc.channel_ready_future(channel).result(CONNECT_S)
        except grpc.FutureTimeoutError as error:
            raise ProcessFailedError(f"no server of Spark Connect answers at {place}") from error
    session = ServedSession(builder)
    try:
        # The first call: servers of other services answer, too.
        assert session.version
    except PySparkException as error:
        session.stop()
        raise ProcessFailedError(
            f"{place} opens no session of Spark Connect: {reasons_of(str(error))}"
        ) from error
    return session


def _set(session: "ServedSession", key: str, value: str) -> None:
    try:
        session.conf.set(key, value)
    except AnalysisException as error:
        raise _refusal(key) from error


def _send(session: "ServedSession", pack: Path, python: str) -> None:
    """Give a pack to executors, whose own interpreter is `python`.

    Raises:
        UsageError: the pack lacks a file, or other sessions would get it, too.
    """
    code, archive = files_of(pack)
    if session.conf.get(_ISOLATION, "false") != "true":
        raise UsageError(
            "the server does not keep the files of sessions apart, which --pack needs",
            hint=f"Start it with --conf {_ISOLATION}=true.",
        )
    with TemporaryDirectory(prefix="treefold-") as folder:
        launcher = Path(folder, _LAUNCHER)
        launcher.write_text(
            _LAUNCHER_TEXT.format(
                sources=SOURCES, environment=ENVIRONMENT, python=shlex.quote(python)
            )
        )
        session.addArtifacts(str(launcher), file=True)
        session.addArtifacts(f"{code}#{SOURCES}", f"{archive}#{ENVIRONMENT}", archive=True)
    session.conf.set(_SESSION_PYTHON, f"./{_LAUNCHER}")

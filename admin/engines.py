"""The engine of a sweep, by its name: threads of this process, or Spark."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import UsageError
from sweep.engine import Engine, LocalEngine
from sweep.gather import Gatherer

LOCAL, SPARK = "local", "spark"

ENGINES = (LOCAL, SPARK)


@contextmanager
def chosen_engine(
    name: str,
    out: Path,
    threads: int | None = None,
    settings: Sequence[str] = (),
    master: str = "local[*]",
    pack: Path | None = None,
) -> Iterator[Engine]:
    """The engine of this name, for as long as it is needed.

    Raises:
        SparkMissingError, ProcessFailedError: Spark, or its Java, is not there or does
            not start. UsageError: a setting is none.
    """
    if name == LOCAL:
        yield LocalEngine(Gatherer(out / "work" / "spill", threads=threads))
        return
    pairs = [setting.partition("=") for setting in settings]
    if wrong := next((key for key, equals, _ in pairs if not (key and equals)), None):
        raise UsageError(f"--conf {wrong}: say KEY=VALUE")
    # First of all: it says by name what is not installed.
    from spark.session import is_local, spark_session

    chosen = {key: value for key, _, value in pairs}
    if address := chosen.get("spark.driver.bindAddress", "127.0.0.1" if is_local(master) else None):
        # Spark asks for the machine's address before it reads a setting, and not every
        # machine can tell.
        os.environ.setdefault("SPARK_LOCAL_IP", address)
    with spark_session(master, settings=chosen, pack=pack) as session:
        from spark.engine import SparkEngine

        yield SparkEngine(session)

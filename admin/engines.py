"""Create the engine of a sweep by its name: threads of this process, or Spark."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from admin.spark_options import LOCAL
from chunktable.files import AnyPath
from runtime.errors import UsageError
from sweep.engine import Engine, LocalEngine
from sweep.gather import Gatherer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def open_engine(
    name: str,
    out: AnyPath,
    threads: int | None = None,
    settings: Sequence[str] = (),
    master: str | None = None,
    pack: Path | None = None,
) -> Iterator[Engine]:
    """Open the engine of this name; its Spark session ends with the context. The other
    arguments are as for `open_session`.

    Raises:
        SparkMissingError, ProcessFailedError, UsageError: see `open_session`.
    """
    if name == LOCAL:
        with TemporaryDirectory(prefix="treefold-") as temporary:
            # The work folder has room; a bucket has none for this.
            spill = out / "work" / "spill" if isinstance(out, Path) else Path(temporary)
            yield LocalEngine(Gatherer(spill, threads=threads))
        return
    with open_session(settings, master, pack) as session:
        from spark.engine import SparkEngine

        yield SparkEngine(session)


@contextmanager
def open_session(
    settings: Sequence[str], master: str | None, pack: Path | None
) -> Iterator["SparkSession"]:
    """A Spark session that ends with the context; `settings` are texts KEY=VALUE, and
    None is a master that uses all cores of this machine.

    Raises:
        SparkMissingError: Spark or Java is not installed.
        ProcessFailedError: Spark does not start.
        UsageError: a setting is invalid.
    """
    pairs = [setting.partition("=") for setting in settings]
    if wrong := next((key for key, equals, _ in pairs if not (key and equals)), None):
        raise UsageError(f"--conf {wrong}: write KEY=VALUE")
    # Before any import of pyspark: this one reports what is not installed.
    from spark.session import LOCAL as ALL_CORES
    from spark.session import is_local, is_served, spark_session

    master = master or ALL_CORES
    if not is_served(master):
        # Spark's own scripts refuse any master beside it; ours was chosen.
        os.environ.pop("SPARK_REMOTE", None)
    chosen = {key: value for key, _, value in pairs}
    if address := chosen.get("spark.driver.bindAddress", "127.0.0.1" if is_local(master) else None):
        # Spark looks up the machine's address before it reads its settings, which fails
        # on some machines.
        os.environ.setdefault("SPARK_LOCAL_IP", address)
    with spark_session(master, settings=chosen, pack=pack) as session:
        yield session

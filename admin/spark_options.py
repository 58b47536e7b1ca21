"""The options of commands that run on this machine, or on a Spark cluster."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from admin.paths import LocalPath
from runtime.errors import UsageError
from spark.addresses import check_master

LOCAL, SPARK = "local", "spark"
ENGINES = (LOCAL, SPARK)


def spark_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --engine, and what Spark takes: the command gets `engine`, `master`,
    `settings` and `pack`.
    """
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "--engine",
        type=click.Choice(ENGINES),
        default=LOCAL,
        show_default=True,
        help="Use the threads of this machine, or a Spark cluster. The results are the same.",
    ),
    click.option(
        "--master",
        metavar="URL",
        envvar="SPARK_REMOTE",
        show_envvar=True,
        help=(
            "The Spark master: spark://HOST:PORT, yarn, k8s://..., or a server of Spark Connect:"
            " sc://HOST:PORT. Default: local[*]."
        ),
    ),
    click.option(
        "--conf",
        "settings",
        metavar="KEY=VALUE",
        multiple=True,
        help="A Spark setting. May be repeated.",
    ),
    click.option(
        "--pack",
        metavar="DIR",
        type=LocalPath(file_okay=False, path_type=Path),
        help=(
            "The output of `treefold sweep pack`, for Spark executors that do not have Treefold"
            " installed."
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class SparkPlace:
    """Which Spark runs the jobs of a command, as `spark_options` give it."""

    master: str | None
    settings: tuple[str, ...]
    pack: Path | None


def check_spark_options(
    engine: str,
    *,
    threads: int | None = None,
    master: str | None,
    settings: tuple[str, ...],
    pack: Path | None,
) -> None:
    """Refuse options that are for the other engine, and a malformed master.

    Raises:
        UsageError: there is one.
    """
    source = click.get_current_context().get_parameter_source("master")
    is_chosen = master and source is not ParameterSource.ENVIRONMENT
    if engine == LOCAL and (is_chosen or settings or pack):
        raise UsageError("--master, --conf and --pack are for --engine spark")
    if pack and (master or "local").startswith("local"):
        raise UsageError("--pack is for the executors of a cluster: give its --master")
    if engine == SPARK and master:
        check_master(master)
    if engine == SPARK and threads:
        raise UsageError("--threads is for the local engine; with Spark use --master 'local[N]'")

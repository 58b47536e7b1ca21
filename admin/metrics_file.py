"""The option `--metrics-file`: what a command found, for Prometheus' node_exporter."""

from pathlib import Path

import click

from admin.paths import LocalPath
from runtime.errors import UsageError

metrics_file_option = click.option(
    "--metrics-file",
    type=LocalPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help=(
        "Write metrics for the textfile collector of Prometheus' node_exporter, which reads *.prom"
        " files in its folder."
    ),
)


def check_metrics_file(path: Path | None) -> None:
    """Check before the work that there is a folder for the file.

    Raises:
        UsageError: there is none.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"--metrics-file: there is no folder {path.absolute().parent}")

"""`treefold sweep pack`: what executors need that have neither our code nor our
libraries.
"""

from pathlib import Path

import click

from admin.output import print_json, print_line, size_text
from runtime.disk import Disk
from spark.pack import pack as make


@click.command()
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Where to put them; what an earlier run put there is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def pack(out: Path, *, as_json: bool) -> None:
    """Pack our code and the libraries it needs for Spark executors.

    treefold.zip is our code, for --py-files; treefold-env.tar.gz holds the libraries of
    this very installation, for --archives, made without a network. Executors need a
    Python of the same minor version on the same kind of machine. `treefold sweep run
    --engine spark --pack DIR` takes both along.
    """
    packed = make(out, Disk())
    if as_json:
        print_json(
            {
                "code": str(packed.code),
                "environment": str(packed.environment),
                "distributions": list(packed.distributions),
            }
        )
        return
    for path in (packed.code, packed.environment):
        print_line(f"{path}  {size_text(path.stat().st_size)}")
    print_line(", ".join(packed.distributions))

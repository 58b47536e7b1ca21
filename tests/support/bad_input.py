"""Commands given what they must refuse: run in this process, with a proof that they
said so and touched nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from click.testing import CliRunner, Result

from admin.cli import treefold
from tests.support.volumes import state_of


def run(*arguments: object, stdin: str = "") -> Result:
    """A command that may end in any way but by an exception."""
    result = CliRunner().invoke(treefold, [str(argument) for argument in arguments], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(
        result.exception
    )
    assert "Traceback" not in result.output
    return result


def refused(code: str, exit_status: int, *arguments: object, stdin: str = "") -> str:
    """The message of a command that ends with this code and exit status, and has
    printed no result.
    """
    result = run(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (exit_status, ""), result.output
    # What Click refuses, it says in its own way.
    head = ("Usage: ", "Error: ") if code == "click" else f"error [{code}]: "
    assert result.stderr.startswith(head), result.stderr
    return result.stderr


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """What happens inside leaves every entry under the folder as it was: kind, mode,
    time of change, content.
    """
    before = state_of(folder)
    yield
    assert state_of(folder) == before

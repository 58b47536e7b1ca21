"""Commands given what they must refuse: run in this process, with a proof that they
said so and touched nothing.
"""

import os
import tempfile
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


@contextmanager
def another_user() -> Iterator[None]:
    """What happens inside happens as a user without rights: nothing is forbidden to
    root. For anybody else, a mode of 0 forbids enough.
    """
    me = os.geteuid()
    try:
        if me == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(me)


@contextmanager
def forbidden(path: Path) -> Iterator[None]:
    """This path is of mode 0 meanwhile."""
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        yield
    finally:
        path.chmod(mode)


@contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that every user may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="treefold-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)

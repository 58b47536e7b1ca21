"""Paths as options of commands."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from runtime.errors import DiskError

if TYPE_CHECKING:
    from chunktable.files import AnyPath


def state_home() -> Path:
    """The folder of what commands keep for the user who runs them.

    Raises:
        DiskError: the user has no home folder.
    """
    given = os.environ.get("XDG_STATE_HOME")
    try:
        return Path(given or Path.home() / ".local" / "state") / "treefold"
    except RuntimeError as error:
        raise DiskError(f"there is no folder for state: {error}") from error


def is_address(name: str) -> bool:
    """Whether a name begins with a scheme: `s3://bucket`, or with a slash too few."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", name) is not None


class LocalPath(click.Path):
    """A local folder or file. An empty path, for example from an unset variable, must
    not mean the current folder, and an address must not make a folder of its name.
    """

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """The path as click.Path converts it; an empty path is an error."""
        if not os.fspath(value):
            self.fail("it is empty", param, ctx)
        if is_address(os.fspath(value)):
            self.fail(
                f"{os.fspath(value)} is an address. Results are written to this machine: give a"
                " folder, mount the store, or copy the folder there afterwards",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


class OutPath(click.ParamType["AnyPath"]):
    """A local folder, or the address of one in a bucket."""

    name = "path"

    def convert(
        self, value: "str | AnyPath", param: click.Parameter | None, ctx: click.Context | None
    ) -> "AnyPath":
        """The path; another address than one of S3 is an error."""
        if not isinstance(value, str):
            return value
        if "://" in value:
            # Imported here: other commands have paths too, and no pyarrow.
            from chunktable.files import path_of

            return path_of(value)
        return Path(os.fsdecode(_FOLDER.convert(value, param, ctx)))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Folders of this machine."""
        return _FOLDER.shell_complete(ctx, param, incomplete)


_FOLDER = LocalPath(file_okay=False, path_type=Path)

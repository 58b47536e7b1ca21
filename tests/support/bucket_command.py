"""`treefold bucket` as a real process, over buckets in folders."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from click.testing import CliRunner

from admin.cli import treefold
from replicator.stores.opening import open_store
from replicator.stores.port import ObjectProperties, Store
from tests.support.processes import ROOT
from tests.support.stores import ANYTHING

RUN_S = 120
PROPERTIES = ObjectProperties(metadata=(("owner", "ann"),), tags=(("team", "red"),))


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def documents(self) -> list[dict[str, object]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def last(self) -> dict[str, object]:
        """The last of them."""
        return self.documents[-1]


@dataclass(frozen=True)
class BucketCommand:
    """Runs commands with a home of its own; no test finds the state of another."""

    home: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str) -> Ended:
        """Run `treefold bucket` to its end."""
        with self.start(*arguments) as process:
            stdout, stderr = process.communicate(timeout=RUN_S)
        assert "Traceback" not in stderr
        return Ended(process.returncode, stdout, stderr)

    def call(self, *arguments: str) -> Ended:
        """The same in this process, for one command of several: to start a process
        takes longer than all that most of them do.
        """
        environment = {"XDG_STATE_HOME": str(self.home), **self.environment}
        done = CliRunner().invoke(treefold, ["bucket", *arguments], env=environment)
        assert "Traceback" not in done.stderr
        assert done.exception is None or isinstance(done.exception, SystemExit)
        return Ended(done.exit_code, done.stdout, done.stderr)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Begin it."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        return subprocess.Popen(
            [sys.executable, "-m", "admin.cli", "bucket", *arguments],
            cwd=ROOT,
            env={**inherited, "XDG_STATE_HOME": str(self.home), **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def opened(folder: Path) -> AbstractContextManager[Store]:
    """The bucket in a folder, created as needed."""
    return open_store(f"local:{folder}", may_write=True, create=True)


def write(folder: Path, bodies: Mapping[str, bytes]) -> None:
    """Write objects with PROPERTIES to the bucket in a folder."""
    with opened(folder) as store:
        for key, body in bodies.items():
            store.writer.put(key, body, PROPERTIES, ANYTHING)


def bodies_in(folder: Path) -> dict[str, bytes]:
    """All current objects of the bucket in a folder."""
    found = {}
    with opened(folder) as store:
        for facts in store.lister.list_objects(""):
            with store.reader.read(facts) as pieces:
                found[facts.key] = b"".join(pieces)
    return found


def flip_a_bit(folder: Path, body: bytes) -> None:
    """Damage the data file that holds a body, behind the back of its bucket."""
    files = (one for one in (folder / "data").rglob("*") if one.is_file())
    path = next(one for one in files if one.read_bytes() == body)
    path.write_bytes(bytes([body[0] ^ 1]) + body[1:])

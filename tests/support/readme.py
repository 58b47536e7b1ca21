"""The README as an operator follows it: its blocks, each on the machines that it names,
with the paths and addresses of a sandbox in place of those of a cluster.
"""

import os
import re
import socket
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes import ROOT
from tests.support.waiting import wait_until

WITHIN_S = 120
# Exit statuses of a step that did what it should; a scan may find something.
_DONE = (0, 3)
_BLOCK = re.compile(r"^<!-- on: ([^\n]*) -->\n```(sh|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Compiled anew in every fresh folder: more than all the rest costs.
_NOT_SHARED = ("numba", "llvmlite", "treefold", "_editable", "__pycache__")


@dataclass(frozen=True)
class Block:
    """One block of commands or settings, and where it is for."""

    on: str
    kind: str
    text: str


def blocks(page: str) -> list[Block]:
    """The blocks of a page that say where they are for, in order."""
    return [Block(*found) for found in _BLOCK.findall(page)]


@dataclass
class Machine:
    """One machine of the sandbox: a folder in place of `/`, and a loopback address."""

    root: Path
    address: str
    # What is the same on all machines: where the package and the authority are.
    shared: Path
    network: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def here(self, text: str) -> str:
        """A text of the README with the paths and addresses of this machine."""
        text = text.replace("10.0.0.5", self.address).replace("127.0.0.1", self.address)
        text = text.replace("10.0.0.", self.network).replace("~/", f"{self.root}/home/")
        for path, owner in (
            ("/opt/treefold", self.shared),
            ("/srv/pki", self.shared),
            ("/etc/treefold", self.root),
            ("/var/lib/treefold", self.root),
            ("/data/hdds", self.root),
        ):
            text = re.sub(rf"(?<![\w./]){path}", f"{owner}{path}", text)
        return text

    @property
    def environment(self) -> Mapping[str, str]:
        """What a fresh shell of an operator has; nothing of ours."""
        return {
            "HOME": str(self.root / "home"),
            "PATH": f"{self.shared}/opt/treefold/bin:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            # Offline: the wheel alone, and what it requires is there already.
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def write(self, text: str) -> None:
        """The settings of a block, in the file that its first line names."""
        first, _, _ = text.partition("\n")
        path = Path(self.here(first.removeprefix("# ")))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.here(text))

    def run(self, text: str, folder: Path) -> str:
        """The commands of a block, in one shell, as they stand; what they print."""
        lines = self.here(text).splitlines()
        script = "".join(f'{line}\necho "status: $?" >&2\n' for line in lines)
        done = subprocess.run(
            ["bash", "-u", "-c", script],
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        statuses = [int(one) for one in re.findall(r"^status: (\d+)$", done.stderr, re.MULTILINE)]
        assert statuses, done.stderr
        assert all(one in _DONE for one in statuses), f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, line: str, port: int) -> None:
        """A command that runs on, until its port answers."""
        log = self.root / "log"
        with log.open("wb") as said:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.here(line)}"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        self.processes.append(process)

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            with suppress(OSError), socket.create_connection((self.address, port)):
                return True
            return False

        wait_until(is_ready, "the process to listen")

    def stop(self) -> Sequence[int]:
        """End what runs on; the exit statuses."""
        for process in self.processes:
            process.terminate()
        return [process.wait(WITHIN_S) for process in self.processes]


def share_packages(environment: Path) -> None:
    """Let a fresh environment use the installed packages, but for ours."""
    (site,) = environment.glob("lib/python3*/site-packages")
    installed = Path(sysconfig.get_paths()["purelib"])
    for path in installed.iterdir():
        target = site / path.name
        if not path.name.startswith(_NOT_SHARED) and not target.exists():
            os.symlink(path, target)


def build_wheel(python: str, folder: Path) -> None:
    """The wheel of this tree, as `make wheel` builds it."""
    command = [python, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

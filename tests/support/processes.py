"""Treefold as real processes: started on free loopback ports, waited for with a
deadline, always ended.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from signal import SIGABRT
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import wait_until

STOP_S = 20.0
ROOT = Path(__file__).resolve().parents[2]


def children_cpu_s() -> float:
    """CPU time, of user and system, of all children of this process that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class TreefoldProcess:
    """One long-running `treefold` command that takes `--port-file`; a context manager
    that ends it.
    """

    def __init__(
        self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it; what it prints goes to files in `folder`. Without an `environment`
        it has ours.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._port_file = folder / "port"
        self._port_file.unlink(missing_ok=True)
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        command = [
            sys.executable,
            "-m",
            "admin.cli",
            *arguments,
            "--port-file",
            str(self._port_file),
        ]
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_S)

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def address(self) -> str:
        """Where it listens, once it does."""

        def is_ready() -> bool:
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode}: {self.stderr}"
            )
            return self._port_file.exists()

        wait_until(is_ready, "the process to listen")
        return self._port_file.read_text().strip()

    def stop(self, signal: int) -> int:
        """Send a signal and return the exit status; fails if the process does not end
        in time.
        """
        self.process.send_signal(signal)
        return self.ended()

    def ended(self) -> int:
        """The exit status of a process that is expected to end by itself; if it does
        not end in time, the failure shows where each of its threads is.
        """
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(SIGABRT)
            self.process.wait(STOP_S)
            raise AssertionError(f"has not ended within {STOP_S:.0f} s: {self.stderr}") from None


class LineProcess:
    """A module of ours that prints its port, then answers each line of its input with a
    line of JSON; a context manager that ends it.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        # It ends with its input, so when this process ends too.
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = f"127.0.0.1:{self._line()}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        with self._process as process:
            process.kill()
            process.wait(STOP_S)

    def ask(self, command: str) -> Any:
        """Send a line; what the answer says."""
        assert self._process is not None
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return json.loads(self._line())

    def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self._command[2]} ended with {self._process.wait(STOP_S)}"
        return line.strip()


def controller(folder: Path, listen: str = "127.0.0.1:0") -> TreefoldProcess:
    """A controller whose state lies in `folder`, and is found there again by the next
    one.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "controller.toml"
    path.write_text(
        f'state_folder = "{folder / "state"}"\nlisten = "{listen}"\nmetrics = "127.0.0.1:0"\n'
    )
    return TreefoldProcess(
        folder / "run", "scm", "run", "--config", str(path), "--log-format", "json"
    )


def agent(
    folder: Path, volume: Path, address: str, *, return_to_closed: bool = False
) -> TreefoldProcess:
    """An agent that owns a volume, may repair it, and reports to the controller at
    `address`.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "agent.toml"
    path.write_text(
        f'state_folder = "{folder / "state"}"\nlisten = "127.0.0.1:0"\ncontroller = "{address}"\n'
        f'heartbeat_interval_s = 0.1\n[[volumes]]\npath = "{volume}"\nhold = "owner"\n'
        "[scan]\nenabled = false\nbytes_per_second = 0\n"
        f"[repair]\nenabled = true\nreturn_to_closed = {str(return_to_closed).lower()}\n"
    )
    return TreefoldProcess(
        folder / "run", "agent", "run", "--config", str(path), "--log-format", "json"
    )

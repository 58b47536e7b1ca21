"""A process of the product that a demo runs on loopback."""

import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ProcessFailedError

# Time for a process to start and write its address.
_START_S = 30.0
_STOP_S = 10.0
_POLL_S = 0.02


@dataclass(slots=True)
class DemoProcess:
    """A long-running `treefold` command that takes `--port-file`; `address` is where it
    listens. What it prints goes to `log` in its folder.
    """

    name: str
    command: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    address: str = ""

    def start(self) -> None:
        """Start the process, and wait until it listens.

        Raises:
            ProcessFailedError: the process ended, or did not listen within _START_S.
        """
        port_file = self.folder / "address"
        port_file.unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, "--port-file", str(port_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C goes to the command alone, which ends them in their order.
                process_group=0,
            )
        deadline = time.monotonic() + _START_S
        while not (port_file.exists() and port_file.read_text().strip()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise self.start_error()
            # A process of its own: its file is all that tells that it listens.
            time.sleep(_POLL_S)
        self.address = port_file.read_text().strip()

    def start_error(self) -> ProcessFailedError:
        """The error for a process that did not start, with the end of its log."""
        tail = (self.folder / "log").read_text(errors="replace").splitlines()[-8:]
        return ProcessFailedError(
            f"{self.name} did not start:\n" + "\n".join(tail), process=self.name
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process is running."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)

    def wait(self) -> None:
        """Wait for the process to end; after _STOP_S kill it."""
        if self.process:
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

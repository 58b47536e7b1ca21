"""A server that forks children to die in: it imports a module once and opens nothing,
so that each child starts clean and at once. (RocksDB's threads do not survive a fork,
so the test's own process cannot be the parent.)

`python -m tests.support.forks MODULE` reads lines of JSON, `[function, argument...]`,
and answers each with the exit code of the child that called it, negative for a signal.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
_CHILD_S = 60


class Forks:
    """The client's side; a context manager."""

    def __init__(self, module: str) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, function: str, *arguments: str | int) -> int:
        """Call the function in a child; its exit code."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([function, *arguments]) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(_CHILD_S)
        self._server.stdout.close()


def serve(module: ModuleType) -> None:
    """The server's loop."""
    for line in sys.stdin:
        function, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            # A child that hangs ends too, by another signal than the one that is waited
            # for.
            signal.alarm(_CHILD_S)
            code = 1
            try:
                getattr(module, function)(*arguments)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(importlib.import_module(sys.argv[1]))

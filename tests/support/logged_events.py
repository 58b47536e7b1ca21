"""What a process logs, as events, while a test looks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime.log import LogFormat, LogLevel, configure


@contextmanager
def logged() -> Iterator[None]:
    """Log as JSON, from info on."""
    configure(LogFormat.JSON, LogLevel.INFO)
    try:
        yield
    finally:
        configure()


def events(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    """The events so far; gRPC writes lines of its own to stderr."""
    return [json.loads(line) for line in capsys.readouterr().err.splitlines() if line[:1] == "{"]

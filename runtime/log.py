"""Log lines are events with fields, and each event has a listed name, since alerts are
made from the names.

Error: someone must act. Warning: it recovered by itself. Info: a state changed. Debug:
the rest. Lines go to stderr, as JSON or for a console, never to stdout, which belongs
to results. A package passes the list of its events to each of its loggers.
"""

import sys
from collections.abc import MutableMapping
from enum import StrEnum

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from merkle.errors import ReconcileError

# Events of any process; the others are those of a package, listed in its events.py.
PROCESS_EVENTS = frozenset({
    "process_started", "process_stopping", "process_stopped", "server_started", "request_failed",
})  # fmt: skip
# The field that carries a logger's catalogue as far as `check_event`.
_CATALOGUE = "catalogue"


class LogFormat(StrEnum):
    """How a line looks: for people, or one JSON object."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure(
    log_format: LogFormat = LogFormat.CONSOLE, level: LogLevel = LogLevel.WARNING
) -> None:
    """Choose format and level of this process's lines; called once, by a cli.py."""
    renderer: Processor
    if log_format is LogFormat.JSON:
        renderer = structlog.processors.JSONRenderer(default=str)
    else:
        # No colours: what is printed must not depend on where stderr happens to go.
        renderer = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)
    structlog.configure(
        processors=[
            _check_event,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level.value),
        logger_factory=_Stderr,
        cache_logger_on_first_use=False,
    )


def get_logger(component: str, events: frozenset[str] = frozenset()) -> FilteringBoundLogger:
    """A logger for one part of the program; its lines have the field `component`.

    `events` lists what the package of that part may log beside PROCESS_EVENTS.
    """
    logger: FilteringBoundLogger = structlog.get_logger(component=component, **{_CATALOGUE: events})
    return logger


def error_fields(error: ReconcileError) -> dict[str, object]:
    """The fields that describe an error: its stable code, its message and its facts."""
    return {**error.facts, "error_code": error.code, "error": error.message}


def _check_event(
    _logger: object, _method: str, line: MutableMapping[str, object]
) -> MutableMapping[str, object]:
    """Pass only listed events, and take the list out of the line."""
    catalogue = line.pop(_CATALOGUE, frozenset())
    assert isinstance(catalogue, frozenset)
    assert line["event"] in PROCESS_EVENTS | catalogue, (
        f"event {line['event']!r} is not listed in its package's events.py"
    )
    return line


class _Stderr:
    """Writes to what sys.stderr is at that moment; one write per line, so that lines of
    several threads do not mix.
    """

    def __init__(self, *_args: object) -> None:
        pass

    def msg(self, line: str) -> None:
        """Write one line, whatever its level."""
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    debug = info = warning = error = critical = msg


# Until a cli.py decides: structlog's own default would print to stdout.
configure()

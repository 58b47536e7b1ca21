"""Structured logs: a line is an event with fields.

Alerts match on event names, so each package lists its events and passes the list to its
loggers. Error: someone must act. Warning: it recovered by itself. Info: a state
changed. Debug: the rest. Lines go to stderr, as JSON or for a console; stdout is for
results.
"""

import sys
from collections.abc import MutableMapping
from enum import StrEnum
from types import ModuleType

# structlog imports rich where it finds it, for coloured tracebacks that this log never
# has: a tenth of the start of an agent.
_NO_RICH = ModuleType("rich")
_IS_HIDDEN = sys.modules.setdefault("rich", _NO_RICH) is _NO_RICH

import structlog  # noqa: E402
from structlog.typing import FilteringBoundLogger, Processor  # noqa: E402

from merkle.errors import ReconcileError  # noqa: E402
from runtime.json_numbers import EXACT_MAX, exact  # noqa: E402

if _IS_HIDDEN:
    del sys.modules["rich"]

# Events of any process. A package lists its own in its events.py.
PROCESS_EVENTS = frozenset({
    "process_started", "process_stopping", "process_stopped", "server_started", "request_failed",
    "thread_failed", "thread_lost", "reload_refused", "notify_failed", "call_refused",
    "refusal_unrecorded", "tls_not_valid", "tls_renewed", "tls_renewal_refused", "audit_failed",
    "audit_broken", "limits_changed", "settings_need_restart",
})  # fmt: skip
# The field that carries a logger's list of events to `_check_event`.
_CATALOGUE = "catalogue"


class LogFormat(StrEnum):
    """The format of a line: readable text or a JSON object."""

    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure(
    log_format: LogFormat = LogFormat.CONSOLE, level: LogLevel = LogLevel.WARNING
) -> None:
    """Set the format and level of this process's log; called once, by a cli.py."""
    renderer: Processor
    if log_format is LogFormat.JSON:
        renderer = structlog.processors.JSONRenderer(default=str)
    else:
        # No colours: the output must not depend on where stderr goes.
        renderer = structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0)
    structlog.configure(
        processors=[
            _check_event,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            _exact_numbers,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level.value),
        logger_factory=_Stderr,
        cache_logger_on_first_use=False,
    )


def get_logger(component: str, events: frozenset[str] = frozenset()) -> FilteringBoundLogger:
    """A logger for one component; its lines have the field `component`.

    `events` lists the events that it may log besides PROCESS_EVENTS.
    """
    logger: FilteringBoundLogger = structlog.get_logger(component=component, **{_CATALOGUE: events})
    return logger


def error_fields(error: ReconcileError) -> dict[str, object]:
    """The log fields of an error: its stable code, its message and its facts."""
    return {**error.facts, "error_code": error.code, "error": error.message}


def _check_event(
    _logger: object, _method: str, line: MutableMapping[str, object]
) -> MutableMapping[str, object]:
    """Check that the event is listed, and remove the list from the line."""
    catalogue = line.pop(_CATALOGUE, frozenset())
    assert isinstance(catalogue, frozenset)
    assert line["event"] in PROCESS_EVENTS | catalogue, (
        f"event {line['event']!r} is not listed in its package's events.py"
    )
    return line


def _exact_numbers(
    _logger: object, _method: str, line: MutableMapping[str, object]
) -> MutableMapping[str, object]:
    """IDs of blocks as text, and whatever else readers of JSON would round."""
    for name, value in line.items():
        if isinstance(value, int) and (name == "block_id" or abs(value) > EXACT_MAX):
            line[name] = exact(value)
    return line


class _Stderr:
    """Writes to the current sys.stderr, one write per line: lines of several threads do
    not mix.
    """

    def __init__(self, *_args: object) -> None:
        pass

    def msg(self, line: str) -> None:
        """Write one line of any level."""
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    debug = info = warning = error = critical = msg


# The default until a cli.py configures the log: structlog's own prints to stdout.
configure()

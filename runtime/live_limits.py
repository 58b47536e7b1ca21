"""Limits that change while a process runs: it reads its configuration again at SIGHUP.

The file is the one place where a limit is set, so that a restart changes nothing. Each
limit in effect is shown with its value, where it was set, and since when.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from runtime.config import Settings

# Where a limit was set that no file names.
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class LiveLimit:
    """A limit in effect. `name` is its key in the configuration; `value` 0 means no
    limit. `set_at_s` is in seconds since the epoch.
    """

    name: str
    value: int
    set_by: str
    set_at_s: float


def limits_of(
    settings: Settings,
    names: Sequence[str],
    *,
    file: Path | None,
    now_s: float,
    earlier: Sequence[LiveLimit] = (),
) -> tuple[LiveLimit, ...]:
    """The limits of these names in some settings, which were read from a file.

    A limit that is as it was `earlier` keeps the time and place of its setting.
    """
    held = {limit.name: limit for limit in earlier}
    found = []
    for name in names:
        value, is_set = _value(settings, name)
        set_by = str(file) if is_set and file else _DEFAULT
        before = held.get(name)
        is_same = before is not None and (before.value, before.set_by) == (value, set_by)
        found.append(before if before and is_same else LiveLimit(name, value, set_by, now_s))
    return tuple(found)


def other_changes(before: Settings, after: Settings, names: Sequence[str]) -> tuple[str, ...]:
    """The keys, other than these limits, whose values differ: they need a restart."""
    old, new = dict(_leaves(before.model_dump())), dict(_leaves(after.model_dump()))
    changed = (key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return tuple(sorted(set(changed) - set(names)))


def log_reload(
    log: FilteringBoundLogger,
    before: Sequence[LiveLimit],
    after: Sequence[LiveLimit],
    others: Sequence[str],
) -> None:
    """Log each limit that changed, and the keys that need a restart."""
    held = {limit.name: limit.value for limit in before}
    for limit in after:
        if held.get(limit.name) != limit.value:
            log.info(
                "limits_changed",
                setting=limit.name,
                value=limit.value,
                earlier=held.get(limit.name),
                set_by=limit.set_by,
            )
    if others:
        log.warning("settings_need_restart", settings=list(others))


def _value(settings: Settings, name: str) -> tuple[int, bool]:
    *tables, key = name.split(".")
    for table in tables:
        settings = getattr(settings, table)
    return int(getattr(settings, key)), key in settings.model_fields_set


def _leaves(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value

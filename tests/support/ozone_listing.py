"""Pages of listings as an OM makes them: it walks by bytes, reads a row more than it
answers, sorts them by UTF-16 units and drops the last; a row to begin after is among
those it reads.
"""

from collections.abc import Iterable

from ozone.manager_values import FileStatus, KeyFacts


def utf16(name: str) -> bytes:
    """The order of Java's strings."""
    return name.encode("utf-16-be")


def listed_key(name: str) -> KeyFacts:
    """A key of which the name alone counts."""
    return KeyFacts("v", "b", name, 0, 1, object_id=1, update_id=1)


class ListedBucket:
    """A bucket without directories."""

    def __init__(self, names: Iterable[str], *, rows_max: int) -> None:
        """A page has `rows_max` rows at most, whatever is asked for."""
        self.names, self._rows_max = sorted(names, key=str.encode), rows_max

    def page(self, prefix: str, after: str, count: int) -> tuple[tuple[KeyFacts, ...], bool]:
        """See ManagerClient.list_keys."""
        count = min(count, self._rows_max)
        start = max(prefix, after, key=str.encode) if after else prefix
        found = [
            name
            for name in self.names
            if name.encode() >= start.encode() and name.startswith(prefix)
        ][: count + 1]
        found.sort(key=utf16)
        rows = [name for name in found if name != after][:count]
        return tuple(map(listed_key, rows)), len(rows) == count


class ListedTree:
    """A bucket with directories."""

    def __init__(self, files: Iterable[str], *, rows_max: int) -> None:
        self._files, self._rows_max = set(files), rows_max

    def page(self, directory: str, start: str, count: int) -> tuple[FileStatus, ...]:
        """See ManagerClient.list_directory."""
        begin = f"{directory}/" if directory else ""
        below = [name[len(begin) :] for name in self._files if name.startswith(begin)]
        names = {one.partition("/")[0]: "/" in one for one in below}
        first = start[len(begin) :].encode() if start else b""
        found = [name for name in sorted(names, key=str.encode) if name.encode() >= first]
        # All that a client asks for beyond this makes no difference to it.
        rows = sorted(found[:count][: self._rows_max], key=utf16)
        return tuple(FileStatus(listed_key(begin + name), names[name]) for name in rows)

"""The keys of a bucket, all of them, in the order of their UTF-8 bytes.

The OM walks its database in this order, but sorts each page by UTF-16 units, in which a
character beyond U+FFFF comes before one from U+E000 on. It reads one row more than a
page has and drops the last of that order, except that a page after a key has just its
rows. So what a careless pager loses differs by request:

* Keys: the next page begins after the last row as it was returned; rows come again.
  The first page begins after no key, and may lack the very first. It has one row, so
  that all others follow; where that row shows that another may be before it, larger
  pages are asked for, which drop other rows.
* Entries of a directory: the next page begins at the greatest row by bytes, inclusive.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ozone.manager_values import FileStatus, KeyFacts
from runtime.errors import RemoteProtocolError

# A page of keys with a prefix after a key, of at most so many rows; whether there are
# more.
KeyPage = Callable[[str, str, int], tuple[tuple[KeyFacts, ...], bool]]
# Entries of a directory from one on, inclusive, at most so many.
DirectoryPage = Callable[[str, str, int], tuple[FileStatus, ...]]

_ROWS = 1000
# By bytes the last text before a slash.
_BEFORE_SLASH = ".\U0010ffff"
_FIRST_BEYOND_UTF16 = "\U00010000"
_PRIVATE_USE = range(0xE000, 0x10000)


def list_keys(page: KeyPage, prefix: str, after: str) -> Iterator[KeyFacts]:
    """All keys with a prefix after a key, by their bytes, each once.

    Raises:
        RemoteProtocolError: the listing does not advance, or has other keys.
    """
    found = _first_rows(page, prefix, after)
    held = {one.name: one for one in found if one.name.startswith(prefix)}
    if not found:
        return
    # Rows up to here are final; after it they come again.
    last = min((one.name for one in found), key=str.encode)
    end = prefix.encode() + b"\xff"
    while True:
        rows, has_more = page(_plain(prefix), _seek(last), _ROWS)
        fresh = [one for one in rows if one.name.encode() > last.encode()]
        held |= {one.name: one for one in fresh if one.name.startswith(prefix)}
        ready = fresh[-1].name if fresh else None
        if has_more and ready is None:
            raise RemoteProtocolError(f"the listing of keys after {last!r} does not advance")
        is_over = not has_more or ready is None or ready.encode() > end
        for name in sorted(held, key=str.encode):
            if not is_over and ready is not None and name.encode() > ready.encode():
                break
            yield held.pop(name)
        if is_over or ready is None:
            return
        last = ready


def _plain(prefix: str) -> str:
    """A prefix as the OM takes it: one slash or blanks alone are none to it."""
    return "" if prefix == "/" or prefix.isspace() else prefix


def _seek(after: str) -> str:
    """The key to begin after, or one shortly before, where the OM takes it for none."""
    if after == "/":
        return _BEFORE_SLASH
    return "" if after.isspace() else after


def _first_rows(page: KeyPage, prefix: str, after: str) -> list[KeyFacts]:
    """Rows of which one is the very first after `after`."""
    rows, has_more = page(_plain(prefix), _seek(after), 1)
    if rows and rows[0].name.encode() <= after.encode():
        # It began before.
        rows, has_more = page(_plain(prefix), _seek(after), _ROWS)
    found = [one for one in rows if one.name.encode() > after.encode()]
    if not found or max(found[0].name) < _FIRST_BEYOND_UTF16:
        return found
    first = found[0].name
    larger, has_more = page(_plain(prefix), _seek(after), _ROWS)
    found += [one for one in larger if one.name.encode() > after.encode()]
    if not has_more:
        return found
    before = [one for one in larger if one.name.encode() < first.encode()]
    if before:
        return found
    for at, character in enumerate(first):
        if character < _FIRST_BEYOND_UTF16 or at < len(prefix):
            continue
        # One row of each prefix: the first of one cannot be dropped for another's.
        for number in _PRIVATE_USE:
            rows, _ = page(first[:at] + chr(number), "", _ROWS)
            found += [one for one in rows if one.name.encode() > after.encode()]
            if rows:
                return found
    return found


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A file of an FSO bucket by its whole key, or a directory: then it ends with a
    slash.
    """

    key: str
    facts: KeyFacts
    is_directory: bool


def walk_tree(
    page: DirectoryPage,
    prefix: str,
    after: str,
    *,
    with_directories: bool = False,
) -> Iterator[TreeFile]:
    """All files with a prefix after a key, by the bytes of their keys. A page of each
    directory on the way is in memory.

    Raises:
        RemoteProtocolError: the listing of a directory does not advance.
    """
    top = prefix.rpartition("/")[0]
    stack = [_entries(page, f"{top}/" if top else "")]
    while stack:
        one = next(stack[-1], None)
        if one is None:
            stack.pop()
        elif one.is_directory:
            is_on_the_way = one.key.startswith(prefix) or prefix.startswith(one.key)
            if is_on_the_way and not _is_over(one.key, after):
                if with_directories and one.key.startswith(prefix):
                    yield one
                stack.append(_entries(page, one.key))
        elif one.key.startswith(prefix) and one.key.encode() > after.encode():
            yield one


def _is_over(directory: str, after: str) -> bool:
    """Whether every key below a directory comes before or is this one."""
    return directory.encode() < after.encode() and not after.startswith(directory)


def _entries(page: DirectoryPage, directory: str) -> Iterator[TreeFile]:
    """The entries of a directory by bytes, directories by their name with a slash: that
    is the order of the keys below them.
    """
    # A directory waits until no entry can come that sorts before its slash.
    waiting = list[tuple[bytes, TreeFile]]()
    for name, one in _ordered_entries(page, directory):
        found = TreeFile(one.key.name, one.key, one.is_directory)
        while waiting and waiting[0][0] < name.encode():
            yield heapq.heappop(waiting)[1]
        if one.is_directory:
            key = f"{name}/"
            heapq.heappush(
                waiting, (key.encode(), TreeFile(directory + key, one.key, is_directory=True))
            )
        else:
            yield found
    while waiting:
        yield heapq.heappop(waiting)[1]


def _ordered_entries(page: DirectoryPage, directory: str) -> Iterator[tuple[str, FileStatus]]:
    """Names and entries of a directory by the bytes of their names, without slashes."""
    start, seen = "", b""
    while True:
        rows = page(directory.removesuffix("/"), start, _ROWS)
        fresh = dict[bytes, tuple[str, FileStatus]]()
        for one in rows:
            key = one.key.name.removesuffix("/")
            if not key.startswith(directory) or "/" in key[len(directory) :]:
                # A file of this name has no entries, and is answered itself.
                continue
            name = key[len(directory) :]
            if name and name.encode() > seen:
                fresh[name.encode()] = name, one
        for found in sorted(fresh):
            yield fresh[found]
        # A short page is not the last one: an OM may answer fewer rows than asked for.
        if not fresh:
            if len(rows) == _ROWS:
                raise RemoteProtocolError(f"the listing of {directory!r} does not advance")
            return
        seen = max(fresh)
        start = directory + fresh[seen][0]

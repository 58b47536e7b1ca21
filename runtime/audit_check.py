"""Check the chain of audit files offline (runtime.audit_chain), and read its lines.

The chain shows what was done to its lines, but not that its last ones are missing, nor
that somebody wrote all lines anew from some line on. Both show with a head that was
noted elsewhere: the hash of a line that must be there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path

from runtime.audit_chain import AuditLine, AuditTail, ChainEnd, parse_line
from runtime.disk import Disk

# Lines after a break that are searched for the one that is missing.
_SEARCHED_LINES_MAX = 1_000_000


class AuditFault(StrEnum):
    """What can be wrong with a line of a chain."""

    CHANGED = "changed"
    REMOVED = "removed"
    INSERTED = "inserted"
    REORDERED = "reordered"
    TORN = "torn"
    """The last line has no newline: a crash did that, or it is being written now."""
    TRUNCATED = "truncated"
    """No line has the known head."""


@dataclass(frozen=True, slots=True)
class AuditBreak:
    """The first line that does not hold: its file, its number there from 1, and why."""

    path: Path
    line: int
    fault: AuditFault
    detail: str


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What holds of a chain: all of it without a `broken`.

    `lines` of the chain hold, and `head` is the hash of the last of them. `unchained`
    lines precede the chain in its first file; the hash of all of them is part of it.
    `after_head` is the number of lines after the known head; None without one.
    """

    files: tuple[Path, ...]
    lines: int = 0
    head: str = ""
    unchained: int = 0
    after_head: int | None = None
    broken: AuditBreak | None = None


def audit_chains(paths: Sequence[Path], disk: Disk) -> list[tuple[Path, ...]]:
    """The files of each chain in these files and folders, oldest first.

    A file stands for itself, a folder for all audit files in it: `*.jsonl`, each with
    its full files. Full files of one audit file are one chain with it.

    Raises:
        DiskError: a folder cannot be listed.
    """
    wanted = dict[Path, set[Path]]()
    for path in paths:
        if disk.is_folder(path):
            names = [name for name in disk.names(path) if name.endswith(".jsonl")]
            given = [path / name for name in names]
        else:
            given = [path]
        for one in given:
            wanted.setdefault(_current(one), set()).add(one)
    return [tuple(sorted(files, key=_age)) for _, files in sorted(wanted.items())]


def check_chain(
    files: Sequence[Path], disk: Disk, *, known_head: str = "", after: str = ""
) -> AuditReport:
    """Check the files of one chain, oldest first.

    `known_head` is the hash of a line that must be there. A chain begins with number 0;
    if its first files were archived, `after` is the hash of their last line.

    Raises:
        DiskError: a file cannot be read.
    """
    parts = ((path, disk.read(path)) for path in files)
    return _check(AuditReport(tuple(files)), parts, known_head, after)


def check_tail(tail: AuditTail) -> AuditReport:
    """Check the last files of a chain that a process writes, and that the line which it
    wrote last is there. What precedes them is not checked.
    """
    first = next((data.split(b"\n", 1)[0] for _, data in tail.files if data), b"")
    line = parse_line(first)
    after = line.previous if line and line.sequence else ""
    report = AuditReport(tuple(path for path, _ in tail.files))
    return _check(report, tail.files, tail.head, after)


def _check(
    report: AuditReport, parts: Iterable[tuple[Path, bytes]], known_head: str, after: str
) -> AuditReport:
    """The report on files and their bytes, oldest first, as `check_chain`."""
    end: ChainEnd | None = None
    head_line: int | None = None
    for path, data in parts:
        *lines, torn = data.split(b"\n")
        start = 0
        if end is None and lines:
            start, end = _chain_start(lines, data, after)
            report = replace(report, unchained=start)
        for number in range(start, len(lines)):
            assert end is not None, "a file with a line has a start"
            line = parse_line(lines[number])
            if line is None or (line.sequence, line.previous) != (end.sequence, end.hash):
                broken = _break_at(path, lines, number, line, end)
                return replace(report, broken=broken)
            end = ChainEnd(line.sequence + 1, line.hash)
            report = replace(report, lines=report.lines + 1, head=line.hash)
            if line.hash == known_head:
                head_line = report.lines
        if torn:
            text = (
                f"the last line has {len(torn)} bytes and no newline: a crash cut it, or it is"
                " being written now; the next start replaces it by a line of kind cut"
            )
            return replace(report, broken=AuditBreak(path, len(lines) + 1, AuditFault.TORN, text))
    if known_head and head_line is None:
        text = f"no line has the hash {known_head}: the end is missing, or was written anew"
        broken = AuditBreak(report.files[-1], report.lines + 1, AuditFault.TRUNCATED, text)
        return replace(report, broken=broken)
    return replace(report, after_head=None if head_line is None else report.lines - head_line)


def read_lines(
    files: Sequence[Path], disk: Disk, *, note: Callable[[Path, int], None]
) -> Iterator[AuditLine]:
    """Yield the lines of a chain whose own hashes are right, unchecked against each
    other. `note` gets the file and the number of every other line.

    Raises:
        DiskError: a file cannot be read.
    """
    for path in files:
        for number, raw in enumerate(disk.read(path).split(b"\n"), start=1):
            line = parse_line(raw)
            if line is not None:
                yield line
            elif raw:
                note(path, number)


def _chain_start(lines: Sequence[bytes], data: bytes, after: str) -> tuple[int, ChainEnd]:
    """How many lines precede the chain, and what its first line must follow.

    Lines of no chain precede it only if its first line has the hash of all of them.
    """
    parsed = ((number, line) for number, raw in enumerate(lines) if (line := parse_line(raw)))
    number, line = next(parsed, (0, None))
    if after:
        return 0, ChainEnd(line.sequence if line and number == 0 else 0, after)
    before = sha256(data[: sum(len(raw) + 1 for raw in lines[:number])]).hexdigest()
    if line is not None and (line.sequence, line.previous) == (0, before):
        return number, ChainEnd(0, before)
    return 0, ChainEnd(0, sha256(b"").hexdigest())


def _break_at(
    path: Path, lines: Sequence[bytes], number: int, line: AuditLine | None, end: ChainEnd
) -> AuditBreak:
    """What is wrong with a line where the chain continues with `end`."""
    place = f"line {number + 1}"
    following = _following(lines, number)
    if line is None:
        if any((one.sequence, one.previous) == (end.sequence, end.hash) for one in following[:1]):
            text = f"{place} is not of the chain, which goes on after it"
            return AuditBreak(path, number + 1, AuditFault.INSERTED, text)
        text = f"{place} is not what was written: it has no right hash, or is no JSON object"
        return AuditBreak(path, number + 1, AuditFault.CHANGED, text)
    if line.sequence > end.sequence:
        moved = any(one.sequence == end.sequence for one in following)
        fault = AuditFault.REORDERED if moved else AuditFault.REMOVED
        text = f"{place} has number {line.sequence}; number {end.sequence} is expected"
        return AuditBreak(path, number + 1, fault, text)
    if line.sequence < end.sequence:
        text = f"{place} has number {line.sequence}, which was before; {end.sequence} is expected"
        return AuditBreak(path, number + 1, AuditFault.INSERTED, text)
    # Either may be the one that was replaced: the earlier one is not proven.
    text = f"{place} was written after another line than the one before it"
    return AuditBreak(path, max(number, 1), AuditFault.CHANGED, text)


def _following(lines: Sequence[bytes], number: int) -> list[AuditLine]:
    later = lines[number + 1 : number + 1 + _SEARCHED_LINES_MAX]
    return [line for raw in later if (line := parse_line(raw)) is not None]


def _current(path: Path) -> Path:
    """The audit file that a full file belongs to; other files are their own."""
    stem, _, digits = path.stem.rpartition("-")
    if stem and len(digits) == 12 and digits.isascii() and digits.isdigit():
        return path.with_name(f"{stem}{path.suffix}")
    return path


def _age(path: Path) -> tuple[bool, str]:
    """A key that sorts the files of one chain, the oldest first."""
    return path == _current(path), path.name

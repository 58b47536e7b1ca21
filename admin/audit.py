"""`treefold audit`: check and show the audit files of processes, offline."""

import string
from collections.abc import Sequence
from pathlib import Path

import click

from admin.answer import json_option
from admin.command_result import command_result
from admin.option_types import WholeNumber
from admin.paths import LocalPath
from runtime.audit_chain import AuditLine
from runtime.audit_check import AuditReport, audit_chains, check_chain, read_lines
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_line, print_table

_HASH_DIGITS = 64
_NOT_FOUND = "No audit file was found: nothing is known."
_paths = click.argument(
    "paths",
    metavar="FILE|FOLDER...",
    nargs=-1,
    required=True,
    type=LocalPath(exists=True, path_type=Path),
)


@click.group(short_help="Check and show who did what: the audit files, offline.")
def audit() -> None:
    """Check and show the audit files of agents, controllers and verifiers.

    Each line names who ordered what and why, and what was written or refused. It has
    the hash of the line before it. FOLDER stands for all audit files in it: the state
    folder of a process.
    """


@audit.command(short_help="Check every line of audit files.")
@_paths
@click.option(
    "--head",
    metavar="HASH",
    default="",
    help="A head that was printed before: it must be in the chain. Finds a missing end.",
)
@click.option(
    "--after",
    metavar="HASH",
    default="",
    help="The head of the files that were archived: the chain begins after it.",
)
@json_option
def verify(paths: tuple[Path, ...], head: str, after: str, as_json: bool) -> None:
    """Check every line: its own hash, its number, and the hash of the line before it.

    The first line that does not hold is named. A chain alone does not show that its
    last lines are missing, or that all were written anew from some line on. Note the
    head that this prints elsewhere, and give it as --head the next time.

    Exit status: 0 every line holds, 3 one does not, 1 a chain has no line.
    """
    with command_result("audit verify", as_json=as_json) as answer:
        for name, text in (("--head", head), ("--after", after)):
            if text and not _is_hash(text):
                raise UsageError(f"{name}: {text!r} is not a hash of {_HASH_DIGITS} digits")
        disk = Disk()
        chains = audit_chains(paths, disk)
        if (head or after) and len(chains) > 1:
            raise UsageError(
                "--head and --after are of one chain, and these are several",
                hint="Give the files of one of them.",
            )
        reports = [
            check_chain(files, disk, known_head=head.lower(), after=after.lower())
            for files in chains
        ]
        answer.data = {"chains": [_report_json(report) for report in reports]}
        if not reports:
            answer.fail("audit_not_found", _NOT_FOUND)
            answer.exit_status = ExitCode.FINDINGS if head or after else ExitCode.FAILED
        if not as_json:
            for report in reports:
                _print_report(report, has_head=bool(head))
        empty = [report for report in reports if not (report.lines or report.broken)]
        if empty:
            answer.fail("audit_empty", f"{empty[0].files[-1]} has no line: nothing is known.")
            answer.exit_status = ExitCode.FAILED
        if any(report.broken for report in reports):
            answer.exit_status = ExitCode.FINDINGS


@audit.command(short_help="Print the last lines of audit files.")
@_paths
@click.option("--container", type=WholeNumber(1), help="Only lines of this container.")
@click.option("--job", default="", metavar="ID", help="Only lines of this job.")
@click.option("--who", default="", metavar="NAME", help="Only what this requester ordered.")
@click.option(
    "--limit",
    type=WholeNumber(1),
    default=50,
    show_default=True,
    help="Print at most this many, the latest.",
)
@json_option
def tail(
    paths: tuple[Path, ...],
    container: int | None,
    job: str,
    who: str,
    limit: int,
    as_json: bool,
) -> None:
    """Print the last lines, oldest first. They are not checked; see `audit verify`.

    Lines without a right hash are not shown, and a warning counts them.
    """
    with command_result("audit tail", as_json=as_json) as answer:
        disk, left = Disk(), list[tuple[Path, int]]()
        chains = audit_chains(paths, disk)
        if not chains:
            answer.fail("audit_not_found", _NOT_FOUND)
            return
        found = [
            line
            for files in chains
            for line in read_lines(
                files, disk, note=lambda path, number: left.append((path, number))
            )
            if _is_wanted(line, container, job, who)
        ]
        if left:
            path, number = left[0]
            lines = "1 line is" if len(left) == 1 else f"{len(left)} lines are"
            answer.warn(
                f"{lines} not shown, the first is line {number} of {path}: without a right hash, so"
                " damaged, or older than the chain. `treefold audit verify` says which"
            )
        found.sort(key=lambda line: str(line.fields.get("time", "")))
        answer.data = {"lines": [dict(line.fields) for line in found[-limit:]]}
        if not as_json:
            _print_lines(found[-limit:])


def _is_wanted(line: AuditLine, container: int | None, job: str, who: str) -> bool:
    fields = line.fields
    return (
        (container is None or fields.get("container") == container)
        # The later rounds and the undo of a job have its ID, a dot and more.
        and (not job or str(fields.get("job", "")).partition(".")[0] == job.partition(".")[0])
        and (not who or fields.get("who") == who)
    )


def _print_lines(lines: Sequence[AuditLine]) -> None:
    named = {"time", "kind", "container", "job", "who", "why", "seq", "prev", "hash"}
    rows = []
    for line in lines:
        fields = line.fields
        rest = [
            f"{name}={value}"
            for name, value in fields.items()
            if name not in named and value not in ("", None)
        ]
        first = [str(fields.get(name, "")) for name in ("time", "kind", "container", "job", "who")]
        rows.append((*first, " ".join((str(fields.get("why", "")), *rest)).strip()))
    columns = ("TIME", "KIND", "CONTAINER", "JOB", "WHO", "WHAT")
    print_table(columns, rows, numbers=("CONTAINER",), folded=("WHAT",))


def _report_json(report: AuditReport) -> JsonObject:
    broken = report.broken
    return {
        "files": [str(path) for path in report.files],
        "valid": broken is None if report.lines or broken else None,
        "lines": report.lines,
        "head": report.head or None,
        "linesBeforeChain": report.unchained,
        "linesAfterHead": report.after_head,
        "broken": None
        if broken is None
        else {
            "file": str(broken.path),
            "line": broken.line,
            "fault": broken.fault.value,
            "detail": broken.detail,
        },
    }


def _print_report(report: AuditReport, *, has_head: bool) -> None:
    print_line(", ".join(str(path) for path in report.files))
    if report.broken is not None:
        broken = report.broken
        print_line(f"  broken [{broken.fault}]: {broken.path}: {broken.detail}", style="red")
        print_line(f"  lines that hold before it: {report.lines}")
        return
    if not report.lines:
        print_line("  no line", style="yellow")
        return
    print_line(f"  all lines hold: {report.lines}, head {report.head or 'none'}", style="green")
    if report.unchained:
        print_line(f"  {report.unchained} lines are older than the chain, which covers them")
    if has_head:
        print_line(f"  the known head is in it; lines after it: {report.after_head}")
    else:
        print_line("  Whether lines are missing at the end shows with --head only.")


def _is_hash(text: str) -> bool:
    return len(text) == _HASH_DIGITS and set(text) <= set(string.hexdigits)

"""`treefold bucket`: copy a bucket between two stores, and show that the copy is equal.

Results go to stdout, plans and progress to stderr. The package `replicator` does the
work; this module parses options and prints.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from proof.item import EvidenceLevel
from replicator.copier import CopierLimits
from replicator.crossing import lacking
from replicator.ledger import PairLedger
from replicator.pair import check_pair
from replicator.stores.opening import open_store
from replicator.stores.port import Capabilities, Store
from replicator.sync import BucketSync, SyncOptions, SyncPlan, SyncReport
from replicator.verify import BucketVerification, VerificationTally, VerifiedKey
from runtime.config import parse_rate
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_json, print_line, print_table, size_text
from runtime.progress import ProgressStyle, progress_sink
from runtime.rate_limit import SystemClock
from runtime.retry import Backoff

# Objects read at a time by `verify --level read`.
_READERS = 8
# Failures and differences that are printed for people; --json has all.
_LINES_SHOWN = 50
_LEVELS = {level.name.lower(): level for level in EvidenceLevel}

_json = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, a line each.")
_prefix = click.option(
    "--prefix", metavar="P", default="", help="Only keys that begin with P, at both sides."
)
_state = click.option(
    "--state",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help=(
        "What earlier runs of this pair recorded. Default: a folder of its own below"
        " ~/.local/state/treefold/buckets."
    ),
)


@click.group()
def bucket() -> None:
    """Copy a bucket between two stores, and show that the copy is equal.

    A store is local:PATH, or s3://BUCKET/PREFIX?endpoint_url=URL with credentials from
    the environment, ~/.aws, or ?profile=NAME.
    """


@bucket.command()
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@click.option("--delete", is_flag=True, help="Delete objects that exist at the target only.")
@_prefix
@click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")
@_state
@click.option(
    "--rate",
    metavar="RATE",
    help='The most bytes of objects per second, such as "20MiB/s". Default: no limit.',
)
@click.option(
    "--transfers",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Objects copied at a time.",
)
@_json
@click.pass_obj
def sync(
    style: ProgressStyle | None,
    source: str,
    target: str,
    delete: bool,
    prefix: str,
    dry_run: bool,
    state: Path | None,
    rate: str | None,
    transfers: int,
    as_json: bool,
) -> None:
    """Make TARGET hold the current objects of SOURCE, and compare them afterwards.

    Metadata, tags, content headers and ACLs cross where both stores keep them; what
    does not cross is printed before the first byte. A change of metadata alone moves no
    data, and of a changed large object only the changed windows are sent where the
    target can copy ranges. A run that was killed is continued by the same command.

    Exit status: 0 the sides are equal at the level printed, 3 they are not (objects
    that exist at the target only are differences, unless --delete removes them), 5 some
    objects could not be copied.
    """
    with _opened_pair(source, target, state) as (ours, theirs, ledger):
        options = SyncOptions(
            prefix=prefix,
            delete=delete,
            bytes_per_second=_rate(rate),
            copier_limits=CopierLimits(objects=transfers, parts=transfers),
        )
        with (
            progress_sink(style or ProgressStyle()) as progress,
            BucketSync(
                ours,
                theirs,
                ledger,
                options,
                progress=progress,
                clock=SystemClock(),
                sleep=time.sleep,
                is_cancelled=lambda: False,
            ) as run,
        ):
            for limitation in run.limitations:
                progress.note(limitation)
            plan = run.plan()
            if dry_run:
                _print_plan(run, plan, as_json=as_json)
                return
            progress.note(_plan_text(plan))
            report = run.execute(plan)
    if as_json:
        print_json(report.document())
    else:
        _print_report(report)
    if report.failed_count:
        raise click.exceptions.Exit(ExitCode.PARTLY)
    if not report.equal:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


@bucket.command()
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@click.option(
    "--level",
    "level_name",
    type=click.Choice(list(_LEVELS)),
    default="recorded",
    show_default=True,
    help=(
        "listed: keys and sizes. recorded: also hashes that the stores recorded, and properties."
        " read: every object is read at both sides."
    ),
)
@_prefix
@_state
@_json
@click.pass_obj
def verify(
    style: ProgressStyle | None,
    source: str,
    target: str,
    level_name: str,
    prefix: str,
    state: Path | None,
    as_json: bool,
) -> None:
    """Compare TARGET with SOURCE, and print each key that differs. Changes nothing.

    Only `--level read` reads objects of the target. Without it, damage behind a store's
    own index is not seen, and objects of which the target recorded no comparable hash
    are compared by key and size; their number is printed as `listed`.

    Exit status: 0 equal at the levels printed, 3 not equal, 5 nothing differs but some
    keys changed while they were compared.
    """
    tally = VerificationTally()
    shown = 0
    with ExitStack() as opened:
        ours, theirs, ledger = opened.enter_context(
            _opened_pair(source, target, state, may_write=False)
        )
        progress = opened.enter_context(progress_sink(style or ProgressStyle()))
        readers = opened.enter_context(ThreadPoolExecutor(_READERS, "verify"))
        run = BucketVerification(
            ours,
            theirs,
            ledger,
            level=_LEVELS[level_name],
            readers=readers,
            sleep=time.sleep,
            backoff=Backoff(),
            is_cancelled=lambda: False,
        )
        progress.begin("verify", None, "keys")
        for key in run.keys(prefix):
            tally.add(key)
            progress.advance(1)
            if key.kind is None and not key.is_unsettled:
                continue
            shown += 1
            if as_json:
                print_json(_key_document(key))
            elif shown <= _LINES_SHOWN:
                print_line(f"{_kind_text(key):10} {key.key}")
        document = _verification_document(tally, theirs)
    if as_json:
        print_json(document)
    else:
        _print_verification(tally, theirs, shown)
    if tally.differences:
        raise click.exceptions.Exit(ExitCode.FINDINGS)
    if tally.unsettled or not _lists_all(ours, theirs):
        raise click.exceptions.Exit(ExitCode.PARTLY)


@bucket.command()
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@_json
def precheck(source: str, target: str, as_json: bool) -> None:
    """Print what two stores can do, and what would not cross between them.

    An S3 target is probed with scratch objects, which are removed again.
    """
    check_pair(source, target)
    with open_store(source, may_write=False) as ours, open_store(target, may_write=True) as theirs:
        limitations = lacking(ours.capabilities, theirs.capabilities)
        sides = {"source": ours.capabilities, "target": theirs.capabilities}
    if as_json:
        documents = {side: _capabilities_document(one) for side, one in sides.items()}
        print_json({**documents, "limitations": list(limitations)})
        return
    rows = [
        (name, *(_capability_text(getattr(one, name)) for one in sides.values()))
        for name in Capabilities.__dataclass_fields__
        if name != "reasons"
    ]
    print_table(("capability", "source", "target"), rows, folded=("source", "target"))
    for limitation in limitations:
        print_line(limitation)


@contextmanager
def _opened_pair(
    source: str, target: str, state: Path | None, *, may_write: bool = True
) -> Iterator[tuple[Store, Store, PairLedger]]:
    check_pair(source, target)
    with ExitStack() as opened:
        ours = opened.enter_context(open_store(source, may_write=False))
        theirs = opened.enter_context(open_store(target, may_write=may_write, create=may_write))
        folder = state or _default_state(source, target)
        if not may_write and state is None and not folder.exists():
            # A verification needs no state, and leaves none behind.
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="treefold-")))
        ledger = PairLedger(folder.absolute(), source=ours.address, target=theirs.address)
        opened.callback(ledger.close)
        yield ours, theirs, ledger


def _default_state(source: str, target: str) -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    pair = hashlib.sha256(f"{source}\n{target}".encode()).hexdigest()[:16]
    return Path(home) / "treefold" / "buckets" / pair


def _rate(text: str | None) -> int:
    if text is None:
        return 0
    try:
        return parse_rate(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rate") from error


def _lists_all(ours: Store, theirs: Store) -> bool:
    return ours.capabilities.lists_all_keys and theirs.capabilities.lists_all_keys


def _plan_text(plan: SyncPlan) -> str:
    return (
        f"plan: copy {plan.copies} objects, patch {plan.patches}, change the properties of"
        f" {plan.properties}, delete {plan.deletes}; {size_text(plan.bytes)} at most."
        f" {plan.equal} are equal, {plan.extras} exist at the target only"
    )


def _print_plan(run: BucketSync, plan: SyncPlan, *, as_json: bool) -> None:
    for step in run.steps():
        if as_json:
            document: JsonObject = {"action": step.action, "key": step.key}
            print_json({**document, "bytes": step.length_bytes, "reason": step.reason})
        else:
            print_line(f"{step.action:10} {step.key} ({step.reason})")
    if as_json:
        names = ("copies", "patches", "properties", "deletes", "extras", "equal", "bytes")
        print_json({"dryRun": True, **{name: getattr(plan, name) for name in names}})
    else:
        print_line(_plan_text(plan))


def _print_report(report: SyncReport) -> None:
    for one in report.failed[:_LINES_SHOWN]:
        print_line(f"failed     {one.key}: {one.reason}: {one.detail}")
    if report.failed_count > _LINES_SHOWN:
        print_line(f"... {report.failed_count} failed in all; --json names them")
    print_line(
        f"copied {report.copied} ({size_text(report.bytes)}), properties of"
        f" {report.metadata_only}, deleted {report.deleted}, failed {report.failed_count}"
    )
    if report.equal:
        print_line(f"equal at level {report.level}, root {report.root}", style="green")
    else:
        print_line(f"not equal: {report.differences} differences", style="red")


def _key_document(key: VerifiedKey) -> JsonObject:
    document: JsonObject = {"kind": _kind_text(key), "key": key.key}
    if key.version:
        document["version"] = key.version
    return {**document, "level": key.level.name.lower()}


def _kind_text(key: VerifiedKey) -> str:
    return key.kind.value if key.kind else "unsettled"


def _verification_document(tally: VerificationTally, target: Store) -> JsonObject:
    traffic = target.traffic() if target.traffic else None
    return {
        "equal": tally.is_equal and target.capabilities.lists_all_keys,
        "objects": tally.objects,
        "differences": tally.differences,
        "bytesCrossed": traffic.bytes if traffic else 0,
        "roundTrips": traffic.requests if traffic else 0,
        "levels": {name: tally.levels[level] for name, level in _LEVELS.items()},
    }


def _print_verification(tally: VerificationTally, target: Store, shown: int) -> None:
    if shown > _LINES_SHOWN:
        print_line(f"... {shown} in all; --json prints them")
    levels = ", ".join(f"{tally.levels[level]} {name}" for name, level in _LEVELS.items())
    print_line(f"{tally.objects} objects: {levels}")
    if traffic := target.traffic() if target.traffic else None:
        print_line(
            f"{size_text(traffic.bytes)} to and from the target in {traffic.requests} requests"
        )
    if tally.differences:
        print_line(f"not equal: {tally.differences} differences", style="red")
    elif tally.unsettled:
        print_line(f"unknown: {tally.unsettled} keys changed while they were compared")
    elif not target.capabilities.lists_all_keys:
        print_line("unknown: the target does not list all keys")
    else:
        print_line("equal, each object at its level", style="green")


def _capabilities_document(capabilities: Capabilities) -> JsonObject:
    names = (name for name in Capabilities.__dataclass_fields__ if name != "reasons")
    document: JsonObject = {name: getattr(capabilities, name) for name in names}
    return {**document, "reasons": dict(capabilities.reasons)}


def _capability_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)

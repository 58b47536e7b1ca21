"""`treefold bucket`: copy a bucket between two stores, and show that the copy is equal.

Results go to stdout, plans and progress to stderr. The package `replicator` does the
work; this module parses options.
"""

import gc
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from admin.bucket_output import (
    end_compared,
    plan_text,
    plan_warnings,
    print_capabilities,
    print_plan,
    print_report,
)
from admin.bucket_pair import (
    OpenPair,
    append_receipt,
    check_addresses,
    json_option,
    open_pair,
    open_receipts,
    open_target,
    prefix_option,
    state_option,
)
from admin.lazy_commands import LazyCommand, LazyGroup
from admin.option_types import Fraction, WholeNumber
from admin.verifier_option import verifier_option
from replicator.copier import CopierLimits
from replicator.crossing import lacking
from replicator.stores.opening import open_store
from replicator.sync import BucketSync, SyncOptions
from runtime.progress import ProgressSink, ProgressStyle, progress_sink
from runtime.rate_limit import SystemClock
from runtime.setting_values import parse_rate

if TYPE_CHECKING:
    from replicator.proven_sync import ProvenSync
    from replicator.verifier.client import VerifierClient

# What these import, copying a bucket does not need.
_LAZY = {
    "add": LazyCommand("admin.bucket_policies:add", "Begin to replicate a bucket."),
    "backlog": LazyCommand(
        "admin.bucket_status:backlog", "List what the target is not known to have."
    ),
    "cancel": LazyCommand("admin.bucket_policies:cancel", "End a replication."),
    "change": LazyCommand(
        "admin.bucket_policies:change", "Change the options of a replication while it runs."
    ),
    "delete": LazyCommand("admin.bucket_policies:delete", "End a replication, and forget it."),
    "demo": LazyCommand(
        "admin.demo.bucket_demo:demo", "Break a copy and a replication, and see what proves them."
    ),
    "disable": LazyCommand("admin.bucket_policies:disable", "Stop all replications, cluster-wide."),
    "enable": LazyCommand("admin.bucket_policies:enable", "Let replications run, cluster-wide."),
    "export": LazyCommand(
        "admin.bucket_documents:export", "Write the properties of a bucket as JSON."
    ),
    "failback": LazyCommand(
        "admin.bucket_failover:failback", "Bring changes of the target back to the source."
    ),
    "failover": LazyCommand(
        "admin.bucket_failover:failover", "Fence a replication, so that its target can be written."
    ),
    "get": LazyCommand("admin.bucket_policies:get", "Show all that is stored of a replication."),
    "import": LazyCommand(
        "admin.bucket_documents:import_command", "Make a bucket with the properties of another."
    ),
    "index": LazyCommand("admin.bucket_index:index", "Build, refresh or check a verifier's index."),
    "list": LazyCommand("admin.bucket_policies:list_command", "List replications."),
    "pause": LazyCommand("admin.bucket_policies:pause", "Stop a replication until it is resumed."),
    "prefixes": LazyCommand(
        "admin.bucket_prefixes:prefixes", "Choose which keys of a replication cross."
    ),
    "receipts": LazyCommand(
        "admin.bucket_receipts:receipts", "Show and check signed outcomes, offline."
    ),
    "resume": LazyCommand("admin.bucket_policies:resume", "Let a replication go on."),
    "status": LazyCommand(
        "admin.bucket_status:status", "Say how far replications are, and how sure that is."
    ),
    "verify": LazyCommand("admin.bucket_verify:verify", "Print each key that differs."),
}


class _Group(LazyGroup):
    lazy = _LAZY


@click.group(cls=_Group)
def bucket() -> None:
    """Copy a bucket between two stores, and prove that the copy is equal.

    A store is s3://BUCKET/PREFIX?endpoint_url=URL, a bucket of Ozone as
    ozone://OM:PORT/VOLUME/BUCKET?s3=URL, or local:PATH, a bucket in a folder of this
    machine, in a format of its own. Quote an address that has ? or &.
    Credentials of S3 come from the environment (AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY), from ~/.aws, or from a profile there (?profile=NAME).

    \b
    Examples:
      treefold bucket precheck s3://photos 's3://copy?profile=far'
      treefold bucket sync s3://photos local:/backup/photos --dry-run
      treefold bucket sync s3://photos local:/backup/photos --delete
      treefold bucket verify s3://photos local:/backup/photos --level read
    """


@bucket.command(short_help="Copy what differs, and compare afterwards.")
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@click.option("--delete", is_flag=True, help="Delete objects that exist at the target only.")
@prefix_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan and change no object. An S3 target is probed as by precheck.",
)
@state_option
@click.option(
    "--rate",
    metavar="RATE",
    help='The most bytes of objects per second, such as "20MiB/s". Default: no limit.',
)
@click.option(
    "--transfers",
    type=WholeNumber(1, 64),
    default=8,
    show_default=True,
    help="Objects copied at a time; with --watch four times as many of up to 1 MiB.",
)
@click.option(
    "--watch",
    "watches",
    is_flag=True,
    help="Keep TARGET equal until stopped: follow the log of SOURCE, or compare in rounds.",
)
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=Fraction(0.1, 86_400),
    default=60.0,
    show_default=True,
    help="With --watch: seconds between two rounds, where SOURCE has no log.",
)
@json_option
@verifier_option
@click.pass_obj
def sync(
    style: ProgressStyle | None,
    *,
    verifier: "VerifierClient | None",
    source: str,
    target: str,
    delete: bool,
    prefix: str,
    dry_run: bool,
    state: Path | None,
    rate: str | None,
    transfers: int,
    watches: bool,
    interval_s: float,
    as_json: bool,
) -> None:
    """Copy the current objects of SOURCE to TARGET, and compare.

    Metadata, tags, content headers and ACLs cross where both stores keep them; what
    does not cross is printed before the first byte. A change of metadata alone moves no
    data, and of a changed large object only the changed windows are sent where the
    target can copy ranges. A run that was killed is continued by the same command. If
    it is known what both sides hold, receipts.jsonl in the state folder gets a receipt.

    With --watch it goes on until it is stopped by a signal: deletes and renames cross,
    and what a store does not answer is tried again for ever. docs/replication.md says
    how. Its status is 0 if all that was seen is at TARGET, and 5 if some of it is not.

    \b
    Exit status:
      0  the sides are equal at the level printed
      1  failed, 2 usage, 6 source and target overlap
      3  not equal; without --delete, objects at the target only are differences
      5  some objects could not be copied, or equality cannot be shown
      7  a store does not answer, 8 another process uses the state folder
      130  interrupted; the same command continues
    """
    if watches:
        if dry_run:
            raise click.UsageError("--watch does not go with --dry-run")
        from admin.bucket_watch import WatchOptions, watch

        wishes = WatchOptions(prefix, delete, _rate(rate), transfers, interval_s)
        watch(source, target, state, wishes, verifier=verifier, style=style, as_json=as_json)
        return
    options = SyncOptions(
        prefix=prefix,
        delete=delete,
        bytes_per_second=_rate(rate),
        copier_limits=CopierLimits(objects=transfers, parts=transfers),
    )
    _sync_once(
        source,
        target,
        state,
        options,
        verifier=verifier,
        dry_run=dry_run,
        style=style,
        as_json=as_json,
    )


def _sync_once(
    source: str,
    target: str,
    state: Path | None,
    options: SyncOptions,
    *,
    verifier: "VerifierClient | None",
    dry_run: bool,
    style: ProgressStyle | None,
    as_json: bool,
) -> None:
    prefix = options.prefix
    with ExitStack() as opened, ExitStack() as bar:
        progress = bar.enter_context(progress_sink(style or ProgressStyle()))
        run: BucketSync | ProvenSync
        if verifier is None:
            trial = open_pair(source, target, state, may_write=True, is_trial=dry_run)
            pair = opened.enter_context(trial)
            run, kept = _plain_sync(pair, options, progress), pair.state
        else:
            from admin.bucket_proven import open_proven_sync

            run, kept = opened.enter_context(
                open_proven_sync(source, target, state, verifier, options, progress)
            )
        opened.enter_context(run)
        for limitation in run.limitations:
            progress.note(limitation)
        _collect_rarely()
        plan = run.plan()
        for warning in plan_warnings(plan, prefix):
            progress.note(warning)
        if dry_run:
            bar.close()
            print_plan(run.steps(), plan, as_json=as_json)
            return
        receipts = open_receipts(kept)
        progress.note(plan_text(plan))
        report = run.execute(plan)
        bar.close()
        try:
            append_receipt(receipts, run.receipt())
        finally:
            print_report(report, plan, prefix, lists_all=run.lists_all, as_json=as_json)
    end_compared(report.differences, is_equal=report.equal, failed=report.failed_count)


def _collect_rarely() -> None:
    """What a copy allocates is freed by its counts. To look for cycles of it among all
    modules, a thousand times, is a tenth of the CPU of a sync.
    """
    gc.freeze()


def _plain_sync(pair: OpenPair, options: SyncOptions, progress: ProgressSink) -> BucketSync:
    return BucketSync(
        pair.source,
        pair.target,
        pair.ledger,
        options,
        progress=progress,
        clock=SystemClock(),
        sleep=time.sleep,
        is_cancelled=lambda: False,
    )


@bucket.command(short_help="Print what would not cross, and why.")
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@json_option
def precheck(source: str, target: str, as_json: bool) -> None:
    """Print what two stores can do, and what would not cross.

    An S3 target is probed with scratch objects, which are removed again. A local target
    that does not exist is not created.

    Exit status: 0 both stores answered, whatever crosses, 1 failed, 2 usage, 6 source
    and target overlap, 7 a store does not answer.
    """
    check_addresses(source, target)
    with (
        open_store(source, may_write=False) as ours,
        open_target(target, may_write=True, is_trial=True) as theirs,
    ):
        limitations = lacking(ours.capabilities, theirs.capabilities)
        print_capabilities(ours.capabilities, theirs.capabilities, limitations, as_json=as_json)


def _rate(text: str | None) -> int:
    if text is None:
        return 0
    try:
        return parse_rate(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rate") from error

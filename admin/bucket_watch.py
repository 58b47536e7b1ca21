"""`treefold bucket sync --watch`: keep a target equal to its source until stopped."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from admin.bucket_pair import check_addresses, state_folder
from admin.replication_output import report_json
from replicator.hashing import blake3_of
from replicator.replication import (
    Condition,
    Policy,
    PolicyId,
    ReplicationOptions,
    ReplicationReport,
    Stage,
)
from replicator.stores.address import canonical_address
from replicator.stores.local_database import NotABucketError
from replicator.stores.opening import open_store
from replicator.stores.port import Store
from replicator.syncer.engine import ReplicationEngine
from replicator.syncer.folder import folder_name, has_checkpoint, syncer_id
from replicator.syncer.lease import LocalLease
from replicator.syncer.limits import EngineLimits, follower_copies
from replicator.syncer.target_probe import ProbeRecord, TargetProbe
from replicator.syncer.threads import ReplicationThreads
from runtime.disk import Disk
from runtime.exit_codes import ExitCode
from runtime.output import print_json, print_line
from runtime.progress import ProgressSink, ProgressStyle, progress_sink
from runtime.rate_limit import SystemClock
from runtime.stop_signals import StopSignals

if TYPE_CHECKING:
    from replicator.verifier.client import VerifierClient

# Between two looks at how far it is.
_LOOK_S = 0.5
# What the target was seen to do, in the folder of the pair.
_PROBE = "target-probe"


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """What the caller may choose; 0 bytes per second is no limit."""

    prefix: str
    delete: bool
    bytes_per_second: int
    transfers: int
    interval_s: float


def watch(
    source: str,
    target: str,
    state: Path | None,
    options: WatchOptions,
    *,
    verifier: "VerifierClient | None" = None,
    style: ProgressStyle | None,
    as_json: bool,
) -> None:
    """Follow the source until SIGTERM or SIGINT, or until it stops with an error.
    `verifier` is a client of the one beside the target.

    Raises:
        Exit: with what is known at the end.
        ReconcileError: an address, a store or the state folder cannot be used.
    """
    source, target = canonical_address(source), canonical_address(target)
    check_addresses(source, target)
    parent, clock = state_folder(state, source, target) / "watch", SystemClock()
    with ExitStack() as opened:
        stop = opened.enter_context(StopSignals())
        progress = opened.enter_context(progress_sink(style or ProgressStyle()))
        ours = opened.enter_context(open_store(source, may_write=False))
        if verifier is not None:
            # Only with a verifier anybody waits for gRPC.
            from replicator.syncer.target_verifier import check_verifier

            check_verifier(verifier, target)
        record = ProbeRecord(parent / _PROBE, Disk(), clock)
        probe = TargetProbe(clock, record.text)
        lines = _WatchLines(progress, as_json=as_json)
        progress.begin("watch", None, "changes")
        report = None
        while report is None:
            with _opened_target(ours.address, target, parent, probe) as theirs:
                engine = ReplicationEngine(
                    _policy(source, target, options),
                    ours,
                    theirs,
                    parent=parent,
                    syncer=syncer_id(parent, Disk()),
                    lease=LocalLease(),
                    checkpoint=None,
                    clock=clock,
                    limits=EngineLimits(
                        copier=follower_copies(options.transfers, options.transfers),
                        deletes_extras=options.delete,
                    ),
                    verifier=verifier,
                )
                is_changed = _follow(engine, probe, target, record, stop, lines)
                if not is_changed:
                    report = record.told(engine.report())
        lines.show(report, is_last=True)
    _end(report)


@contextmanager
def _opened_target(source: str, target: str, parent: Path, probe: TargetProbe) -> Iterator[Store]:
    """The target, which is made once: where it is missing later, its disk may not be
    mounted.

    Raises:
        NotABucketError: it is gone.
        ReconcileError: it cannot be opened.
    """
    is_new = not has_checkpoint(parent, source, target, Disk())
    with ExitStack() as opened:
        opening = open_store(target, may_write=True, create=is_new, memory=probe.memory)
        try:
            theirs = opened.enter_context(opening)
        except NotABucketError as error:
            if is_new:
                raise
            hint = (
                "It was followed to there before. Is its disk mounted? To copy all anew,"
                f" remove {parent / folder_name(source, target)}."
            )
            raise NotABucketError(error.message, hint=hint, **error.facts) from error
        probe.note_opened()
        yield theirs


def _follow(
    engine: ReplicationEngine,
    probe: TargetProbe,
    target: str,
    record: ProbeRecord,
    stop: StopSignals,
    lines: "_WatchLines",
) -> bool:
    """Work until the end; whether the target has to be opened again before."""
    with ReplicationThreads(engine, "watch") as threads:
        record.keep(probe.text)
        while not stop.wait(_LOOK_S) and threads.is_alive():
            record.keep(probe.text)
            report = engine.report()
            lines.show(record.told(report))
            if report.condition is Condition.ERROR:
                return False
            if probe.is_due:
                is_changed = probe.has_changed(target)
                record.keep(probe.text)
                if is_changed:
                    return True
    return False


def _policy(source: str, target: str, options: WatchOptions) -> Policy:
    return Policy(
        PolicyId(blake3_of(f"{source}\n{target}".encode()).hex()[:16]),
        source,
        target,
        prefixes=(options.prefix,) if options.prefix else (),
        options=ReplicationOptions(
            bytes_per_second=options.bytes_per_second, interval_s=options.interval_s
        ),
    )


class _WatchLines:
    """Prints what has changed since the last look."""

    def __init__(self, progress: ProgressSink, *, as_json: bool) -> None:
        self._progress = progress
        self._as_json = as_json
        self._said = ""
        self._told: ReplicationReport | None = None
        self._applied = 0

    def show(self, report: ReplicationReport, *, is_last: bool = False) -> None:
        """Print a report where it is news."""
        # It begins anew where the target was opened again.
        self._progress.advance(max(0, report.applied - self._applied))
        self._applied = report.applied
        if self._as_json:
            # It grows older all the time.
            news = replace(report, oldest_unproven_ms=None)
            if is_last or news != self._told:
                print_json(report_json(report))
            self._told = news
            return
        text = _sentence(report)
        if text != self._said:
            self._progress.note(text)
        self._said = text
        if is_last:
            print_line(f"{report.applied} changes applied, {report.sent_bytes} bytes sent")


def _sentence(report: ReplicationReport) -> str:
    """How it is, without what changes all the time."""
    words = {
        Stage.INITIAL_BATCH: "copying what is there",
        Stage.INCREMENTAL: "applying changes in rounds",
        Stage.LIVE: "following the log",
    }
    parts = [f"{report.condition.value}: {words[report.checkpoint.stage]}"]
    if report.fault is not None:
        parts.append(f"{report.fault.value}: {report.message}")
    if report.failed:
        named = "".join(f", such as {one.key!r}" for one in report.failed_keys[:1])
        parts.append(f"{report.failed} keys failed and are tried again{named}")
    if report.differences is not None:
        found = f"{report.differences} differences" if report.differences else "equal"
        parts.append(f"last comparison: {found} (level {report.proof_level})")
    return "; ".join(parts)


def _end(report: ReplicationReport) -> None:
    if report.condition is Condition.ERROR:
        raise click.exceptions.Exit(ExitCode.FAILED)
    is_open = report.queued or report.failed or report.checkpoint.stage is Stage.INITIAL_BATCH
    if is_open or report.condition is Condition.WAITING:
        raise click.exceptions.Exit(ExitCode.PARTLY)

"""The tools of one phase, which copies from the source as it is or from a snapshot."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from replicator.assumed_acls import AssumedAcls
from replicator.comparison import KeyComparison
from replicator.copier import Copier, CopierLimits, NewExecutor
from replicator.copy_task import CopyLimits, properties_at_target
from replicator.crossing import Crossing
from replicator.difference import DecisionRules
from replicator.key_copy import KeyCopier, PatchObject
from replicator.ledger import PairLedger
from replicator.origin import OriginMarks
from replicator.replication import ReplicationOptions
from replicator.stores.errors import SnapshotLostError, StoreError
from replicator.stores.port import SnapshotFacts, Store
from replicator.syncer.applier import ChangeApplier
from replicator.syncer.source_reader import SourceReader
from replicator.syncer.two_way import SupersededKeys, TwoWayRules
from runtime.rate_limit import RateLimiter
from runtime.retry import Backoff, Sleep, call_with_retry

if TYPE_CHECKING:
    # These bring gRPC, which nobody else waits for.
    from replicator.syncer.index_proofs import IndexProofs
    from replicator.syncer.target_verifier import TargetVerifier

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tools:
    """What all phases of a replication share. `target` is fenced. `lister` reads pages
    of listings and `property_readers` properties in rounds, and `comparer` the pages of
    a comparison, so that none waits for another. `wake` ends a wait for something to
    do. `fails_alone` says of an error that it is of one object, and others go on. With
    a verifier small writes go through that, and `proofs` compares by indexes.
    """

    source: Store
    target: Store
    ledger: PairLedger
    rate: RateLimiter
    readers: Executor
    lister: Executor
    comparer: Executor
    property_readers: Executor
    new_executor: NewExecutor
    sleep: Sleep
    backoff: Backoff
    is_stopped: Callable[[], bool]
    wake: Callable[[], None]
    fails_alone: Callable[[StoreError], bool]
    copier_limits: CopierLimits
    copy_limits: CopyLimits
    default_acls_in_a_row: int
    verifier: "TargetVerifier | None" = None
    proofs: "IndexProofs | None" = None

    def retried(self, call: Callable[[], T]) -> T:
        """Call what may fail for a while, and again if it did."""
        return call_with_retry(call, sleep=self.sleep, backoff=self.backoff)

    def crossing(self, options: ReplicationOptions) -> Crossing:
        """Which properties cross, by what both can keep and the operator wants."""
        both = Crossing.between(self.source.capabilities, self.target.capabilities)
        return both if options.keeps_acls else replace(both, acl=False)


class SyncPhase:
    """Compares and applies from one source. Close it when nothing of it runs."""

    def __init__(
        self,
        tools: Tools,
        options: ReplicationOptions,
        prefixes: tuple[str, ...],
        snapshot: SnapshotFacts | None,
        superseded: SupersededKeys,
        *,
        is_first: bool,
    ) -> None:
        """With a snapshot that is the source. `is_first`: it is the initial batch.

        Raises:
            StoreError: the snapshot cannot be opened.
        """
        self.snapshot = snapshot
        source, snapshots = tools.source, tools.source.snapshots
        if snapshot is not None:
            assert snapshots is not None
            view = snapshots.open(snapshot)
            source = replace(source, lister=view.lister, reader=view.reader, feed=None)
        source = replace(source, reader=SourceReader(source.reader))
        self.source = source

        self.crossing = crossing = tools.crossing(options)
        # Where both sides are written to, each copy is to be as its source at once.
        reads_later = crossing.acl and not options.newest_wins
        in_a_row = tools.default_acls_in_a_row
        self.acls = AssumedAcls(default_in_a_row=in_a_row) if reads_later else None
        """Objects that are copied before their ACL is read."""
        tools.ledger.save_crossing(crossing)
        self._copier = Copier(
            source,
            tools.target,
            tools.ledger,
            limits=tools.copier_limits,
            rate=tools.rate,
            backoff=tools.backoff,
            sleep=tools.sleep,
            is_cancelled=tools.is_stopped,
            new_executor=tools.new_executor,
        )
        rules = _rules(source, tools.target, has_two_ways=options.newest_wins)
        # Of what a comparison passes over nothing says that it was changed.
        self.comparison, of_changes = (
            KeyComparison(
                source,
                tools.target,
                tools.ledger,
                rules=replace(rules, trusts_times=trusts_times),
                readers=tools.readers,
                sleep=tools.sleep,
                backoff=tools.backoff,
                is_cancelled=tools.is_stopped,
                fails_alone=tools.fails_alone,
                crossing=crossing,
            )
            for trusts_times in (True, False)
        )
        self.applier = self._applier(of_changes, tools, options, prefixes, superseded, is_first)

    def close(self) -> None:
        """Wait for parts that are on their way, and end the threads."""
        self._copier.close()

    def _applier(
        self,
        comparison: KeyComparison,
        tools: Tools,
        options: ReplicationOptions,
        prefixes: tuple[str, ...],
        superseded: SupersededKeys,
        is_first: bool,
    ) -> ChangeApplier:
        crossing, target, snapshot = self.crossing, tools.target, self.snapshot
        marks = OriginMarks(self.source, crossing.digest, may_leave_out=not options.newest_wins)
        two_way = None
        if options.newest_wins:
            theirs = OriginMarks(target, crossing.digest)
            two_way = TwoWayRules(marks, theirs, superseded, tools.retried, is_first=is_first)
        keys = KeyCopier(
            target,
            tools.ledger,
            self._copier,
            crossing=crossing,
            limits=tools.copy_limits,
            origins=marks,
            patch=_window_patch(tools, self.source, crossing, marks),
            acls=self.acls,
        )
        return ChangeApplier(
            self.source,
            target,
            tools.ledger,
            comparison=comparison,
            keys=keys,
            readers=tools.readers,
            retried=tools.retried,
            prefixes=prefixes,
            two_way=two_way,
            check_snapshot=lambda: _check_snapshot(tools, snapshot),
            latest=None if snapshot is None else SourceReader(tools.source.reader),
        )


def _rules(source: Store, target: Store, *, has_two_ways: bool) -> DecisionRules:
    both = source.capabilities, target.capabilities
    return DecisionRules(
        may_delete=all(one.lists_all_keys for one in both),
        stamps_cover_properties=source.capabilities.stamps_cover_properties,
        patches=target.capabilities.copies_ranges,
        # The other direction may not see what this one leaves to it.
        reads_target_properties=has_two_ways and not target.capabilities.stamps_cover_properties,
    )


def _window_patch(
    tools: Tools, source: Store, crossing: Crossing, origins: OriginMarks
) -> PatchObject | None:
    """What patches objects through the verifier; None without one."""
    if tools.verifier is None:
        return None
    from replicator.syncer.window_patches import WindowPatches

    return WindowPatches(
        source,
        tools.verifier,
        crossing,
        lambda facts, found: properties_at_target(
            facts, found, crossing, origins, tools.target.capabilities
        ),
        take_bytes=tools.rate.take,
        retried=tools.retried,
    ).patch


def _check_snapshot(tools: Tools, snapshot: SnapshotFacts | None) -> None:
    """Check that a snapshot is there, so that what it lacks may count.

    Raises:
        SnapshotLostError: it is gone.
    """
    snapshots = tools.source.snapshots
    if snapshot is None or snapshots is None:
        return
    found = tools.retried(lambda: snapshots.find(snapshot.name))
    if found is None or found.snapshot_id != snapshot.snapshot_id:
        raise SnapshotLostError(f"snapshot {snapshot.name} is gone: nothing is deleted")

"""Planted bugs: the sync with a verifier with one rule broken, each of which the storm
must catch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from proof.comparison import BucketComparison
from proof.index import StampedItem
from proof.item import ItemId
from proof.naming import ItemDifference
from proof.root import SetRoot
from replicator.hashing import ContentHasher
from replicator.proven_deletes import ProvenDeleter
from replicator.proven_sync import ProvenSync
from replicator.proving import PairProof, PairProver
from replicator.refresh import IndexedBucket, RefreshStart
from replicator.stores.errors import StoreError
from replicator.stores.port import ObjectFacts, WriteCondition
from replicator.sync import SyncPlan, SyncReport
from replicator.verifier.applier import Applier
from replicator.verifier.audit import VerifierAudit
from replicator.verifier.run_fence import RunFence
from replicator.verifier.server import VerifierService
from replicator.verifier.values import PatchOrder, RunName
from runtime.access import Access
from tests.support.proven_storm import Parts

Take = Callable[[BucketComparison], None]


class _OneLook(PairProver):
    """Says equal from one look, as if a listing were of one moment."""

    def compare(self, take: Take | None = None, **options: Any) -> PairProof:
        return replace(super().compare(take, **options), is_settled=True)


class _NearLook(PairProver):
    """Does not ask whether the far side held still."""

    def compare(self, take: Take | None = None, **options: Any) -> PairProof:
        found = super().compare(take, **options)
        return replace(found, is_settled=self._held[0] == found.comparison.ours)


class _FarLook(PairProver):
    """Does not look whether the near side held still."""

    def compare(self, take: Take | None = None, **options: Any) -> PairProof:
        found = super().compare(take, **options)
        return replace(found, is_settled=self._held[1] == found.comparison.theirs)


def _with_prover(prover: type[PairProver]) -> Parts:
    class Sync(ProvenSync):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            self._prover.__class__ = prover

    return Parts(sync=Sync, prover=prover)


class _FirstCut(ProvenSync):
    """Takes what was found before the writes, and that all were acknowledged."""

    def execute(self, plan: SyncPlan) -> SyncReport:
        report = super().execute(plan)
        if report.equal or report.failed_count or plan.extras > plan.deletes:
            return report
        return replace(report, equal=True)


class _TrustsAcknowledgements(ProvenSync):
    """Believes that a batch left what it says, without a look at the root."""

    def _prove(self, take: Take = lambda _part: None, **options: Any) -> PairProof:
        if self._proof is None or self._proof.is_moving or options.get("known"):
            return super()._prove(take, **options)
        found = self._proof.comparison
        same = replace(found, theirs=found.ours, differences=())
        return replace(self._proof, comparison=same, differences=(), in_flight=0, is_settled=True)


class _DeletesByTheCuts(ProvenDeleter):
    """Deletes what both comparisons showed, without asking the source."""

    def _refusal(self, one: ItemDifference) -> StoreError | None:
        del one
        return None


class _DeletesByTheListing(ProvenSync):
    """A sync with this deleter."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self._deleter.__class__ = _DeletesByTheCuts


class _SendsWhatItRead(ProvenSync):
    """Keeps bodies that it read once, and sends them again in later runs."""

    kept: dict[str, bytes] = {}  # noqa: RUF012 - a planted bug

    def _body(self, facts: ObjectFacts) -> bytes:
        if facts.key not in self.kept:
            self.kept[facts.key] = super()._body(facts)
        return self.kept[facts.key]


class _AppliesTwice(Applier):
    """Applies a batch whatever the target holds by now."""

    def _current(self, key: str, expected: ItemId | None) -> StampedItem | None:
        row = self._index.row(key)
        return row if row is not None or expected is None else super()._current(key, expected)


class _PatchesAnything(Applier):
    """Puts windows into whatever version is there."""

    def _base(self, order: PatchOrder) -> ObjectFacts:
        base = self._index.row(order.key)
        return self._fresh(base) if base is not None else super()._base(order)

    def _patch_condition(self, order: PatchOrder, *, can: bool) -> WriteCondition:
        del order, can
        return WriteCondition()

    def _check(self, order: PatchOrder, hasher: ContentHasher) -> None:
        del order, hasher


class _OpenFence(RunFence):
    """Lets runs write that others have followed."""

    def check(self, run: RunName | None) -> None:
        del run


def _with_applier(applier: type[Applier], *, fence: type[RunFence] = RunFence) -> Parts:
    class Service(VerifierService):
        def __init__(self, bucket: IndexedBucket, *, access: Access, audit: VerifierAudit) -> None:
            super().__init__(bucket, access=access, audit=audit)
            assert self._applier is not None
            self._applier.__class__ = applier
            self._fence.__class__ = fence

    return Parts(service=Service)


class _CountsOnlyNewIds(IndexedBucket):
    """Calls a bucket settled while no ID changed, whatever came and went between."""

    def settled_root(self, start: RefreshStart, prefix: str = "") -> SetRoot | None:
        return super().settled_root(replace(start, moves=self.moves.moves), prefix)


BUGS: dict[str, Parts] = {
    "equal from one look": _with_prover(_OneLook),
    "the far side may move": _with_prover(_NearLook),
    "the near side may move": _with_prover(_FarLook),
    "equal from the first cut": Parts(sync=_FirstCut),
    "an acknowledgement without its root": Parts(sync=_TrustsAcknowledgements),
    "deletes by the listing": Parts(sync=_DeletesByTheListing),
    "sends what it read": Parts(sync=_SendsWhatItRead),
    # What comes late is of an earlier run, as a rule, and would be refused as such.
    "a batch applied twice": _with_applier(_AppliesTwice, fence=_OpenFence),
    "takes batches of ended runs": _with_applier(Applier, fence=_OpenFence),
    "patches another version": _with_applier(_PatchesAnything),
    "counts only new IDs": Parts(bucket=_CountsOnlyNewIds),
}

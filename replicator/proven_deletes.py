"""Delete what only the target has, through its verifier: what two comparisons show.

The plan is the first comparison. The second one follows the last copy, after a refresh
of both sides. What was found by the first is expected by it, so that it costs nothing
where nothing moved. Then the source itself is asked for each key, and the verifier gets
the IDs of the items: it deletes only objects that are still these items.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from proof.comparison import BucketComparison
from proof.item import Profile
from proof.naming import ItemDifference, ItemDifferenceKind
from proof.tracking import DifferenceTracker, SourceFact
from replicator.copy_requests import CopyFailedError, FailureReason
from replicator.deletes import BACK, MOVED, Retrying, in_flight
from replicator.listing import lists_key
from replicator.proven_plan import refusal_error
from replicator.stores.port import Store, StoreError
from replicator.sync import CopyTally
from replicator.verifier.client import VerifierClient
from replicator.verifier.values import DELETES_MAX
from runtime.progress import ProgressSink


class ProvenDeleter:
    """The deletes of one run. `observe` the comparison of the plan, then `delete`."""

    def __init__(
        self,
        source: Store,
        client: VerifierClient,
        profile: Profile,
        *,
        readers: Executor,
        retried: Retrying,
        check_stop: Callable[[], None],
    ) -> None:
        """`check_stop` raises where the run was interrupted."""
        self._source = source
        self._client = client
        self._profile = profile
        self._readers = readers
        self._retried = retried
        self._check_stop = check_stop
        self._tracker = DifferenceTracker()

    def observe(self, first: BucketComparison) -> None:
        """Take in the comparison of a new plan."""
        self._tracker = DifferenceTracker()
        self._tracker.observe(first)

    def delete(self, second: BucketComparison, outcome: CopyTally, progress: ProgressSink) -> None:
        """Delete the extras that both comparisons show, and count what became of each.

        Raises:
            VerifierUnavailableError: the verifier does not answer; run it again.
            OperationInterruptedError: the caller interrupted it.
        """
        confirmed = [
            one for one in self._tracker.observe(second) if one.kind is ItemDifferenceKind.EXTRA
        ]
        ids = {one.theirs_id for one in confirmed}
        for one in second.differences:
            if one.kind is ItemDifferenceKind.EXTRA and one.theirs_id not in ids:
                outcome.fail(one.key, in_flight(one.key, MOVED))
        if confirmed:
            progress.begin("delete", len(confirmed), "keys")
        for first in range(0, len(confirmed), DELETES_MAX):
            self._check_stop()
            batch = confirmed[first : first + DELETES_MAX]
            self._delete(batch, second.job, outcome)
            progress.advance(len(batch))

    def _delete(self, extras: Sequence[ItemDifference], job: bytes, outcome: CopyTally) -> None:
        wanted = list[ItemDifference]()
        looks = self._readers.map(lambda one: self._fact(one, job), extras)
        for one, fact in zip(extras, looks, strict=True):
            if isinstance(fact, StoreError):
                outcome.fail(one.key, fact)
            elif self._tracker.may_delete(one, fact):
                wanted.append(one)
            else:
                outcome.fail(one.key, in_flight(one.key, BACK))
        if not wanted:
            return
        ids = [one.theirs_id for one in wanted if one.theirs_id is not None]
        refusals = self._client.delete(self._profile, ids)
        for refusal in refusals:
            error = refusal_error(refusal.error, refusal.reason)
            outcome.fail(wanted[refusal.place].key, error)
        outcome.deleted += len(wanted) - len(refusals)

    def _fact(self, one: ItemDifference, job: bytes) -> SourceFact | StoreError:
        """What the source itself says of a key."""
        try:
            exists = self._retried(lambda: self._source.reader.facts(one.key) is not None)
            if not exists and self._retried(lambda: lists_key(self._source.lister, one.key)):
                return CopyFailedError(
                    FailureReason.SOURCE_UNREADABLE,
                    f"{one.key} is listed at the source, but it cannot be read there",
                )
        except StoreError as error:
            return error
        return SourceFact(one.key, one.version, exists=exists, after_job=job)

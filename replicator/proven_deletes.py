"""Delete what only the target has, through its verifier: what two comparisons show.

The plan is the first comparison. The second one follows the last copy, after a refresh
of both sides. What was found by the first is expected by it, so that it costs nothing
where nothing moved. Then the source itself is asked for each key, and the verifier gets
the IDs of the items: it deletes only objects that are still these items.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from proof.item import ItemId, Profile
from proof.naming import ItemDifference
from replicator.copy_requests import CopyFailedError, FailureReason
from replicator.deletes import BACK, Retrying, in_flight
from replicator.listing import lists_key
from replicator.proven_plan import ProvenStep, refusal_error
from replicator.stores.errors import StoreError
from replicator.stores.port import Store
from replicator.sync import CopyTally
from replicator.verifier.client import VerifierClient


def shows_same_item(found: ItemDifference) -> Callable[[ProvenStep], bool]:
    """Whether a plan has the same item of an extra that a comparison shows."""
    return lambda step: step.difference.theirs_id == found.theirs_id


class ProvenDeleter:
    """Deletes confirmed extras of a target through its verifier."""

    def __init__(
        self,
        source: Store,
        client: VerifierClient,
        profile: Profile,
        *,
        readers: Executor,
        retried: Retrying,
    ) -> None:
        """`retried` calls again what the source did not answer."""
        self._source = source
        self._client = client
        self._profile = profile
        self._readers = readers
        self._retried = retried

    def delete(self, extras: Sequence[ItemDifference], outcome: CopyTally) -> list[ItemId]:
        """Delete at most DELETES_MAX that the source does not have at this moment, and
        count what became of each; the IDs of those that are gone.

        Raises:
            VerifierUnavailableError: the verifier does not answer; run it again.
        """
        wanted = list[tuple[str, ItemId]]()
        looks = self._readers.map(self._refusal, extras)
        for one, error in zip(extras, looks, strict=True):
            if error is not None:
                outcome.fail(one.key, error)
            elif one.theirs_id is not None:
                wanted.append((one.key, one.theirs_id))
        if not wanted:
            return []
        refusals = self._client.delete(self._profile, [one_id for _, one_id in wanted]).refusals
        refused = {refusal.place for refusal in refusals}
        for refusal in refusals:
            key, _ = wanted[refusal.place]
            outcome.fail(key, refusal_error(refusal.error, refusal.reason))
        outcome.deleted += len(wanted) - len(refused)
        return [one_id for place, (_, one_id) in enumerate(wanted) if place not in refused]

    def _refusal(self, one: ItemDifference) -> StoreError | None:
        """Why a key must stay, by a fresh fact from the source; None if it may go."""
        try:
            if self._retried(lambda: self._source.reader.facts(one.key) is not None):
                return in_flight(one.key, BACK)
            if self._retried(lambda: lists_key(self._source.lister, one.key)):
                return CopyFailedError(
                    FailureReason.SOURCE_UNREADABLE,
                    f"{one.key} is listed at the source, but it cannot be read there",
                )
        except StoreError as error:
            return error
        return None

"""Do the two stores answer at all? Asked once something failed that may work later.

The source is asked for a listing, and for a byte of some objects: others each time, so
that a few that cannot be read do not speak for all. The target is asked to write: an
upload of one byte to a key of our own, which is given up, so that no object appears. A
refusal is an answer, too.
"""

import threading
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import islice

from replicator.copy_requests import CopyFailedError, FailureReason
from replicator.hashing import blake3_of
from replicator.replication import PolicyId
from replicator.stores.errors import StoreError
from replicator.stores.port import ObjectFacts, ObjectProperties, Store
from runtime.rate_limit import Clock

# Objects of the source that one question tries to read, and looks through for those.
_READS_MAX = 4
_LISTED_MAX = 1_000
# A good answer counts for so long to those that only want to know which keys to pass
# over: what applies them asks again.
_GOOD_S = 5.0
HEALTH_PREFIX = ".treefold-health-"


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """Why a store does not answer; None of one that does."""

    source: StoreError | None = None
    target: StoreError | None = None

    @property
    def both_answer(self) -> bool:
        """Whether neither store is to blame for what failed before."""
        return self.source is None and self.target is None


def is_unavailable(error: BaseException) -> bool:
    """Whether a store did not answer, so that another attempt may succeed."""
    if isinstance(error, CopyFailedError) and error.reason is FailureReason.UNAVAILABLE:
        return True
    return isinstance(error, StoreError) and error.retryable


def health_key(policy_id: PolicyId) -> str:
    """The key of uploads that a replication begins at its target, and gives up."""
    return HEALTH_PREFIX + blake3_of(policy_id.encode()).hex()[:12]


class StoreHealth:
    """Asks the stores of one replication. Thread-safe."""

    def __init__(self, source: Store, target: Store, policy_id: PolicyId, clock: Clock) -> None:
        """`target` is fenced."""
        self._source = source
        self._target = target
        self._key = health_key(policy_id)
        self._monotonic_s: Callable[[], float] = clock.monotonic_s
        self._lock = threading.Lock()
        self._after = ""
        self._asked_s: float | None = None
        self._answer = HealthAnswer()
        self._may_have_left = True

    def ask(self, avoided: Container[str] = ()) -> HealthAnswer:
        """Ask both stores now, once. Keys that are `avoided` are not read.

        Raises:
            LeaseLostError: another syncer works on this.
        """
        with self._lock:
            return self._ask(avoided)

    def both_answer(self) -> bool:
        """Whether both stores answer, or did a moment ago. Those that ask at the same
        time get one answer.

        Raises:
            LeaseLostError: another syncer works on this.
        """
        called_s = self._monotonic_s()
        with self._lock:
            needed_s = called_s - (_GOOD_S if self._answer.both_answer else 0.0)
            if self._asked_s is None or self._asked_s < needed_s:
                self._ask(())
            return self._answer.both_answer

    def _ask(self, avoided: Container[str]) -> HealthAnswer:
        asked_s = self._monotonic_s()
        self._answer = HealthAnswer(self._source_error(avoided), self._target_error())
        self._asked_s = asked_s
        return self._answer

    def _source_error(self, avoided: Container[str]) -> StoreError | None:
        try:
            found = self._candidates(avoided)
        except StoreError as error:
            return error if is_unavailable(error) else None
        failure = None
        for facts in found:
            self._after = facts.key
            try:
                with self._source.reader.read(facts, end=min(1, facts.size_bytes)) as pieces:
                    for _ in pieces:
                        pass
            except StoreError as error:
                if is_unavailable(error):
                    failure = error
                # Of one that is gone by now nothing was read: the next one may tell.
                continue
            return None
        return failure

    def _candidates(self, avoided: Container[str]) -> list[ObjectFacts]:
        """The next objects with content, after those that were read last."""
        for after in dict.fromkeys((self._after, "")):
            listed = islice(self._source.lister.list_objects("", start_after=after), _LISTED_MAX)
            usable = (one for one in listed if one.size_bytes and one.key not in avoided)
            if found := list(islice(usable, _READS_MAX)):
                return found
        return []

    def _target_error(self) -> StoreError | None:
        uploads = self._target.upload_writer
        try:
            if self._may_have_left:
                self._abort_left()
            self._may_have_left = True
            upload = uploads.begin(self._key, ObjectProperties())
            uploads.write_part(self._key, upload, 1, b"t")
            uploads.abort(self._key, upload)
            self._may_have_left = False
        except StoreError as error:
            return error if is_unavailable(error) else None
        return None

    def _abort_left(self) -> None:
        """Give up what a killed process, or a lost answer, has left of an upload."""
        left = list(self._target.upload_reader.uploads(self._key))
        for key, upload in left:
            if key == self._key:
                self._target.upload_writer.abort(key, upload)

"""Send of a large object behind a verifier only the windows that changed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from merkle.errors import ReconcileError
from proof.item import ContentHash, ItemId, Profile
from proof.messages import QuestionMessage, WindowsAnswer, WindowsQuestion
from replicator.copier import NewExecutor
from replicator.copy_requests import CopyFailedError, FailureReason
from replicator.hashing import ContentHasher
from replicator.proving import ask_all
from replicator.stores.errors import (
    DigestMismatchError,
    ObjectMissingError,
    PreconditionFailedError,
    StoreError,
)
from replicator.stores.port import ObjectFacts, ObjectProperties, Store
from replicator.verifier.client import VerifierClient
from replicator.verifier.object_windows import read_window_tree
from replicator.verifier.values import PATCH_BYTES_MAX, PATCHED_BYTES_MAX, PatchOrder, RangePatch
from replicator.window_search import search_windows
from replicator.windows import ChangedRange
from runtime.errors import RemoteProtocolError, UsageError

# A verifier holds as many in memory.
_PATCHES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class PatchedObject:
    """An object that the target has by now, the hashes of its content, and the bytes
    that were sent for it.
    """

    facts: ObjectFacts
    hashes: tuple[ContentHash, ...]
    sent_bytes: int


class WindowPatcher:
    """Patches objects of one target. Thread-safe."""

    def __init__(
        self,
        source: Store,
        client: VerifierClient,
        profile: Profile,
        *,
        take_bytes: Callable[[int], None],
        new_executor: NewExecutor = ThreadPoolExecutor,
    ) -> None:
        """`take_bytes` waits until the rate allows so many more bytes."""
        self._source = source
        self._client = client
        self._profile = profile
        self._take_bytes = take_bytes
        self._new_executor = new_executor
        self._turn = threading.BoundedSemaphore(_PATCHES_AT_ONCE)

    def patch(
        self,
        facts: ObjectFacts,
        properties: ObjectProperties,
        *,
        job: bytes,
        base: ItemId | ObjectFacts,
        base_bytes: int,
    ) -> PatchedObject | None:
        """Make the target's object `base`, of `base_bytes`, that of the source with
        these facts. Returns what was made, or None where it is better sent whole, and
        the target is as it was.

        Raises:
            CopyFailedError: one of the sides changed meanwhile.
            StoreError: the source or the verifier did not answer.
        """
        with self._turn:
            hasher = ContentHasher()
            try:
                tree = read_window_tree(self._source, facts, hasher)
            except (ObjectMissingError, PreconditionFailedError) as error:
                raise _source_changed(facts) from error
            try:
                ranges = search_windows(
                    tree, base_bytes, lambda *asked: self._windows(job, facts.key, *asked)
                )
            except (StoreError, UsageError, ValueError) as error:
                if isinstance(error, ReconcileError) and error.retryable:
                    raise
                # The target's object cannot be read, or is another one by now.
                return None
            size = sum(one.new_end - one.first for one in ranges or ())
            if ranges is None or size > min(PATCHED_BYTES_MAX, facts.size_bytes // 2):
                return None
            order = PatchOrder(facts.key, base, facts.size_bytes, hasher.blake3, properties)
            patches = [patch for one in ranges for patch in self._patches(facts, one)]
            self._take_bytes(size)
            try:
                made, _ = self._client.patch(self._profile, order, patches)
            except PreconditionFailedError as error:
                raise CopyFailedError(FailureReason.TARGET_CHANGED, error.message) from error
            except (DigestMismatchError, UsageError):
                # Windows with equal CRCs differ, or the target's object is damaged.
                return None
            return PatchedObject(made, hasher.hashes(), size)

    def _windows(
        self, job: bytes, key: str, level: int, nodes: Sequence[int]
    ) -> list[Sequence[int]]:
        digest = self._profile.digest
        asked = [
            QuestionMessage(job, number, digest, WindowsQuestion(key, "", level, node))
            for number, node in enumerate(nodes)
        ]
        found = list[Sequence[int]]()
        for question, given in zip(
            asked, ask_all(self._client, asked, self._new_executor), strict=True
        ):
            is_ours = (given.job, given.number) == (job, question.number)
            if not is_ours or not isinstance(given.answer, WindowsAnswer):
                raise RemoteProtocolError("the verifier did not answer with the windows asked for")
            found.append(given.answer.checksums)
        return found

    def _patches(self, facts: ObjectFacts, changed: ChangedRange) -> Iterator[RangePatch]:
        """The patches of one range, each of at most PATCH_BYTES_MAX."""
        old_bytes, at = changed.old_end - changed.first, changed.first
        for first in range(changed.first, max(changed.new_end, changed.first + 1), PATCH_BYTES_MAX):
            yield RangePatch(at, old_bytes, self._read(facts, first, changed.new_end))
            # The others are inserted behind what the first one replaced.
            old_bytes, at = 0, changed.old_end

    def _read(self, facts: ObjectFacts, first: int, end: int) -> bytes:
        end = min(first + PATCH_BYTES_MAX, end)
        if first >= end:
            return b""
        try:
            with self._source.reader.read(facts, first=first, end=end) as pieces:
                return b"".join(pieces)
        except (ObjectMissingError, PreconditionFailedError) as error:
            raise _source_changed(facts) from error


def _source_changed(facts: ObjectFacts) -> CopyFailedError:
    return CopyFailedError(
        FailureReason.SOURCE_CHANGED, f"{facts.key} changed while it was being copied"
    )

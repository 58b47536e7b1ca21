"""Delete what only the target has: after the copies, and only what two cuts show.

A cut is a comparison of both sides. The plan is the first one, and the comparison after
the last copy the second. An object that both have listed in the same version is deleted
once the source, asked after the second cut, does not have its key. Whatever changed
between the cuts is in flight, and stays. So a delete costs no look at the target: what
others write there after the second cut is not seen any more.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import compress, count
from typing import Generic, Protocol, TypeVar

from replicator.comparison import DecidedKey
from replicator.copy_requests import CopyFailedError, FailureReason
from replicator.ledger import PlannedStep
from replicator.stores.errors import StoreError
from replicator.stores.port import DeleteFailure, Store

T = TypeVar("T")
Planned = TypeVar("Planned", bound="_Keyed")

# Of one request; S3 takes as many.
DELETES_AT_ONCE = 1_000
BACK = "it exists at the source again"
MOVED = "it changed at the target since the plan"
_REPLACED = "it was written anew at the target"


class _Keyed(Protocol):
    @property
    def key(self) -> str: ...


class Retrying(Protocol):
    """Calls what may fail for a while, and again if it did."""

    def __call__(self, call: Callable[[], T]) -> T:
        """What the call returns in the end."""


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """What became of some deletes: those that the target has confirmed, and the keys
    that it may still have, each with the reason.
    """

    deleted: tuple[PlannedStep, ...]
    failed: tuple[tuple[str, StoreError], ...]


class SecondCut(Generic[Planned]):
    """Finds the planned deletes that a second comparison confirms. `planned` are those
    of the first one, by key. It takes one byte of memory for each.
    """

    def __init__(self, planned: Iterator[Planned]) -> None:
        self._planned = planned
        self._next = next(planned, None)
        self._flags = bytearray()
        self.confirmed = 0
        """How many are confirmed so far."""

    def confirms(self, key: str, is_same: Callable[[Planned], bool]) -> bool:
        """Whether the first cut showed this extra as it is now, which `is_same` says.
        Keys come in their order, each once.
        """
        while self._next is not None and self._next.key < key:
            self._advance(is_confirmed=False)
        if self._next is None or self._next.key != key:
            return False
        is_confirmed = is_same(self._next)
        self._advance(is_confirmed=is_confirmed)
        return is_confirmed

    def of(self, planned: Iterator[Planned]) -> Iterator[Planned]:
        """Those that are confirmed, of the same plan read once more."""
        return compress(planned, self._flags)

    def _advance(self, *, is_confirmed: bool) -> None:
        self._flags.append(is_confirmed)
        self.confirmed += is_confirmed
        self._next = next(self._planned, None)


def shows_same(decided: DecidedKey) -> Callable[[PlannedStep], bool]:
    """Whether a plan has the same version of an extra that a comparison shows."""
    target = decided.state.target
    assert target is not None
    return lambda step: step.target is not None and step.target.agrees(target)


class ExtraDeleter:
    """Deletes confirmed extras of a target in bulk."""

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        readers: Executor,
        retried: "Retrying",
    ) -> None:
        """`retried` calls again what a store did not answer."""
        self._source = source
        self._target = target
        self._readers = readers
        self._retried = retried

    def delete(self, steps: Sequence[PlannedStep]) -> DeleteResult:
        """Delete those that the source does not have at this moment, in one request for
        at most DELETES_AT_ONCE.
        """
        gone, failed = dict[str, PlannedStep](), list[tuple[str, StoreError]]()
        looks = self._readers.map(self._refusal, steps)
        for step, refusal in zip(steps, looks, strict=True):
            if refusal is None:
                gone[step.key] = step
            else:
                failed.append((step.key, refusal))
        attempts = count()

        def delete() -> list[DeleteFailure]:
            # What a lost attempt has deleted may have been written anew by others.
            if next(attempts):
                failed.extend((key, in_flight(key, _REPLACED)) for key in self._replaced(gone))
            return self._target.writer.delete(list(gone))

        try:
            refused = {one.key: one.reason for one in self._retried(delete)} if gone else {}
        except StoreError as error:
            return DeleteResult((), (*failed, *((key, error) for key in gone)))
        failed += (
            (key, CopyFailedError(FailureReason.DELETE_REFUSED, reason))
            for key, reason in refused.items()
        )
        deleted = tuple(step for key, step in gone.items() if key not in refused)
        return DeleteResult(deleted, tuple(failed))

    def _refusal(self, step: PlannedStep) -> StoreError | None:
        """Why a key must stay, by a fresh fact from the source; None if it may go."""
        try:
            exists = self._retried(lambda: self._source.reader.facts(step.key) is not None)
        except StoreError as error:
            return error
        return in_flight(step.key, BACK) if exists else None

    def _replaced(self, gone: dict[str, PlannedStep]) -> list[str]:
        """Take out the keys that the target has by now in another version."""
        replaced = []
        for key, step in gone.items():
            now, listed = self._target.reader.facts(key), step.target
            if now is not None and listed is not None and not listed.agrees(now):
                replaced.append(key)
        for key in replaced:
            del gone[key]
        return replaced


def in_flight(key: str, reason: str) -> CopyFailedError:
    """An extra that changed between the looks that a delete needs."""
    return CopyFailedError(FailureReason.IN_FLIGHT, f"{key} is not deleted: {reason}")

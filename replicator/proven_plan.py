"""What to do about the differences that a comparison found."""

from collections.abc import Iterator
from dataclasses import dataclass

from proof.item import Item
from proof.naming import ItemDifference, ItemDifferenceKind
from replicator.copy_requests import CopyFailedError, FailureReason
from replicator.difference import Action
from replicator.stores.errors import (
    DigestMismatchError,
    PreconditionFailedError,
    StoreUnavailableError,
    UnsupportedObjectError,
)
from replicator.verifier.values import BODY_BYTES_MAX, WRITES_MAX, Write

# A batch is sent once its bodies have as much.
_BATCH_BYTES = 1 << 20
_REFUSALS = {
    PreconditionFailedError.code: FailureReason.TARGET_CHANGED,
    DigestMismatchError.code: FailureReason.TARGET_DISAGREES,
    UnsupportedObjectError.code: FailureReason.UNSUPPORTED,
    StoreUnavailableError.code: FailureReason.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class ProvenStep:
    """What to do for one item that differs. `theirs` is the target's item, None where
    it has none, or none that it could name.
    """

    difference: ItemDifference
    action: Action
    reason: str
    theirs: Item | None = None

    @property
    def key(self) -> str:
        """The key at both sides."""
        return self.difference.key

    @property
    def length_bytes(self) -> int:
        """The object bytes that cross at most."""
        ours = self.difference.ours
        is_sent = ours is not None and self.action in (Action.COPY, Action.PATCH)
        return ours.item.size_bytes if ours is not None and is_sent else 0

    @property
    def is_small(self) -> bool:
        """Whether it goes into a batch."""
        return self.action is Action.PROPERTIES or (
            self.action is Action.COPY and self.length_bytes <= BODY_BYTES_MAX
        )


def decide_step(difference: ItemDifference, theirs: Item | None, *, may_delete: bool) -> ProvenStep:
    """What a difference asks for."""
    match difference.kind:
        case ItemDifferenceKind.MISSING:
            return ProvenStep(difference, Action.COPY, "missing at the target")
        case ItemDifferenceKind.EXTRA:
            action = Action.DELETE if may_delete else Action.LEAVE
            return ProvenStep(difference, action, "exists at the target only")
        case ItemDifferenceKind.CHANGED:
            ours = difference.ours.item if difference.ours is not None else None
            if ours is None or theirs is None:
                return ProvenStep(difference, Action.COPY, "changed")
            same = (ours.size_bytes, ours.content) == (theirs.size_bytes, theirs.content)
            if same and ours.content is not None:
                return ProvenStep(difference, Action.PROPERTIES, "other properties", theirs)
            if ours.size_bytes > BODY_BYTES_MAX and theirs.size_bytes and theirs.content:
                return ProvenStep(difference, Action.PATCH, "another content", theirs)
            return ProvenStep(difference, Action.COPY, "another content", theirs)


def refusal_error(code: str, reason: str) -> CopyFailedError:
    """Why the verifier refused a write or a delete, of the code of its error."""
    return CopyFailedError(_REFUSALS.get(code, FailureReason.TARGET_REFUSED), reason)


def batched_writes(
    writes: Iterator[tuple[ProvenStep, Write]],
) -> Iterator[list[tuple[ProvenStep, Write]]]:
    """Writes in batches of about _BATCH_BYTES, and of at most WRITES_MAX."""
    batch, size = list[tuple[ProvenStep, Write]](), 0
    for step, write in writes:
        length = len(write.body or b"")
        if batch and (size + length > _BATCH_BYTES or len(batch) >= WRITES_MAX):
            yield batch
            batch, size = [], 0
        batch.append((step, write))
        size += length
    if batch:
        yield batch

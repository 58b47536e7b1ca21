"""What has to be written so that some keys have other rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from proof.index import IndexChange, ItemEvidence, Position
from proof.item import ID_BYTES, ItemId
from proof.rows import checked_hashes, row_evidence
from proof.symbols import ids_from_hashes, ids_to_bytes
from proof.tables import ItemRow

# The rows of some keys: by key, then by version.
KeyRows: TypeAlias = Mapping[bytes, Mapping[bytes, bytes]]


@dataclass(slots=True)
class ChangePlan:
    """Rows to write and to delete, the journal of it, and how the evidence counts
    change.
    """

    puts: list[ItemRow] = field(default_factory=list)
    deletes: list[ItemRow] = field(default_factory=list)
    changes: list[IndexChange] = field(default_factory=list)
    evidence: list[tuple[ItemEvidence, int]] = field(default_factory=list)


def plan_changes(found: KeyRows, wanted: KeyRows, *, after: Position) -> ChangePlan:
    """The plan by which the keys of `wanted` go from the rows found to those wanted.
    Positions of the journal continue after one.

    Raises:
        IndexDamagedError: a row that was found is damaged.
    """
    plan = ChangePlan()
    places, hashes = list[tuple[str, str, bool, bool]](), list[bytes]()
    for key, rows in wanted.items():
        there = found.get(key, {})
        for version in sorted({*there, *rows}):
            old, new = there.get(version), rows.get(version)
            old_hashes = None if old is None else checked_hashes(key, version, old)
            if old == new:
                continue
            new_hashes = None if new is None else checked_hashes(key, version, new)
            if old is not None:
                plan.evidence.append((row_evidence(old), -1))
            if new is not None:
                plan.evidence.append((row_evidence(new), 1))
                plan.puts.append(ItemRow(key, version, new))
            elif old is not None:
                plan.deletes.append(ItemRow(key, version, old))
            if old_hashes != new_hashes:
                places.append((key.decode(), version.decode(), old is not None, new is not None))
                hashes += [one for one in (old_hashes, new_hashes) if one is not None]
    plan.changes = _numbered(places, hashes, after)
    return plan


def _numbered(
    places: Sequence[tuple[str, str, bool, bool]], hashes: Sequence[bytes], after: Position
) -> list[IndexChange]:
    """The journal of changes in these places, whose hashes come old before new."""
    ids = ids_to_bytes(ids_from_hashes(b"".join(hashes)))
    changes, at = list[IndexChange](), 0
    for position, (key, version, has_old, has_new) in enumerate(places, start=after + 1):
        old = ItemId(ids[at : at + ID_BYTES]) if has_old else None
        at += ID_BYTES * has_old
        new = ItemId(ids[at : at + ID_BYTES]) if has_new else None
        at += ID_BYTES * has_new
        changes.append(IndexChange(Position(position), key, version, old, new))
    return changes

"""One database of an index while it is open: its tables, and what memory keeps of them.

A write goes to the database first and to memory once it is durable. After a write that
failed, what the database holds is unknown until it is opened again. Not safe for
threads, except for ended views.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pydantic import TypeAdapter, ValidationError

from proof.change_plan import ChangePlan
from proof.errors import IndexRefusal, IndexRefusedError
from proof.index import WHOLE, AppliedPositions, IndexChange, ListingNote, Position
from proof.index_state import (
    DerivedState,
    EvidenceTally,
    IndexHead,
    damaged,
    decode_change,
    encode_change,
    root_change,
    seal,
    unseal,
)
from proof.item import Profile
from proof.snapshot import read_ids, split_rows
from proof.spans import SPAN_ITEMS
from proof.tables import ItemTables, TableBatch, TableView
from runtime.errors import DatabaseError

_FORMAT = b"treefold-index-1"
# Names of the values that are stored beside the rows.
_FORMAT_NAME, _PROFILE_NAME, _HEAD_NAME, _STATE_NAME = "format", "profile", "head", "state"
_HOUR_PREFIX, _LISTING_PREFIX = "hour/", "listing/"
_COUNT_BYTES = 8
_NOTE = TypeAdapter(ListingNote)


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """`saved_changes`: changes after which the derived state is saved; to replay them
    takes a second. `journal_rows`: the journal keeps no more. `touched_keys`: as many
    keys may change during a rebuild; they are in memory.
    """

    saved_changes: int = 65_536
    journal_rows: int = 10_000_000
    touched_keys: int = 2_000_000


class OpenGeneration:
    """An open database, closed when its last view has ended after `retire`."""

    def __init__(self, tables: ItemTables, profile: Profile, limits: IndexLimits) -> None:
        """Load what was saved, and follow the journal since. The tables are closed if
        that fails.

        Raises:
            IndexRefusedError: the database is no index, or of another profile.
            IndexDamagedError: what it holds contradicts itself.
            DatabaseError: it cannot be read.
        """
        self.tables = tables
        self._limits = limits
        # A write failed: what the database holds is not known.
        self._failed = False
        self._views = 0
        self._closing: Callable[[], None] | None = None
        self._views_lock = threading.Lock()
        try:
            with tables.view() as view:
                _check_profile(view, profile)
                self.head = IndexHead.from_bytes(view.values(_HEAD_NAME).get(_HEAD_NAME, b""))
                self.tally = EvidenceTally(self.head.levels, _loaded_hours(view))
                self.listings = _loaded_listings(view)
                self.state, self._saved_position = _loaded_state(view, self.head)
        except BaseException:
            tables.close()
            raise

    @property
    def is_retired(self) -> bool:
        """Whether no further view may begin."""
        return self._closing is not None

    @contextmanager
    def view(self) -> Iterator[TableView]:
        """What was written last, unchanged until the context ends."""
        self._check_usable()
        with self._views_lock:
            self._views += 1
        try:
            with self.tables.view() as view:
                yield view
        finally:
            with self._views_lock:
                self._views -= 1
                closing = self._closing if not self._views else None
            if closing is not None:
                closing()

    def write(self, plan: ChangePlan, applied: AppliedPositions | None) -> None:
        """Carry out a plan that continues from the position, as one transaction.

        Raises:
            DatabaseError: the database cannot be written.
        """
        self._check_usable()
        tally = self.tally.copy()
        for evidence, by in plan.evidence:
            tally.change(evidence, by)
        position = Position(self.head.position + len(plan.changes))
        batch = TableBatch(puts=plan.puts, deletes=plan.deletes)
        batch.journal = [encode_change(change) for change in plan.changes]
        batch.values = _hour_values(self.tally, tally)
        if position - self._saved_position >= self._limits.saved_changes:
            self._add_state(batch)
        # A state that was saved needs the journal since.
        most = min(position - self._limits.journal_rows, self._saved_position)
        trimmed = max(self.head.trimmed_through, most)
        if trimmed > self.head.trimmed_through:
            batch.journal_through = trimmed
        root = self.head.root + root_change(plan.changes)
        head = IndexHead(position, Position(trimmed), root, tally.levels, applied)
        self._commit(batch, head)
        self.tally = tally
        self.state.apply(plan.changes)

    def trim_journal(self, through: Position) -> None:
        """Drop the journal up to a position.

        Raises:
            DatabaseError: the database cannot be written.
        """
        self._check_usable()
        if through > self.head.trimmed_through:
            batch = TableBatch(journal_through=through)
            if through > self._saved_position:
                self._add_state(batch)
            self._commit(batch, replace(self.head, trimmed_through=through))

    def note_listing(self, prefix: str, note: ListingNote) -> None:
        """Store a note of a listing.

        Raises:
            DatabaseError: the database cannot be written.
        """
        self._check_usable()
        self._commit(TableBatch(values={_LISTING_PREFIX + prefix: _note_bytes(note)}), self.head)
        self.listings[prefix] = note

    def save_state(self) -> None:
        """Save the derived state, so that the next start replays nothing.

        Raises:
            DatabaseError: the database cannot be written.
        """
        if not self._failed and self._saved_position != self.head.position:
            batch = TableBatch()
            self._add_state(batch)
            self._commit(batch, self.head)

    def retire(self, then: Callable[[], None] = lambda: None) -> None:
        """Close the tables and call `then`, once the last view has ended."""

        def close() -> None:
            self.tables.close()
            then()

        with self._views_lock:
            self._closing = close
            is_unused = not self._views
        if is_unused:
            close()

    def _add_state(self, batch: TableBatch) -> None:
        """Add the state as it is before the batch; the journal leads on from it."""
        if any(count > 2 * SPAN_ITEMS for _, count in self.state.spans.counts(WHOLE)):
            with self.tables.view() as view:
                self.state.spans.rebalance(
                    split=lambda span, parts: split_rows(view, span, parts, SPAN_ITEMS * parts),
                    read_ids=lambda span: read_ids(view, span),
                )
        batch.values[_STATE_NAME] = self.state.to_bytes()

    def _commit(self, batch: TableBatch, head: IndexHead) -> None:
        batch.values[_HEAD_NAME] = head.to_bytes()
        try:
            self.tables.write(batch)
        except BaseException:
            self._failed = True
            raise
        if _STATE_NAME in batch.values:
            self._saved_position = self.state.position
        self.head = head

    def _check_usable(self) -> None:
        if self._failed or self.is_retired:
            why = "a write to it failed" if self._failed else "it was closed"
            raise DatabaseError(f"the index is not open: {why}", hint="Open the index again.")


def begin_values(
    profile: Profile,
    state: DerivedState,
    tally: EvidenceTally,
    applied: AppliedPositions | None = None,
    listings: Mapping[str, ListingNote] | None = None,
) -> dict[str, bytes | None]:
    """The values of a generation whose journal begins after the state's position."""
    position = state.position
    head = IndexHead(position, position, state.root, tally.levels, applied)
    return {
        _FORMAT_NAME: _FORMAT,
        _PROFILE_NAME: profile.digest,
        _HEAD_NAME: head.to_bytes(),
        _STATE_NAME: state.to_bytes(),
        **_hour_values(EvidenceTally(), tally),
        **{
            _LISTING_PREFIX + prefix: _note_bytes(note) for prefix, note in (listings or {}).items()
        },
    }


def rows_by_key(tables: ItemTables, keys: Iterable[bytes]) -> dict[bytes, dict[bytes, bytes]]:
    """The rows of each key as written last, by version.

    Raises:
        DatabaseError: the database cannot be read.
    """
    wanted = list(keys)
    found = tables.versions(wanted)
    return {
        key: {row.version: row.row for row in rows} for key, rows in zip(wanted, found, strict=True)
    }


def read_journal(view: TableView, *, after: Position, through: Position) -> list[IndexChange]:
    """The journal after one position and up to another, ascending.

    Raises:
        IndexDamagedError: a row is missing or damaged.
    """
    changes = [decode_change(row) for row in view.journal(after=after, through=through)]
    if [change.position for change in changes] != list(range(after + 1, through + 1)):
        raise damaged(f"rows of its journal from {after + 1} to {through} are missing")
    return changes


def _check_profile(view: TableView, profile: Profile) -> None:
    found = view.values(_FORMAT_NAME).get(_FORMAT_NAME)
    if found != _FORMAT:
        raise IndexRefusedError(
            IndexRefusal.NOT_AN_INDEX.value,
            "the database is not an index of this version",
            hint="Use the version of treefold that wrote it, or name another folder.",
        )
    if view.values(_PROFILE_NAME).get(_PROFILE_NAME) != profile.digest:
        raise IndexRefusedError(
            IndexRefusal.OTHER_PROFILE.value,
            "the index was made with another profile, or with another secret key",
            hint="Use the policy that it was made with, or build another index in a new folder.",
        )


def _loaded_hours(view: TableView) -> dict[int, int]:
    hours = dict[int, int]()
    for name, sealed in view.values(_HOUR_PREFIX).items():
        data, hour = unseal(sealed), name.removeprefix(_HOUR_PREFIX)
        hours[int.from_bytes(data[:_COUNT_BYTES], "big")] = int.from_bytes(
            data[_COUNT_BYTES:], "big"
        )
        if hour != str(int.from_bytes(data[:_COUNT_BYTES], "big")):
            raise damaged("a count of readings has another name")
    return hours


def _loaded_listings(view: TableView) -> dict[str, ListingNote]:
    try:
        return {
            name.removeprefix(_LISTING_PREFIX): _NOTE.validate_json(unseal(data))
            for name, data in view.values(_LISTING_PREFIX).items()
        }
    except ValidationError as error:
        raise damaged("a note of a listing cannot be read") from error


def _loaded_state(view: TableView, head: IndexHead) -> tuple[DerivedState, Position]:
    """The state at the head's position, and the position at which it was saved."""
    state = DerivedState.from_bytes(view.values(_STATE_NAME).get(_STATE_NAME, b""))
    saved = state.position
    if not head.trimmed_through <= saved <= head.position:
        raise damaged("its journal does not reach back to the saved sums")
    state.apply(read_journal(view, after=saved, through=head.position))
    if state.root != head.root or head.root.count != sum(head.levels):
        raise damaged("its sums differ from those of its last batch")
    return state, saved


def _hour_values(old: EvidenceTally, new: EvidenceTally) -> dict[str, bytes | None]:
    """The counts of readings that are other ones now."""
    return {
        f"{_HOUR_PREFIX}{hour}": seal(
            hour.to_bytes(_COUNT_BYTES, "big") + new.hours[hour].to_bytes(_COUNT_BYTES, "big")
        )
        if hour in new.hours
        else None
        for hour, _ in old.hours.items() ^ new.hours.items()
    }


def _note_bytes(note: ListingNote) -> bytes:
    return seal(_NOTE.dump_json(note))

"""The persistent index of a bucket: items, a journal, and what is derived from them.

A batch is one transaction: rows, their journal, and a head with the position, the root
and the counts. Symbols and span sums live in memory. They are saved now and then with
their position; after a crash the journal since then leads to the head, or the index is
damaged.

A rebuild fills another generation from a listing while this one is used and changed.
Then the keys that changed meanwhile are taken over, and the new one counts.

One process holds the folder (its caller has the lock). Threads may share an index: one
writes at a time, and snapshots are consistent.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TypeVar

from proof.change_plan import plan_changes
from proof.errors import JournalTrimmedError, RebuildLimitError
from proof.generations import (
    OPENERS,
    Generation,
    StorageKind,
    TablesOpener,
    newest_generation,
    publish,
    remove_generation,
    remove_others,
    storage_for,
)
from proof.index import AppliedPositions, IndexChange, ListingNote, Position, StampedItem
from proof.index_state import DerivedState, EvidenceTally, derive
from proof.item import ItemHasher, Profile
from proof.open_generation import (
    IndexLimits,
    OpenGeneration,
    begin_values,
    read_journal,
    rows_by_key,
)
from proof.rocks_index import RocksTables
from proof.root import SetRoot
from proof.rows import decode_row, encode_row
from proof.self_check import SelfCheck, self_check
from proof.snapshot import StoredSnapshot
from proof.symbols import KEPT_SYMBOLS
from proof.tables import ItemRow, ItemTables, TableBatch
from runtime.disk import Disk

_Tables = TypeVar("_Tables", bound=ItemTables)
_DEFAULT_LIMITS = IndexLimits()
# Keys that changed during a rebuild are taken over in batches of this many.
_TAKEN_KEYS = 1_000


class StoredIndex:
    """ItemIndex and IndexWriter over a folder."""

    def __init__(
        self,
        folder: Path,
        profile: Profile,
        *,
        disk: Disk,
        limits: IndexLimits = _DEFAULT_LIMITS,
        openers: Mapping[StorageKind, TablesOpener] = OPENERS,
    ) -> None:
        """Open the index in a folder, or create an empty one.

        Raises:
            IndexRefusedError: what is there is no index, one of a newer schema, or one
                of another profile.
            IndexDamagedError: the index contradicts itself.
            DatabaseError: its database cannot be opened.
            DiskError: the folder cannot be written.
        """
        self._folder, self._profile, self._disk = folder, profile, disk
        self._limits, self._openers = limits, openers
        self._hasher = ItemHasher(profile)
        self._lock = threading.Lock()
        # The keys that were applied since the current rebuild began, changed or not.
        self._touched: set[bytes] | None = None
        disk.make_folder(folder)
        newest = newest_generation(folder, disk)
        remove_others(folder, newest, disk)
        if newest is None:
            newest = Generation(1, StorageKind.SQLITE)
            self._create(newest)
        self._generation = newest
        self._now = self._opened(newest)

    @contextmanager
    def snapshot(self) -> Iterator[StoredSnapshot]:
        """See ItemIndex.snapshot.

        Raises:
            DatabaseError: the database cannot be read.
        """
        with ExitStack() as stack:
            with self._lock:
                now = self._now
                made = StoredSnapshot(
                    stack.enter_context(now.view()),
                    position=now.head.position,
                    applied=now.head.applied,
                    evidence=now.tally.counts,
                    symbols=now.state.symbols.head(KEPT_SYMBOLS),
                    spans=now.state.spans.copy(),
                )
            yield made

    def changes(self, *, after: Position, through: Position) -> list[IndexChange]:
        """See ItemIndex.changes.

        Raises:
            JournalTrimmedError: the journal no longer reaches back to `after`.
            IndexDamagedError: a row of the journal is missing or damaged.
            DatabaseError: the database cannot be read.
        """
        with ExitStack() as stack:
            with self._lock:
                view, head = stack.enter_context(self._now.view()), self._now.head
            if after < head.trimmed_through:
                raise JournalTrimmedError(
                    f"the journal begins after position {head.trimmed_through}, not {after}",
                    hint="Compare again, from a newer position.",
                    after=after,
                    trimmed_through=head.trimmed_through,
                )
            last = Position(max(after, min(through, head.position)))
            return read_journal(view, after=after, through=last)

    def rows(self, *, start_after: str, limit: int, prefix: str = "") -> list[StampedItem]:
        """See IndexWriter.rows."""
        # UTF-8 has no byte 255.
        end = prefix.encode()[:-1] + bytes((prefix.encode()[-1] + 1,)) if prefix else None
        first = max(prefix.encode(), start_after.encode() + b"\0" if start_after else b"")
        found = list[StampedItem]()
        if end is not None and first >= end:
            return found
        with ExitStack() as stack:
            with self._lock:
                view = stack.enter_context(self._now.view())
            for _, versions in groupby(view.rows(first, end), lambda row: row.key):
                if len(found) >= limit:
                    break
                found += [decode_row(*row) for row in versions]
        return found

    def row(self, key: str) -> StampedItem | None:
        """See IndexWriter.row."""
        with self._lock:
            rows = rows_by_key(self._now.tables, [key.encode()])
        row = rows[key.encode()].get(b"")
        return None if row is None else decode_row(key.encode(), b"", row)

    def apply(
        self,
        changes: Sequence[tuple[str, StampedItem | None]],
        *,
        applied: AppliedPositions | None = None,
    ) -> SetRoot:
        """See IndexWriter.apply."""
        with self._lock:
            now = self._now
            found = rows_by_key(now.tables, dict.fromkeys(key.encode() for key, _ in changes))
            if self._touched is not None and len(self._touched) <= self._limits.touched_keys:
                self._touched |= found.keys()
            wanted = {key: dict(rows) for key, rows in found.items()}
            for key, stamped in changes:
                rows = wanted[key.encode()]
                if stamped is None:
                    rows.clear()
                else:
                    assert stamped.item.key == key
                    row = encode_row(self._hasher.hashes(stamped.item), stamped)
                    rows[stamped.item.version.encode()] = row
            plan = plan_changes(found, wanted, after=now.head.position)
            if plan.puts or plan.deletes or applied not in (None, now.head.applied):
                now.write(plan, applied or now.head.applied)
            return now.head.root

    def note_listing(self, prefix: str, *, began_at_s: int, complete: bool) -> None:
        """See IndexWriter.note_listing."""
        with self._lock:
            self._now.note_listing(prefix, ListingNote(began_at_s, complete))

    def listing(self, prefix: str) -> ListingNote | None:
        """What was noted of the last listing below exactly this prefix."""
        with self._lock:
            return self._now.listings.get(prefix)

    def trim_journal(self, *, through: Position) -> None:
        """See IndexWriter.trim_journal."""
        with self._lock:
            self._now.trim_journal(min(through, self._now.head.position))

    @contextmanager
    def rebuild(self, *, items: int) -> Iterator["IndexRebuild"]:
        """Build the next generation from a listing, for about so many items. Without
        `IndexRebuild.finish` nothing changes. One rebuild at a time.

        Raises:
            DatabaseError: the new database cannot be written.
        """
        kind = storage_for(items)
        with self._building(kind, self._openers[kind]) as (generation, tables):
            yield IndexRebuild(self._hasher, tables, partial(self._take_over, generation))

    def take_files(
        self, files: Sequence[Path], derived: tuple[DerivedState, EvidenceTally]
    ) -> SetRoot:
        """Let a generation count that was made in parts (`proof.index_parts`), by its
        files and what follows from its items. What changed meanwhile is taken over, as
        by a rebuild. The root afterwards.

        Raises:
            RebuildLimitError: too much changed meanwhile; the index is as before.
            DatabaseError: a file is missing or damaged, or the database cannot be
                written.
            DiskError: the folder cannot be written.
        """
        with self._building(StorageKind.ROCKSDB, _new_rocks) as (generation, tables):
            tables.take_files(files)
            tables.settle()
            return self._take_over(generation, tables, derived, None)

    @contextmanager
    def _building(
        self, kind: StorageKind, opener: Callable[[Path, bool], _Tables]
    ) -> Iterator[tuple[Generation, _Tables]]:
        """The tables of the next generation; at the end they are removed, unless they
        got the name of one that counts.
        """
        with self._lock:
            assert self._touched is None
            self._touched = set()
            generation = self._generation.next(kind)
        try:
            tables = opener(generation.building_path(self._folder), True)
            try:
                yield generation, tables
            finally:
                tables.close()
                remove_generation(self._folder, generation, self._disk, building=True)
        finally:
            with self._lock:
                self._touched = None

    def self_check(self) -> SelfCheck:
        """Compute everything derived from the items anew, and compare. It reads the
        whole database; others may write meanwhile.

        Raises:
            DatabaseError: the database cannot be read.
        """
        with ExitStack() as stack:
            with self._lock:
                now = self._now
                view = stack.enter_context(now.view())
                kept = DerivedState.from_bytes(now.state.to_bytes())
                tally = now.tally.copy()
            return self_check(view, self._hasher, kept, tally)

    def close(self) -> None:
        """Save the derived state and close the database; idempotent. Snapshots stay
        readable until their end.

        Raises:
            DatabaseError: the state could not be saved; nothing else is lost.
        """
        with self._lock:
            if not self._now.is_retired:
                try:
                    self._now.save_state()
                finally:
                    self._now.retire()

    def _create(self, generation: Generation) -> None:
        """An empty generation."""
        tables = self._openers[generation.kind](generation.building_path(self._folder), True)
        try:
            values = begin_values(self._profile, DerivedState.empty(Position(0)), EvidenceTally())
            tables.write(TableBatch(values=values))
            tables.settle()
        finally:
            tables.close()
        publish(self._folder, generation, self._disk)

    def _opened(self, generation: Generation) -> OpenGeneration:
        tables = self._openers[generation.kind](generation.path(self._folder), False)
        return OpenGeneration(tables, self._profile, self._limits)

    def _take_over(
        self,
        generation: Generation,
        tables: ItemTables,
        derived: tuple[DerivedState, EvidenceTally],
        applied: AppliedPositions | None,
    ) -> SetRoot:
        """Bring the keys that changed since the rebuild began into its tables, and let
        its generation count.
        """
        state, tally = derived
        with self._lock:
            now, touched = self._now, self._touched
            assert touched is not None
            if len(touched) > self._limits.touched_keys:
                raise RebuildLimitError(
                    f"more than {self._limits.touched_keys} keys changed during the rebuild",
                    hint="Rebuild again, while less changes.",
                )
            keys = iter(sorted(touched))
            while some := list(islice(keys, _TAKEN_KEYS)):
                found, wanted = rows_by_key(tables, some), rows_by_key(now.tables, some)
                plan = plan_changes(found, wanted, after=state.position)
                tables.write(TableBatch(puts=plan.puts, deletes=plan.deletes))
                state.apply(plan.changes)
                for evidence, by in plan.evidence:
                    tally.change(evidence, by)
            # A position of its own: the items may differ from those at the last one.
            state.position = Position(now.head.position + 1)
            applied = applied or now.head.applied
            values = begin_values(self._profile, state, tally, applied, now.listings)
            tables.write(TableBatch(values=values))
            tables.close()
            publish(self._folder, generation, self._disk)
            before, self._generation = self._generation, generation
            # From here on the new generation counts, even if it cannot be opened.
            now.retire(partial(remove_generation, self._folder, before, self._disk))
            self._now = self._opened(generation)
            return self._now.head.root


def _new_rocks(path: Path, building: bool) -> RocksTables:
    return RocksTables(path, building=building)


class IndexRebuild:
    """The building of a generation from a listing."""

    def __init__(
        self,
        hasher: ItemHasher,
        tables: ItemTables,
        take_over: Callable[
            [ItemTables, tuple[DerivedState, EvidenceTally], AppliedPositions | None], SetRoot
        ],
    ) -> None:
        """Internal: use `StoredIndex.rebuild`."""
        self._hasher, self._tables, self._take_over = hasher, tables, take_over

    def add(self, items: Iterable[StampedItem]) -> None:
        """Add listed items in any order; of two for one key and version the later
        counts. Fastest in the order of keys, some thousands at a time.

        Raises:
            DatabaseError: the database cannot be written.
        """
        puts = list[ItemRow]()
        for stamped in items:
            item = stamped.item
            row = encode_row(self._hasher.hashes(item), stamped)
            puts.append(ItemRow(item.key.encode(), item.version.encode(), row))
        self._tables.write(TableBatch(puts=puts))

    def finish(self, *, applied: AppliedPositions | None = None) -> SetRoot:
        """Take over what changed meanwhile, and let the new generation count, durably;
        its root. `applied` is as for `apply`.

        Raises:
            RebuildLimitError: too much changed meanwhile; the index is as before.
            IndexDamagedError: a row is damaged.
            DatabaseError: the database cannot be written or read.
            DiskError: the folder cannot be written.
        """
        self._tables.settle()
        with self._tables.view() as view:
            derived = derive(view.rows(b"", None), Position(0))
        return self._take_over(self._tables, derived, applied)

"""Stored indexes for tests: tables in memory, items by chance, and a dictionary to
compare with.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from proof.columns import NameColumns
from proof.generations import OPENERS, StorageKind, TablesOpener
from proof.index import (
    WHOLE,
    EvidenceCounts,
    ItemEvidence,
    KeyRange,
    Position,
    Stamp,
    StampedItem,
)
from proof.index_state import HOUR_S
from proof.item import (
    KEY_HASH_BYTES,
    EvidenceLevel,
    HashAlgorithm,
    Item,
    ItemHasher,
    Profile,
)
from proof.open_generation import IndexLimits
from proof.root import SetRoot
from proof.rows import decode_row, encode_row
from proof.stored_index import StoredIndex
from proof.symbols import KEPT_SYMBOLS, CodedSymbols, Ids, ids_from_bytes
from proof.tables import ItemRow, JournalRow, RowColumns, TableBatch
from replicator.stores.port import ObjectFacts
from runtime.disk import Disk

PROFILE = Profile(b"s" * 32, HashAlgorithm.MD5)
HASHER = ItemHasher(PROFILE)
Model = dict[tuple[str, str], StampedItem]


class MemoryTables:
    """ItemTables in memory; a file at their path says that they are there."""

    def __init__(self) -> None:
        self._rows: dict[tuple[bytes, bytes], bytes] = {}
        self._journal: dict[int, bytes] = {}
        self._values: dict[str, bytes] = {}

    @contextmanager
    def view(self) -> Iterator["_MemoryView"]:
        """See ItemTables."""
        yield _MemoryView(dict(self._rows), dict(self._journal), dict(self._values))

    def versions(self, keys: Sequence[bytes]) -> list[list[ItemRow]]:
        """See ItemTables."""
        found = dict[bytes, list[ItemRow]]()
        for (key, version), row in sorted(self._rows.items()):
            found.setdefault(key, []).append(ItemRow(key, version, row))
        return [found.get(key, []) for key in keys]

    def write(self, batch: TableBatch) -> None:
        """See ItemTables."""
        for one in batch.deletes:
            del self._rows[one.key, one.version]
        self._rows |= {(one.key, one.version): one.row for one in batch.puts}
        self._journal |= dict(batch.journal)
        for position in [one for one in self._journal if one <= batch.journal_through]:
            del self._journal[position]
        for name, data in batch.values.items():
            if data is None:
                self._values.pop(name, None)
            else:
                self._values[name] = data

    def settle(self) -> None:
        """See ItemTables."""

    def close(self) -> None:
        """See ItemTables."""


class _MemoryView:
    def __init__(
        self,
        rows: dict[tuple[bytes, bytes], bytes],
        journal: dict[int, bytes],
        values: dict[str, bytes],
    ) -> None:
        self._rows, self._journal, self._values = rows, journal, values

    def rows(self, start: bytes, end: bytes | None) -> Iterator[ItemRow]:
        for (key, version), row in sorted(self._rows.items()):
            if start <= key and (end is None or key < end):
                yield ItemRow(key, version, row)

    def by_hash(self, key_hashes: npt.NDArray[np.uint64]) -> RowColumns:
        wanted = set(key_hashes.tolist())
        return RowColumns.of(
            [
                (key, version, row)
                for (key, version), row in self._rows.items()
                if int.from_bytes(row[:KEY_HASH_BYTES], "big") in wanted
            ]
        )

    def names_by_hash(self, key_hashes: npt.NDArray[np.uint64]) -> NameColumns:
        return self.by_hash(key_hashes).names

    def journal(self, *, after: int, through: int) -> Iterator[JournalRow]:
        for position in sorted(self._journal):
            if after < position <= through:
                yield JournalRow(position, self._journal[position])

    def values(self, prefix: str) -> dict[str, bytes]:
        return {name: data for name, data in self._values.items() if name.startswith(prefix)}

    def damage(self) -> list[str]:
        return []


def memory_opener() -> TablesOpener:
    """Opens tables in memory, again and under other names; a file has their number."""
    made = list[MemoryTables]()

    def opened(path: Path, building: bool) -> MemoryTables:
        if building:
            path.write_text(str(len(made)))
            made.append(MemoryTables())
        return made[int(path.read_text())]

    return opened


def openers_of(name: str) -> Mapping[StorageKind, TablesOpener]:
    """Openers by which every generation is of one kind: memory, sqlite or rocksdb."""
    opener = memory_opener() if name == "memory" else OPENERS[StorageKind(name)]
    return dict.fromkeys(StorageKind, opener)


KINDS = ("memory", "sqlite", "rocksdb")
_LIMITS = IndexLimits(saved_changes=20)


def open_index(
    folder: Path,
    openers: Mapping[StorageKind, TablesOpener] = OPENERS,
    *,
    limits: IndexLimits = _LIMITS,
    profile: Profile = PROFILE,
) -> StoredIndex:
    """An index that saves its sums often."""
    return StoredIndex(folder, profile, disk=Disk(), limits=limits, openers=openers)


def stamped(key: str, number: int = 0, *, version: str = "") -> StampedItem:
    """An item of its own for each number; its fields take every form that a row has."""
    chance = random.Random(f"{key} {number}")
    content = chance.choice([None, chance.randbytes(16), chance.randbytes(4)])
    level = chance.choice(list(EvidenceLevel))
    read_at_s = chance.randrange(5 * HOUR_S) if level is EvidenceLevel.READ else None
    etags = ["", "W/odd-é", "ABCDEF", chance.randbytes(16).hex(), "a" * 300, f"{content!r}"]
    etag = content.hex() if content and chance.random() < 0.5 else chance.choice(etags)
    item = Item(
        key,
        chance.choice([0, 1, 300, 1 << 40]) + number,
        content,
        chance.choice([b"", chance.randbytes(16)]),
        version,
        chance.random() < 0.2,
    )
    stamp = Stamp(chance.choice(["", "v" * 32]), etag, chance.randrange(1 << 44))
    return StampedItem(item, ItemEvidence(level, read_at_s), stamp, chance.random() < 0.1)


def fit(objects: Iterable[ObjectFacts]) -> None:
    """Whatever is listed has a row in an index."""
    for facts in objects:
        item = Item(facts.key, facts.size_bytes, facts.hashes[0].digest if facts.hashes else None)
        stamp = Stamp(facts.version, facts.etag, facts.modified_ms)
        row = StampedItem(item, ItemEvidence(EvidenceLevel.LISTED), stamp)
        assert decode_row(facts.key.encode(), b"", encode_row(bytes(12), row)) == row


def changed(model: Model, changes: Sequence[tuple[str, StampedItem | None]]) -> None:
    """Do to a dictionary what `apply` does to an index."""
    for key, one in changes:
        if one is None:
            for place in [place for place in model if place[0] == key]:
                del model[place]
        else:
            model[key, one.item.version] = one


def ids_of(items: Sequence[StampedItem]) -> Ids:
    """The IDs of some items."""
    return ids_from_bytes(b"".join(HASHER.id(one.item) for one in items))


def evidence_of(model: Model) -> EvidenceCounts:
    """The counts that an index reports, whose hours are whole."""
    levels = [one.evidence.level for one in model.values()]
    read = [one.evidence.read_at_s for one in model.values() if one.evidence.read_at_s is not None]
    return EvidenceCounts(
        *(levels.count(level) for level in EvidenceLevel),
        min(read) // HOUR_S * HOUR_S if read else None,
    )


def assert_is(index: StoredIndex, model: Model, ranges: Sequence[KeyRange] = (WHOLE,)) -> None:
    """Everything that an index answers is what the dictionary says."""
    ordered = [model[place] for place in sorted(model)]
    symbols = CodedSymbols.zeros(KEPT_SYMBOLS)
    symbols.add(ids_of(ordered))
    with index.snapshot() as now:
        assert now.evidence == evidence_of(model)
        assert now.symbols(KEPT_SYMBOLS).to_bytes() == symbols.to_bytes()
        for one in ranges:
            inside = ids_of([stored for stored in ordered if stored.item.key in one])
            assert now.roots([one]) == [SetRoot.of(inside)]
            assert sorted(now.ids(one).tolist()) == sorted(inside.tolist())
        found = now.find(hashes_of(ordered))
        assert {(row.item, row.id, row.evidence) for row in found} == {
            (one.item, HASHER.id(one.item), one.evidence) for one in ordered
        }
        assert len(found) == len(ordered)
    assert index.rows(start_after="", limit=len(ordered) + 1) == ordered
    check = index.self_check()
    assert (check.items, check.damage) == (len(ordered), ())


def hashes_of(items: Sequence[StampedItem]) -> npt.NDArray[np.uint64]:
    """The key hashes of some items."""
    return ids_of(items)[:, 0] >> np.uint64(16)


def rewound(index: StoredIndex, cut: Position) -> SetRoot:
    """The root at an earlier position, by the journal."""
    with index.snapshot() as now:
        root = now.roots([WHOLE])[0]
        for change in index.changes(after=cut, through=now.position):
            root += SetRoot.of_item(change.old) - SetRoot.of_item(change.new)
    return root

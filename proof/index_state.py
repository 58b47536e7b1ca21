"""What an index derives from its items: root, span sums, symbols, counts by evidence.

All of it are sums and xors, so that a change is added without reading anything else. It
is saved now and then, and follows from the saved state and the journal since. Computing
it from the items must give the same; the self-check does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from zlib import crc32

from pydantic import TypeAdapter, ValidationError

from proof.errors import IndexDamagedError
from proof.index import AppliedPositions, EvidenceCounts, IndexChange, ItemEvidence, Position
from proof.item import ID_BYTES, EvidenceLevel, ItemId
from proof.root import SetRoot
from proof.rows import checked_hashes, row_evidence
from proof.spans import SPAN_ITEMS, SpanSums
from proof.symbols import (
    KEPT_SYMBOLS,
    SYMBOL_BYTES,
    CodedSymbols,
    Ids,
    ids_from_bytes,
    ids_from_hashes,
)
from proof.tables import ItemRow, JournalRow

HOUR_S = 3600
_LEVELS = len(EvidenceLevel)
_CRC_BYTES = 4
_POSITION_BYTES = 8
_SYMBOLS_BYTES = KEPT_SYMBOLS * SYMBOL_BYTES
_LENGTH_BYTES = 4
_NO_ID = bytes(ID_BYTES)


@dataclass(frozen=True, slots=True)
class IndexHead:
    """What is written with each batch. `trimmed_through` is the last position that the
    journal no longer has; `levels` counts items by evidence, LISTED first.
    """

    position: Position
    trimmed_through: Position
    root: SetRoot
    levels: tuple[int, int, int]
    applied: AppliedPositions | None

    def to_bytes(self) -> bytes:
        """For storage."""
        return seal(_HEAD.dump_json(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> "IndexHead":
        """Read `to_bytes`.

        Raises:
            IndexDamagedError: these bytes are not a head.
        """
        try:
            return _HEAD.validate_json(unseal(data))
        except ValidationError as error:
            raise damaged("its head cannot be read") from error


_HEAD = TypeAdapter(IndexHead)


class EvidenceTally:
    """Counts items by level, and those that were read by the hour of the reading."""

    def __init__(
        self, levels: Sequence[int] = (0,) * _LEVELS, hours: Mapping[int, int] | None = None
    ) -> None:
        self._levels = list(levels)
        self.hours = dict(hours or {})

    @property
    def levels(self) -> tuple[int, int, int]:
        """Items by level, LISTED first."""
        listed, recorded, read = self._levels
        return listed, recorded, read

    @property
    def counts(self) -> EvidenceCounts:
        """The counts, and the hour of the oldest reading, rounded down."""
        oldest = min(self.hours) * HOUR_S if self.hours else None
        return EvidenceCounts(*self.levels, oldest)

    def copy(self) -> "EvidenceTally":
        """A tally that changes on its own."""
        return EvidenceTally(self._levels, self.hours)

    def change(self, evidence: ItemEvidence, by: int) -> None:
        """Count an item with this evidence (+1), or no longer (-1)."""
        self._levels[evidence.level - 1] += by
        if evidence.read_at_s is not None:
            hour = evidence.read_at_s // HOUR_S
            self.hours[hour] = self.hours.get(hour, 0) + by
            if not self.hours[hour]:
                del self.hours[hour]


class DerivedState:
    """The sums and symbols at one position. Not safe for threads."""

    def __init__(self, position: Position, symbols: CodedSymbols, spans: SpanSums) -> None:
        self.position = position
        self.symbols = symbols
        self.spans = spans
        self.root = spans.root

    @classmethod
    def empty(cls, position: Position) -> "DerivedState":
        """Of no items."""
        return cls(position, CodedSymbols.zeros(KEPT_SYMBOLS), SpanSums())

    def apply(self, changes: Sequence[IndexChange]) -> None:
        """Follow the journal; changes continue from the position."""
        if not changes:
            return
        self.symbols.add(_joined(change.new for change in changes))
        self.symbols.remove(_joined(change.old for change in changes))
        for change in changes:
            self.spans.change(change.key, change.old, change.new)
        self.root += root_change(changes)
        self.position = changes[-1].position

    def to_bytes(self) -> bytes:
        """For storage."""
        position = self.position.to_bytes(_POSITION_BYTES, "big")
        return seal(position + self.symbols.to_bytes() + self.spans.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes) -> "DerivedState":
        """Read `to_bytes`.

        Raises:
            IndexDamagedError: these bytes are not a state.
        """
        whole = unseal(data)
        at = _POSITION_BYTES + _SYMBOLS_BYTES
        try:
            spans = SpanSums.from_bytes(whole[at:])
        except ValueError as error:
            raise damaged("its span sums cannot be read") from error
        symbols = CodedSymbols.from_bytes(whole[_POSITION_BYTES:at])
        return cls(Position(int.from_bytes(whole[:_POSITION_BYTES], "big")), symbols, spans)


def root_change(changes: Sequence[IndexChange]) -> SetRoot:
    """By how much changes move the root."""
    new = SetRoot.of(_joined(change.new for change in changes))
    return new - SetRoot.of(_joined(change.old for change in changes))


def derive(
    rows: Iterable[ItemRow],
    position: Position,
    check: Callable[[ItemRow], None] = lambda _row: None,
) -> tuple[DerivedState, EvidenceTally]:
    """The state and the tally of all rows of an index, ascending; `check` is called
    with each row.

    Raises:
        IndexDamagedError: a row is damaged.
    """
    symbols, tally = CodedSymbols.zeros(KEPT_SYMBOLS), EvidenceTally()

    def spans() -> Iterator[tuple[str, SetRoot]]:
        for number, span in enumerate(_spans(rows)):
            ids = ids_from_hashes(b"".join(checked_hashes(*row) for row in span))
            symbols.add(ids)
            for row in span:
                check(row)
                tally.change(row_evidence(row.row), 1)
            yield span[0].key.decode() if number else "", SetRoot.of(ids)

    sums = SpanSums.of(spans())
    return DerivedState(position, symbols, sums), tally


def encode_change(change: IndexChange) -> JournalRow:
    """A row of the journal, with a checksum."""
    key, version = change.key.encode(), change.version.encode()
    body = b"".join(
        (
            change.old or _NO_ID,
            change.new or _NO_ID,
            len(key).to_bytes(_LENGTH_BYTES, "big"),
            key,
            version,
        )
    )
    return JournalRow(change.position, _position_crc(change.position, body) + body)


def decode_change(row: JournalRow) -> IndexChange:
    """Read `encode_change`. No ID is zero: an ID of zeros would fail its own check.

    Raises:
        IndexDamagedError: the row is damaged.
    """
    body = row.change[_CRC_BYTES:]
    if row.change[:_CRC_BYTES] != _position_crc(row.position, body):
        raise damaged(f"row {row.position} of its journal is not what was written")
    old, new, at = body[:ID_BYTES], body[ID_BYTES : 2 * ID_BYTES], 2 * ID_BYTES
    length = int.from_bytes(body[at : at + _LENGTH_BYTES], "big")
    at += _LENGTH_BYTES
    return IndexChange(
        Position(row.position),
        body[at : at + length].decode(),
        body[at + length :].decode(),
        None if old == _NO_ID else ItemId(old),
        None if new == _NO_ID else ItemId(new),
    )


def seal(data: bytes) -> bytes:
    """Bytes with their checksum before them."""
    return crc32(data).to_bytes(_CRC_BYTES, "big") + data


def unseal(data: bytes) -> bytes:
    """The bytes that were sealed.

    Raises:
        IndexDamagedError: the checksum does not match.
    """
    if data[:_CRC_BYTES] != crc32(data[_CRC_BYTES:]).to_bytes(_CRC_BYTES, "big"):
        raise damaged("a value is not what was written")
    return data[_CRC_BYTES:]


def damaged(text: str) -> IndexDamagedError:
    """The error for an index that contradicts itself."""
    return IndexDamagedError(
        f"the index is damaged: {text}", hint="Rebuild the index from a listing of the bucket."
    )


def _position_crc(position: int, body: bytes) -> bytes:
    seed = crc32(position.to_bytes(_POSITION_BYTES, "big"))
    return crc32(body, seed).to_bytes(_CRC_BYTES, "big")


def _joined(ids: Iterable[ItemId | None]) -> Ids:
    return ids_from_bytes(b"".join(one for one in ids if one is not None))


def _spans(rows: Iterable[ItemRow]) -> Iterator[list[ItemRow]]:
    """The rows in lists of SPAN_ITEMS or a little more: all versions of a key are in
    one.
    """
    versions = (list(group) for _, group in groupby(rows, lambda row: row.key))
    span = list[ItemRow]()
    for group in versions:
        span += group
        if len(span) >= SPAN_ITEMS:
            yield span
            span = []
    if span:
        yield span

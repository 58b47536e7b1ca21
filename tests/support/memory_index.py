"""An index in memory: the twin of those on disk, and a pair of sides that compare."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from proof.answers import TargetAnswers
from proof.columns import NameColumns
from proof.comparison import BucketComparison, SourceComparison
from proof.errors import JournalTrimmedError
from proof.index import (
    WHOLE,
    AppliedPositions,
    EvidenceCounts,
    IndexChange,
    IndexedItem,
    ItemEvidence,
    KeyRange,
    Position,
)
from proof.item import EvidenceLevel, Item, ItemHasher, ItemId, Profile
from proof.messages import AnswerMessage, QuestionMessage, WindowsAnswer, WindowsQuestion
from proof.naming import ItemDifference
from proof.root import SetRoot
from proof.symbols import (
    KEPT_SYMBOLS,
    CodedSymbols,
    Ids,
    ids_from_bytes,
    ids_from_hashes,
    ids_to_bytes,
)
from proof.wire import decode_answer, decode_question, encode_answer, encode_question

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROFILE = Profile(b"the policy's secret, 32 bytes it is"[:32])
RECORDED = ItemEvidence(EvidenceLevel.RECORDED)


class MemoryIndex:
    """Items, symbols and journal of one bucket. A snapshot is of the index as it is, so
    it must not change while one is open.
    """

    def __init__(self, items: Iterable[Item] = (), hasher: ItemHasher | None = None) -> None:
        self._hasher = hasher or ItemHasher(PROFILE)
        held = list(items)
        ids = ids_from_hashes(b"".join(map(self._hasher.hashes, held)))
        data = ids_to_bytes(ids)
        self._rows = {
            (item.key, item.version): IndexedItem(
                item, ItemId(data[16 * at : 16 * at + 16]), RECORDED
            )
            for at, item in enumerate(held)
        }
        assert len(self._rows) == len(held)
        self._kept = CodedSymbols.zeros(KEPT_SYMBOLS)
        self._kept.add(ids)
        self._root = SetRoot.of(ids)
        self._journal: list[IndexChange] = []
        self._trimmed = 0
        self._order: tuple[list[str], Ids] | None = None
        self._by_hash: dict[int, list[IndexedItem]] | None = None
        self.applied: AppliedPositions | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def items(self) -> dict[tuple[str, str], Item]:
        """All items, by key and version."""
        return {item: row.item for item, row in self._rows.items()}

    @property
    def position(self) -> Position:
        """Of the last change."""
        return Position(self._trimmed + len(self._journal))

    @property
    def evidence(self) -> EvidenceCounts:
        """All items are known by records."""
        return EvidenceCounts(recorded=len(self._rows))

    def put(self, item: Item) -> IndexChange:
        """Add or replace an item."""
        row = IndexedItem(item, self._hasher.id(item), RECORDED)
        return self._change(item.key, item.version, row)

    def delete(self, key: str, version: str = "") -> IndexChange:
        """Take an item out; it need not be there."""
        return self._change(key, version, None)

    def corrupt_symbol(self, at: int) -> None:
        """Flip a bit of a kept symbol, as a defect of an index would."""
        self._kept.sums[at, 0] ^= np.uint64(1 << 40)

    def lose_row(self, key: str) -> None:
        """Forget an item, but not in the symbols and the journal."""
        del self._rows[key, ""]
        self._order = self._by_hash = None

    def trim(self, through: int) -> None:
        """Forget the journal up to a position."""
        del self._journal[: through - self._trimmed]
        self._trimmed = through

    @contextmanager
    def snapshot(self) -> Iterator["MemoryIndex"]:
        """See ItemIndex."""
        yield self

    def changes(self, *, after: Position, through: Position) -> list[IndexChange]:
        """See ItemIndex."""
        if after < self._trimmed:
            raise JournalTrimmedError(f"the journal begins after {self._trimmed}")
        return self._journal[after - self._trimmed : through - self._trimmed]

    def roots(self, ranges: Iterable[KeyRange]) -> list[SetRoot]:
        """See ItemSnapshot."""
        return [
            self._root if key_range == WHOLE else SetRoot.of(self.ids(key_range))
            for key_range in ranges
        ]

    def symbols(self, size: int) -> CodedSymbols:
        """See ItemSnapshot."""
        return self._kept.head(size)

    def ids(self, key_range: KeyRange) -> Ids:
        """See ItemSnapshot."""
        first, last = self._bounds(key_range)
        return self._ordered()[1][first:last]

    def split(self, key_range: KeyRange, parts: int) -> list[str]:
        """See ItemSnapshot."""
        first, last = self._bounds(key_range)
        keys = self._ordered()[0]
        found = {keys[first + (last - first) * i // parts] for i in range(1, parts) if first < last}
        return sorted(key for key in found if key > key_range.start)

    def find(self, key_hashes: "NDArray[np.uint64]") -> list[IndexedItem]:
        """See ItemSnapshot."""
        if self._by_hash is None:
            self._by_hash = defaultdict(list)
            for row in self._rows.values():
                self._by_hash[int.from_bytes(row.id[:6], "big")].append(row)
        return [
            row for one in dict.fromkeys(key_hashes.tolist()) for row in self._by_hash.get(one, ())
        ]

    def names(self, key_hashes: "NDArray[np.uint64]") -> NameColumns:
        """See ItemSnapshot."""
        items = [row.item for row in self.find(np.unique(key_hashes))]
        return NameColumns.of(
            [one.key.encode() for one in items], [one.version.encode() for one in items]
        )

    def _bounds(self, key_range: KeyRange) -> tuple[int, int]:
        keys = self._ordered()[0]
        end = key_range.end
        return bisect_left(keys, key_range.start), (
            len(keys) if end is None else bisect_left(keys, end)
        )

    def _ordered(self) -> tuple[list[str], Ids]:
        if self._order is None:
            items = sorted(self._rows)
            ids = ids_from_bytes(b"".join(self._rows[item].id for item in items))
            self._order = ([key for key, _ in items], ids)
        return self._order

    def _change(self, key: str, version: str, row: IndexedItem | None) -> IndexChange:
        before = self._rows.pop((key, version), None)
        old, new = (one.id if one else None for one in (before, row))
        if row:
            self._rows[key, version] = row
        self._root += SetRoot.of_item(new) - SetRoot.of_item(old)
        self._kept.remove(ids_from_bytes(old or b""))
        self._kept.add(ids_from_bytes(new or b""))
        self._order = self._by_hash = None
        change = IndexChange(Position(self.position + 1), key, version, old, new)
        self._journal.append(change)
        return change


def no_windows(question: WindowsQuestion) -> WindowsAnswer:
    """Of a target that keeps no trees."""
    return WindowsAnswer(())


class Link:
    """What crosses between two sides, counted."""

    def __init__(self, target: MemoryIndex, profile: Profile = PROFILE) -> None:
        self._answers = TargetAnswers(target, profile, no_windows)
        self.asked_bytes = self.answered_bytes = self.trips = 0

    @property
    def total_bytes(self) -> int:
        """Both ways."""
        return self.asked_bytes + self.answered_bytes

    def carry(self, questions: list[QuestionMessage]) -> list[AnswerMessage]:
        """One trip, through the bytes of the wire."""
        self.trips += 1
        answers = []
        for question in questions:
            asked = encode_question(question)
            answer = encode_answer(self._answers.answer(decode_question(asked)))
            self.asked_bytes += len(asked)
            self.answered_bytes += len(answer)
            answers.append(decode_answer(answer))
        return answers


def compare(
    source: MemoryIndex,
    target: MemoryIndex,
    *,
    job: bytes = b"job 1234",
    applied: AppliedPositions | None = None,
    key_range: KeyRange = WHOLE,
    known: Iterable[ItemDifference] = (),
    only_keys: bool = False,
    link: Link | None = None,
) -> BucketComparison:
    """A whole comparison over a link."""
    side = SourceComparison(
        source,
        PROFILE,
        job,
        applied=applied,
        key_range=key_range,
        known=known,
        only_keys=only_keys,
    )
    link, questions = link or Link(target), side.start()
    while questions:
        questions = side.step(link.carry(questions))
    assert side.outcome is not None
    assert side.outcome.trips == link.trips
    return side.outcome

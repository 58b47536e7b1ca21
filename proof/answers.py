"""The target's side of a comparison: answers each question from its index.

It keeps nothing between questions but what the questions carry, so a repeated one gets
the same answer, and one process serves any number of jobs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np

from proof.cuts import RewoundSnapshot, rewound
from proof.errors import ProfileDiffersError
from proof.index import (
    WHOLE,
    AppliedPositions,
    ItemIndex,
    ItemSnapshot,
    KeyRange,
    Position,
)
from proof.item import ItemHasher, Profile
from proof.item_columns import FoundItems, ItemColumns
from proof.messages import (
    EXTRAS_MAX,
    FIRST_SYMBOLS,
    MESSAGE_BYTES_MAX,
    Answer,
    AnswerMessage,
    BitmapAnswer,
    KeysAnswer,
    KeysQuestion,
    ListQuestion,
    NamesAnswer,
    NamesQuestion,
    QuestionMessage,
    RootAnswer,
    RootQuestion,
    SplitQuestion,
    SymbolsAnswer,
    SymbolsQuestion,
    UnequalAnswer,
    WindowsAnswer,
    WindowsQuestion,
)
from proof.spans import parts_of
from proof.symbols import (
    KEPT_SYMBOLS,
    CodedSymbols,
    Ids,
    ids_from_bytes,
    ids_to_bytes,
    key_hashes,
    key_hashes_from_bytes,
    short_ids,
)

# Before compression, so that names fit a message that do not compress.
_NAMES_BYTES = MESSAGE_BYTES_MAX - 8192
# IDs that are read at a time: some MiB with their rows.
_IDS_AT_ONCE = 1 << 16
_NO_IDS = ids_from_bytes(b"")


class TargetAnswers:
    """Answers questions about one bucket; `windows` reads an object's window tree.
    Threads may share it if its index can be read by several.
    """

    def __init__(
        self,
        index: ItemIndex,
        profile: Profile,
        windows: Callable[[WindowsQuestion], WindowsAnswer],
    ) -> None:
        self._index = index
        self._profile = profile
        self._hasher = ItemHasher(profile)
        self._windows = windows

    def answer(self, message: QuestionMessage) -> AnswerMessage:
        """The answer to one question, which keeps the limits of `proof.wire`.

        Raises:
            ProfileDiffersError: the source's IDs are not ours.
            CutUnknownError: the question names a position that was never reached.
            JournalTrimmedError: it comes too long after the job began.
        """
        if message.profile != self._profile.digest:
            raise ProfileDiffersError(
                "the two sides compare by different profiles or secrets",
                hint="give both sides the same secret, content algorithm and properties",
            )
        return AnswerMessage(message.job, message.number, self._answer(message))

    def _answer(self, message: QuestionMessage) -> Answer:
        match message.question:
            case RootQuestion() as question:
                return self._root(message.job, question)
            case SymbolsQuestion() as question:
                return self._symbols(question)
            case SplitQuestion() as question:
                return self._unequal(question)
            case ListQuestion() as question:
                return self._bitmap(question)
            case NamesQuestion() as question:
                return self._names(question)
            case KeysQuestion(at, hashes):
                answer = self._names(NamesQuestion(at, hashes))
                texts = ItemColumns.of(answer.items).names.texts()
                return KeysAnswer(answer.answered, tuple(zip(*texts, strict=True)))
            case WindowsQuestion() as question:
                return self._windows(question)

    def _root(self, job: bytes, question: RootQuestion) -> RootAnswer:
        with self._index.snapshot() as snapshot:
            root = snapshot.roots([question.key_range])[0]
            is_equal = (
                snapshot.applied == question.applied
                and self._hasher.root_digest(job, root.count, root.total) == question.digest
            )
            symbols = (
                b""
                if is_equal
                else coded_symbols(snapshot, (question.key_range,), FIRST_SYMBOLS).to_bytes()
            )
            return RootAnswer(root, snapshot.applied, snapshot.position, snapshot.evidence, symbols)

    def _symbols(self, question: SymbolsQuestion) -> SymbolsAnswer:
        first = question.first
        with self._at(question.at) as view:
            symbols = coded_symbols(view, question.ranges, question.last, question.salt)
        wanted = CodedSymbols(symbols.sums[first:], symbols.counts[first:], symbols.salt)
        return SymbolsAnswer(wanted.to_bytes())

    def _unequal(self, question: SplitQuestion) -> UnequalAnswer:
        with self._at(question.at) as view:
            roots = view.roots(question.ranges)
        return UnequalAnswer(
            tuple(
                None if (ours.count, ours.total % (1 << 64)) == theirs else ours.count
                for ours, theirs in zip(roots, question.roots, strict=True)
            )
        )

    def _bitmap(self, question: ListQuestion) -> BitmapAnswer:
        listed = np.frombuffer(question.short_ids, ">u8").astype(np.uint64)
        is_present, extras, extras_count = np.zeros(len(listed), np.bool_), _NO_IDS, 0
        with self._at(question.at) as view:
            for ids in _ids_in_parts(view, question.key_range):
                ours = short_ids(ids)
                is_present |= np.isin(listed, ours)
                more = ids[~np.isin(ours, listed)]
                extras_count += len(more)
                extras = np.concatenate((extras, more))
                # In one order, so that an answer can go on where one before ended.
                order = np.lexsort((extras[:, 1], extras[:, 0]))
                extras = extras[order[: question.skip + EXTRAS_MAX]]
        return BitmapAnswer(
            present=np.packbits(is_present).tobytes(),
            extras=ids_to_bytes(extras[question.skip :]),
            extras_count=extras_count,
        )

    def _names(self, question: NamesQuestion) -> NamesAnswer:
        hashes = key_hashes_from_bytes(question.key_hashes)
        with self._at(question.at) as view:
            found = FoundItems.of(view.find(hashes))
        # Where the hash of each item was asked for.
        asked = np.argsort(hashes, kind="stable")
        places = asked[np.searchsorted(hashes[asked], key_hashes(found.ids))]
        sizes = np.zeros(len(hashes), np.int64)
        np.add.at(sizes, places, found.items.bytes_max)
        # As many hashes as fit a message, whatever the keys are like.
        fitting = int(np.searchsorted(np.cumsum(sizes), _NAMES_BYTES, side="right"))
        answered = min(len(hashes), max(fitting, 1))
        order = found.items.names.order()
        return NamesAnswer(answered, found.items.taken(order[places[order] < answered]))

    def _at(self, position: Position) -> AbstractContextManager[RewoundSnapshot]:
        return rewound(self._index, AppliedPositions(position))


def coded_symbols(
    snapshot: ItemSnapshot, ranges: tuple[KeyRange, ...], size: int, salt: int = 0
) -> CodedSymbols:
    """The first symbols over some ranges: those kept if they reach, else encoded from
    the IDs.
    """
    if ranges == (WHOLE,) and salt == 0 and size <= KEPT_SYMBOLS:
        return snapshot.symbols(size)
    symbols = CodedSymbols.zeros(size, salt)
    for key_range in ranges:
        for ids in _ids_in_parts(snapshot, key_range):
            symbols.add(ids)
    return symbols


def _ids_in_parts(snapshot: ItemSnapshot, key_range: KeyRange) -> Iterator[Ids]:
    """The IDs of a range, some at a time, so that memory is bounded for any range."""
    count = snapshot.roots([key_range])[0].count
    bounds = snapshot.split(key_range, count // _IDS_AT_ONCE + 1) if count > _IDS_AT_ONCE else []
    for part in parts_of(key_range, bounds):
        yield snapshot.ids(part)

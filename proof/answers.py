"""The target's side of a comparison: answers each question from its index.

It keeps nothing between questions but what the questions carry, so a repeated one gets
the same answer, and one process serves any number of jobs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from proof.cuts import RewoundSnapshot, rewound
from proof.errors import ProfileDiffersError
from proof.index import (
    WHOLE,
    AppliedPositions,
    ItemFacts,
    ItemIndex,
    ItemSnapshot,
    KeyRange,
    Position,
)
from proof.item import KEY_HASH_BYTES, ItemHasher, Profile
from proof.messages import (
    EXTRAS_MAX,
    FIRST_SYMBOLS,
    MESSAGE_BYTES_MAX,
    Answer,
    AnswerMessage,
    BitmapAnswer,
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
from proof.symbols import KEPT_SYMBOLS, CodedSymbols, ids_to_bytes, short_ids
from proof.wire import item_bytes_max

# Before compression, so that names fit a message that do not compress.
_NAMES_BYTES = MESSAGE_BYTES_MAX - 8192


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
        with self._at(question.at) as view:
            ids = view.ids(question.key_range)
        ours = short_ids(ids)
        extras = ids[~np.isin(ours, listed)]
        # In one order, so that an answer can go on where one before ended.
        extras = extras[np.lexsort((extras[:, 1], extras[:, 0]))]
        return BitmapAnswer(
            present=np.packbits(np.isin(listed, ours)).tobytes(),
            extras=ids_to_bytes(extras[question.skip : question.skip + EXTRAS_MAX]),
            extras_count=len(extras),
        )

    def _names(self, question: NamesQuestion) -> NamesAnswer:
        data = np.frombuffer(question.key_hashes, np.uint8).reshape(-1, KEY_HASH_BYTES)
        wanted = np.zeros((len(data), 8), np.uint8)
        wanted[:, 8 - KEY_HASH_BYTES :] = data
        hashes = wanted.view(">u8")[:, 0].astype(np.uint64)
        with self._at(question.at) as view:
            rows = view.find(np.unique(hashes))
        place = {key_hash: number for number, key_hash in enumerate(hashes.tolist())}
        found = [list[ItemFacts]() for _ in hashes]
        for row in rows:
            key_hash = int.from_bytes(row.id[:KEY_HASH_BYTES], "big")
            found[place[key_hash]].append(ItemFacts(row.item, row.evidence))
        # As many hashes as fit a message, whatever the keys are like.
        answered, size = 0, 0
        for items in found:
            size += sum(map(item_bytes_max, items))
            if size > _NAMES_BYTES and answered:
                break
            answered += 1
        items = [facts for group in found[:answered] for facts in group]
        items.sort(key=lambda facts: (facts.item.key, facts.item.version))
        return NamesAnswer(answered, tuple(items))

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
        symbols.add(snapshot.ids(key_range))
    return symbols

"""A message of each kind that crosses between the sides of a comparison."""

from proof.answers import TargetAnswers
from proof.index import (
    AppliedPositions,
    EvidenceCounts,
    ItemEvidence,
    ItemFacts,
    KeyRange,
    Position,
)
from proof.item import EvidenceLevel, Item
from proof.messages import (
    FIRST_SYMBOLS,
    Answer,
    AnswerMessage,
    BitmapAnswer,
    KeysAnswer,
    KeysQuestion,
    ListQuestion,
    NamesAnswer,
    NamesQuestion,
    Question,
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
from proof.root import SetRoot
from proof.wire import decode_answer, decode_question, encode_answer, encode_question
from tests.support.memory_index import PROFILE, MemoryIndex, no_windows

JOB = b"12345678"
CUT = AppliedPositions(Position(7), (Position(9), Position(300)), Position(12))
RANGES = (KeyRange("", "a/b"), KeyRange("a/b", "a/é"), KeyRange("a/é😀", "z"), KeyRange("zz"))
FACTS = (
    ItemFacts(Item("a/1", 5, b"m" * 16), ItemEvidence(EvidenceLevel.READ, 1_700_000_000)),
    ItemFacts(Item("a/1", 2**60, None, b"p" * 16, "v1", True), ItemEvidence(EvidenceLevel.LISTED)),
    ItemFacts(Item("é" * 300, 0), ItemEvidence(EvidenceLevel.RECORDED)),
)

QUESTIONS: tuple[Question, ...] = (
    RootQuestion(KeyRange(), None, b"d" * 16),
    RootQuestion(RANGES[1], CUT, b"d" * 16),
    SymbolsQuestion(Position(0), (KeyRange(),), 32, 300, 0),
    SymbolsQuestion(Position(0), RANGES, 0, 40, 2**64 - 1),
    SplitQuestion(Position(0), RANGES, tuple((n, 2**64 - 1 - n) for n in (0, 1, 300, 70_000))),
    SplitQuestion(Position(0), (), ()),
    ListQuestion(Position(0), RANGES[2], bytes(range(64)), 2),
    NamesQuestion(Position(0), bytes(range(36))),
    WindowsQuestion("key", "version", 2, 4_000),
    KeysQuestion(Position(0), bytes(range(36))),
)
ANSWERS: tuple[Answer, ...] = (
    RootAnswer(SetRoot(9, 2**128 - 1), None, Position(0), EvidenceCounts(1, 2, 3, 4)),
    RootAnswer(
        SetRoot(0, 0), CUT, Position(2**40), EvidenceCounts(), bytes(range(18)) * FIRST_SYMBOLS
    ),
    SymbolsAnswer(bytes(range(180))),
    UnequalAnswer((None, 0, 3, None, None, 2**40, None, None, 5)),
    BitmapAnswer(b"\xa0\xff", bytes(range(32)), 70),
    NamesAnswer(6, FACTS),
    WindowsAnswer((0, 2**32 - 1, 7)),
    KeysAnswer(3, (("a/1", ""), ("a/1", "v1"), ("é" * 300, ""))),
)


def questions() -> list[bytes]:
    """The bytes of all questions."""
    return [
        encode_question(QuestionMessage(JOB, number, PROFILE.digest, question))
        for number, question in enumerate(QUESTIONS)
    ]


def answers() -> list[bytes]:
    """The bytes of all answers."""
    return [
        encode_answer(AnswerMessage(JOB, number, answer)) for number, answer in enumerate(ANSWERS)
    ]


def accept_question(raw: bytes) -> None:
    """What is read has these bytes and no others; a small target answers it."""
    message = decode_question(raw)
    assert encode_question(message) == raw
    answer = _TARGET.answer(message)
    assert decode_answer(encode_answer(answer)) == answer


def accept_answer(raw: bytes) -> None:
    """What is read has these bytes and no others, but for the compression."""
    message = decode_answer(raw)
    written = encode_answer(message)
    assert decode_answer(written) == message
    assert written == raw or isinstance(message.answer, NamesAnswer | KeysAnswer)


_ITEMS = [Item(f"{'aéz'[n % 3]}/{n}", n) for n in range(30)]
_TARGET = TargetAnswers(MemoryIndex(_ITEMS), PROFILE, no_windows)

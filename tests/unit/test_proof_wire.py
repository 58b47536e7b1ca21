"""The bytes of a comparison's messages."""

import zlib

import pytest

from proof.answers import TargetAnswers
from proof.index import KeyRange, Position
from proof.item import ID_BYTES, KEY_HASH_BYTES, Item
from proof.item_columns import ItemColumns
from proof.messages import (
    MESSAGE_BYTES_MAX,
    AnswerMessage,
    NamesAnswer,
    NamesQuestion,
    QuestionMessage,
    SplitQuestion,
)
from proof.names_wire import encode_items
from proof.symbols import ids_to_bytes
from proof.wire import (
    decode_answer,
    decode_question,
    encode_answer,
    encode_question,
)
from runtime.errors import RemoteProtocolError
from tests.support.memory_index import PROFILE, MemoryIndex, no_windows
from tests.support.proof_messages import (
    ANSWERS,
    JOB,
    QUESTIONS,
    accept_answer,
    accept_question,
    answers,
    questions,
)


def test_a_message_comes_back_as_it_was() -> None:
    assert [decode_question(raw).question for raw in questions()] == list(QUESTIONS)
    assert [decode_answer(raw).answer for raw in answers()] == list(ANSWERS)
    assert decode_question(questions()[1]) == QuestionMessage(JOB, 1, PROFILE.digest, QUESTIONS[1])
    assert decode_answer(answers()[3]) == AnswerMessage(JOB, 3, ANSWERS[3])


def test_a_question_and_its_equal_answer_take_little() -> None:
    assert len(questions()[0]) + len(answers()[0]) <= 112


def test_a_message_cut_short_or_with_more_behind_it_is_refused() -> None:
    for decode, messages in ((decode_question, questions()), (decode_answer, answers())):
        for raw in messages:
            for end in range(len(raw)):
                with pytest.raises(RemoteProtocolError):
                    decode(raw[:end])
            with pytest.raises(RemoteProtocolError):
                decode(raw + b"\0")


def test_a_number_has_one_encoding() -> None:
    raw = questions()[0]
    # The number of the question, 0, as two bytes.
    with pytest.raises(RemoteProtocolError, match="longer than it needs"):
        decode_question(raw[:10] + b"\x80\0" + raw[11:])
    with pytest.raises(RemoteProtocolError, match="above"):
        decode_question(raw[:10] + b"\xff" * 9 + b"\x7f" + raw[11:])
    with pytest.raises(RemoteProtocolError, match="does not end"):
        decode_question(raw[:10] + b"\xff" * 10 + raw[10:])


def test_a_hash_that_is_asked_for_twice_is_answered() -> None:
    index = MemoryIndex([Item("a", 1), Item("b", 2)])
    ids = ids_to_bytes(index.ids(KeyRange()))
    hashes = [ids[at : at + KEY_HASH_BYTES] for at in (0, ID_BYTES)]
    for asked in (hashes, hashes * 2, [hashes[0]] * 3 + hashes):
        question = NamesQuestion(Position(0), b"".join(asked))
        message = QuestionMessage(JOB, 0, PROFILE.digest, question)
        answer = TargetAnswers(index, PROFILE, no_windows).answer(message).answer
        assert isinstance(answer, NamesAnswer)
        assert answer.answered == len(asked)
        assert [facts.item.key for facts in answer.items] == ["a", "b"]


def test_names_that_unfold_without_end_are_refused() -> None:
    whole = encode_answer(AnswerMessage(JOB, 0, NamesAnswer(0, ())))
    head = whole.removesuffix(encode_items(ItemColumns.of(())))
    assert head != whole
    for unfolded, reason in ((4 * MESSAGE_BYTES_MAX + 1, "too many"), (100, "left over")):
        bomb = zlib.compress(bytes(unfolded), wbits=-15)
        assert len(bomb) < MESSAGE_BYTES_MAX
        with pytest.raises(RemoteProtocolError, match=reason):
            decode_answer(head + len(bomb).to_bytes(3, "big") + bomb)


def test_ranges_overlap_nowhere() -> None:
    for ranges in (
        (KeyRange("b", "d"), KeyRange("c", "e")),
        (KeyRange("c", "e"), KeyRange("a", "b")),
    ):
        question = SplitQuestion(Position(0), ranges, ((1, 1), (1, 1)))
        raw = encode_question(QuestionMessage(JOB, 0, PROFILE.digest, question))
        with pytest.raises(RemoteProtocolError, match="does not follow"):
            decode_question(raw)


def test_a_message_above_the_limit_is_refused_unread() -> None:
    with pytest.raises(RemoteProtocolError, match="too large"):
        decode_answer(bytes(MESSAGE_BYTES_MAX + 1))


@pytest.mark.parametrize("accept", [accept_question, accept_answer])
def test_an_unknown_format_or_kind_is_refused(accept: object) -> None:
    assert callable(accept)
    for start in (b"\2\0", b"\1\6", b"\1\x7f"):
        with pytest.raises(RemoteProtocolError):
            accept(start + bytes(100))

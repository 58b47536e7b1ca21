"""Messages of a comparison in bytes that an earlier version wrote: two sides of
different versions understand each other, or this file changes with the format.
"""

import json
from pathlib import Path

from proof.messages import KeysAnswer, NamesAnswer
from proof.wire import decode_answer, decode_question, encode_answer, encode_question
from tests.support.proof_messages import ANSWERS, QUESTIONS

STORED = json.loads((Path(__file__).parent / "data" / "proof_messages.json").read_text())


def test_questions_have_the_bytes_that_they_had() -> None:
    stored = [bytes.fromhex(one) for one in STORED["questions"]]
    messages = [decode_question(raw) for raw in stored]
    assert [message.question for message in messages] == list(QUESTIONS)
    assert [encode_question(message) for message in messages] == stored


def test_answers_have_the_bytes_that_they_had() -> None:
    """But for compressed names, whose bytes depend on the library."""
    stored = [bytes.fromhex(one) for one in STORED["answers"]]
    messages = [decode_answer(raw) for raw in stored]
    assert [message.answer for message in messages] == list(ANSWERS)
    for message, raw in zip(messages, stored, strict=True):
        assert encode_answer(message) == raw or isinstance(message.answer, NamesAnswer | KeysAnswer)

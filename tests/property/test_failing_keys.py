"""Laws of which keys fail by themselves, and which for the sake of a store."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from replicator.syncer.failing_keys import ANSWERED_FAILURES, FailingKeys

KEYS = ("a", "b", "c")
BAD = frozenset("ab")
# Of one moment: a key is tried, or the stores are asked, which one or both of them
# answer by then, or are down.
tries = st.tuples(st.just("try"), st.sampled_from(KEYS))
questions = st.tuples(st.sampled_from(("ask", "answer")), st.just(""))
outages = st.tuples(st.sampled_from(("down", "up")), st.just(""))
events = st.lists(st.one_of(tries, tries, questions, outages), max_size=60)


@dataclass
class Model:
    """The stores, and what they have said."""

    failing: FailingKeys = field(default_factory=FailingKeys)
    is_up: bool = True
    # Whether a question is on its way, since when the stores have been up.
    asked: bool = False
    outages: int = 0
    # Of each key the outages during which it failed, since it was last carried out.
    failures: dict[str, set[int]] = field(default_factory=dict)
    blamed: list[str] = field(default_factory=list)

    def step(self, what: str, key: str) -> None:
        """Let something happen."""
        match what:
            case "down":
                self.outages += self.is_up
                self.is_up = False
            case "up":
                self.is_up = True
            case "ask" if not self.asked:
                self.failing.ask()
                self.asked = True
            case "answer" if self.asked:
                self.failing.note(both_answer=self.is_up)
                self.asked = False
            case "try" if self.is_up and key not in BAD:
                self.failing.forget(key)
                self.failures.pop(key, None)
            case "try":
                self.failures.setdefault(key, set()).add(self.outages)
                if self.failing.fails_alone(key):
                    self.blamed.append(key)
            case _:
                pass


@given(events)
def test_no_key_is_blamed_for_an_outage(happened: list[tuple[str, str]]) -> None:
    """However often it failed: only more outages than answers are asked for, one just
    at each of its failures, look like a fault of the key.
    """
    model = Model()
    for what, key in happened:
        before = len(model.blamed)
        model.step(what, key)
        for blamed in model.blamed[before:]:
            assert blamed in BAD or len(model.failures[blamed]) > ANSWERED_FAILURES


@given(events, st.sampled_from(sorted(BAD)))
def test_a_key_that_always_fails_is_blamed_once_the_stores_answer(
    happened: list[tuple[str, str]], key: str
) -> None:
    """Whatever happened before, and others do meanwhile."""
    model = Model()
    for one in happened:
        model.step(*one)
    if model.asked:
        model.step("answer", "")
    model.step("up", "")
    for _ in range(ANSWERED_FAILURES):
        for what, of in (("try", key), ("try", "c"), ("ask", ""), ("answer", "")):
            model.step(what, of)
    assert model.failing.fails_alone(key)
    # It stays so until it is carried out.
    assert model.failing.fails_alone(key)
    assert key in model.failing
    model.failing.forget(key)
    assert not model.failing.fails_alone(key)


@given(events)
def test_an_answer_to_an_earlier_question_says_nothing(happened: list[tuple[str, str]]) -> None:
    """A store may have gone down since it was asked."""
    model = Model()
    for one in happened:
        model.step(*one)
    if not model.asked:
        model.step("ask", "")
    for _ in range(3 * ANSWERED_FAILURES):
        assert not model.failing.fails_alone("new")
    model.failing.note(both_answer=True)
    for _ in range(3 * ANSWERED_FAILURES):
        assert not model.failing.fails_alone("new")


@given(events, st.sampled_from(KEYS))
def test_a_key_is_judged_by_itself(happened: list[tuple[str, str]], key: str) -> None:
    whole, alone = FailingKeys(), FailingKeys()
    for what, of in happened:
        for failing in (whole, alone):
            match what:
                case "ask":
                    failing.ask()
                case "answer" | "down":
                    failing.note(both_answer=what == "answer")
                case "try" if failing is whole or of == key:
                    failing.fails_alone(of)
                case _:
                    pass
    assert (key in whole) == (key in alone)
    assert whole.fails_alone(key) == alone.fails_alone(key)

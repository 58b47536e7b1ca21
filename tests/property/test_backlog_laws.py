"""A backlog knows its bytes and its oldest entry, whatever came and went."""

from hypothesis import given
from hypothesis import strategies as st

from merkle.tree import ContainerId
from scm.backlog import Backlog

steps = st.lists(
    st.tuples(st.integers(1, 5), st.one_of(st.none(), st.integers(0, 100)), st.floats(0, 10)),
    max_size=40,
)


@given(steps)
def test_a_backlog_is_the_sum_of_what_is_in_it_and_as_old_as_its_oldest(
    history: list[tuple[int, int | None, float]],
) -> None:
    """Operator rule R12. None takes a container out."""
    backlog, now_s = Backlog(), 0.0
    held: dict[int, tuple[float, int]] = {}
    for number, length_bytes, wait_s in history:
        now_s += wait_s
        if length_bytes is None:
            backlog.remove(ContainerId(number))
            held.pop(number, None)
        else:
            backlog.put(ContainerId(number), length_bytes, now_s)
            held[number] = (held[number][0] if number in held else now_s, length_bytes)
        assert backlog.length_bytes == sum(length for _, length in held.values())
        oldest_s = min((since_s for since_s, _ in held.values()), default=now_s)
        assert backlog.oldest_age_s(now_s) == now_s - oldest_s

"""What several threads want at once goes in one call, within its limits."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from replicator.grouped_calls import GroupedCalls
from tests.support.waiting import wait_until


def grouped(
    call: Callable[[Sequence[str]], Sequence[str]], *, items_max: int = 10, bytes_max: int = 100
) -> GroupedCalls[str, str]:
    return GroupedCalls(
        call,
        key_of=lambda item: item[0],
        size_of=len,
        items_max=items_max,
        bytes_max=bytes_max,
    )


def test_what_waits_goes_together() -> None:
    calls, go_on = list[list[str]](), threading.Event()

    def call(items: Sequence[str]) -> list[str]:
        calls.append(list(items))
        go_on.wait(20)
        return [item.upper() for item in items]

    calling = grouped(call)
    with ThreadPoolExecutor(8) as pool:
        first = [pool.submit(calling.run, [name]) for name in "abcd"]
        wait_until(lambda: len(calls) == 4, "four calls")
        later = [pool.submit(calling.run, [name]) for name in "efgh"]
        wait_until(lambda: len(calling._waiting) == 4, "four that wait")
        go_on.set()
        assert [one.result() for one in (*first, *later)] == [[name] for name in "ABCDEFGH"]
    assert sorted(map(len, calls)) == [1, 1, 1, 1, 4]


def test_a_call_has_limits_and_no_key_twice() -> None:
    calls = list[list[str]]()

    def call(items: Sequence[str]) -> list[str]:
        calls.append(list(items))
        return list(items)

    wanted = ["a", "b", "c", "a", "d" * 90, "e" * 90, "f" * 200, "g"]
    assert grouped(call, items_max=2).run(wanted) == wanted
    assert calls == [["a", "b"], ["c", "a"], ["d" * 90], ["e" * 90], ["f" * 200], ["g"]]
    calls.clear()
    assert grouped(call).run(["a", "b", "a", "c"]) == ["a", "b", "a", "c"]
    assert calls == [["a", "b"], ["a", "c"]]


def test_an_error_of_a_call_reaches_all_whose_items_it_had() -> None:
    def call(items: Sequence[str]) -> list[str]:
        if "b" in items:
            raise ValueError("no")
        return list(items)

    calling = grouped(call, items_max=2)
    with pytest.raises(ValueError, match="no"):
        calling.run(["a", "b"])
    assert calling.run(["c"]) == ["c"]


def test_who_has_an_answer_waits_for_no_other_call() -> None:
    """Else callers come back one by one, and each call carries what one of them has."""
    sizes = list[int]()

    def call(items: Sequence[str]) -> list[str]:
        sizes.append(len(items))
        time.sleep(0.05)
        return list(items)

    calling = grouped(call, items_max=100, bytes_max=10_000)

    def one(number: int) -> None:
        for _ in range(20):
            assert calling.run([chr(200 + number)]) == [chr(200 + number)]

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(one, range(32)))
    assert sum(sizes) == 32 * 20
    assert len(sizes) < 32 * 20 / 4

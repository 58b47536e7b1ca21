"""A thread that has ended, or stands still in a step, is named; one that waits or gets
on is not.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import InternalError
from runtime.guard import ThreadGuard
from runtime.thread_health import ThreadHealth

STEP_S_MAX = 10.0


@contextmanager
def living() -> Iterator[threading.Thread]:
    """A thread that lives until the end of the block."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="worker")
    thread.start()
    try:
        yield thread
    finally:
        end.set()
        thread.join()


def looked(thread_health: ThreadHealth, now_s: float) -> str:
    return thread_health.fault(now_s, STEP_S_MAX)


def test_a_thread_that_ended_is_lost_and_one_that_is_not_begun_is_not() -> None:
    thread_health = ThreadHealth()
    thread = threading.Thread(target=lambda: None, name="worker")
    thread_health.watch(thread)
    assert looked(thread_health, 0) == ""
    thread.start()
    thread.join()
    assert looked(thread_health, 0) == "thread worker has ended"
    thread_health.dismiss(thread)
    assert looked(thread_health, 0) == ""


def test_a_step_that_stands_still_is_lost_and_found_again() -> None:
    thread_health, guard = ThreadHealth(), ThreadGuard("worker")
    with living() as thread:
        thread_health.watch(thread, guard)
        with guard.named_errors():
            assert looked(thread_health, 100) == ""
            assert looked(thread_health, 109.9) == ""
            assert looked(thread_health, 110) == "thread worker has made no progress for 10 s"
            guard.note_progress()
            assert looked(thread_health, 120) == ""
            assert looked(thread_health, 130) != ""
        assert looked(thread_health, 140) == ""


def test_waiting_for_work_is_no_lack_of_progress() -> None:
    thread_health, guard = ThreadHealth(), ThreadGuard("worker")
    with living() as thread:
        thread_health.watch(thread, guard)
        assert [looked(thread_health, 1000.0 * look) for look in range(3)] == [""] * 3
        with guard.named_errors(), guard.idle():
            assert [looked(thread_health, 1000.0 * look) for look in range(3, 6)] == [""] * 3


def test_the_time_of_a_step_does_not_count_what_was_before_it() -> None:
    """Looks are rare: between two of them a thread may have waited for days."""
    thread_health, guard = ThreadHealth(), ThreadGuard("worker")
    with living() as thread:
        thread_health.watch(thread, guard)
        assert looked(thread_health, 0) == ""
        with guard.named_errors():
            assert looked(thread_health, 100) == ""


def test_a_step_that_fails_and_one_within_another_are_steps() -> None:
    guard = ThreadGuard("worker")
    with suppress(InternalError), guard.named_errors():
        raise RuntimeError("a defect")
    assert not guard.is_in_step
    with guard.named_errors():
        with guard.named_errors():
            pass
        assert guard.is_in_step
    assert not guard.is_in_step


def test_one_lost_thread_is_enough() -> None:
    thread_health = ThreadHealth()
    ended = threading.Thread(target=lambda: None, name="ended")
    ended.start()
    ended.join()
    with living() as thread:
        thread_health.watch(thread)
        thread_health.watch(ended)
        assert looked(thread_health, 0) == "thread ended has ended"


@given(st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=30))
def test_a_thread_is_lost_exactly_if_no_progress_was_seen_for_so_long(
    looks: list[tuple[float, bool]],
) -> None:
    """Each look comes some seconds after the last, with progress between them or
    without.
    """
    thread_health, guard = ThreadHealth(), ThreadGuard("worker")
    with living() as thread:
        thread_health.watch(thread, guard)
        with guard.named_errors():
            now_s = seen_s = 0.0
            assert looked(thread_health, now_s) == ""
            for pause_s, gets_on in looks:
                now_s += pause_s
                if gets_on:
                    guard.note_progress()
                    seen_s = now_s
                assert bool(looked(thread_health, now_s)) == (now_s - seen_s >= STEP_S_MAX)

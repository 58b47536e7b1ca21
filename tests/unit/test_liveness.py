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
from runtime.liveness import Liveness

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


def looked(liveness: Liveness, now_s: float) -> str:
    return liveness.fault(now_s, STEP_S_MAX)


def test_a_thread_that_ended_is_lost_and_one_that_is_not_begun_is_not() -> None:
    liveness = Liveness()
    thread = threading.Thread(target=lambda: None, name="worker")
    liveness.watch(thread)
    assert looked(liveness, 0) == ""
    thread.start()
    thread.join()
    assert looked(liveness, 0) == "thread worker has ended"
    liveness.dismiss(thread)
    assert looked(liveness, 0) == ""


def test_a_step_that_stands_still_is_lost_and_found_again() -> None:
    liveness, guard = Liveness(), ThreadGuard("worker")
    with living() as thread:
        liveness.watch(thread, guard)
        with guard.named_errors():
            assert looked(liveness, 100) == ""
            assert looked(liveness, 109.9) == ""
            assert looked(liveness, 110) == "thread worker has made no progress for 10 s"
            guard.note_progress()
            assert looked(liveness, 120) == ""
            assert looked(liveness, 130) != ""
        assert looked(liveness, 140) == ""


def test_waiting_for_work_is_no_lack_of_progress() -> None:
    liveness, guard = Liveness(), ThreadGuard("worker")
    with living() as thread:
        liveness.watch(thread, guard)
        assert [looked(liveness, 1000.0 * look) for look in range(3)] == [""] * 3
        with guard.named_errors(), guard.idle():
            assert [looked(liveness, 1000.0 * look) for look in range(3, 6)] == [""] * 3


def test_the_time_of_a_step_does_not_count_what_was_before_it() -> None:
    """Looks are rare: between two of them a thread may have waited for days."""
    liveness, guard = Liveness(), ThreadGuard("worker")
    with living() as thread:
        liveness.watch(thread, guard)
        assert looked(liveness, 0) == ""
        with guard.named_errors():
            assert looked(liveness, 100) == ""


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
    liveness = Liveness()
    ended = threading.Thread(target=lambda: None, name="ended")
    ended.start()
    ended.join()
    with living() as thread:
        liveness.watch(thread)
        liveness.watch(ended)
        assert looked(liveness, 0) == "thread ended has ended"


@given(st.lists(st.tuples(st.floats(0, 50), st.booleans()), max_size=30))
def test_a_thread_is_lost_exactly_if_no_progress_was_seen_for_so_long(
    looks: list[tuple[float, bool]],
) -> None:
    """Each look comes some seconds after the last, with progress between them or
    without.
    """
    liveness, guard = Liveness(), ThreadGuard("worker")
    with living() as thread:
        liveness.watch(thread, guard)
        with guard.named_errors():
            now_s = seen_s = 0.0
            assert looked(liveness, now_s) == ""
            for pause_s, gets_on in looks:
                now_s += pause_s
                if gets_on:
                    guard.note_progress()
                    seen_s = now_s
                assert bool(looked(liveness, now_s)) == (now_s - seen_s >= STEP_S_MAX)

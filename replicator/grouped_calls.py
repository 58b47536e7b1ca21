"""Sends in one call what several threads want at once.

Nobody waits for company: a thread that finds a call free takes all that waits, its own
included. What comes while calls are on their way goes with the next one.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")

# A call is on its way for longer than it is carried out: with fewer at once whoever
# answers them waits for work, with many more each has few items.
_CALLS_AT_ONCE = 4


class _Wish(Generic[Q, A]):
    """What one thread wants, and what became of it."""

    def __init__(self, item: Q) -> None:
        self.item = item
        self.is_taken = self.is_done = False
        self.answer: A | None = None
        self.error: BaseException | None = None


class GroupedCalls(Generic[Q, A]):
    """Groups items of many threads into calls. Thread-safe."""

    def __init__(
        self,
        call: Callable[[Sequence[Q]], Sequence[A]],
        *,
        key_of: Callable[[Q], str],
        size_of: Callable[[Q], int],
        items_max: int,
        bytes_max: int,
    ) -> None:
        """`call` gets items of different keys and answers each, in their order. One
        item may be larger than `bytes_max`, and goes alone.
        """
        self._call = call
        self._key_of = key_of
        self._size_of = size_of
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._changed = threading.Condition()
        self._waiting = deque[_Wish[Q, A]]()
        self._calls = 0

    def run(self, items: Sequence[Q]) -> list[A]:
        """The answers to these items, in their order.

        Raises:
            Exception: what the call of one of them raised.
        """
        wishes = [_Wish[Q, A](item) for item in items]
        with self._changed:
            self._waiting += wishes
        for wish in wishes:
            while taken := self._turn(wish):
                self._send(taken)
        found = list[A]()
        for wish in wishes:
            if wish.error is not None:
                raise wish.error
            assert wish.answer is not None
            found.append(wish.answer)
        return found

    def _turn(self, wish: _Wish[Q, A]) -> list[_Wish[Q, A]]:
        """What to send now for this wish, and others; nothing once it is answered. Who
        has an answer waits for no call of others.
        """

        def may_go_on() -> bool:
            return wish.is_done or (not wish.is_taken and self._calls < _CALLS_AT_ONCE)

        with self._changed:
            self._changed.wait_for(may_go_on)
            if wish.is_done:
                return []
            self._calls += 1
            return self._take()

    def _take(self) -> list[_Wish[Q, A]]:
        """The first of those that wait, as many as fit into one call."""
        taken, keys, size = list[_Wish[Q, A]](), set[str](), 0
        while self._waiting and len(taken) < self._items_max:
            item = self._waiting[0].item
            key, size = self._key_of(item), size + self._size_of(item)
            if taken and (size > self._bytes_max or key in keys):
                break
            keys.add(key)
            wish = self._waiting.popleft()
            wish.is_taken = True
            taken.append(wish)
        return taken

    def _send(self, wishes: Sequence[_Wish[Q, A]]) -> None:
        try:
            answers = self._call([wish.item for wish in wishes])
            for wish, answer in zip(wishes, answers, strict=True):
                wish.answer = answer
        except BaseException as error:  # noqa: BLE001 - each of the waiting threads raises it
            for wish in wishes:
                wish.error = error
        finally:
            with self._changed:
                self._calls -= 1
                for wish in wishes:
                    wish.is_done = True
                self._changed.notify_all()

"""Which keys fail by themselves, of those that a store does not answer for.

To whoever asks for one object, a store that is down looks like one that fails for this
object for ever. What tells them apart is whether both stores answer for others after
the failure. A store may have been down for a moment, so that one answer is not enough.
"""

from collections.abc import Container, Iterable

# So many failures of a key, each followed by an answer of both stores, blame the key
# for the next one.
ANSWERED_FAILURES = 2


class FailingKeys:
    """The failures of single keys. Owned by one thread; no I/O."""

    def __init__(self) -> None:
        self._answered = dict[str, int]()
        # Whose last failure no answer has followed: those for whose sake the stores are
        # being asked, and those that have failed since.
        self._asked = set[str]()
        self._open = set[str]()

    def __contains__(self, key: str) -> bool:
        """Whether a key has failed since it was last carried out."""
        return key in self._answered

    def fails_alone(self, key: str) -> bool:
        """Note that a key failed; whether it does so by itself: others may go on."""
        if self._answered.setdefault(key, 0) >= ANSWERED_FAILURES:
            return True
        if key not in self._asked:
            self._open.add(key)
        return False

    def ask(self) -> None:
        """Note that both stores are being asked for others from now on."""
        self._asked |= self._open
        self._open.clear()

    def note(self, *, both_answer: bool) -> None:
        """Note what has come of it. What has failed since is still open."""
        if both_answer:
            for key in self._asked & self._answered.keys():
                self._answered[key] += 1
        else:
            self._open |= self._asked
        self._asked.clear()

    def blame(self, keys: Iterable[str]) -> None:
        """Note that keys fail by themselves, as the operation on their prefix did."""
        self._answered |= dict.fromkeys(keys, ANSWERED_FAILURES)

    def forget(self, key: str) -> None:
        """Note that a key was carried out."""
        self._answered.pop(key, None)
        self._open.discard(key)
        self._asked.discard(key)

    def keep(self, keys: Container[str]) -> None:
        """Forget all keys but these."""
        for key in [one for one in self._answered if one not in keys]:
            self.forget(key)

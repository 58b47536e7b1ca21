"""Whether a target still does what it was opened for.

Whoever opens a target takes the word of the last process about what it can do, so that
work goes on at once. A minute later the target is asked, beside the work.
"""

from merkle.errors import ReconcileError
from replicator.stores.opening import open_store
from replicator.stores.probe_memory import PROBE_AGE_MAX_S, ProbeMemory
from runtime.rate_limit import Clock

# A target is probed anew a minute after an earlier probe was taken for granted, then
# so often that the next process can do the same.
_KNOWN_S = 60.0
_AGAIN_S = PROBE_AGE_MAX_S / 2


class TargetProbe:
    """What is known of one target, and when it is asked again. One thread uses it."""

    def __init__(self, clock: Clock, text: str = "") -> None:
        """`text` is that of an earlier one."""
        self._clock = clock
        self._known = text
        self._due_s = clock.monotonic_s()
        self.memory = ProbeMemory(clock, text)
        """To open the target with."""

    @property
    def text(self) -> str:
        """See ProbeMemory."""
        return self.memory.text

    @property
    def is_due(self) -> bool:
        """Whether the target is to be asked again."""
        return self._clock.monotonic_s() >= self._due_s

    def note_opened(self) -> None:
        """Note that the target was opened by what the memory has now."""
        is_anew, self._known = self.text != self._known, self.text
        self._due_s = self._clock.monotonic_s() + (_AGAIN_S if is_anew else _KNOWN_S)

    def has_changed(self, address: str) -> bool:
        """Ask the target at an address; whether it does other things than those for
        which it was opened, so that it has to be opened again.
        """
        self._due_s = self._clock.monotonic_s() + _AGAIN_S
        found, known = ProbeMemory(self._clock), self.memory
        if not known.text:
            return False
        try:
            with open_store(address, may_write=True, memory=found):
                pass
        except ReconcileError:
            # The work meets the same, and says so.
            self._due_s = self._clock.monotonic_s() + _KNOWN_S
            return False
        self.memory, self._known = found, found.text
        return not found.agrees(known)

"""Whether a target still does what it was opened for.

Whoever opens a target takes the word of the last process about what it can do, so that
work goes on at once. A minute later the target is asked, beside the work.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from merkle.errors import ReconcileError
from replicator.replication import ReplicationFault, ReplicationReport
from replicator.stores.opening import open_store
from replicator.stores.probe_memory import PROBE_AGE_MAX_S, PROBE_CHARACTERS_MAX, ProbeMemory
from runtime.disk import Disk
from runtime.errors import DiskError
from runtime.rate_limit import Clock

# A target is probed anew a minute after an earlier probe was taken for granted, then
# so often that the next process can do the same.
_KNOWN_S = 60.0
_AGAIN_S = PROBE_AGE_MAX_S / 2
# After a failure the record is written again.
_WRITE_AGAIN_S = 60.0


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


class ProbeRecord:
    """What a target was seen to do, in a file, for a process that has no master. It
    saves the next one questions, and no more: where it cannot be read or written, that
    is said, and the work goes on. One thread uses it.
    """

    def __init__(self, path: Path, disk: Disk, clock: Clock) -> None:
        """Read it; what cannot be read counts for nothing."""
        self._path = path
        self._disk = disk
        self._clock = clock
        self._due_s = clock.monotonic_s()
        self._trouble = ""
        self.text = ""
        """What the file has."""
        try:
            length_bytes = disk.length(path)
            if length_bytes is not None and length_bytes <= PROBE_CHARACTERS_MAX:
                self.text = disk.read(path).decode(errors="replace")
        except DiskError as error:
            self._note(error)

    def keep(self, text: str) -> None:
        """Write it where it is news."""
        now_s = self._clock.monotonic_s()
        if (text == self.text and not self._trouble) or now_s < self._due_s:
            return
        try:
            self._disk.replace(self._path, text.encode())
        except DiskError as error:
            self._note(error)
            self._due_s = now_s + _WRITE_AGAIN_S
            # The next process must not take an old word for the newest one.
            with suppress(DiskError):
                self._disk.remove(self._path)
                self.text = ""
            return
        self.text, self._trouble = text, ""

    def told(self, report: ReplicationReport) -> ReplicationReport:
        """The report, with what is wrong with the record if nothing else is."""
        if not self._trouble or report.fault is not None:
            return report
        return replace(report, fault=ReplicationFault.LOCAL_DISK, message=self._trouble)

    def _note(self, error: DiskError) -> None:
        self._trouble = f"the next process has to ask what the target can do: {error.message}"

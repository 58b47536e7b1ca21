"""Who writes to a folder of sweeps: one process at a time.

A folder of this machine is locked with flock, which ends with the process. A bucket has
no locks: there the object `.lock` names the process that writes, which renews it every
few seconds by a conditional put. Another process takes over once it saw the object
unchanged for as long as a lease lasts. Should the former one go on, it finds out before
its next change.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Protocol
from uuid import uuid4

from chunktable.errors import ObjectStoreError, StoreUnreachableError
from chunktable.files import AnyPath, ObjectPath, StoredObject, read_object, swap_object
from runtime.disk import disk_error
from runtime.documents import parse_json
from runtime.errors import BusyError

LEASE_S = 30.0
_RENEW_EVERY_S = 5.0
_LOOK_EVERY_S = 1.0
# By the clocks of the store, which may differ from each other: nobody has to watch.
_LONG_AGO_S = 10 * LEASE_S
# Where conditions are ignored, two that begin at once have both written by then.
_SETTLE_S = 3.0
# Changes end before others may begin theirs.
_MARGIN_S = 10.0
_HINT = "Wait for it, or give another --out."


@contextmanager
def exclusive(folder: AnyPath, note: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Keep other processes out of a folder of sweeps, and yield a check for before each
    change: it raises BusyError if another process has taken over. `note` gets remarks.

    Raises:
        BusyError: another process writes there.
        DiskError: the lock file cannot be opened, or the bucket cannot be reached.
    """
    if isinstance(folder, Path):
        with _locked(folder):
            yield lambda: None
        return
    lease = SweepLease(
        _LeaseObject(folder / ".lock"), str(folder), note, clock=time.monotonic, sleep=time.sleep
    )
    lease.acquire()
    stopped = Event()

    def renew() -> None:
        while not stopped.wait(_RENEW_EVERY_S):
            # Whoever writes next asks again.
            with suppress(ObjectStoreError, BusyError):
                lease.renew()

    thread = Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield lease.check
    finally:
        stopped.set()
        thread.join()
        lease.release()


class LeaseStore(Protocol):
    """Where a lease is written."""

    def read(self) -> StoredObject | None:
        """What is written there, if anything.

        Raises:
            ObjectStoreError: it cannot be read.
        """

    def swap(self, content: bytes, etag: str) -> str | None:
        """Write it if it has this ETag, or with an empty one if there is nothing.
        Returns the new ETag; None if it has another.

        Raises:
            ObjectStoreError: it cannot be written, or may have been.
        """


@dataclass(frozen=True, slots=True)
class _LeaseObject:
    """An object of a bucket (LeaseStore)."""

    path: ObjectPath

    def read(self) -> StoredObject | None:
        """See LeaseStore."""
        return read_object(self.path)

    def swap(self, content: bytes, etag: str) -> str | None:
        """See LeaseStore."""
        return swap_object(self.path, content, etag)


class SweepLease:
    """The lease of a folder in a bucket. Thread-safe."""

    def __init__(
        self,
        store: LeaseStore,
        folder: str,
        note: Callable[[str], None],
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._store = store
        self._folder = folder
        self._note = note
        self._clock = clock
        self._sleep = sleep
        self._token = uuid4().hex
        self._renewals = 0
        self._etag = ""
        self._renewed_at = 0.0
        # Whether the store obeys conditions; else the object is read before each put.
        self._is_conditional = True
        self._is_lost = False
        self._lock = Lock()

    def acquire(self) -> None:
        """Take the lease, or wait for the end of one that nobody renews.

        Raises:
            BusyError: another process holds it.
            ObjectStoreError: the store cannot be reached, or refuses.
        """
        found = self._store.read()
        if found is not None and _holder(found):
            found = self._unchanged(found)
        self._etag = found.etag if found is not None else ""
        if not self._put():
            raise self._busy()
        # It exists now. A store that writes it again all the same ignores conditions.
        if self._store.swap(self._document(), "") is not None:
            self._is_conditional = False
            self._note(
                f"{self._folder}: this store ignores conditional puts, so two sweeps that begin"
                " within a second or a pause of this one may both write"
            )
            self._sleep(_SETTLE_S)
            self.renew()

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            BusyError: another process has taken it.
            ObjectStoreError: the store cannot be reached, or refuses.
        """
        with self._lock:
            if self._is_lost or not self._put():
                self._is_lost = True
                raise self._busy()

    def check(self) -> None:
        """Make sure that the lease lasts for a change that begins now.

        Raises:
            BusyError: another process has taken it.
            ObjectStoreError: it could not be renewed.
        """
        if self._is_lost or self._clock() - self._renewed_at > LEASE_S - _MARGIN_S:
            self.renew()

    def release(self) -> None:
        """Let another process begin at once."""
        with self._lock, suppress(ObjectStoreError):
            if not self._is_lost and self._is_ours():
                self._store.swap(b"{}", self._etag)

    def _unchanged(self, found: StoredObject) -> StoredObject | None:
        """The object once its lease has ended."""
        if found.age_s > _LONG_AGO_S:
            return found
        self._note(f"{_holder(found)} wrote to {self._folder}: waiting whether it goes on")
        end = self._clock() + LEASE_S
        while self._clock() < end:
            self._sleep(_LOOK_EVERY_S)
            now = self._store.read()
            if now is None or not _holder(now):
                return now
            if now.etag != found.etag:
                raise self._busy(now)
        return found

    def _put(self) -> bool:
        """Write the object; False if another process has done so."""
        began = self._clock()
        if not self._is_conditional and not self._is_ours():
            return False
        self._renewals += 1
        try:
            etag = self._store.swap(self._document(), self._etag)
        except StoreUnreachableError:
            # It may have been written; and some stores answer so to who comes second.
            if not self._is_ours():
                raise
            etag = None
        if etag is None and not self._is_ours():
            return False
        self._etag, self._renewed_at = etag or self._etag, began
        return True

    def _is_ours(self) -> bool:
        """Read whose the object is, and its ETag if it is ours."""
        found = self._store.read()
        if found is None or _document_of(found).get("run") != self._token:
            return False
        self._etag = found.etag
        return True

    def _document(self) -> bytes:
        whose = {"run": self._token, "host": socket.gethostname(), "process": os.getpid()}
        return json.dumps(whose | {"renewals": self._renewals}).encode()

    def _busy(self, found: StoredObject | None = None) -> BusyError:
        holder = found and _holder(found)
        by = f": {holder}" if holder else ""
        return BusyError(f"another sweep is running in {self._folder}{by}", hint=_HINT)


def _document_of(found: StoredObject) -> dict[str, object]:
    with suppress(ValueError):
        document = parse_json(found.content)
        if isinstance(document, dict):
            return document
    return {}


def _holder(found: StoredObject) -> str:
    """The process that holds a lease; "" if nobody does."""
    document = _document_of(found)
    return f"process {document.get('process')} of {document['host']}" if "run" in document else ""


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder / ".lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise disk_error("lock", path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise BusyError(f"another sweep is running in {folder}", hint=_HINT) from error
    finally:
        os.close(fd)

"""The files of mutual TLS are read again when they change.

A renewal replaces files one after the other. Between two of them key and certificate do
not fit, and whoever read them then could no longer talk to anybody. So what was read
last stays in use until all three files are good again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from runtime.errors import ConfigError
from runtime.log import error_fields, get_logger
from runtime.tls_files import Tls, TlsBytes, read_files

# A file that changed so lately may change again without a new time of change: clocks of
# file systems tick slowly.
_SETTLED_AFTER_S = 2.0
_log = get_logger("tls")


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What changes with a file."""

    inode: int
    length_bytes: int
    # Of its inode, which no tool sets back, unlike the time of the last write.
    changed_ns: int


class RenewableTls:
    """The bytes of PEM files as they are by now. Thread-safe.

    A change that cannot serve is logged, and what was read before stays in use.
    """

    def __init__(
        self,
        tls: Tls,
        now_s: Callable[[], float] = time.time,
        stamps: Callable[[Tls], tuple[FileStamp, ...]] | None = None,
    ) -> None:
        """Read the files; `stamps` is how their changes are seen, by the system if it
        is None. A certificate that is not valid now is only logged: it may be renewed
        while the process runs, or the clock be set.

        Raises:
            ConfigError: they cannot be read, or do not fit together.
        """
        # Imported here: cryptography takes time, and without TLS nobody needs it.
        from runtime.certificates import check_pair, validity_fault

        self.files = tls
        self._now_s, self._stamps = now_s, stamps or _file_stamps
        self._lock = Lock()
        self._seen, self._read_at_s = self._stamps(tls), now_s()
        self._bytes = read_files(tls)
        self._refusal = ""
        check_pair(self._bytes)
        if fault := validity_fault(self._bytes, now_s()):
            _log.error("tls_not_valid", error=fault)

    def current(self) -> TlsBytes:
        """What to use for the next connection; the same object if nothing changed."""
        with self._lock:
            seen = self._stamps(self.files)
            if seen != self._seen or self._refusal or not self._is_settled():
                # Before the files are read: a change after it is seen next time.
                self._seen, self._read_at_s = seen, self._now_s()
                self._read_again()
            return self._bytes

    def _is_settled(self) -> bool:
        """Whether no file can have changed, since it was read, under the same time."""
        changed_s = max((file.changed_ns for file in self._seen), default=0) / 1e9
        return changed_s + _SETTLED_AFTER_S < self._read_at_s

    def _read_again(self) -> None:
        from runtime.certificates import (
            check_pair,
            check_same_role,
            valid_until,
            validity_fault,
        )

        try:
            found = read_files(self.files)
            if found != self._bytes:
                check_pair(found)
                if fault := validity_fault(found, self._now_s()):
                    raise ConfigError(fault)
                check_same_role(found, self._bytes)
        except ConfigError as error:
            if error.message != self._refusal:
                _log.warning("tls_renewal_refused", **error_fields(error))
            self._refusal = error.message
            return
        self._refusal = ""
        if found != self._bytes:
            self._bytes = found
            _log.info("tls_renewed", cert=str(self.files.cert), valid_until=valid_until(found))


def _file_stamps(tls: Tls) -> tuple[FileStamp, ...]:
    """That of each file which is there."""
    stamps = []
    for path in (tls.cert, tls.key, tls.ca):
        try:
            found = path.stat()
        except OSError:
            continue
        stamps.append(FileStamp(found.st_ino, found.st_size, found.st_ctime_ns))
    return tuple(stamps)

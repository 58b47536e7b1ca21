"""Files that people write for a process: settings and certificates."""

import os
import stat
from pathlib import Path

from runtime.errors import ConfigError

# Far above any settings file, and any PEM file with a chain of certificates.
SETTINGS_BYTES_MAX = 1 << 20


def read_settings_file(path: Path) -> bytes:
    """The bytes of a file. Nothing else is waited for: a pipe may never end.

    Raises:
        ConfigError: it cannot be read, is no regular file, or has more than
            SETTINGS_BYTES_MAX bytes.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"{path}: is not a regular file", path=str(path))
            with open(fd, "rb", closefd=False) as file:
                raw = file.read(SETTINGS_BYTES_MAX + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", path=str(path)) from error
    if len(raw) > SETTINGS_BYTES_MAX:
        raise ConfigError(f"{path}: is larger than {SETTINGS_BYTES_MAX} bytes", path=str(path))
    return raw

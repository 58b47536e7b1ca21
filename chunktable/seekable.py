"""What files that are only read, and whose length is known, have in common."""

import io
import os


class SeekableReader(io.RawIOBase):
    """A file object for pyarrow; who inherits from it reads from `_at` on."""

    def __init__(self, length_bytes: int) -> None:
        super().__init__()
        self._length = length_bytes
        self._at = 0

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def seekable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def tell(self) -> int:
        """See io.RawIOBase."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """See io.RawIOBase."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}
        self._at = origin[whence] + offset
        return self._at

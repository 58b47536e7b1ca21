"""Hashes of a whole object in one pass over its bytes, whoever reads or writes it."""

import hashlib
from collections.abc import Callable, Sequence

from blake3 import blake3

from merkle.checksum import Buffer, fold
from merkle.object_checksum import Crc, append_crc, crc_of
from proof.item import ContentHash, HashAlgorithm


class ContentHasher:
    """Computes MD5, CRC32C and BLAKE3 of bytes that arrive in pieces. The MD5 takes
    nine tenths of the time; `with_md5` leaves it out where nobody declares one.
    """

    def __init__(self, *, with_md5: bool = True) -> None:
        self._md5 = hashlib.md5(usedforsecurity=False) if with_md5 else None
        self._blake3 = blake3()
        self.crc32c = 0
        self.size_bytes = 0

    def update(self, data: Buffer) -> None:
        """Add the next piece."""
        view = memoryview(data)
        if self._md5 is not None:
            self._md5.update(view)
        self._blake3.update(view)
        self.crc32c = fold(view, self.crc32c)
        self.size_bytes += view.nbytes

    def checkpoint(self) -> Callable[[], None]:
        """What takes back all pieces that are added from now on."""
        md5 = self._md5 and self._md5.copy()
        blake3, crc32c, size_bytes = self._blake3.copy(), self.crc32c, self.size_bytes

        def undo() -> None:
            self._md5, self._blake3 = md5, blake3
            self.crc32c, self.size_bytes = crc32c, size_bytes

        return undo

    @property
    def md5(self) -> bytes:
        """The MD5 of all pieces so far, 16 bytes."""
        assert self._md5 is not None
        return self._md5.digest()

    @property
    def blake3(self) -> bytes:
        """The BLAKE3 of all pieces so far, 32 bytes."""
        return self._blake3.digest()

    def hashes(self) -> tuple[ContentHash, ...]:
        """All that were computed, as evidence of content."""
        md5 = self._md5.digest() if self._md5 is not None else None
        return content_hashes(md5=md5, crc32c=self.crc32c, blake3=self.blake3)


class WholeCrc:
    """The CRC of a whole object from those of its pieces, by the algorithm that a store
    declares for uploads; without one there is none.
    """

    def __init__(self, algorithm: str) -> None:
        """`algorithm` is the value of a HashAlgorithm, or empty."""
        self._crc = Crc[HashAlgorithm(algorithm).name] if algorithm else None
        self._value = 0

    def update(self, piece: Buffer) -> None:
        """Add the next piece."""
        if self._crc is not None:
            length_bytes, crc = memoryview(piece).nbytes, crc_of(self._crc, piece)
            self._value = append_crc(self._crc, self._value, crc, second_bytes=length_bytes)

    def checkpoint(self) -> Callable[[], None]:
        """What takes back all pieces that are added from now on."""
        value = self._value

        def undo() -> None:
            self._value = value

        return undo

    def hash(self) -> ContentHash | None:
        """That of all pieces so far."""
        return None if self._crc is None else _crc_hash(self._crc, self._value)


def declared_crc(hashes: Sequence[ContentHash]) -> str:
    """The algorithm of the CRC among the hashes that a store declares, as `WholeCrc`
    takes it; empty for none, and for CRC32C, which every `ContentHasher` computes.
    """
    names = (
        one.algorithm.value
        for one in hashes
        if one.algorithm.name in Crc.__members__ and one.algorithm is not HashAlgorithm.CRC32C
    )
    return next(names, "")


def with_whole(
    hashes: tuple[ContentHash, ...], whole: ContentHash | None
) -> tuple[ContentHash, ...]:
    """These hashes of an object, and its CRC if that is none of them."""
    return hashes if whole is None or whole in hashes else (*hashes, whole)


def crc_hash(crc: Crc, data: Buffer) -> ContentHash:
    """The CRC of some bytes, as evidence of content."""
    return _crc_hash(crc, crc_of(crc, data))


def content_hashes(
    *, md5: bytes | None, crc32c: int, blake3: bytes | None
) -> tuple[ContentHash, ...]:
    """The hashes that are known of an object, as evidence of content."""
    digests = {
        HashAlgorithm.MD5: md5,
        HashAlgorithm.CRC32C: crc32c.to_bytes(4, "big"),
        HashAlgorithm.BLAKE3: blake3,
    }
    return tuple(ContentHash(name, digest) for name, digest in digests.items() if digest)


def parts_etag(md5s: list[bytes]) -> str:
    """The ETag that S3 gives an object of several parts: it proves no content."""
    joined = hashlib.md5(b"".join(md5s), usedforsecurity=False)
    return f"{joined.hexdigest()}-{len(md5s)}"


def md5_of(data: Buffer) -> bytes:
    """The MD5 of some bytes, as stores use it for the ETag of a part."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def blake3_of(data: Buffer) -> bytes:
    """The BLAKE3 of some bytes, 32 bytes."""
    return blake3(data).digest()


def _crc_hash(crc: Crc, value: int) -> ContentHash:
    width_bits, _ = crc.value
    return ContentHash(HashAlgorithm[crc.name], value.to_bytes(width_bits // 8, "big"))

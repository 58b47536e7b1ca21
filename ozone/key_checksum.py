"""The CRC of a whole key from what its client recorded: no byte of its data is read.

The Ozone Manager knows the blocks of a key, in order, and the datanodes that have them.
A block's record has a CRC of each window of its chunks, as the client computed it when
it wrote. Folded, they are the CRC of the key: one that no disk or gateway has touched
since, and that does not depend on blocks, chunks or windows.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum

from merkle.checksum import ChecksumType
from merkle.errors import ReconcileError, RefusalError
from merkle.object_checksum import Crc, object_crc
from merkle.record import BlockRecord
from merkle.tree import BlockId, ContainerId
from ozone.datanode_client import DatanodeClient
from ozone.manager_values import KeyBlock, KeyFacts
from runtime.rpc import open_channel

_CRCS = {ChecksumType.CRC32: Crc.CRC32, ChecksumType.CRC32C: Crc.CRC32C}
_ERASURE_CODED = "EC/"
# Of a large cluster; those beyond are opened for one block each.
_CONNECTIONS_MAX = 64


class UnrecordedReason(Enum):
    """Why a key has no recorded CRC of its whole."""

    ENCRYPTED = "encrypted"
    """Its client recorded CRCs of the encrypted bytes."""
    ERASURE_CODED = "erasure_coded"
    """Its blocks hold stripes of it."""
    NO_CRC = "no_crc"
    """Its client recorded nothing, or a hash that cannot be folded."""
    MIXED = "mixed"
    """Not all of it has the same kind of CRC."""
    UNREADABLE = "unreadable"
    """No datanode gave the record of a block, or one that does not fit the key."""


class UnrecordedChecksumError(RefusalError):
    """The CRC of a key cannot be told; `reason` is a value of UnrecordedReason."""

    code = "checksum_unrecorded"


RecordReader = Callable[[KeyBlock], BlockRecord | None]


def key_crc(key: KeyFacts, record_of: RecordReader) -> tuple[Crc, int]:
    """Algorithm and CRC of all bytes of a key, by the records of its blocks.

    Raises:
        UnrecordedChecksumError: it cannot be told.
    """
    if key.is_encrypted:
        raise _unrecorded(key, UnrecordedReason.ENCRYPTED)
    if key.replication.startswith(_ERASURE_CODED):
        raise _unrecorded(key, UnrecordedReason.ERASURE_CODED)
    if sum(block.length_bytes for block in key.blocks) != key.size_bytes:
        raise _unrecorded(key, UnrecordedReason.UNREADABLE)
    kinds = set[ChecksumType]()

    def windows() -> Iterator[tuple[int, int]]:
        for block in key.blocks:
            record = record_of(block)
            if record is None or record.length_bytes != block.length_bytes:
                raise _unrecorded(key, UnrecordedReason.UNREADABLE)
            for chunk in record.chunks:
                kinds.add(chunk.checksum_type)
                if chunk.checksum_type not in _CRCS:
                    raise _unrecorded(key, UnrecordedReason.NO_CRC)
                for number, checksum in enumerate(chunk.checksums):
                    yield int.from_bytes(checksum, "big"), chunk.window(number)[1]

    # Which CRC it is shows in the first record; another one after it ends this.
    first = record_of(key.blocks[0]) if key.blocks else None
    found = {chunk.checksum_type for chunk in first.chunks} if first is not None else set()
    crc = _CRCS.get(next(iter(found), ChecksumType.CRC32C), Crc.CRC32C)
    value = object_crc(crc, windows())
    if len(kinds) > 1:
        raise _unrecorded(key, UnrecordedReason.MIXED)
    return crc, value


class DatanodeRecords:
    """The records of blocks, each of the first of its datanodes that has one. Thread-
    safe; connections are kept until `close`.
    """

    def __init__(self, *, insecure: bool) -> None:
        """With `insecure` datanodes off loopback are asked, too."""
        self._insecure = insecure
        self._lock = threading.Lock()
        self._clients = dict[str, DatanodeClient]()

    def __call__(self, block: KeyBlock) -> BlockRecord | None:
        """The record of a block; None where no datanode gave it."""
        container, block_id = ContainerId(block.container_id), BlockId(block.local_id)
        for address in block.datanodes:
            with suppress(ReconcileError), self._client(address) as client:
                for record in client.records(container, [block_id]):
                    return record
        return None

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    @contextmanager
    def _client(self, address: str) -> Iterator[DatanodeClient]:
        with self._lock:
            found = self._clients.get(address)
            is_kept = found is not None or len(self._clients) < _CONNECTIONS_MAX
            if found is None:
                found = DatanodeClient(open_channel(address, insecure=self._insecure), address)
                if is_kept:
                    self._clients[address] = found
        try:
            yield found
        finally:
            if not is_kept:
                found.close()


def _unrecorded(key: KeyFacts, reason: UnrecordedReason) -> UnrecordedChecksumError:
    return UnrecordedChecksumError(
        reason.value,
        f"the CRC of {key.volume}/{key.bucket}/{key.name} is not recorded: {reason.value}",
    )

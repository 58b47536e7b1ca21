"""Receipts: signed records of what comparisons found, each bound to the one before it.

A receipt states both sides of one comparison. It is signed with Ed25519 by the side
that keeps the chain, and may be countersigned by the other. A chain is a file of JSON
lines in one fixed form. Each line has its number and the SHA-256 of the line before it,
signatures included. So a line that is changed, removed, moved or replaced breaks the
chain there, and whoever holds the hash of the last line sees a missing end too.

An append writes and syncs the record first and its newline after that. So what follows
the last newline was never acknowledged, whatever a crash left of it.
"""

import json
import stat
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from proof.errors import ReceiptChainError, SigningKeyError
from proof.item import EvidenceLevel
from proof.lthash import sha256
from runtime.disk import Disk, disk_error
from runtime.documents import parse_json
from runtime.errors import DiskError

HASH_BYTES = 32
# The last that dates can show, in the year 9999.
_TIME_MS_MAX = 253_402_300_799_999
# A signature over a receipt is valid for nothing else.
_SIGNED_PREFIX = b"treefold-receipt-1\n"


@dataclass(frozen=True, slots=True)
class SideStatement:
    """One side of a comparison.

    `position` is that of the source's journal that this side holds; None where the side
    is known by listing only. `root` is the sum of all IDs (16 bytes), `set_digest` that
    of `LtHash` (32 bytes). `oldest_read_at_s` is of the items at level READ, in seconds
    since 1970; None where there are none.
    """

    address: str
    position: int | None
    listed: int
    recorded: int
    read: int
    oldest_read_at_s: int | None
    root: bytes
    set_digest: bytes

    @property
    def level(self) -> EvidenceLevel:
        """The level that holds for all items."""
        if self.listed:
            return EvidenceLevel.LISTED
        return EvidenceLevel.RECORDED if self.recorded else EvidenceLevel.READ


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one comparison found. `level` holds for all items of both sides."""

    time_ms: int
    profile_digest: bytes
    level: EvidenceLevel
    source: SideStatement
    target: SideStatement

    def __post_init__(self) -> None:
        assert self.level <= min(self.source.level, self.target.level)

    @property
    def is_equal(self) -> bool:
        """Whether both sides hold the same set of items."""
        return self.source.set_digest == self.target.set_digest


@dataclass(frozen=True, slots=True)
class Signature:
    """An Ed25519 signature and the public key (32 bytes) that proves it."""

    key: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class ReceiptRecord:
    """A receipt in its place in a chain. `previous` is the hash of the record before,
    zeros before the first. Signatures are sorted by key.
    """

    sequence: int
    previous: bytes
    receipt: Receipt
    signatures: tuple[Signature, ...] = ()

    def __post_init__(self) -> None:
        keys = [signature.key for signature in self.signatures]
        assert keys == sorted(set(keys))

    def signed_by(self, key: Ed25519PrivateKey) -> "ReceiptRecord":
        """The record with the signature of one more side."""
        own = Signature(public_key_bytes(key), key.sign(self._signed_bytes()))
        others = (signature for signature in self.signatures if signature.key != own.key)
        return replace(self, signatures=tuple(sorted((*others, own), key=lambda one: one.key)))

    @property
    def line(self) -> bytes:
        """The record as JSON in its one form, without a newline."""
        document = {
            "sequence": self.sequence,
            "previous": self.previous.hex(),
            "receipt": _receipt_document(self.receipt),
            "signatures": [
                {"key": one.key.hex(), "signature": one.signature.hex()} for one in self.signatures
            ],
        }
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def is_signed(self) -> bool:
        """Whether there is a signature, and all that there are were made over this
        record by the key that they name.
        """
        try:
            for one in self.signatures:
                Ed25519PublicKey.from_public_bytes(one.key).verify(
                    one.signature, self._signed_bytes()
                )
        except (InvalidSignature, ValueError):
            return False
        return bool(self.signatures)

    def _signed_bytes(self) -> bytes:
        return _SIGNED_PREFIX + replace(self, signatures=()).line


def parse_record(line: bytes) -> ReceiptRecord:
    """A record from its line, as the other side sends it.

    Raises:
        ReceiptChainError: the line is not a record in its one form.
    """
    try:
        record = _record_of(parse_json(line))
        is_one_form = record.line == line
    except (TypeError, ValueError) as error:
        raise ReceiptChainError("the line is not a receipt") from error
    if not is_one_form:
        # Two forms of one record would let a change pass that JSON does not show.
        raise ReceiptChainError("the line is a receipt, but not in its one form")
    return record


@dataclass(frozen=True, slots=True)
class ChainHead:
    """The length of a chain, and the hash of its last record; zeros if it is empty."""

    records: int = 0
    hash: bytes = bytes(HASH_BYTES)


class ChainFault(StrEnum):
    """What can be wrong with a record of a chain."""

    CHANGED = "changed"
    REMOVED = "removed"
    REORDERED = "reordered"
    CUT = "cut"
    """The last append was not finished, and never acknowledged."""
    FOREIGN_KEY = "foreign_key"
    TRUNCATED = "truncated"
    """The chain ends before its known head."""


@dataclass(frozen=True, slots=True)
class ChainBreak:
    """The first record that does not hold, numbered from 0, and why."""

    number: int
    fault: ChainFault
    detail: str


@dataclass(frozen=True, slots=True)
class ChainReport:
    """What holds of a chain: its first `head.records` records, all of it without a
    `broken`.
    """

    head: ChainHead
    broken: ChainBreak | None


def verify_chain(
    data: bytes, *, trusted: AbstractSet[bytes], known: ChainHead | None = None
) -> ChainReport:
    """Check the bytes of a chain file, without asking anyone.

    `trusted` are the public keys that may sign; each record needs one of them, and no
    other. `known` is a head of this chain that was noted elsewhere.
    """
    *lines, tail = data.split(b"\n")
    numbers = [_sequence_in(line) for line in lines]
    head = ChainHead()
    for number, line in enumerate(lines):
        broken = _break_at(number, line, head, numbers, trusted)
        if broken is not None:
            if broken.number < number:
                head = ChainHead(number - 1, _previous_in(lines[number - 1]))
            return ChainReport(head, broken)
        before, head = head, ChainHead(number + 1, sha256(line))
        if known is not None and head.records == known.records and head.hash != known.hash:
            text = f"record {number} is not the one that the known head names"
            return ChainReport(before, ChainBreak(number, ChainFault.CHANGED, text))
    if known is not None and head.records < known.records:
        text = f"the chain has {head.records} records; it had {known.records}"
        return ChainReport(head, ChainBreak(head.records, ChainFault.TRUNCATED, text))
    if tail:
        text = f"an append was cut after {len(tail)} bytes; it was never acknowledged"
        return ChainReport(head, ChainBreak(head.records, ChainFault.CUT, text))
    return ChainReport(head, None)


class ReceiptChain:
    """A chain file that this process appends to; it holds the lock of the folder."""

    def __init__(self, path: Path, disk: Disk) -> None:
        """Open the file, or begin one. An append that was cut is completed where only
        its newline is missing, otherwise removed.

        Raises:
            ReceiptChainError: the records do not follow each other.
            DiskError: the file cannot be read or written.
        """
        self._path, self._disk = path, disk
        self._must_reopen = False
        data = b"" if disk.length(path) is None else disk.read(path)
        *lines, tail = data.split(b"\n")
        head = ChainHead()
        for number, line in enumerate(lines):
            if not _follows(line, head):
                raise ReceiptChainError(
                    f"record {number} of {path} does not follow the one before it",
                    hint="Keep the file as evidence, verify it, and begin a new chain beside it.",
                    path=str(path),
                    record=number,
                )
            head = ChainHead(number + 1, sha256(line))
        if tail and _follows(tail, head):
            lines.append(tail)
            head = ChainHead(len(lines), sha256(tail))
        whole = b"".join(line + b"\n" for line in lines)
        if whole != data:
            disk.replace(path, whole)
        self._head, self._length_bytes = head, len(whole)

    @property
    def head(self) -> ChainHead:
        """What a later verification needs to see a missing end; note it elsewhere."""
        return self._head

    def next_record(self, receipt: Receipt) -> ReceiptRecord:
        """The receipt in its place, to be signed."""
        return ReceiptRecord(self._head.records, self._head.hash, receipt)

    def append(self, record: ReceiptRecord) -> ChainHead:
        """Append a signed record; durable on return.

        Raises:
            ReceiptChainError: it is not signed, or not the next record.
            DiskError: it is unknown whether the record is in the file; open the chain
                again.
        """
        line = record.line
        if self._must_reopen:
            raise ReceiptChainError(
                f"the end of {self._path} is unknown since an append failed",
                hint="Open the chain again.",
                path=str(self._path),
            )
        if not record.is_signed or not _follows(line, self._head):
            raise ReceiptChainError(
                f"the record is not signed, or is not number {self._head.records} of {self._path}",
                hint="Take the record from next_record and sign it before anything else does.",
                path=str(self._path),
            )
        is_new = not self._length_bytes
        try:
            for part in (line, b"\n"):
                self._disk.write_at(self._path, self._length_bytes, part)
                self._disk.sync(self._path)
                self._length_bytes += len(part)
            if is_new:
                self._disk.sync_folder(self._path.parent)
        except DiskError:
            self._must_reopen = True
            raise
        self._head = ChainHead(record.sequence + 1, sha256(line))
        return self._head


def create_signing_key(path: Path, disk: Disk) -> Ed25519PrivateKey:
    """A new key, stored as PEM that only this user may read. An existing file is never
    replaced; the caller holds the lock of the folder.

    Raises:
        SigningKeyError: the file exists.
        DiskError: it cannot be written.
    """
    if disk.length(path) is not None:
        raise SigningKeyError(
            f"there is a file {path} already",
            hint="Use it, or choose another name: earlier receipts need their key.",
            path=str(path),
        )
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    disk.replace(path, pem, private=True)
    return key


def load_signing_key(path: Path, disk: Disk) -> Ed25519PrivateKey:
    """The key in a file.

    Raises:
        SigningKeyError: it holds no Ed25519 key, or others may read it.
        DiskError: it cannot be read.
    """
    data = disk.read(path)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise disk_error("stat", path, error) from error
    if stat.S_IMODE(mode) & 0o077:
        raise SigningKeyError(
            f"others may read the key {path}",
            hint=f"Run `chmod 600 {path}`, and replace the key if others may have copied it.",
            path=str(path),
        )
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise SigningKeyError(f"there is no key in {path}", path=str(path)) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningKeyError(f"the key in {path} is not of Ed25519", path=str(path))
    return key


def public_key_bytes(key: Ed25519PrivateKey) -> bytes:
    """The 32 bytes by which others know the key."""
    return key.public_key().public_bytes_raw()


def _break_at(
    number: int,
    line: bytes,
    head: ChainHead,
    numbers: Sequence[int | None],
    trusted: AbstractSet[bytes],
) -> ChainBreak | None:
    """What is wrong with a record that follows `head`, if anything. `numbers` are those
    that the lines of the file state.
    """
    try:
        record = parse_record(line)
    except ReceiptChainError as error:
        return ChainBreak(number, ChainFault.CHANGED, f"record {number}: {error.message}")
    if not record.is_signed:
        text = f"record {number} is not what was signed"
        return ChainBreak(number, ChainFault.CHANGED, text)
    foreign = [one.key.hex() for one in record.signatures if one.key not in trusted]
    if foreign:
        text = f"record {number} is signed by another key: {', '.join(foreign)}"
        return ChainBreak(number, ChainFault.FOREIGN_KEY, text)
    if record.sequence != number:
        moved = number in numbers[number:] or record.sequence < number
        fault = ChainFault.REORDERED if moved else ChainFault.REMOVED
        text = f"record {number} is expected, and record {record.sequence} is there"
        return ChainBreak(number, fault, text)
    if record.previous != head.hash:
        # Either may be the one that was replaced: the earlier one is not proven.
        earlier = max(number - 1, 0)
        text = f"record {number} does not follow the record before it; one was replaced"
        return ChainBreak(earlier, ChainFault.CHANGED, text)
    return None


def _follows(line: bytes, head: ChainHead) -> bool:
    try:
        record = parse_record(line)
    except ReceiptChainError:
        return False
    return (record.sequence, record.previous) == (head.records, head.hash)


def _sequence_in(line: bytes) -> int | None:
    try:
        return parse_record(line).sequence
    except ReceiptChainError:
        return None


def _previous_in(line: bytes) -> bytes:
    return parse_record(line).previous


def _receipt_document(receipt: Receipt) -> dict[str, object]:
    return {
        "time_ms": receipt.time_ms,
        "profile_digest": receipt.profile_digest.hex(),
        "level": receipt.level.value,
        "source": _side_document(receipt.source),
        "target": _side_document(receipt.target),
    }


def _side_document(side: SideStatement) -> dict[str, object]:
    return {
        "address": side.address,
        "position": side.position,
        "listed": side.listed,
        "recorded": side.recorded,
        "read": side.read,
        "oldest_read_at_s": side.oldest_read_at_s,
        "root": side.root.hex(),
        "set_digest": side.set_digest.hex(),
    }


def _record_of(value: object) -> ReceiptRecord:
    """The record of a document; whether it is in its one form, its line shows.

    Raises:
        TypeError, ValueError: it is no record.
    """
    sequence, previous, receipt, signatures = _fields(
        value, "sequence", "previous", "receipt", "signatures"
    )
    if not isinstance(signatures, list):
        raise TypeError("the signatures are no list")
    signed = [_fields(one, "key", "signature") for one in signatures]
    made = tuple(Signature(_bytes(key), _bytes(signature)) for key, signature in signed)
    if sorted({one.key for one in made}) != [one.key for one in made]:
        raise ValueError("the signatures are not sorted by key")
    return ReceiptRecord(_whole(sequence), _bytes(previous), _receipt_of(receipt), made)


def _receipt_of(value: object) -> Receipt:
    time_ms, digest, level, source, target = _fields(
        value, "time_ms", "profile_digest", "level", "source", "target"
    )
    if not 0 <= _whole(time_ms) <= _TIME_MS_MAX:
        raise ValueError(f"{time_ms} is no time")
    sides, holds = (_side_of(source), _side_of(target)), EvidenceLevel(_whole(level))
    if holds > min(side.level for side in sides):
        raise ValueError("the level does not hold for both sides")
    return Receipt(_whole(time_ms), _bytes(digest), holds, *sides)


def _side_of(value: object) -> SideStatement:
    address, position, listed, recorded, read, oldest, root, digest = _fields(
        value,
        *("address", "position", "listed", "recorded", "read"),
        *("oldest_read_at_s", "root", "set_digest"),
    )
    if not isinstance(address, str):
        raise TypeError("the address is no text")
    return SideStatement(
        address=address,
        position=None if position is None else _whole(position),
        listed=_whole(listed),
        recorded=_whole(recorded),
        read=_whole(read),
        oldest_read_at_s=None if oldest is None else _whole(oldest),
        root=_bytes(root),
        set_digest=_bytes(digest),
    )


def _fields(value: object, *names: str) -> list[object]:
    """The values of just these fields, in this order."""
    if not isinstance(value, dict) or tuple(value) != names:
        raise ValueError(f"the fields are not {', '.join(names)}")
    return list(value.values())


def _whole(value: object) -> int:
    # True is an int, and no number of JSON.
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text of hexadecimal digits")
    return bytes.fromhex(value)

"""Receipts and the keys of two sides, made without chance."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from proof.item import EvidenceLevel
from proof.lthash import sha256
from proof.receipts import ChainHead, Receipt, ReceiptRecord, SideStatement, public_key_bytes

OUR_KEY = Ed25519PrivateKey.from_private_bytes(bytes([1] * 32))
THEIR_KEY = Ed25519PrivateKey.from_private_bytes(bytes([2] * 32))
TRUSTED = frozenset({public_key_bytes(OUR_KEY), public_key_bytes(THEIR_KEY)})


def side(
    *, listed: int = 0, recorded: int = 10, read: int = 0, digest: bytes = b"\7" * 32
) -> SideStatement:
    """A side at position 5."""
    return SideStatement(
        address="s3://bucket",
        position=5,
        listed=listed,
        recorded=recorded,
        read=read,
        oldest_read_at_s=1_000 if read else None,
        root=b"\5" * 16,
        set_digest=digest,
    )


def receipt(
    number: int,
    *,
    source: SideStatement | None = None,
    level: EvidenceLevel = EvidenceLevel.RECORDED,
) -> Receipt:
    """A receipt of its own for each number."""
    target = side(digest=number.to_bytes(32, "big"))
    return Receipt(1_000 + number, b"\3" * 16, level, source or target, target)


def chain_of(count: int, key: Ed25519PrivateKey = OUR_KEY) -> tuple[list[bytes], ChainHead]:
    """The lines of a chain with their newlines, and its head."""
    lines, head = list[bytes](), ChainHead()
    for number in range(count):
        record = ReceiptRecord(number, head.hash, receipt(number)).signed_by(key)
        lines.append(record.line + b"\n")
        head = ChainHead(number + 1, sha256(record.line))
    return lines, head

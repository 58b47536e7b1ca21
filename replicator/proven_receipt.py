"""The receipt of a comparison with a verifier."""

from collections.abc import Iterator
from urllib.parse import quote

from proof.index import EvidenceCounts, StampedItem
from proof.item import EvidenceLevel
from proof.lthash import LtHash
from proof.receipts import Receipt, SideStatement
from proof.stored_index import StoredIndex
from replicator.proving import PairProof
from replicator.refresh import IndexedBucket, prefix_range

# Rows of the index that are read at a time.
_PAGE = 1_000


def proven_receipt(
    bucket: IndexedBucket, proof: PairProof, *, source: str, target: str, prefix: str, time_ms: int
) -> Receipt | None:
    """What was found of the stores at two addresses at a time, in ms since the epoch.
    The target's set is the source's but for what differs; None where that is not known,
    because differences are in flight or the index has changed since.

    Raises:
        DatabaseError, IndexDamagedError: the index cannot be read.
    """
    found = proof.comparison
    if proof.is_moving or proof.tally.explained != found.ours - found.theirs:
        return None
    with bucket.index.snapshot() as snapshot:
        if snapshot.roots([prefix_range(prefix)])[0] != found.ours:
            return None
    ours = LtHash()
    ours.add(row.item for row in _rows(bucket.index, prefix))
    theirs = LtHash(ours.state)
    theirs.add_hash(proof.tally.surplus)
    part = f"#prefix={quote(prefix)}" if prefix else ""
    sides = [
        _statement(address + part, evidence, root.count, root.total, digest, whole=not prefix)
        for address, evidence, root, digest in (
            (source, found.ours_evidence, found.ours, ours.digest),
            (target, found.theirs_evidence, found.theirs, theirs.digest),
        )
    ]
    level = min(side.level for side in sides)
    return Receipt(time_ms, bucket.profile.digest, level, sides[0], sides[1])


def _statement(
    address: str, evidence: EvidenceCounts, count: int, total: int, digest: bytes, *, whole: bool
) -> SideStatement:
    counts = [evidence.listed, evidence.recorded, evidence.read]
    if not whole:
        # The evidence is of all items; of a part its weakest level is certain.
        weakest = next((at for at, some in enumerate(counts) if some), EvidenceLevel.READ - 1)
        counts = [count if at == weakest else 0 for at in range(len(counts))]
    return SideStatement(
        address=address,
        position=None,
        listed=counts[0],
        recorded=counts[1],
        read=counts[2],
        oldest_read_at_s=evidence.oldest_read_at_s,
        root=total.to_bytes(16, "big"),
        set_digest=digest,
    )


def _rows(index: StoredIndex, prefix: str) -> Iterator[StampedItem]:
    after = ""
    while page := index.rows(start_after=after, limit=_PAGE, prefix=prefix):
        yield from page
        after = page[-1].item.key

"""The two sets of items that a comparison has seen, summed up for roots and receipts.

A key that is equal at both sides is one item of both sets, with the hash and properties
by which it is equal. Of any other key nothing is claimed but its listing: it is in the
set of the source, or only the target has it and it is in that of the target. So the
sets are equal exactly if every key is, and a root stands for what was shown.

Which algorithm all equal objects are known by shows at the end. Until then sums are
kept for each that is still possible.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from proof.item import ContentHash, EvidenceLevel, HashAlgorithm, Item, ItemHasher, Profile
from proof.lthash import LtHash
from proof.receipts import Receipt, SideStatement
from proof.root import ROOT_EMPTY, SetRoot
from replicator.stores.port import ObjectFacts

# What a root may be over, strongest first; None is keys, sizes and properties.
_ALGORITHMS = (HashAlgorithm.BLAKE3, HashAlgorithm.MD5, HashAlgorithm.CRC32C, None)
# Items expanded together for a set hash.
_BATCH_ITEMS = 256
# Names of the sums of what is not equal; those of equal objects have an algorithm's, or
# none.
_OURS, _THEIRS = "source", "target"


@dataclass(frozen=True, slots=True)
class SetSum:
    """The root and the state of the set hash of some items."""

    root: SetRoot
    lanes: bytes


@dataclass(slots=True)
class _ItemSum:
    """The root and the set hash of some items."""

    hasher: ItemHasher
    root: SetRoot = ROOT_EMPTY
    _hash: LtHash = field(default_factory=LtHash)
    _waiting: list[Item] = field(default_factory=list)

    def add(self, item: Item) -> None:
        self.root += SetRoot.of_item(self.hasher.id(item))
        self._waiting.append(item)
        if len(self._waiting) >= _BATCH_ITEMS:
            self._settle()

    def remove(self, item: Item) -> None:
        self.root -= SetRoot.of_item(self.hasher.id(item))
        self._settle()
        self._hash.remove([item])

    def add_sum(self, sums: "SetSum") -> None:
        self.root += sums.root
        self._hash.add_hash(LtHash(sums.lanes))

    @property
    def sums(self) -> "SetSum":
        self._settle()
        return SetSum(self.root, self._hash.state)

    def plus(self, other: "_ItemSum") -> tuple[SetRoot, LtHash]:
        """The root and the hash of both."""
        self._settle()
        other._settle()
        both = LtHash(self._hash.state)
        both.add_hash(other._hash)
        return self.root + other.root, both

    def _settle(self) -> None:
        self._hash.add(self._waiting)
        self._waiting.clear()


@dataclass(slots=True)
class ComparedSets:
    """Sums up the items of both sides. `secret` keys the roots of the pair."""

    secret: bytes
    levels: Counter[EvidenceLevel] = field(default_factory=Counter)
    oldest_read_at_s: int | None = None
    _hasher: ItemHasher = field(init=False)
    _equal: dict[HashAlgorithm | None, _ItemSum] = field(init=False)
    _ours: _ItemSum = field(init=False)
    _theirs: _ItemSum = field(init=False)

    def __post_init__(self) -> None:
        # An ID depends on the secret alone: what is hashed differs by the item.
        self._hasher = ItemHasher(Profile(self.secret))
        self._equal = {name: _ItemSum(self._hasher) for name in _ALGORITHMS}
        self._ours, self._theirs = _ItemSum(self._hasher), _ItemSum(self._hasher)

    def add_equal(
        self,
        facts: ObjectFacts,
        hashes: tuple[ContentHash, ...],
        properties: bytes,
        level: EvidenceLevel,
        *,
        read_at_s: int | None = None,
    ) -> None:
        """Add a key that is equal at both sides. `read_at_s` is when its bytes were
        read, in seconds since 1970, at level READ.
        """
        self.levels[level] += 1
        if read_at_s is not None:
            self.oldest_read_at_s = min(read_at_s, self.oldest_read_at_s or read_at_s)
        digests = {one.algorithm: one.digest for one in hashes}
        for name in tuple(self._equal):
            content = digests.get(name) if name is not None else None
            if name is not None and content is None:
                del self._equal[name]
                continue
            self._equal[name].add(Item(facts.key, facts.size_bytes, content, properties))

    def add_different(self, source: ObjectFacts | None, target: ObjectFacts | None) -> None:
        """Add a key that is not known to be equal."""
        side, facts = (self._ours, source) if source is not None else (self._theirs, target)
        # A key that is gone from both by now is in neither set.
        if facts is not None:
            side.add(Item(facts.key, facts.size_bytes))

    def remove_extra(self, key: str, size_bytes: int) -> None:
        """Take out a key that only the target had, and that was deleted there."""
        self._theirs.remove(Item(key, size_bytes))

    def sums(self) -> dict[str, SetSum]:
        """The sums of all sets by name, for `add_sums`."""
        named = {name.value if name else "": one for name, one in self._equal.items()}
        named |= {_OURS: self._ours, _THEIRS: self._theirs}
        return {name: one.sums for name, one in named.items()}

    def add_sums(
        self,
        sums: Mapping[str, SetSum],
        levels: Mapping[EvidenceLevel, int],
        oldest_read_at_s: int | None,
    ) -> None:
        """Add what another comparison has seen of other keys: its sums, its `levels`
        and when it read first.
        """
        self.levels.update(levels)
        times = [one for one in (self.oldest_read_at_s, oldest_read_at_s) if one is not None]
        self.oldest_read_at_s = min(times, default=None)
        for name in tuple(self._equal):
            found = sums.get(name.value if name else "")
            if found is None:
                del self._equal[name]
            else:
                self._equal[name].add_sum(found)
        self._ours.add_sum(sums[_OURS])
        self._theirs.add_sum(sums[_THEIRS])

    @property
    def algorithm(self) -> HashAlgorithm | None:
        """The strongest algorithm by which all equal objects are known."""
        return next(name for name in _ALGORITHMS if name in self._equal)

    @property
    def root(self) -> SetRoot:
        """The root of the objects that are equal, by `algorithm`."""
        return self._equal[self.algorithm].root

    @property
    def objects(self) -> int:
        """How many keys are equal."""
        return self.levels.total()

    @property
    def level(self) -> EvidenceLevel:
        """The level that holds for all equal objects; READ if there are none."""
        return min(self.levels, default=EvidenceLevel.READ)

    def receipt(
        self, *, source: str, target: str, prefix: str, groups: tuple[str, ...], time_ms: int
    ) -> Receipt:
        """What was found of the stores at two addresses below a prefix at a time, in ms
        since the epoch. `groups` are the properties that were compared.
        """
        # A part of a bucket must not pass for the whole.
        part = f"#prefix={quote(prefix)}" if prefix else ""
        ours = self._statement(source + part, self._ours)
        theirs = self._statement(target + part, self._theirs)
        digest = Profile(self.secret, self.algorithm, groups).digest
        return Receipt(time_ms, digest, min(ours.level, theirs.level), ours, theirs)

    def _statement(self, address: str, alone: _ItemSum) -> SideStatement:
        root, both = self._equal[self.algorithm].plus(alone)
        return SideStatement(
            address=address,
            position=None,
            listed=self.levels[EvidenceLevel.LISTED] + alone.root.count,
            recorded=self.levels[EvidenceLevel.RECORDED],
            read=self.levels[EvidenceLevel.READ],
            oldest_read_at_s=self.oldest_read_at_s,
            root=root.total.to_bytes(16, "big"),
            set_digest=both.digest,
        )

"""Random pairs of buckets, and what differs between them by brute force."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from proof.comparison import BucketComparison, SourceComparison
from proof.index import AppliedPositions, IndexChange, Position
from proof.item import Item
from proof.naming import ItemDifference, ItemDifferenceKind
from tests.support.memory_index import PROFILE, Link, MemoryIndex

Name = tuple[str, str]
Items = dict[Name, Item]

NAMES = ("", "é", "a/", "a//b", "a/b?", "😀", "\uff21", "z" * 30)


def random_item(rng: random.Random, universe: int) -> Item:
    """One of about `universe` keys with one of three contents."""
    number = rng.randrange(universe)
    return Item(
        key=f"{NAMES[number % len(NAMES)]}{number:05}",
        size_bytes=rng.randrange(3),
        content=rng.choice((None, b"one", b"two")),
        version=rng.choice(("", "", "v1")),
        is_delete_marker=rng.random() < 0.05,
    )


def random_items(rng: random.Random, count: int, universe: int) -> Items:
    """At most `count` items."""
    found = (random_item(rng, universe) for _ in range(count))
    return {(item.key, item.version): item for item in found}


def differing(ours: Items, theirs: Items) -> dict[Name, ItemDifferenceKind]:
    """What differs, name by name."""
    kinds = {}
    for name in ours.keys() | theirs.keys():
        if name not in theirs:
            kinds[name] = ItemDifferenceKind.MISSING
        elif name not in ours:
            kinds[name] = ItemDifferenceKind.EXTRA
        elif ours[name] != theirs[name]:
            kinds[name] = ItemDifferenceKind.CHANGED
    return kinds


def names_of(differences: Sequence[ItemDifference]) -> dict[Name, ItemDifferenceKind]:
    """The same of what a comparison found."""
    return {(one.key, one.version): one.kind for one in differences}


def pair_at_rest(rng: random.Random, size: int, changes: int) -> tuple[MemoryIndex, MemoryIndex]:
    """A source and a target that differ in about so many items."""
    ours = random_items(rng, size, 2 * size + 1)
    theirs, names = dict(ours), sorted(ours)
    for _ in range(changes):
        item = random_item(rng, 2 * size + 1)
        side = rng.choice((ours, theirs))
        if rng.random() < 0.5:
            side[item.key, item.version] = item
        elif names:
            side.pop(rng.choice(names), None)
    return MemoryIndex(ours.values()), MemoryIndex(theirs.values())


@dataclass
class MovingPair:
    """A source that changes, and a target that applies its changes in the order of each
    item, loses and forges some, and takes foreign writes.
    """

    rng: random.Random
    universe: int
    source: MemoryIndex = field(init=False)
    target: MemoryIndex = field(init=False)

    def __post_init__(self) -> None:
        items = random_items(self.rng, self.universe // 2, self.universe)
        self.source, self.target = MemoryIndex(items.values()), MemoryIndex(items.values())
        self.target.applied = AppliedPositions(Position(0))
        self._start = items
        self._history: list[tuple[IndexChange, Item | None]] = []
        self._pending: list[tuple[IndexChange, Item | None]] = []
        self._applied = set[int]()

    def change_source(self) -> None:
        """One write or delete."""
        item = random_item(self.rng, self.universe)
        if self.rng.random() < 0.7:
            written: Item | None = item
            change = self.source.put(item)
        else:
            change, written = self.source.delete(item.key, item.version), None
        self._pending.append((change, written))
        self._history.append((change, written))

    def apply(self, *, faithfully: bool = True) -> None:
        """The target applies the first pending change of some item, and reports it."""
        if not self._pending:
            return
        change, item = self.rng.choice(self._pending)
        name = (change.key, change.version)
        at = next(n for n, (one, _) in enumerate(self._pending) if (one.key, one.version) == name)
        change, item = self._pending.pop(at)
        self._applied.add(change.position)
        if not faithfully:
            pass
        elif item is None:
            self.target.delete(*name)
        else:
            self.target.put(item)
        through = 0
        while through + 1 in self._applied:
            through += 1
        above = sorted(Position(one) for one in self._applied if one > through)
        self.target.applied = AppliedPositions(Position(through), tuple(above))

    def write_foreign(self) -> None:
        """A write at the target that the source knows nothing of."""
        item = random_item(self.rng, self.universe)
        if self.rng.random() < 0.5:
            self.target.put(item)
        else:
            self.target.delete(item.key, item.version)

    def source_at_cut(self) -> Items:
        """What the target must hold by what it applied, replayed from the start."""
        held, pending = dict(self._start), {one.position for one, _ in self._pending}
        for change, item in self._history:
            if change.position not in pending:
                held.pop((change.key, change.version), None)
                if item is not None:
                    held[change.key, change.version] = item
        return held


def steps(
    source: MemoryIndex,
    target: MemoryIndex,
    *,
    applied: AppliedPositions | None = None,
    known: Iterable[ItemDifference] = (),
) -> Iterator[BucketComparison | None]:
    """A comparison that pauses before each trip, with None; then its outcome."""
    side = SourceComparison(source, PROFILE, b"job 5678", applied=applied, known=known)
    link, questions = Link(target), side.start()
    while questions:
        yield None
        questions = side.step(link.carry(questions))
    yield side.outcome

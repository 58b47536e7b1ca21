"""Extras whose facts nobody needs: those that an earlier comparison has named, and
those that are named by their keys alone.

To delete an object its key and ID suffice. So the target sends no facts of extras that
are to be deleted, and a second comparison that finds the same extras asks for none.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from proof.cuts import RewoundSnapshot
from proof.index import AppliedPositions
from proof.item import KEY_HASH_BYTES, ItemHasher, ItemId
from proof.naming import ItemDifference, ItemDifferenceKind, NamingResult
from proof.symbols import IdDifference, Ids, each_id, ids_from_bytes, key_hashes
from runtime.errors import RemoteProtocolError

Extras = Mapping[ItemId, ItemDifference]


def known_extras(differences: Iterable[ItemDifference]) -> Extras:
    """The extras among the differences of an earlier comparison, by ID."""
    return {
        one.theirs_id: one
        for one in differences
        if one.kind is ItemDifferenceKind.EXTRA and one.theirs_id is not None
    }


def extras_at(view: RewoundSnapshot, known: Extras) -> Extras:
    """The extras whose keys we do not have at a cut, whatever came since then."""
    if not known:
        return known
    rows = view.find(key_hashes(ids_from_bytes(b"".join(known))))
    ours = {(row.item.key, row.item.version) for row in rows}
    ours |= {(one.key, one.version) for one in view.undone if one.then is not None}
    return {one_id: one for one_id, one in known.items() if (one.key, one.version) not in ours}


def split_extras(found: IdDifference, extras: Extras) -> tuple[IdDifference, list[ItemDifference]]:
    """From what differs from our items and the extras to what differs from ours besides
    the extras, and the extras that the target still has.
    """
    if not extras:
        return found, []
    alone = set(each_id(found.ours))
    ours = _joined(alone - extras.keys())
    return IdDifference(ours, found.theirs), [
        one for one_id, one in extras.items() if one_id not in alone
    ]


class KeyNaming:
    """Names extras by their keys: ask the target for `hashes`, give its answers to
    `take`, then read `left` and `extras`. Whatever a key hash alone does not tell is
    left to naming by facts.
    """

    def __init__(self, hasher: ItemHasher, found: IdDifference) -> None:
        self._hasher = hasher
        self._found = found
        self.extras = list[ItemDifference]()
        """What was named so far."""
        by_hash = defaultdict[bytes, list[ItemId]](list)
        for one_id in each_id(found.theirs):
            by_hash[one_id[:KEY_HASH_BYTES]].append(one_id)
        ours = {one_id[:KEY_HASH_BYTES] for one_id in each_id(found.ours)}
        self._ids = {
            one: ids[0] for one, ids in by_hash.items() if len(ids) == 1 and one not in ours
        }
        self.hashes = sorted(self._ids)

    @property
    def left(self) -> IdDifference:
        """What has no name yet."""
        named = {one.theirs_id for one in self.extras}
        theirs = _joined(one for one in each_id(self._found.theirs) if one not in named)
        return IdDifference(self._found.ours, theirs)

    def take(self, asked: Sequence[bytes], names: Sequence[tuple[str, str]]) -> None:
        """Keys and versions of the items that the target has for these key hashes.

        Raises:
            RemoteProtocolError: a key is of another hash.
        """
        wanted, named = frozenset(asked), defaultdict[bytes, list[tuple[str, str]]](list)
        for key, version in names:
            number = self._hasher.key_hash(key.encode(), version.encode())
            key_hash = number.to_bytes(KEY_HASH_BYTES, "big")
            if key_hash not in wanted:
                raise RemoteProtocolError(f"{key!r} was not asked for")
            named[key_hash].append((key, version))
        for key_hash, found in named.items():
            # Of two items of one hash one may be equal at both sides.
            if len(found) == 1:
                extra = ItemDifference(
                    ItemDifferenceKind.EXTRA, *found[0], theirs_id=self._ids[key_hash]
                )
                self.extras.append(extra)


def with_extras_named(
    result: NamingResult,
    extras: Sequence[ItemDifference],
    view: RewoundSnapshot,
    cut: AppliedPositions,
) -> NamingResult:
    """The result with extras besides, in its order. Those whose keys we have got since
    the cut are in flight, or unknown.
    """
    if not extras:
        return result
    undone = {(one.key, one.version): one.first for one in view.undone}
    moved = [one for one in extras if (one.key, one.version) in undone]
    listed = cut.listed_through
    unknown = [
        one for one in moved if listed is not None and undone[one.key, one.version] <= listed
    ]
    certain = [one for one in extras if (one.key, one.version) not in undone]
    return replace(
        result,
        differences=_ordered([*result.differences, *certain]),
        in_flight=result.in_flight + len(moved) - len(unknown),
        unknown=_ordered([*result.unknown, *unknown]),
    )


def _joined(ids: Iterable[ItemId]) -> Ids:
    return ids_from_bytes(b"".join(ids))


def _ordered(differences: list[ItemDifference]) -> tuple[ItemDifference, ...]:
    return tuple(sorted(differences, key=lambda one: (one.key, one.version)))

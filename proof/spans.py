"""Sums over spans of about 4,096 items in key order, kept up to date.

The root of a key range is that of the whole spans inside it, plus those of the parts of
two spans at its ends, whose IDs are read. A span begins at a key, so that all versions
of a key are in one span.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Self

from proof.errors import SpansInvalidError
from proof.index import KeyRange
from proof.item import ID_BYTES, ItemId
from proof.root import ROOT_EMPTY, SetRoot
from proof.symbols import Ids

SPAN_ITEMS = 4_096

# Of one span: length of its first key, count, sum.
_SPAN = struct.Struct(f">IQ{ID_BYTES}s")


class SpanSums:
    """The roots of consecutive spans, which cover all keys. Not safe for threads."""

    def __init__(self) -> None:
        self._starts = [""]
        self._roots = [ROOT_EMPTY]

    @classmethod
    def of(cls, spans: Iterable[tuple[str, SetRoot]]) -> Self:
        """The sums of spans by their first keys, ascending; the first covers all keys
        before the second.
        """
        made = cls()
        for start, root in spans:
            if made._roots != [ROOT_EMPTY]:
                made._starts.append(start)
                made._roots.append(root)
            else:
                made._roots = [root]
        assert made._starts == sorted(set(made._starts))
        return made

    def copy(self) -> "SpanSums":
        """Sums that change on their own."""
        made = SpanSums()
        made._starts, made._roots = self._starts.copy(), self._roots.copy()
        return made

    def counts(self, key_range: KeyRange) -> list[tuple[str, int]]:
        """The first keys of the spans that begin in a range, and how many items each
        span has.
        """
        first = bisect_left(self._starts, key_range.start)
        end = key_range.end
        last = len(self._starts) if end is None else bisect_left(self._starts, end)
        roots = self._roots[first:last]
        return [(s, r.count) for s, r in zip(self._starts[first:last], roots, strict=True)]

    @property
    def root(self) -> SetRoot:
        """Of all items."""
        return SetRoot.of_all(self._roots)

    def change(self, key: str, old: ItemId | None, new: ItemId | None) -> None:
        """The item of a key went from one ID to another; None is no item."""
        at = bisect_right(self._starts, key) - 1
        self._roots[at] += SetRoot.of_item(new) - SetRoot.of_item(old)

    def cover(self, key_range: KeyRange) -> tuple[SetRoot, list[KeyRange]]:
        """The root of all spans inside a range, and the at most two parts of it whose
        IDs must be read and added.
        """
        start, end = key_range.start, key_range.end
        first = bisect_left(self._starts, start)
        last = len(self._starts) if end is None else bisect_right(self._starts, end) - 1
        if start == end:
            return ROOT_EMPTY, []
        if last < first:
            return ROOT_EMPTY, [key_range]
        inside = SetRoot.of_all(self._roots[first:last])
        parts = []
        if first == len(self._starts) or start < self._starts[first]:
            parts.append(KeyRange(start, self._start(first)))
        if end is not None and self._starts[last] < end:
            parts.append(KeyRange(self._starts[last], end))
        return inside, parts

    def rebalance(
        self,
        *,
        split: Callable[[KeyRange, int], list[str]],
        read_ids: Callable[[KeyRange], Ids],
        items: int = SPAN_ITEMS,
    ) -> int:
        """Split spans of more than twice `items`, by `split` and `read_ids` of a
        snapshot with the same items, and join neighbours that have no more together;
        the number of spans then.
        """
        starts, roots = list[str](), list[SetRoot]()
        for at, root in enumerate(self._roots):
            whole = KeyRange(self._starts[at], self._start(at + 1))
            if root.count > 2 * items:
                for part in parts_of(whole, split(whole, root.count // items)):
                    starts.append(part.start)
                    roots.append(SetRoot.of(read_ids(part)))
            elif roots and roots[-1].count + root.count <= items:
                roots[-1] += root
            else:
                starts.append(whole.start)
                roots.append(root)
        self._starts, self._roots = starts, roots
        return len(starts)

    def to_bytes(self) -> bytes:
        """For storage beside the position of the journal that the sums are of."""
        out = []
        for start, root in zip(self._starts, self._roots, strict=True):
            key = start.encode()
            out.append(_SPAN.pack(len(key), root.count, root.total.to_bytes(ID_BYTES, "big")))
            out.append(key)
        return b"".join(out)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read `to_bytes`.

        Raises:
            SpansInvalidError: these bytes are none of it.
        """
        spans, at = cls(), 0
        starts, roots = list[str](), list[SetRoot]()
        while at < len(data):
            if len(data) - at < _SPAN.size:
                raise SpansInvalidError("the span sums are cut short")
            length, count, total = _SPAN.unpack_from(data, at)
            at += _SPAN.size + length
            if at > len(data):
                raise SpansInvalidError("the span sums are cut short")
            try:
                starts.append(data[at - length : at].decode())
            except UnicodeDecodeError as error:
                raise SpansInvalidError("a span does not begin with a key") from error
            roots.append(SetRoot(count, int.from_bytes(total, "big")))
        if starts[:1] != [""] or any(a >= b for a, b in pairwise(starts)):
            raise SpansInvalidError("the spans do not ascend from the first key")
        spans._starts, spans._roots = starts, roots
        return spans

    def _start(self, at: int) -> str | None:
        return self._starts[at] if at < len(self._starts) else None


def parts_of(key_range: KeyRange, bounds: list[str]) -> list[KeyRange]:
    """The parts of a range between ascending keys inside it."""
    edges = [key_range.start, *bounds]
    return [
        KeyRange(start, end) for start, end in zip(edges, [*bounds, key_range.end], strict=True)
    ]

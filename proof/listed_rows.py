"""Listed objects as rows of an index: the same bytes as `proof.rows` gives for items
that a refresh made of the same objects.

The compiled kernels (proof.row_kernels, the extra `fast`) need no Python object for
each. Without them rows are encoded one by one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pyarrow as pa

from proof.columns import ByteColumn, NameColumns
from proof.index import Stamp, StampedItem
from proof.item import HASHES_BYTES, ID_BYTES, EvidenceLevel, HashAlgorithm, Profile
from proof.item_columns import HAS_CONTENT, ColumnHasher, ItemColumns
from proof.listing import byte_column
from proof.rows import encode_row, from_hex
from proof.symbols import Ids, ids_to_bytes, kernels_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MD5_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class EncodedItems:
    """Items of an index in the order of their keys. `levels` counts them by evidence,
    LISTED first.
    """

    keys: ByteColumn
    ids: Ids
    rows: ByteColumn
    levels: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ListedItemRules:
    """How items are made of listed objects. `etags_prove`: the store was seen to give
    the MD5 as the ETag of what was written at once.

    Items cover no properties, because no listing has them.
    """

    profile: Profile
    etags_prove: bool

    def __post_init__(self) -> None:
        assert not self.profile.properties

    @property
    def takes_md5(self) -> bool:
        """Whether ETags give the content of items."""
        return self.etags_prove and self.profile.algorithm is HashAlgorithm.MD5


class _RowKernels(Protocol):
    """The interface of the module proof.row_kernels, which documents it."""

    def md5_contents(
        self,
        etags: "NDArray[np.uint8]",
        ends: "NDArray[np.int64]",
        is_wanted: "NDArray[np.bool_]",
    ) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]", "NDArray[np.bool_]"]:
        """The MD5s that some ETags are, and which."""

    def listed_rows(
        self, *columns: "NDArray[Any]"
    ) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]"]:
        """Rows with their checksums."""


def encode_listed(listed: pa.Table, rules: ListedItemRules) -> EncodedItems:
    """The items of objects in columns of LISTED_SCHEMA, in the same order."""
    keys, etags = byte_column(listed["key"]), byte_column(listed["etag"])
    versions = byte_column(listed["version"])
    kernels = _kernels_for(len(keys))
    is_wanted = listed["etag_is_md5"].to_numpy() & rules.takes_md5
    contents, has_content = _md5_contents(kernels, etags, is_wanted)
    none = ByteColumn(np.empty(0, np.uint8), np.zeros(len(keys), np.int64))
    recorded, plain = EvidenceLevel.RECORDED | HAS_CONTENT, EvidenceLevel.LISTED
    flags = np.where(has_content, np.uint8(recorded), np.uint8(plain))
    sizes = listed["size_bytes"].to_numpy().astype(np.uint64)
    zeros = np.zeros(len(keys), np.uint64)
    items = ItemColumns(NameColumns(keys, none), flags, sizes, contents, none, zeros)
    ids = ColumnHasher(rules.profile).ids(items)
    modified = listed["modified_ms"].to_numpy().astype(np.uint64)
    if kernels is not None:
        columns = (one for column in (etags, versions, contents) for one in _parts(column))
        rows = ByteColumn(*kernels.listed_rows(*_parts(keys), ids, sizes, modified, *columns))
    else:
        stamps = zip(versions.texts(), etags.texts(), modified.tolist(), strict=True)
        rows = ByteColumn.of(list(_encoded(items, ids, stamps)))
    count = int(has_content.sum())
    return EncodedItems(keys, ids, rows, (len(keys) - count, count, 0))


def _md5_contents(
    kernels: _RowKernels | None, etags: ByteColumn, is_wanted: "NDArray[np.bool_]"
) -> tuple[ByteColumn, "NDArray[np.bool_]"]:
    """The MD5s that wanted ETags are, nothing for others, and which these are."""
    if kernels is not None:
        data, ends, is_md5 = kernels.md5_contents(*_parts(etags), is_wanted)
        return ByteColumn(data, ends), is_md5
    places = np.flatnonzero(is_wanted & (etags.lengths == 2 * _MD5_BYTES))
    contents, is_md5 = [b""] * len(etags), np.zeros(len(etags), np.bool_)
    for at, etag in zip(places.tolist(), etags.taken(places).texts(), strict=True):
        contents[at] = from_hex(etag.decode()) or b""
        is_md5[at] = len(contents[at]) > 0
    return ByteColumn.of(contents), is_md5


def _encoded(
    items: ItemColumns, ids: Ids, stamps: Iterable[tuple[bytes, bytes, int]]
) -> Iterator[bytes]:
    """The rows of items, one by one; stamps are versions, ETags and modified times."""
    data = ids_to_bytes(ids)
    for number, (facts, stamp) in enumerate(zip(items, stamps, strict=True)):
        version, etag, modified_ms = stamp
        stored = Stamp(version.decode(), etag.decode(), modified_ms)
        start = number * ID_BYTES
        hashes = data[start : start + HASHES_BYTES]
        yield encode_row(hashes, StampedItem(facts.item, facts.evidence, stored))


def _parts(column: ByteColumn) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]"]:
    return column.data, column.ends


def _kernels_for(items: int) -> _RowKernels | None:
    """The kernels for so many items, under the terms of `proof.symbols.kernels_for`."""
    return _load() if kernels_for(items) is not None else None


@cache
def _load() -> _RowKernels | None:
    try:
        from proof import row_kernels as loaded
    except ImportError:
        return None
    return cast(_RowKernels, loaded)

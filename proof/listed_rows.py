"""Listed objects as rows of an index: the same bytes as `proof.rows` gives for items
that a refresh made of the same objects.

Rows are made by compiled kernels (proof.row_kernels, the extra `fast`), or else as
arrays (proof.row_arrays), without a Python object for each.
"""

from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pyarrow as pa

from proof import row_arrays
from proof.columns import ByteColumn, NameColumns
from proof.item import EvidenceLevel, HashAlgorithm, Profile
from proof.item_columns import HAS_CONTENT, ColumnHasher, ItemColumns
from proof.listing import byte_column
from proof.symbols import Ids, kernels_for

if TYPE_CHECKING:
    from numpy.typing import NDArray


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


class _RowEncoder(Protocol):
    """The interface of proof.row_kernels and proof.row_arrays, which document it."""

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
    encoder = _encoder_for(len(keys))
    is_wanted = listed["etag_is_md5"].to_numpy() & rules.takes_md5
    digests, digest_ends, has_content = encoder.md5_contents(etags.data, etags.ends, is_wanted)
    contents = ByteColumn(digests, digest_ends)
    none = ByteColumn(np.empty(0, np.uint8), np.zeros(len(keys), np.int64))
    recorded, plain = EvidenceLevel.RECORDED | HAS_CONTENT, EvidenceLevel.LISTED
    flags = np.where(has_content, np.uint8(recorded), np.uint8(plain))
    sizes = listed["size_bytes"].to_numpy().astype(np.uint64)
    zeros = np.zeros(len(keys), np.uint64)
    items = ItemColumns(NameColumns(keys, none), flags, sizes, contents, none, zeros)
    ids = ColumnHasher(rules.profile).ids(items)
    modified = listed["modified_ms"].to_numpy().astype(np.uint64)
    columns = ((one.data, one.ends) for one in (etags, versions, contents))
    parts = (keys.data, keys.ends, ids, sizes, modified, *chain.from_iterable(columns))
    rows = ByteColumn(*encoder.listed_rows(*parts))
    count = int(has_content.sum())
    return EncodedItems(keys, ids, rows, (len(keys) - count, count, 0))


def _encoder_for(items: int) -> _RowEncoder:
    """The kernels for so many items, under the terms of `proof.symbols.kernels_for`, or
    what does the same as arrays.
    """
    kernels = _kernels() if kernels_for(items) is not None else None
    return kernels or cast(_RowEncoder, row_arrays)


@cache
def _kernels() -> _RowEncoder | None:
    try:
        from proof import row_kernels as loaded
    except ImportError:
        return None
    return cast(_RowEncoder, loaded)

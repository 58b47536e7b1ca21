"""Faults that scans found in one replica, beside the differences between replicas.

A scan names a fault in Ozone's words, a comparison in ours. Both are often one fault:
the chunk that `CORRUPT_CHUNK` names is the one that the difference `corrupt_chunk` says
is to be repaired. Such a fault is listed once, as the difference, because that has the
replicas to repair from. What the scan saw becomes part of its detail.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType

import pyarrow as pa
import pyarrow.compute as pc

from merkle.comparison import DifferenceKind
from ozone.scan import FindingType
from sweep.exact import Row
from sweep.model import FINDING_SCHEMA

# A container ID and the kind of a finding.
Place = tuple[int, str]

_BlockKey = tuple[int, int]
_OffsetKey = tuple[int, int, int | None]

_ABSENT = (DifferenceKind.MISSING_CHUNK.value, DifferenceKind.MISSING_BLOCK.value)

# The differences by which a comparison shows a fault of a scan.
_SHOWN_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        FindingType.CORRUPT_CHUNK.value: (DifferenceKind.CORRUPT_CHUNK.value,),
        FindingType.INCONSISTENT_CHUNK_LENGTH.value: (DifferenceKind.CORRUPT_CHUNK.value,),
        FindingType.MISSING_CHUNK.value: _ABSENT,
        FindingType.MISSING_DATA_FILE.value: _ABSENT,
    }
)

# A block may lack thousands of chunks, each with a fault; its difference shows these.
_FAULTS_SHOWN_MAX = 4


def fault_row(
    replica: tuple[str, str],
    kind: str,
    detail: str,
    *,
    container_id: int | None,
    block_id: int | None,
    offset: int | None,
) -> Row:
    """The row of FINDING_SCHEMA for a fault of a `replica`, (datanode, volume)."""
    return {
        "kind": kind,
        "container_id": container_id,
        "block_id": block_id,
        "chunk_offset": offset,
        "lacking": [],
        "sources": [],
        "detail": f"{'/'.join(replica)}: {detail}",
    }


def list_once(findings: pa.Table) -> pa.Table:
    """The findings (FINDING_SCHEMA) of whole containers, in any order, without the
    faults that differences show too.

    A fault is shown by a difference of its replica in its block, at its offset if both
    have one. A fault that no difference shows stays: nothing else tells of it.
    """
    is_fault = pc.is_in(findings["kind"], value_set=pa.array(_SHOWN_BY))
    faults = findings.filter(is_fault)
    if not faults.num_rows:
        return findings
    kinds = pa.array(sorted({kind for shown_by in _SHOWN_BY.values() for kind in shown_by}))
    may_show = pc.and_(
        pc.is_in(findings["kind"], value_set=kinds),
        pc.is_in(findings["container_id"], value_set=faults["container_id"]),
    )
    differences = findings.filter(may_show).sort_by("chunk_offset").to_pylist()
    shown = [_Shown(row) for row in differences]
    by_block, by_offset = dict[_BlockKey, list[_Shown]](), dict[_OffsetKey, list[_Shown]]()
    for one in shown:
        block = one.difference["container_id"], one.difference["block_id"]
        by_block.setdefault(block, []).append(one)
        by_offset.setdefault((*block, one.difference["chunk_offset"]), []).append(one)
    left = list[Row]()
    for fault in faults.sort_by(
        [("chunk_offset", "ascending"), ("detail", "ascending")]
    ).to_pylist():
        block, offset = (fault["container_id"], fault["block_id"]), fault["chunk_offset"]
        here = by_block.get(block, [])
        if offset is not None:
            here = [*by_offset.get((*block, offset), ()), *by_offset.get((*block, None), ())]
        found = next((one for one in here if _is_shown(fault, one.difference)), None)
        if found is None:
            left.append(fault)
        else:
            found.faults.append(f"{fault['kind']} on {fault['detail']}")
    left += [one.row for one in shown]
    untouched = findings.filter(pc.invert(pc.or_(is_fault, may_show)))
    return pa.concat_tables([untouched, pa.Table.from_pylist(left, FINDING_SCHEMA)])


def one_name(places: Iterable[Place], known: AbstractSet[Place]) -> set[Place]:
    """The places, each fault of a scan under the kind of the difference in `known` that
    shows it.

    A sweep lists a fault in Ozone's words when it could not compare its container, and
    so did earlier releases beside the difference.
    """
    return {
        next(
            (
                (container_id, shown)
                for shown in _SHOWN_BY.get(kind, ())
                if (container_id, shown) in known
            ),
            (container_id, kind),
        )
        for container_id, kind in places
    }


@dataclass(frozen=True, slots=True)
class _Shown:
    """A difference, and texts on the faults that it shows."""

    difference: Row
    faults: list[str] = field(default_factory=list)

    @property
    def row(self) -> Row:
        """The row of FINDING_SCHEMA for both."""
        more = len(self.faults) - _FAULTS_SHOWN_MAX
        texts = [self.difference["detail"], *self.faults[:_FAULTS_SHOWN_MAX]]
        texts += [f"and {more} more faults"] if more > 0 else []
        return self.difference | {"detail": "; ".join(filter(None, texts))}


def _is_shown(fault: Row, difference: Row) -> bool:
    # A datanode with two replicas is named with its volume.
    return difference["kind"] in _SHOWN_BY[fault["kind"]] and any(
        fault["detail"].startswith((f"{name}/", f"{name}: ")) for name in difference["lacking"]
    )

"""Findings whose replicas a later sweep does not have.

Damage of a replica that was removed is not healed: it went with the replica. And where
all replicas with the correct data were removed, those that are left may be equal
because all of them lack it.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sweep.faults import Place, one_name
from sweep.model import FINDING_SCHEMA
from sweep.output import SweepTable
from sweep.pieces import Range
from sweep.reader import RangeReader


@dataclass(frozen=True, slots=True)
class GoneReplicas:
    """Findings whose damaged replicas (`lacking`), or all of whose good ones
    (`sources`), are no longer there, each with the reason.
    """

    lacking: Mapping[Place, str] = field(default_factory=dict)
    sources: Mapping[Place, str] = field(default_factory=dict)


def gone_replicas(
    before: RangeReader, after: RangeReader, wanted: Range, places: AbstractSet[Place]
) -> GoneReplicas:
    """Which of these findings of the earlier sweep have replicas that the later one
    lacks.

    Raises:
        DiskError: a table cannot be read.
    """
    if not places:
        return GoneReplicas()
    ids = pa.array(sorted({container_id for container_id, _ in places}), pa.int64())
    earlier, later = _holders(before, wanted, ids), _holders(after, wanted, ids)
    lacking, sources = dict[Place, set[str]](), dict[Place, set[str]]()
    for piece in before.pieces(SweepTable.FINDINGS, _COLUMNS, wanted):
        findings = piece.filter(pc.is_in(piece["container_id"], value_set=ids)).combine_chunks()
        absent = _absent(_names(findings, "lacking"), later)
        _add(lacking, places, absent)
        _add(lacking, places, _absent(_named_by_detail(findings, earlier), later))
        names = _names(findings, "sources")
        absent = _absent(names, later)
        # A finding with a source that is still there can have been healed from it.
        left = pc.is_in(absent["finding"], value_set=_kept(names, later))
        _add(sources, places, absent.filter(pc.invert(left)))
    return GoneReplicas(
        {place: _reason("the damaged replica", names) for place, names in lacking.items()},
        {
            place: _reason("nothing shows that it was repaired: the correct data", names)
            for place, names in sources.items()
        },
    )


_COLUMNS = ["container_id", "kind", "lacking", "sources", "detail"]

# Replicas that a reason names.
_NAMED_MAX = 3


def _reason(what: str, names: AbstractSet[str]) -> str:
    more = len(names) - _NAMED_MAX
    named = ", ".join(sorted(names)[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
    return f"{what} of {named} is not in the sweep"


def _keys(container_ids: pa.Array, names: pa.Array) -> pa.Array:
    return pc.binary_join_element_wise(container_ids.cast(pa.string()), names, " ")


def _holders(tables: RangeReader, wanted: Range, ids: pa.Array) -> pa.Array:
    """The keys of the replicas of these containers: by datanode, and by DATANODE/VOLUME
    as findings name them where a datanode has two.
    """
    columns, keys = ["container_id", "datanode", "volume"], [pa.array([], pa.string())]
    for piece in tables.pieces(SweepTable.ROOTS, columns, wanted):
        rows = piece.filter(pc.is_in(piece["container_id"], value_set=ids)).combine_chunks()
        container_ids, datanodes, volumes = (_array(rows, name) for name in columns)
        keys.append(_keys(container_ids, datanodes))
        keys.append(_keys(container_ids, pc.binary_join_element_wise(datanodes, volumes, "/")))
    return pa.concat_arrays(keys).unique()


def _array(table: pa.Table, name: str) -> pa.Array:
    column = table[name].cast(_TYPES.get(name, pa.string()))
    return pa.concat_arrays([pa.array([], column.type), *column.chunks])


_TYPES = {name: FINDING_SCHEMA.field(name).type for name in _COLUMNS} | {"finding": pa.int64()}


def _names(findings: pa.Table, column: str) -> pa.Table:
    """The replicas in a column of lists: rows with the number of the `finding`, its
    container_id and kind, and the name.
    """
    lists = _array(findings, column)
    return _named(findings, pc.list_parent_indices(lists), pc.list_flatten(lists))


def _named_by_detail(findings: pa.Table, earlier: pa.Array) -> pa.Table:
    """Like `_names`, of findings that name their replica in `detail` only, as
    DATANODE/VOLUME with a colon.
    """
    details = _array(findings, "detail")
    names = pc.replace_substring_regex(details, r"(?s)[/:].*", "")
    is_known = pc.is_in(_keys(_array(findings, "container_id"), names), value_set=earlier)
    is_unnamed = pc.equal(pc.list_value_length(_array(findings, "lacking")), 0)
    rows = np.flatnonzero(pc.and_(is_known, is_unnamed).to_numpy(zero_copy_only=False))
    return _named(findings, pa.array(rows, pa.int64()), names.take(pa.array(rows, pa.int64())))


def _named(findings: pa.Table, numbers: pa.Array, names: pa.Array) -> pa.Table:
    columns = {
        "finding": numbers.cast(pa.int64()),
        "container_id": _array(findings, "container_id").take(numbers),
        "kind": _array(findings, "kind").take(numbers),
        "name": names.cast(pa.string()),
    }
    return pa.table(columns)


def _is_there(names: pa.Table, later: pa.Array) -> pa.Array:
    keys = _keys(_array(names, "container_id"), _array(names, "name"))
    return pc.is_in(keys, value_set=later)


def _absent(names: pa.Table, later: pa.Array) -> pa.Table:
    return names.filter(pc.invert(_is_there(names, later)))


def _kept(names: pa.Table, later: pa.Array) -> pa.Array:
    """The numbers of the findings with a replica that is still there."""
    return _array(names.filter(_is_there(names, later)), "finding").unique()


def _add(found: dict[Place, set[str]], places: AbstractSet[Place], absent: pa.Table) -> None:
    """Add the names of absent replicas to those of `places`."""
    columns = ["container_id", "kind", "name"]
    for row in absent.select(columns).group_by(columns).aggregate([]).to_pylist():
        (place,) = one_name([(row["container_id"], row["kind"])], places)
        if place in places:
            found.setdefault(place, set()).add(row["name"])

"""Containers whose rows do not fit into memory together: worked on in ranges of blocks,
whose results are put together.

Everything that is said of a container is said of its blocks one by one, but for its
sums: and these add up, since the root over two ranges of blocks follows from the roots
of each (sweep.gf2). The rows of a range are small enough.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.schema import CHUNK_SCHEMA, REPLICA_COLUMNS
from merkle.outcome import DIVERGED_VERDICTS, Verdict, worst_verdict
from sweep.compare import compare_replicas, inspect
from sweep.exact import EMPTY_ROW, exact_replicas
from sweep.gf2 import append_zero_words
from sweep.layout import Int64s
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, VERDICT_SCHEMA, FindingKind, RootMethod
from sweep.runs import AGREED, KEY

_SAMPLES = 1 << 16
_ADDED = ("blocks", "deleted_blocks", "chunks", "bytes", "corrupt", "unverifiable")
_CONTRADICTED = "its rows contradict each other"
_CHANGED = "the rows are not those that the root was computed of"

Row = dict[str, object]

# Others' rows may lack a value.
_NULLABLE = pa.schema([field.with_nullable(True) for field in CHUNK_SCHEMA])


def block_ranges(rows: pa.Table, rows_max: int) -> Iterator[pa.Table]:
    """The rows of one container, in ranges of blocks that ascend, of about so many rows
    each.
    """
    # A row without a block ID is faulty in whichever range it is.
    batches = [
        (batch, batch["block_id"].fill_null(0).to_numpy())
        for batch in rows.to_batches()
        if batch.num_rows
    ]
    step = max(1, rows.num_rows // _SAMPLES)
    sample = np.sort(np.concatenate([ids[::step] for _, ids in batches]))
    count = -(-rows.num_rows // rows_max)
    edges = np.unique(sample[np.arange(1, count) * len(sample) // count]).tolist()
    spans = [(int(ids.min()), int(ids.max())) for _, ids in batches]
    for low, high in zip([None, *edges], [*edges, None], strict=True):
        found = []
        for (batch, ids), (least, greatest) in zip(batches, spans, strict=True):
            if (low is None or greatest >= low) and (high is None or least < high):
                inside = np.ones(len(ids), np.bool_)
                if low is not None:
                    inside &= ids >= low
                if high is not None:
                    inside &= ids < high
                found.append(batch.filter(pa.array(inside)))
        yield pa.Table.from_batches(found, rows.schema).unify_dictionaries()


def large_replicas(ranges: Iterable[pa.Table]) -> tuple[pa.Table, pa.Table]:
    """The same as `exact_replicas` of the rows of all these ranges of one container
    together.
    """
    pieces: dict[tuple[object, ...], list[Row]] = {}
    findings = list[pa.Table]()
    for rows in ranges:
        replicas, found = exact_replicas(rows)
        findings.append(found)
        for piece in _listed(replicas):
            pieces.setdefault(_key(piece), []).append(piece)
    joined = [_joined(pieces[key]) for key in sorted(pieces, key=str)]
    broken = [
        _finding(row, f"{row['datanode']}/{row['volume']}: {_CONTRADICTED}")
        for row, key in zip(joined, sorted(pieces, key=str), strict=True)
        # A range that is contradictory in itself is a finding already.
        if row["root"] is None and all(piece["root"] is not None for piece in pieces[key])
    ]
    return pa.Table.from_pylist(joined, REPLICA_SCHEMA), pa.concat_tables(
        [*findings, pa.Table.from_pylist(broken, FINDING_SCHEMA)]
    )


def inspect_large(ranges: Iterable[pa.Table], replicas: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The same as `inspect` of the rows of all these ranges of one container, whose
    replicas these are.
    """
    whole = _listed(replicas)
    verdicts, findings, pieces = (
        list[Row](),
        list[pa.Table](),
        dict[tuple[object, ...], list[Row]](),
    )
    for rows in ranges:
        here = {_key(piece): piece for piece in _listed(exact_replicas(rows)[0])}
        for key, piece in here.items():
            pieces.setdefault(key, []).append(piece)
        ours = pa.Table.from_pylist([_within(replica, here) for replica in whole], REPLICA_SCHEMA)
        compared = compare_replicas(ours)
        # A replica that has no block here is an empty one here, not one that is not
        # there.
        empty = [
            EMPTY_ROW | {name: replica[name] for name in REPLICA_COLUMNS}
            for replica in whole
            if _key(replica) not in here
        ]
        inspected = inspect(
            pa.concat_tables([rows.cast(_NULLABLE), pa.Table.from_pylist(empty, _NULLABLE)]), ours
        )
        verdicts += [*compared.verdicts.to_pylist(), *inspected.verdicts.to_pylist()]
        findings.append(inspected.findings)
    changed = [
        f"{replica['datanode']}/{replica['volume']}"
        for replica in whole
        if replica["root"] is not None and _root(pieces.get(_key(replica), ())) != replica["root"]
    ]
    if changed:
        verdict, detail = Verdict.UNKNOWN, _CHANGED
        findings = [
            pa.Table.from_pylist(
                [_finding(whole[0], f"{name}: {_CHANGED}") for name in changed], FINDING_SCHEMA
            )
        ]
    else:
        verdict = _verdict([Verdict(one["verdict"]) for one in verdicts], findings)
        detail = "; ".join(dict.fromkeys(str(one["detail"]) for one in verdicts if one["detail"]))
    row = verdicts[0] | {
        "verdict": verdict.value,
        "diverged": verdict in DIVERGED_VERDICTS,
        "detail": detail,
    }
    return pa.Table.from_pylist([row], VERDICT_SCHEMA), pa.concat_tables(findings)


def _listed(replicas: pa.Table) -> list[Row]:
    """Replicas as rows; times stay numbers, as Python has none beyond the year 9999."""
    at = replicas.schema.get_field_index("scanned_at")
    rows: list[Row] = replicas.set_column(
        at, "scanned_at", replicas["scanned_at"].cast(pa.int64())
    ).to_pylist()
    return rows


def _key(replica: Row) -> tuple[object, ...]:
    return tuple(replica[name] for name in KEY)


def _joined(pieces: Sequence[Row]) -> Row:
    """One replica, of what its ranges come to."""
    if len(pieces) == 1:
        return pieces[0]
    agreed = all(piece[name] == pieces[0][name] for piece in pieces for name in AGREED)
    has_blocks = all(piece["blocks"] for piece in pieces)
    joined = pieces[0] | {"path": RootMethod.EXACT.value}
    if not agreed or not has_blocks or any(piece["root"] is None for piece in pieces):
        return (
            joined | {"root": None, "source": "none", "fingerprint": 0} | dict.fromkeys(_ADDED, 0)
        )
    joined["root"] = _root(pieces)
    joined["fingerprint"] = int(
        np.bitwise_xor.reduce([_int(piece["fingerprint"]) for piece in pieces])
    )
    joined |= {name: sum(_int(piece[name]) for piece in pieces) for name in _ADDED}
    times = [_int(piece["scanned_at"]) for piece in pieces if piece["scanned_at"] is not None]
    joined["scanned_at"] = max(times, default=None)
    return joined


def _root(pieces: Sequence[Row]) -> int | None:
    root = np.zeros(1, np.int64)
    for piece in pieces:
        if piece["root"] is None:
            return None
        words: Int64s = np.array([piece["blocks"]], np.int64)
        root = append_zero_words(root, words) ^ np.array([piece["root"]], np.int64)
    return int(root[0])


def _within(replica: Row, here: dict[tuple[object, ...], Row]) -> Row:
    """What a replica is in one range of blocks."""
    piece = here.get(_key(replica))
    if piece is None or replica["root"] is None:
        piece = (
            replica
            | {"root": None if replica["root"] is None else 0, "fingerprint": 0}
            | dict.fromkeys(_ADDED, 0)
        )
    return (
        replica
        | {name: piece[name] for name in ("root", "fingerprint", *_ADDED)}
        | {"path": RootMethod.EXACT.value}
    )


def _verdict(verdicts: Sequence[Verdict], findings: Sequence[pa.Table]) -> Verdict:
    """The worst of all ranges."""
    known = (verdict for verdict in verdicts if verdict is not Verdict.UNKNOWN)
    worst = worst_verdict(known) or Verdict.UNKNOWN
    lost = any(
        pc.any(pc.equal(pc.list_value_length(found["sources"]), 0)).as_py()
        for verdict, found in zip(verdicts, findings, strict=True)
        if verdict is Verdict.UNKNOWN
    )
    # What one range calls lost, a replica without a tree may hold; so it stays unknown
    # of the container.
    return Verdict.UNKNOWN if lost else worst


def _finding(replica: Row, detail: str) -> Row:
    return {
        "kind": FindingKind.ROWS_CONTRADICT.value,
        "container_id": replica["container_id"],
        "lacking": [],
        "sources": [],
        "detail": detail,
    }


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value

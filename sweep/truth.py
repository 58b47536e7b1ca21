"""What a sweep compared: stored trees, block records, or the data; and how old that is.

A stored tree shows damage only after a scan has found it, and a block record is what a
client once wrote. An answer from either is not an answer about the data.
"""

from collections import Counter
from datetime import datetime

import pyarrow.compute as pc

from chunktable.schema import CHUNK_SCHEMA
from merkle.replica import TreeSource
from sweep.output import SweepStore, SweepTable

_HOW = "To compare the data: --source data for volumes, `export.source` for exports."

# What is said before anything is read.
BEFORE = {
    TreeSource.TREE: f"comparing stored trees, as of the last scans. {_HOW}",
    TreeSource.METADATA: f"comparing block records; the data are not read. {_HOW}",
    TreeSource.DATA: "comparing the data: all of them are read",
}

_UNITS = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def compared_truth(sweeps: SweepStore, sweep_id: str, at: datetime) -> str:
    """One line on what a sweep compared, by its tables `roots` and `verdicts`; ages are
    those at `at`.

    Raises:
        DiskError: a table cannot be read.
    """
    counts, never = Counter[str](), 0
    oldest, newest = list[datetime](), list[datetime]()
    for piece in sweeps.pieces(SweepTable.ROOTS, sweep_id, ["source", "scanned_at"]):
        for row in pc.value_counts(piece["source"]).to_pylist():
            counts[row["values"]] += row["counts"]
        scans = piece.filter(pc.equal(piece["source"], TreeSource.TREE.value))["scanned_at"]
        never += scans.null_count
        # Foreign tables may have times that Python has not.
        known = scans.filter(pc.less(scans.cast("int64"), _LATEST_MS))
        if len(known):
            ends = pc.min_max(known).as_py()
            oldest.append(ends["min"])
            newest.append(ends["max"])
    parts = list[str]()
    if count := counts[TreeSource.TREE.value]:
        ages = "never scanned in full"
        if oldest:
            ages = f"as of the last scans, {_ages(at, max(newest), min(oldest))} old"
            ages += f" ({never} never scanned in full)" if never else ""
        parts.append(f"the stored trees of {_replicas(count)}, {ages}")
    if count := counts[TreeSource.METADATA.value]:
        parts.append(f"the block records of {_replicas(count)}, whose data were not read")
    if count := counts[TreeSource.DATA.value]:
        parts.append(f"the data of {_replicas(count)}")
    if count := counts["none"]:
        parts.append(f"nothing of {_replicas(count)} without a tree")
    if not parts:
        return "compared: nothing"
    excluded = sum(
        pc.sum(piece["excluded"]).as_py() or 0
        for piece in sweeps.pieces(SweepTable.VERDICTS, sweep_id, ["excluded"])
    )
    if excluded:
        parts.append(f"not compared, because excluded by design: {excluded} of these")
    is_data = counts.keys() <= {TreeSource.DATA.value}
    return f"compared: {'; '.join(parts)}{'' if is_data else '. ' + _HOW}"


# The year 9999 ends before this, in ms since the epoch.
_LATEST_MS = 253_402_300_799_000
assert CHUNK_SCHEMA.field("scanned_at").type.unit == "ms"


def _replicas(count: int) -> str:
    return f"{count} replica{'' if count == 1 else 's'}"


def _ages(at: datetime, newest: datetime, oldest: datetime) -> str:
    ages = dict.fromkeys((_age(at, newest), _age(at, oldest)))
    return " to ".join(ages)


def _age(at: datetime, then: datetime) -> str:
    seconds = max(0.0, (at - then).total_seconds())
    size, unit = next((one for one in _UNITS if seconds >= 2 * one[0]), _UNITS[-1])
    return f"{seconds / size:.0f} {unit}"

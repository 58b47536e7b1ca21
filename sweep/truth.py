"""What a sweep read: stored trees, block records, or the data; how old that is, and how
much of it was compared.

A stored tree shows damage only after a scan has found it, and a block record is what a
client once wrote. An answer from either is not an answer about the data.
"""

from collections import Counter
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from chunktable.schema import CHUNK_SCHEMA
from merkle.outcome import Verdict
from merkle.replica import TreeSource
from sweep.exact import Row
from sweep.model import NotCompared
from sweep.output import SweepStore, SweepTable

_HOW = "To compare the data: --source data for volumes, `export.source` for exports."

# What is said before anything is read.
BEFORE = {
    TreeSource.TREE: f"comparing stored trees, as of the last scans. {_HOW}",
    TreeSource.METADATA: f"comparing block records; the data are not read. {_HOW}",
    TreeSource.DATA: "comparing the data: all of them are read",
}

# Reasons named of replicas in UNKNOWN containers.
_REASONS_MAX = 3

_UNITS = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def compared_truth(sweeps: SweepStore, sweep_id: str, at: datetime) -> str:
    """One line on what a sweep read, how much of it was compared, and why the rest was
    not, by its tables `roots` and `verdicts`; ages are those at `at`.

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
    parts += _compared(sweeps, sweep_id)
    is_data = counts.keys() <= {TreeSource.DATA.value}
    return f"read: {'; '.join(parts)}{'' if is_data else '. ' + _HOW}"


def _compared(sweeps: SweepStore, sweep_id: str) -> list[str]:
    """How many of the replicas that were read were compared, and why the others were
    not.
    """
    excluded, by_verdict, reasons = 0, Counter[str](), Counter[str]()
    columns = ["verdict", "replicas", "excluded", "detail"]
    for piece in sweeps.pieces(SweepTable.VERDICTS, sweep_id, columns):
        excluded += pc.sum(piece["excluded"]).as_py() or 0
        taking_part = pc.subtract(piece["replicas"], piece["excluded"])
        piece = piece.append_column("taking_part", taking_part)
        for row in _sums(piece, "verdict"):
            by_verdict[row["verdict"]] += row["taking_part_sum"]
        is_unknown = pc.equal(piece["verdict"], Verdict.UNKNOWN.value)
        for row in _sums(piece.filter(is_unknown), "detail"):
            reasons[row["detail"]] += row["taking_part_sum"]
    unseen = by_verdict.pop(NotCompared.UNSEEN.value, 0)
    unknown = by_verdict.pop(Verdict.UNKNOWN.value, 0)
    texts = [f"compared: {by_verdict.total()} of them"]
    if excluded:
        texts.append(f"excluded by design: {excluded}")
    if unseen:
        texts.append(f"in containers with an unread replica: {unseen}")
    if unknown:
        named = [(text, count) for text, count in reasons.most_common(_REASONS_MAX) if count]
        told = [f"{count}: {text}" for text, count in named]
        if more := unknown - sum(count for _, count in named):
            told.append(f"{more}: other reasons")
        texts.append(f"in UNKNOWN containers: {unknown} ({', '.join(told)})")
    return texts


def _sums(verdicts: pa.Table, name: str) -> list[Row]:
    """The number of replicas that take part, by the values of a column."""
    rows: list[Row] = verdicts.group_by(name).aggregate([("taking_part", "sum")]).to_pylist()
    return rows


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

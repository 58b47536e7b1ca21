"""Run a stage of a sweep for all containers, or finish it: what is finished is in the
work folder.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from sweep.engine import Engine, Places
from sweep.fragments import Int64s
from sweep.model import REQUEST_SCHEMA
from sweep.output import JsonObject, SweepTableWriter
from sweep.pieces import Range, StoredTable, ranges
from sweep.stages import ContainerStage, requested_rows
from sweep.totals import SweepTotals
from sweep.work import SweepStage, counts_of, numbers_of

_ID_SCHEMA = pa.schema([REQUEST_SCHEMA.field("container_id")])


def run_by_range(
    engine: Engine,
    stage: SweepStage,
    work: ContainerStage,
    inputs: Mapping[str, StoredTable],
    places: Places,
    writers: Mapping[str, SweepTableWriter],
    totals: SweepTotals,
    *,
    key: str = "",
) -> None:
    """Run `work` for all containers. Its outputs that have a writer are tables of the
    sweep, and count in `totals`; the others become tables of `stage`.

    Ranges that the stage has a result of are not run again, if they were run with the
    same `key`: it stands for what may differ between two runs of one sweep.

    Raises:
        DiskError: an input cannot be read, or results cannot be stored.
    """
    wanted = ranges(inputs.values(), engine.range_rows)
    left = _unfinished_ranges(stage, key, wanted, writers, totals)
    for result in engine.by_range(work, inputs, left, places):
        rows = {table: held for table, held in result.tables.items() if held.num_rows}
        for table, writer in writers.items():
            if table in rows:
                writer.add(rows.pop(table))
            if table in result.files:
                writer.add_file(result.files[table])
        counts, diverged = result.totals.counts(), result.totals.diverged
        totals.add_counts(counts, diverged)
        note: JsonObject = {
            "key": key,
            "range": [result.range.first, result.range.last],
            "counts": counts,
            "diverged": diverged,
            # Rows that went to a writer are lost with this process.
            "durable": not result.tables,
        }
        stage.add(note, rows, {table: [file] for table, file in result.files.items()})


def _unfinished_ranges(
    stage: SweepStage,
    key: str,
    wanted: Sequence[Range],
    writers: Mapping[str, SweepTableWriter],
    totals: SweepTotals,
) -> Sequence[Range]:
    """The ranges that the stage has no result of. The files and totals of the others go
    to the writers and to `totals`.
    """
    done = dict[Range, JsonObject]()
    for note in stage.notes():
        first, last = numbers_of(note["range"])
        done[Range(first, last)] = note
    are_whole = all(note["durable"] and note["key"] == key for note in done.values())
    if not are_whole or not done.keys() <= set(wanted):
        stage.clear()
        return wanted
    for one in wanted:
        if one in done:
            files = stage.files(done[one])
            for table, writer in writers.items():
                for file in files.get(table, ()):
                    writer.add_file(file)
            totals.add_counts(counts_of(done[one]["counts"]), numbers_of(done[one]["diverged"]))
    return [one for one in wanted if one not in done]


def unfinished(requested: StoredTable, stage: SweepStage, name: str) -> tuple[Int64s, Int64s]:
    """The containers of `requested` (REQUEST_SCHEMA) that are not in the table `name`
    of the stage, ascending, and the approximate number of rows of each.
    """
    whole = pa.concat_tables([REQUEST_SCHEMA.empty_table(), *requested.tables()])
    container_ids, rows = requested_rows(whole)
    done = stage.table(name, _ID_SCHEMA).tables()
    held = [table["container_id"].unique().to_numpy() for table in done]
    left = ~np.isin(container_ids, np.concatenate([np.empty(0, np.int64), *held]))
    return container_ids[left], rows[left]

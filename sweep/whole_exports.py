"""Fold exports whose files are read whole, small ones many together.

For an export of some thousand rows it costs most to open its files, to look its
replicas up, and to make a table of the result. So the files of one task are read ahead,
opened by kernels (chunktable.whole_files), and become one table. This knows files that
have exactly what their inventory says. Any other, also a damaged one, is folded by
itself (sweep.files), which says what is wrong with it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from chunktable.errors import ChunkTableError
from chunktable.manifest import FileKind, TableFile
from chunktable.pages import PageError
from chunktable.reader import WHOLE_BYTES_MAX, read_verified
from chunktable.whole_files import WholeFile, whole_inventory
from merkle.checksum import kernels_for
from sweep.columns import has_known_values
from sweep.encoded import encoded_rows
from sweep.exports import AT_ONCE, at_once, export_folder
from sweep.files import PartFold, fold_part
from sweep.listed import ListedReplicas
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, Part
from sweep.rows import EncodedRows
from sweep.runs import RUN_SCHEMA, Stretches, join

# Takes tables by their names.
Store: TypeAlias = Callable[[Mapping[str, pa.Table]], None]

# The cost of a row for `kernels_for`, in bytes that a library checksums meanwhile.
_ROW_BYTES = 1000
# Replicas of one table, and those of a file whose tables are all held in memory.
_TABLE_REPLICAS = 1 << 15
_REPLICAS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class SmallFold:
    """How a part was folded: the number of rows read, or why it could not be."""

    rows: int
    skipped: str = ""


def fold_small_exports(parts: Sequence[Part], store: Store) -> Iterator[SmallFold]:
    """Fold these parts of exports, each to what `fold_part` returns. Runs and replicas
    go to `store`, by table, and only those of parts that could be read.
    """
    # A part that is no small file is one item: it is read and folded as such.
    is_known = kernels_for(_ROW_BYTES * sum(part.rows for part in parts)) is not None
    wanted = [item for part in parts for item in (is_known and _files(part)) or (part,)]
    read = at_once(wanted, _read, parts[0].location if parts else "", 2 * AT_ONCE)
    waiting, count = list[Stretches](), 0

    def store_waiting() -> None:
        if waiting:
            store({"replicas": Stretches.joined(waiting).replicas()})
            waiting.clear()

    for part in parts:
        content = next(read)
        found = content if isinstance(content, PartFold) else _fold(part, content, next(read))
        # It is read once more: only pyarrow knows it, or can say what is wrong with it.
        found = fold_part(part) if found is None else found
        if isinstance(found, PartFold):
            store({"runs": found.runs, "replicas": found.replicas})
            yield SmallFold(found.rows, found.skipped)
            continue
        waiting.append(found)
        count += len(found.counts)
        if count >= _TABLE_REPLICAS:
            store_waiting()
            count = 0
        yield SmallFold(part.rows)
    store_waiting()


def fold_export(part: Part, store: Store | None = None) -> PartFold:
    """Like `fold_part`. A file that is read whole is opened by kernels, which leave the
    interpreter to other threads.
    """
    found = _fold_whole(part)
    if found is None:
        return fold_part(part, store)
    if store is None:
        return found
    store({"runs": found.runs, "replicas": found.replicas})
    runs, replicas = found.runs.slice(0, 0), found.replicas.slice(0, 0)
    return PartFold(runs, replicas, found.findings, found.rows)


def _fold_whole(part: Part) -> PartFold | None:
    is_small = part.replicas <= _REPLICAS_MAX and kernels_for(_ROW_BYTES * part.rows) is not None
    files = _files(part) if is_small else None
    if files is None:
        return None
    chunks, inventory = map(_read, files)
    assert isinstance(chunks, _Content)
    found = _fold(part, chunks, inventory)
    if not isinstance(found, Stretches):
        return found
    runs, findings = RUN_SCHEMA.empty_table(), FINDING_SCHEMA.empty_table()
    return PartFold(runs, found.replicas(), findings, part.rows)


@dataclass(frozen=True, slots=True)
class _SmallFile:
    """A file of the export with this manifest."""

    manifest: str
    file: TableFile


@dataclass(frozen=True, slots=True)
class _Content:
    """A file and its bytes; None if they cannot be read or are not those written."""

    file: TableFile
    raw: bytes | None


def _files(part: Part) -> tuple[_SmallFile, _SmallFile] | None:
    """The file of chunks and the inventory of a part that is a small file; None for any
    other.
    """
    export = part.export
    if export is None or part.manifest is None:
        return None
    name = part.location.partition("?")[0].rpartition("/")[2]
    chunks = [file for file in export.of_kind(FileKind.CHUNKS) if file.name == name]
    inventories = export.of_kind(FileKind.CONTAINERS)
    if len(chunks) != 1 or len(inventories) != 1 or part.first or part.last < chunks[0].rows:
        return None
    if max(chunks[0].length_bytes, inventories[0].length_bytes) > WHOLE_BYTES_MAX:
        return None
    return _SmallFile(part.manifest, chunks[0]), _SmallFile(part.manifest, inventories[0])


def _read(item: _SmallFile | Part) -> _Content | PartFold:
    if isinstance(item, Part):
        return fold_part(item)
    filesystem, folder = export_folder(item.manifest)
    with suppress(ChunkTableError):
        return _Content(item.file, read_verified(filesystem, folder, item.file))
    return _Content(item.file, None)


def _fold(
    part: Part, chunks: _Content, inventory: _Content | PartFold
) -> Stretches | PartFold | None:
    """The replicas of a file whose live rows are those that the inventory lists, as
    stretches if it has a single row group, in which they are whole. None if its form is
    not known.
    """
    assert isinstance(inventory, _Content)
    if chunks.raw is None or inventory.raw is None:
        return None
    file = WholeFile.of(chunks.raw, chunks.file.rows)
    listing = whole_inventory(inventory.raw, inventory.file.rows)
    if file is None or listing is None:
        return None
    listed = _listed(part, chunks.file.name, listing)
    if listed is None:
        return None
    try:
        if len(file.groups) == 1:
            return _whole_replicas(listed, _rows(file, 0))
        tables = list(listed.settled(_rows(file, i) for i in range(len(file.groups))))
    except PageError:
        return None
    if listed.wrong():
        return None
    runs, whole = ([pair[i] for pair in tables] for i in (1, 0))
    return PartFold(
        join(pa.concat_tables([RUN_SCHEMA.empty_table(), *runs])),
        pa.concat_tables([REPLICA_SCHEMA.empty_table(), *whole]),
        FINDING_SCHEMA.empty_table(),
        part.rows,
    )


def _rows(file: WholeFile, group: int) -> EncodedRows:
    """The rows of a row group.

    Raises:
        PageError: its form is not known, or a value is none of ours.
    """
    columns = file.columns(group)
    if columns is None or "block_id" not in columns:
        raise PageError
    rows = encoded_rows(columns, file.groups[group])
    if not has_known_values({name: text.values for name, text in rows.text.items()}):
        raise PageError
    return rows


def _whole_replicas(listed: ListedReplicas, rows: EncodedRows) -> Stretches | None:
    """The listed replicas in these rows; None unless they are whole and in order."""
    found = Stretches.of(rows)
    places = listed.places_of(found)
    listed.count(places, found.counts)
    is_live = listed.is_live(places)
    live = found.chosen(is_live)
    is_whole = live.ordered & (live.counts == listed.rows[places[is_live]])
    return live if is_whole.all() and not listed.wrong() else None


def _listed(part: Part, name: str, inventory: pa.Table) -> ListedReplicas | None:
    """The replicas that an inventory lists in the file of this name; None if it names a
    file that its manifest does not.
    """
    assert part.export is not None
    files = inventory["file"].chunk(0)
    known = {one.name for one in part.export.of_kind(FileKind.CHUNKS) if one.rows}
    if not known.issuperset(names := files.dictionary.to_pylist()):
        return None
    if names != [name]:
        inventory = inventory.filter(pc.equal(inventory["file"], name))
    return ListedReplicas.of(inventory, part.volumes)

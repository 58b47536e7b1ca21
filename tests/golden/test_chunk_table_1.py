"""A table as version 1 wrote it: checksums are int64, packed as differences, and the
order of the rows is not declared. Two exports of one volume; the second superseded
container 7.
"""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest

from chunktable.manifest import FileKind, Manifest
from chunktable.places import LocalDestination
from chunktable.reader import latest_manifest
from chunktable.schema import CHUNK_SCHEMA
from dnagent.export import ExportLimits, export
from merkle.checksum import KERNEL_BYTES_MIN, kernels_for
from merkle.replica import TreeSource
from merkle.tree import BlockId, BlockTree, ChunkTree
from runtime.disk import Disk
from sweep.exact import exact_replicas
from sweep.files import fold_part, read_rows
from sweep.inputs import table_parts
from sweep.stages import by_replica
from tests.support.tables import MemoryWalk, blocks, current_rows, replica

DATA = Path(__file__).parent / "data" / "chunk_table_1"


def volume() -> MemoryWalk:
    """What was exported."""
    walk = MemoryWalk("DS-1")
    for number in range(1, 40):
        scanned_at_ms = 1_700_000_000_000 + number if number % 3 else None
        held = blocks(1 + number % 4, 1 + number % 3, seed=99 if number == 7 else number)
        walk.put(replica(number, *held, scanned_at_ms=scanned_at_ms, bcs_id=number))
    walk.put(replica(7, *blocks(2, 2, seed=99)), replica(41))
    walk.put(replica(42, BlockTree.tombstone(BlockId(5), 77), *blocks(3)))
    wide = [ChunkTree(0, 10, -5, True), ChunkTree(10, 4, 1 << 40, False)]
    walk.put(replica(43, BlockTree.live(BlockId(9), wide)))
    return walk


def written_anew(folder: Path) -> pa.Table:
    to = LocalDestination(folder, Disk())
    manifest = export([volume()], (), to, source=TreeSource.TREE).manifest
    return current_rows(to.filesystem, str(folder), manifest)


def manifest_of(folder: Path) -> Manifest:
    return latest_manifest(pa_fs.LocalFileSystem(), str(folder))


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_table_of_version_1_is_read_as_it_was_written(tmp_path: Path, is_fast: bool) -> None:
    if is_fast:
        kernels_for(KERNEL_BYTES_MIN)
    rows = written_anew(tmp_path / "anew")
    assert current_rows(pa_fs.LocalFileSystem(), str(DATA), manifest_of(DATA)) == rows
    folded = [fold_part(part) for part in table_parts([str(DATA)]).parts]
    assert not any(one.skipped or one.runs.num_rows for one in folded)
    replicas = by_replica(pa.concat_tables([one.replicas for one in folded]))
    assert replicas.drop_columns("path") == exact_replicas(rows)[0].drop_columns("path")
    chosen = np.array([7, 20, 43])
    parts = table_parts([str(DATA)]).parts
    found = pa.Table.from_batches(
        [batch for part in parts for batch in read_rows(part, chosen)], CHUNK_SCHEMA
    )
    wanted = rows.filter(pc.is_in(rows["container_id"], pa.array(chosen)))
    assert found.sort_by("container_id") == wanted


@pytest.mark.parametrize("small_files_max", [0, 10])
def test_an_agent_of_today_continues_a_table_of_version_1(
    tmp_path: Path, small_files_max: int
) -> None:
    folder = tmp_path / "table"
    shutil.copytree(DATA, folder)
    walk = volume()
    walk.put(replica(8, *blocks(3, seed=5)))
    to = LocalDestination(folder, Disk())
    limits = ExportLimits(group_rows=64, small_files_max=small_files_max)
    manifest = export([walk], (), to, source=TreeSource.TREE, limits=limits).manifest
    anew = LocalDestination(tmp_path / "anew", Disk())
    whole = export([walk], (), anew, source=TreeSource.TREE).manifest
    rows = current_rows(anew.filesystem, anew.folder, whole)
    assert current_rows(to.filesystem, str(folder), manifest) == rows
    files = manifest.of_kind(FileKind.CHUNKS)
    types = {pq.read_schema(folder / one.name).field("checksum").type for one in files}
    # Container 43 has checksums of more than 32 bits.
    assert types == {pa.uint32(), pa.int64()}

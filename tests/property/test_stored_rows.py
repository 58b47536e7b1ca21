"""However an agent's rows lie in row groups and pages, folding them as they are stored
gives the replicas that sorting them gives, and a second reading gives the same rows.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from chunktable.errors import ChunkTableError
from chunktable.manifest import FileKind
from chunktable.places import LocalDestination
from chunktable.reader import PieceReader, latest_manifest
from chunktable.schema import CHUNK_SCHEMA
from dnagent.export import ExportLimits, export
from merkle.checksum import KERNEL_BYTES_MIN, kernels_for
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import BlockId, BlockTree, ChunkTree
from ozone.survey import ReplicaSnapshot
from runtime.disk import Disk
from sweep.encoded import batch_of
from sweep.exact import exact_replicas
from sweep.files import fold_part, is_readable, open_rows, read_rows
from sweep.inputs import table_parts
from sweep.model import REPLICA_SCHEMA, Part
from sweep.runs import RUN_SCHEMA, join, settle
from sweep.stages import by_replica
from sweep.whole_exports import fold_export, fold_small_exports
from tests.support.tables import MemoryWalk, current_rows, replica

STATES = (ReplicaState.CLOSED, ReplicaState.UNHEALTHY, ReplicaState.OPEN)


def random_replica(rng: random.Random, number: int, *, blocks_max: int) -> ReplicaSnapshot:
    found = list[BlockTree]()
    shape = rng.choice(("full", "small", "uneven"))
    for place in range(rng.randrange(blocks_max)):
        block_id = BlockId(1000 * number + 3 * place + rng.randrange(3))
        chunks = {"full": 16, "small": 1, "uneven": rng.randrange(20)}[shape]
        wide = rng.choice((-3, 1 << 33)) if rng.random() < 0.002 else 0
        held = [
            ChunkTree(
                4096 * i,
                4096 if i + 1 < chunks else rng.randrange(1, 4097),
                wide or rng.choice((0, rng.randrange(1 << 32))),
                rng.random() > 0.01,
            )
            for i in range(chunks)
        ]
        if rng.random() < 0.1:
            found.append(BlockTree.tombstone(block_id, rng.randrange(1 << 32)))
        else:
            found.append(BlockTree.live(block_id, held))
    return replica(
        number,
        *found,
        state=rng.choice(STATES),
        bcs_id=rng.choice((0, number, 1 << 50)),
        scanned_at_ms=rng.choice((None, 1_700_000_000_000, 1_700_000_000_000 + number)),
    )


def all_rows(parts: Iterable[Part]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        with open_rows(part) as (stretches, _):
            yield from map(batch_of, stretches)


def folded_together(parts: Sequence[Part]) -> tuple[list[int], dict[str, pa.Table]]:
    """The rows of these parts that were read, and what became of them."""
    kept = {"runs": [RUN_SCHEMA.empty_table()], "replicas": [REPLICA_SCHEMA.empty_table()]}

    def store(tables: Mapping[str, pa.Table]) -> None:
        for name, table in tables.items():
            kept[name].append(table)

    rows = [one.rows for one in fold_small_exports(parts, store) if not one.skipped]
    return rows, {name: pa.concat_tables(held) for name, held in kept.items()}


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_folded_and_read_as_they_are_stored(tmp_path: Path, seed: int) -> None:
    kernels_for(KERNEL_BYTES_MIN)
    rng = random.Random(seed)
    walk = MemoryWalk("DS-1")
    group_rows = rng.choice((7, 100, 1_000, 1 << 20))
    # Thousands of row groups show no more than hundreds.
    numbers = rng.sample(range(1, 500), rng.choice((1, 5) if group_rows == 7 else (1, 20, 60)))
    blocks_max = rng.choice((3, 30))
    walk.put(*(random_replica(rng, number, blocks_max=blocks_max) for number in numbers))
    to = LocalDestination(tmp_path / "table", Disk())
    limits = ExportLimits(group_rows=group_rows, small_files_max=10)
    export([walk], (), to, source=TreeSource.TREE, limits=limits)
    walk.put(random_replica(rng, numbers[0], blocks_max=blocks_max))
    manifest = export([walk], (), to, source=TreeSource.TREE, limits=limits).manifest
    rows = current_rows(to.filesystem, to.folder, manifest)

    parts = table_parts([to.folder], rng.choice((group_rows, 1 << 22))).parts
    folded = [fold_part(part) for part in parts]
    assert [one.skipped for one in folded] == [""] * len(parts)
    settled = settle(join(pa.concat_tables([one.runs for one in folded])))
    assert not len(settled.exact)
    replicas = by_replica(pa.concat_tables([settled.replicas, *(one.replicas for one in folded)]))
    assert replicas.drop_columns("path") == exact_replicas(rows)[0].drop_columns("path")
    for part, one in zip(parts, folded, strict=True):
        whole = fold_export(part)
        assert (whole.rows, by_replica(whole.replicas)) == (one.rows, by_replica(one.replicas))
        assert join(whole.runs) == join(one.runs)
    together, tables = folded_together(parts)
    assert together == [one.rows for one in folded]
    assert by_replica(tables["replicas"]) == by_replica(
        pa.concat_tables([one.replicas for one in folded])
    )
    assert join(tables["runs"]) == join(pa.concat_tables([one.runs for one in folded]))

    for file in manifest.of_kind(FileKind.CHUNKS) if kernels_for(0) else ():
        held = [part for part in parts if part.location.endswith(file.name)]
        stored = pq.read_table(tmp_path / "table" / file.name).cast(CHUNK_SCHEMA)
        assert pa.Table.from_batches(list(all_rows(held)), CHUNK_SCHEMA) == stored

    chosen = np.array(sorted(rng.sample(numbers, min(3, len(numbers)))))
    read = [batch for part in parts for batch in read_rows(part, chosen)]
    order = [(name, "ascending") for name in ("container_id", "block_id", "chunk_offset")]
    wanted = rows.filter(pc.is_in(rows["container_id"], pa.array(chosen)))
    assert pa.Table.from_batches(read, CHUNK_SCHEMA).sort_by(order) == wanted.sort_by(order)


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_is_found_by_who_reads_that_piece(tmp_path: Path, seed: int) -> None:
    """Of a file in many parts each reads its own pieces, and the footer."""
    rng = random.Random(seed)
    walk = MemoryWalk("DS-1")
    walk.put(*(random_replica(rng, number, blocks_max=30) for number in range(1, 60)))
    to = LocalDestination(tmp_path / "table", Disk())
    limits = ExportLimits(group_rows=500)
    export([walk], (), to, source=TreeSource.TREE, limits=limits)
    files = latest_manifest(to.filesystem, to.folder).of_kind(FileKind.CHUNKS)
    file = max(files, key=lambda one: one.rows)
    assert sum(length for length, _ in file.pieces) == file.length_bytes
    path = tmp_path / "table" / file.name
    raw = path.read_bytes()
    piece = rng.randrange(len(file.pieces))
    first = sum(length for length, _ in file.pieces[:piece])
    at = first + rng.randrange(file.pieces[piece][0])
    parts = [p for p in table_parts([to.folder], 500).parts if p.location == str(path)]
    assert len(parts) > 3
    whole = [fold_part(part) for part in parts]
    ids = np.arange(1, 60)
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :])
    reader = PieceReader(to.filesystem, to.folder, file)
    reader.seek(at)
    with pytest.raises(ChunkTableError, match="does not match the checksum of its manifest"):
        reader.read(1)
    reader.close()
    folded = [fold_part(part) for part in parts]
    failed = [one.skipped for one in folded if one.skipped]
    assert failed
    assert all("does not match the checksum" in text and file.name in text for text in failed)
    for before, now in zip(whole, folded, strict=True):
        assert now.skipped or (now.runs, now.replicas) == (before.runs, before.replicas)
    assert any(not is_readable(part, ids) for part in parts)

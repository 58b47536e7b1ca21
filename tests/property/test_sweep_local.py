"""Whatever the rows are and however they lie, a sweep says of each container what
merkle.comparison says of its trees.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW
from merkle.tree import block_checksum
from sweep.output import SweepTable
from tests.support.chunk_rows import Row, compared, trees_in, verdict_text
from tests.support.sweeps import OnePartWaves, run, table_of, verdicts_of

IDS = (-(1 << 63), -7, 0, 1, 2, 3, 1 << 40, (1 << 63) - 1)
CHECKSUMS = (0, 1, 0xFFFF_FFFF, 5, -1, 1 << 62)
STATES = ("CLOSED", "CLOSED", "CLOSED", "QUASI_CLOSED", "UNHEALTHY", "OPEN", "INVALID", "DELETED")


def replica(
    rng: random.Random, container_id: int, node: str, blocks: dict[int, list[Row]]
) -> Iterator[dict[str, Any]]:
    same: dict[str, Any] = {
        "datanode": node,
        "volume": f"DS-{rng.choice('ab')}",
        "container_id": container_id,
        "state": rng.choice(STATES),
        "bcs_id": rng.randrange(3),
        "replica_index": rng.choice((0, 0, 0, 0, 1)),
        "source": rng.choice(("tree", "metadata", "data")),
        "generation": rng.randrange(9),
        "scanned_at": None,
    }
    nothing = {
        "block_id": 0,
        "chunk_offset": CONTAINER_ROW,
        "length": 0,
        "checksum": 0,
        "matches": True,
        "deleted": False,
    }
    if rng.random() < 0.05:
        yield same | {"source": "none"} | nothing
        return
    kept = {block_id: chunks for block_id, chunks in blocks.items() if rng.random() > 0.1}
    if not kept:
        yield same | nothing
    for block_id, chunks in kept.items():
        deleted = rng.random() < 0.15
        held = [dict(chunk) for chunk in chunks if rng.random() > 0.1]
        for chunk in held:
            match rng.randrange(30):
                case 0:
                    chunk["checksum"] = rng.choice(CHECKSUMS)
                case 1:
                    chunk["matches"] = False
                case 2:
                    chunk["length"] += 1
        for chunk in held:
            yield same | chunk | {"block_id": block_id, "deleted": deleted}
        if not held:
            checksum = rng.choice(CHECKSUMS) if deleted else block_checksum(block_id, [])
            own = {"chunk_offset": BLOCK_ROW, "length": 0, "checksum": checksum, "matches": True}
            yield same | own | {"block_id": block_id, "deleted": deleted}


def cluster(rng: random.Random) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for container_id in rng.sample(range(1, 1000), 25):
        blocks = {
            block_id: [
                {
                    "chunk_offset": place * 4,
                    "length": 4,
                    "checksum": rng.choice((7, 8, 9)),
                    "matches": True,
                }
                for place in sorted(rng.sample(range(5), rng.randrange(5)))
            ]
            for block_id in sorted(rng.sample(IDS, rng.randrange(1, 6)))
        }
        for number in range(rng.choice((1, 2, 3, 3, 3, 4))):
            rows += replica(rng, container_id, f"dn-{number}", blocks)
    return rows


def write(rng: random.Random, folder: Path, rows: list[dict[str, Any]]) -> None:
    """In order or not, in one file or several, with rows that are there twice."""
    folder.mkdir()
    order = ["datanode", "volume", "container_id", "block_id", "chunk_offset"]
    rows = sorted(rows, key=lambda row: [row[name] for name in order])
    match rng.randrange(4):
        case 0:
            rng.shuffle(rows)
        case 1:
            rows = [*rows, *rng.sample(rows, 20)]
        case 2:
            rows.sort(
                key=lambda row: [
                    row[name] for name in ("container_id", "block_id", "datanode", "chunk_offset")
                ]
            )
    cuts = sorted(rng.sample(range(len(rows)), rng.randrange(4)))
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(rows)], strict=True)):
        table = pa.Table.from_pylist(rows[start:end], CHUNK_SCHEMA)
        pq.write_table(
            table, folder / f"{number}.parquet", row_group_size=rng.choice((7, 50, 1000))
        )


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.long) for n in range(8, 24))]
)
def test_a_sweep_says_what_the_plan_of_a_repair_says(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows = cluster(rng)
    write(rng, tmp_path / "table", rows)
    engine = OnePartWaves(tmp_path / "spill", group_rows=rng.choice((5, 100, 10_000)))
    out = tmp_path / "out"
    sweep_id = run(out, tmp_path / "table", engine=engine).sweep_id
    verdicts, expected = verdicts_of(out, sweep_id), {}
    differences = set()
    for container_id, replicas in trees_in(rows).items():
        comparison = compared(replicas)
        expected[container_id] = verdict_text(replicas)
        for one in comparison.differences if comparison else ():
            differences.add(
                (one.kind.value, container_id, one.block_id, one.offset, one.lacking, one.sources)
            )
    assert verdicts == expected
    found = {
        (
            r["kind"],
            r["container_id"],
            r["block_id"],
            r["chunk_offset"],
            tuple(r["lacking"]),
            tuple(r["sources"]),
        )
        for r in table_of(out, SweepTable.FINDINGS, sweep_id)
    }
    assert found == differences
    roots = {
        (r["container_id"], r["datanode"], r["volume"]): r["root"]
        for r in table_of(out, SweepTable.ROOTS, sweep_id)
    }
    assert roots == {
        (container_id, *key): tree.data_checksum
        for container_id, replicas in trees_in(rows).items()
        for key, (_, tree) in replicas.items()
    }

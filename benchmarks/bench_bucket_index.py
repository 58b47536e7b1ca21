"""The index of a bucket from its inventory: `python -m benchmarks.bench_bucket_index
[--objects N] [--json]`.

The inventory is of Parquet, with a manifest, as S3 writes it: keys of 41 bytes in no
order, so that each file has keys of all ranges; one object in ten came in parts. Each
variant builds the index of it in a process of its own, from the manifest to an index
that a verifier opens. CPU is that of the whole process tree: on Spark `local[2]` of the
driver, the JVM and all workers, with their start. The peer reads the same inventory
into `StoredIndex.rebuild`, item by item; it is slow, and takes 200,000 objects at most.
Spark also builds a tenth: the difference is what one object more costs, without any
start. All checks of the index itself run outside of what is measured.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bench_sweep import NullProgress
from benchmarks.measure import Report, Samples
from benchmarks.process_tree import cpu_timer, memory_peaks
from proof.index import ItemEvidence, Stamp, StampedItem
from proof.index_build import IndexEngine, LocalIndexEngine, build_files
from proof.inventory import ListingScope, read_inventory
from proof.item import EvidenceLevel, HashAlgorithm, Item, Profile
from proof.listed_rows import ListedItemRules
from proof.root import SetRoot
from proof.stored_index import StoredIndex
from runtime.disk import Disk
from runtime.freed_memory import keep_freed_memory

OBJECTS = 1_000_000
PEER_OBJECTS_MAX = 200_000
FILE_ROWS = 1_000_000
CPU_BAR_US, DRIVER_BAR_MIB = 5.0, 512.0
RULES = ListedItemRules(Profile(b"k" * 32, HashAlgorithm.MD5, ()), etags_prove=True)
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_MANIFEST = "daily/2026-11-25T01-00Z/manifest.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=OBJECTS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--variant", choices=sorted(_VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(_VARIANTS[arguments.variant](arguments.folder)))
        return
    report = Report(f"index of {arguments.objects:,} objects from an inventory")
    with tempfile.TemporaryDirectory(prefix="treefold-bench-") as folder:
        peer_objects = min(arguments.objects, PEER_OBJECTS_MAX)
        sizes = {"whole": arguments.objects, "tenth": arguments.objects // 10, "part": peer_objects}
        for name, objects in sizes.items():
            # In a process of its own: generating takes more memory than the build.
            if (child := os.fork()) == 0:
                _write_inventory(Path(folder) / name, objects)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        peer = _run("rebuild", Path(folder) / "part")
        tenth = _run("spark", Path(folder) / "tenth")
        found = {name: _run(name, Path(folder) / "whole") for name in ("spark", "local")}
    assert found["spark"]["root"] == found["local"]["root"]
    more = (10 * found["spark"]["us"] - tenth["us"]) / 9
    theirs = _one("rebuild, item by item", peer, "us")
    for name, one in found.items():
        report.add(f"CPU an object, {name}", "us", _one("from parts", one, "us"), theirs, most=1.0)
    bar = Samples("bar", (CPU_BAR_US,))
    report.add("CPU an object, spark", "us", _one("from parts", found["spark"], "us"), bar)
    report.add("CPU of one more, spark", "us", Samples("from parts", (more,)), bar, most=1.0)
    bar = Samples("bar", (DRIVER_BAR_MIB,))
    report.add("driver", "MiB", _one("Python, USS", found["spark"], "driver"), bar, most=1.0)
    report.notes = [
        f"{name}: {one}" for name, one in (*found.items(), ("tenth", tenth), ("rebuild", peer))
    ]
    report.show(as_json=arguments.json)


def _run(variant: str, folder: Path) -> dict[str, float]:
    words = [sys.executable, "-m", "benchmarks.bench_bucket_index", "--variant", variant]
    done = subprocess.run([*words, "--folder", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _one(name: str, found: Mapping[str, float], field: str) -> Samples:
    return Samples(name, (found[field],))


def by_spark(folder: Path) -> dict[str, object]:
    """Build on Spark."""
    from spark.bucket_index import SparkIndexEngine
    from spark.session import spark_session

    def build() -> SetRoot:
        with spark_session("local[2]", settings={"spark.driver.memory": "2g"}) as session:
            return _from_parts(SparkIndexEngine(session, Disk()), folder)

    return _measured(build, folder)


def by_threads(folder: Path) -> dict[str, object]:
    """Build in two threads."""
    keep_freed_memory()
    return _measured(lambda: _from_parts(LocalIndexEngine(Disk(), threads=2), folder), folder)


def by_rebuild(folder: Path) -> dict[str, object]:
    """Build as before there were parts."""

    def build() -> SetRoot:
        inventory = read_inventory(str(folder / _MANIFEST), ListingScope())
        index = StoredIndex(folder / "index", RULES.profile, disk=Disk())
        with index.rebuild(items=PEER_OBJECTS_MAX) as building:
            for part in inventory.parts:
                for batch in part.rows():
                    building.add([_item(*row.values()) for row in batch.to_pylist()])
            root = building.finish()
        index.close()
        return root

    return _measured(build, folder)


def _item(
    key: bytes, size: int, modified_ms: int, etag: bytes, version: bytes, is_md5: bool
) -> StampedItem:
    content = bytes.fromhex(etag.decode()) if len(etag) == 32 and is_md5 else None
    level = EvidenceLevel.LISTED if content is None else EvidenceLevel.RECORDED
    stamp = Stamp(version.decode(), etag.decode(), modified_ms)
    return StampedItem(Item(key.decode(), size, content), ItemEvidence(level), stamp)


def _from_parts(engine: IndexEngine, folder: Path) -> SetRoot:
    inventory = read_inventory(str(folder / _MANIFEST), ListingScope())
    index = StoredIndex(folder / "index", RULES.profile, disk=Disk())
    built = build_files(
        engine, inventory.parts, folder / "work", RULES, disk=Disk(), progress=NullProgress()
    )
    root = index.take_files(built.files, built.sums.derived())
    Disk().remove_folder(folder / "work")
    index.close()
    return root


def _measured(build: Callable[[], SetRoot], folder: Path) -> dict[str, object]:
    with cpu_timer() as timer, memory_peaks() as peaks:
        wall = time.monotonic()
        root = build()
        cpu, wall = timer.read_s(), time.monotonic() - wall
    size = sum(path.stat().st_size for path in (folder / "index").rglob("*") if path.is_file())
    index = StoredIndex(folder / "index", RULES.profile, disk=Disk())
    if root.count <= PEER_OBJECTS_MAX:
        assert not index.self_check().damage
    index.close()
    Disk().remove_folder(folder / "index")
    return {
        "us": round(cpu / root.count * 1e6, 2),
        "wall": round(wall, 1),
        "root": f"{root.count} {root.total:032x}",
        "bytes an object": round(size / root.count, 1),
        "load": round(os.getloadavg()[0], 1),
        **{name: round(peak / 2**20) for name, peak in peaks.items()},
    }


def _write_inventory(folder: Path, objects: int) -> None:
    (folder / "daily" / "data").mkdir(parents=True)
    (folder / _MANIFEST).parent.mkdir()
    chance, entries = np.random.default_rng(objects), []
    for number, start in enumerate(range(0, objects, FILE_ROWS)):
        rows = min(FILE_ROWS, objects - start)
        path = folder / "daily" / "data" / f"{number}.parquet"
        pq.write_table(_table(chance, rows), path, compression="snappy")
        md5 = hashlib.md5(path.read_bytes()).hexdigest()
        entries.append({"key": f"daily/data/{number}.parquet", "MD5checksum": md5})
    manifest = {
        "sourceBucket": "bucket",
        "creationTimestamp": "1790000000000",
        "fileFormat": "Parquet",
        "files": entries,
    }
    body = json.dumps(manifest).encode()
    (folder / _MANIFEST).write_bytes(body)
    (folder / _MANIFEST).with_name("manifest.checksum").write_text(hashlib.md5(body).hexdigest())


def _table(chance: np.random.Generator, rows: int) -> pa.Table:
    names, digests = _digits(chance, rows, 16), _digits(chance, rows, 32)
    key = np.hstack(
        (np.tile(np.frombuffer(b"warehouse/events/2026/11/", np.uint8), (rows, 1)), names)
    )
    is_part = chance.random(rows) < 0.1
    etags = [
        text + b"-12" if parts else text
        for text, parts in zip(digests.view("S32")[:, 0].tolist(), is_part.tolist(), strict=True)
    ]
    times = 1_790_000_000_000 + chance.integers(0, 1 << 32, rows)
    return pa.table(
        {
            "bucket": pa.array(["bucket"] * rows),
            "key": pa.array(key.view(f"S{key.shape[1]}")[:, 0].tolist(), pa.binary()).cast(
                pa.string()
            ),
            "size": chance.integers(0, 1 << 24, rows),
            "last_modified_date": pa.array(times).cast(pa.timestamp("ms")),
            "e_tag": pa.array(etags, pa.binary()).cast(pa.string()),
            "is_multipart_uploaded": is_part,
            "encryption_status": pa.array(["SSE-S3"] * rows),
        }
    )


def _digits(chance: np.random.Generator, rows: int, width: int) -> npt.NDArray[np.uint8]:
    digits: npt.NDArray[np.uint8] = _HEX[chance.integers(0, 16, (rows, width), np.uint8)]
    return digits


_VARIANTS: Mapping[str, Callable[[Path], dict[str, object]]] = {
    "spark": by_spark,
    "local": by_threads,
    "rebuild": by_rebuild,
}

if __name__ == "__main__":
    main()

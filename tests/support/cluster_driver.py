"""A driver that runs one job after another on a cluster: to start one takes longer than
the jobs of a test. `python -m tests.support.cluster_driver MASTER PACK [KEY=VALUE]...`.
Each line of its input is a job, and of its output what it found.
"""

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from admin.engines import open_session
from proof.index_build import LocalIndexEngine, build_files
from proof.inventory import ListingScope, read_folder
from proof.item import HashAlgorithm, Profile
from proof.listed_rows import ListedItemRules
from replicator.listing_shards import plan_shards
from replicator.stores.opening import open_store
from runtime.disk import Disk
from runtime.progress import ProgressStyle, progress_sink
from spark.bucket_index import SparkIndexEngine
from spark.engine import SparkEngine
from sweep.engine import SweepRequest
from sweep.run import sweep
from tests.support.sweeps import Quiet

_RULES = ListedItemRules(Profile(b"s" * 32, HashAlgorithm.MD5, ()), etags_prove=True)


def sweep_table(session: SparkSession, *, table: str, out: str) -> dict[str, Any]:
    """Sweep a table; its summary."""
    request = SweepRequest(Path(out), (table,))
    return dict(sweep(request, SparkEngine(session), Quiet()).json())


def index_bucket(
    session: SparkSession, *, address: str, folder: str, shards: int
) -> dict[str, Any]:
    """List a bucket in shards and index it; counts, and whether one machine makes the
    same sums of the listing.
    """
    disk, place = Disk(), Path(folder)
    engine = SparkIndexEngine(session, disk)
    with open_store(address, may_write=False) as store:
        tasks = plan_shards(address, store.lister, place / "listing", shards, disk)
    engines = {"spark": engine, "local": LocalIndexEngine(disk)}
    with progress_sink(ProgressStyle()) as progress:
        progress.begin("list the bucket", len(tasks), "shards")
        engine.run(tasks, progress.advance)
        parts = read_folder(str(place / "listing"), ListingScope())
        sums = {
            name: build_files(one, parts, place / name, _RULES, disk=disk, progress=progress).sums
            for name, one in engines.items()
        }
    return {
        "objects": sums["spark"].count,
        "parts": len(parts),
        "is_as_local": sums["spark"].to_bytes() == sums["local"].to_bytes(),
    }


_JOBS = {job.__name__: job for job in (sweep_table, index_bucket)}


def main(master: str, pack: str, *settings: str) -> None:
    """Run jobs until the input ends."""
    with open_session(settings, master, Path(pack)) as session:
        for line in sys.stdin:
            job = json.loads(line)
            sys.stdout.write(json.dumps(_JOBS[job.pop("job")](session, **job)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

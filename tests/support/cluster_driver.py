"""A driver that runs one job after another on a cluster: to start one takes longer than
the jobs of a test. `python -m tests.support.cluster_driver MASTER PACK [KEY=VALUE]...`.
Each line of its input is a job, and of its output what it found.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from admin.engines import open_session
from proof.index_build import LocalIndexEngine, build_files
from proof.inventory import ListingScope, read_folder
from proof.item import EvidenceLevel, HashAlgorithm, Profile
from proof.listed_rows import ListedItemRules
from replicator.ledger import PairLedger
from replicator.listing_shards import plan_shards
from replicator.stores.opening import open_store
from replicator.verified_ranges import RangedVerification
from replicator.verify import READERS_MAX, VerificationTally
from runtime.disk import Disk
from runtime.progress import ProgressStyle, progress_sink
from spark.bucket_index import SparkIndexEngine
from spark.bucket_verify import SparkRangeEngine
from spark.engine import SparkEngine
from sweep.engine import SweepRequest
from sweep.run import sweep
from tests.support.bucket_sync import Known, bucket_verification, known, stated
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


def verify_bucket(session: SparkSession, *, source: str, target: str, state: str) -> dict[str, Any]:
    """Read two buckets in ranges of keys; what differs, and whether one machine says
    the same, up to the receipt.
    """
    level = EvidenceLevel.READ
    with (
        open_store(source, may_write=False) as ours,
        open_store(target, may_write=False) as theirs,
        PairLedger(Path(state), source=source, target=target) as ledger,
        ThreadPoolExecutor(READERS_MAX) as readers,
        progress_sink(ProgressStyle()) as progress,
    ):
        by_cluster, by_one = VerificationTally(ledger.secret), VerificationTally(ledger.secret)
        ranged = RangedVerification(ours, theirs, ledger, level=level)
        engine = SparkRangeEngine(session)
        differing = [*ranged.differences(engine, "", by_cluster, progress, ranges=4)]
        run = bucket_verification(ours, theirs, ledger, level, readers)
        expected = list[Known]()
        for one in run.keys(""):
            by_one.add(one)
            if one.kind is not None or one.is_unsettled:
                expected.append(known(one))
        said = [*map(known, differing)]
        is_as_local = (said, stated(by_cluster, run)) == (expected, stated(by_one, run))
    return {
        "lines": [[key.kind.value, key.key] for key in differing if key.kind],
        "objects": by_cluster.objects,
        "is_as_local": is_as_local,
    }


_JOBS = {job.__name__: job for job in (sweep_table, index_bucket, verify_bucket)}


def main(master: str, pack: str, *settings: str) -> None:
    """Run jobs until the input ends."""
    with open_session(settings, master, Path(pack)) as session:
        for line in sys.stdin:
            job = json.loads(line)
            sys.stdout.write(json.dumps(_JOBS[job.pop("job")](session, **job)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

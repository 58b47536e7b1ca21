"""`treefold bucket verify --engine spark`: ranges of keys are tasks of a cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from admin.bucket_pair import OpenPair
from admin.engines import open_session
from admin.spark_options import SparkPlace
from proof.item import EvidenceLevel
from replicator.verified_ranges import RangedVerification
from replicator.verify import VerificationTally, VerifiedKey
from runtime.progress import ProgressSink


@contextmanager
def ranged_verification(
    place: SparkPlace,
    pair: OpenPair,
    level: EvidenceLevel,
    prefix: str,
    ranges: int | None,
    tally: VerificationTally,
    progress: ProgressSink,
) -> Iterator[tuple[OpenPair, Iterator[VerifiedKey]]]:
    """The pair with the traffic of tasks, and the keys that are not equal (see
    RangedVerification).

    Raises:
        UsageError: a side does not list all keys in order, or an option is invalid.
        SparkMissingError, ProcessFailedError: Spark does not run.
    """
    ranged = RangedVerification(pair.source, pair.target, pair.ledger, level=level)
    source, target = ranged.stores
    with open_session(place.settings, place.master, place.pack) as session:
        from spark.bucket_verify import SparkRangeEngine

        engine = SparkRangeEngine(session)
        found = ranged.differences(engine, prefix, tally, progress, ranges=ranges)
        yield replace(pair, source=source, target=target), found

"""`treefold bucket verify`: print each key that differs, and what was not shown.

Without a verifier both buckets are listed: by this process, or by tasks of Spark.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from admin.bucket_output import (
    LEVELS,
    end_compared,
    print_key,
    print_verification,
    verification_notes,
)
from admin.bucket_pair import (
    append_receipt,
    json_option,
    open_pair,
    open_receipts,
    prefix_option,
    state_option,
    verification_of,
)
from admin.metrics_file import check_metrics_file, metrics_file_option
from admin.option_types import WholeNumber
from admin.spark_options import (
    LOCAL,
    SPARK,
    SparkPlace,
    check_spark_options,
    spark_options,
)
from admin.verifier_option import verifier_option
from proof.item import EvidenceLevel
from replicator.stores.address import canonical_address
from replicator.verify import READERS_MAX, VerificationTally, VerifiedKey
from runtime.errors import UsageError
from runtime.output import print_line
from runtime.progress import ProgressSink, ProgressStyle, progress_sink

if TYPE_CHECKING:
    from replicator.verifier.client import VerifierClient


@click.command(short_help="Print each key that differs.")
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@click.option(
    "--level",
    "level_name",
    type=click.Choice(list(LEVELS)),
    default="recorded",
    show_default=True,
    help=(
        "listed: keys and sizes. recorded: also the hashes that the stores or the last sync"
        " recorded, and properties. read: every object is read at both sides."
    ),
)
@prefix_option
@state_option
@click.option(
    "--shards",
    type=WholeNumber(1, 10_000),
    help="With Spark: about so many ranges of keys. Default: four for each core.",
)
@spark_options
@metrics_file_option
@json_option
@verifier_option
@click.pass_obj
def verify(
    style: ProgressStyle | None,
    *,
    verifier: "VerifierClient | None",
    source: str,
    target: str,
    level_name: str,
    prefix: str,
    state: Path | None,
    shards: int | None,
    engine: str,
    master: str | None,
    settings: tuple[str, ...],
    pack: Path | None,
    metrics_file: Path | None,
    as_json: bool,
) -> None:
    """Compare TARGET with SOURCE, and print each key that differs. Changes no bucket.

    A key is missing (at the target), extra (there only), changed, or damaged: its bytes
    are not those that its own store, or the last sync, recorded. Damage is found by
    `--level read` only. What the chosen level does not show is printed at the end. If
    it is known what both sides hold, receipts.jsonl in the state folder gets a receipt.

    With --engine spark, tasks list and compare ranges of keys, at any level; all
    executors see the folder of --state.

    \b
    Exit status:
      0  equal, each object at its level
      1  failed, 2 usage, 6 source and target overlap
      3  not equal
      5  unknown: keys changed meanwhile, or a side does not list all keys
      7  a store does not answer, 8 another process uses the state folder
      130  interrupted
    """
    check_metrics_file(metrics_file)
    check_spark_options(engine, master=master, settings=settings, pack=pack)
    _check_engine(engine, shards, has_verifier=verifier is not None)
    level = LEVELS[level_name]
    if verifier is not None:
        from admin.bucket_proven import prove

        differences, is_equal = prove(
            source, target, state, verifier, level, prefix, style, as_json=as_json
        )
    else:
        differences, is_equal = _verify(
            source,
            target,
            state,
            level,
            prefix,
            style,
            spark=SparkPlace(master, settings, pack) if engine == SPARK else None,
            shards=shards,
            as_json=as_json,
        )
    if metrics_file is not None:
        # Imported here: a Prometheus client takes a sixth of the start of a command.
        from admin.verify_metrics import write_verify_metrics

        write_verify_metrics(
            metrics_file,
            canonical_address(source),
            canonical_address(target),
            differences,
            is_equal=is_equal,
        )
    end_compared(differences, is_equal=is_equal)


def _check_engine(engine: str, shards: int | None, *, has_verifier: bool) -> None:
    if engine == LOCAL and shards is not None:
        raise UsageError("--shards is for --engine spark")
    if engine == SPARK and has_verifier:
        raise UsageError(
            "--engine spark lists both buckets, and --verifier compares two indexes",
            hint="Leave out one of them. `treefold bucket index --engine spark` builds an index.",
        )


def _verify(
    source: str,
    target: str,
    state: Path | None,
    level: EvidenceLevel,
    prefix: str,
    style: ProgressStyle | None,
    *,
    spark: SparkPlace | None,
    shards: int | None,
    as_json: bool,
) -> tuple[int, bool]:
    """Compare without a verifier, and print it: how many keys differ, and whether it is
    known that the sides are equal.
    """
    stop = threading.Event()
    with ExitStack() as opened, ExitStack() as bar:
        pair = opened.enter_context(open_pair(source, target, state, may_write=False))
        receipts = open_receipts(pair.state)
        # JSON has a terminal for itself; lines for people go above the bar.
        is_shared = bool(style and style.bars and sys.stdout.isatty())
        lines = ProgressStyle() if is_shared and as_json else style
        progress = bar.enter_context(progress_sink(lines or ProgressStyle()))
        show = progress.note if is_shared else print_line
        readers = opened.enter_context(ThreadPoolExecutor(READERS_MAX, "verify"))
        # Reads that were begun end early if this is interrupted.
        opened.callback(stop.set)
        run = verification_of(pair, level, readers, stop)
        tally = VerificationTally(pair.ledger.secret)
        if spark is None:
            # Without a prefix about as many keys as the last run has seen.
            progress.begin("verify", (not prefix and pair.ledger.row_count()) or None, "keys")
            found = _differing(run.keys(prefix), tally, progress)
        else:
            from admin.bucket_ranges import ranged_verification

            pair, found = opened.enter_context(
                ranged_verification(spark, pair, level, prefix, shards, tally, progress)
            )
        for shown, key in enumerate(found, 1):
            print_key(key, shown, show, as_json=as_json)
        bar.close()
        notes = verification_notes(tally, level, run.groups, prefix, lists_all=run.lists_all)
        try:
            append_receipt(receipts, run.receipt(tally, prefix))
        finally:
            print_verification(tally, pair, notes, lists_all=run.lists_all, as_json=as_json)
    return tally.differences, tally.is_equal and run.lists_all


def _differing(
    keys: Iterable[VerifiedKey], tally: VerificationTally, progress: ProgressSink
) -> Iterator[VerifiedKey]:
    """Count all keys, and pass on those that are not equal."""
    for key in keys:
        tally.add(key)
        progress.advance(1)
        if key.kind is not None or key.is_unsettled:
            yield key

"""`treefold bucket index`: the index that a verifier of this state folder uses."""

import time
from pathlib import Path

import click

from admin.bucket_output import time_text
from admin.bucket_pair import json_option
from admin.option_types import WholeNumber
from admin.paths import LocalPath
from admin.spark_options import LOCAL, check_spark_options, spark_options
from proof.index import WHOLE, EvidenceCounts
from proof.item import HashAlgorithm
from proof.root import SetRoot
from replicator.refresh import RefreshProgress
from replicator.stores.opening import open_store
from replicator.verifier.state import locked_state, open_index
from runtime.errors import OperationInterruptedError, UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_json, print_line, size_text
from runtime.progress import ProgressSink, ProgressStyle, progress_sink
from runtime.rate_limit import SystemClock
from runtime.stop_signals import StopSignals


@click.command(short_help="Build, refresh or check a verifier's index.")
@click.argument("address", metavar="ADDRESS")
@click.option(
    "--state",
    metavar="DIR",
    type=LocalPath(file_okay=False, path_type=Path),
    required=True,
    help="The state folder of the verifier, which must not be running.",
)
@click.option("--read", "reads", is_flag=True, help="Read every object again, not only new ones.")
@click.option(
    "--check", "checks", is_flag=True, help="Compute all that is derived from the items anew."
)
@click.option(
    "--inventory",
    metavar="MANIFEST",
    help="Build it from an S3 Inventory: the path or s3:// address of its manifest.json.",
)
@click.option(
    "--listing",
    metavar="DIR",
    help=(
        "Build it from a folder of Parquet files with the columns key, size, last_modified_date and"
        " e_tag of an S3 Inventory. Also an s3:// address."
    ),
)
@click.option(
    "--shards",
    type=WholeNumber(1, 100_000),
    help="Build it from listings of so many ranges of keys at a time, found by sampling.",
)
@spark_options
@json_option
@click.pass_obj
def index(
    style: ProgressStyle | None,
    *,
    address: str,
    state: Path,
    reads: bool,
    checks: bool,
    inventory: str | None,
    listing: str | None,
    shards: int | None,
    engine: str,
    master: str | None,
    settings: tuple[str, ...],
    pack: Path | None,
    as_json: bool,
) -> None:
    """Build or refresh the index of the bucket at ADDRESS, beside that bucket.

    `treefold verifier run` with this state folder takes it over, and does the same by
    itself. A first run reads each object of which the store recorded no hash by the
    index's algorithm. An interrupted run is continued by the same command.

    A first run asks the store for each object. For a huge bucket, build the index from
    an inventory, a listing or --shards in a new state folder, and then run the command
    without: that asks only for what changed since, and reads objects whose ETag is no
    MD5. Such an index covers keys, sizes and contents by MD5, but no metadata and tags.
    Its verifier needs `algorithm = "md5"`. With Spark, all executors see DIR of --state
    and the listing.

    \b
    Examples:
      treefold bucket index s3://photos --state /srv/index
      treefold bucket index s3://photos --state /srv/index --engine spark \\
        --inventory s3://reports/photos/daily/2026-11-25T01-00Z/manifest.json

    \b
    Exit status:
      0  the index describes the bucket
      1  failed, 2 usage
      3  objects are damaged, or --check found damage in the index
      5  some objects changed meanwhile or cannot be read: run it again
      7  the store does not answer, 8 a verifier uses the state folder
    """
    check_spark_options(engine, master=master, settings=settings, pack=pack)
    given = [option for option in (inventory, listing, shards) if option is not None]
    _check_listing_options(len(given), engine, reads=reads)
    style = style or ProgressStyle()
    if not given:
        _refresh(style, address, state, reads=reads, checks=checks, as_json=as_json)
        return
    # Imported here: a refresh needs no Arrow.
    from admin.bucket_bulk import IndexBuild, build_index

    build = IndexBuild(
        address, state, inventory, listing, shards, engine, master, settings, pack, checks
    )
    with progress_sink(style) as progress:
        is_sound = build_index(build, progress, as_json=as_json)
    if not is_sound:
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _check_listing_options(listings: int, engine: str, *, reads: bool) -> None:
    if listings > 1:
        raise UsageError("--inventory, --listing and --shards exclude each other")
    if not listings and engine != LOCAL:
        raise UsageError("--engine spark needs --inventory, --listing or --shards")
    if listings and reads:
        raise UsageError("--read is for a refresh, without --inventory, --listing and --shards")


def _refresh(
    style: ProgressStyle, address: str, state: Path, *, reads: bool, checks: bool, as_json: bool
) -> None:
    clock = SystemClock()
    with (
        StopSignals() as stop,
        open_store(address, may_write=False) as store,
        locked_state(state, address) as folder,
        open_index(folder, store, clock, bucket=address, algorithm=None) as bucket,
        progress_sink(style) as progress,
    ):
        with bucket.index.snapshot() as snapshot:
            items = snapshot.roots([WHOLE])[0].count
        progress.begin("index", items or None, "keys")
        read_since_s = int(time.time()) if reads else 0
        try:
            done = bucket.refresher(stop.is_set).refresh(
                read_since_s=read_since_s, note=_Note(progress)
            )
        except OperationInterruptedError as error:
            raise KeyboardInterrupt from error
        damage = list(bucket.index.self_check().damage) if checks else []
        with bucket.index.snapshot() as snapshot:
            evidence, root = snapshot.evidence, snapshot.roots([WHOLE])[0]
        algorithm = bucket.profile.algorithm
    document = _document(root, evidence, done, algorithm, damage if checks else None)
    if as_json:
        print_json(document)
    else:
        _print(document, done)
    if done.damaged or damage:
        raise click.exceptions.Exit(ExitCode.FINDINGS)
    if done.unsettled or done.unreadable:
        raise click.exceptions.Exit(ExitCode.PARTLY)


def _document(
    root: SetRoot,
    evidence: EvidenceCounts,
    done: RefreshProgress,
    algorithm: HashAlgorithm | None,
    damage: list[str] | None,
) -> JsonObject:
    return {
        "objects": root.count,
        "root": f"{root.total:032x}",
        "algorithm": algorithm.value if algorithm else None,
        "levels": {
            "listed": evidence.listed,
            "recorded": evidence.recorded,
            "read": evidence.read,
        },
        "oldestReadAt": time_text(evidence.oldest_read_at_s),
        "added": done.added,
        "changed": done.changed,
        "removed": done.removed,
        "damaged": done.damaged,
        "unreadable": done.unreadable,
        "unsettled": done.unsettled,
        "bytesRead": done.bytes_read,
        "indexDamage": damage,
    }


class _Note:
    """Tells a sink how many more objects a refresh has seen."""

    def __init__(self, progress: ProgressSink) -> None:
        self._progress = progress
        self._seen = 0

    def __call__(self, done: RefreshProgress) -> None:
        self._progress.advance(done.objects - self._seen)
        self._seen = done.objects


def _print(document: JsonObject, done: RefreshProgress) -> None:
    levels = document["levels"]
    assert isinstance(levels, dict)
    print_line(f"{document['objects']} objects, root {document['root']}")
    print_line(
        f"content by {document['algorithm']}: {levels['listed']} listed only,"
        f" {levels['recorded']} recorded by the store, {levels['read']} read"
    )
    if document["oldestReadAt"] is not None:
        print_line(f"oldest read: {document['oldestReadAt']}")
    print_line(
        f"added {done.added}, changed {done.changed}, removed {done.removed};"
        f" read {size_text(done.bytes_read)}"
    )
    if done.damaged:
        print_line(f"damaged: {done.damaged} have other bytes than were recorded", style="red")
    if done.unreadable or done.unsettled:
        print_line(f"unknown: {done.unreadable} cannot be read, {done.unsettled} changed meanwhile")
    damage = document["indexDamage"]
    if isinstance(damage, list):
        for text in damage:
            print_line(f"index: {text}", style="red")
        if damage:
            print_line("Move DIR/index away: the next run builds it anew.")
        else:
            print_line("all that is derived from the items is right", style="green")

"""`treefold bucket index` from a listing: an S3 Inventory, a folder of Parquet files,
or the store's own in many shards, on this machine or on Spark.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from admin.bucket_output import time_text
from admin.engines import open_session
from admin.spark_options import LOCAL
from proof.index import WHOLE
from proof.index_build import BuiltFiles, IndexEngine, LocalIndexEngine, build_files
from proof.inventory import Inventory, ListingFile, ListingScope, read_folder, read_inventory
from proof.item import HashAlgorithm
from proof.listed_rows import ListedItemRules
from proof.root import SetRoot
from replicator.listing_shards import plan_shards
from replicator.refresh import IndexedBucket
from replicator.stores.address import OzoneAddress, S3Address, parse_address
from replicator.stores.opening import open_store
from replicator.stores.port import Store
from replicator.stores.s3_bucket import SCRATCH_PREFIX, S3Location
from replicator.verifier.state import locked_state, open_index
from runtime.disk import Disk
from runtime.errors import ConfigError, UsageError
from runtime.eta import duration_text
from runtime.freed_memory import keep_freed_memory
from runtime.output import JsonObject, print_json, print_line
from runtime.progress import ProgressSink
from runtime.rate_limit import SystemClock

# In the state folder, until the index is complete.
_WORK, _LISTED = "index-build", "index-listing"
_ALGORITHM = HashAlgorithm.MD5


@dataclass(frozen=True, slots=True)
class IndexBuild:
    """What the command was told: the bucket, a listing of it, and where tasks run."""

    address: str
    state: Path
    inventory: str | None
    listing: str | None
    shards: int | None
    engine: str
    master: str | None
    settings: tuple[str, ...]
    pack: Path | None
    checks: bool


@dataclass(frozen=True, slots=True)
class _Listing:
    """The parts of a listing; `created_ms` is None where nobody knows its age."""

    parts: tuple[ListingFile, ...]
    created_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Result:
    """The index that was built; `damage` is None if nobody looked for it."""

    root: SetRoot
    files: BuiltFiles
    listing: _Listing
    damage: tuple[str, ...] | None


def build_index(build: IndexBuild, progress: ProgressSink, *, as_json: bool) -> bool:
    """Build the index of a bucket in an empty state folder, and print what it has;
    whether a check, if wanted, found no damage.

    Raises:
        UsageError: the listing is not of this bucket, or of a store whose objects no
            listing describes.
        ConfigError: the folder has an index already, or one that covers more than a
            listing tells.
        ListingInvalidError: the listing cannot be used.
        BusyError: another process uses the state folder.
        StoreError: the store does not answer.
        SparkMissingError, SparkFailedError, FolderNotSharedError: Spark does not run,
            or a job failed.
        DatabaseError, IndexDamagedError, DiskError: the state cannot be used.
    """
    began = time.monotonic()
    if isinstance(parse_address(build.address), OzoneAddress):
        raise UsageError(
            f"{build.address}: no listing has what an Ozone Manager says of its keys",
            hint="Build it without one: the OM is asked for all keys.",
        )
    with open_store(build.address, may_write=False) as store:
        result = _built(build, store, progress)
    document = _document(build, result, time.monotonic() - began)
    if as_json:
        print_json(document)
    else:
        _print(document, build, result)
    return not result.damage


def _built(build: IndexBuild, store: Store, progress: ProgressSink) -> _Result:
    listing = _listing_of(build, store) if build.shards is None else _Listing(())
    if listing.created_ms is not None:
        age_s = max(time.time() - listing.created_ms / 1000, 0)
        text = f"the inventory is of {_time(listing)}: {duration_text(age_s)} old"
        progress.note(f"{text}. What changed since is not in it.")
    etags_prove = store.capabilities.part_etags_are_md5 is True
    if not etags_prove:
        progress.note("ETags of this store are not known to be MD5s: they prove no content")
    disk = Disk()
    with (
        locked_state(build.state, build.address) as folder,
        _open_empty(folder, store, build.address) as bucket,
        _open_engine(build) as engine,
    ):
        rules, work = ListedItemRules(bucket.profile, etags_prove), folder / _WORK
        if build.shards is not None:
            listing = _listed(build, store, engine, folder / _LISTED, progress)
        files = build_files(engine, listing.parts, work, rules, disk=disk, progress=progress)
        root = bucket.index.take_files(files.files, files.sums.derived())
        for done in (work, folder / _LISTED):
            disk.remove_folder(done)
        damage = bucket.index.self_check().damage if build.checks else None
    return _Result(root, files, listing, damage)


def _document(build: IndexBuild, result: _Result, seconds: float) -> JsonObject:
    listed, recorded, read = result.files.sums.levels
    return {
        "objects": result.root.count,
        "root": f"{result.root.total:032x}",
        "algorithm": _ALGORITHM.value,
        "levels": {"listed": listed, "recorded": recorded, "read": read},
        "oldestReadAt": None,
        "listingCreatedAt": _time(result.listing),
        "engine": build.engine,
        "parts": len(result.listing.parts),
        "ranges": result.files.ranges,
        "rangesResumed": result.files.resumed,
        "repeatedKeys": result.files.sums.repeated,
        "seconds": round(seconds, 1),
        "indexDamage": None if result.damage is None else list(result.damage),
    }


def _listing_of(build: IndexBuild, store: Store) -> _Listing:
    scope = _scope_of(build.address, store)
    if build.inventory is None:
        assert build.listing is not None
        return _Listing(read_folder(build.listing, scope))
    found = read_inventory(build.inventory, scope)
    _check_bucket(build.address, found)
    return _Listing(found.parts, found.created_ms)


def _listed(
    build: IndexBuild, store: Store, engine: IndexEngine, folder: Path, progress: ProgressSink
) -> _Listing:
    """The store's own listing, made in shards by the tasks of an engine."""
    if not store.capabilities.lists_all_keys:
        raise UsageError(
            f"{build.address} does not list its keys in order, and cannot be listed in shards",
            hint="Leave out --shards.",
        )
    assert build.shards is not None
    progress.note("looking for keys that cut the listing")
    tasks = plan_shards(build.address, store.lister, folder, build.shards, Disk())
    progress.begin("list the bucket", len(tasks), "shards")
    engine.run(tasks, progress.advance)
    # Its keys are those below the address already.
    return _Listing(read_folder(str(folder), ListingScope()))


def _scope_of(address: str, store: Store) -> ListingScope:
    has_versions = store.capabilities.keeps_versions
    match parse_address(address):
        case S3Address(text):
            return ListingScope(S3Location.parse(text).prefix, SCRATCH_PREFIX, has_versions)
        case _:
            return ListingScope(has_versions=has_versions)


def _check_bucket(address: str, inventory: Inventory) -> None:
    match parse_address(address):
        case S3Address(text) if S3Location.parse(text).bucket != inventory.bucket:
            raise UsageError(
                f"the inventory is of the bucket {inventory.bucket}, not of {address}",
                hint="Name the bucket that it is of as ADDRESS.",
            )
        case _:
            pass


@contextmanager
def _open_empty(folder: Path, store: Store, address: str) -> Iterator[IndexedBucket]:
    clock = SystemClock()
    with open_index(
        folder, store, clock, bucket=address, algorithm=_ALGORITHM, has_properties=False
    ) as bucket:
        if bucket.profile.properties:
            raise ConfigError(
                f"the index in {folder} covers properties, which no listing has",
                hint="Choose another state folder.",
                path=str(folder),
            )
        with bucket.index.snapshot() as snapshot:
            if count := snapshot.roots([WHOLE])[0].count:
                raise ConfigError(
                    f"the index in {folder} has {count} objects already",
                    hint="Without a listing the same command refreshes it.",
                    path=str(folder),
                )
        yield bucket


@contextmanager
def _open_engine(build: IndexBuild) -> Iterator[IndexEngine]:
    if build.engine == LOCAL:
        keep_freed_memory()
        yield LocalIndexEngine(Disk())
        return
    with open_session(build.settings, build.master, build.pack) as session:
        from spark.bucket_index import SparkIndexEngine

        yield SparkIndexEngine(session, Disk())


def _time(listing: _Listing) -> str | None:
    return time_text(None if listing.created_ms is None else listing.created_ms // 1000)


def _print(document: JsonObject, build: IndexBuild, result: _Result) -> None:
    sums = result.files.sums
    listed, recorded, _ = sums.levels
    print_line(f"{document['objects']} objects, root {document['root']}")
    print_line(f"content by md5: {listed} listed only, {recorded} recorded by the store")
    if sums.repeated:
        print_line(f"{sums.repeated} rows named a key once more: the latest counts")
    print_line(f"built in {document['seconds']} s from {document['parts']} files")
    print_line(f"next: treefold bucket index {build.address} --state {build.state}")
    print_line("It brings in what changed since, and reads what has no recorded hash.")
    for text in result.damage or ():
        print_line(f"index: {text}", style="red")
    if result.damage == ():
        print_line("all that is derived from the items is right", style="green")

"""A bucket of Ozone as a store: its Ozone Manager for facts, names, snapshots and the
log of changes, an S3 gateway for bytes.

Against the gateway alone (`s3:`) this lists every key, names the hash of every object
that came in one request, deletes and renames by the OM, and follows changes.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from ozone.key_checksum import DatanodeRecords
from ozone.manager import ManagerClient
from ozone.manager_values import BucketLayout
from replicator.stores.capabilities import OZONE_ACLS, Capabilities
from replicator.stores.errors import StoreError
from replicator.stores.ozone_bucket import OzoneBucket, OzoneLocation, resolved, translated
from replicator.stores.ozone_describer import OzoneDescriber
from replicator.stores.ozone_feed import OzoneFeed
from replicator.stores.ozone_lister import OzoneLister
from replicator.stores.ozone_objects import (
    OzonePieceWriter,
    OzoneReader,
    OzoneRenamer,
    OzoneUploadWriter,
    OzoneWriter,
)
from replicator.stores.ozone_snapshots import OzoneSnapshots
from replicator.stores.port import Store
from replicator.stores.probe_memory import ProbeMemory
from replicator.stores.s3_behaviour import S3Behaviour
from replicator.stores.s3_bucket import S3Bucket
from replicator.stores.s3_objects import S3Reader, S3Writer
from replicator.stores.s3_pieces import S3PieceWriter
from replicator.stores.s3_probe import probe
from replicator.stores.s3_uploads import S3Scratch, S3UploadReader, S3UploadWriter
from runtime.s3 import S3Client, open_client
from runtime.s3_account import find_account

KIND = "ozone"
# Of OMVersion in ServiceList: Ozone 2.1 has tags and the requests that we use.
_VERSION_MIN = 9


@contextmanager
def open_ozone(
    address: str,
    *,
    may_write: bool,
    client: S3Client | None = None,
    user: str = "",
    memory: ProbeMemory | None = None,
) -> Iterator[Store]:
    """The store at `ozone://OM:PORT/VOLUME/BUCKET/PREFIX?s3=URL`, closed at the end.

    Keys are relative to the prefix. Requests to the OM run as the access ID of the S3
    credentials. `client` and `user` are taken instead of those for the address. With
    `may_write` the gateway is probed by scratch objects, which are removed, unless
    `memory` knows it.

    Raises:
        UsageError: the address is invalid.
        ConfigError: there are no credentials, or an OM is off loopback and the address
            has no `insecure=true`.
        StoreError: there is no such bucket, or the gateway shows another one.
    """
    location = OzoneLocation.parse(address)
    if not user:
        user = find_account(location.settings).credentials.get_frozen_credentials().access_key
    with (
        closing(ManagerClient(location.managers, user=user, insecure=location.insecure)) as manager,
        closing(DatanodeRecords(insecure=location.insecure)) as records,
    ):
        bucket = replace(_found(manager, location), records=records)
        if client is not None:
            yield _store(address, location, bucket, client, may_write=may_write, memory=memory)
            return
        with closing(open_client(location.settings)) as opened:
            yield _store(address, location, bucket, opened, may_write=may_write, memory=memory)


def _found(manager: ManagerClient, location: OzoneLocation) -> OzoneBucket:
    """The bucket, which the gateway shows, too.

    Raises:
        StoreError: it does not exist, or its name at the gateway is another bucket's.
    """
    what = f"cannot open {location.volume}/{location.bucket}"
    with translated(what):
        if all(node.version < _VERSION_MIN for node in manager.nodes()):
            raise StoreError(
                f"{what}: the OM is older than Ozone 2.1",
                hint="Use the bucket through its gateway: s3://BUCKET?endpoint_url=URL.",
            )
        facts = resolved(manager, location.volume, location.bucket)
        s3_volume = manager.s3_volume()
        shown = resolved(manager, s3_volume, location.s3_bucket)
    if (shown.volume, shown.bucket) != (facts.volume, facts.bucket):
        raise StoreError(
            f"{what}: the gateway shows {shown.volume}/{shown.bucket} as {location.s3_bucket}",
            hint=f"Make a link in {s3_volume}: ozone sh bucket link; name it by &s3_bucket=NAME.",
        )
    return OzoneBucket(manager, facts, location.prefix)


def _store(
    address: str,
    location: OzoneLocation,
    bucket: OzoneBucket,
    client: S3Client,
    *,
    may_write: bool,
    memory: ProbeMemory | None,
) -> Store:
    gateway = S3Bucket(client, location.s3_bucket, location.prefix, location.s3_bucket)
    gateway.behaviour = behaviour = probe(gateway, may_write=may_write, memory=memory)
    reader = S3Reader(gateway)
    uploads = S3UploadWriter(gateway, reader)
    feed = OzoneFeed(bucket)
    checks_md5 = may_write and behaviour.checks_put_md5
    pieces = S3PieceWriter(gateway, reader) if checks_md5 else None

    def reader_below(prefix: str) -> S3Reader:
        return S3Reader(replace(gateway, prefix=prefix))

    return Store(
        address=address,
        capabilities=_capabilities(behaviour, bucket),
        lister=OzoneLister(bucket),
        reader=OzoneReader(bucket, reader),
        writer=OzoneWriter(bucket, S3Writer(gateway, reader, uploads)),
        upload_writer=OzoneUploadWriter(bucket, uploads),
        upload_reader=S3UploadReader(gateway),
        feed=feed,
        scratch=S3Scratch(gateway) if may_write and behaviour.copies_ranges else None,
        piece_writer=None if pieces is None else OzonePieceWriter(bucket, pieces),
        snapshots=OzoneSnapshots(bucket, feed, reader_below),
        renamer=OzoneRenamer(bucket),
        bucket=OzoneDescriber(bucket),
        traffic=client.traffic.read,
    )


def _capabilities(behaviour: S3Behaviour, bucket: OzoneBucket) -> Capabilities:
    """What the gateway can do, and what the OM adds."""
    found = behaviour.capabilities()
    reasons = dict(found.reasons)
    for name in ("lists_all_keys", "hashes", "keeps_acls"):
        reasons.pop(name, None)
    reasons["whole_hashes"] = "what is uploaded in parts has no hash of the whole"
    if bucket.facts.layout is not BucketLayout.OBJECT_STORE:
        reasons["keys"] = "names are paths: a key with an empty part, . or .. is refused"
    return replace(
        found,
        kind=KIND,
        keeps_versions=False,
        keeps_acls=True,
        acl_form=OZONE_ACLS,
        lists_all_keys=True,
        stamps_cover_properties=True,
        records_hashes=True,
        tells_whole_seconds=False,
        reasons=tuple(sorted(reasons.items())),
    )

"""An S3 bucket, or a part of one, as a store.

What differs between servers that speak S3 is found out by a probe when the store is
opened (`s3_probe`), and stands in its capabilities with reasons. Only what was seen to
work is relied on.
"""

from typing import TYPE_CHECKING

from replicator.stores.port import Store
from replicator.stores.s3_bucket import S3Bucket, S3Location
from replicator.stores.s3_lister import S3Lister
from replicator.stores.s3_objects import S3Reader, S3Writer
from replicator.stores.s3_pieces import S3PieceWriter
from replicator.stores.s3_probe import probe
from replicator.stores.s3_uploads import S3Scratch, S3UploadReader, S3UploadWriter
from runtime.s3 import S3Client, open_client

if TYPE_CHECKING:
    from replicator.stores.probe_memory import ProbeMemory


def open_s3(
    address: str,
    *,
    may_write: bool,
    client: S3Client | None = None,
    memory: "ProbeMemory | None" = None,
) -> Store:
    """The store at `s3://BUCKET/PREFIX?endpoint_url=…&region=…&profile=…`.

    Keys are relative to the prefix, which is a folder: `s3://b/data` has `data/x` as
    `x`. With `scratch_bucket=NAME` scratch objects lie there; best is a bucket without
    versions. With `may_write` the store is probed by scratch objects, which are
    removed; without, it is only read, and its capabilities claim no more than that
    shows. `client` is taken instead of one for the address; `memory` spares a probe.

    Raises:
        UsageError: the address is invalid.
        ConfigError: there are no credentials.
        StoreError: the bucket does not exist, or the store refuses what every S3 store
            does.
    """
    parsed = S3Location.parse(address)
    bucket = S3Bucket(
        client or open_client(parsed.settings),
        parsed.bucket,
        parsed.prefix,
        parsed.scratch_bucket or parsed.bucket,
    )
    bucket.behaviour = probe(bucket, may_write=may_write, memory=memory)
    reader = S3Reader(bucket)
    uploads = S3UploadWriter(bucket, reader)
    can_stitch = may_write and bucket.behaviour.copies_ranges
    # Parts go without a digest, as in `S3UploadWriter.write_part`.
    takes_parts = bucket.behaviour.checks_part_md5 or not bucket.client.signs_payloads
    checks_md5 = may_write and bucket.behaviour.checks_put_md5 and takes_parts
    return Store(
        address=address,
        capabilities=bucket.behaviour.capabilities(),
        lister=S3Lister(bucket),
        reader=reader,
        writer=S3Writer(bucket, reader, uploads),
        upload_writer=uploads,
        upload_reader=S3UploadReader(bucket),
        scratch=S3Scratch(bucket) if can_stitch else None,
        piece_writer=S3PieceWriter(bucket, reader) if checks_md5 else None,
        traffic=bucket.client.traffic.read,
    )

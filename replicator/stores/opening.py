"""Open the store at an address."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from replicator.stores.address import LocalAddress, OzoneAddress, S3Address, parse_address
from replicator.stores.port import Store
from runtime.disk import Disk

if TYPE_CHECKING:
    from replicator.stores.probe_memory import ProbeMemory


def effective_address(address: str) -> str:
    """The address with the endpoint that its requests go to, wherever that is set.

    Raises:
        UsageError: the address is invalid.
        ConfigError: it names no endpoint, and a profile that does not exist.
    """
    match parse_address(address):
        case LocalAddress():
            return address
        case OzoneAddress(text):
            from replicator.stores.ozone_bucket import OzoneLocation

            return OzoneLocation.parse(text).address
        case S3Address(text):
            from replicator.stores.s3_bucket import S3Location
            from runtime.s3_account import configured_endpoint

            location = S3Location.parse(text)
            endpoint = configured_endpoint(location.settings)
            path = f"s3://{location.bucket}/{quote(location.prefix)}"
            return f"{path}?endpoint_url={quote(endpoint, safe='')}" if endpoint else path


@contextmanager
def open_store(
    address: str,
    *,
    may_write: bool,
    create: bool = False,
    memory: "ProbeMemory | None" = None,
) -> Iterator[Store]:
    """The store that an argument names, closed at the end of the context. With `create`
    a local bucket is made if there is none; with `may_write` a remote store is probed
    by scratch objects, unless `memory` knows it.

    Raises:
        UsageError: the address is invalid.
        ConfigError: there are no credentials.
        StoreError: there is no such bucket, or the store did not answer.
        DiskError: a directory cannot be read or written.
    """
    # Each adapter brings libraries that the others do not need.
    match parse_address(address):
        case LocalAddress(folder):
            from replicator.stores.local import LocalBucket

            with LocalBucket(folder, Disk(), create=create) as bucket:
                yield bucket.store()
        case S3Address(text):
            from replicator.stores.s3 import open_s3
            from replicator.stores.s3_bucket import S3Location
            from runtime.s3 import open_client

            settings = S3Location.parse(text).settings
            with closing(open_client(settings)) as client:
                yield open_s3(text, may_write=may_write, client=client, memory=memory)
        case OzoneAddress(text):
            from replicator.stores.ozone import open_ozone

            with open_ozone(text, may_write=may_write, memory=memory) as store:
                yield store

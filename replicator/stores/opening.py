"""Open the store at an address."""

from replicator.stores.address import LocalAddress, S3Address, parse_address
from replicator.stores.local import LocalBucket
from replicator.stores.port import Store
from replicator.stores.s3 import open_s3
from runtime.disk import Disk


def open_store(address: str, *, may_write: bool, create: bool = False) -> Store:
    """The store that an argument names. With `create` a local bucket is made if there
    is none; with `may_write` a remote store is probed by scratch objects.

    Raises:
        UsageError: the address is invalid.
        ConfigError: there are no credentials.
        StoreError: there is no such bucket, or the store did not answer.
        DiskError: a directory cannot be read or written.
    """
    match parse_address(address):
        case LocalAddress(folder):
            return LocalBucket(folder, Disk(), create=create).store()
        case S3Address(text):
            return open_s3(text, may_write=may_write)

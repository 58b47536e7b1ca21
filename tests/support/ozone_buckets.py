"""Fresh buckets of a real Ozone, opened as stores by its OM."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from types import TracebackType
from typing import Protocol
from urllib.parse import quote, urlsplit

from ozone.manager import ManagerClient
from ozone.manager_values import BucketLayout, ManagerBucket
from replicator.stores.ozone import open_ozone
from replicator.stores.port import Store
from replicator.stores.probe_memory import ProbeMemory
from tests.support.ozone import OzoneCluster
from tests.support.s3_servers import S3Endpoint
from tests.support.stores import GatewayMemory, s3_client

# Of real clusters, by the gateway and the layout of its buckets.
_MEMORIES = dict[tuple[str, BucketLayout], GatewayMemory]()


class _Service(Protocol):
    """A cluster, or a twin of one."""

    @property
    def om_address(self) -> str:
        """The gRPC port of the OM."""


class OzoneBuckets:
    """A context manager that closes all stores that it has opened."""

    def __init__(self, cluster: _Service, endpoint: S3Endpoint) -> None:
        self._cluster, self.endpoint = cluster, endpoint
        self._stack = ExitStack()
        self.manager = ManagerClient([cluster.om_address], user=endpoint.access_key)

    def __enter__(self) -> "OzoneBuckets":
        self._stack.enter_context(closing(self.manager))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def fresh_name(self) -> str:
        """A name that no bucket has."""
        return f"om-{secrets.token_hex(8)}"

    def fresh(self, layout: BucketLayout) -> Store:
        """An empty bucket."""
        name = self.fresh_name()
        self.manager.create_bucket(ManagerBucket("s3v", name, layout, object_id=0, created_ms=0))
        memory = None
        if isinstance(self._cluster, OzoneCluster):
            memory = _MEMORIES.setdefault((self.endpoint.url, layout), GatewayMemory())
        return self._stack.enter_context(self.opened(name, memory=memory))

    def place(self, store: Store) -> tuple[str, str]:
        """Volume and bucket of a store."""
        _, volume, bucket = urlsplit(store.address).path.split("/")
        return volume, bucket

    def address(self, bucket: str) -> str:
        """A bucket of the volume that the gateway shows, as an argument."""
        url = quote(self.endpoint.url, safe="")
        return f"ozone://{self._cluster.om_address}/s3v/{bucket}?s3={url}"

    @contextmanager
    def opened(
        self, bucket: str, *, s3_bucket: str = "", memory: ProbeMemory | None = None
    ) -> Iterator[Store]:
        """A bucket of the volume that the gateway shows."""
        address = self.address(bucket)
        if s3_bucket:
            address += f"&s3_bucket={s3_bucket}"
        user = self.endpoint.access_key
        with (
            closing(s3_client(self.endpoint)) as client,
            open_ozone(address, may_write=True, client=client, user=user, memory=memory) as store,
        ):
            yield store

    @contextmanager
    def opened_again(self, store: Store) -> Iterator[Store]:
        """The same bucket, as another process opens it."""
        with self.opened(self.place(store)[1]) as again:
            yield again

"""The stores that the contract suite runs on, each opened empty."""

import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest
from botocore.client import BaseClient
from botocore.credentials import Credentials

from ozone.manager import ManagerClient
from ozone.manager_values import BucketLayout, ManagerBucket
from replicator.stores.capabilities import Capabilities
from replicator.stores.errors import ObjectMissingError, StoreError, StoreUnavailableError
from replicator.stores.local import LocalBucket
from replicator.stores.ozone import open_ozone
from replicator.stores.port import (
    Change,
    ChangeFeed,
    FeedPosition,
    ObjectFacts,
    ObjectProperties,
    Store,
    WriteCondition,
)
from replicator.stores.probe_memory import ProbeMemory
from replicator.stores.s3 import open_s3
from replicator.stores.s3_behaviour import S3Behaviour
from replicator.stores.s3_bucket import S3Bucket as GatewayBucket
from runtime.disk import Disk
from runtime.rate_limit import SystemClock
from runtime.retry import Backoff
from runtime.s3 import S3Client
from tests.support.memory_store import DECLARING, MEMORY, STITCHING, UNGUARDED, MemoryStore
from tests.support.ozone import OzoneCluster
from tests.support.ozone_twin_service import TwinService
from tests.support.rgw import RgwSite
from tests.support.s3_servers import S3Bucket, S3Endpoint

NOTHING = ObjectProperties()
ANYTHING = WriteCondition()
# Objects of a test that are deleted one by one inside the server.
_EMPTIED_MAX = 100


@dataclass(frozen=True)
class ContractStore:
    """A store to test, and what its server lacks beside the capabilities."""

    store: Store
    # Fast enough for 10,000 parts, and room for 5 GiB.
    takes_large: bool = False
    # A small part that is not the last is refused.
    refuses_small_parts: bool = True
    # ministack does not find the tags of a version once the key is deleted.
    reads_tags_below_markers: bool = True
    # moto fails without an answer.
    missing_upload: type[StoreError] = ObjectMissingError
    # An upload is completed with some of its parts.
    completes_some_parts: bool = True
    # Ozone lists rows of its table that no change still in memory deletes. Where one
    # leaves memory while a listing goes on, its keys are listed again (HDDS-13595).
    lists_deletes_at_once: bool = True
    # Why keys do not cross this server unchanged although the adapter is right.
    broken_keys: frozenset[str] = frozenset()
    # A bucket of paths refuses keys that are none.
    keeps_all_keys: bool = True
    # Ozone's log has final states: of changes that came together the last one alone,
    # and a moment later. Other rows than those of keys count in it, too.
    tells_each_change: bool = True
    # A name of a snapshot is free only once its deletion is through.
    frees_names_at_once: bool = True
    # Where it keeps its objects, if that is an S3 server.
    buckets: tuple[S3Bucket, ...] = ()


@dataclass(frozen=True)
class ContractLacks:
    """What an S3 server lacks: see ContractStore."""

    refuses_small_parts: bool = True
    reads_tags_below_markers: bool = True
    missing_upload: type[StoreError] = ObjectMissingError
    completes_some_parts: bool = True
    lists_deletes_at_once: bool = True
    broken_keys: frozenset[str] = frozenset()


@contextmanager
def local_store(request: pytest.FixtureRequest, *, name: str = "bucket") -> Iterator[ContractStore]:
    """A bucket in a new folder."""
    folder: Path = request.getfixturevalue("tmp_path")
    with LocalBucket(folder / name, Disk(), create=True) as bucket:
        yield ContractStore(bucket.store(), takes_large=True)


@contextmanager
def memory_store(
    _request: pytest.FixtureRequest, *, capabilities: Capabilities = MEMORY
) -> Iterator[ContractStore]:
    """The store that the simulations use."""
    is_full = capabilities is MEMORY
    memory = MemoryStore(
        "memory:a", capabilities, has_feed=is_full, has_snapshots=is_full, renames=is_full
    )
    yield ContractStore(memory.store(), refuses_small_parts=bool(capabilities.part_bytes_min))


def s3_client(endpoint: S3Endpoint) -> S3Client:
    """Our client of a server, which does not wait between attempts."""
    return S3Client(
        endpoint_url=endpoint.url,
        region=endpoint.region,
        credentials=Credentials(endpoint.access_key, endpoint.secret_key),
        backoff=Backoff(first_s=0, most_s=0, jitter_s=0),
    )


def fill(bucket: S3Bucket, keys: Iterable[str], body: bytes = b"") -> None:
    """Write many objects: botocore takes five times as long for one."""
    with closing(s3_client(bucket.endpoint)) as client:
        for key in keys:
            client.request("PUT", bucket.name, key, body=body)


@contextmanager
def s3_store(
    server: str,
    request: pytest.FixtureRequest,
    *,
    keeps_versions: bool = False,
    prefix: str = "",
    lacks: ContractLacks = ContractLacks(),
) -> Iterator[ContractStore]:
    """A fresh bucket of a server by the name of its fixture, or a folder in one."""
    found = request.getfixturevalue(server)
    endpoint: S3Endpoint = found.endpoint if isinstance(found, RgwSite) else found
    bucket, scratch = endpoint.fresh_bucket(), ""
    if keeps_versions:
        scratch = endpoint.fresh_bucket().name
        with endpoint.client() as client:
            client.put_bucket_versioning(
                Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"}
            )
    with closing(s3_client(endpoint)) as ours:
        address = f"s3://{bucket.name}/{prefix}" + (f"?scratch_bucket={scratch}" * bool(scratch))
        store = open_s3(address, may_write=True, client=ours)
        yield ContractStore(
            store,
            refuses_small_parts=lacks.refuses_small_parts,
            reads_tags_below_markers=lacks.reads_tags_below_markers,
            missing_upload=lacks.missing_upload,
            completes_some_parts=lacks.completes_some_parts,
            lists_deletes_at_once=lacks.lists_deletes_at_once,
            broken_keys=lacks.broken_keys,
            buckets=(bucket,),
        )


class GatewayMemory(ProbeMemory):
    """What a probe has found of one bucket of a gateway, for all like it: to ask for
    each takes longer than most tests.
    """

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self._found: S3Behaviour | None = None

    def behaviour_of(
        self, bucket: GatewayBucket, seen: S3Behaviour, ask: Callable[[], S3Behaviour]
    ) -> S3Behaviour:
        """See ProbeMemory."""
        if self._found is None:
            self._found = ask()
        return self._found


@dataclass(frozen=True)
class OpenedStores:
    """Stores on real servers, which the tests of a module share, by server and whether
    they keep versions.
    """

    stack: ExitStack
    found: dict[tuple[str, bool], ContractStore] = field(default_factory=dict)
    clients: dict[S3Endpoint, BaseClient] = field(default_factory=dict)
    memories: dict[tuple[S3Endpoint, BucketLayout], GatewayMemory] = field(default_factory=dict)

    def client(self, endpoint: S3Endpoint) -> BaseClient:
        """Another client than ours; to make one takes longer than most requests."""
        if endpoint not in self.clients:
            self.clients[endpoint] = self.stack.enter_context(endpoint.client())
        return self.clients[endpoint]


@contextmanager
def emptied_store(
    server: str,
    request: pytest.FixtureRequest,
    *,
    keeps_versions: bool = False,
    prefix: str = "",
    lacks: ContractLacks = ContractLacks(),
) -> Iterator[ContractStore]:
    """The bucket of the tests before, emptied: to make one and to probe its store takes
    longer than most tests.
    """
    opened: OpenedStores = request.getfixturevalue("opened_stores")
    name = (server, keeps_versions)
    left = opened.found.get(name)
    if left is None or not all(
        empty(opened.client(one.endpoint), one.name, keeps_versions=keeps_versions)
        for one in left.buckets
    ):
        made = s3_store(server, request, keeps_versions=keeps_versions, prefix=prefix, lacks=lacks)
        opened.found[name] = opened.stack.enter_context(made)
    yield opened.found[name]


def empty(client: BaseClient, bucket: str, *, keeps_versions: bool) -> bool:
    """Delete all that a bucket has; False where that would take longer than another
    bucket.
    """
    for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()):
        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    while True:
        # Ozone answers a question for versions with none.
        if keeps_versions:
            page = client.list_object_versions(Bucket=bucket)
            rows = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
        else:
            rows = client.list_objects_v2(Bucket=bucket).get("Contents", [])
        if not rows:
            return True
        if len(rows) > _EMPTIED_MAX:
            return False
        names = [{name: row[name] for name in ("Key", "VersionId") if name in row} for row in rows]
        bulk = [one for one in names if one["Key"] == one["Key"].strip()]
        if bulk:
            client.delete_objects(Bucket=bucket, Delete={"Objects": bulk, "Quiet": True})
        # Parsers trim a key that has blanks around.
        for one in names:
            if one not in bulk:
                client.delete_object(Bucket=bucket, **one)


Opener = Callable[[pytest.FixtureRequest], AbstractContextManager[ContractStore]]
_MINISTACK = ContractLacks(refuses_small_parts=False, reads_tags_below_markers=False)
_OZONE = ContractLacks(lists_deletes_at_once=False)
_MOTO = ContractLacks(missing_upload=StoreUnavailableError)
# By name; each yields an empty store.
OPENERS: dict[str, Opener] = {
    "memory": memory_store,
    "memory_stitching": partial(memory_store, capabilities=STITCHING),
    "memory_unguarded": partial(memory_store, capabilities=UNGUARDED),
    "memory_declaring": partial(memory_store, capabilities=DECLARING),
    "local": local_store,
    "moto": partial(emptied_store, "moto_server", lacks=_MOTO, prefix="a%20b/c"),
    "moto_versions": partial(emptied_store, "moto_server", keeps_versions=True, lacks=_MOTO),
}


@contextmanager
def ozone_store(layout: BucketLayout, request: pytest.FixtureRequest) -> Iterator[ContractStore]:
    """A fresh bucket of a real Ozone by its OM and its gateway."""
    cluster: OzoneCluster = request.getfixturevalue("ozone_cluster")
    endpoint: S3Endpoint = request.getfixturevalue("ozone_gateway")
    opened: OpenedStores = request.getfixturevalue("opened_stores")
    memory = opened.memories.setdefault((endpoint, layout), GatewayMemory())
    with fresh_ozone_store(cluster.om_address, endpoint, layout, memory) as found:
        # An OM that writes its cache to disk may list a key once more: seen once.
        yield replace(found, lists_deletes_at_once=False)


@contextmanager
def fresh_ozone_store(
    om_address: str,
    endpoint: S3Endpoint,
    layout: BucketLayout,
    memory: ProbeMemory | None = None,
) -> Iterator[ContractStore]:
    """A fresh bucket by this OM and this gateway."""
    bucket, user = f"om-{secrets.token_hex(8)}", endpoint.access_key
    with closing(ManagerClient([om_address], user=user)) as manager:
        manager.create_bucket(ManagerBucket("s3v", bucket, layout, object_id=0, created_ms=0))
    address = f"ozone://{om_address}/s3v/{bucket}?s3={quote(endpoint.url, safe='')}"
    with (
        closing(s3_client(endpoint)) as client,
        open_ozone(address, may_write=True, client=client, user=user, memory=memory) as store,
    ):
        yield ContractStore(
            store,
            keeps_all_keys=layout is BucketLayout.OBJECT_STORE,
            tells_each_change=False,
            frees_names_at_once=False,
        )


@contextmanager
def ozone_twin_store(
    layout: BucketLayout, _request: pytest.FixtureRequest
) -> Iterator[ContractStore]:
    """The same of an Ozone in memory."""
    with (
        TwinService() as service,
        fresh_ozone_store(service.om_address, service.s3_endpoint, layout) as found,
    ):
        yield found


OPENERS["ozone_twin"] = partial(ozone_twin_store, BucketLayout.OBJECT_STORE)
OPENERS["ozone_twin_fso"] = partial(ozone_twin_store, BucketLayout.FILE_SYSTEM_OPTIMIZED)
_RGW = ContractLacks(completes_some_parts=False)
# Real stores and a second emulator, by the mark of the tests that run on them.
PEERS: dict[str, tuple[pytest.MarkDecorator, Opener]] = {
    "ministack": (
        pytest.mark.peers,
        partial(emptied_store, "ministack_server", lacks=_MINISTACK),
    ),
    "ministack_versions": (
        pytest.mark.peers,
        partial(emptied_store, "signing_ministack_server", keeps_versions=True, lacks=_MINISTACK),
    ),
    "rgw": (pytest.mark.peers, partial(emptied_store, "rgw_endpoint", lacks=_RGW)),
    "rgw_versions": (
        pytest.mark.peers,
        partial(emptied_store, "rgw_endpoint", keeps_versions=True, lacks=_RGW),
    ),
    "ozone": (pytest.mark.ozone, partial(emptied_store, "ozone_gateway", lacks=_OZONE)),
    "ozone_om": (pytest.mark.ozone, partial(ozone_store, BucketLayout.OBJECT_STORE)),
    "ozone_om_fso": (
        pytest.mark.ozone,
        partial(ozone_store, BucketLayout.FILE_SYSTEM_OPTIMIZED),
    ),
}


def changes_after(feed: ChangeFeed | None, after: FeedPosition | int = 0) -> list[Change]:
    """All changes after a position, or an index of the present log."""
    assert feed is not None
    position = after if isinstance(after, FeedPosition) else replace(feed.position(), index=after)
    found = list[Change]()
    while True:
        batch = feed.read(position)
        found += batch.changes
        if batch.position == position:
            return found
        position = batch.position


def put(store: Store, key: str, body: bytes = b"x") -> ObjectFacts:
    """Write an object without properties, whatever was there."""
    return store.writer.put(key, body, NOTHING, ANYTHING)


def content(store: Store, facts: ObjectFacts, first: int = 0, end: int | None = None) -> bytes:
    """The bytes of an object."""
    with store.reader.read(facts, first=first, end=end) as pieces:
        return b"".join(pieces)


def current(store: Store, key: str) -> ObjectFacts:
    """The object that exists now."""
    facts = store.reader.facts(key)
    assert facts is not None, key
    return facts


def keys(store: Store, prefix: str = "", start_after: str = "") -> list[str]:
    """All keys in the order of the listing."""
    return [facts.key for facts in store.lister.list_objects(prefix, start_after=start_after)]

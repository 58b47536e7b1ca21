"""Verifiers of buckets in this process, and the indexes of the other side."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from proof.index import WHOLE
from proof.item import Profile
from proof.root import SetRoot
from proof.stored_index import StoredIndex
from replicator.ledger import PairLedger
from replicator.origin import unmarked
from replicator.proven_sync import ProvenSync
from replicator.proving import PairProver
from replicator.refresh import IndexedBucket, RefreshProgress
from replicator.stores.opening import open_store
from replicator.stores.port import ObjectProperties, Store
from replicator.sync import SyncOptions, SyncReport
from replicator.verifier.client import VerifierClient
from replicator.verifier.config import ScrubSettings, VerifierConfig
from replicator.verifier.process import CALL_LIMITS, VerifierProcess
from runtime.call_limits import CallLimits
from runtime.disk import Disk
from runtime.progress import ProgressSink
from runtime.rate_limit import SystemClock
from tests.support.bucket_sync import Remarks
from tests.support.stores import ANYTHING

NO_SCRUB = ScrubSettings(enabled=False)


def config_of(folder: Path, bucket: str, *, writes: bool = True) -> VerifierConfig:
    """Settings of a verifier on a free port, which scrubs nothing by itself."""
    return VerifierConfig(
        bucket=bucket,
        state_folder=folder,
        listen="127.0.0.1:0",
        writes=writes,
        scrub=NO_SCRUB,
    )


@contextmanager
def verifier_of(
    config: VerifierConfig, limits: CallLimits = CALL_LIMITS
) -> Iterator[VerifierClient]:
    """A running verifier, and a client of it."""
    process = VerifierProcess(config, limits)
    client = VerifierClient(process.address)
    try:
        yield client
    finally:
        client.close()
        process.stop()


@dataclass
class VerifiedPair:
    """A source with its index, and a target behind a verifier. The target's own store
    is for looks at it, and for damage.
    """

    source: Store
    target: Store
    bucket: IndexedBucket
    client: VerifierClient
    folder: Path

    @property
    def profile(self) -> Profile:
        """What both sides compare by."""
        return self.bucket.profile

    def refresh_source(self) -> RefreshProgress:
        """Bring the source's index up to date."""
        return self.bucket.refresher(lambda: False).refresh()

    def sync(self, *, delete: bool = False, prefix: str = "") -> SyncReport:
        """A run of the sync, near the source."""
        with self.opened_sync(SyncOptions(prefix=prefix, delete=delete)) as run:
            return run.execute(run.plan())

    @contextmanager
    def opened_sync(
        self, options: SyncOptions, progress: ProgressSink | None = None
    ) -> Iterator[ProvenSync]:
        """A sync that has not begun."""
        with (
            PairLedger(
                self.folder / "ledger", source=self.source.address, target=self.target.address
            ) as ledger,
            ProvenSync(
                self.bucket,
                self.target,
                ledger,
                self.client,
                options,
                progress=progress or Remarks(),
                clock=SystemClock(),
                sleep=lambda _s: None,
                is_cancelled=lambda: False,
            ) as run,
        ):
            yield run

    def prover(self, prefix: str = "") -> PairProver:
        """What compares this pair."""
        return PairProver(self.bucket, self.client, prefix=prefix, stopped=lambda: False)


@contextmanager
def verified_pair(
    folder: Path, target: str = "", *, writes: bool = True, limits: CallLimits = CALL_LIMITS
) -> Iterator[VerifiedPair]:
    """Two buckets, local unless an address is given for the target."""
    with ExitStack() as stack:
        source = stack.enter_context(
            open_store(f"local:{folder / 'source'}", may_write=True, create=True)
        )
        address = target or f"local:{folder / 'target'}"
        store = stack.enter_context(open_store(address, may_write=True, create=True))
        config = config_of(folder / "verifier", address, writes=writes)
        client = stack.enter_context(verifier_of(config, limits))
        profile = client.describe().profile
        index = StoredIndex(folder / "index", profile, disk=Disk())
        stack.callback(index.close)
        bucket = IndexedBucket(source, index, profile, SystemClock())
        yield VerifiedPair(source, store, bucket, client, folder)


def fill(store: Store, count: int, *, seed: int = 1, prefix: str = "") -> None:
    """Write objects of various sizes, metadata and tags."""
    chance = random.Random(seed)
    for number in range(count):
        properties = ObjectProperties(
            metadata=(("number", str(number)),),
            tags=(("kind", "even"),) if number % 2 == 0 else (),
            headers=(("content-type", "text/plain"),) if number % 3 == 0 else (),
        )
        size = chance.choice([0, 1, 100, 5_000, 40_000])
        store.writer.put(f"{prefix}{number:05}-é", chance.randbytes(size), properties, ANYTHING)


def root_of(index: StoredIndex) -> SetRoot:
    """The root of all items."""
    with index.snapshot() as snapshot:
        return snapshot.roots([WHOLE])[0]


def held(store: Store) -> dict[str, tuple[bytes, ObjectProperties]]:
    """All that a store has, without the marks of copies."""
    found = {}
    for facts in store.lister.list_objects(""):
        properties = store.reader.properties(facts.key)
        properties = replace(properties, metadata=unmarked(properties.metadata))
        with store.reader.read(facts) as pieces:
            found[facts.key] = b"".join(pieces), properties
    return found

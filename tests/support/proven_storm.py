"""Everything that may happen to a sync with a verifier, drawn by a seed.

Writers change the source at every moment, and now and then a stranger the target. Both
stores fail before and after they acted. The link loses, repeats, delays and cuts.
Syncer and verifier are killed at any step. Clocks jump. Bytes rot behind the target's
own index.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from merkle.errors import ReconcileError
from proof.item import HashAlgorithm, Profile
from proof.receipts import verify_chain
from replicator.copier import CopierLimits
from replicator.copy_task import CopyLimits
from replicator.pair_receipts import PairReceipts
from replicator.proven_sync import ProvenSync
from replicator.proving import PairProof, PairProver, level_text
from replicator.refresh import READ_ALL_S, IndexedBucket, groups_of
from replicator.stores.errors import StoreUnavailableError
from replicator.sync import SyncOptions, SyncReport
from replicator.verifier.server import VerifierService
from runtime.disk import Disk
from runtime.retry import Backoff
from tests.support.bucket_sync import ChanceExecutor, InlineExecutor
from tests.support.kill_points import KillableLedger, KilledError, KillSwitch
from tests.support.memory_store import (
    DECLARING,
    MEMORY,
    UNGUARDED,
    UNPROVEN,
    MemoryStore,
    StoreFaults,
)
from tests.support.proof_observer import ProofObserver, WatchedStore
from tests.support.storm_writers import StormWriters
from tests.support.verifier_link import (
    IndexHome,
    Life,
    LinkFaults,
    VerifierHost,
    VerifierKilledError,
    VerifierLink,
)

KINDS = (MEMORY, UNPROVEN, UNGUARDED, DECLARING, replace(MEMORY, creates_conditionally=False))
KEYS = tuple(f"k{number}" for number in range(7))
_CHANCE = random.Random(1)
# Few, so that a content often comes back, and others of equal size are common.
BODIES = (b"", b"a" * 5, b"b" * 5, *map(_CHANCE.randbytes, (300, 600_000)))
LARGE = _CHANCE.randbytes((1 << 20) + 70_000)
LIMITS = CopyLimits(part_bytes=512 << 10)
ONE_THREAD = CopierLimits(objects=1, parts=1, memory_bytes=8 << 20)
ALGORITHMS = (HashAlgorithm.BLAKE3, HashAlgorithm.MD5, None)
# A bit that no writer flips.
_ROT = 0x80
_IN_ORDER = ("object", "part", "long-call", "far-refresh")


@dataclass(frozen=True)
class Parts:
    """What is under test, or a version of it with a rule broken."""

    sync: type[ProvenSync] = ProvenSync
    prover: type[PairProver] = PairProver
    service: Callable[..., VerifierService] = VerifierService
    bucket: type[IndexedBucket] = IndexedBucket


class JumpingClock:
    """A clock that is set forwards and backwards. It shows no time twice and no whole
    second: nothing but its time tells two writes of the same bytes apart.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now_ms = 1_700_000_000_001
        self._shown = set[int]()
        self._steps = 0

    def now_ms(self) -> int:
        """See Clock."""
        self._now_ms += self._rng.choice([0, 1, 1, 1000, -5_000, 3_600_000, -3_600_000])
        while self._now_ms in self._shown or self._now_ms % 1000 == 0:
            self._now_ms += 1
        self._shown.add(self._now_ms)
        return self._now_ms

    def monotonic_s(self) -> float:
        """See Clock."""
        self._steps += 1
        return self._steps / 10


class ProvenStorm:
    """A pair of buckets, the target with a verifier, and all that befalls them."""

    def __init__(self, seed: int, folder: Path, parts: Parts = Parts()) -> None:
        """Its state folders are made in `folder`."""
        self.rng = rng = random.Random(seed)
        self._parts, self._folder = parts, folder
        capabilities = rng.choice(KINDS)
        # With few keys and contents each often becomes again what it was.
        self._is_dense = rng.random() < 0.5
        self._keys = KEYS[: 2 + rng.randrange(2)] if self._is_dense else KEYS
        bodies = BODIES[1:3] if self._is_dense else BODIES
        if not self._is_dense and rng.random() < 0.3:
            bodies = (*BODIES, LARGE, LARGE)
        self.clocks = JumpingClock(rng), JumpingClock(rng)
        self.source = MemoryStore("memory:a", MEMORY, now_ms=self.clocks[0].now_ms)
        self.target = WatchedStore(
            "memory:b",
            capabilities,
            now_ms=self.clocks[1].now_ms,
            says_little=rng.random() < 0.5,
            page_keys=rng.choice((1, 3)),
        )
        groups = groups_of(self.target.capabilities)
        self.profile = Profile(b"s" * 32, rng.choice(ALGORITHMS), groups)
        for name in ("source-index", "target-index", "state"):
            (folder / name).mkdir(parents=True)
        self._home = IndexHome(folder / "source-index", self.profile)
        self.host = VerifierHost(
            IndexHome(folder / "target-index", self.profile),
            self.target.store(),
            self.clocks[1],
            self._new_executor,
            lambda: self._strike_verifier(),
            parts.service,
            parts.bucket,
        )
        self.link = VerifierLink(self.host)
        self.observer = ProofObserver(
            self.source, self.target, self.profile, lambda: self.link.run, self._guards
        )
        self._life = Life(KilledError)
        self._writers = StormWriters(
            rng, self.source, self.target, bodies=bodies, is_dense=self._is_dense
        )
        self._is_nested = self._is_blowing = False
        self.kills = 0
        self._may_kill = rng.random() < 0.7
        self._changes = rng.choice([0.03, 0.06] if self._is_dense else [0.0, 0.01, 0.05])
        self.runs = 10 if self._is_dense else 5
        self._errors = rng.choice((0.0, 0.002, 0.008))
        self._faults = rng.choice((0.0, 0.005, 0.03))

    def _guards(self) -> bool:
        """Whether the verifier writes now, where nothing else may come between. Without
        hashes an item is any object of its size.
        """
        can = self.target.capabilities
        return (
            bool(self.link.method)
            and can.creates_conditionally
            and can.replaces_conditionally
            and self.profile.algorithm is not None
        )

    def blow(self) -> None:
        """Let everything go on at each operation from now on."""
        self._is_blowing = True
        self.source.faults = StoreFaults(lambda *_: self._strike(), self._after_source)
        self.target.faults = StoreFaults(lambda *_: self._strike(), self._after_target)
        chance = self.rng.random
        self.link.faults = LinkFaults(
            loses=lambda: chance() < self._faults,
            forgets=lambda: chance() < self._faults,
            repeats=lambda: chance() < 2 * self._faults,
            ahead=lambda: self.rng.randrange(3),
        )

    def calm(self) -> None:
        """Let nothing happen any more; what is on its way arrives."""
        self._is_blowing = False
        self.source.faults = StoreFaults()
        self.target.faults = StoreFaults(after=self._after_target)
        self.link.faults = LinkFaults()
        while self.link.late:
            self.link.deliver_late()

    def forget_appeared(self) -> None:
        """Both sides have been listed: what is there was seen."""
        self._writers.appeared.clear()

    def change(self) -> None:
        """One of the writers changes one key of the source, or somebody else one of the
        target, or a bit rots there.
        """
        key, chance = self.rng.choice(self._keys), self.rng.random()
        if chance < 0.05:
            self._rot(key)
        elif chance < (0.4 if self._is_dense else 0.15):
            self.target.is_foreign = True
            self._writers.change_target(key)
            self.target.is_foreign = False
        else:
            # What often becomes again what it was is what deceives a listing.
            acts = (0, 1, 3, 3, 3, 3) if self._is_dense else (0, 1, 2, 3)
            self._writers.change_source(key, acts)
        self.observer.look(key)

    def scrub(self) -> None:
        """The verifier reads by itself, or lists."""
        life = self.host.life
        if life.is_over or self.host.lock.is_held or self._is_nested or self.link.method:
            return
        self._is_nested, self.link.method = True, "scrub"
        try:
            refresher = self.host.bucket.refresher(lambda: life.is_over)
            if self.rng.random() < 0.5:
                refresher.scrub(read_since_s=self.clocks[1].now_ms() // 1000)
            else:
                refresher.refresh()
        except (VerifierKilledError, ReconcileError):
            self.observer.forgot()
        finally:
            self._is_nested, self.link.method = False, ""

    def try_sync(self) -> SyncReport | None:
        """One run of the sync; None if it was killed or failed."""
        try:
            return self.sync()
        except (KilledError, ReconcileError):
            return None

    def sync(self) -> SyncReport:
        """One run of the sync, whose report is checked."""
        self.link.run = self.observer.begin_run()
        life = self._life = Life(KilledError)
        state = self._folder / "state"
        client = self.link.client()
        assert client.describe().profile == self.profile
        with KillableLedger(
            state, source=self.source.address, target=self.target.address
        ) as ledger:
            ledger.switch = _Switch(self._strike_syncer)
            bucket = self._source_bucket(life)
            with self._parts.sync(
                bucket,
                self.target.store(),
                ledger,
                client,
                self._options(),
                progress=self.observer,
                clock=self.clocks[0],
                sleep=lambda _s: None,
                is_cancelled=lambda: False,
                new_executor=InlineExecutor,
            ) as run:
                report = run.execute(run.plan())
                receipt = run.receipt()
                assert receipt is None or receipt.is_equal == report.equal
                if receipt is not None:
                    PairReceipts(state, Disk()).append(receipt)
        self.observer.check(report)
        return report

    def verify(self, *, read: bool) -> PairProof:
        """Compare both sides as `treefold bucket verify` does."""
        life = self._life = Life(KilledError)
        bucket = self._source_bucket(life)
        prover = self._parts.prover(bucket, self.link.client(), stopped=lambda: False)
        self.observer.begin("refresh", None, "keys")
        proof = prover.settle(read_since_s=READ_ALL_S if read else 0)
        level = level_text(proof.comparison, self.profile)
        self.observer.check_equal(level, is_equal=proof.is_equal)
        return proof

    def check_receipts(self) -> int:
        """The chain is whole; how many records it has."""
        receipts = PairReceipts(self._folder / "state", Disk())
        data = receipts.path.read_bytes() if receipts.path.exists() else b""
        report = verify_chain(data, trusted=frozenset({receipts.public_key}))
        assert report.broken is None
        return report.head.records

    def _options(self) -> SyncOptions:
        return SyncOptions(
            delete=True,
            copy_limits=LIMITS,
            copier_limits=ONE_THREAD,
            backoff=Backoff(attempts_max=3, first_s=0, jitter_s=0),
        )

    def _source_bucket(self, life: Life) -> IndexedBucket:
        return self._parts.bucket(
            self.source.store(),
            self._home.open(life, self._strike_syncer),
            self.profile,
            self.clocks[0],
            new_executor=self._new_executor,
        )

    def _new_executor(self, threads: int, name: str) -> InlineExecutor | ChanceExecutor:
        return InlineExecutor(threads, name) if name in _IN_ORDER else ChanceExecutor(self.rng)

    def _strike(self) -> None:
        """Something may happen before or after an operation of a store."""
        life = self.host.life if self.link.method else self._life
        life.check()
        if self.rng.random() < self._changes:
            self.change()
        if self.link.late and not self._is_nested and self.rng.random() < 0.05:
            self._is_nested = True
            self.link.deliver_late()
            self._is_nested = False
        if self.rng.random() < 0.01:
            self.scrub()
        life.check()
        if self.link.method:
            self._strike_verifier()
        else:
            self._strike_syncer()
        if self.rng.random() < self._errors:
            self._forget_if_refreshing()
            raise StoreUnavailableError("500")

    def _after_source(self, operation: str, _key: str) -> None:
        if operation == "list":
            self.observer.listed()
        self._strike()

    def _after_target(self, operation: str, key: str) -> None:
        if operation == "list" and self.link.method.endswith("/Refresh"):
            self.observer.listed()
        if operation == "read" and self._is_refreshing():
            self.observer.read(key)
        if self._is_blowing:
            self._strike()

    def _is_refreshing(self) -> bool:
        return self.link.method.endswith(("/Refresh", "scrub"))

    def _forget_if_refreshing(self) -> None:
        if self._is_refreshing():
            self.observer.forgot()

    def _strike_verifier(self) -> None:
        if self._kills():
            self.observer.forgot()
            self.host.kill()

    def _strike_syncer(self) -> None:
        self._life.check()
        if self._kills():
            self._life.end()

    def _kills(self) -> bool:
        is_over = self._is_blowing and self._may_kill and self.rng.random() < self._errors / 3
        self.kills += is_over
        return is_over

    def _rot(self, key: str) -> None:
        found = self.target.objects.get(key)
        if found and found.body:
            at = self.rng.randrange(len(found.body))
            flipped = bytes([found.body[at] ^ _ROT])
            self.observer.rotted(key, found.body[:at] + flipped + found.body[at + 1 :])


class _Switch(KillSwitch):
    """Passes its points on."""

    def __init__(self, point: Callable[[], None]) -> None:
        super().__init__(None)
        self._pass = point

    def point(self, *_where: str) -> None:
        """Pass a point, or end."""
        self._pass()

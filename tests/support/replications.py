"""A replication between two stores, driven step by step in one thread."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from replicator.copier import CopierLimits
from replicator.origin import unmarked
from replicator.replication import Checkpoint, Policy, PolicyId, ReplicationOptions, SyncerId
from replicator.stores.errors import StoreError
from replicator.stores.port import ObjectProperties, Store
from replicator.syncer.engine import ReplicationEngine
from replicator.syncer.lease import Lease, LocalLease
from replicator.syncer.limits import EngineLimits
from replicator.verifier.client import VerifierClient
from runtime.disk import Disk
from runtime.retry import Backoff
from tests.support.bucket_sync import LIMITS, InlineExecutor
from tests.support.memory_store import MemoryStore

T = TypeVar("T")
SYNCER, POLICY = SyncerId("syncer-1"), PolicyId("policy-1")
P = ParamSpec("P")


def held(store: MemoryStore) -> dict[str, tuple[bytes, ObjectProperties]]:
    """What a store has of each key, without the marks of copies."""
    return {
        key: (one.body, replace(one.properties, metadata=unmarked(one.properties.metadata)))
        for key, one in store.objects.items()
    }


def failing(store: MemoryStore, error: StoreError, names: set[str]) -> Callable[[], None]:
    """Let operations of a store fail until the returned function is called."""

    def before(name: str, _key: str) -> None:
        if name in names:
            raise error

    store.faults = replace(store.faults, before=before)

    def mend() -> None:
        store.faults = replace(store.faults, before=lambda _name, _key: None)

    return mend


class StepClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000
        self.monotonic = 1_000.0

    def now_ms(self) -> int:
        """See Clock."""
        return self.ms

    def monotonic_s(self) -> float:
        """See Clock."""
        return self.monotonic

    def pass_s(self, seconds: float) -> None:
        """Let time go by."""
        self.ms += int(seconds * 1000)
        self.monotonic += seconds


class LaterExecutor(Executor):
    """Keeps each call until a test runs it."""

    def __init__(self) -> None:
        self.waiting = deque[tuple[Future[object], Callable[[], object]]]()

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor."""
        future = Future[T]()
        self.waiting.append((future, partial(call, *args, **kwargs)))  # type: ignore[arg-type]
        return future

    def run(self, at: int = 0) -> None:
        """Run one of the calls that wait."""
        self.waiting.rotate(-at)
        future, call = self.waiting.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - a future takes any
            future.set_exception(error)


def step_limits() -> EngineLimits:
    """Few threads, and no attempt but the first: a test decides what fails."""
    return EngineLimits(
        copier=CopierLimits(objects=2, parts=1, memory_bytes=1 << 20),
        copy=LIMITS,
        backoff=Backoff(attempts_max=1, first_s=0, jitter_s=0),
        wait_s=0.0,
    )


class SteppedEngine(ReplicationEngine):
    """An engine that lets its clock go by where it would sleep."""

    def _sleep(self, seconds: float) -> None:
        assert isinstance(self._clock, StepClock)
        self._clock.pass_s(seconds)


@dataclass
class Replication:
    """One replication that a test steps. Its copies run where they are submitted, or
    when the test says so: what the threads in `run_later` would do.
    """

    source: Store
    target: Store
    parent: Path
    options: ReplicationOptions = field(default_factory=ReplicationOptions)
    prefixes: tuple[str, ...] = ()
    lease: Lease = field(default_factory=LocalLease)
    clock: StepClock = field(default_factory=StepClock)
    limits: EngineLimits = field(default_factory=step_limits)
    checkpoint: Checkpoint | None = None
    later: LaterExecutor | None = None
    run_later: frozenset[str] = frozenset({"change"})
    disk: Disk | None = None
    syncer: SyncerId = SYNCER
    policy_id: PolicyId = POLICY
    verifier: VerifierClient | None = None

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin, or begin again as another process."""
        self.policy = Policy(
            self.policy_id, self.source.address, self.target.address, self.prefixes, self.options
        )
        self.engine = (ReplicationEngine if self.later is None else SteppedEngine)(
            self.policy,
            self.source,
            self.target,
            parent=self.parent,
            syncer=self.syncer,
            lease=self.lease,
            checkpoint=self.checkpoint,
            clock=self.clock,
            limits=self.limits,
            disk=self.disk,
            new_executor=self._executor,
            verifier=self.verifier,
        )

    def failed_keys(self) -> set[str]:
        """The keys that failed and are tried again."""
        return {one.key for one in self.engine.report().failed_keys}

    def kill(self) -> None:
        """End as a killed process does: nothing is finished, locks are free."""
        self.engine._ledger.close()
        self.engine._folder.close()

    def change(self, **changes: object) -> None:
        """The operator wants something else."""
        self.policy = replace(self.policy, revision=self.policy.revision + 1, **changes)  # type: ignore[arg-type]
        self.engine.change(self.policy)

    def step(self, seconds: float = 0.1) -> None:
        """Read the log, do a unit of work, and let time go by."""
        self.engine.receive()
        self.engine.work()
        self.clock.pass_s(seconds)

    def run(self, steps: int = 300, *, seconds: float = 0.1) -> None:
        """Some steps."""
        for _ in range(steps):
            self.step(seconds)

    def _executor(self, _threads: int, name: str) -> Executor:
        if name in self.run_later and self.later is not None:
            return self.later
        return InlineExecutor(1, name)

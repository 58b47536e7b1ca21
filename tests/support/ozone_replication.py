"""Replications between buckets of real Ozone clusters: master, syncers and the
commands of an operator.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from types import TracebackType
from typing import Self

from ozone.manager_values import BucketLayout
from replicator.master.client import MasterClient
from replicator.replication import Policy, PolicyId, ReplicationOptions, Stage
from replicator.stores.port import Store
from tests.support.mixed_load import BucketWatch, MixedLoad
from tests.support.ozone import OzoneCluster
from tests.support.ozone_buckets import OzoneBuckets
from tests.support.processes import TreefoldProcess
from tests.support.s3_servers import S3Endpoint
from tests.support.syncers import master_process, syncer_process
from tests.support.waiting import wait_until

FLAT, TREE = BucketLayout.OBJECT_STORE, BucketLayout.FILE_SYSTEM_OPTIMIZED
# A cluster on two busy cores takes its time.
_SETTLE_S = 120.0


@dataclass(frozen=True)
class Side:
    """A cluster, and fresh buckets of it."""

    cluster: OzoneCluster
    endpoint: S3Endpoint
    buckets: OzoneBuckets


@contextmanager
def two_sides(*clusters: OzoneCluster) -> Iterator[tuple[Side, ...]]:
    """Clusters that share nothing."""
    with ExitStack() as stack:
        sides = list[Side]()
        for cluster in clusters:
            # Without security it takes any credentials, so those of an emulator.
            endpoint = S3Endpoint(f"http://{cluster.s3_address}", "test", "test")
            buckets = stack.enter_context(OzoneBuckets(cluster, endpoint))
            sides.append(Side(cluster, endpoint, buckets))
        yield tuple(sides)


class LoadedPair:
    """A source that is written to, and a target whose log is followed; a context
    manager that ends both.
    """

    def __init__(self, ours: Side, theirs: Side, layout: BucketLayout, seed: int) -> None:
        """`ours` gets the source, `theirs` the target."""
        buckets = ours.buckets
        self.source, self.target = buckets.fresh(layout), theirs.buckets.fresh(layout)
        place = buckets.place(self.source)
        self.load = MixedLoad(self.source, buckets.manager, place, seed=seed)
        self.watch = BucketWatch(self.target)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.watch)
        self._stack.enter_context(self.load)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


class Replications:
    """A master and syncers as processes; a context manager that ends them. They take
    the credentials of our environment.
    """

    def __init__(self, folder: Path, *, syncers: int = 1) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._count = syncers
        self._syncers = dict[str, TreefoldProcess]()
        self._names = dict[str, str]()

    def __enter__(self) -> Self:
        master = self._stack.enter_context(master_process(self._folder / "master"))
        self.address = master.address()
        self.client = MasterClient([self.address])
        self._stack.callback(self.client.close)
        for number in range(self._count):
            self._start(f"syncer-{number}")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for process in self._syncers.values():
            process.__exit__(None, None, None)

    def add(self, name: str, source: str, target: str, *, interval_s: float = 60.0) -> None:
        """Begin to replicate."""
        options = ReplicationOptions(interval_s=interval_s)
        policy = Policy(PolicyId(name), source, target, options=options)
        self.client.add_policy(policy, "a test")

    def await_stage(self, name: str, stage: Stage) -> None:
        """Wait until a replication is so far."""

        def is_there() -> bool:
            report = self.client.replication(PolicyId(name)).state.report
            return report is not None and report.checkpoint.stage is stage

        wait_until(is_there, f"{name} is {stage.value}", timeout_s=_SETTLE_S)

    def holder(self, name: str) -> str:
        """The syncer that has a replication, by its name here; empty for none."""
        found = self.client.replication(PolicyId(name)).state.holder
        return self._names.get(found.syncer_id, "") if found else ""

    def kill(self, syncer: str) -> None:
        """As a crash does, and start it again."""
        process = self._syncers[syncer]
        process.stop(SIGKILL)
        self._start(syncer)

    def _start(self, name: str) -> None:
        folder = self._folder / name
        process = syncer_process(folder, [self.address])
        self._syncers[name] = process
        process.address()
        self._names[(folder / "state" / "syncer_uuid").read_text().strip()] = name

    def await_settled(self, name: str, source: Store) -> None:
        """Wait until all that the source's log has is at the target."""
        assert source.feed is not None
        newest = source.feed.position().index

        def is_settled() -> bool:
            report = self.client.replication(PolicyId(name)).state.report
            # Before that the position says from where the log is followed.
            if report is None or report.checkpoint.stage is not Stage.LIVE:
                return False
            position = report.checkpoint.position
            return position is not None and position.index >= newest

        wait_until(is_settled, f"{name} has everything", timeout_s=_SETTLE_S)

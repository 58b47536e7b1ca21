"""A replication from a bucket of Ozone to a store in memory, which a test steps."""

from dataclasses import dataclass
from pathlib import Path

from replicator.replication import Stage
from replicator.stores.port import FeedPosition, Store
from tests.support.memory_store import MemoryStore
from tests.support.replications import Replication
from tests.support.stores import content
from tests.support.waiting import wait_until


@dataclass
class OzoneFollower:
    """It has followed the log until the test goes on without it."""

    source: Store
    target: MemoryStore
    replication: Replication

    @classmethod
    def live(
        cls, source: Store, parent: Path, *, target: MemoryStore | None = None
    ) -> "OzoneFollower":
        """One whose target is equal, and that follows the log from now on."""
        target = target or MemoryStore("memory:b", renames=True)
        made = cls(source, target, Replication(source, target.store(), parent))
        made.settle()
        made.await_live()
        return made

    def settle(self) -> int:
        """Step until the target has what the source has; the bytes that were sent."""
        before = self.replication.engine.report().sent_bytes
        wanted = {
            facts.key: content(self.source, facts) for facts in self.source.lister.list_objects("")
        }

        def is_equal() -> bool:
            self.replication.run(5)
            return self.target.bodies() == wanted

        wait_until(is_equal, "the target has what the source has", timeout_s=60.0)
        return self.replication.engine.report().sent_bytes - before

    def position(self) -> FeedPosition:
        """Up to where the log is applied."""
        found = self.replication.engine.report().checkpoint.position
        assert found is not None
        return found

    def await_live(self) -> None:
        """Step until the log is followed."""

        def is_live() -> bool:
            self.replication.run(5)
            return self.replication.engine.report().checkpoint.stage is Stage.LIVE

        wait_until(is_live, "the log is followed")

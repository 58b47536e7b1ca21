"""Datanodes with real volumes in one process: each its store and runner, the others its
peers without a network.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from dnagent.store import ReplicaStore
from dnagent.volumes import ManagedVolume
from merkle.outcome import RepairOutcome
from merkle.replica import PeerId
from merkle.tree import ContainerId
from ozone.volume import Hold, open_volume
from repair.ports import Peer
from repair.requests import ReconcileOptions
from repair.runner import RepairJob, Runner
from runtime.disk import Disk
from runtime.retry import Backoff
from tests.support.peers import MemoryPeer, MemorySource

UNDO_BYTES = 256 << 20


@dataclass
class Datanode:
    """One datanode; `audit` holds a line for each write, `unread` how many bytes each
    wrote over unseen.
    """

    name: PeerId
    store: ReplicaStore
    held: ManagedVolume
    runner: Runner
    audit: list[tuple[int, int, int, int, str, str]] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)

    def peer(self) -> MemoryPeer:
        """This datanode as others see it."""
        return MemoryPeer(self.name, cast(MemorySource, self.store))


@contextmanager
def datanodes(
    roots: Mapping[str, Path],
    state: Path,
    *,
    disks: Mapping[str, Disk] | None = None,
    undo_bytes: int = UNDO_BYTES,
) -> Iterator[dict[str, Datanode]]:
    """Hold these volumes as owner, one a datanode."""
    with ExitStack() as stack:
        nodes = {}
        for name, root in roots.items():
            disk = (disks or {}).get(name, Disk())
            volume = stack.enter_context(
                open_volume(root, hold=Hold.OWNER, state_folder=state / name, disk=disk)
            )
            held = ManagedVolume(volume, disk, undo_bytes=undo_bytes)
            lines: list[tuple[int, int, int, int, str, str]] = []
            hidden: list[int] = []

            def audit(
                *,
                container: int,
                block: int,
                offset: int,
                length: int,
                source: str,
                job: str,
                unread: int,
                lines: list[tuple[int, int, int, int, str, str]] = lines,
                hidden: list[int] = hidden,
            ) -> None:
                lines.append((container, block, offset, length, source, job))
                hidden.append(unread)

            runner = Runner(
                PeerId(name),
                threads_max=4,
                audit=audit,
                backoff=Backoff(attempts_max=2, first_s=0, jitter_s=0),
            )
            stack.callback(runner.close)
            nodes[name] = Datanode(
                PeerId(name), ReplicaStore([held], repair_enabled=True), held, runner, lines, hidden
            )
        yield nodes


def reconcile(
    nodes: Mapping[str, Datanode],
    name: str,
    container_id: int,
    *,
    peers: Mapping[PeerId, Peer] | None = None,
    options: ReconcileOptions | None = None,
) -> RepairOutcome:
    """Let one datanode reconcile a container with all others, or with the peers
    given.
    """
    node = nodes[name]
    others = {other.name: other.peer() for other in nodes.values() if other is not node}
    return node.runner.run(
        RepairJob("job-1", ContainerId(container_id), options or ReconcileOptions()),
        lambda cancelled: node.store.open_replica(
            ContainerId(container_id), "job-1", cancelled=cancelled, on_bytes=lambda _: None
        ),
        others if peers is None else peers,
    )

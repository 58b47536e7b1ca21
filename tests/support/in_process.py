"""Datanodes with real volumes in one process: each its store and runner, the others its
peers without a network.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import cast

from dnagent.store import ReplicaStore
from dnagent.volumes import ManagedVolume
from merkle.outcome import RepairOutcome
from merkle.replica import PeerId, ReplicaState
from merkle.tree import ContainerId
from ozone.volume import Hold, open_volume
from repair.ports import Peer
from repair.requests import ReconcileOptions
from repair.runner import RepairJob, Runner
from runtime.disk import Disk
from runtime.retry import Backoff
from scm.jobs import Job
from scm.policy import Roots, roots
from tests.support.peers import MemoryPeer, MemorySource
from tests.support.whole_job import whole_job

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


def scan_replica(node: Datanode, container_id: int) -> ReplicaState:
    """Scan one replica as an agent does; its state afterwards."""
    replica = node.store.open_replica(
        ContainerId(container_id), "scan", cancelled=Event(), on_bytes=lambda _: None
    )
    return replica.scan().state


def heal(nodes: Mapping[str, Datanode], container_id: int, rng: random.Random) -> Job:
    """One job; each of its rounds is carried out in some order, or at once."""
    options = ReconcileOptions(return_to=ReplicaState.CLOSED)

    def replicas() -> Roots:
        return roots(
            replace(node.held.replica(ContainerId(container_id)), peer=node.name)
            for node in nodes.values()
        )

    def carry_out(names: Sequence[PeerId]) -> dict[PeerId, RepairOutcome]:
        order = rng.sample(names, len(names))
        with ThreadPoolExecutor(rng.choice((1, len(names)))) as pool:
            outcomes = pool.map(
                lambda name: reconcile(nodes, name, container_id, options=options), order
            )
            return dict(zip(order, outcomes, strict=True))

    return whole_job(container_id, [node.name for node in nodes.values()], replicas, carry_out)

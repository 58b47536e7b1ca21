"""A cluster in one thread: the real controller and real repairs over replicas in
memory, driven by a seed.

Each step one thing happens, chosen by the seed: a heartbeat or its answer arrives
(late, twice, or never), time goes by at the controller, a request of a repair is
carried out, its answer arrives, a replica is damaged, an agent or the controller dies
half-way through a write, a block or a container is deleted, a replica is imported, a
client reads, a scan ends that began long ago. Observers know what was written to the
cluster and what was reported to the controller, and hold every change against it. A
storm of faults is followed by peace, in which the controller alone must bring every job
to its end, and one job must make the replicas of a container equal or name what cannot
be.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from merkle.checksum import ChecksumType
from merkle.record import BlockRecord
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from tests.support.cluster_control import OpenStore, Parts, chosen_rules
from tests.support.faults import CHANCES, Lie
from tests.support.observer import Commits, Written
from tests.support.peace import Peace
from tests.support.peers import Evil, MemoryReplica, chunk_record
from tests.support.simulated_network import SimulatedNetwork
from tests.support.simulated_repairs import SimulatedRepairs
from tests.support.simulated_world import Setup, World
from tests.support.storm import Storm

CONTAINERS = (ContainerId(7), ContainerId(8))
# How likely peace begins with every replica of a container damaged.
PIECES_CHANCE = 0.3
STORM_STEPS = 250
# Records that lack a checksum are believed only where no honest peer has the chunk.
LIES = (*Evil, *[Evil.RECORDS_CUT_SHORT] * 5)
# How likely a client commits a block once more without another chunk.
CLOSING_COMMIT_CHANCE = 0.3


class SimulatedCluster:
    """A world, and all that acts in it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.repairs = SimulatedRepairs(world)
        self.network = SimulatedNetwork(world, self.repairs)
        self.faults = Storm(world, self.repairs, self.network)
        self.peace = Peace(world, self.repairs, self.network, self.faults)

    def explained(self) -> AbstractContextManager[None]:
        """A failure within prints the scenario that led to it."""
        return self.world.explained(self.name)

    def storm(
        self, steps: int = STORM_STEPS, after_step: Callable[[], None] = lambda: None
    ) -> None:
        """Faults of all kinds between and during repairs."""
        with self.explained():
            self.faults.run(steps, after_step)

    def heal(self) -> None:
        """Faults end, and the controller heals what can be healed: see `Peace.heal`."""
        with self.explained():
            self.peace.heal()


def cluster_of_seed(
    seed: int,
    *,
    parts: Parts | None = None,
    marks: Counter[str] | None = None,
    open_store: OpenStore | None = None,
) -> SimulatedCluster:
    """The cluster of one seed before anything has happened."""
    rng = random.Random(seed)
    setup = drawn_setup(seed, rng)
    world = World(setup, rng, parts=parts, marks=marks, open_store=open_store)
    world.marks["two containers"] += len(setup.containers) > 1
    return SimulatedCluster(world, f"seed {seed}")


def simulate(
    seed: int,
    *,
    parts: Parts | None = None,
    marks: Counter[str] | None = None,
    open_store: OpenStore | None = None,
) -> SimulatedCluster:
    """One seed from beginning to end; a failure prints its scenario."""
    cluster = cluster_of_seed(seed, parts=parts, marks=marks, open_store=open_store)
    cluster.storm()
    cluster.heal()
    return cluster


def drawn_setup(seed: int, rng: random.Random) -> Setup:
    """What a seed starts with. The order of the draws is part of what a seed means."""
    containers = CONTAINERS[: 1 + (rng.random() < 0.2)]
    written: dict[BlockId, tuple[BlockRecord, bytes]] = {}
    commits: dict[BlockId, tuple[int, ...]] = {}
    for container_id in containers:
        blocks, of_chunks = write_once(seed, container_id, rng)
        written |= blocks
        commits |= of_chunks
    names = [PeerId(f"dn{i}") for i in range(rng.choice((3, 3, 3, 4, 5, 7)))]
    disks = {
        name: {
            container_id: _perhaps_behind(replica_of_written(written, container_id), commits, rng)
            for container_id in containers
        }
        for name in names
    }
    # Many seeds have most faults off, so that the rare ones are not drowned by the
    # common.
    chances = {fault: often * rng.choice((0, 0, 0.5, 1, 2)) for fault, often in CHANCES.items()}
    lies = {}
    if rng.random() < 0.4:
        for name in rng.sample(names, rng.randint(1, len(names) - 2)):
            lies[name] = Lie(rng.choice(LIES), forges=rng.random() < 0.2)
    fetches_max = rng.randint(1, 4)
    return_to_service = rng.random() < 0.6
    runs_max = rng.choice((1, 2))
    replicas_per_report = rng.choice((1, 50_000))
    # Who starts jobs: the controller, somebody who asks, or both.
    automatic, ask_chance = rng.choice(((True, 0.0), (True, 0.05), (False, 0.15)))
    return Setup(
        containers,
        written,
        commits,
        disks,
        chosen_rules(rng, automatic=automatic),
        chances,
        lies,
        fetches_max,
        return_to_service,
        runs_max,
        replicas_per_report,
        ask_chance,
        PIECES_CHANCE,
    )


def write_once(
    seed: int, container_id: ContainerId, rng: random.Random
) -> tuple[dict[BlockId, tuple[BlockRecord, bytes]], dict[BlockId, tuple[int, ...]]]:
    """What clients wrote: blocks of a few chunks of a few windows, of every checksum
    type, no two of one ID; and the commit of each chunk.

    Several clients write at once, so that the commits of one block lie between those of
    others.
    """
    written = {}
    for number in range(1, rng.randint(2, 5)):
        block_id = BlockId(container_id * 100 + number * 10)
        checksum_type = rng.choice(
            (
                ChecksumType.CRC32,
                ChecksumType.CRC32C,
                ChecksumType.MD5,
                ChecksumType.SHA256,
                ChecksumType.NONE,
            )
            if rng.random() < 0.2
            else (ChecksumType.CRC32, ChecksumType.CRC32C, ChecksumType.MD5)
        )
        window_bytes = rng.choice((8, 16))
        chunk_bytes = window_bytes * rng.randint(2, 4)
        length = rng.randint(1, 3 * chunk_bytes)
        data = random.Random(f"{seed}/{block_id}").randbytes(length)
        chunks = tuple(
            chunk_record(data[offset : offset + chunk_bytes], offset, checksum_type, window_bytes)
            for offset in range(0, length, chunk_bytes)
        )
        record = BlockRecord(container_id, block_id, 0, chunks, (("TYPE", "KEY"),))
        written[block_id] = record, data
    # Each chunk is one commit; some clients commit once more when they close a block.
    turns = [block_id for block_id, (record, _) in written.items() for _ in record.chunks]
    turns += [block_id for block_id in written if rng.random() < CLOSING_COMMIT_CHANCE]
    rng.shuffle(turns)
    made: dict[BlockId, list[int]] = {block_id: [] for block_id in written}
    for commit, block_id in enumerate(turns, start=1):
        made[block_id].append(commit)
    for block_id, (record, data) in written.items():
        written[block_id] = replace(record, bcs_id=made[block_id][-1]), data
    return written, {
        block_id: tuple(made[block_id][: len(record.chunks)])
        for block_id, (record, _) in written.items()
    }


def replica_of_written(written: Written, container_id: ContainerId) -> MemoryReplica:
    """A disk that holds all that clients wrote to a container, and no tree yet."""
    held = {b: block for b, block in written.items() if block[0].container_id == container_id}
    return MemoryReplica(
        container_id,
        records={block_id: record for block_id, (record, _) in held.items()},
        files={block_id: bytearray(data) for block_id, (_, data) in held.items()},
        bcs_id=max(record.bcs_id for record, _ in held.values()),
    )


def _perhaps_behind(stored: MemoryReplica, commits: Commits, rng: random.Random) -> MemoryReplica:
    """Some replicas were closed before the last commits came (quasi-closed ones), and
    some lack the last chunk of a block and, with it, every commit.
    """
    last = stored.bcs_id
    if rng.random() < 0.3 and last > 1:
        stored.bcs_id = rng.randrange(1, last)
        for block_id, record in list(stored.records.items()):
            held = sum(commit <= stored.bcs_id for commit in commits[block_id])
            if not held:
                del stored.records[block_id], stored.files[block_id]
                continue
            chunks = record.chunks[:held]
            is_closed = record.bcs_id <= stored.bcs_id
            commit = record.bcs_id if is_closed else commits[block_id][held - 1]
            stored.records[block_id] = replace(record, chunks=chunks, bcs_id=commit)
            del stored.files[block_id][chunks[-1].end :]
    elif rng.random() < 0.1:
        block_id = rng.choice(sorted(stored.records))
        record = stored.records[block_id]
        if len(record.chunks) > 1:
            stored.records[block_id] = replace(record, chunks=record.chunks[:-1], bcs_id=0)
            del stored.files[block_id][record.chunks[-1].offset :]
            stored.bcs_id = min(other.bcs_id for other in stored.records.values())
    return stored

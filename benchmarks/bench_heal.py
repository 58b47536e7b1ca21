"""The cost of healing a replica from its peers: `python -m benchmarks.bench_heal
[--json]`.

A container of 64 MiB is on three datanodes. Two are agents in their own processes; the
third is healed in this process, with the agent's store and runner, over gRPC on
loopback. The benchmark counts all fetched bytes: windows, trees and block records.

The time is compared with a full copy of the container over the same transport, which is
what replacing the replica would take: every chunk is fetched, verified, written and
made durable. The scan that finds the damage is not counted; the scan at the end of each
healing is.
"""

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from benchmarks.containers import (
    CHUNK_BYTES,
    WINDOW_BYTES,
    held,
    new_volume,
    serve_agent,
    write_container,
)
from benchmarks.measure import ROUNDS, Report, Samples
from dnagent.store import ReplicaStore
from dnagent.volumes import ManagedVolume
from merkle.checksum import ChecksumType, window_checksums
from merkle.columns import encode_tree
from merkle.outcome import OutcomeState, Verdict
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.ports import ByteRange
from ozone.repair_writer import RepairWriter
from protos.convert import record_to_bytes
from repair.peers import AgentPeer
from repair.ports import Peer, Piece
from repair.requests import ReconcileOptions
from repair.runner import RepairJob, Runner
from runtime.rpc import open_channel

CONTAINER = ContainerId(1)
BLOCKS, CHUNKS = 4, 4
BLOCK_BYTES = CHUNKS * CHUNK_BYTES
# Limits: windows fetched for a flipped byte, and all fetched bytes for lost data as a
# multiple of its size.
FLIP_BYTES_MAX = 64 << 10
LOST_RATIO_MAX = 1.05


@dataclass
class FetchedBytes:
    """The bytes fetched from all peers in one healing."""

    windows: int = 0
    trees: int = 0
    records: int = 0


class CountingPeer:
    """A peer (repair.ports.Peer) that counts the bytes it returns."""

    def __init__(self, peer: AgentPeer, fetched: FetchedBytes) -> None:
        self.peer_id = peer.peer_id
        self._peer = peer
        self._fetched = fetched

    def tree(self, container_id: ContainerId) -> ContainerTree:
        tree = self._peer.tree(container_id)
        self._fetched.trees += len(encode_tree(tree))
        return tree

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        records = self._peer.records(container_id, block_ids)
        self._fetched.records += sum(len(record_to_bytes(record)) for record in records.values())
        return records

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        for piece in self._peer.read(container_id, block_id, record_chunk, ranges):
            self._fetched.windows += len(piece.data)
            yield piece

    def close(self) -> None:
        self._peer.close()


def main(as_json: bool) -> None:
    report = Report("healing one replica of a 64 MiB container")
    with tempfile.TemporaryDirectory(prefix="treefold-bench-") as folder, ExitStack() as stack:
        root = Path(folder)
        for number in (1, 2, 3):
            new_volume(root / f"volume{number}", number)
            with held(root / f"volume{number}", root / f"state{number}") as (_, writer):
                write_container(
                    writer,
                    CONTAINER,
                    blocks=BLOCKS,
                    chunks=CHUNKS,
                    checksum_type=ChecksumType.CRC32C,
                )
        new_volume(root / "copy", 4)
        peers = [stack.enter_context(_AgentProcess(root, number)).peer for number in (2, 3)]
        volume, _ = stack.enter_context(held(root / "volume1", root / "state1"))
        _, copier = stack.enter_context(held(root / "copy", root / "state-copy"))
        _measure(report, volume, copier, peers)
    report.show(as_json=as_json)


class _AgentProcess:
    """An agent in its own process, and a connection to it."""

    def __init__(self, root: Path, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, theirs = context.Pipe()
        self._process = context.Process(
            target=serve_agent, args=(root / f"volume{number}", root / f"state{number}", theirs)
        )
        self._process.start()
        datanode_id, address = self._control.recv()
        self.peer = AgentPeer(PeerId(datanode_id), open_channel(address), address)

    def __enter__(self) -> "_AgentProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.peer.close()
        self._control.send(None)
        self._process.join()


def _measure(
    report: Report, volume: ManagedVolume, copier: RepairWriter, peers: Sequence[AgentPeer]
) -> None:
    store = ReplicaStore([volume], repair_enabled=True)
    runner = Runner(PeerId(volume.volume.datanode_id), threads_max=4, audit=_no_audit)
    damages: Mapping[str, Callable[[Path], None]] = {
        "one flipped byte": _flip,
        "one lost 4 MiB chunk": lambda path: os.truncate(path, BLOCK_BYTES - CHUNK_BYTES),
        "a lost file of 16 MiB": Path.unlink,
    }
    path = volume.containers.get(CONTAINER).block_path(BlockId(2))
    original = path.read_bytes()
    seconds: dict[str, list[float]] = {name: [] for name in (*damages, "copy")}
    bytes_fetched: dict[str, FetchedBytes] = {}
    # The first round is not counted: it warms connections, kernels and page cache.
    for number in range(ROUNDS + 1):
        for name, damage in damages.items():
            damage(path)
            _scan(store)
            fetched = FetchedBytes()
            start = time.perf_counter()
            _heal(store, runner, [CountingPeer(peer, fetched) for peer in peers])
            if number:
                seconds[name].append(time.perf_counter() - start)
            assert path.read_bytes() == original
            # Every round fetches the same bytes, only from other peers.
            assert number == 0 or bytes_fetched[name].windows == fetched.windows
            bytes_fetched[name] = fetched
        start = time.perf_counter()
        _copy(peers[number % len(peers)], copier)
        if number:
            seconds["copy"].append(time.perf_counter() - start)
        copier.delete_container(CONTAINER)
    runner.close()
    _report_bytes(report, bytes_fetched)
    copied = Samples("full copy from a peer", tuple(seconds["copy"]))
    for name in damages:
        report.add(f"{name}: time to heal", "s", Samples(name, tuple(seconds[name])), copied)


def _report_bytes(report: Report, fetched: Mapping[str, FetchedBytes]) -> None:
    def row(job: str, bytes_fetched: int, peer: str, peer_bytes: int, most: float | None) -> None:
        ours, other = Samples(job, (bytes_fetched,)), Samples(peer, (peer_bytes,))
        report.add(job, "bytes", ours, other, most=most)

    flip, chunk, file = (fetched[name] for name in fetched)
    container = BLOCKS * BLOCK_BYTES
    row("one flipped byte: windows", flip.windows, "64 KiB", FLIP_BYTES_MAX, 1)
    row(
        "one flipped byte: trees, block records",
        flip.trees + flip.records,
        "the container",
        container,
        None,
    )
    for name, lost, size in (
        ("one lost 4 MiB chunk", chunk, CHUNK_BYTES),
        ("a lost file of 16 MiB", file, BLOCK_BYTES),
    ):
        total = lost.windows + lost.trees + lost.records
        row(f"{name}: everything", total, "what was lost", size, LOST_RATIO_MAX)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(CHUNK_BYTES + 5 * WINDOW_BYTES + 77)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _scan(store: ReplicaStore) -> None:
    found = store.open_replica(CONTAINER, "scan", cancelled=Event(), on_bytes=lambda _: None).scan()
    assert found.findings


def _heal(store: ReplicaStore, runner: Runner, peers: Sequence[CountingPeer]) -> None:
    by_id: dict[PeerId, Peer] = {peer.peer_id: peer for peer in peers}
    outcome = runner.run(
        RepairJob("heal", CONTAINER, ReconcileOptions(return_to=ReplicaState.CLOSED)),
        lambda cancelled: store.open_replica(
            CONTAINER, "heal", cancelled=cancelled, on_bytes=lambda _: None
        ),
        by_id,
    )
    assert outcome.state is OutcomeState.DONE
    assert outcome.verdict is Verdict.REPAIRABLE
    assert outcome.replica_state is ReplicaState.CLOSED


def _copy(peer: AgentPeer, writer: RepairWriter) -> None:
    """Copy the whole container from a peer as a new replica."""
    writer.create_container(CONTAINER)
    block_ids = [block.block_id for block in peer.tree(CONTAINER).blocks]
    for block_id, record in peer.records(CONTAINER, block_ids).items():
        for chunk in record.chunks:
            parts = peer.read(
                CONTAINER, block_id, chunk, [ByteRange(chunk.offset, chunk.length_bytes)]
            )
            data = b"".join(piece.data for piece in parts)
            found = window_checksums(data, chunk.checksum_type, chunk.bytes_per_checksum)
            assert found == chunk.entries
            writer.write_chunk(CONTAINER, block_id, chunk.offset, data)
        assert writer.put_block(record)
    writer.close(CONTAINER)


def _no_audit(
    *, container: int, block: int, offset: int, length: int, source: str, job: str, unread: int
) -> None:
    pass


if __name__ == "__main__":
    main("--json" in sys.argv[1:])

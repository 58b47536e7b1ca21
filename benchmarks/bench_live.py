"""Reading and healing a running cluster without agents.

    python -m benchmarks.bench_live [--ozone] [--json]

The cluster is the twin of the tests, in a process of its own: SCM and three datanodes,
with Ozone's protocols on loopback. With `--ozone` it is a real Ozone cluster
(tests/testbed/ozone_cluster.py), the running one of $OZONE_RUNNING if it is set.

- `trees`: containers of at most 20 blocks with three replicas each, whose trees are
  read from the datanodes, parsed and compared; in containers a second, and in
  milliseconds of the processor for one: of ours, and of the cluster's processes.
- `deep verify`: all data of a replica read and every window checked, beside the same
  read unchecked, in the same process; in MB a second.
- `rescue`: `treefold rescue` of a container whose three replicas have the same chunk
  damaged, each in another window: bytes read from the cluster for a byte of the damaged
  chunk, seconds from the start of the command to its end, and heartbeats of the
  datanodes from when SCM listed our replica until it saw theirs equal; seven times of
  a real cluster.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil

from benchmarks.measure import Report, Samples, interleaved
from live.deep_read import read_replica
from live.survey import ClusterSurvey
from merkle.outcome import Verdict
from merkle.tree import ContainerId
from ozone.datanode_client import DatanodeClient
from ozone.scm_client import ClusterNode, ScmClient
from repair.peers import checked_tree
from runtime.rpc import open_channel
from tests.support.ozone import OzoneCluster, first_cluster
from tests.support.ozone_containers import closed_with
from tests.support.ozone_damage import block_files, damage_and_reconcile_twice
from tests.support.peers import replica_of
from tests.support.rescue_twin import RescueTwin, rescue_twin
from tests.support.s3_servers import S3Endpoint

CONTAINERS, BLOCKS = 600, 20
LARGE_BLOCKS, LARGE_BYTES = 8, 32 << 20
CHUNK_BYTES, WINDOW_BYTES = 4 << 20, 16 << 10
# Another window of the first chunk on each datanode.
OFFSETS = (100, 20_100, 40_100)
ROUNDS = 5
# Batches as those of a diagnosis; an Ozone fills and closes one or two containers in a
# second, so that they are diagnosed again and again.
OZONE_CONTAINERS, OZONE_REPEAT = 50, 10
# Below the size at which a container of the test bed closes by itself.
OZONE_LARGE_BLOCKS = (16 << 20, 16 << 20, 8 << 20)

CONTAINERS_PER_S_MIN = 300.0
DEEP_RATIO_MIN = 0.8
# Beside 10 %, so much for records, trees and windows that are read twice.
RESCUE_RATIO_MAX, RESCUE_REST_BYTES = 1.1, 256 << 10
# Of the test bed's datanodes, which read and report what they were told to heal.
HEARTBEAT_S, HEARTBEATS_MAX = 1.0, 3.0
LOOK_S, RESCUE_S = 0.02, 120.0
# Of a real cluster.
RESCUES = 7


@dataclass(frozen=True)
class Target:
    """A cluster that is measured: its SCM, the containers for each job, and what
    `treefold rescue` needs to be told.
    """

    address: str
    small: Sequence[ContainerId]
    repeat: int
    large: ContainerId
    damaged: ContainerId
    damaged_bytes: int
    # The processes of the cluster.
    pids: Sequence[int]
    rescue_options: Sequence[str] = ()
    # Damages the container once more.
    damage: Callable[[], None] | None = None


def serve_twin(ready: Connection) -> None:
    """Serve the twin until something arrives on `ready`."""
    with rescue_twin() as twin:
        for number in range(1, CONTAINERS + 1):
            twin.live.add(number, dict.fromkeys(range(1, BLOCKS + 1), 1_000))
        large = _add_large(twin, CONTAINERS + 1)
        damaged = _add_damaged(twin, CONTAINERS + 2)
        ready.send(
            Target(
                twin.live.address,
                [ContainerId(number) for number in range(1, CONTAINERS + 1)],
                1,
                large,
                damaged,
                CHUNK_BYTES,
                [os.getpid()],
            )
        )
        ready.recv()


def _add_large(twin: RescueTwin, number: int) -> ContainerId:
    twin.live.add(number, {1: 1_000})
    sizes = dict.fromkeys(range(1, LARGE_BLOCKS + 1), LARGE_BYTES)
    replica = replica_of(number, sizes, window_bytes=WINDOW_BYTES, chunk_bytes=CHUNK_BYTES)
    # One for all: each has the bytes of the others.
    for source in twin.live.sources:
        source.replicas[ContainerId(number)] = replica
    twin.live.report(number)
    return ContainerId(number)


def _add_damaged(twin: RescueTwin, number: int) -> ContainerId:
    twin.live.add(number, {1: 1_000})
    for source in twin.live.sources:
        source.replicas[ContainerId(number)] = replica_of(
            number, {1: 2 * CHUNK_BYTES}, window_bytes=WINDOW_BYTES, chunk_bytes=CHUNK_BYTES
        )
    for datanode, offset in enumerate(OFFSETS, 1):
        twin.damage(number, datanode, 1, offset)
    return ContainerId(number)


@contextmanager
def twin_target() -> Iterator[Target]:
    """The twin in a process of its own, as datanodes are."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_twin, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        here.send(None)
        process.join()


@contextmanager
def ozone_target() -> Iterator[Target]:
    """A real cluster, with keys of our own in containers of their own."""
    with first_cluster() as cluster:
        bucket = S3Endpoint(f"http://{cluster.s3_address}", "any", "thing").fresh_bucket()
        found = closed_with(cluster, bucket, [1_000] * BLOCKS, count=OZONE_CONTAINERS)
        [most] = closed_with(cluster, bucket, OZONE_LARGE_BLOCKS, count=1)
        [damaged] = closed_with(cluster, bucket, [2 * CHUNK_BYTES], count=1)
        damage_and_reconcile_twice(cluster, damaged, OFFSETS)
        chunks = len(block_files(cluster, 1, damaged))
        yield Target(
            cluster.scm_address,
            found,
            OZONE_REPEAT,
            most,
            damaged,
            chunks * CHUNK_BYTES,
            [int(path.read_text()) for path in cluster.folder.glob("*/pid")],
            _rescue_options(cluster),
            partial(damage_and_reconcile_twice, cluster, damaged, OFFSETS),
        )


def _rescue_options(cluster: OzoneCluster) -> Sequence[str]:
    # Its ports are the usual ones, shifted by the same offset.
    return ("--datanode-port", str(int(cluster.scm_address.rpartition(":")[2]) + 1))


def connect(node: ClusterNode) -> DatanodeClient:
    return DatanodeClient(
        open_channel(node.address, insecure=True), node.host, datanode_id=node.peer
    )


def trees(report: Report, target: Target) -> None:
    """Trees of small containers, by the survey behind `treefold diagnose`."""
    with closing(ScmClient([target.address])) as scm:
        containers = list(scm.get_containers(target.small).values())
        with ClusterSurvey(scm, connect, 0) as survey:

            def diagnose() -> None:
                for _ in range(target.repeat):
                    verdicts = [
                        one.verdict for batch in survey.diagnose(containers) for one in batch
                    ]
                    assert verdicts == [Verdict.MATCH] * len(containers)

            amount = len(containers) * target.repeat
            diagnose()
            begun_s = _cpu_s(target)
            rates = interleaved(amount, {"ours": diagnose}, rounds=ROUNDS)
            ended_s = _cpu_s(target)
    least = Samples("the bar", (CONTAINERS_PER_S_MIN,) * ROUNDS)
    report.add("trees", "containers/s", rates["ours"], least, 1.0)
    # With the round that warms up.
    ours_ms, theirs_ms = (
        1000 * (ended - begun) / (amount * (ROUNDS + 1))
        for begun, ended in zip(begun_s, ended_s, strict=True)
    )
    theirs = Samples("the cluster", (theirs_ms,))
    report.add("trees, processor", "ms", Samples("ours", (ours_ms,)), theirs)


def _cpu_s(target: Target) -> tuple[float, float]:
    """CPU seconds of ours, and of the processes of the cluster."""
    theirs = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in target.pids)
    return time.process_time(), theirs


def deep(report: Report, target: Target) -> None:
    """All data of one replica, checked and unchecked."""
    with closing(ScmClient([target.address])) as scm:
        replica = scm.replicas([target.large])[target.large][0]
        node = next(one for one in scm.nodes() if one.peer == replica.peer)
    reader = connect(node)
    records = list(reader.list_records(target.large))
    stored = checked_tree(reader.tree_bytes(target.large), target.large)
    length = sum(chunk.length_bytes for record in records for chunk in record.chunks)

    def bare() -> None:
        size = sum(
            len(piece)
            for record in records
            for _, _, pieces in reader.read_block(target.large, record.block_id, record.chunks)
            for piece in pieces
        )
        assert size == length

    def checked() -> None:
        found = read_replica(reader, target.large, stored, lambda _: None)
        assert found.bytes_read == length
        assert not found.bad_windows

    rates = interleaved(length / 1e6, {"unchecked": bare, "ours": checked}, rounds=ROUNDS)
    reader.close()
    report.add("deep verify", "MB/s", rates["ours"], rates["unchecked"], DEEP_RATIO_MIN)


def rescue(report: Report, target: Target) -> None:
    """Rescues by their command, as an operator runs it: several of a real cluster, as
    its datanodes look for orders at intervals of their own.
    """
    found = [_rescue(target)]
    while target.damage is not None and len(found) < RESCUES:
        target.damage()
        found.append(_rescue(target))
    seconds, heartbeats, containers = zip(*found, strict=True)
    read = Samples("read", tuple(one["bytesRead"] / 1e3 for one in containers))
    most = RESCUE_RATIO_MAX * target.damaged_bytes + RESCUE_REST_BYTES
    report.add("rescue, read", "kB", read, Samples("the bar", (most / 1e3,)), most=1.0)
    damaged = Samples("the damaged chunks", (target.damaged_bytes / 1e3,))
    report.add("rescue, read", "kB", read, damaged)
    orders = Samples("ours", tuple(float(one["reconciles"]) for one in containers))
    report.add("rescue, reconciles", "", orders, Samples("one order", (1.0,)))
    healed, bar = Samples("healed", heartbeats), Samples("the bar", (HEARTBEATS_MAX,))
    report.add("rescue, healed after heartbeats", "", healed, bar, most=1.0)
    report.add("rescue, time", "s", Samples("ours", seconds), Samples("-", seconds))


def _rescue(target: Target) -> tuple[float, float, dict[str, Any]]:
    """Seconds, heartbeats until it was healed, and what the command says of it."""
    with tempfile.TemporaryDirectory() as home:
        words = ["rescue", str(target.damaged), "--cluster", target.address, "--yes", "--json"]
        environment = {**os.environ, "XDG_STATE_HOME": home, "XDG_CONFIG_HOME": home}
        start_s = time.perf_counter()
        with ThreadPoolExecutor(1) as watcher:
            healing = watcher.submit(healing_s, target)
            done = subprocess.run(
                [sys.executable, "-m", "admin.cli", *words, *target.rescue_options],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.perf_counter() - start_s
            heartbeats = healing.result() / HEARTBEAT_S
    assert done.returncode == 0, done.stdout + done.stderr
    [container] = json.loads(done.stdout)["data"]["containers"]
    assert len(container["healed"]) == 3
    return seconds, heartbeats, container


def healing_s(target: Target) -> float:
    """Seconds from when SCM lists our replica until it sees the real ones equal."""
    with closing(ScmClient([target.address])) as scm:

        def roots() -> list[int | None]:
            return [one.data_checksum for one in scm.replicas([target.damaged])[target.damaged]]

        real = len(roots())

        def first(condition: Callable[[list[int | None]], bool]) -> float:
            deadline_s = time.perf_counter() + RESCUE_S
            while not condition(roots()):
                assert time.perf_counter() < deadline_s, "SCM never saw it"
                time.sleep(LOOK_S)
            return time.perf_counter()

        listed_s = first(lambda found: len(found) > real)
        return first(lambda found: len(set(found)) == 1) - listed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ozone", action="store_true", help="A real cluster, not its twin.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = Report(f"a running cluster: {'Ozone 2.2' if arguments.ozone else 'its twin'}")
    jobs: Sequence[Callable[[Report, Target], None]] = (trees, deep, rescue)
    with ExitStack() as stack:
        target = stack.enter_context(ozone_target() if arguments.ozone else twin_target())
        for job in jobs:
            job(report, target)
    report.show(as_json=arguments.json)


if __name__ == "__main__":
    main()

"""All states of a block of one chunk whose record one of three replicas still has, and
all orders of its repair.

The files of the others have outlived their record, or are gone too. What the record
proves has to be put together by its owner before the others can have it, so that
whoever reconciles before the owner goes empty-handed. Still one job is enough, wherever
all windows are left anywhere; everything else is named.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations, product

import pytest

from merkle.columns import state_fingerprint
from merkle.outcome import RepairOutcome, Verdict
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from repair.reconciliation import Reconciliation
from repair.requests import FetchRecords, FetchTree, FetchWindows, ReportOutcome
from repair.runner import execute_local, execute_remote
from scm.jobs import Job
from scm.policy import Roots
from tests.support.memory import RepairableReplica
from tests.support.peers import MemoryPeer, MemorySource, replica_of
from tests.support.whole_job import whole_job

BLOCK, CONTAINER, WINDOW = BlockId(20), ContainerId(7), 16
NAMES = (PeerId("a"), PeerId("b"), PeerId("owner"))
# Which windows of a file are good; None where there is no file.
FILES = (None, *product((False, True), repeat=2))
Files = tuple[tuple[bool, ...] | None, ...]
Cluster = Mapping[PeerId, RepairableReplica]
CarryOut = Callable[[Cluster, Sequence[PeerId]], dict[PeerId, RepairOutcome]]


def cluster(files: Files) -> Cluster:
    found = {}
    for number, (name, good) in enumerate(zip(NAMES, files, strict=True), start=1):
        stored = replica_of(
            CONTAINER, {BLOCK: 2 * WINDOW}, window_bytes=WINDOW, chunk_bytes=2 * WINDOW
        )
        for window, is_good in enumerate(good or ()):
            # No two are bad in the same way.
            stored.files[BLOCK][window * WINDOW] ^= 0 if is_good else number
        if good is None:
            del stored.files[BLOCK]
        if name != "owner":
            del stored.records[BLOCK]
        found[name] = RepairableReplica(name, stored)
        found[name].scan()
    return found


def roots(replicas: Cluster) -> Roots:
    trees = {name: replica.known_tree()[0] for name, replica in replicas.items()}
    return tuple(
        (name, tree.data_checksum, state_fingerprint(tree).hex())
        for name, tree in trees.items()
        if tree
    )


def one_by_one(order: Sequence[PeerId]) -> CarryOut:
    def carry_out(replicas: Cluster, names: Sequence[PeerId]) -> dict[PeerId, RepairOutcome]:
        return {name: at_once(replicas, [name])[name] for name in order if name in names}

    return carry_out


def at_once(replicas: Cluster, names: Sequence[PeerId]) -> dict[PeerId, RepairOutcome]:
    """One request of each in turn."""
    runs = {
        name: Reconciliation(CONTAINER, name, sorted(replicas.keys() - {name})) for name in names
    }
    waiting = {name: run.start() for name, run in runs.items()}
    while any(waiting.values()):
        for name in [name for name in names if waiting[name]]:
            match request := waiting[name].pop(0):
                case FetchTree() | FetchRecords() | FetchWindows():
                    peer = MemoryPeer(request.peer, MemorySource(replicas[request.peer].stored))
                    waiting[name] += runs[name].step(execute_remote(request, CONTAINER, peer))
                case ReportOutcome():
                    pass
                case _:
                    waiting[name] += runs[name].step(execute_local(request, replicas[name]))
    return {name: outcome for name, run in runs.items() if (outcome := run.outcome)}


def job_of(replicas: Cluster, carry_out: CarryOut) -> Job:
    return whole_job(
        CONTAINER, NAMES, lambda: roots(replicas), lambda names: carry_out(replicas, names)
    )


@pytest.mark.parametrize("of_owner", FILES, ids=str)
def test_one_job_makes_replicas_equal_or_names_why_not(of_owner: tuple[bool, ...] | None) -> None:
    """inv-I1, I8: 125 states times seven ways to carry out a round."""
    rounds = set[int]()
    for of_a, of_b in product(FILES, repeat=2):
        files = (of_a, of_b, of_owner)
        can_be_had = all(any(good and good[window] for good in files) for window in range(2))
        for carry_out in (*(one_by_one(order) for order in permutations(NAMES)), at_once):
            replicas = cluster(files)
            job = job_of(replicas, carry_out)
            rounds.add(max(order.round for order in job.orders))
            verdicts = {order.progress.verdict for order in job.orders}
            if not can_be_had:
                assert job.verdict is Verdict.UNRECOVERABLE, files
                continue
            assert len({root[1:] for root in roots(replicas)}) == 1, files
            assert verdicts <= {Verdict.MATCH, Verdict.REPAIRABLE}, files
            for replica in replicas.values():
                assert (
                    replica.stored.files == cluster(((True, True),) * 3)[NAMES[0]].stored.files
                ), files
                assert BLOCK in replica.stored.records, files
            written = [(replica.bytes_written, replica.puts) for replica in replicas.values()]
            assert job_of(replicas, carry_out).verdict is Verdict.MATCH, files
            assert [
                (replica.bytes_written, replica.puts) for replica in replicas.values()
            ] == written, files
    assert rounds == ({1} if of_owner == (True, True) else {1, 2})

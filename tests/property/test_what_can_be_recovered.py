"""Random damage on real volumes, repaired by the product and judged by a model that
knows only recorded checksums and bytes (tests/support/window_model.py).

Each window that any replica still holds is good on every replica afterwards; nothing
that was good has changed; no deleted block came back; the verdict is true. A failure
prints the seed of the container and what was done to it, a line each.
"""

import os
import random
import shutil
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from merkle.checksum import ChecksumType
from merkle.outcome import Verdict, worst_verdict
from merkle.record import BlockRecord, DeleteTransaction
from merkle.tree import BlockId, ContainerId
from ozone.containers import ContainerStore
from ozone.rocks import Batch, Counter, OzoneTable, block_key, counter_key
from ozone.volume import Hold, open_volume
from protos.convert import record_to_bytes
from runtime.disk import Disk
from tests.support.handmade import NODE, VolumeMaker, block_record, chunk_record, some_bytes
from tests.support.in_process import datanodes, heal, scan_replica
from tests.support.oracle import Seen, look
from tests.support.volumes import Owned, container_folder, owned
from tests.support.window_model import Window, complaints, recoverable

NAMES = ("dn1", "dn2", "dn3")
GROUPS, GROUPS_LONG, GROUP_SIZE = 5, 40, 30
# Of a whole group, one container in so many is left as it is.
UNTOUCHED = 10
# Windows of no round size among them, and one larger than a chunk.
KINDS = (
    (ChecksumType.CRC32, 100, 350),
    (ChecksumType.CRC32C, 64, 512),
    (ChecksumType.SHA256, 1000, 900),
    (ChecksumType.MD5, 512, 1024),
)


@dataclass
class Inflicted:
    """What was done to one container: a line for each damage, and deleted blocks."""

    lines: list[str] = field(default_factory=list)
    dead: dict[str, set[BlockId]] = field(default_factory=lambda: {name: set() for name in NAMES})


class Vandal:
    """Damages one replica in the ways that disks, crashes, clients and people do."""

    def __init__(self, rng: random.Random, name: str, held: Owned, container_id: int) -> None:
        self._rng = rng
        self._name = name
        self._held = held
        self._container_id = ContainerId(container_id)
        self._folder = container_folder(held.volume.root, container_id)
        self._container = held.store.get(self._container_id)

    def harm(self, favourite: BlockId, done: Inflicted) -> None:
        """Do one thing, mostly to the favourite block: losses need several replicas."""
        acts: list[tuple[int, Callable[[BlockId], str]]] = [
            (8, self._flip),
            (3, self._truncate),
            (2, self._lose_file),
            (2, self._lose_record),
            (2, self._lose_last_chunk),
            (1, self._zero_page),
            (1, self._append),
            (1, self._fork),
            (1, self._lose_commit),
            (1, self._lose_chunks),
            (1, self._spoil_tree),
        ]
        blocks = self._container.block_ids()
        if not blocks:
            return
        block_id = favourite if self._rng.random() < 0.7 else self._rng.choice(blocks)
        (act,) = self._rng.choices([act for _, act in acts], [weight for weight, _ in acts])
        if text := act(block_id):
            done.lines.append(f"{self._name}: {text}")

    def delete(self, block_id: BlockId, done: Inflicted) -> None:
        """A delete transaction that reaches this replica alone, so far."""
        transaction = DeleteTransaction(block_id, self._container_id, (block_id,))
        self._held.writer.receive_delete(transaction)
        assert self._held.writer.delete_blocks(self._container_id) == [block_id]
        done.dead[self._name].add(block_id)
        done.lines.append(f"{self._name}: block {block_id} deleted by a transaction")

    def _bytes(self, block_id: BlockId) -> bytearray:
        path = self._container.block_path(block_id)
        return bytearray(path.read_bytes() if path.exists() else b"")

    def _flip(self, block_id: BlockId) -> str:
        data = self._bytes(block_id)
        # Few places, so that the same window is hit on several replicas.
        at = self._rng.choice((0, len(data) // 2, self._rng.randrange(len(data) or 1)))
        if not data:
            return ""
        data[at] ^= 1 << self._rng.randrange(8)
        self._container.block_path(block_id).write_bytes(data)
        return f"block {block_id}: a bit flipped at {at}"

    def _zero_page(self, block_id: BlockId) -> str:
        data = self._bytes(block_id)
        low = self._rng.randrange(len(data) or 1) // 512 * 512
        data[low : low + 512] = bytes(len(data[low : low + 512]))
        if data:
            self._container.block_path(block_id).write_bytes(data)
        return f"block {block_id}: 512 bytes zeroed at {low}"

    def _truncate(self, block_id: BlockId) -> str:
        data = self._bytes(block_id)
        length = self._rng.choice((0, 350, 512, self._rng.randrange(len(data) + 1)))
        if length >= len(data):
            return ""
        os.truncate(self._container.block_path(block_id), length)
        return f"block {block_id}: cut to {length} bytes"

    def _append(self, block_id: BlockId) -> str:
        if not self._bytes(block_id):
            return ""
        with self._container.block_path(block_id).open("ab") as file:
            file.write(b"never committed")
        return f"block {block_id}: 15 bytes after its end"

    def _lose_file(self, block_id: BlockId) -> str:
        self._container.block_path(block_id).unlink(missing_ok=True)
        return f"block {block_id}: file lost"

    def _lose_chunks(self, _: BlockId) -> str:
        shutil.rmtree(self._folder / "chunks", ignore_errors=True)
        return "chunks folder lost"

    def _spoil_tree(self, _: BlockId) -> str:
        raw = self._rng.choice((None, b"", b"no tree"))
        path = self._folder / "metadata" / f"{self._container_id}.tree"
        path.unlink(missing_ok=True)
        if raw is not None:
            path.write_bytes(raw)
        return f"tree {'lost' if raw is None else f'is {raw!r}'}"

    def _lose_record(self, block_id: BlockId) -> str:
        self._put(block_id, None)
        return f"block {block_id}: record lost"

    def _lose_last_chunk(self, block_id: BlockId) -> str:
        record = self._container.record(block_id)
        if record is None or len(record.chunks) < 2:
            return ""
        self._put(block_id, replace(record, chunks=record.chunks[:-1]))
        return f"block {block_id}: last chunk lost from the record"

    def _fork(self, block_id: BlockId) -> str:
        """Other bytes with a record that matches them, as of a client that went on."""
        record = self._container.record(block_id)
        if record is None or not self._bytes(block_id):
            return ""
        first = record.chunks[0]
        other = some_bytes(first.length_bytes, seed=self._rng.getrandbits(32))
        changed = chunk_record(
            other, checksum_type=first.checksum_type, window=first.bytes_per_checksum
        )
        self._put(block_id, replace(record, chunks=(changed, *record.chunks[1:])))
        data = self._bytes(block_id)
        data[: len(other)] = other
        self._container.block_path(block_id).write_bytes(data)
        return f"block {block_id}: first chunk rewritten, record and bytes"

    def _lose_commit(self, _: BlockId) -> str:
        batch = Batch()
        batch.delete(OzoneTable.METADATA, counter_key(self._container_id, Counter.BCS_ID))
        self._held.volume.database.write(batch)
        return "the container's commit lost"

    def _put(self, block_id: BlockId, record: BlockRecord | None) -> None:
        key, batch = block_key(self._container_id, block_id), Batch()
        if record is None:
            batch.delete(OzoneTable.BLOCK_DATA, key)
        else:
            batch.put(OzoneTable.BLOCK_DATA, key, record_to_bytes(record))
        self._held.volume.database.write(batch)


def _volumes(folder: Path, container_ids: range) -> dict[str, Path]:
    """Three equal volumes; each container has three blocks of one or several chunks."""
    with VolumeMaker(folder / "whole" / "volume1") as made:
        for container_id in container_ids:
            rng = random.Random(container_id)
            checksum_type, window, chunk_bytes = KINDS[container_id % len(KINDS)]
            made.container(container_id)
            for block_id in (10, 11, 12):
                length = rng.choice((1, window, window + 1, rng.randint(1, 4 * chunk_bytes)))
                chunks = []
                for at in range(0, length, chunk_bytes):
                    data = some_bytes(min(chunk_bytes, length - at), rng.getrandbits(32))
                    record = chunk_record(data, at, checksum_type=checksum_type, window=window)
                    chunks.append((record, data))
                made.block(container_id, block_id, *chunks)
    roots = {}
    for number, name in enumerate(NAMES, start=1):
        roots[name] = Path(shutil.copytree(made.root, folder / name / "volume1"))
        version = roots[name] / "hdds" / "VERSION"
        version.write_text(version.read_text().replace(NODE, f"{NODE[:-1]}{number}"))
    return roots


def _inflict(roots: Mapping[str, Path], state: Path, ids: range) -> dict[int, Inflicted]:
    done = {container_id: Inflicted() for container_id in ids}
    with ExitStack() as stack:
        held = {
            name: stack.enter_context(owned(root, state / name)) for name, root in roots.items()
        }
        for container_id in ids:
            if container_id % UNTOUCHED == 0:
                continue
            rng = random.Random(f"damage {container_id}")
            vandals = {name: Vandal(rng, name, held[name], container_id) for name in NAMES}
            if rng.random() < 0.2:
                vandals[rng.choice(NAMES)].delete(BlockId(12), done[container_id])
            for _ in range(rng.choice((1, 2, 4, 7))):
                vandals[rng.choice(NAMES)].harm(
                    BlockId(rng.choice((10, 10, 11))), done[container_id]
                )
    return done


def _look(roots: Mapping[str, Path], scratch: Path, ids: range) -> dict[int, dict[str, Seen]]:
    found: dict[int, dict[str, Seen]] = {container_id: {} for container_id in ids}
    for name, root in roots.items():
        with open_volume(
            root, hold=Hold.READ_ONLY, state_folder=scratch / name, disk=Disk()
        ) as volume:
            store = ContainerStore(volume, Disk())
            for container_id in ids:
                found[container_id][name] = look(store, container_id)
    return found


def _verdicts(roots: Mapping[str, Path], state: Path, ids: range) -> Iterator[tuple[int, Verdict]]:
    """Repair each container with one job; its verdict."""
    with datanodes(roots, state) as nodes:
        for container_id in ids:
            for node in nodes.values():
                scan_replica(node, container_id)
            job = heal(nodes, container_id, random.Random(container_id))
            verdict = worst_verdict(order.progress.verdict for order in job.orders)
            assert verdict is not None
            yield container_id, verdict


@pytest.mark.parametrize(
    "group",
    [
        *range(GROUPS),
        *(pytest.param(group, marks=pytest.mark.long) for group in range(GROUPS, GROUPS_LONG)),
    ],
)
def test_what_any_replica_still_holds_is_good_on_every_replica(tmp_path: Path, group: int) -> None:
    """inv-I1, I3, I4, I5, I6."""
    ids = range(group * GROUP_SIZE + 1, (group + 1) * GROUP_SIZE + 1)
    roots = _volumes(tmp_path, ids)
    done = _inflict(roots, tmp_path / "state", ids)
    before = _look(roots, tmp_path / "before", ids)

    verdicts = dict(_verdicts(roots, tmp_path / "state", ids))

    after = _look(roots, tmp_path / "after", ids)
    wrong = []
    for container_id, inflicted in done.items():
        found = complaints(
            before[container_id], after[container_id], inflicted.dead, verdicts[container_id]
        )
        if not inflicted.lines and verdicts[container_id] is not Verdict.MATCH:
            found.append("nothing was done to it, and it does not match")
        if found:
            wrong += [f"container {container_id}:", *inflicted.lines, *(f"  {f}" for f in found)]
    assert not wrong, "\n".join(["", *wrong])
    # The damage is of every sort, or the test proves little.
    kinds = Tally(verdicts.values())
    assert kinds[Verdict.REPAIRABLE] > GROUP_SIZE / 4, kinds
    assert kinds[Verdict.UNRECOVERABLE] + kinds[Verdict.CONFLICT] > 0, kinds


def _seen(data: bytes, record: BlockRecord | None) -> Seen:
    return Seen({BlockId(1): record} if record else {}, {"1.block": data})


def test_the_model_names_what_a_repair_left_undone_harmed_or_brought_back() -> None:
    data = some_bytes(2500)
    record = block_record(1, 1, [chunk_record(data, window=1000)])
    bad, worse = b"\0" + data[1:], data[:1500] + b"\0" * 1000
    nobody: dict[str, set[BlockId]] = {"dn1": set(), "dn2": set()}
    before = {"dn1": _seen(bad, record), "dn2": _seen(data, record)}
    healed = {"dn1": _seen(data, record), "dn2": _seen(data, record)}
    harmed = {"dn1": _seen(data, record), "dn2": _seen(worse, record)}
    lost = {"dn1": _seen(bad, record), "dn2": _seen(bad, record)}

    assert complaints(before, healed, nobody, Verdict.REPAIRABLE) == []
    assert "is MATCH, not REPAIRABLE" in complaints(before, healed, nobody, Verdict.MATCH)[0]
    assert "windows [0] not repaired" in complaints(before, before, nobody, Verdict.REPAIRABLE)[0]
    assert "dn2: 1.block" in complaints(before, harmed, nobody, Verdict.REPAIRABLE)[0]
    assert recoverable(lost, set()).lost == {Window(BlockId(1), 0, 0)}
    assert complaints(lost, lost, nobody, Verdict.UNRECOVERABLE) == []
    deleted = {"dn1": {BlockId(1)}, "dn2": set[BlockId]()}
    assert "came back" in complaints(healed, healed, deleted, Verdict.MATCH)[0]
    changed = replace(record, chunks=(chunk_record(worse, window=1000),))
    fork = {"dn1": _seen(worse, changed), "dn2": _seen(data, record)}
    assert complaints(fork, fork, nobody, Verdict.CONFLICT) == []
    assert "not CONFLICT" in complaints(fork, fork, nobody, Verdict.REPAIRABLE)[0]

"""Databases of ours of which a disk has changed something, for every reader of them.
SQLite does not check its pages. See fuzz_targets.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from merkle.replica import PeerId
from merkle.tree import ContainerId
from proof.index import WHOLE, Position
from proof.root import SetRoot
from proof.symbols import key_hashes
from replicator.copy_requests import CopyResult, ObjectStamp, SentPart, UploadRecord
from replicator.crossing import Crossing
from replicator.hashing import ContentHasher
from replicator.ledger import PairLedger, PlannedStep
from replicator.stores.errors import StoreError
from replicator.stores.local import LocalBucket
from replicator.stores.port import ObjectFacts, UploadedPart, UploadId
from replicator.windows import KEY_BYTES, WindowHasher
from runtime.disk import Disk
from scm.job_steps import new_job, step
from scm.job_store import SqliteJobStore
from scm.jobs import ControllerResumed, JobId, OrderIssued
from scm.policy import Target as RepairTarget
from scm.policy import Visit, resume_visit
from tests.support.fuzz_targets import Target
from tests.support.stored_indexes import fit, open_index, stamped
from tests.support.stores import ANYTHING, NOTHING, changes_after


def _damaged(seed: bytes) -> Callable[[random.Random], bytes]:
    """A database, of which a disk has changed something where it is not empty: mostly
    in pages that are full.
    """
    used = [at for at, byte in enumerate(seed) if byte]
    full = {page for page, count in Counter(at // _PAGE for at in used).items() if count > 400}
    in_full = [at for at in used if at // _PAGE in full]

    def make(rng: random.Random) -> bytes:
        data = bytearray(seed)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            at = rng.choice(used if rng.random() < 0.2 else in_full)
            page, other = (one // _PAGE * _PAGE for one in (at, rng.choice(used)))
            match rng.randrange(6):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at : at + 8] = bytes(8)
                case 2:
                    data[page : page + _PAGE] = data[other : other + _PAGE]
                case 3:
                    # The cells of a page are where its first bytes say.
                    data[page + rng.randrange(60)] = rng.randrange(256)
                case 4 if rng.random() < 0.1:
                    del data[at:]
                    return bytes(data)
                case _:
                    data[at] ^= 1 << rng.randrange(8)
        return bytes(data)

    return make


# Of SQLite's pages.
_PAGE = 4096


def _placed(path: Path, raw: bytes) -> None:
    """Put a database in place of one that was in use."""
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(raw)


def _index(scratch: Path) -> Target:
    """An index: what is read without an error, and checked, is what was written."""
    folder = scratch / "damaged-index"
    items = {f"{number}": stamped(f"{number}") for number in range(40)}
    index = open_index(folder)
    index.apply(list(items.items()))
    index.apply([("7", None)])
    del items["7"]
    index.note_listing("", began_at_s=77, complete=True)
    with index.snapshot() as now:
        position, root = now.position, now.roots([WHOLE])[0]
    index.close()
    (path,) = folder.glob("*.sqlite")

    def accept(raw: bytes) -> None:
        _placed(path, raw)
        opened = open_index(folder)
        with closing(opened):
            found = opened.rows(start_after="", limit=100)
            with opened.snapshot() as now:
                ids = now.ids(WHOLE)
                rows = now.find(key_hashes(ids))
                now.split(WHOLE, 4)
            opened.changes(after=Position(0), through=position)
            for key in items:
                opened.row(key)
            opened.listing("")
            if not opened.self_check().damage:
                assert {one.item.key: one for one in found} == items
                assert SetRoot.of(ids) == root
                assert len(rows) == len(items)

    return Target("index", _damaged(path.read_bytes()), accept)


def _ledger(scratch: Path) -> Target:
    """The ledger of a pair, all of which is read."""
    folder = scratch / "ledger"
    stamp = ObjectStamp("v1", "etag", 17, 5)
    keys = [f"k{number}" for number in range(20)]

    def opened() -> PairLedger:
        return PairLedger(folder, source="local:/a", target="local:/b")

    with opened() as ledger:
        ledger.save_crossing(Crossing(tags=True, headers=True, acl=False))
        for key in keys:
            ledger.save_copy(_copied(key))
            ledger.save_upload(key, UploadRecord(UploadId("u"), stamp, stamp, b"p", 8))
            ledger.save_part(key, SentPart(UploadedPart(2, 5, "e"), b"b3"))
            ledger.save_damaged(key, stamp)
        ledger.add_to_plan([PlannedStep(key, "copy", 5, stamp, None, "missing") for key in keys])
    path = folder / "ledger.sqlite"

    def accept(raw: bytes) -> None:
        _placed(path, raw)
        with opened() as ledger:
            WindowHasher(ledger.secret, 5)
            for row in ledger.rows("k"):
                ledger.windows(row.key, row.source.size_bytes)
            for step in ledger.plan():
                ledger.upload(step.key)
            ledger.row_count()
            ledger.crossing()
            for key in (*ledger.upload_keys(), *ledger.damaged()):
                ledger.row(key)

    return Target("ledger", _damaged(path.read_bytes()), accept)


def _copied(key: str) -> CopyResult:
    hasher, windows = ContentHasher(), WindowHasher(bytes(KEY_BYTES), 5)
    hasher.update(b"hello")
    windows.update(b"hello")
    source, target = ObjectFacts(key, 5, "s", 1), ObjectFacts(key, 5, "t", 2, "v")
    return CopyResult(source, target, hasher.hashes(), b"p" * 32, 5, windows.table())


def _local_bucket(scratch: Path) -> Target:
    """A bucket in a folder: listed, read and written."""
    folder, keys = scratch / "local-bucket", [f"k{number}" for number in range(20)]
    with LocalBucket(folder, Disk(), create=True, body_bytes_max=200) as bucket:
        for key in keys:
            bucket.put(key, key.encode() * 100, NOTHING, ANYTHING)
        snapshots = bucket.store().snapshots
        assert snapshots is not None
        snapshots.create("first")
        bucket.put(keys[0], b"again", NOTHING, ANYTHING)
        bucket.delete([keys[4]])
        snapshots.create("second")
        upload = bucket.begin("parts", NOTHING)
        for number in (1, 2):
            bucket.write_part("parts", upload, number, b"z" * 100)
    (path,) = folder.glob("*.db")

    def accept(raw: bytes) -> None:
        _placed(path, raw)
        with LocalBucket(folder, Disk()) as bucket:
            fit(bucket.view.list_versions(""))
            feed, snapshots = bucket.store().feed, bucket.store().snapshots
            assert snapshots is not None
            changes_after(feed, 0)
            found = [snapshots.find(name) for name in ("first", "second")]
            kept = [one for one in found if one is not None]
            if len(kept) == 2:
                list(snapshots.difference(*kept))
            for one in kept:
                list(snapshots.open(one).lister.list_objects(""))
            snapshots.delete("first")
            for facts in bucket.view.list_objects(""):
                fit([facts])
                # It may be the only one that is damaged.
                try:
                    assert len(bucket.view.read_whole(facts).body) == facts.size_bytes
                except StoreError:
                    continue
            for key, known in bucket.uploads(""):
                list(bucket.parts(key, known))
            parts = list(bucket.parts("parts", upload))
            bucket.complete("parts", upload, parts, NOTHING, ANYTHING)
            bucket.put(keys[1], b"again", NOTHING, ANYTHING)
            bucket.delete(keys[2:4])
            bucket.trim(1 << 40)

    return Target("local bucket", _damaged(path.read_bytes()), accept)


def _controller(scratch: Path) -> Target:
    """The controller's jobs, visits and holders."""
    path, sources = scratch / "controller.db", (PeerId("dn-2"),)
    order = RepairTarget(PeerId("dn-1"), sources)
    ids = [ContainerId(number) for number in range(30)]
    new = [new_job(JobId(f"j{one}"), one, (order,), now_s=5.0 + one) for one in ids]
    jobs = [step(job, OrderIssued(order.peer), 6.0) for job in new]
    roots = ((order.peer, 7, "f"),)
    visits = [Visit(one, f"j{one}", 2, 100.0, hopeless_roots=roots) for one in ids]
    with closing(SqliteJobStore(path)) as store:
        store.save(jobs, visits, {one: {order.peer, *sources} for one in ids})
        store.next_term()

    def accept(raw: bytes) -> None:
        _placed(path, raw)
        with closing(SqliteJobStore(path)) as store:
            for job in store.jobs():
                step(job, ControllerResumed(), 7.0)
            for visit in store.visits():
                resume_visit(visit, 7.0)
            assert all(isinstance(one, int) for one in store.holders())
            store.next_term()
            store.save(jobs[:3], visits[:3], {ids[0]: {order.peer}})

    return Target("controller's database", _damaged(path.read_bytes()), accept)


DATABASES: Mapping[str, Callable[[Path], Target]] = {
    "index": _index,
    "ledger": _ledger,
    "local bucket": _local_bucket,
    "controller's database": _controller,
}

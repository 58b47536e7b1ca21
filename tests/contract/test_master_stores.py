"""What every store of a replication master does alike: SQLite, PostgreSQL, and their
twin in memory.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicator.master.ports import MasterStore
from replicator.master.record_json import parsed_record, record_json
from replicator.master.records import (
    AssignmentRound,
    ClusterSettings,
    Holder,
    Leaving,
    PolicyRecord,
    Record,
    RecordKey,
    RecordKind,
    ReplicationError,
    ReplicationState,
    SyncerCapacity,
    SyncerLease,
    SyncerRecord,
)
from replicator.master.sqlite_store import SqliteMasterStore
from replicator.replication import (
    Checkpoint,
    Condition,
    DesiredState,
    Policy,
    PolicyId,
    ReplicationFault,
    ReplicationOptions,
    ReplicationReport,
    Stage,
    SyncerId,
)
from replicator.stores.port import FeedPosition, SnapshotFacts
from tests.support.memory_masters import MemoryMasterStore
from tests.support.postgres import postgres_server

Opener = Callable[[], MasterStore]
HOLDER = Holder(SyncerId("s1"), "session", "host-1", 5)
SNAPSHOT = SnapshotFacts("naïve", "id-1", FeedPosition("log", 1 << 62), 7)
REPORT = ReplicationReport(
    Condition.ERROR,
    Checkpoint(
        *(Stage.LIVE, SNAPSHOT, None, "k\0\u2028/\U0001f600", FeedPosition("log", 9)),
        has_failed=True,
    ),
    ReplicationFault.TARGET_FULL,
    "full",
    queued=3,
    oldest_unproven_ms=4,
)
EVERY: tuple[Record, ...] = (
    ClusterSettings(False, 3, "alice", "why"),
    AssignmentRound(4),
    PolicyRecord(
        Policy(
            PolicyId("p1"),
            "local:/a",
            "local:/b",
            ("a/", "b/"),
            ReplicationOptions(5, 6, 7.5, False, True, False),
            DesiredState.PAUSED,
            8,
        ),
        1,
        2,
        "bob",
        "because",
        True,
        True,
        PolicyId("p0"),
        9,
    ),
    ReplicationState(
        PolicyId("p1"),
        1,
        2,
        None,
        Leaving(HOLDER, 1, 2, 3),
        4,
        REPORT,
        5,
        ReplicationError(ReplicationFault.DEFECT, "x", 6),
        True,
    ),
    SyncerRecord(
        SyncerId("s1"), "session", "syncer/s1", "host-1", 1, SyncerCapacity(2), SyncerLease(1, 2)
    ),
)


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with postgres_server(Path(tempfile.mkdtemp(prefix="pg-"))) as server:
        yield server.url


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.peers)])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the store; called again, what a restarted master would open."""
    opened: list[MasterStore] = []
    memory = MemoryMasterStore(lambda: time.time_ns() // 1_000_000)

    def again() -> MasterStore:
        for store in opened:
            store.close()
        if request.param == "memory":
            store: MasterStore = memory
        elif request.param == "sqlite":
            store = SqliteMasterStore(tmp_path)
        else:
            from replicator.master.postgres_store import PostgresMasterStore

            store = PostgresMasterStore(request.getfixturevalue("database"))
            if not opened:
                state = store.read()
                versions = {key: one.version for key, one in state.records.items()}
                assert store.write(versions, (), tuple(state.records))
        opened.append(store)
        return store

    yield again
    for store in opened:
        store.close()


@pytest.mark.parametrize("record", EVERY, ids=lambda record: record.key.kind.value)
def test_a_record_is_read_as_it_was_written(reopen: Opener, record: Record) -> None:
    assert reopen().write({record.key: 0}, [record])
    assert reopen().read().records[record.key].record == record
    assert parsed_record(record.key, record_json(record)) == record


def test_all_or_none_is_written_by_the_versions_that_were_read(reopen: Opener) -> None:
    store = reopen()
    settings, number = ClusterSettings(), AssignmentRound(1)
    assert store.write({settings.key: 0, number.key: 0}, [settings, number])
    before = store.read()
    assert not store.write({settings.key: 0}, [ClusterSettings(False)])
    wrong = before.version(number.key) + 100
    assert not store.write(
        {settings.key: before.version(settings.key), number.key: wrong},
        [ClusterSettings(False)],
        [number.key],
    )
    assert store.read().records == before.records
    expected = {settings.key: before.version(settings.key)}
    assert store.write(expected, [ClusterSettings(False)])
    assert not store.write(expected, [ClusterSettings(True)])
    assert not reopen().read().settings.is_enabled


def test_a_version_never_comes_again(reopen: Opener) -> None:
    """A master that was stopped between its look and its write must not meet a record
    of the same name and version that is another one.
    """
    store, record = reopen(), AssignmentRound(1)
    seen = set[int]()
    for _ in range(3):
        assert store.write({record.key: 0}, [record])
        version = store.read().version(record.key)
        assert version not in seen
        seen.add(version)
        assert store.write({record.key: version}, (), [record.key])
        assert store.read().version(record.key) == 0
        store = reopen()


def test_a_record_that_does_not_exist_is_expected_not_to(reopen: Opener) -> None:
    store, absent = reopen(), RecordKey(RecordKind.SYNCER, "s9")
    assert store.write({absent: 0}, [AssignmentRound(1)])
    assert not store.write({absent: 1}, [AssignmentRound(2)])


def test_the_clock_goes_on(reopen: Opener) -> None:
    store = reopen()
    before_ms = store.read().now_ms
    assert abs(before_ms - time.time() * 1000) < 60_000
    time.sleep(0.01)
    assert store.read().now_ms >= before_ms + 9


def test_of_many_writers_one_wins_each_round(reopen: Opener) -> None:
    """No increment is lost, whoever meets whom."""
    store, rounds, lost = reopen(), 10, list[BaseException]()

    def count() -> None:
        try:
            for _ in range(rounds):
                while True:
                    state = store.read()
                    record = state.next_round
                    if store.write({record.key: state.version(record.key)}, [record]):
                        break
        except BaseException as error:
            lost.append(error)
            raise

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost
    assert store.read().next_round.number == 4 * rounds + 1

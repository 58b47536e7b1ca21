"""The SQLite file itself: who may open it, which versions, what is dropped, what a
crash leaves.
"""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merkle.tree import ContainerId
from runtime.errors import BusyError, ConfigError, DatabaseError
from scm.job_steps import new_job, step
from scm.job_store import MIGRATIONS, SqliteJobStore
from scm.jobs import CancelRequested, Job, JobId
from scm.policy import Target, Visit
from tests.support.cluster_reports import DN1, DN2


def job(number: int, *, ended: bool = False) -> Job:
    made = new_job(
        JobId(f"j{number:05}"), ContainerId(number), (Target(DN1, (DN2,)),), now_s=float(number)
    )
    return step(made, CancelRequested(), float(number)) if ended else made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "controller.db"


def test_two_controllers_cannot_have_one_store(path: Path) -> None:
    store = SqliteJobStore(path)
    with pytest.raises(BusyError):
        SqliteJobStore(path)
    store.close()
    store.close()
    SqliteJobStore(path).close()


def test_the_file_is_in_wal_mode_and_bears_its_version(path: Path) -> None:
    SqliteJobStore(path).close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    connection.close()


def test_each_commit_is_synced(path: Path) -> None:
    """Asked of the store's own connection: the setting is not in the file."""
    asked: list[tuple[int]] = []

    def ask(connection: sqlite3.Connection) -> None:
        asked.append(connection.execute("PRAGMA synchronous").fetchone())

    SqliteJobStore(path, migrations=(*MIGRATIONS, ask)).close()
    full = 2
    assert asked == [(full,)]


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path) -> None:
    SqliteJobStore(path).close()

    def half(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE notes (note TEXT)")
        connection.execute("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(DatabaseError, match="nowhere"):
        SqliteJobStore(path, migrations=(*MIGRATIONS, half))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        notes = "SELECT count(*) FROM sqlite_master WHERE name = 'notes'"
        assert connection.execute(notes).fetchone() == (0,)


def test_a_file_that_sqlalchemy_wrote_is_continued(path: Path) -> None:
    """The tables of the first versions, to the letter."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE TABLE jobs (job_id VARCHAR NOT NULL, container_id INTEGER NOT NULL, state"
            " VARCHAR NOT NULL, created_at_s FLOAT NOT NULL, job VARCHAR NOT NULL, PRIMARY KEY"
            " (job_id)); CREATE INDEX ix_jobs_state ON jobs (state); CREATE INDEX"
            " ix_jobs_created_at_s ON jobs (created_at_s); CREATE TABLE visits (container_id"
            " INTEGER NOT NULL, visit VARCHAR NOT NULL, PRIMARY KEY (container_id)); CREATE TABLE"
            " terms (term INTEGER NOT NULL, PRIMARY KEY (term)); INSERT INTO terms VALUES (4);"
            " PRAGMA user_version=1;"
        )
    store = SqliteJobStore(path)
    assert store.next_term() == 5
    store.save([job(1)], [Visit(ContainerId(1), "j", 0, 0.0)], {ContainerId(1): {DN1}})
    store.save([job(1, ended=True)])
    assert list(store.jobs()) == [job(1, ended=True)]
    assert store.holders() == {ContainerId(1): {DN1}}
    store.close()


def test_a_file_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    connection.commit()
    connection.close()
    with pytest.raises(ConfigError, match="schema version"):
        SqliteJobStore(path)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    connection.close()
    # The lock was given back with the refusal.
    path.unlink()
    SqliteJobStore(path).close()


def test_an_older_file_is_brought_up_step_by_step(path: Path) -> None:
    store = SqliteJobStore(path)
    store.save([job(1)])
    store.close()

    def add_notes(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE notes (note TEXT)")

    store = SqliteJobStore(path, migrations=(*MIGRATIONS, add_notes))
    assert list(store.jobs()) == [job(1)]
    store.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)
    assert connection.execute("SELECT count(*) FROM notes").fetchone() == (0,)
    connection.close()


def test_a_job_from_before_there_were_rounds_is_in_its_first(path: Path) -> None:
    store = SqliteJobStore(path)
    store.save([job(1)])
    store.close()
    connection = sqlite3.connect(path)
    later = ("round", "rounds", "root")
    removed = ", ".join(f"'$.orders[0].{name}'" for name in later)
    connection.execute(f"UPDATE jobs SET job = json_remove(job, {removed})")
    connection.commit()
    (stored,) = connection.execute("SELECT job FROM jobs").fetchone()
    assert not json.loads(stored)["orders"][0].keys() & set(later)
    connection.close()
    store = SqliteJobStore(path)
    assert list(store.jobs()) == [job(1)]
    store.close()


def test_what_is_no_database_is_refused(path: Path) -> None:
    path.write_bytes(b"this is not a database, " * 100)
    with pytest.raises(DatabaseError):
        SqliteJobStore(path)


def test_a_row_that_cannot_be_understood_is_refused_by_name(path: Path) -> None:
    store = SqliteJobStore(path)
    store.save([job(1)])
    store.close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE jobs SET job = '{}'")
    connection.commit()
    connection.close()
    store = SqliteJobStore(path)
    with pytest.raises(DatabaseError, match="controller"):
        store.jobs()
    store.close()


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="nowhere"):
        SqliteJobStore(tmp_path / "nowhere" / "controller.db")


def test_the_oldest_ended_jobs_are_dropped_and_no_active_one(path: Path) -> None:
    store = SqliteJobStore(path, ended_jobs_kept=3)
    store.save([job(1)])
    store.save([job(number, ended=True) for number in range(2, 8)])
    assert [kept.job_id for kept in store.jobs()] == ["j00001", "j00005", "j00006", "j00007"]
    store.close()


def test_of_jobs_of_one_request_exactly_the_limit_is_kept(path: Path) -> None:
    """All jobs of one `--all-diverged` have one creation time."""
    store = SqliteJobStore(path, ended_jobs_kept=3)
    store.save([replace(job(number, ended=True), created_at_s=9.0) for number in range(2, 8)])
    assert [kept.job_id for kept in store.jobs()] == ["j00005", "j00006", "j00007"]
    store.save([replace(job(8, ended=True), created_at_s=9.0)])
    assert [kept.job_id for kept in store.jobs()] == ["j00006", "j00007", "j00008"]
    store.save([job(1, ended=True)])
    assert [kept.job_id for kept in store.jobs()] == ["j00006", "j00007", "j00008"]
    store.close()


@given(
    saves=st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=8),
        max_size=6,
    ),
    kept=st.integers(0, 5),
)
@settings(max_examples=60)
def test_the_newest_ended_jobs_are_kept_whatever_their_times(
    saves: list[list[tuple[int, bool]]], kept: int
) -> None:
    """Law: after any saves the ended jobs are the newest by (created_at_s, job_id)."""
    with TemporaryDirectory() as folder:
        store = SqliteJobStore(Path(folder) / "controller.db", ended_jobs_kept=kept)
        expected: dict[str, Job] = {}
        for made in saves:
            changed = {}
            for number, ended in made:
                # The time belongs to the ID: a stored job never changes it.
                one = replace(job(number, ended=ended), created_at_s=float(number % 3))
                changed[one.job_id] = one
            store.save(changed.values())
            expected |= changed
            by_age = sorted(expected.values(), key=lambda one: (one.created_at_s, one.job_id))
            ended_jobs = [one for one in by_age if one.state.is_terminal]
            if any(one.state.is_terminal for one in changed.values()):
                for one in ended_jobs[: max(0, len(ended_jobs) - kept)]:
                    del expected[one.job_id]
            assert {one.job_id for one in store.jobs()} == expected.keys()
        store.close()


def test_a_save_that_fails_leaves_nothing_behind(path: Path) -> None:
    store = SqliteJobStore(path)
    store.save([job(1)])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute(
        "CREATE TRIGGER full BEFORE INSERT ON visits BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
    )
    visit = Visit(ContainerId(1), "j", 0, 0.0)
    with pytest.raises(DatabaseError, match="disk is full"):
        store.save([job(2)], [visit])
    other.execute("DROP TRIGGER full")
    assert [kept.job_id for kept in store.jobs()] == ["j00001"]
    store.save([job(2)], [visit])
    assert len(store.jobs()) == 2
    other.close()
    store.close()

"""Real masters and syncers over local buckets, and writers beside them."""

import random
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from types import TracebackType
from typing import Self

import pytest

from replicator.master.client import MasterClient
from replicator.master.views import ReplicationView
from replicator.replication import Condition, DesiredState, Policy, PolicyId, ReplicationOptions
from replicator.stores.errors import StoreError
from replicator.stores.local import LocalBucket
from replicator.stores.port import ChangeKind
from runtime.disk import Disk
from runtime.tls_files import Tls
from tests.support.processes import TreefoldProcess
from tests.support.stores import ANYTHING, NOTHING, changes_after, content
from tests.support.waiting import wait_until

LEASE_S = 1.5


def master_process(
    folder: Path,
    *,
    listen: str = "127.0.0.1:0",
    tls: Tls | None = None,
    lease_s: float = LEASE_S,
) -> TreefoldProcess:
    """A replication master with a short lease, whose records lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "master.toml"
    path.write_text(
        f'state_folder = "{folder / "state"}"\nlisten = "{listen}"\nlease_s = {lease_s}\n'
        + _tls_table(tls)
    )
    return TreefoldProcess(folder / "run", "replication-master", "run", "--config", str(path))


def _tls_table(tls: Tls | None) -> str:
    if tls is None:
        return ""
    return f'[tls]\ncert = "{tls.cert}"\nkey = "{tls.key}"\nca = "{tls.ca}"\n'


def syncer_process(
    folder: Path, masters: Sequence[str], *, tls: Tls | None = None
) -> TreefoldProcess:
    """A syncer whose state lies in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "syncer.toml"
    path.write_text(_tls_table(tls))
    options = [word for address in masters for word in ("--master", address)]
    return TreefoldProcess(
        folder / "run",
        "syncer",
        "run",
        "--config",
        str(path),
        *options,
        "--state-folder",
        str(folder / "state"),
        "--metrics",
        "127.0.0.1:0",
        "--log-format",
        "json",
    )


class ReplicatedPair:
    """A source, a target and their replication at a master; a context manager."""

    def __init__(
        self, folder: Path, client: MasterClient, name: str = "p1", *, target: Path | None = None
    ) -> None:
        """Make both buckets; the target is in `folder` too, or elsewhere."""
        self.policy_id = PolicyId(name)
        self.client = client
        self.folders = folder / f"{name}-source", target or folder / f"{name}-target"
        self._stack = ExitStack()
        self.source, self.target = (
            self._stack.enter_context(LocalBucket(one, Disk(), create=True)) for one in self.folders
        )
        self._stop = threading.Event()
        self._writers = list[threading.Thread]()
        self.written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_writers()
        self._stack.close()

    def add(self, options: ReplicationOptions | None = None) -> None:
        """Begin the replication."""
        source, target = (f"local:{folder}" for folder in self.folders)
        policy = Policy(self.policy_id, source, target, options=options or ReplicationOptions())
        self.client.add_policy(policy, "a test")

    def view(self) -> ReplicationView:
        """What the master says of it."""
        return self.client.replication(self.policy_id)

    def order(self, desired: DesiredState) -> None:
        """What an operator wants."""
        self.client.set_desired(self.policy_id, desired, "a test")

    def holder(self) -> str:
        """The ID of the syncer that has it; empty where none has."""
        found = self.view().state.holder
        return found.syncer_id if found else ""

    def await_condition(self, condition: Condition) -> ReplicationView:
        """Wait until its syncer reports this."""
        wait_until(lambda: self.view().condition is condition, f"{condition.value}")
        return self.view()

    def write_on(self, writers: int = 2, *, pause_s: float = 0.002) -> None:
        """Begin to write, overwrite, delete and rename at random."""
        for number in range(writers):
            thread = threading.Thread(target=self._write, args=(number, pause_s))
            thread.start()
            self._writers.append(thread)

    def end_writers(self) -> None:
        """Write no more."""
        self._stop.set()
        for thread in self._writers:
            thread.join()
        self._writers.clear()
        self._stop.clear()

    def _write(self, number: int, pause_s: float) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            key = f"{number}/{chance.randrange(40)}"
            with suppress(StoreError):
                match chance.randrange(8):
                    case 0:
                        self.source.delete([key])
                    case 1:
                        found = self.source.view.facts(key)
                        if found is not None:
                            self.source.rename(found, f"{key}-renamed-{chance.randrange(3)}")
                    case _:
                        size = chance.choice([0, 10, 1_000, 40_000])
                        self.source.put(key, chance.randbytes(size), NOTHING, ANYTHING)
                self.written += 1
            time.sleep(pause_s)

    def applied_after(self, index: int) -> bool:
        """Whether the target has changed since its log had this index."""
        return self.target.feed.position().index > index

    def await_change(self, what: str, *, within_s: float) -> float:
        """Wait until the target changes; how long it took."""
        index, began_s = self.target.feed.position().index, time.monotonic()
        wait_until(lambda: self.applied_after(index), what)
        took_s = time.monotonic() - began_s
        assert took_s < within_s
        return took_s

    def objects(self, bucket: LocalBucket) -> dict[str, bytes]:
        """All that a bucket holds."""
        store = bucket.store()
        return {facts.key: content(store, facts) for facts in store.lister.list_objects("")}

    def await_equal(self) -> None:
        """Wait until the target has all that the source has."""
        wait_until(lambda: self.objects(self.source) == self.objects(self.target), "equality")

    def check_order(self) -> None:
        """What a key of the target was after each change, the source's key was, in this
        order: nothing old came after what was newer.
        """
        was = _history(self.source)
        for key, states in _history(self.target).items():
            known, at = was.get(key, []), 0
            for state in states:
                assert state in known[at:], f"{key} went back: {states} of {known}"
                at += known[at:].index(state)


def _history(bucket: LocalBucket) -> dict[str, list[str]]:
    """The states of each key in the order of the log: ETags, empty for none."""
    found = dict[str, list[str]]()
    for change in changes_after(bucket.feed):
        if change.kind is ChangeKind.RENAME:
            found.setdefault(change.previous_key, []).append("")
        etag = change.facts.etag if change.facts is not None else ""
        found.setdefault(change.key, []).append(etag)
    return found


@contextmanager
def small_disk(folder: Path, *, size: str = "64m") -> Iterator[Path]:
    """A folder on a file system of its own."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no space on a file system; the file that takes it."""
    path = folder / "ballast"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    return path


def stopped(process: TreefoldProcess, *buckets: LocalBucket) -> None:
    """Stop a process by SIGSTOP where it holds no lock of a bucket: whoever holds one
    keeps all others from writing.
    """
    while True:
        process.process.send_signal(SIGSTOP)
        wait_until(lambda: _has_stopped(process.process.pid), "every thread to stop")
        if not any(_is_locked(bucket) for bucket in buckets):
            return
        process.process.send_signal(SIGCONT)
        time.sleep(0.01)


def _has_stopped(pid: int) -> bool:
    states = list[str]()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError):
            states.append(path.read_text().rpartition(")")[2].split()[0])
    return set(states) == {"T"}


def _is_locked(bucket: LocalBucket) -> bool:
    """Whether somebody holds its lock for longer than a transaction takes."""
    connection = sqlite3.connect(bucket._folder / "bucket.db", timeout=0.3)
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return True
    else:
        return False
    finally:
        connection.close()


def continued(process: TreefoldProcess) -> None:
    """Let a process go on that was stopped by SIGSTOP."""
    process.process.send_signal(SIGCONT)

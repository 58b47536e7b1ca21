"""Sweeps into a bucket: the same tables as in a folder, whatever stops one, and errors
with names.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from admin.cli import treefold as cli
from admin.demo.synthetic import SyntheticCluster, synthetic
from chunktable.files import AnyPath, Files, ObjectPath
from merkle.columns import encode_tree
from merkle.tree import BlockId, ContainerId
from runtime.disk import Disk, Operation
from runtime.errors import BusyError
from sweep.lease import LEASE_S
from sweep.output import SweepStore, SweepTable
from sweep.report import write_report
from tests.support.live_twin import PEERS, LiveTwin, live_twin
from tests.support.s3_servers import S3Bucket
from tests.support.sweeps import Killed, OnePartWaves, Quiet, packed_trees, run, table_of
from tests.support.volumes import unpack
from tests.support.waiting import wait_until
from tests.support.wan import WanLink

pytestmark = pytest.mark.e2e

SMALL = SyntheticCluster(seed=4, datanodes=4, containers=60, blocks=4, chunks=4)
TABLES = (SweepTable.ROOTS, SweepTable.VERDICTS, SweepTable.FINDINGS, SweepTable.UNSEEN)


def treefold(*words: object, check: int) -> Result:
    done = CliRunner().invoke(cli, [*map(str, words)])
    assert done.exit_code == check, done.stderr
    return done


def use(bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch, options: str = "") -> ObjectPath:
    bucket.endpoint.set_environment(monkeypatch)
    return ObjectPath.of(f"s3://{bucket.name}/out?endpoint_url={bucket.endpoint.url}{options}")


@pytest.fixture
def out(ministack_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> ObjectPath:
    return use(ministack_bucket, monkeypatch)


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of two nights, the second with damages."""
    folder = tmp_path_factory.mktemp("nights")
    synthetic(folder / "first", SMALL, healthy=True)
    synthetic(folder / "second", SMALL)
    return folder


def upload(folder: Path, to: ObjectPath) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            Files(Disk()).replace(to / str(path.relative_to(folder)), path.read_bytes())


def rows_of(place: AnyPath, sweep_id: str) -> list[list[str]]:
    """The rows of all tables. Two findings of one chunk come in any order."""
    return [sorted(map(str, table_of(place, table, sweep_id))) for table in TABLES]


def test_a_small_file_of_a_bucket_takes_one_request(
    tmp_path: Path, nights: Path, out: ObjectPath, ministack_bucket: S3Bucket
) -> None:
    upload(nights / "first", out.with_name("exports"))
    with WanLink(ministack_bucket.endpoint.address) as link:
        endpoint = link.through(ministack_bucket.endpoint)
        exports = f"s3://{ministack_bucket.name}/exports?endpoint_url={endpoint.url}"
        summary = run(tmp_path / "out", ObjectPath.of(exports))
        kinds = link.traffic().kinds
    assert (summary.replicas, summary.diverged) == (3 * SMALL.containers, ())
    # The manifest, the inventory and the rows of each; the inventory again, which the
    # next night needs. Only whether the folder is one file is asked for.
    assert kinds["GET object"].requests == 4 * SMALL.datanodes
    assert kinds["HEAD object"].requests == 1


def test_a_bucket_gets_what_a_folder_gets(
    tmp_path: Path, nights: Path, s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables from the bucket too; then volumes, whose rows are kept there."""
    out = use(s3_bucket, monkeypatch)
    upload(nights, out.with_name("exports"))
    volumes = sorted(unpack("damaged", tmp_path / "cluster").glob("dn*/volume1"))
    printed = list[list[str]]()
    for place, exports in ((tmp_path / "out", nights), (out, out.with_name("exports"))):
        words = ("sweep", "run", "--out", place, "--write-trees", "--table")
        # Nothing is damaged, and one replica has no tree.
        treefold(*words, exports / "first", check=5)
        treefold(*words, exports / "second", check=3)
        ids = SweepStore(place, Disk()).sweeps()
        by_volume = run(place, volumes=volumes, report=lambda _: ()).sweep_id
        run(place, volumes=volumes)
        ids = SweepStore(place, Disk()).sweeps()
        assert (len(ids), ids[2]) == (4, by_volume)
        said = [
            treefold("sweep", "show", ids[1], "--out", place, "--json", check=0).stdout,
            treefold("sweep", "compare", ids[0], ids[1], "--out", place, check=3).stdout,
        ]
        document = json.loads(said[0])
        assert document["previous"] == ids[0]
        for name in ("sweepID", "startedAt", "seconds", "rowsPerSecond", "previous"):
            del document[name]
        printed.append([json.dumps(document), said[1].partition(": ")[2]])
        for number, sweep_id in enumerate(ids):
            for table in TABLES:
                rows = table_of(place, table, sweep_id)
                for row in rows:
                    row.pop("last_sweep", None)
                    row.pop("since", None)
                text = f"{number} {table} {sorted(map(str, rows))}"
                for i, other in enumerate(ids):
                    text = text.replace(other, f"sweep {i}")
                printed[-1].append(text)
        printed[-1].append(str(sorted(packed_trees(place, ids[1]).items())))
        store = SweepStore(place, Disk())
        assert b"<html" in store.access.read(store.report(ids[1]))
        assert not Files(Disk()).files_below(place / "work")
    for of_folder, of_bucket in zip(*printed, strict=True):
        assert of_bucket == of_folder


def test_only_the_last_sweeps_stay_in_a_bucket(out: ObjectPath, nights: Path) -> None:
    ids = [run(out, nights / "first", keep=2, write_trees=True).sweep_id for _ in range(4)]
    assert SweepStore(out, Disk()).sweeps() == ids[2:]
    names = Files(Disk()).files_below(out)
    held = {name.split("/")[1] for name in names if "/sweep_id=" in name}
    assert held == {f"sweep_id={sweep_id}" for sweep_id in ids[2:]}


class DyingDisk(Disk):
    """Ends the process before one of the changes of a bucket."""

    def __init__(self, changes: int) -> None:
        self.left = changes

    def durable(
        self,
        operation: Operation,
        path: Path,
        act: Callable[[], None],
        torn: Callable[[], None] | None = None,
    ) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed
        act()


# Every change of a sweep is one of these.
@pytest.mark.crashes
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(1, 4))]
)
def test_killed_before_any_change_the_next_run_comes_to_the_same(
    tmp_path: Path, out: ObjectPath, nights: Path, first: int
) -> None:
    whole = run(tmp_path / "whole", nights / "second", report=lambda _: ())
    expected = rows_of(tmp_path / "whole", whole.sweep_id)
    changes, deaths, resumed = first, 0, 0
    while True:
        place = out / str(changes)
        store = SweepStore(place, Disk())

        def report(summary: Any, store: SweepStore = store) -> tuple[str, ...]:
            return write_report(store, summary)

        try:
            run(place, nights / "second", disk=DyingDisk(changes), report=report)
        except Killed:
            # What is not complete is not there for anybody.
            complete = store.sweeps()
            progress = Quiet()
            again = run(place, nights / "second", progress=progress, report=report)
            is_resumed = any(f"resuming sweep {again.sweep_id}" in one for one in progress.notes)
            if complete and not is_resumed:
                # It was complete but for its cleaning up, so this is another night.
                assert again.previous == complete[0]
            else:
                assert complete in ([], [again.sweep_id])
                assert is_resumed or changes < 2
            assert rows_of(place, complete[0] if complete else again.sweep_id) == expected
            assert not Files(Disk()).files_below(place / "work")
            resumed += is_resumed
            deaths += 1
        else:
            break
        changes += 4
    assert deaths > 8
    assert resumed > 6


def test_what_is_not_committed_is_not_read(out: ObjectPath, nights: Path) -> None:
    sweep_id = run(out, nights / "second").sweep_id
    store, files = SweepStore(out, Disk()), Files(Disk())
    before = table_of(out, SweepTable.ROOTS, sweep_id)
    path = store.path(SweepTable.ROOTS, sweep_id)
    files.replace(path.with_name("roots-late.parquet"), files.read(path))
    assert table_of(out, SweepTable.ROOTS, sweep_id) == before
    # And a sweep without its summary does not count.
    files.replace(out / "roots" / "sweep_id=29990101T000000Z-0000" / "roots.parquet", b"")
    assert store.sweeps() == [sweep_id]


def test_a_second_sweep_into_a_bucket_is_busy(out: ObjectPath, nights: Path) -> None:
    class Second(Quiet):
        tries = 0

        def begin(self, what: str, total: int | None, unit: str) -> None:
            if not self.tries:
                self.tries += 1
                with pytest.raises(BusyError, match="another sweep is running in s3://"):
                    run(out, nights / "second")

    progress = Second()
    summary = run(out, nights / "first", progress=progress)
    assert (progress.tries, SweepStore(out, Disk()).sweeps()) == (1, [summary.sweep_id])


def test_a_sweep_whose_place_was_taken_writes_no_more(
    tmp_path: Path, out: ObjectPath, nights: Path
) -> None:
    """It was paused for longer than its lease; the other one has gone on with it."""
    taken = list[str]()

    class Paused(Quiet):
        def advance(self, count: int) -> None:
            if not taken:
                # As the lease of one that is paused: nobody renews it.
                Files(Disk()).replace(out / ".lock", b"{}")
                taken.append(run(out, nights / "first").sweep_id)
                # Until it would have renewed its lease.
                time.sleep(7)

    with pytest.raises(BusyError):
        run(out, nights / "first", progress=Paused(), engine=OnePartWaves(tmp_path / "spill"))
    whole = run(tmp_path / "whole", nights / "first")
    assert SweepStore(out, Disk()).sweeps() == taken
    for table in TABLES:
        assert table_of(out, table, taken[0]) == table_of(tmp_path / "whole", table, whole.sweep_id)


@pytest.mark.crashes
@pytest.mark.timeout(180)
def test_a_killed_process_is_resumed_after_its_lease(out: ObjectPath, tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SyntheticCluster(seed=4, datanodes=8, containers=2000))
    command = [
        *(sys.executable, "-m", "admin.cli", "sweep", "run", "--json", "--threads", "1"),
        *("--table", str(tmp_path / "table"), "--out", str(out)),
    ]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    work = out / "work"
    wait_until(
        lambda: any(name.endswith("plan.json") for name in Files(Disk()).files_below(work)),
        "a plan",
    )
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert SweepStore(out, Disk()).sweeps() == []
    began = time.monotonic()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 3, again.stderr
    assert "waiting whether it goes on" in again.stderr
    assert "resuming sweep" in again.stderr
    assert time.monotonic() - began >= LEASE_S
    assert SweepStore(out, Disk()).sweeps() == [json.loads(again.stdout)["sweepID"]]


def error_of(done: Result) -> str:
    return str(json.loads(done.stdout)["errors"][0]["code"])


def test_a_missing_bucket_and_a_wrong_key_end_with_their_names(
    nights: Path, signing_ministack_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = use(signing_ministack_bucket, monkeypatch)
    elsewhere = f"s3://no-such-bucket/out{out.options}"
    for words in (("run", "--table", nights / "first"), ("show", "latest"), ("compare", "a", "b")):
        done = treefold("sweep", *words, "--out", elsewhere, "--json", check=1)
        assert error_of(done) == "bucket_missing"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    denied = use_again(out)
    for words in (("run", "--table", nights / "first"), ("show", "latest")):
        done = treefold("sweep", *words, "--out", denied, "--json", check=1)
        assert error_of(done) == "store_denied"
    done = treefold("sweep", "run", "--table", nights, "--out", "gs://b/x", check=2)
    assert "gs:// is not an address that is served" in done.stderr


def use_again(out: ObjectPath) -> str:
    """The same place with a client of its own."""
    return f"{out}&region=us-east-1"


@pytest.mark.timeout(300)
def test_a_cut_connection_ends_a_sweep_that_goes_on_when_it_is_mended(
    tmp_path: Path, nights: Path, ministack_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WanLink(ministack_bucket.endpoint.address) as link:
        far = S3Bucket(link.through(ministack_bucket.endpoint), ministack_bucket.name)
        out = use(far, monkeypatch)

        class Cut(Quiet):
            def begin(self, what: str, total: int | None, unit: str) -> None:
                if what == "reading":
                    link.cut()

        with pytest.raises(Exception) as error:
            run(out, nights / "second", progress=Cut())
        assert getattr(error.value, "code", "") == "store_unreachable"
        link.mend()
        progress = Quiet()
        summary = run(out, nights / "second", progress=progress)
        assert any("resuming sweep" in note for note in progress.notes)
        whole = run(tmp_path / "whole", nights / "second")
        assert rows_of(out, summary.sweep_id) == rows_of(tmp_path / "whole", whole.sweep_id)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveTwin]:
    (tmp_path / "client.toml").touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(tmp_path / "client.toml"))
    with live_twin() as found:
        for number in range(1, 6):
            found.add(number)
        damaged = found.sources[0].replicas[ContainerId(2)]
        damaged.flip(BlockId(20), 100)
        damaged.tree = encode_tree(damaged.scanned_tree())
        yield found


def test_a_running_cluster_is_swept_into_a_bucket_as_into_a_folder(
    tmp_path: Path, out: ObjectPath, cluster: LiveTwin
) -> None:
    """Its tables are in the bucket, too, and stay for the next sweep."""
    found = list[tuple[object, ...]]()
    for place, sweeps in ((tmp_path / "out", 1), (out, 2)):
        words = ("sweep", "run", "--cluster", cluster.address, "--out", place, "--json")
        documents = [json.loads(treefold(*words, check=3).stdout) for _ in range(sweeps)]
        assert documents[-1]["previous"] == (documents[0]["sweepID"] if sweeps > 1 else None)
        rows = [
            str(row)
            for table in (SweepTable.ROOTS, SweepTable.VERDICTS)
            for row in table_of(place, table, documents[-1]["sweepID"])
        ]
        tables = place / "clusters" / "CID-twin"
        names = [name.partition("-")[0] for name in Files(Disk()).files_below(tables / PEERS[0])]
        facts = [documents[-1][name] for name in ("cluster", "verdicts", "findings", "replicas")]
        # What did not change is not written again.
        found.append((facts, sorted(rows), set(names), names.count("chunks")))
    assert found[0] == found[1]


def test_a_cluster_whose_bucket_breaks_off_is_read_on_when_it_is_mended(
    ministack_bucket: S3Bucket, cluster: LiveTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WanLink(ministack_bucket.endpoint.address) as link:
        far = S3Bucket(link.through(ministack_bucket.endpoint), ministack_bucket.name)
        out = use(far, monkeypatch)
        words = ("sweep", "run", "--cluster", cluster.address, "--out", out, "--json")
        link.cut()
        assert error_of(treefold(*words, check=7)) == "store_unreachable"
        link.mend()
        treefold(*words, check=3)
        # As if it had broken off when two datanodes were read.
        progress = out / "clusters" / "CID-twin" / "progress.json"
        Files(Disk()).replace(progress, json.dumps({"done": PEERS[:2]}).encode())
        for source in cluster.sources:
            source.trees = 0
        treefold(*words, check=3)
        assert [source.trees for source in cluster.sources] == [0, 0, 5]
        assert not Files(Disk()).exists(progress)

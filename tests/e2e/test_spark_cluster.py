"""A standalone master with two workers whose Python has nothing of ours: zip and
archive carry all that tasks need. Run by `make test-peers`.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pyspark
import pytest

from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from spark.pack import ARCHIVE, CODE
from tests.e2e.conftest import free_port
from tests.support.bucket_command import flip_a_bit, opened, write
from tests.support.bucket_sync import SyncRunner
from tests.support.java import spark_options
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.peers, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
WAIT_S = 120.0


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a master with two workers, of which two jobs get a core each."""
    folder = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        port = free_port()
        url = f"spark://127.0.0.1:{port}"
        start(
            stack,
            folder / "master.log",
            "master.Master",
            "--host",
            "127.0.0.1",
            "--port",
            port,
            "--webui-port",
            0,
        )
        for number in range(2):
            work = folder / f"work{number}"
            words = (
                "--host",
                "127.0.0.1",
                "--cores",
                2,
                "--memory",
                "1g",
                "--webui-port",
                0,
                "--work-dir",
                work,
                url,
            )
            start(stack, folder / f"worker{number}.log", "worker.Worker", *words)
            wait_for(folder / f"worker{number}.log", "Successfully registered with master")
        yield url


def start(stack: ExitStack, log: Path, name: str, *words: object) -> None:
    command = [HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", *map(str, words)]
    # A worker tells its executors where its Spark is, and nothing of our environment
    # but what Java needs.
    path = ":".join(
        str(Path(found).parent) for tool in ("java", "bash") if (found := shutil.which(tool))
    )
    environment = {
        "SPARK_HOME": str(HOME),
        "PATH": path,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_JAVA_OPTS": spark_options(),
    }
    file = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=log.parent)
    stack.callback(process.wait)
    stack.callback(process.terminate)


def wait_for(log: Path, text: str) -> None:
    wait_until(lambda: text in log.read_text(), f"{text} in {log.name}", timeout_s=WAIT_S)


def test_a_worker_compiles_nothing_of_a_pack(tmp_path: Path, bare: Path, pack: Path) -> None:
    """Caches are made for this interpreter and this processor."""
    with zipfile.ZipFile(pack / CODE) as code:
        code.extractall(tmp_path)
    stats = "fold_encoded.stats.cache_misses"
    assert imported(Path(sys.executable), tmp_path, "sweep.kernels", stats) == "Counter()\n"
    # Not looked at, then.
    (tmp_path / "runtime" / "errors.py").write_text("not Python")
    assert imported(bare, tmp_path, "runtime.errors", "BusyError.code") == "busy\n"
    with tarfile.open(pack / ARCHIVE) as archive:
        names = set(archive.getnames())
    assert {"numpy/__init__.py", "cryptography/exceptions.py"} <= names
    assert f"numpy/__pycache__/__init__.{sys.implementation.cache_tag}.pyc" in names


def imported(python: Path, folder: Path, module: str, value: str) -> str:
    """A value of a module in a folder, as another interpreter prints it."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import {module} as m"
    words = [python, "-I", "-c", f"{code}; print(m.{value})"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def settings(bare: Path) -> list[str]:
    """Settings of a job on the cluster, of whose workers each has room for two."""
    return [
        f"spark.pyspark.python={bare}",
        "spark.executor.memory=512m",
        "spark.cores.max=2",
        "spark.ui.enabled=false",
        f"spark.executor.extraJavaOptions={spark_options()}",
        "spark.driver.host=127.0.0.1",
        "spark.driver.bindAddress=127.0.0.1",
        "spark.sql.shuffle.partitions=4",
    ]


class Driver:
    """One driver of jobs on the cluster (tests.support.cluster_driver)."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def run(self, job: str, **arguments: object) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        words = {name: value if isinstance(value, int) else str(value)
                 for name, value in arguments.items()}  # fmt: skip
        self._process.stdin.write(json.dumps({"job": job, **words}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the driver ended at {job}"
        answer: dict[str, Any] = json.loads(line)
        return answer


@pytest.fixture(scope="module")
def driver(master: str, pack: Path, settings: list[str]) -> Iterator[Driver]:
    words = ["-m", "tests.support.cluster_driver", master, str(pack), *settings]
    with subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        yield Driver(process)
        assert process.stdin
        process.stdin.close()
        assert process.wait(WAIT_S) == 0


def test_a_cluster_with_a_bare_python_lists_and_indexes_a_bucket(
    tmp_path: Path, driver: Driver
) -> None:
    write(tmp_path / "bucket", {f"{number:05}": b"x" for number in range(1_500)})
    address = f"local:{tmp_path}/bucket"
    found = driver.run("index_bucket", address=address, folder=tmp_path / "index", shards=3)
    assert found == {"objects": 1_500, "parts": 3, "is_as_local": True}


def test_a_cluster_with_a_bare_python_finds_damage_in_a_bucket(
    tmp_path: Path, driver: Driver
) -> None:
    body = b"large" * 10_000
    # More keys than a page of the listing has, else it is not cut.
    write(tmp_path / "source", {f"{number:05}": b"x" for number in range(1_001)} | {"b": body})
    state = tmp_path / "state"
    with opened(tmp_path / "source") as source, opened(tmp_path / "target") as target:
        assert SyncRunner(source, target, state)().equal
        assert not target.writer.delete(["00007"])
    write(tmp_path / "source", {"00500": b"yy"})
    flip_a_bit(tmp_path / "target", body)
    places = {name: f"local:{tmp_path}/{name}" for name in ("source", "target")}
    found = driver.run("verify_bucket", state=state, **places)
    lines = [["missing", "00007"], ["changed", "00500"], ["damaged", "b"]]
    assert found == {"lines": lines, "objects": 1_002, "is_as_local": True}


# Blocks of few chunks are sorted, because an aggregate of a block would be wider.
@pytest.mark.parametrize(("chunks", "path"), [(8, "sql"), (2, "exact")])
def test_a_cluster_sweeps_rows_in_no_order(
    tmp_path: Path, driver: Driver, chunks: int, path: str
) -> None:
    cluster = SyntheticCluster(
        seed=9, datanodes=3, containers=30, blocks=4, chunks=chunks, order=RowOrder.SHUFFLED
    )
    truth = synthetic(tmp_path / "table", cluster)
    summary = driver.run("sweep_table", table=tmp_path / "table", out=tmp_path / "out")
    assert summary["diverged"] == [damage.container_id for damage in truth.damages]
    assert summary["paths"][path] > 60
    assert (summary["skipped"], summary["notes"]) == ([], [])


def test_an_executor_that_is_killed_in_the_middle_of_a_stage_costs_nothing(
    tmp_path: Path, master: str, pack: Path, settings: list[str]
) -> None:
    """The command itself, with one executor after another, whose Python is bare."""
    truth = synthetic(
        tmp_path / "table",
        SyntheticCluster(seed=9, datanodes=8, containers=300, blocks=20, chunks=8),
    )
    options = [word for setting in (*settings, "spark.cores.max=1") for word in ("--conf", setting)]
    words = ["sweep", "run", "--engine", "spark", *options, "--master", master, "--pack", pack]
    words += ["--table", tmp_path / "table", "--out", tmp_path / "out", "--json"]
    before = {one.pid for one in executors()}
    with (tmp_path / "said").open("wb") as said:
        run = subprocess.Popen(
            [sys.executable, "-m", "admin.cli", *map(str, words)],
            stdout=said,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        folded = "work/*/folded/.tasks/*/*.parquet"
        wait_until(
            lambda: any((tmp_path / "out").glob(folded)) or run.poll() is not None,
            "a task that has folded something",
            timeout_s=WAIT_S,
        )
        killed = next(one for one in executors() if one.pid not in before)
        killed.kill()
        _, errors = run.communicate(timeout=WAIT_S)
    assert run.returncode == 3, errors
    summary = json.loads((tmp_path / "said").read_text())
    assert summary["diverged"] == [damage.container_id for damage in truth.damages]
    assert (summary["engine"], summary["replicas"], summary["skipped"]) == ("spark", 900, [])
    # Whatever Spark says goes to a file; on a slow machine a sweep tells how far it is.
    told = [line for line in errors.splitlines() if "/s" not in line]
    assert {line.partition(",")[0] for line in told} == {
        # One damage leaves a replica out.
        "read: the stored trees of 899 replicas"
    }


def executors() -> list[psutil.Process]:
    """The executors of the workers that this module started."""
    found = []
    for one in psutil.Process().children(recursive=True):
        # Some end meanwhile.
        with suppress(psutil.Error):
            if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()):
                found.append(one)
    return found

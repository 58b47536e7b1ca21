"""A standalone master with two workers whose Python has nothing of ours: zip and
archive carry all that tasks need.
"""

import json
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pyspark
import pytest

from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from spark.pack import ARCHIVE, CODE, PACKAGES
from tests.support.bucket_command import write
from tests.support.java import spark_options
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
WAIT_S = 120.0


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of our version without site-packages."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    asked = (
        f"import importlib.util as u; print([n for n in {(*PACKAGES, 'numpy', 'pyarrow')!r} if"
        " u.find_spec(n)])"
    )
    told = subprocess.run(
        [python, "-I", "-c", asked], capture_output=True, text=True, check=True
    ).stdout
    assert told.strip() == "[]"
    return python


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a master with two workers of one core each."""
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
                1,
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


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def treefold(*words: object, check: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "admin.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == check, done.stderr
    return done


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What executors without packages need."""
    folder = tmp_path_factory.mktemp("pack")
    packed = json.loads(treefold("sweep", "pack", "--out", folder, "--json", check=0).stdout)
    assert Path(packed["code"]).parent == folder
    assert {name.split()[0] for name in packed["distributions"]} >= {
        "numpy",
        "pyarrow",
        "rocksdict",
    }
    return folder


def test_a_worker_compiles_nothing_of_a_pack(bare: Path, pack: Path) -> None:
    """Caches are made for this interpreter; one cannot be written into a zip."""
    code = f"import sys; sys.path.insert(0, {str(pack / CODE)!r}); import runtime.errors as m"
    told = subprocess.run(
        [bare, "-I", "-c", f"{code}; print(m.__file__)"], capture_output=True, text=True, check=True
    ).stdout
    assert told == f"{pack / CODE}/runtime/errors.pyc\n"
    with tarfile.open(pack / ARCHIVE) as archive:
        names = set(archive.getnames())
    assert "numpy/__init__.py" in names
    assert f"numpy/__pycache__/__init__.{sys.implementation.cache_tag}.pyc" in names


def options(bare: Path, master: str, pack: Path) -> list[object]:
    """The arguments for a job on a cluster."""
    settings = {
        "spark.pyspark.python": bare,
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": spark_options(),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "4",
    }
    words = [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
    return ["--engine", "spark", *words, "--master", master, "--pack", pack]


def run_words(tmp_path: Path, bare: Path, master: str, pack: Path) -> list[object]:
    """The arguments of a sweep of `tmp_path`/table on a cluster."""
    words = [*options(bare, master, pack), "--table", tmp_path / "table"]
    return ["sweep", "run", *words, "--out", tmp_path / "out", "--json"]


def test_a_cluster_with_a_bare_python_lists_and_indexes_a_bucket(
    tmp_path: Path, bare: Path, master: str, pack: Path
) -> None:
    write(tmp_path / "bucket", {f"{number:05}": b"x" for number in range(1_500)})
    index = ("bucket", "index", f"local:{tmp_path}/bucket", "--state", tmp_path / "state", "--json")
    words = (*options(bare, master, pack), "--shards", 3)
    built = json.loads(treefold(*index, *words, check=0).stdout)
    assert (built["objects"], built["parts"], built["engine"]) == (1_500, 3, "spark")
    refreshed = json.loads(treefold(*index, "--check", check=0).stdout)
    assert (refreshed["root"], refreshed["indexDamage"]) == (built["root"], [])
    assert [refreshed[name] for name in ("added", "changed", "removed")] == [0, 0, 0]


def test_a_cluster_with_a_bare_python_sweeps(
    tmp_path: Path, bare: Path, master: str, pack: Path
) -> None:
    truth = synthetic(
        tmp_path / "table", SyntheticCluster(seed=9, datanodes=3, containers=30, blocks=4, chunks=4)
    )
    done = treefold(*run_words(tmp_path, bare, master, pack), check=3)
    summary = json.loads(done.stdout)
    assert (summary["engine"], summary["skipped"]) == ("spark", [])
    assert summary["diverged"] == [damage.container_id for damage in truth.damages]
    # Whatever Spark says goes to a file; on a slow machine a sweep tells how far it is.
    told = [line for line in done.stderr.splitlines() if "/s" not in line]
    assert {line.partition(",")[0] for line in told} == {
        "compared: the stored trees of 90 replicas"
    }


# Blocks of few chunks are sorted, because an aggregate of a block would be wider.
@pytest.mark.parametrize(("chunks", "path"), [(8, "sql"), (2, "exact")])
def test_a_cluster_sweeps_rows_in_no_order(
    tmp_path: Path, bare: Path, master: str, pack: Path, chunks: int, path: str
) -> None:
    cluster = SyntheticCluster(
        seed=9, datanodes=3, containers=30, blocks=4, chunks=chunks, order=RowOrder.SHUFFLED
    )
    truth = synthetic(tmp_path / "table", cluster)
    summary = json.loads(treefold(*run_words(tmp_path, bare, master, pack), check=3).stdout)
    assert summary["diverged"] == [damage.container_id for damage in truth.damages]
    assert summary["paths"][path] > 60
    assert (summary["skipped"], summary["notes"]) == ([], [])


def test_an_executor_that_is_killed_in_the_middle_of_a_stage_costs_nothing(
    tmp_path: Path, bare: Path, master: str, pack: Path
) -> None:
    truth = synthetic(
        tmp_path / "table",
        SyntheticCluster(seed=9, datanodes=8, containers=300, blocks=20, chunks=8),
    )
    words = [sys.executable, "-m", "admin.cli", *run_words(tmp_path, bare, master, pack)]
    with (tmp_path / "said").open("wb") as said:
        run = subprocess.Popen(list(map(str, words)), stdout=said, stderr=subprocess.PIPE, cwd=ROOT)
        folded = "work/*/folded/.tasks/*/*.parquet"
        wait_until(
            lambda: any((tmp_path / "out").glob(folded)) or run.poll() is not None,
            "a task that has folded something",
            timeout_s=WAIT_S,
        )
        killed = executors()[0]
        killed.kill()
        _, errors = run.communicate(timeout=WAIT_S)
    assert run.returncode == 3, errors.decode()
    summary = json.loads((tmp_path / "said").read_text())
    assert summary["diverged"] == [damage.container_id for damage in truth.damages]
    assert (summary["replicas"], summary["skipped"]) == (900, [])


def executors() -> list[psutil.Process]:
    """The executors of the workers that this module started."""
    found = []
    for one in psutil.Process().children(recursive=True):
        # Some end meanwhile.
        with suppress(psutil.Error):
            if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()):
                found.append(one)
    return found

"""What tests of several files share because it is dear."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from tests.support.s3_servers import S3Endpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def session() -> Iterator["SparkSession"]:
    """A local Spark of two cores, which serves Spark Connect too; all tests that ask
    for it are of the xdist group "spark".
    """
    from spark.session import spark_session

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        # As a server has it that Spark's own script starts.
        "spark.sql.artifact.isolation.enabled": "true",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(free_port()),
    }
    with pytest.MonkeyPatch.context() as environment:
        # The server's own Python, by which it plans data sources.
        environment.setenv("PYSPARK_PYTHON", sys.executable)
        # What a cluster gives its executors; emulators of S3 accept it.
        for name, value in S3Endpoint("", "test", "test").environment.items():
            environment.setenv(name, value)
        with spark_session("local[2]", settings=settings) as session:
            environment.undo()
            yield session


@pytest.fixture(scope="session")
def server(session: "SparkSession") -> str:
    """The address of that server of Spark Connect."""
    return f"sc://127.0.0.1:{session.conf.get('spark.connect.grpc.binding.port')}"


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of our version without site-packages."""
    from spark.pack import PACKAGES

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


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What executors without packages need."""
    from admin.cli import treefold

    folder = tmp_path_factory.mktemp("pack")
    done = CliRunner().invoke(treefold, ["sweep", "pack", "--out", str(folder), "--json"])
    assert done.exit_code == 0, done.stderr
    packed = json.loads(done.stdout)
    assert Path(packed["code"]).parent == folder
    assert {name.split()[0] for name in packed["distributions"]} >= {
        "numpy",
        "pyarrow",
        "rocksdict",
    }
    return folder

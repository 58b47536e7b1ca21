"""Real S3 servers on free loopback ports: ministack and moto, as processes that end
with the tests.

There is one of a kind for each test session (each worker of xdist is one) that asks for
it, and a fresh bucket for each test. Both are emulators that keep objects in memory;
real stores are in tests/support/rgw.py and tests/support/ozone.py.
"""

import contextlib
import functools
import itertools
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import botocore.session
import psutil
import pytest
from botocore.client import BaseClient
from botocore.config import Config

from tests.support.waiting import wait_until

_BIN = Path(sys.executable).parent
# A cold start on a machine whose cores are shared.
_START_S = 90.0
_STOP_S = 20.0
# Between the choice of a free port and its use another process may take it.
_START_TRIES = 5
# The server is killed when this process ends, however it ends (PR_SET_PDEATHSIG).
_LAUNCHER = """\
import ctypes, os, signal, sys
parent, command = int(sys.argv[1]), sys.argv[2:]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == parent:
    os.execv(command[0], command)
"""
# moto as its own script starts it, but that it does not list its modules' folders twice
# for each request, which took a quarter of its time, nor print a line for it.
_MOTO = """\
import gc, logging
from moto import backends, server
names = tuple(backends.list_of_moto_modules())
backends.list_of_moto_modules = lambda: names
logging.getLogger("werkzeug").setLevel(logging.ERROR)
gc.set_threshold(20_000)
server.main()
"""
_bucket_numbers = itertools.count(1)


@functools.cache
def _session() -> botocore.session.Session:
    """One for all clients: it reads the descriptions of all services of AWS."""
    return botocore.session.Session()


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """Where an S3 server listens, and one user of it."""

    url: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    @property
    def address(self) -> str:
        """Host and port."""
        return self.url.partition("://")[2]

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which other programs find the credentials."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def set_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Give them to this process and those that it starts, as a user does: the
        product takes keys from the environment, and never from an address.
        """
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    def client(self, service: str = "s3") -> "closing[BaseClient]":
        """A botocore client, which knows nothing of our own; close it."""
        options = Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            # A failure of a local server is one of the test.
            retries={"total_max_attempts": 1},
        )
        return closing(
            _session().create_client(
                service,
                endpoint_url=self.url,
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                region_name=self.region,
                config=options,
            )
        )

    def fresh_bucket(self) -> "S3Bucket":
        """Make a bucket that no other test has."""
        name = f"bucket-{os.getpid()}-{next(_bucket_numbers)}"
        with self.client() as client:
            client.create_bucket(Bucket=name)
        return S3Bucket(self, name)


@dataclass(frozen=True, slots=True)
class S3Bucket:
    """One bucket of a server."""

    endpoint: S3Endpoint
    name: str


class ServerProcess:
    """A server on a free loopback port; a context manager that always ends it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        health_path: str,
        log: Path,
        choose_port: Callable[[], int],
    ) -> None:
        """`{port}` in the command and the environment stands for the port. The server
        is ready once it answers below `health_path`.
        """
        self._command = command
        self._environment = environment
        self._health_path = health_path
        self._log = log
        self._choose_port = choose_port
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> "ServerProcess":
        for left in reversed(range(_START_TRIES)):
            port = self._choose_port()
            self.url = f"http://127.0.0.1:{port}"
            if self._is_started(port):
                return self
            said = self._log.read_text()[-2000:]
            assert left, f"{self._command[0]} ended while it started: {said}"
        raise AssertionError

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_STOP_S)

    def _is_started(self, port: int) -> bool:
        """False if it ended, as it does when another process has taken the port."""
        process = self._start(port)

        def is_settled() -> bool:
            # Not just any answer: whoever has taken the port may give one too.
            return process.poll() is not None or (_listens(process.pid, port) and self._answers())

        try:
            wait_until(is_settled, f"{self._command[0]} to answer", timeout_s=_START_S)
        except BaseException:
            self.kill()
            raise
        return process.poll() is None

    def _start(self, port: int) -> "subprocess.Popen[bytes]":
        command = [word.format(port=port) for word in self._command]
        settings = {name: value.format(port=port) for name, value in self._environment.items()}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCHER, str(os.getpid()), *command],
                env={**inherited, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C ends the tests first, and they end the servers.
                start_new_session=True,
            )
        return self._process

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            # An error's answer is an answer too; it holds a connection until closed.
            try:
                with urllib.request.urlopen(self.url + self._health_path, timeout=5):
                    return True
            except urllib.error.HTTPError as error:
                error.close()
        return False


def _listens(pid: int, port: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        connections = psutil.Process(pid).net_connections("tcp")
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)
    return False


def free_port() -> int:
    """A loopback port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ministack(
    log: Path, *, checks_signatures: bool = False, choose_port: Callable[[], int] = free_port
) -> ServerProcess:
    """The emulator ministack, which has to be entered."""
    environment = {
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": "{port}",
        "LOG_LEVEL": "WARNING",
        "AUTH": str(checks_signatures).lower(),
        # It would listen on one more port, the same for all.
        "IOT_MTLS_ENABLED": "0",
    }
    return ServerProcess(
        [str(_BIN / "ministack")], environment, "/_ministack/health", log, choose_port
    )


def moto(log: Path) -> ServerProcess:
    """The emulator moto, which has to be entered."""
    command = [sys.executable, "-c", _MOTO, "-H", "127.0.0.1", "-p", "{port}"]
    return ServerProcess(command, {}, "/moto-api/", log, free_port)


@pytest.fixture(scope="session")
def ministack_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Endpoint]:
    """A ministack that takes any signature."""
    with ministack(tmp_path_factory.mktemp("ministack") / "log") as server:
        yield S3Endpoint(server.url, "test", "test")


@pytest.fixture(scope="session")
def signing_ministack_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[S3Endpoint]:
    """A ministack that checks signatures, and a user of it who may do all of S3."""
    log = tmp_path_factory.mktemp("signing-ministack") / "log"
    with ministack(log, checks_signatures=True) as server:
        # Signatures of the root user "test" are not checked.
        with S3Endpoint(server.url, "test", "test").client("iam") as iam:
            iam.create_user(UserName="treefold")
            key = iam.create_access_key(UserName="treefold")["AccessKey"]
            policy = "arn:aws:iam::aws:policy/AmazonS3FullAccess"
            iam.attach_user_policy(UserName="treefold", PolicyArn=policy)
        yield S3Endpoint(server.url, key["AccessKeyId"], key["SecretAccessKey"])


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Endpoint]:
    """A moto, which takes any signature."""
    with moto(tmp_path_factory.mktemp("moto") / "log") as server:
        yield S3Endpoint(server.url, "test", "test")


@pytest.fixture
def ministack_bucket(ministack_server: S3Endpoint) -> S3Bucket:
    """A fresh bucket of ministack."""
    return ministack_server.fresh_bucket()


@pytest.fixture
def signing_ministack_bucket(signing_ministack_server: S3Endpoint) -> S3Bucket:
    """A fresh bucket of the ministack that checks signatures."""
    return signing_ministack_server.fresh_bucket()


@pytest.fixture
def moto_bucket(moto_server: S3Endpoint) -> S3Bucket:
    """A fresh bucket of moto."""
    return moto_server.fresh_bucket()


@pytest.fixture(params=["ministack_bucket", "moto_bucket"])
def s3_bucket(request: pytest.FixtureRequest) -> S3Bucket:
    """A fresh bucket of each emulator, one after the other: a test that was fitted to
    one of them fails with the other.
    """
    bucket: S3Bucket = request.getfixturevalue(request.param)
    return bucket

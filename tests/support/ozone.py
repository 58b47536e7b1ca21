"""A real Ozone cluster on loopback for the tests marked `ozone`
(tests/testbed/ozone_cluster.py does the work).
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message

from merkle.replica import ContainerState
from merkle.tree import ContainerId
from ozone.errors import ManagerUnavailableError
from ozone.hadoop_rpc import HadoopRpcClient
from ozone.manager import ManagerClient
from ozone.scm_client import ClusterContainer, ScmClient
from tests.support.s3_servers import S3Bucket, S3Endpoint

ROOT = Path(__file__).resolve().parents[2]
# How long an OM keeps its log, unless a test wants another time.
LOG_KEPT_S = 1200
_SCRIPT = ROOT / "tests" / "testbed" / "ozone_cluster.py"
# Other ports than those of a cluster that may run here already, and below those that
# the kernel gives to outgoing connections (from 32768): one of these had taken a
# datanode's. Two such clusters at a time need two offsets, and have two folders.
_USUAL_OFFSET = 12000
_PORT_OFFSET = int(os.environ.get("OZONE_PORT_OFFSET", _USUAL_OFFSET))
# The folder of a cluster that runs already: the tests use it and leave it running.
# To start one takes longer than most tests.
_RUNNING = os.environ.get("OZONE_RUNNING", "")
# The same of a second one beside it, for tests of two regions.
_RUNNING_SECOND = os.environ.get("OZONE_RUNNING_SECOND", "")
_SECOND_PORT_OFFSET = _PORT_OFFSET - 2000
_TESTBED = ROOT / ".testbed"
_FOLDER = _TESTBED if _PORT_OFFSET == _USUAL_OFFSET else _TESTBED / str(_PORT_OFFSET)
# A third less time of the processors for a start, and two thirds less for a command: no
# process lives long enough for its second compiler. Benchmarks go without.
_JAVA_FLAGS = "-XX:TieredStopAtLevel=1"
_LOCATION_PROTOCOL = "org.apache.hadoop.hdds.scm.protocol.StorageContainerLocationProtocol"
# Both run the same jars.
LIB = Path(os.environ.get("OZONE_TESTBED_LIB", _TESTBED / "lib"))


class OzoneCluster:
    """One SCM, one OM, three datanodes or another number; a context manager that leaves
    nothing running and no data behind.
    """

    def __init__(
        self,
        folder: Path,
        port_offset: int = _PORT_OFFSET,
        *,
        datanodes: int = 3,
        java_flags: str = "",
    ) -> None:
        self.folder, self._datanodes = folder, datanodes
        self._offset, self.log_kept_s = port_offset, LOG_KEPT_S
        is_named = str(folder) in (_RUNNING, _RUNNING_SECOND)
        self._is_kept = is_named and (folder / "om" / "pid").exists()
        if self._is_kept:
            self._offset = int((folder / "port-offset").read_text())
        self._environment = {
            **os.environ,
            "OZONE_TESTBED_DIR": str(folder),
            "OZONE_TESTBED_LIB": str(LIB),
            # Replicas that only one scan saw damaged would be deleted and copied anew
            # within seconds.
            "OZONE_REPLICATION_INTERVAL": "1h",
            "OZONE_SCAN_GAP": "1s",
            "OZONE_JAVA_FLAGS": java_flags,
        }

    def __enter__(self) -> "OzoneCluster":
        if self._is_kept:
            return self
        self.fetch()
        self._run("wipe")
        try:
            sizes = "--port-offset", str(self._offset), "--datanodes", str(self._datanodes)
            self._run(*sizes, "start")
            eventually("the OM leads", self._om_leads)
        except BaseException:
            self._run("wipe")
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_kept:
            self._run("wipe")

    def _om_leads(self) -> bool:
        with closing(ManagerClient([self.om_address], user="test")) as manager:
            try:
                return bool(manager.s3_volume())
            except ManagerUnavailableError:
                return False

    def fetch(self) -> None:
        """Fetch the jars, unless they are there."""
        LIB.parent.mkdir(parents=True, exist_ok=True)
        # By one of the processes that run the tests; the others wait for it.
        with (LIB.parent / "fetching").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not list(LIB.glob("hdds-server-scm-*.jar")):
                self._run("fetch")

    def volume(self, datanode: int) -> Path:
        return self.folder / f"dn{datanode}" / "volume1"

    def address(self, datanode: int) -> str:
        """The datanode's gRPC port, which its peers read from."""
        return f"127.0.0.1:{19_800 + self._offset + 20 * (datanode - 1)}"

    @property
    def scm_address(self) -> str:
        """SCM's port for clients."""
        return f"127.0.0.1:{9860 + self._offset}"

    @property
    def s3_address(self) -> str:
        """Where the S3 gateway listens; a bucket of it is one of the Ozone volume
        s3v.
        """
        return f"127.0.0.1:{9878 + self._offset}"

    @property
    def om_address(self) -> str:
        """The gRPC port of the OM."""
        return f"127.0.0.1:{8981 + self._offset}"

    @property
    def om_metrics(self) -> str:
        """The URL of what the OM counts."""
        return f"http://127.0.0.1:{9874 + self._offset}/jmx"

    def shell(self, *commands: str, settings: Sequence[str] = ()) -> None:
        """Run `ozone sh` commands in one start of it; `settings` are key=value."""
        options = [word for setting in settings for word in ("--set", setting)]
        self._run(
            "sh", *options, *(word for command in commands for word in ("--execute", command))
        )

    def admin(self, *words: str) -> str:
        return self._run("admin", *words)

    def begin_to_close(self, but: Collection[ContainerId] = ()) -> list[ContainerId]:
        """Have SCM close all open containers; which ones are closing then, `but` those
        that were before. What is written next gets other containers. One that was open
        while a datanode stopped may be closing for an hour: a test waits for its own.
        """
        with (
            closing(ScmClient([self.scm_address])) as client,
            closing(HadoopRpcClient(self.scm_address, _LOCATION_PROTOCOL)) as closer,
        ):
            states = {one.container_id: one.state for one in client.containers()}
            opened = [one for one in states if states[one] is ContainerState.OPEN]
            for answer in closer.call_all([*map(_close_request, opened)]):
                assert isinstance(answer, bytes), answer
            closing_already = [one for one in states if states[one] is ContainerState.CLOSING]
        return sorted({*opened, *closing_already}.difference(but))

    def await_closed(
        self, container_ids: Sequence[ContainerId], *, timeout_s: float = 120.0
    ) -> list[ContainerId]:
        """Wait until these are closed and SCM knows the root of each replica; returns
        those that hold data.
        """
        with closing(ScmClient([self.scm_address])) as client:

            def with_blocks() -> list[ClusterContainer]:
                # SCM deletes a container without blocks once it is closed.
                gone = (ContainerState.DELETING, ContainerState.DELETED)
                found = client.get_containers(container_ids).values()
                return [one for one in found if one.state not in gone]

            def unknown() -> list[str]:
                found = with_blocks()
                replicas = client.replicas([one.container_id for one in found])
                return [
                    f"{one.container_id} {one.state}: {replicas[one.container_id]}"
                    for one in found
                    if one.state is not ContainerState.CLOSED
                    or len(replicas[one.container_id]) != one.required_replicas
                    # A replica without data has no root, such as one of a short block.
                    or (
                        not one.is_erasure_coded
                        and None in {each.data_checksum for each in replicas[one.container_id]}
                    )
                ]

            try:
                eventually("SCM knows the roots of all replicas", lambda: not unknown(), timeout_s)
            except AssertionError as err:
                raise AssertionError("\n".join([str(err), *unknown()])) from err
            return [one.container_id for one in with_blocks()]

    def roots(self, container_ids: Sequence[int]) -> dict[str, dict[int, tuple[str, str]]]:
        """State and root of each replica as SCM knows them, by the datanode's UUID and
        the container.
        """
        found: dict[str, dict[int, tuple[str, str]]] = {}
        for status in json.loads(
            self.admin("container", "reconcile", "--status", *map(str, container_ids))
        ):
            for replica in status["replicas"]:
                replicas = found.setdefault(replica["datanode"]["id"], {})
                replicas[status["containerID"]] = (replica["state"], replica["dataChecksum"])
        return found

    def stop(self, datanode: int) -> None:
        self._run("stop-datanode", str(datanode))

    def start(self, datanode: int) -> None:
        self._run("start-datanode", str(datanode))

    @property
    def om_database(self) -> Path:
        """The folder of the OM's database, and of its log of Raft."""
        return self.folder / "om" / "meta"

    def stop_om(self) -> None:
        self._run("stop-om")

    def start_om(self, *, log_kept_s: int = LOG_KEPT_S) -> None:
        """Start it, with a log of so many seconds, and wait until it leads."""
        self.log_kept_s = log_kept_s
        self._environment["OZONE_WAL_TTL"] = str(log_kept_s)
        self._run("start-om")

    def log(self, datanode: int) -> str:
        return (self.folder / f"dn{datanode}" / "log").read_text(errors="replace")

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, str(_SCRIPT), *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, (
            f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout


def _close_request(container_id: int) -> Message:
    """SCM's request to close a container, which no command of ours sends: type 7, and
    field 12 with the container's ID.
    """
    body, rest = b"\x08", container_id
    while rest > 0x7F:
        body, rest = body + bytes([rest & 0x7F | 0x80]), rest >> 7
    body += bytes([rest])
    # Unknown fields of any message are written as they were read.
    return Empty.FromString(b"\x08\x07\x62" + bytes([len(body)]) + body)


def eventually(what: str, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until something holds, which other processes bring about; fail by name if it
    does not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.2)


def first_cluster(java_flags: str = "") -> OzoneCluster:
    """The cluster that tests share."""
    return OzoneCluster(Path(_RUNNING) if _RUNNING else _FOLDER, java_flags=java_flags)


def second_cluster(java_flags: str = "") -> OzoneCluster:
    """Another one, which shares nothing with the first but the machine. It has one
    datanode: what is tested there is its OM and its gateway.
    """
    folder = Path(_RUNNING_SECOND) if _RUNNING_SECOND else _FOLDER / "second"
    folder.mkdir(parents=True, exist_ok=True)
    return OzoneCluster(folder, _SECOND_PORT_OFFSET, datanodes=1, java_flags=java_flags)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put modules that damage replicas, stop datanodes or join the cluster after all
    others, which share it with them, in the order of what they leave behind.
    """
    items.sort(
        key=lambda item: max(
            (mark.kwargs.get("is_last", 0) for mark in item.iter_markers("ozone")), default=0
        )
    )


@pytest.fixture(scope="session")
def ozone_cluster() -> Iterator[OzoneCluster]:
    """The cluster of all tests of a run: starting one takes a minute.

    A module closes what is open and writes what it closes or damages to containers of
    its own (`begin_to_close`), names its own volumes and buckets, and starts again what
    it stops. One that damages or stops anything is marked `ozone(is_last=N)`: the
    higher, the later.
    """
    with first_cluster(_JAVA_FLAGS) as started:
        yield started


@pytest.fixture(scope="module")
def second_ozone_cluster(ozone_cluster: OzoneCluster) -> Iterator[OzoneCluster]:
    """A second cluster beside it."""
    with second_cluster(_JAVA_FLAGS) as started:
        assert started.om_address != ozone_cluster.om_address
        yield started


@pytest.fixture(scope="session")
def ozone_gateway(ozone_cluster: OzoneCluster) -> S3Endpoint:
    """The S3 gateway of a real cluster."""
    # Without security it takes any credentials.
    return S3Endpoint(f"http://{ozone_cluster.s3_address}", "any", "thing")


@pytest.fixture
def ozone_bucket(ozone_gateway: S3Endpoint) -> S3Bucket:
    """A fresh bucket of Ozone's gateway."""
    return ozone_gateway.fresh_bucket()

"""Two real and independent Ceph object stores on loopback for the tests marked `peers`
(tests/testbed/ceph_rgw.sh does the work).
"""

import json
import os
import random
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.processes import ROOT
from tests.support.s3_servers import S3Bucket, S3Endpoint
from tests.support.wan import WanLink

_SCRIPT = ROOT / "tests" / "testbed" / "ceph_rgw.sh"
# A start takes 40 s on an idle machine; the script gives up each wait after 90 s.
_COMMAND_S = 600.0
# The kernel gives none of these to a client, who would have it when the server starts.
_S3_PORTS, _MONITOR_PORTS = range(10_100, 13_500), range(13_600, 17_000)


@dataclass(frozen=True, slots=True)
class RgwSite:
    """One site by its users: an ordinary one, one who may read and trim the change
    logs, and the system user, whose writes may set version IDs and owners.
    """

    name: str
    endpoint: S3Endpoint
    log_reader: S3Endpoint
    system: S3Endpoint


class RgwPair:
    """Sites `a` and `b`, which know nothing of each other; a context manager that
    leaves nothing running and no data behind.
    """

    def __init__(self, folder: Path) -> None:
        self._environment = {
            **os.environ,
            "CEPH_RGW_DIR": str(folder),
            "CEPH_RGW_MODE": "pair",
        }

    def __enter__(self) -> "RgwPair":
        # One that was killed may have left daemons.
        self._run("destroy")
        s3_port, monitor_port = _free_pair(_S3_PORTS), _free_pair(_MONITOR_PORTS)
        self._environment |= {
            "CEPH_RGW_PORT": str(s3_port),
            "CEPH_RGW_MON_PORT": str(monitor_port),
            **self._settings(s3_port),
        }
        try:
            self._run("start")
        except BaseException:
            self._run("destroy")
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._run("destroy")

    def _settings(self, s3_port: int) -> dict[str, str]:
        """More settings of the script; the second site listens behind the first."""
        return {}

    def site(self, name: str) -> RgwSite:
        """Site `a` or `b`."""
        lines = self._run("env").splitlines()
        settings = dict(line.split("=", 1) for line in lines)
        users = [
            S3Endpoint(
                settings[f"RGW_{name.upper()}_ENDPOINT"],
                settings[f"RGW_{user}_ACCESS_KEY"],
                settings[f"RGW_{user}_SECRET_KEY"],
            )
            for user in ("APP", "ADMIN", "SYSTEM")
        ]
        return RgwSite(name, *users)

    def kill(self, site: str, daemon: str) -> None:
        """End one daemon (mon, osd, rgw) as a power cut would."""
        self._run("kill", site, daemon)

    def start(self, site: str, daemon: str) -> None:
        """Start one daemon again and wait until it answers."""
        self._run("up", site, daemon)

    def pause(self, site: str, daemon: str) -> None:
        """Stop one daemon where it is, until `resume`."""
        os.kill(self._process_id(site, daemon), signal.SIGSTOP)

    def resume(self, site: str, daemon: str) -> None:
        """Let one daemon go on."""
        os.kill(self._process_id(site, daemon), signal.SIGCONT)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the daemons that run, by their names."""
        daemons = [(site, daemon) for site in "ab" for daemon in ("mon", "osd", "rgw")]
        found = [psutil.Process(self._process_id(*one)).cpu_times() for one in daemons]
        return {
            f"{daemon} {site}": times.user + times.system
            for (site, daemon), times in zip(daemons, found, strict=True)
        }

    def _process_id(self, site: str, daemon: str) -> int:
        folder = Path(self._environment["CEPH_RGW_DIR"])
        return int((folder / site / "run" / f"{daemon}.pid").read_text())

    def collect_garbage(self, site: str) -> None:
        """Give back the space of what was deleted, which Ceph keeps for hours."""
        self._run("admin", site, "gc", "process", "--include-all")

    def damage(self, site: str, bucket: str, key: str, body: bytes | None) -> None:
        """Change the bytes of a small object behind its gateway's index, or remove them
        where `body` is None.
        """
        pool = f"zone-{site}.rgw.buckets.data"
        stats = json.loads(self._run("admin", site, "bucket", "stats", f"--bucket={bucket}"))
        name = f"{stats['marker']}_{key}"
        if body is None:
            self._run("rados", site, "-p", pool, "rm", name)
            return
        with tempfile.NamedTemporaryFile() as file:
            file.write(body)
            file.flush()
            self._run("rados", site, "-p", pool, "put", name, file.name)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            ["bash", str(_SCRIPT), *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
        assert done.returncode == 0, f"{words} ended with {done.returncode}\n{done.stderr}"
        return done.stdout


class RgwMultisite(RgwPair):
    """Sites `a` and `b` of one realm, where `b` follows `a` by Ceph's own replication,
    and a link before each, across which the other one reaches it.
    """

    def __init__(self, folder: Path, *, delay_ms: float, mbit: float) -> None:
        """The delay is one way; `mbit` holds for each direction."""
        super().__init__(folder)
        self._environment["CEPH_RGW_MODE"] = "multisite"
        self._delay_ms, self._mbit = delay_ms, mbit
        self._opened = ExitStack()
        self.links: tuple[WanLink, ...] = ()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._opened.close()

    def wait_until_synced(self) -> None:
        """Wait until no shard of metadata or data is behind."""
        self._run("wait-sync", "300")

    def leave_out(self, bucket: str) -> None:
        """Let Ceph replicate nothing of a bucket any more."""
        self._run("admin", "a", "bucket", "sync", "disable", f"--bucket={bucket}")

    def _settings(self, s3_port: int) -> dict[str, str]:
        ports = s3_port, s3_port + 1
        with ExitStack() as held:
            # A link takes whichever port is free, and neither of these.
            for port in ports:
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            self.links = tuple(
                self._opened.enter_context(
                    WanLink(f"127.0.0.1:{port}", delay_ms=self._delay_ms, mbit=self._mbit)
                )
                for port in ports
            )
        ours, theirs = self.links
        return {
            "CEPH_RGW_ADVERTISE_A": f"http://{ours.address}",
            "CEPH_RGW_ADVERTISE_B": f"http://{theirs.address}",
        }


def _free_pair(ports: range) -> int:
    """The first of two neighbouring loopback ports that nobody listens on."""
    for _ in range(100):
        port = random.choice(ports)
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no two neighbouring ports are free")


@pytest.fixture(scope="session")
def rgw_pair() -> Iterator[RgwPair]:
    """Two independent sites for the whole session."""
    # Each worker of xdist has its own.
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with RgwPair(ROOT / ".testbed" / f"ceph-{worker}") as pair:
        yield pair


@pytest.fixture(scope="session")
def rgw(rgw_pair: RgwPair) -> RgwSite:
    """One real Ceph site."""
    return rgw_pair.site("a")


@pytest.fixture(scope="session")
def rgw_endpoint(rgw: RgwSite) -> S3Endpoint:
    """An ordinary user of a real Ceph site."""
    return rgw.endpoint


@pytest.fixture
def rgw_bucket(rgw: RgwSite) -> S3Bucket:
    """A fresh bucket of a real Ceph site."""
    return rgw.endpoint.fresh_bucket()

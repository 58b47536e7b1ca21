"""Three real SCMs of one group on loopback, without datanodes and OM: for what only
their elections show.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.ozone import LIB, first_cluster

_SERVICE, _COUNT = "group", 3
# Apart from all ports of the clusters of tests.support.ozone.
_PORT_BASE, _PORT_STEP = 18_000, 20
# By the key of the port, where it is in a node's ports. SCM's datanode port follows its
# client port, as by default.
_PORTS = {
    "client": 0, "datanode": 1, "block.client": 2, "security.service": 3, "ratis": 4, "grpc": 5,
}  # fmt: skip
_HTTP = 6
_START_S = 90.0
_JAVA = (
    "--add-opens=java.management/com.sun.jmx.mbeanserver=ALL-UNNAMED",
    "--add-exports=java.management/com.sun.jmx.mbeanserver=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
    "--add-opens=java.base/java.lang.reflect=ALL-UNNAMED",
    "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv4Stack=true",
)  # fmt: skip
_MAIN = "org.apache.hadoop.hdds.scm.server.StorageContainerManagerStarter"


class ScmProcesses:
    """The SCMs, counted from 0; a context manager that leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def addresses(self) -> list[str]:
        """Their ports for clients; those for datanodes follow them."""
        return [f"127.0.0.1:{_port(number, 'client')}" for number in range(_COUNT)]

    @property
    def datanode_addresses(self) -> list[str]:
        """Their ports for datanodes."""
        return [f"127.0.0.1:{_port(number, 'datanode')}" for number in range(_COUNT)]

    def __enter__(self) -> "ScmProcesses":
        first_cluster().fetch()
        try:
            for number in range(_COUNT):
                self._configure(number)
            self._finish([self._java(0, "--init")])
            self.start(0)
            others = range(1, _COUNT)
            self._finish([self._java(number, "--bootstrap") for number in others])
            self.start(*others)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._running):
            self.kill(number)
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, *numbers: int) -> None:
        """Start these, and wait until they listen."""
        self._running |= {number: self._java(number) for number in numbers}
        deadline_s = time.monotonic() + _START_S
        waiting = list(numbers)
        while waiting:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", _port(waiting[0], "client"))) == 0:
                    waiting.pop(0)
                    continue
            assert self._running[waiting[0]].poll() is None, self._said(waiting[0])
            assert time.monotonic() < deadline_s, self._said(waiting[0])
            time.sleep(0.2)

    def kill(self, number: int) -> None:
        """End one at once, as a power cut would."""
        process = self._running.pop(number)
        process.send_signal(signal.SIGKILL)
        process.wait(30)

    def _configure(self, number: int) -> None:
        folder = self._folder / f"scm{number}"
        (folder / "conf").mkdir(parents=True)
        settings: dict[str, object] = {
            "ozone.scm.service.ids": _SERVICE,
            f"ozone.scm.nodes.{_SERVICE}": ",".join(f"scm{other}" for other in range(_COUNT)),
            "ozone.scm.node.id": f"scm{number}",
            "ozone.scm.primordial.node.id": "scm0",
            "ozone.metadata.dirs": folder / "meta",
            "ozone.http.basedir": folder / "http",
            "hdds.scm.safemode.enabled": "false",
            "hdds.heartbeat.interval": "1s",
            "ozone.scm.heartbeat.thread.interval": "1s",
            "ozone.scm.stale.node.interval": "15s",
            "ozone.scm.dead.node.interval": "30s",
            "ozone.scm.event.ContainerReportOrIncrementalContainerReport.thread.pool.size": 1,
            "ozone.scm.ha.ratis.leader.election.timeout": "2s",
            "ozone.scm.ha.ratis.leader.ready.check.interval": "100ms",
        }
        for other in range(_COUNT):
            suffix = f"{_SERVICE}.scm{other}"
            settings[f"ozone.scm.address.{suffix}"] = "127.0.0.1"
            settings[f"ozone.scm.http-address.{suffix}"] = f"127.0.0.1:{_port(other, '') + _HTTP}"
            for name in _PORTS:
                settings[f"ozone.scm.{name}.port.{suffix}"] = _port(other, name)
        rows = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>\n"
            for key, value in settings.items()
        )
        text = f'<?xml version="1.0"?>\n<configuration>\n{rows}</configuration>\n'
        (folder / "conf" / "ozone-site.xml").write_text(text)
        (folder / "conf" / "log4j.properties").write_text(
            "log4j.rootLogger=INFO,out\nlog4j.appender.out=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.out.target=System.err\n"
            "log4j.appender.out.layout=org.apache.log4j.SimpleLayout\n"
        )

    def _java(self, number: int, *arguments: str) -> "subprocess.Popen[bytes]":
        folder = self._folder / f"scm{number}"
        conf = folder / "conf"
        words = [
            "java", "-Xmx384m", *_JAVA, f"-Dhadoop.home.dir={folder}",
            f"-Dlog4j.configuration=file:{conf}/log4j.properties", "-cp", f"{conf}:{LIB}/*",
            _MAIN, *arguments,
        ]  # fmt: skip
        with (folder / "log").open("ab") as log:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder, env=os.environ
            )

    def _finish(self, processes: Sequence["subprocess.Popen[bytes]"]) -> None:
        for one in processes:
            assert one.wait(_START_S) == 0, "\n".join(map(self._said, range(_COUNT)))

    def _said(self, number: int) -> str:
        return (self._folder / f"scm{number}" / "log").read_text(errors="replace")[-4000:]


def _port(number: int, name: str) -> int:
    return _PORT_BASE + _PORT_STEP * number + _PORTS.get(name, 0)

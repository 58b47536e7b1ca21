"""Limits of processes that run are taken over from their files at SIGHUP, and who set
which is known.
"""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dnagent.agent import Agent
from dnagent.config import LIVE_LIMITS as AGENT_LIMITS
from dnagent.config import AgentConfig
from ozone.volume import Hold
from runtime.config import load
from runtime.errors import ConfigError
from runtime.live_limits import LiveLimit, limits_of, other_changes
from runtime.process import run_until_stopped
from runtime.service_manager import ServiceManager
from runtime.stop_signals import StopSignals
from runtime.thread_health import ThreadHealth
from scm.client import ControllerClient
from scm.config import LIVE_LIMITS as CONTROLLER_LIMITS
from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.volumes import new_volume


def values(limits: tuple[LiveLimit, ...]) -> Mapping[str, tuple[int, str]]:
    return {limit.name: (limit.value, limit.set_by) for limit in limits}


def test_a_limit_says_where_it_was_set_and_keeps_that_while_it_stays(tmp_path: Path) -> None:
    """Operator rule R9."""
    file = tmp_path / "controller.toml"
    file.write_text("orders_per_datanode = 4\n")
    first = limits_of(load(file, ControllerConfig), CONTROLLER_LIMITS, file=file, now_s=10)
    assert values(first) == {
        "orders_per_datanode": (4, str(file)),
        "automatic.jobs_max": (4, "default"),
    }
    file.write_text("orders_per_datanode = 4\n[automatic]\njobs_max = 9\n")
    config = load(file, ControllerConfig)
    second = limits_of(config, CONTROLLER_LIMITS, file=file, now_s=20, earlier=first)
    assert [limit.set_at_s for limit in second] == [10, 20]
    assert values(second)["automatic.jobs_max"] == (9, str(file))


def test_what_is_no_limit_needs_a_restart_and_is_named() -> None:
    before = ControllerConfig(stale_after_s="90s", orders_per_datanode=2)
    after = ControllerConfig(stale_after_s="80s", orders_per_datanode=3)
    assert other_changes(before, after, CONTROLLER_LIMITS) == ("stale_after_s",)


def test_a_controller_takes_over_its_limits_and_shows_them(tmp_path: Path) -> None:
    """Operator rule R9: beside the measured figures."""
    file = tmp_path / "controller.toml"
    file.write_text("orders_per_datanode = 5\n")
    flags = {"listen": "127.0.0.1:0", "state_folder": tmp_path / "state"}
    server = ControllerServer(load(file, ControllerConfig, flags), file)
    client = ControllerClient(server.address)
    try:
        assert values(client.status().limits)["orders_per_datanode"] == (5, str(file))
        file.write_text("orders_per_datanode = 1\n")
        server.reload(load(file, ControllerConfig, flags))
        assert values(client.status().limits)["orders_per_datanode"] == (1, str(file))
        assert server._controller.queries.gauges(0)["scm_orders_limit"] == 1
    finally:
        client.close()
        server.stop()


def test_an_agent_takes_over_its_limits_and_shows_them(tmp_path: Path) -> None:
    """Operator rules R9, R10: the limits in effect, beside the measured rates of each
    volume.
    """
    config = {
        "volumes": [{"path": new_volume(tmp_path / "volume"), "hold": Hold.OWNER}],
        "state_folder": tmp_path / "state",
        "listen": "127.0.0.1:0",
    }
    running = Agent(AgentConfig(**config))
    running.start()
    try:
        limits = {"bytes_per_second": "7MiB/s"}
        scan = limits | {"on_demand_bytes_per_second": "9MiB/s"}
        repair = limits | {"reconciliations_max": 5}
        running.reload(AgentConfig(**config, scan=scan, serve=limits, repair=repair))
        found = running.status()
        assert [limit.name for limit in found.limits] == list(AGENT_LIMITS)
        assert [limit.value for limit in found.limits] == [7 << 20, 9 << 20, 7 << 20, 7 << 20, 5]
        assert (found.repair_bytes_per_second, found.fault) == (0, "")
        assert [volume.scan_bytes_per_second for volume in found.volumes] == [0]
        page = running.metrics.page().decode()
        shown = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
        assert float(shown["dnagent_repair_limit_bytes_per_second"]) == 7 << 20
        assert float(shown["dnagent_reconciliations_limit"]) == 5
        scanner = next(iter(running._scanners.values()))
        assert scanner._background_limiter.bytes_per_second == 7 << 20
        assert scanner._request_limiter.bytes_per_second == 9 << 20
        assert running._repair_limiter.bytes_per_second == 7 << 20
        assert running._serve_limiter.bytes_per_second == 7 << 20
    finally:
        running.stop()


@pytest.mark.parametrize("fails", [False, True])
def test_a_hangup_reads_the_limits_again_and_ends_nothing(*, fails: bool) -> None:
    calls = list[int]()

    def on_reload() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        os.kill(os.getpid(), signal.SIGHUP)
        if fails:
            raise ConfigError("orders_per_datanode: expected a number")

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        with StopSignals(reloads=True) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            _run(stop, on_reload)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert calls == [0, 1]


_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


def _run(stop: StopSignals, on_reload: Callable[[], None]) -> None:
    manager = ServiceManager({}, os.getpid())
    run_until_stopped(stop, manager, ThreadHealth(), status="ready", on_reload=on_reload)

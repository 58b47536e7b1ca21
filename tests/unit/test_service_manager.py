"""sd_notify: what arrives at a real socket of systemd's kind, and that no failure of it
reaches the process.
"""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.service_manager import ServiceManager
from tests.support.notify_socket import NotifySocket

PID = 4711


def test_a_process_says_that_it_is_ready_works_and_stops(tmp_path: Path) -> None:
    with NotifySocket(tmp_path) as systemd:
        manager = ServiceManager({"NOTIFY_SOCKET": systemd.address}, PID)
        manager.ready("serves on 127.0.0.1:1")
        manager.keep_alive()
        manager.status("busy")
        manager.stopping()
        assert [systemd.receive() for _ in range(4)] == [
            "READY=1\nSTATUS=serves on 127.0.0.1:1",
            "WATCHDOG=1",
            "STATUS=busy",
            "STOPPING=1\nSTATUS=stopping",
        ]


def test_a_socket_may_be_in_the_abstract_namespace() -> None:
    with NotifySocket() as systemd:
        ServiceManager({"NOTIFY_SOCKET": systemd.address}, PID).keep_alive()
        assert systemd.receive() == "WATCHDOG=1"


@given(st.text())
def test_a_status_is_one_line_and_never_another_message(status: str) -> None:
    with NotifySocket() as systemd:
        manager = ServiceManager({"NOTIFY_SOCKET": systemd.address}, PID)
        manager.status(f"{status}\nREADY=1")
        message = systemd.receive()
    assert message.startswith("STATUS=")
    assert "\n" not in message
    assert len(message) <= 1_007


def test_without_a_service_manager_nothing_is_sent_and_nothing_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    manager = ServiceManager({}, PID)
    manager.ready("")
    manager.stopping()
    assert manager.watchdog_s is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "address",
    ["/nowhere/at/all", "relative", "/" + "long" * 100, "@" + "long" * 100, "@", "vsock:2:1"],
)
def test_a_socket_that_takes_nothing_is_logged_once_and_ends_nothing(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": address}, PID)
    manager.ready("")
    manager.keep_alive()
    assert capsys.readouterr().err.count("notify_failed") == 1


def test_messages_arrive_again_once_the_manager_is_back(tmp_path: Path) -> None:
    with NotifySocket(tmp_path) as systemd:
        address = systemd.address
        manager = ServiceManager({"NOTIFY_SOCKET": address}, PID)
    manager.keep_alive()
    os.unlink(address)
    with NotifySocket(tmp_path) as systemd:
        manager.keep_alive()
        assert systemd.receive() == "WATCHDOG=1"


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "60000000"}, 60.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(PID)}, 60.0),
        # Inherited from a parent that is watched.
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(PID + 1)}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "²"}, None),
        ({"WATCHDOG_USEC": "9" * 5000}, None),
        ({"WATCHDOG_USEC": ""}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_what_systemd_set_for_this_process(
    environment: dict[str, str], watchdog_s: float | None
) -> None:
    assert ServiceManager(environment, PID).watchdog_s == watchdog_s


def test_a_manager_that_hangs_holds_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with NotifySocket(tmp_path) as systemd:
        systemd.fill()
        environment = {"NOTIFY_SOCKET": systemd.address}
        ServiceManager(environment, PID, send_s_max=0.01).keep_alive()
        assert "notify_failed" in capsys.readouterr().err
        assert "WATCHDOG=1" not in systemd.drop_waiting()

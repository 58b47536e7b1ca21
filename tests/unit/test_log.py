"""Logs, the audit file, metrics and retries: what each process has in common."""

import ast
import errno
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from admin.sweep_metrics import SWEEP_METRICS
from dnagent.events import AGENT_EVENTS
from dnagent.metrics import AGENT_METRICS
from repair.audit import AuditLog
from runtime.disk import Operation
from runtime.errors import ConfigError, DiskError, PeerRefusedError, PeerUnavailableError
from runtime.log import PROCESS_EVENTS, LogFormat, LogLevel, configure, error_fields, get_logger
from runtime.metrics import Kind, Metrics, MetricsServer
from runtime.retry import Backoff, call_with_retry
from scm.events import CONTROLLER_EVENTS
from scm.metrics import CONTROLLER_METRICS
from tests.support.disk import FailingDisk, recorded_syncs

ROOT = Path(__file__).parents[2]
# What each package may log beside PROCESS_EVENTS; the other packages may log nothing
# else.
EVENTS = {"dnagent": AGENT_EVENTS, "scm": CONTROLLER_EVENTS}
PACKAGES = ("merkle", "runtime", "protos", "ozone", "chunktable", "repair", "sweep", "dnagent",
            "scm", "spark", "admin")  # fmt: skip
METRICS = (*AGENT_METRICS, *CONTROLLER_METRICS, *SWEEP_METRICS)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    configure()


@pytest.mark.parametrize("log_format", LogFormat)
def test_lines_go_to_stderr_and_never_to_stdout(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat
) -> None:
    configure(log_format, LogLevel.INFO)
    get_logger("scanner", AGENT_EVENTS).info("scan_finished", container_id=12)
    out, err = capsys.readouterr()
    assert out == ""
    assert "scan_finished" in err
    assert "12" in err


def test_a_json_line_has_event_level_time_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogFormat.JSON, LogLevel.INFO)
    error = PeerUnavailableError("dn-3 did not answer", peer="dn-3")
    get_logger("runner", AGENT_EVENTS).warning("peer_set_aside", **error_fields(error))
    get_logger("runner", AGENT_EVENTS).debug("scan_started")
    line = json.loads(capsys.readouterr().err)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", line.pop("time"))
    assert line == {
        "event": "peer_set_aside", "level": "warning", "component": "runner", "peer": "dn-3",
        "error_code": "peer_unavailable", "error": "dn-3 did not answer",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "logged"),
    [
        ("block_id", 20, "20"),
        ("block_id", 117_883_640_217_600_015, "117883640217600015"),
        ("length_bytes", (1 << 53) - 1, (1 << 53) - 1),
        ("length_bytes", 1 << 53, "9007199254740992"),
        ("offset", -(1 << 53), "-9007199254740992"),
        ("container_id", 12, 12),
        ("stale", True, True),
    ],
)
def test_no_reader_of_a_json_line_rounds_a_number(
    capsys: pytest.CaptureFixture[str], name: str, value: int, logged: int | str
) -> None:
    configure(LogFormat.JSON, LogLevel.INFO)
    get_logger("scanner", AGENT_EVENTS).info("scan_finished", **{name: value})
    assert json.loads(capsys.readouterr().err)[name] == logged


def test_an_event_that_is_not_listed_is_a_broken_belief() -> None:
    with pytest.raises(AssertionError, match="not listed"):
        get_logger("scanner", AGENT_EVENTS).error("something_new")
    with pytest.raises(AssertionError, match="not listed"):
        get_logger("scm", CONTROLLER_EVENTS).error("scan_finished")


def test_a_logger_without_a_list_logs_what_any_process_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure(LogFormat.JSON, LogLevel.INFO)
    get_logger("scm").info("process_stopping")
    line = json.loads(capsys.readouterr().err)
    assert line.keys() == {"event", "level", "time", "component"}
    with pytest.raises(AssertionError, match="not listed"):
        get_logger("scm").info("job_created")


def test_two_packages_never_list_one_event_or_one_metric() -> None:
    listed = [*AGENT_EVENTS, *CONTROLLER_EVENTS, *PROCESS_EVENTS]
    assert len(set(listed)) == len(listed)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_event_that_the_code_logs_is_listed() -> None:
    unlisted = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if "_pb2" not in path.name:
                listed = PROCESS_EVENTS | EVENTS.get(package, frozenset())
                unlisted |= {event for event in logged_events(path) if event not in listed}
    assert unlisted == set()


def logged_events(path: Path) -> Iterator[str]:
    """First arguments of calls such as `log.info("...")`, `self._log.error("...")`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        owner, first = node.func.value, node.args[0]
        name = (
            owner.attr
            if isinstance(owner, ast.Attribute)
            else owner.id
            if isinstance(owner, ast.Name)
            else ""
        )
        is_log = name.lstrip("_").lower() in {"log", "logger"}
        is_level = node.func.attr in {"debug", "info", "warning", "error"}
        if is_log and is_level and isinstance(first, ast.Constant):
            yield str(first.value)


def test_the_audit_file_grows_by_one_line_a_write(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for job in ("j1", "j2"):
        audit = AuditLog(path)
        audit.write(container=12, block=20, offset=16384, length=16384, source="dn-3", job=job)
        audit.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.pop("time")[-6:] for line in lines] == ["+00:00"] * 2
    chained = [{name: line.pop(name) for name in ("seq", "prev", "hash")} for line in lines]
    place = {"kind": "write", "container": 12, "block": "20", "offset": 16384}
    want = {**place, "length": 16384, "source": "dn-3"}
    assert lines == [{**want, "job": "j1"}, {**want, "job": "j2"}]
    assert [line["seq"] for line in chained] == [0, 1]
    assert chained[1]["prev"] == chained[0]["hash"]


def test_a_new_audit_file_and_its_lines_are_synced(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with recorded_syncs() as synced:
        audit = AuditLog(path)
        assert synced == [tmp_path]
        audit.write(container=12, block=20, offset=0, length=16384, source="dn-3", job="j1")
        audit.delete(12, None)
        assert synced == [tmp_path, path, path]
    audit.close()


def test_an_audit_line_tells_of_bytes_that_no_undo_copy_has_only_where_there_are_any(
    tmp_path: Path,
) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    for unread in (0, 4096):
        audit.write(
            container=12, block=20, offset=0, length=16384, source="dn-3", job="j1", unread=unread
        )
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [line.get("unread") for line in lines] == [None, 4096]


def test_deletes_are_lines_of_their_own_kind(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.delete(12, [20, 21])
    audit.delete(13, None)
    audit.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["container"], line["block"], line["length"]) for line in lines] == [
        ("delete", 12, "20", 0),
        ("delete", 12, "21", 0),
        ("delete", 13, None, 0),
    ]


def test_a_return_to_service_is_a_line_of_its_own_kind(tmp_path: Path) -> None:
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.return_to_service(12, "QUASI_CLOSED", "j1")
    audit.close()
    line = json.loads((tmp_path / "audit.jsonl").read_text())
    assert all(line.pop(name) is not None for name in ("time", "seq", "prev", "hash"))
    assert line == {
        "kind": "return", "container": 12, "block": None, "offset": None, "length": 0,
        "source": "", "job": "j1", "state": "QUASI_CLOSED",
    }  # fmt: skip


def test_an_audit_file_that_cannot_be_opened_is_a_disk_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="Is a directory"):
        AuditLog(tmp_path)


def test_an_audit_line_that_cannot_be_written_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").touch()
    disk = FailingDisk(errno.ENOSPC, lambda operation, _: operation is Operation.WRITE)
    audit = AuditLog(tmp_path / "audit.jsonl", disk=disk)
    with pytest.raises(DiskError, match="No space left"):
        audit.write(container=1, block=1, offset=0, length=1, source="dn-3", job="j1")
    with pytest.raises(DiskError, match="No space left"):
        audit.delete(1, [1])
    audit.close()


def test_metric_names_follow_the_house_style() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"(dnagent|scm|sweep)_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
        assert len(metric.labels) <= 2


def test_what_is_counted_is_served_on_loopback_until_closed() -> None:
    metrics = Metrics(AGENT_METRICS)
    metrics.count("dnagent_chunks_repaired_total", 3, outcome="written")
    metrics.set("dnagent_volumes_failed", 1)
    server = MetricsServer(metrics, "127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as response:
        page = response.read().decode()
    with pytest.raises(ConfigError, match="cannot be bound"):
        MetricsServer(metrics, "127.0.0.1", server.port)
    server.close()
    assert 'dnagent_chunks_repaired_total{outcome="written"} 3.0' in page
    assert "scm_" not in page
    assert metrics.value("dnagent_volumes_failed") == 1
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10)


def test_only_an_error_that_says_so_is_tried_again_and_not_for_ever() -> None:
    waits: list[float] = []
    heard: list[int] = []
    calls: list[int] = []

    def unavailable() -> None:
        calls.append(1)
        raise PeerUnavailableError("no answer")

    backoff = Backoff(attempts_max=4, first_s=1, most_s=3, jitter_s=0)
    with pytest.raises(PeerUnavailableError):
        call_with_retry(
            unavailable, sleep=waits.append, backoff=backoff, on_retry=lambda _, n: heard.append(n)
        )
    assert (len(calls), waits, heard) == (4, [1, 2, 3], [1, 2, 3])

    def refused() -> None:
        calls.append(1)
        raise PeerRefusedError("no")

    with pytest.raises(PeerRefusedError):
        call_with_retry(refused, sleep=waits.append, backoff=backoff)
    assert len(calls) == 5


def test_a_call_that_succeeds_later_gives_its_answer() -> None:
    answers: list[int | None] = [7, None]

    def call() -> int:
        answer = answers.pop()
        if answer is None:
            raise PeerUnavailableError("no answer")
        return answer

    assert call_with_retry(call, sleep=lambda _: None, backoff=Backoff()) == 7

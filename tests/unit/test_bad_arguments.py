"""What people mistype: every command of `treefold` answers with a sentence and its exit
status, and does nothing.

Rows: the words of a command line, its standard input, and the code; "click" is the
usage error that the parser gives before a command is begun. The last table asks a real
controller, which knows a container that could be reconciled (1), an open one (2), an
erasure-coded one (3), and one of which there is one replica (4).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from admin.cli import COMMANDS
from merkle.replica import ReplicaState
from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.bad_input import refused, run, unchanged
from tests.support.cluster_reports import replica
from tests.support.processes import ROOT
from tests.support.reporting_agents import ReportingAgent

NOWHERE = "127.0.0.1:1"
USAGE: list[tuple[str, str, str]] = [
    # words, standard input, code
    ("frobnicate", "", "click"),
    ("--frobnicate", "", "click"),
    ("reconcil 1", "", "click"),
    ("agent", "", "click"),
    ("agent start", "", "click"),
    ("agent run extra", "", "click"),
    ("agent run --hold mine --volume /x", "", "click"),
    ("agent run --log-level loud", "", "click"),
    ("agent run --log-format xml", "", "click"),
    ("agent run --listen", "", "click"),
    ("agent run", "", "config_invalid"),
    ("agent run --volume /x", "", "config_invalid"),
    ("agent run --volume /x --state-folder /x/s", "", "config_invalid"),
    ("agent run --volume /x --volume /x --state-folder /s", "", "config_invalid"),
    ("agent run --volume /x --state-folder /s --listen 0.0.0.0:0", "", "config_invalid"),
    ("agent run --volume /x --state-folder /s --listen 127.0.0.1:70000", "", "config_invalid"),
    ("agent run --volume /x --state-folder /s --controller nowhere", "", "config_invalid"),
    ("agent run --config /no/such/file", "", "config_invalid"),
    ("audit", "", "click"),
    ("audit verify", "", "click"),
    ("audit verify /no/such/file", "", "click"),
    ("audit verify /etc/hostname --head abc", "", "usage"),
    ("audit tail /etc/hostname --limit 0", "", "click"),
    ("audit tail /etc/hostname --limit \u0663", "", "click"),
    ("audit tail /etc/hostname --container 1_0", "", "click"),
    ("job undo 1", "", "click"),
    (f"job undo 1 --reason {'x' * 1001}", "", "click"),
    ("job undo 1 --reason a\u200bb", "", "click"),
    ("job undo 1.undo0 --reason x", "", "usage"),
    ("job undo 1.undo --reason x", "", "usage"),
    ("job undo 1.undo\u0663 --reason x", "", "usage"),
    (f"job pause 1 --reason {'x' * 1001}", "", "click"),
    (f"reconcile 1 --reason {'x' * 1001}", "", "click"),
    ("reconcile 1 --reason a\u0007", "", "click"),
    ("reconcile --apply /no/such/file", "", "click"),
    ("reconcile 1 --apply /etc/hostname", "", "usage"),
    ("reconcile --apply /etc/hostname", "", "usage"),
    ("completion", "", "click"),
    ("completion tcsh", "", "click"),
    ("completion bash --install", "", "click"),
    ("scm", "", "click"),
    ("scm run --automatic=yes", "", "click"),
    ("scm run --config /no/such/file", "", "config_invalid"),
    ("scm run --listen 0.0.0.0:0", "", "config_invalid"),
    ("scm run --listen localhost", "", "config_invalid"),
    ("demo --damage everything", "", "click"),
    ("demo --kill 0 --during repair", "", "click"),
    ("demo --kill one --during repair", "", "click"),
    ("demo --kill 1 --during lunch", "", "click"),
    ("demo --kill 1", "", "usage"),
    ("demo --during repair", "", "usage"),
    ("demo --fixture /no/such/folder", "", "click"),
    ("demo --fixture /etc/hostname", "", "click"),
    ("doctor --ozone-conf /no/such/folder", "", "click"),
    ("doctor extra", "", "click"),
    ("doctor --cluster nowhere", "", "usage"),
    ("doctor --cluster 127.0.0.1:1 --volume /x", "", "usage"),
    ("status --cluster 127.0.0.1:70000", "", "usage"),
    ("container list --cluster ,", "", "usage"),
    ("diagnose", "", "click"),
    ("diagnose --cluster nowhere", "", "usage"),
    ("diagnose --cluster 127.0.0.1:1 0", "", "usage"),
    ("diagnose --cluster 127.0.0.1:1 --rate fast", "", "usage"),
    ("diagnose --cluster 127.0.0.1:1 --after 1 2", "", "usage"),
    ("rescue 1", "", "click"),
    ("rescue --cluster 127.0.0.1:1", "", "usage"),
    ("rescue --cluster 127.0.0.1:1 1 --clean", "", "usage"),
    ("rescue --cluster nowhere 1", "", "usage"),
    ("rescue --cluster 127.0.0.1:1 1 --rate fast", "", "usage"),
    ("rescue --cluster 127.0.0.1:1 1 --datanode-port 0", "", "click"),
    ("sweep", "", "click"),
    ("sweep run", "", "click"),
    ("sweep run --out /no/such/parent/out", "", "usage"),
    ("sweep run --table /x --out /o --engine hadoop", "", "click"),
    ("sweep run --table /x --out /o --source guess", "", "click"),
    ("sweep run --table /x --out /o --threads 0", "", "click"),
    ("sweep run --table /x --out /o --keep 0", "", "click"),
    ("sweep run --table /x --out /o --engine spark --master nonsense", "", "usage"),
    ("sweep run --table /x --out /o --engine spark --master local[0]", "", "usage"),
    ("bucket index local:/a --state /o --engine spark --master local[abc]", "", "usage"),
    ("bucket verify local:/a local:/b --engine spark --master spark://", "", "usage"),
    ("sweep show latest", "", "click"),
    ("sweep compare latest --out /no/such/folder", "", "click"),
    ("tree", "", "click"),
    ("tree build", "", "click"),
    ("tree build --source tree x", "", "click"),
    ("tree build --container -1 x", "", "click"),
    ("tree build --container 9223372036854775808 x", "", "click"),
    ("tree build --container 1.0 x", "", "click"),
    ("tree diff x", "", "usage"),
    ("tree diff x x", "", "usage"),
    ("tree check --source data x", "", "click"),
    ("reconcile", "", "usage"),
    ("reconcile 0", "", "usage"),
    ("reconcile -- -1", "", "usage"),
    ("reconcile -1", "", "click"),
    ("reconcile abc", "", "usage"),
    ("reconcile 1.0", "", "usage"),
    ("reconcile 0x10", "", "usage"),
    ("reconcile 1_000", "", "usage"),
    ("reconcile \u0661", "", "usage"),
    ("reconcile 9223372036854775808", "", "usage"),
    ("reconcile " + "9" * 5000, "", "usage"),
    ("reconcile 1 -", "2\n", "usage"),
    ("reconcile - 1", "2\n", "usage"),
    ("reconcile - -", "2\n", "usage"),
    ("reconcile -", "0\n", "usage"),
    ("reconcile -", "abc\n", "usage"),
    ("reconcile -", "1 2\n", "usage"),
    ("reconcile -", "1\n-1\n", "usage"),
    ("reconcile -", "1,2\n", "usage"),
    ("reconcile -", "\0\n", "usage"),
    ("reconcile -", '{"containerID": 1}\n', "usage"),
    ("reconcile 1 --all-diverged", "", "usage"),
    ("reconcile - --all-diverged", "1\n", "usage"),
    ("reconcile --status", "", "usage"),
    ("reconcile --status abc", "", "usage"),
    ("reconcile 1 --reason", "", "click"),
    ("container", "", "click"),
    ("container list --state open", "", "click"),
    ("container list --comparison same", "", "click"),
    ("container list --limit 0", "", "click"),
    ("container list --after -1", "", "click"),
    ("container list 1", "", "click"),
    ("container info", "", "usage"),
    ("container info 0", "", "usage"),
    ("container info -", "one\n", "usage"),
    ("container diff", "", "click"),
    ("container diff 0", "", "usage"),
    ("container diff 1 2", "", "click"),
    ("job", "", "click"),
    ("job list --state done", "", "click"),
    ("job list --limit 1001", "", "click"),
    ("job list --limit 0", "", "click"),
    ("job show", "", "click"),
    ("job show 1 2", "", "click"),
    ("job cancel", "", "click"),
    ("job pause", "", "click"),
    ("job resume 1 2", "", "click"),
    ("job throttle x", "", "usage"),
    ("job throttle x --max-containers -1", "", "click"),
    ("job throttle x --bytes-per-second 1ZiB", "", "usage"),
    ("job throttle x --bytes-per-second 1/s/s", "", "usage"),
    ("job throttle x --bytes-per-second \u0663MiB", "", "usage"),
    ("job throttle x --max-containers \u0663", "", "click"),
    ("scan 1 --timeout \u0663", "", "usage"),
    ("scan 1 --timeout ²", "", "usage"),
    ("bucket sync local:/a local:/b --rate \uff13", "", "click"),
    ("status extra", "", "click"),
    ("status --sweep", "", "click"),
    ("status --verifier nowhere", "", "usage"),
    ("status --controller nowhere", "", "usage"),
    ("scan", "", "usage"),
    ("scan 0", "", "usage"),
    ("scan 1 -", "", "usage"),
    ("scan -", "a\n", "usage"),
    ("job list --controller nowhere", "", "usage"),
    ("job list --controller 127.0.0.1", "", "usage"),
    ("job list --controller 127.0.0.1:65536", "", "usage"),
    ("job list --controller 127.0.0.1:-1", "", "usage"),
    ("job list --controller ::1:80", "", "usage"),
    ("job list --controller 192.0.2.1:1", "", "config_invalid"),
    ("job list --tls-cert /c", "", "usage"),
    ("job list --tls-cert /c --tls-key /k --tls-ca /a", "", "config_invalid"),
    ("bucket", "", "click"),
    ("bucket sync local:/a", "", "click"),
    ("bucket sync local:/a local:/b extra", "", "click"),
    ("bucket sync /a local:/b", "", "usage"),
    ("bucket sync local: local:/b", "", "usage"),
    ("bucket sync local:/a s3:b", "", "usage"),
    ("bucket sync local:/a gs://b", "", "usage"),
    ("bucket sync local:/a local:/b --rate fast", "", "click"),
    ("bucket sync local:/a local:/b --transfers 0", "", "click"),
    ("bucket sync local:/a local:/b --verifier nowhere", "", "usage"),
    ("bucket sync local:/a local:/b --tls-cert /c", "", "usage"),
    ("bucket change p1", "", "usage"),
    ("bucket change p1 --rate fast", "", "usage"),
    ("bucket change p1 --verifier nowhere", "", "usage"),
    ("bucket change p1 --verifier v1:9894 --no-verifier", "", "usage"),
    ("bucket change p1 --interval 0", "", "click"),
    ("bucket verify local:/a local:/b --level deep", "", "click"),
    ("bucket precheck local:/a", "", "click"),
    ("bucket index local:/a", "", "click"),
    ("bucket receipts", "", "click"),
    ("bucket receipts verify /no/such/file", "", "click"),
    ("bucket demo --objects 1", "", "click"),
    ("bucket demo --svg /no/such/folder", "", "click"),
    ("bucket demo --ozone ozone://om:1/v/b?s3=http://g:1", "", "click"),
    ("bucket demo --ozone local:/a local:/b", "", "usage"),
    ("verifier", "", "click"),
    ("verifier run", "", "config_invalid"),
    ("verifier run extra", "", "click"),
    ("verifier run --config /no/such/file", "", "config_invalid"),
    ("verifier run --bucket local:/a --state-folder /s --listen nowhere", "", "config_invalid"),
    ("verifier run --bucket local:/a --state-folder /s --listen 0.0.0.0:0", "", "config_invalid"),
    ("replication-master", "", "click"),
    ("replication-master run extra", "", "click"),
    ("replication-master run --config /no/such/file", "", "config_invalid"),
    ("replication-master run --listen nowhere", "", "config_invalid"),
    ("syncer", "", "click"),
    ("syncer run extra", "", "click"),
    ("syncer run --config /no/such/file", "", "config_invalid"),
    ("syncer run --master nowhere", "", "config_invalid"),
    ("syncer run --metrics 0.0.0.0:0", "", "config_invalid"),
    ("syncer run --port-file /p", "", "usage"),
]

UNREACHABLE = [
    "reconcile 1 --yes",
    "reconcile --all-diverged",
    "reconcile --status 1",
    "container list",
    "container info 1",
    "container diff 1",
    "job list",
    "job show x",
    "job watch x",
    "job cancel x",
    "job pause x",
    "job resume x",
    "job throttle x --bytes-per-second 0",
    "scan 1",
]

# Words for the controller, standard input, what stderr must say, exit status.
REFUSED: list[tuple[str, str, str, int]] = [
    ("reconcile 1", "", "not confirmed", 6),
    ("reconcile -", "1\n", "not confirmed", 6),
    ("reconcile --all-diverged", "", "not confirmed", 6),
    ("reconcile 2 --yes", "", "in state OPEN", 6),
    ("reconcile 3 --yes", "", "only supported for Ratis", 6),
    ("reconcile 4 --yes", "", "container 4", 6),
    ("reconcile 99 --yes", "", "not found", 1),
    ("reconcile 9223372036854775807 --dry-run", "", "not found", 1),
    ("reconcile 99 1", "", "not confirmed", 6),
    ("reconcile --status 99", "", "not found", 1),
    ("reconcile --status 2", "", "not supported for open", 1),
    ("container info 99", "", "Container 99 is not known", 1),
    ("container diff 99", "", "Container 99 is not known", 1),
    ("container diff 3", "", "cannot be compared", 1),
    ("scan 99", "", "Container 99 is not known", 1),
    ("scan -", "99\n", "Container 99 is not known", 1),
    ("job show none", "", "[job_not_found]", 1),
    ("job watch none", "", "[job_not_found]", 1),
    ("job cancel none", "", "[job_not_found]", 1),
    ("job pause none", "", "[job_not_found]", 1),
    ("job resume none", "", "[job_not_found]", 1),
    ("job throttle none --max-containers 1", "", "[job_not_found]", 1),
    ("job show ../../etc/passwd", "", "[job_not_found]", 1),
    ("job show ''", "", "[job_not_found]", 1),
]


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("controller")
    server = ControllerServer(ControllerConfig(listen="127.0.0.1:0", state_folder=state))
    agents = [ReportingAgent(server.address, f"dn-{number}") for number in (1, 2, 3)]
    for number, agent in enumerate(agents, start=1):
        peer = agent.peer
        held = [
            replica(peer, 1, root=number),
            replica(peer, 2, ReplicaState.OPEN),
            replica(peer, 3, index=number),
        ]
        agent.report(*held, *([replica(peer, 4, root=4)] if number == 1 else []))
    yield server.address
    for agent in agents:
        agent.close()
    server.stop()


@pytest.mark.parametrize(("words", "stdin", "code"), USAGE, ids=lambda value: value[:60] or None)
def test_a_command_line_that_cannot_be_meant_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, stdin: str, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with unchanged(tmp_path):
        refused(code, 2, *words.split(), stdin=stdin)


@pytest.mark.parametrize("command", ["bucket add --insecure --yes", "bucket sync --watch"])
@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("", "click"),
        ("ozone://om:9862", "usage"),
        ("ozone://om:9862/volume", "usage"),
        ("ozone:///volume/bucket", "usage"),
    ],
)
def test_a_replication_needs_service_volume_and_bucket_of_its_target(
    command: str, target: str, code: str, tmp_path: Path
) -> None:
    """OZ-062: at a master as at the start of a process; nothing is made."""
    source = f"local:{tmp_path / 'a'}"
    with unchanged(tmp_path):
        refused(code, 2, *command.split(), source, *([target] if target else []))


@pytest.mark.parametrize("words", UNREACHABLE)
def test_a_controller_that_does_not_answer_is_unreachable(words: str) -> None:
    refused("controller_unavailable", 7, *words.split(), "--controller", NOWHERE)


@pytest.mark.parametrize(
    ("words", "stdin", "says", "exit_status"), REFUSED, ids=[row[0] for row in REFUSED]
)
def test_what_the_controller_will_not_do_is_said(
    controller: str, words: str, stdin: str, says: str, exit_status: int
) -> None:
    arguments = [word.strip("'") for word in words.split()]
    result = run(*arguments, "--controller", controller, stdin=stdin)
    assert (result.exit_code, says in result.stderr) == (exit_status, True), result.output
    assert json.loads(run("job", "list", "--json", "--controller", controller).stdout)["data"] == {
        "jobs": []
    }


def test_a_million_ids_and_one_more_are_too_many() -> None:
    assert "at most" in refused("usage", 2, "scan", "-", stdin="1\n" * 1_000_001)


@pytest.mark.parametrize(
    "kind", ["empty", "one datanode", "no volumes", "a name that is no number"]
)
def test_a_fixture_without_volumes_is_a_usage_error(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "fixture"
    folder.mkdir()
    names = {
        "one datanode": ["dn1/volume1/hdds"],
        "no volumes": ["dn1", "dn2"],
        "a name that is no number": ["dnA"],
    }
    for name in names.get(kind, []):
        (folder / name).mkdir(parents=True)
    with unchanged(tmp_path):
        refused("usage", 2, "demo", "--fixture", folder)


@pytest.mark.parametrize("kind", ["full", "file", "link to a full one"])
def test_what_is_kept_overwrites_nothing(tmp_path: Path, kind: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_bytes(b"precious")
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "link to a full one").symlink_to("full")
    with unchanged(tmp_path):
        refused("usage", 2, "demo", "--keep", tmp_path / kind)


def test_an_agent_that_there_is_not_cannot_be_killed(tmp_path: Path) -> None:
    folder, keep = tmp_path / "fixture", tmp_path / "keep"
    for name in ("dn1", "dn2"):
        (folder / name / "volume1" / "hdds").mkdir(parents=True)
    with unchanged(tmp_path):
        refused(
            "usage", 2, "demo", "--fixture", folder, "--kill", 9, "--during", "repair", "--check"
        )
        refused(
            "usage",
            2,
            "demo",
            "--fixture",
            folder,
            "--kill",
            9,
            "--during",
            "repair",
            "--keep",
            keep,
        )


@pytest.mark.parametrize(
    "what", ["garbage", "not a site", "UTF-16", "a document type", "an encoding", "a URL", "NUL"]
)
def test_a_site_file_that_is_none_is_a_config_error(tmp_path: Path, what: str) -> None:
    named = "<name>hdds.datanode.dir</name><value>{}</value>"
    site = f"<configuration><property>{named}</property></configuration>"
    text = {
        "garbage": b"\xff\xfe\x00",
        "not a site": b"<html/>",
        "UTF-16": site.format("/d").encode("utf-16"),
        "a document type": b'<!DOCTYPE a [<!ENTITY b "x">]>' + site.format("&b;").encode(),
        "an encoding": b'<?xml version="1.0" encoding="none"?>' + site.format("").encode(),
        "a URL": site.format("file://[").encode(),
        "NUL": site.format("\0").encode(),
    }[what]
    (tmp_path / "ozone-site.xml").write_bytes(text)
    with unchanged(tmp_path):
        refused("config_invalid", 2, "doctor", "--ozone-conf", tmp_path)


def process(*words: str | bytes, stdin: bytes = b"") -> tuple[int, bytes, str]:
    command = [sys.executable, "-m", "admin.cli", *words]
    # As where the language is set: without one, Python takes any bytes for text.
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, input=stdin, capture_output=True, check=False
    )
    return result.returncode, result.stdout, result.stderr.decode()


def test_a_path_that_is_no_text_is_named(tmp_path: Path) -> None:
    place = os.fsencode(tmp_path) + b"/\xff\xfe"
    status, out, err = process("tree", "build", place)
    assert (status, out) == (1, b"")
    assert err.startswith("error [volume_invalid]: there is nothing at ")


def test_standard_input_that_is_no_text_is_a_usage_error() -> None:
    status, out, err = process("scan", "-", "--controller", NOWHERE, stdin=b"1\n\xff\xfe\n")
    assert (status, out) == (2, b"")
    assert err.startswith("error [usage]: ")


def test_an_unreachable_controller_is_all_that_a_terminal_shows() -> None:
    status, out, err = process("job", "list", "--controller", NOWHERE)
    assert (status, out) == (7, b"")
    told, hint = err.splitlines()
    assert told.startswith("error [controller_unavailable]: ")
    assert "treefold scm run" in hint


def test_every_command_has_rows_here() -> None:
    seen = {words.split()[0] for words, *_ in USAGE}
    assert seen >= set(COMMANDS)

"""The page of a real controller: what it says, and who may give orders by it."""

import base64
import http.client
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from admin.verify_metrics import write_verify_metrics
from merkle.columns import encode_tree
from merkle.errors import ReconcileError
from merkle.outcome import Evidence, RepairReport, Verdict
from merkle.replica import ContainerState, PeerId
from merkle.tree import BlockId, ContainerId, ContainerTree
from protos import controller_pb2 as pb
from runtime.disk import Disk
from runtime.errors import ConfigError
from scm.config import ControllerConfig, DashboardSettings
from scm.dashboard.blocks import BlockPictures
from scm.dashboard.page import Tone, block_grid, headline
from scm.dashboard.proofs import read_proofs
from scm.dashboard.start import read_token
from scm.dashboard.sweeps import SweepFolder
from scm.eligibility import Eligibility, Ruling
from scm.jobs import OrderState
from scm.policy import ComparisonResult, RootComparison
from scm.server import ControllerServer
from scm.views import ContainerStatus, OrderStatus
from sweep.output import Summary, SweepStore
from tests.support.cluster_reports import replica
from tests.support.peers import replica_of
from tests.support.reporting_agents import ReportingAgent, report_of
from tests.support.waiting import wait_until
from tests.unit.test_status import CONTROLLER

TOKEN = "0123456789abcdef-token"
HOSTILE = "<script>alert(1)</script>"


@dataclass
class Answer:
    """What came of a request."""

    status: int
    text: str
    headers: http.client.HTTPMessage


@dataclass
class Page:
    """The page of a controller with two agents."""

    server: ControllerServer
    agents: list[ReportingAgent]

    def ask(self, path: str, method: str = "GET", *, token: str = "", **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.dashboard_port, timeout=10)
        if token:
            encoded = base64.b64encode(f":{token}".encode()).decode()
            headers["Authorization"] = f"Basic {encoded}"
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        found = Answer(response.status, response.read().decode(), response.headers)
        connection.close()
        return found


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    (tmp_path / "token").write_text(TOKEN + "\n")
    config = ControllerConfig(
        listen="127.0.0.1:0",
        state_folder=tmp_path / "scm",
        required_replicas=2,
        dashboard=DashboardSettings(listen="127.0.0.1:0", token_file=tmp_path / "token"),
    )
    server = ControllerServer(config)
    agents = [ReportingAgent(server.address, peer) for peer in ("dn-a", "dn-b")]
    yield Page(server, agents)
    for agent in agents:
        agent.close()
    server.stop()


def diverge(page: Page) -> None:
    """Container 1 matches, and container 2 has diverged."""
    for number, agent in enumerate(page.agents):
        agent.report(replica(agent.peer, 1, root=7), replica(agent.peer, 2, root=number))


def test_the_first_page_shows_what_is_known_and_what_is_not(page: Page) -> None:
    """Nothing that was not reported is called healthy."""
    assert "No datanode has reported a container" in page.ask("/").text
    diverge(page)
    page.agents[0].report(replica("dn-a", 3, root=9), full=False)
    shown = await_text(page, "/", "1 of 3 containers diverged, and 1 of 3 are unknown")
    assert "/containers/2" in shown
    assert "dn-b" in shown
    assert page.ask("/containers/3").text.count("1 of 2 replicas known") == 1


def await_text(page: Page, path: str, text: str) -> str:
    """A page is as old as a second."""
    wait_until(lambda: text in page.ask(path).text, text)
    return page.ask(path).text


def test_without_the_token_nobody_orders_anything(page: Page) -> None:
    diverge(page)
    path = "/containers/2/reconcile"
    refused = page.ask(path, "POST")
    assert (refused.status, refused.headers["WWW-Authenticate"].split()[0]) == (401, "Basic")
    assert page.ask(path, "POST", token=TOKEN + "x").status == 401
    assert page.ask(path, "POST", token=TOKEN, Origin="http://evil.example").status == 403
    assert page.ask(path, "POST", token=TOKEN, Origin="null").status == 403
    assert "Reconcile" not in page.ask("/containers/2").text
    assert page.ask("/sign-in").status == 401
    shown = page.ask("/").text
    assert "No job has ended" in shown
    assert "/jobs/" not in shown


def test_with_the_token_a_job_is_begun_paused_resumed_and_cancelled(page: Page) -> None:
    diverge(page)
    for agent in page.agents:
        agent.work(None)
    assert page.ask("/sign-in", token=TOKEN).status == 303
    assert "Reconcile" in page.ask("/containers/2", token=TOKEN).text
    host = f"127.0.0.1:{page.server.dashboard_port}"
    begun = page.ask("/containers/2/reconcile", "POST", token=TOKEN, Origin=f"http://{host}")
    assert begun.status == 303
    job = begun.headers["Location"]
    again = page.ask("/containers/2/reconcile", "POST", token=TOKEN)
    assert again.headers["Location"] == job
    for order, word in (("pause", "PAUSED"), ("resume", "RUNNING"), ("cancel", "CANCELLED")):
        assert page.ask(f"{job}/{order}", "POST", token=TOKEN).status == 303
        await_text(page, job, word)
    assert page.ask(f"{job}/pause", "POST", token=TOKEN).status == 409
    assert "by dashboard" in page.ask(job).text


def test_the_answers_to_odd_requests_are_named(page: Page) -> None:
    for path, status in (
        ("/containers/9", 404),
        ("/containers/0", 404),
        (f"/containers/{2**64}", 404),
        ("/jobs/nothing", 404),
        ("/nothing", 404),
        ("/../../etc/passwd", 404),
    ):
        assert page.ask(path).status == status, path
    assert page.ask("/jobs/nothing/cancel", "POST", token=TOKEN).status == 404
    assert page.ask("/jobs/nothing/destroy", "POST", token=TOKEN).status == 404
    assert page.ask(f"/containers/{2**64}/reconcile", "POST", token=TOKEN).status == 404
    assert page.ask("/", "DELETE").status == 405
    # A name of somebody else that leads here would let its page read ours.
    assert page.ask("/", Host="evil.example").status == 421
    assert page.ask("/", Host="[::1]:80").status == 200


def test_what_others_said_is_text_and_nothing_more(page: Page) -> None:
    diverge(page)
    begun = page.ask("/containers/2/reconcile", "POST", token=TOKEN)
    job_id = begun.headers["Location"].rpartition("/")[2]
    said = pb.ReconcileProgress(
        job_id=job_id, container_id=2, state="failed", error_code="disk_error", message=HOSTILE
    )
    for agent in page.agents:
        agent.beat()
        agent.beat(progress=[said])
    shown = await_text(page, f"/jobs/{job_id}", "&lt;script&gt;")
    assert HOSTILE not in shown
    policy = page.ask("/").headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy


def test_the_last_sweep_is_shown_or_unknown(tmp_path: Path) -> None:
    folder, sweeps = tmp_path / "sweeps", SweepFolder(tmp_path / "sweeps")
    assert "there is no sweep" in sweeps.last().fault
    assert sweeps.report() is None
    summary = Summary(
        sweep_id="20261125T010000Z-0000",
        engine="local",
        source="tree",
        started_at=datetime(2026, 11, 25, 1, tzinfo=UTC),
        seconds=1.0,
        rows=12,
        containers=4,
        replicas=12,
        excluded=0,
        diverged=(3,),
        verdicts={"MATCH": 3, "REPAIRABLE": 1},
        findings={},
        paths={},
        skipped=(),
        compared=11,
        unseen=1,
    )
    SweepStore(folder, Disk()).write_summary(summary)
    assert sweeps.last().summary == summary
    report = SweepStore(folder, Disk()).report(summary.sweep_id)
    report.parent.mkdir(parents=True)
    report.write_text("the report")
    config = ControllerConfig(
        listen="127.0.0.1:0",
        state_folder=tmp_path / "scm",
        dashboard=DashboardSettings(listen="127.0.0.1:0", sweeps=folder),
    )
    server = ControllerServer(config)
    try:
        page = Page(server, [])
        shown = page.ask("/").text
        assert "11 of 12 replicas compared" in shown
        assert "REPAIRABLE" in shown
        assert page.ask("/sweep").text == "the report"
        for path in folder.rglob("summary.parquet"):
            path.write_bytes(b"damaged")
        await_text(page, "/", "Unknown: the last sweep cannot be read")
        assert page.ask("/", "POST").status == 405
        assert page.ask("/containers/2/reconcile", "POST", token=TOKEN).status == 403
    finally:
        server.stop()


def test_proofs_of_buckets_are_those_that_verify_wrote(tmp_path: Path) -> None:
    write_verify_metrics(tmp_path / "a.prom", "s3://a", "s3://b", 0, is_equal=True)
    write_verify_metrics(tmp_path / "b.prom", "s3://c", 'local:/"odd"', 7, is_equal=False)
    write_verify_metrics(tmp_path / "c.prom", "s3://d", "s3://e", 0, is_equal=False)
    (tmp_path / "node.prom").write_text("node_load1 2.5\n")
    found = read_proofs(tmp_path)
    assert [(one.source, one.target, one.outcome, one.differences) for one in found.proofs] == [
        ("s3://a", "s3://b", "equal", 0),
        ("s3://c", 'local:/"odd"', "different", 7),
        ("s3://d", "s3://e", "unknown", 0),
    ]
    assert found.faults == ()
    for number, raw in enumerate((b"\xff", b'bucket_verify_outcome{x="', b"x" * 70_000)):
        (tmp_path / f"bad{number}.prom").write_bytes(raw)
    (tmp_path / "folder.prom").mkdir()
    again = read_proofs(tmp_path)
    assert again.proofs == found.proofs
    assert len(again.faults) == 4
    assert read_proofs(tmp_path / "none").faults


def test_a_headline_is_good_only_where_nothing_is_unknown() -> None:
    def tone(**changes: object) -> Tone:
        return headline(replace(CONTROLLER, **changes)).tone  # type: ignore[arg-type]

    assert tone() is Tone.GOOD
    assert tone(unknown=1) is Tone.UNKNOWN
    assert tone(containers=0) is Tone.UNKNOWN
    assert tone(diverged=1) is Tone.BAD
    assert tone(diverged=1, unknown=2) is Tone.BAD
    assert tone(fault="thread ticker has ended") is Tone.BAD
    both = headline(replace(CONTROLLER, diverged=1, unknown=2)).text
    assert both == "1 of 12 containers diverged, and 2 of 12 are unknown."


def test_a_grid_has_the_blocks_that_datanodes_name() -> None:
    def order(peer: str, *found: Evidence, deleted: tuple[int, ...] = ()) -> OrderStatus:
        progress = RepairReport(evidence=found, claimed_deleted=tuple(map(BlockId, deleted)))
        return OrderStatus(PeerId(peer), OrderState.DONE, progress, 1)

    corrupt = Evidence("sole_copy_corrupt", BlockId(7), 0)
    grid = block_grid(
        [
            order("a", corrupt, corrupt, Evidence("no_root"), deleted=(3,)),
            order("b", *(Evidence("hole", BlockId(100 + n)) for n in range(80))),
        ]
    )
    assert grid.peers == ("a", "b")
    assert [(row.block_id, row.cells) for row in grid.rows[:2]] == [
        (3, ("deleted", "")),
        (7, ("sole copy corrupt", "")),
    ]
    assert (len(grid.rows), grid.left_out) == (64, 18)


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert read_token(None) == ""
    for content in (b"", b"short\n", b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            read_token(path)
    with pytest.raises(ConfigError):
        read_token(tmp_path / "none")
    path.write_text(f"  {TOKEN}\n")
    assert read_token(path) == TOKEN


def test_a_page_beyond_this_machine_wants_consent() -> None:
    page = {"listen": "0.0.0.0:9870"}
    with pytest.raises(ValueError, match=r"dashboard\.listen"):
        ControllerConfig.model_validate({"dashboard": page})
    assert ControllerConfig.model_validate({"dashboard": page, "insecure": True}).dashboard.listen


def test_a_container_is_drawn_block_by_replica(page: Page) -> None:
    """By the trees that the agents have now; who did not answer is named."""
    whole, damaged = (replica_of(4, {1: 4096, 2: 4096, 3: 4096}) for _ in range(2))
    damaged.flip(2, 100)
    del damaged.records[BlockId(3)]
    for number, one in enumerate((whole, damaged)):
        one.tree = encode_tree(one.scanned_tree())
        agent = ReportingAgent(page.server.address, f"dn-{number}", one)
        agent.report(report_of(agent.peer, one))
        page.agents.append(agent)
    shown = await_text(page, "/containers/4", "REPAIRABLE")
    drawn = shown[shown.index('<svg class="blocks"') :]
    assert [drawn.count(f'"c-{kind}"') for kind in ("HEALTHY", "CORRUPT", "MISSING")] == [4, 1, 1]
    page.agents[-1].close()
    page.agents.pop()
    gone = await_text(page, "/containers/4", "1 of 2 expected replicas were compared")
    assert gone.count(">unknown: ") == 1
    assert ">MATCH<" not in gone


def test_pictures_are_asked_for_by_few_at_a_time() -> None:
    container = ContainerStatus(
        ContainerId(2),
        ContainerState.CLOSED,
        ComparisonResult(RootComparison.UNKNOWN),
        Ruling(Eligibility.OK),
        None,
        "",
        3,
        3,
        (),
    )
    now_s, asked, inner = [0.0], list[int](), list[object]()

    def fetch(of: object) -> tuple[dict[str, ContainerTree], dict[str, ReconcileError]]:
        asked.append(1)
        if len(asked) == 1:
            # Two are under way: the third is told to come again.
            second = replace(container, container_id=ContainerId(7))
            inner.append(pictures.picture(second))
            return {}, {}
        inner.append(pictures.picture(replace(container, container_id=ContainerId(8))))
        return {}, {}

    pictures = BlockPictures(fetch, lambda: now_s[0])
    first = pictures.picture(container)
    assert first is not None
    assert (first.verdict, first.blocks) == (Verdict.UNKNOWN, 0)
    assert [one is None for one in inner] == [True, False]
    assert pictures.picture(container) is first
    assert len(asked) == 2
    now_s[0] = 10.0
    assert pictures.picture(container) is not first

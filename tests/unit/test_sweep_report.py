"""The report of a sweep says what the tables say, worst first, and lets nothing in that
a page would run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa

from runtime.disk import Disk
from sweep.damage import HeatmapCell, ReportLimits, damage_of
from sweep.model import FINDING_SCHEMA, VERDICT_SCHEMA
from sweep.output import SweepStore, SweepTable
from sweep.pieces import Range, rows_in_range
from sweep.report import (
    DamageShare,
    PastSweep,
    SweepReport,
    render,
    report_of,
    write_report,
)
from tests.support.sweeps import run
from tests.support.tables import replica
from tests.support.volumes import flip
from tests.unit.test_sweep_inputs import Agents

AT = datetime(2026, 11, 22, 1, 30, tzinfo=UTC)
DAY_MS = 86_400_000


def finding(
    kind: str,
    container_id: int | None,
    block_id: int | None,
    lacking: tuple[str, ...],
    sources: tuple[str, ...] = (),
    detail: str = "",
) -> dict[str, object]:
    return {
        "kind": kind,
        "container_id": container_id,
        "block_id": block_id,
        "chunk_offset": None,
        "lacking": list(lacking),
        "sources": list(sources),
        "detail": detail,
    }


def verdict(container_id: int, value: str, detail: str = "") -> dict[str, object]:
    diverged = value not in ("MATCH", "UNKNOWN")
    row = {"container_id": container_id, "verdict": value, "replicas": 3, "excluded": 0}
    return row | {"diverged": diverged, "detail": detail}


class MemoryTables:
    """The tables of a sweep, each in pieces of two rows."""

    def __init__(self, tables: Mapping[SweepTable, pa.Table]) -> None:
        self._tables = tables

    def pieces(
        self, table: SweepTable, columns: Sequence[str], wanted: Range
    ) -> Iterator[pa.Table]:
        rows = self._tables[table].select(columns)
        for first in range(0, rows.num_rows, 2):
            yield rows_in_range(rows.slice(first, 2), wanted)


def made(
    verdicts: list[dict[str, object]],
    findings: list[dict[str, object]],
    *,
    earlier: tuple[PastSweep, ...] = (),
    skipped: tuple[str, ...] = (),
    created_ms: dict[tuple[str, str], int] | None = None,
    limits: ReportLimits | None = None,
) -> SweepReport:
    names = ("dn-a", "dn-b", "dn-c")
    counts: dict[str, int] = {}
    for row in verdicts:
        counts[str(row["verdict"])] = counts.get(str(row["verdict"]), 0) + 1
    replicas = [
        {"datanode": name, "volume": f"DS-{name}", "container_id": row["container_id"]}
        for row in verdicts
        for name in names
    ]
    schema = pa.schema(
        [("datanode", pa.string()), ("volume", pa.string()), ("container_id", pa.int64())]
    )
    tables = MemoryTables(
        {
            SweepTable.ROOTS: pa.Table.from_pylist(replicas, schema=schema),
            SweepTable.VERDICTS: pa.Table.from_pylist(verdicts, schema=VERDICT_SCHEMA),
            SweepTable.FINDINGS: pa.Table.from_pylist(findings, schema=FINDING_SCHEMA),
        }
    )
    ranges = [Range(None, 2), Range(3, 1 << 62)]
    return report_of(
        PastSweep("20261122T013000Z-aa", AT, len(verdicts), counts),
        engine="local",
        held={(name, f"DS-{name}"): 10 for name in names},
        findings=len(findings),
        damage=damage_of(tables, ranges, limits or ReportLimits()),
        earlier=earlier,
        skipped=skipped,
        volumes_created_ms=created_ms,
        limits=limits or ReportLimits(),
    )


class Page(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        # Texts that a click selects, drawings outside a box that scrolls, and cells of
        # stacked tables without a label.
        self.codes: list[str] = []
        self.without_scroll: list[str] = []
        self.unlabelled = 0
        self._is_stacked = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "svg" and self.tags[-1] != ("div", {"class": "scroll"}):
            self.without_scroll.append(str(found))
        if tag == "table":
            self._is_stacked = found.get("class") == "stack"
        if tag == "td" and self._is_stacked and not found.get("data-label"):
            self.unlabelled += 1
        if found.get("class") == "id":
            self.codes.append("")
        self.tags.append((tag, found))

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags and self.tags[-1] == ("code", {"class": "id"}) and not self.codes[-1]:
            self.codes[-1] = data


def test_containers_come_worst_first_and_only_diverged_ones() -> None:
    report = made(
        [
            verdict(1, "REPAIRABLE"),
            verdict(2, "MATCH"),
            verdict(3, "UNRECOVERABLE"),
            verdict(4, "REPAIRABLE"),
        ],
        [
            finding("missing_block", 1, 7, ("dn-a",)),
            finding("corrupt_chunk", 3, 7, ("dn-a", "dn-b", "dn-c")),
            finding("corrupt_chunk", 4, 7, ("dn-a",)),
            finding("missing_chunk", 4, 8, ("dn-b",)),
        ],
    )
    assert [line.container_id for line in report.lines] == [3, 4, 1]
    assert report.lines[1].kinds == "corrupt chunk (1), missing chunk (1)"
    assert report.lines[1].lacking == "dn-a, dn-b"
    assert (report.containers, report.diverged, report.findings) == (4, 3, 4)


def test_a_heatmap_shows_the_worst_of_each_replica_and_block() -> None:
    report = made(
        [verdict(5, "CONFLICT")],
        [
            finding("missing_chunk", 5, 70, ("dn-a",)),
            finding("corrupt_chunk", 5, 70, ("dn-a",), ("dn-b",)),
            finding("deleted_block", 5, 71, ("dn-b",), ("dn-c",)),
            finding("conflicting_chunk", 5, 72, (), ("dn-b", "dn-c")),
            finding("silent_change", 5, 73, ("dn-a",)),
        ],
    )
    (heatmap,) = report.heatmaps
    assert heatmap.replicas == ("dn-a", "dn-b", "dn-c")
    assert heatmap.rows == (
        (70, (HeatmapCell.CORRUPT, HeatmapCell.RIGHT, HeatmapCell.RIGHT)),
        (71, (HeatmapCell.RIGHT, HeatmapCell.UNDELETED, HeatmapCell.RIGHT)),
        (72, (HeatmapCell.RIGHT, HeatmapCell.CONFLICT, HeatmapCell.CONFLICT)),
    )
    assert report.silent_changes == ("container 5 block 73 offset None on dn-a: ",)
    page = Page(render(report))
    assert "1 chunk changed in silence." in page.text
    assert ("a", {"class": "v-CORRUPT", "href": "#silent"}) in page.tags


def test_blocks_that_are_read_in_turns_make_the_same_heatmap() -> None:
    findings = [finding("missing_chunk", 5, block, ("dn-a",)) for block in range(9)]
    findings += [finding("corrupt_chunk", 5, block, ("dn-b",), ("dn-c",)) for block in (3, 8)]
    findings.append(finding("conflicting_chunk", 5, 4, (), ("dn-b", "dn-c")))
    at_once, in_turns = (
        made(
            [verdict(5, "CONFLICT")],
            findings,
            limits=ReportLimits(heatmap_blocks_max=4, findings_max=count),
        ).heatmaps
        for count in (1000, 3)
    )
    assert at_once == in_turns
    assert [block for block, _ in at_once[0].rows] == [0, 3, 4, 8]
    assert at_once[0].left_out == 5


def test_two_replicas_on_one_datanode_have_a_column_each() -> None:
    (heatmap,) = made(
        [verdict(5, "REPAIRABLE")], [finding("missing_block", 5, 7, ("dn-a/DS-1",), ("dn-a/DS-2",))]
    ).heatmaps
    assert heatmap.replicas == ("dn-a/DS-1", "dn-a/DS-2", "dn-b", "dn-c")


def test_what_there_is_no_room_for_is_counted() -> None:
    findings = [finding("missing_block", 1, block, ("dn-a",)) for block in range(5)]
    report = made(
        [verdict(1, "REPAIRABLE"), verdict(2, "REPAIRABLE")],
        [*findings, finding("missing_block", 2, 1, ("dn-b",))],
        limits=ReportLimits(heatmap_blocks_max=2, containers_max=1),
    )
    assert [(len(heatmap.rows), heatmap.left_out) for heatmap in report.heatmaps] == [
        (2, 3),
        (1, 0),
    ]
    assert (len(report.lines), report.lines_left_out) == (1, 1)
    assert "and 3 more blocks" in Page(render(report)).text


def test_damage_is_counted_once_a_replica_by_datanode_and_by_age() -> None:
    at_ms = int(AT.timestamp() * 1000)
    report = made(
        [verdict(1, "REPAIRABLE"), verdict(2, "REPAIRABLE")],
        [
            finding("missing_block", 1, 7, ("dn-b",)),
            finding("corrupt_chunk", 1, 8, ("dn-b",)),
            finding("corrupt_chunk", 2, 8, ("dn-b", "dn-c")),
        ],
        created_ms={("dn-a", "DS-dn-a"): at_ms - DAY_MS, ("dn-b", "DS-dn-b"): at_ms - 400 * DAY_MS},
    )
    assert report.datanodes == (
        DamageShare("dn-b", 10, 2),
        DamageShare("dn-c", 10, 1),
        DamageShare("dn-a", 10, 0),
    )
    assert report.ages == (
        DamageShare("under 1 month", 10, 0),
        DamageShare("1 to 3 years", 10, 2),
        DamageShare("unknown", 10, 1),
    )


def test_nights_are_in_order_and_the_last_is_this_one() -> None:
    before = tuple(
        PastSweep(f"2026112{day}T013000Z-bb", AT, 9, {"REPAIRABLE": day}) for day in (1, 0)
    )
    report = made([verdict(1, "MATCH")], [], earlier=before)
    assert [night.diverged for night in report.nights] == [0, 1, 0]
    page = Page(render(report))
    assert "No container diverged." in page.text
    titles = [
        attributes
        for tag, attributes in page.tags
        if tag == "rect" and attributes.get("class") == "REPAIRABLE"
    ]
    assert len(titles) == 1, "one night has a column, the two without divergence have none"


def test_skipped_inputs_are_said_first() -> None:
    text = Page(render(made([verdict(1, "MATCH")], [], skipped=("dn-x: no manifest",)))).text
    assert "1 input could not be read" in text
    assert text.index("dn-x: no manifest") < text.index("Divergence over nights")


def test_hostile_names_stay_text() -> None:
    name = "<script>alert(1)</script>"
    page = render(
        made(
            [verdict(1, "CONFLICT", name)],
            [finding("missing_block", 1, 7, (name,), ("&amp;",))],
            skipped=(name,),
        )
    )
    assert name not in page
    assert name in Page(page).text
    assert [tag for tag, _ in Page(page).tags].count("script") == 1


def test_the_page_asks_nobody_for_anything() -> None:
    page = Page(
        render(made([verdict(1, "REPAIRABLE")], [finding("missing_block", 1, 7, ("dn-a",))]))
    )
    assert not [
        tag for tag, attributes in page.tags if {"src", "href", "srcset"} & attributes.keys()
    ]
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "img", "object", "base")]


def test_the_page_opens_with_what_changed_and_what_was_seen(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    agents.change(0, 2, matches=False, seed=0)
    # Of container 5 dn-1 has no tree.
    agents.walks[1].put(replica(5, source=None))
    agents.export(0, 1, 2)
    store = SweepStore(out, Disk())
    nights = [run(out, agents.to, report=lambda made: write_report(store, made))]
    text = Page(store.report(nights[0].sweep_id).read_text()).text
    assert "There is no earlier sweep to compare with." in text
    assert "80.0 % of 15 replicas were compared: 12." in text
    chunks = max((agents.to / "dn-2").glob("chunks-*"))
    flip(chunks, chunks.stat().st_size // 2)
    agents.change(0, 3, matches=False, seed=0)
    agents.export(0)
    nights.append(run(out, agents.to, report=lambda made: write_report(store, made)))
    page = Page(store.report(nights[1].sweep_id).read_text())
    opening = [
        "Since the sweep before",
        "1new",
        "0healed",
        "1persisting",
        "3unseen",
        "Coverage",
        "Not read: datanode",
        "Divergence over nights",
    ]
    flat = "".join(page.text.split("\n"))
    places = [flat.index(one) for one in opening]
    assert places == sorted(places)
    assert "does not match the checksum of its manifest" in flat[places[-2] : places[-1]]
    assert "3 containers are UNSEEN" in page.text
    assert "No container diverged" not in page.text
    for command in ("treefold reconcile 2", "treefold reconcile 3", "treefold container info 1"):
        assert command in page.codes
    assert {"dn-2", "--gone dn-2", nights[0].sweep_id, "3"} <= set(page.codes)


def test_unknown_is_told_by_reason_with_what_to_do(tmp_path: Path) -> None:
    agents, out = Agents(tmp_path / "to"), tmp_path / "out"
    for walk in agents.walks[1:]:
        walk.put(*(replica(number, source=None) for number in (1, 2)))
        del walk.replicas_held[4]
    agents.export(0, 1, 2)
    store = SweepStore(out, Disk())
    summary = run(out, agents.to, report=lambda made: write_report(store, made))
    page = Page(store.report(summary.sweep_id).read_text())
    assert "2 of 3 replicas have no root" in page.text
    assert "only one replica takes part" in page.text
    assert {"treefold scan 1", "treefold container info 4"} <= set(page.codes)


def test_nothing_on_the_page_is_wider_than_a_small_telephone() -> None:
    page = render(made([verdict(1, "REPAIRABLE")], [finding("missing_block", 1, 7, ("dn-a",))]))
    # What cannot shrink scrolls by itself.
    for width in re.findall(r"min-width: (\d+)px", page):
        assert (
            int(width) <= 320 or f"svg.bars {{ min-width: {width}px" in page or "svg.wide" in page
        )
    for least in re.findall(r"minmax\(([^,]+|min\([^)]*\)),", page):
        assert least.startswith("min(100%") or int(least.removesuffix("px")) <= 150
    drawn = Page(page)
    assert drawn.without_scroll == []
    # Each cell of a table that is stacked says what it is.
    assert drawn.unlabelled == 0

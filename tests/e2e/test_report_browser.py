"""The report in a real browser: drawn, searched, dark where the reader's desk is, and
silent to the network.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sweep.report import render
from tests.unit.test_sweep_report import finding, made, verdict

pytestmark = pytest.mark.e2e
# What a reader would type and look at, done by the page itself and left behind for the
# dump.
PROBE = """<script>
const box = document.getElementById("find");
box.value = "dn-b corrupt"; box.dispatchEvent(new Event("input"));
const probe = document.createElement("pre"); probe.id = "probe";
probe.textContent = JSON.stringify({
  shown: [...document.querySelectorAll("#rows tr")]
    .filter((row) => !row.hidden).map((row) => row.cells[0].textContent),
  count: document.getElementById("found").textContent,
  page: getComputedStyle(document.body).backgroundColor,
  cells: [...document.querySelectorAll("#heatmaps rect")]
    .filter((c) => c.getBoundingClientRect().width > 10).length,
  wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  requests: performance.getEntriesByType("resource").length,
});
document.body.append(probe);
</script></body>"""


def in_browser(page: Path, *flags: str) -> dict[str, object]:
    browser = shutil.which("chromium")
    assert browser, "chromium is missing; run: sudo apt-get install chromium"
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'profile'}",
    ]
    done = subprocess.run(
        [*command, "--window-size=1180,1500", *flags, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    assert found, done.stderr
    result: dict[str, object] = json.loads(found[1])
    return result


@pytest.fixture
def page(tmp_path: Path) -> Path:
    report = made(
        [verdict(11, "REPAIRABLE"), verdict(12, "REPAIRABLE"), verdict(13, "CONFLICT")],
        [
            finding("corrupt_chunk", 11, 7, ("dn-b",)),
            finding("missing_block", 12, 7, ("dn-b",)),
            finding("corrupt_chunk", 13, 9, ("dn-a",)),
        ],
    )
    path = tmp_path / "report.html"
    path.write_text(render(report).replace("</body>", PROBE))
    return path


def test_the_table_is_searched_and_the_pictures_are_drawn(page: Path) -> None:
    seen = in_browser(page)
    assert (seen["shown"], seen["count"]) == (["11"], "1 of 3")
    assert seen["cells"] == 9
    assert not seen["wide"]
    assert seen["requests"] == 0


def test_light_and_dark_follow_the_reader(page: Path) -> None:
    light, dark = (
        in_browser(page)["page"],
        in_browser(page, "--blink-settings=preferredColorScheme=0")["page"],
    )
    assert (light, dark) == ("rgb(251, 251, 249)", "rgb(20, 24, 28)")

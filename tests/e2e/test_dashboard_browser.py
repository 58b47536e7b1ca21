"""The page of a controller in a real browser: light, dark, and as narrow as a phone."""

import html
from pathlib import Path

import pytest

from tests.e2e.test_report_browser import in_browser
from tests.unit.test_dashboard import TOKEN, Page, await_text, diverge
from tests.unit.test_dashboard import page as page

pytestmark = pytest.mark.e2e
# The window of a browser cannot be as narrow as a frame in it.
FRAME = """<iframe id="frame" width="{width}" height="900" srcdoc="{page}"></iframe>
<script>addEventListener("load", () => {{
  const seen = document.getElementById("frame").contentDocument;
  const probe = document.createElement("pre"); probe.id = "probe";
  probe.textContent = JSON.stringify({{
    text: seen.querySelector(".headline").textContent,
    back: seen.defaultView.getComputedStyle(seen.body).backgroundColor,
    wide: seen.documentElement.scrollWidth > seen.documentElement.clientWidth,
    bars: [...seen.querySelectorAll("#jobs .bar")]
      .filter((bar) => bar.getBoundingClientRect().width > 50).length,
    loaded: seen.defaultView.performance.getEntriesByType("resource").length,
  }});
  document.body.append(probe);
}});</script>"""


def framed(folder: Path, text: str, width: int) -> Path:
    path = folder / f"{width}.html"
    path.write_text(FRAME.format(width=width, page=html.escape(text)))
    return path


def test_the_page_fits_any_reader(page: Page, tmp_path: Path) -> None:
    diverge(page)
    assert page.ask("/containers/2/reconcile", "POST", token=TOKEN).status == 303
    text = await_text(page, "/", "/jobs/")
    for width in (360, 1180):
        seen = in_browser(framed(tmp_path, text, width))
        assert seen["text"] == "1 of 2 containers diverged."
        assert not seen["wide"]
        assert (seen["bars"], seen["loaded"]) == (1, 0)
        assert seen["back"] == "rgb(251, 251, 249)"
    dark = in_browser(framed(tmp_path, text, 360), "--blink-settings=preferredColorScheme=0")
    assert dark["back"] == "rgb(20, 24, 28)"

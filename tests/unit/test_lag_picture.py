"""The picture of a replication's lag: it is well formed, and nothing is cut off."""

import re
from xml.etree import ElementTree

from admin.demo.lag_picture import Mark, draw_lag

SVG = "{http://www.w3.org/2000/svg}"


def test_marks_and_curve_are_inside_of_the_picture() -> None:
    marks = [Mark(0, "kill <&>", 4_000), Mark(9_900, "flip")]
    root = ElementTree.fromstring(draw_lag("lag <&>", "p99", [0, 5, 99_999, 300], 2_500, marks))
    _, _, width, height = map(int, root.attrib["viewBox"].split())
    shown = [element.text for element in root.iter(f"{SVG}text")]
    assert {"lag <&>", "p99", "kill <&>", "flip", "10 s", "5 s"} <= set(shown)
    for element in root.iter():
        assert 0 <= float(element.get("x", 0)) + float(element.get("width", 0)) <= width
        assert 0 <= float(element.get("y", 0)) + float(element.get("height", 0)) <= height
    (line,) = (one.attrib["d"] for one in root.iter() if one.get("class") == "line")
    heights = [float(y) for y in re.findall(r" ([\d.]+)h", line)]
    assert heights[2] < heights[3] < heights[1] <= heights[0]

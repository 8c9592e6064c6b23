"""The picture of what the controller did follows the reader's theme, as all pictures do."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from jobs.bench.adaptive.history_plot import history_svg
from raypipe.ir.pictures.theme import LINES

SCHEDULES = ["", "slack 1, 2", "", *(f"kFkB {k} of <M>" for k in range(len(LINES)))]


def test_every_colour_is_of_the_themes() -> None:
    picture = history_svg("scenario <a>", [0.1] * len(SCHEDULES), SCHEDULES, [(0, "fast"), (5, "slow & shared")])
    style, drawn = picture.split("</style>")
    assert "prefers-color-scheme:dark" in style
    assert re.findall(r"#[0-9a-f]{3,6}|white|black", drawn) == []
    marks = [one for one in ElementTree.fromstring(picture).iter() if not one.tag.endswith(("svg", "style"))]
    classes = {one.get("class") for one in marks}
    assert None not in classes
    assert [name for name in classes if f".{name}{{" not in style] == []
    words = [one.text for one in marks if one.tag.endswith("text")]
    assert {"scenario <a>", "fast", "slow & shared", "as planned", *filter(None, SCHEDULES)} <= set(words)
    bands = [one.get("class") for one in marks if one.tag.endswith("rect") and one.get("height") == "20"]
    assert bands[0] == bands[2] != bands[1]

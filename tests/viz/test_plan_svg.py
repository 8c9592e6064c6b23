"""The bars of a plan's stages: on the scale of what they hold, with a limit that is near, and words that fit."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from raypipe.ir.plan import Prediction, StagePrediction
from raypipe.viz.plan_svg import BYTES, stage_bars_svg
from raypipe.viz.svg import COLOURS, LINES

MIB = 1 << 20
WIDTH = 1200


def _drawn(held: int, limit: int | None, placement: tuple[int, ...] = ()) -> ElementTree.Element:
    stages = (StagePrediction(("cpu",), 1e-3, 2e-3, 1, "0F0", (("weights", held),), limit),) * 2
    found = Prediction(0.1, 0.2, 100.0, None, "stages", "measured", "assumed", stages, ())
    return ElementTree.fromstring(stage_bars_svg(found, WIDTH, placement))


def _titles(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter() if element.tag.endswith("}title")]


@pytest.mark.parametrize(("limit", "near"), [(3 * 40 * MIB, True), (100 * 40 * MIB, False)])
def test_a_limit_far_away_leaves_the_bars_their_length(limit: int, near: bool) -> None:
    picture = _drawn(40 * MIB, limit)
    assert any(title.startswith("limit ") for title in _titles(picture)) == near
    assert sum(" of " in (element.text or "") for element in picture.iter()) == 2, "it is told all the same"
    wide = [float(box.get("width", "")) for box in picture.iter() if box.get("class") == "rp-area1"]
    assert min(wide[:2]) > 250


def test_what_bytes_are_for_never_has_the_colour_of_forward_or_backward() -> None:
    assert len(set(BYTES)) == len(BYTES) >= 8
    same = {COLOURS[name][theme] for name in "FB" for theme in (1, 2)} | {LINES[0][0], LINES[2][0]}
    assert not same & {colour for number in BYTES for colour in LINES[number]}


def test_words_beside_a_full_bar_fit() -> None:
    picture = _drawn(1023 * MIB, 1100 * MIB, (10, 10))
    for element in picture.iter():
        if " of worker 10" in (element.text or ""):
            assert float(element.get("x", "")) + 7.3 * len(element.text or "") < WIDTH

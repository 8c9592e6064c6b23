"""A run that goes on with other stages and another schedule is the run that was never stopped, step by step."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from jobs.check.resume import FAMILIES, LAYOUTS, Layout, outcome, pairs_that_differ, trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0].schedule)
def test_every_layout_goes_on_from_another_of_its_family(family: tuple[Layout, ...], tmp_path: Path) -> None:
    """Each once, in a circle; python jobs/check/resume.py tries every pair."""
    assert pairs_that_differ(tmp_path, list(zip(family, family[1:] + family[:1], strict=True))) == []


def test_all_kinds_of_layouts_are_among_them() -> None:
    several = {layout.stages // layout.workers for layout in LAYOUTS}
    uneven = {bool(layout.starts) for layout in LAYOUTS}
    assert (several, uneven) == ({1, 2, 3}, {False, True})
    schedules = {layout.schedule for layout in itertools.chain(*FAMILIES)}
    assert schedules == {
        "gpipe", "1f1b", "kfkb", "slack", "zb-h1", "interleaved", "zb-v", "2bw", "pipedream",
    }  # fmt: skip


def test_a_run_of_another_family_is_another_run(tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    for family in (LAYOUTS, FAMILIES[1]):
        trainer(tmp_path, family[0].schedule, family[0]).fit(4, local=True, progress=False)
    gpipe, late = (outcome(tmp_path / name) for name in (LAYOUTS[0].schedule, "2bw"))
    assert gpipe[0][0][:3] == late[0][0][:3]
    assert gpipe[0] != late[0]

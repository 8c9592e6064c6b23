"""jobs/train/trainer_scripts.py: every script has Trainer's losses and parameters, but for zeros of padding in sums."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from jobs.train.trainer_scripts import SCRIPTS, compare, main

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUICK = ("contrastive, CLIP", "speech, Wav2Vec2 CTC")
"""An argument that is no tensor, and a check on values."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in SCRIPTS if name not in QUICK])
def test_a_script_trains_as_with_trainer(name: str) -> None:
    row = compare(SCRIPTS[name])
    assert row.outcome in ("equal", "near"), row
    assert row.losses < 1e-6
    assert row.parameters < 2e-5  # Adam divides differences by gradients near 0


def test_the_table_has_a_row_for_each_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", *QUICK]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [(row[0].removeprefix("| "), row[1]) for row in rows] == [(name, "equal") for name in QUICK]

"""Features that meet by chance train what plain PyTorch trains, or are refused before the first step by a field's name.

RAYPIPE_TRIALS=300 makes a hunt of the few draws here; ``Combination.parse`` repeats a failure from its text.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from raypipe.errors import ConfigError
from tests.combinations import trial
from tests.combinations.drawn import Combination, drawn
from tests.combinations.nets import NETS
from tests.combinations.trial import carry_out
from tests.trainers import trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

TRIALS = int(os.environ.get("RAYPIPE_TRIALS", "16"))
ONCE_WRONG: dict[str, dict[str, Any]] = {
    "2bw goes on with one stage": {
        "fields": {"schedule": "2bw", "num_stages": 1, "partitioner": "parameters"},
        "stop": 2, "first": {"schedule": "2bw", "num_stages": 2, "partitioner": "parameters"},
    },
    "a frozen stage, and a norm of all stages behind others' forwards": {
        "net": "frozen below",
        "fields": {"schedule": "2bw", "num_stages": 3, "partitioner": ["3", "7"], "slack": 2, "max_grad_norm": 0.05},
    },
}  # fmt: skip
SIZES = {"minibatch_size": 8, "num_microbatches": 4, "precision": "fp32", "verify": "off"}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(TRIALS))
def test_drawn_combinations(number: int, tmp_path: Path) -> None:
    found = drawn(Random(f"combination test-{number}"))
    outcome = carry_out(found, tmp_path)
    assert outcome.good, "\n".join([str(found), *outcome.details])


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_was_once_wrong(name: str, tmp_path: Path) -> None:
    given = dict(ONCE_WRONG[name])
    for part in ("fields", "first"):
        if part in given:
            given[part] = SIZES | given[part]
    outcome = carry_out(Combination(**{"samples": 20, "steps": 5, **given}), tmp_path)
    assert outcome.word == "equal", outcome.details


def test_a_single_sample_is_refused(tmp_path: Path) -> None:
    fields = SIZES | {"schedule": "1f1b", "num_stages": 2, "partitioner": ["3"]}
    outcome = carry_out(Combination(samples=1, fields=fields), tmp_path)
    assert outcome.word == "refused"
    assert "train_data has 1 sample, and a model is traced on 2" in outcome.details[0]


def test_groups_that_are_empty_on_a_stage_are_named(tmp_path: Path) -> None:
    def decaying(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        groups = [[(n, p) for n, p in named if (p.dim() > 1) is decays] for decays in (True, False)]
        return torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)

    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Flatten(), torch.nn.Linear(30, 3))
    data = TensorDataset(torch.zeros(8, 5, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))
    trainer = trainer_of(model, optimizer=decaying, train_data=data)
    with pytest.raises(ConfigError, match=r"stage 0, which trains 0\.weight .* Leave it out"):
        trainer.plan()


@pytest.mark.parametrize("fields", [{}, {"schedule": "pipedream", "num_stages": 3}])
def test_a_wrong_weight_of_micro_batches_is_seen(
    fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of plain PyTorch, for once."""
    usual = {"minibatch_size": 6, "num_microbatches": 3, "num_stages": 2, "partitioner": "parameters"}
    found = Combination("class weights", 12, 3, fields=usual | {"precision": "fp32", "schedule": "1f1b"} | fields)
    assert carry_out(found, tmp_path / "right").word == "equal"
    monkeypatch.setitem(trial.NETS, "class weights", dataclasses.replace(NETS["class weights"], items=len))
    outcome = carry_out(found, tmp_path / "wrong")
    assert outcome.word == "WRONG"
    assert "loss" in outcome.details[0]

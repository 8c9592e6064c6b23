"""A step whose loss or gradient is not finite is left out on all stages, exactly, or ends the run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.data.open_data import open_data
from raypipe.engine.optim.update import MOST_SKIPPED
from raypipe.errors import ConfigError, StageError
from raypipe.testing import Reference, reference
from tests.exactness import same_bits
from tests.nets import Mlp, sequential
from tests.trainers import adamw

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]

STEPS, MINIBATCH = 8, 8
BAD = (2, 3, 5)
FIELDS: dict[str, Any] = {
    "num_stages": 2, "minibatch_size": MINIBATCH, "num_microbatches": 4, "partitioner": "parameters",
    "on_nonfinite": "skip",
}  # fmt: skip


def bad_data(steps: Sequence[int], value: float, samples: int = 20 * MINIBATCH) -> TensorDataset:
    """One sample with this value in every mini-batch of these steps."""
    drawn = torch.Generator().manual_seed(2)
    x, y = torch.randn(samples, 6, generator=drawn), torch.randint(0, 3, (samples,), generator=drawn)
    order = open_data(TensorDataset(torch.arange(samples)), seed=0)
    for step in steps:
        (numbers,) = order.read(0, step * MINIBATCH + 5, 1, (0,))
        x[int(numbers), 1] = value
    return TensorDataset(x, y)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def normed() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def traced() -> nn.Module:
    torch.manual_seed(1)
    return Mlp()


def arguments(build: Any, bad: Sequence[int], value: float, **fields: Any) -> dict[str, Any]:
    return {
        "model": build(),
        "loss_fn": functional.cross_entropy,
        "optimizer": adamw,
        "lr_scheduler": halving,
        "train_data": bad_data(bad, value),
        "pipeline": PipelineConfig(**{**FIELDS, **fields}),
    }


def fit(given: dict[str, Any], folder: Path, steps: int = STEPS, name: str = "run") -> Any:
    run = SimpleNamespace(name=name, storage_path=str(folder))
    trainer = PipelineTrainer(given["model"], **{k: v for k, v in given.items() if k != "model"}, run_config=run)
    return trainer.fit(num_steps=steps, local=True, progress=False)


def differences(result: Any, expected: Reference) -> list[str]:
    """What a run and plain PyTorch do not have in common; NaN is NaN here."""
    told = [("losses", [r.loss for r in result.records], expected.losses)]
    told += [("norms", [r.grad_norm for r in result.records], expected.grad_norms)]
    state = load_state_dict(result.path)
    return [what for what, ours, theirs in told if list(map(repr, ours)) != list(map(repr, theirs))] + [
        name for name, x in {**expected.parameters, **expected.buffers}.items() if not same_bits(state[name], x)
    ]


def events(folder: Path, decision: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["decision"] == decision]


@pytest.mark.parametrize(
    ("build", "value", "fields"),
    [
        (traced, math.nan, {"schedule": "gpipe"}),
        (traced, math.inf, {"schedule": "1f1b", "num_stages": 3, "max_grad_norm": 0.5}),
        (normed, math.nan, {"schedule": "kfkb"}),
        (traced, 3e38, {"schedule": "slack"}),
        (traced, math.nan, {"schedule": "zb-h1"}),
        (normed, math.inf, {"schedule": "zb-h1", "num_stages": 3, "max_grad_norm": 0.5}),
        (sequential, math.nan, {"schedule": "interleaved", "num_stages": 4}),
        (sequential, -math.inf, {"schedule": "zb-v", "num_stages": 4}),
        (traced, math.nan, {"num_stages": 1}),
    ],
)
def test_a_run_is_plain_pytorch_that_skipped_the_same_steps(
    build: Any, value: float, fields: dict[str, Any], tmp_path: Path
) -> None:
    given = arguments(build, BAD, value, **fields)
    result = fit(given, tmp_path)
    expected = reference(**given, num_steps=STEPS)
    assert expected.skipped == BAD
    assert [record.step for record in result.records if record.skipped] == list(BAD)
    assert differences(result, expected) == []
    assert all(bool(p.isfinite().all()) for p in expected.parameters.values())
    assert [line["step"] for line in events(tmp_path, "skip")] == list(BAD)
    assert [line["skipped"] for line in events(tmp_path, "skip")] == [1, 2, 3]


@pytest.mark.parametrize("saved", [3, 4, 7])
def test_a_run_that_goes_on_has_skipped_what_it_skipped(saved: int, tmp_path: Path) -> None:
    """A scheduler that took one step for every mini-batch would have another learning rate."""
    given = arguments(traced, BAD, math.nan)
    fit(given, tmp_path, saved)
    result = fit(given, tmp_path)
    expected = reference(**given, num_steps=STEPS)
    assert differences(result, expected) == []
    assert [record.step for record in result.records if record.skipped] == list(BAD)


def test_ten_in_a_row_end_the_run(tmp_path: Path) -> None:
    assert MOST_SKIPPED == 10
    with pytest.raises(StageError) as caught:
        fit(arguments(traced, range(3, 14), math.nan, checkpoint_interval_steps=3), tmp_path, 20)
    assert str(caught.value).startswith(
        "Step 12: the loss is nan and the gradient norm nan. It is the 10th non-finite step in a row, the "
        "most that on_nonfinite='skip' leaves out: the parameters are those before step 3. Column 0 of the "
        "data has nan at [1] in item 66 of TensorDataset: mend the data there, or leave that out."
    )
    assert [line["step"] for line in events(tmp_path, "skip")] == list(range(3, 12))


def test_nine_in_a_row_do_not(tmp_path: Path) -> None:
    result = fit(arguments(traced, [*range(1, 10), *range(11, 14)], math.nan), tmp_path, 15)
    assert sum(record.skipped for record in result.records) == 12


def test_stop_is_the_default(tmp_path: Path) -> None:
    with pytest.raises(StageError) as caught:
        fit(arguments(traced, BAD, math.nan, on_nonfinite="stop", schedule="1f1b"), tmp_path)
    assert str(caught.value).startswith(
        "Step 2: the loss is nan and the gradient norm nan, so no stage took this step and the parameters are those "
        "after 2 steps. Column 0 of the data has nan at [1] in item 148 of TensorDataset: mend the data there, or "
        "leave that out. "
        "on_nonfinite='skip' leaves such steps out."
    )


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_asynchronous_schedules_are_refused(schedule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineConfig(schedule=schedule, on_nonfinite="skip")
    assert str(caught.value) == (
        f"on_nonfinite='skip' is not possible with schedule={schedule!r}, whose stages update without waiting for each "
        "other: some have taken the step before another one finds NaN. Set a synchronous schedule, such as '1f1b', or "
        "on_nonfinite='stop'."
    )


@pytest.mark.parametrize("reduction", ["auto", "mean"])
def test_the_first_step_may_be_skipped_too(reduction: str, tmp_path: Path) -> None:
    """The loss is tried, and the model checked, on the rows of that step."""
    given = arguments(normed, [0], math.nan, loss_reduction=reduction)
    expected = reference(**{**given, "pipeline": PipelineConfig(**{**FIELDS, "loss_reduction": "mean"})}, num_steps=3)
    result = fit(given, tmp_path, 3)
    assert differences(result, expected) == []
    assert not all(bool(buffer.isfinite().all()) for buffer in expected.buffers.values()), "buffers keep what came"

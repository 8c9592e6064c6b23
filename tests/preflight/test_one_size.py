"""Models that take one number of samples train if every micro-batch has it, and are refused otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe.capture import capture
from raypipe.errors import ConfigError
from raypipe.preflight.dry_run import refuse_other_sizes
from tests import nets
from tests.models import CASES
from tests.trainers import trainer_of

pytestmark = pytest.mark.engine


class View(nets.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(4, -1))


class Time(nets.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.lstm(x[:, None].expand(-1, 5, -1))[0][:, -1])


class Loop(nets.Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([super(Loop, self).forward(one) for one in x])


def data(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 6, generator=drawn), torch.zeros(count, dtype=torch.long))


@pytest.mark.parametrize(("model", "size"), [(View(), 4), (Loop(), 4), (Time(), None), (nets.Mlp(), None)])
def test_a_capture_has_the_number_of_samples_that_a_model_takes(model: nn.Module, size: int | None) -> None:
    assert capture(model, CASES["mlp"].data(4)[:4], (0, 1), functional.cross_entropy).one_size == size


@pytest.mark.parametrize("evaluated", [None, 4, 6, 7])
@pytest.mark.parametrize("minibatch", [2, 4, 6, 7])
@pytest.mark.parametrize("microbatch", [2, 3])
@pytest.mark.parametrize("count", [8, 9, 10, 12])
def test_other_sizes_are_refused_and_no_others(
    count: int, microbatch: int, minibatch: int, evaluated: int | None
) -> None:
    """Against the sizes of all micro-batches of an epoch and of an evaluation."""
    microbatch = min(microbatch, minibatch)
    counts = {"train": count} if evaluated is None else {"train": count, "eval": evaluated}
    wholes = [min(minibatch, number - at) for number in counts.values() for at in range(0, number, minibatch)]
    sizes = {min(microbatch, whole - at) for whole in [*wholes, minibatch] for at in range(0, whole, microbatch)}
    try:
        refuse_other_sizes(2, counts, minibatch, microbatch)
    except ConfigError:
        assert sizes != {2}
    else:
        assert sizes == {2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_data": data(15)}, "train_data has 15 samples, and its last micro-batch 1. Leave 1 of them out"),
        ({"train_data": data(16), "eval_data": data(9)}, "eval_data has 9 samples, and its last micro-batch 1"),
        ({"train_data": data(16), "num_microbatches": 3}, "8 are divided into micro-batches of 3. Set num_stages"),
        ({"train_data": data(16), "num_microbatches": "auto"}, "Give num_microbatches a number"),
    ],
    ids=["rest", "evaluation", "unequal", "auto"],
)
def test_a_plan_with_other_sizes_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        trainer_of(Loop(), **given).plan()
    assert "forward takes one number of samples only" in str(error.value)
    assert "as in x.view(x.shape[0], -1)" in str(error.value)


def test_samples_that_a_recurrent_layer_takes_for_time_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="Such a loss compares the rows of a batch with each other"):
        trainer_of(Time(), train_data=data(16)).plan()


def test_a_plan_has_a_note_on_the_one_size(tmp_path: Path) -> None:
    trainer = trainer_of(Loop(), train_data=data(16), eval_data=data(6), folder=tmp_path)
    note = "forward takes one number of samples only: every micro-batch of training and evaluation has 2."
    assert note in trainer.plan().notes
    assert trainer.fit(num_steps=2, local=True, progress=False).metrics["step"] == 2


def test_a_loss_that_cannot_be_tried_on_two_micro_batches_needs_a_word(tmp_path: Path) -> None:
    """View does not run on eight rows, so that nothing shows whether micro-batches weigh by rows or labels."""
    sizes = {"minibatch_size": 8, "num_microbatches": 2}
    with pytest.raises(ConfigError, match=r"takes one number of samples only, so that what the loss averages over"):
        trainer_of(View(), train_data=data(16), folder=tmp_path, **sizes).plan()
    trainer_of(View(), train_data=data(16), folder=tmp_path, loss_reduction="mean", **sizes).plan()
    with pytest.raises(ConfigError, match=r"loss_over='minibatch' is not possible: the model takes one number"):
        trainer_of(View(), train_data=data(16), folder=tmp_path, loss_over="minibatch", **sizes).plan()

"""A scheduler that has an end before that of the run is refused before it trains, by the step that it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.engine.trial.scheduler_length import refuse_too_short
from raypipe.errors import ConfigError, StageError

pytestmark = pytest.mark.engine

Make = Callable[[torch.optim.Optimizer], Any]
PARAMETERS = {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
RATES = [1.0, 0.5, 0.25, 0.125, 0.0625, 0.03]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def one_cycle(optimizer: torch.optim.Optimizer, steps: int = 5) -> Any:
    return schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def listed(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.LambdaLR(optimizer, lambda step: RATES[step])


def warmed(optimizer: torch.optim.Optimizer) -> Any:
    """Three steps of one, then five of the other."""
    parts = [schedulers.LinearLR(optimizer), one_cycle(optimizer)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[3])


def cooled(optimizer: torch.optim.Optimizer) -> Any:
    parts = [one_cycle(optimizer), schedulers.ConstantLR(optimizer)]
    return schedulers.SequentialLR(optimizer, parts, milestones=[7])


def together(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.ChainedScheduler([schedulers.ConstantLR(optimizer), one_cycle(optimizer)], optimizer)


class Counting(schedulers.LRScheduler):
    """Counts its steps by itself, and will not have one left out."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen = -1
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        self.seen += 1
        assert self.seen == self.last_epoch
        return [0.1]


def length(make: Make) -> int:
    """Steps that it takes in plain PyTorch."""
    scheduler = make(sgd(list({name: torch.nn.Parameter(x) for name, x in PARAMETERS.items()}.items())))
    for step in range(100):
        try:
            scheduler.step()
        except (ValueError, IndexError):
            return step
    return 100


def refuse(make: Make, updates: int, *, step_each: bool = True) -> None:
    refuse_too_short(PARAMETERS, sgd, make, updates, f"num_steps={updates}", step_each=step_each)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [one_cycle, listed, warmed, cooled, together])
def test_the_last_step_is_taken_and_no_other(make: Make) -> None:
    last = length(make)
    assert last < 100
    refuse(make, last)
    with pytest.raises(
        ConfigError, match=rf"^lr_scheduler makes \w+, whose step {last + 1} fails.*num_steps={last}\.$"
    ):
        refuse(make, last + 1)
    with pytest.raises(ConfigError, match=f"whose step {last + 1} fails"):
        refuse(make, 5000)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: schedulers.StepLR(o, 3),
        lambda o: schedulers.CosineAnnealingLR(o, T_max=4),
        lambda o: schedulers.CyclicLR(o, 0.1, 0.2),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
        Counting,
        lambda o: SimpleNamespace(step=lambda: None, state_dict=dict),
        None,
    ],
)
def test_what_has_no_end_is_taken(make: Any) -> None:
    refuse(make, 2000)
    if make is not Counting:
        refuse(make, 10**9)


def test_the_message_names_what_to_write() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse(one_cycle, 500)
    assert str(caught.value) == (
        "lr_scheduler makes OneCycleLR, whose step 6 fails: ValueError: Tried to step 6 times. The specified number of "
        "total steps is 5. With num_steps=500 it takes 500 of them. Let it last as long, total_steps=500, or train no "
        "longer: num_steps=5."
    )
    with pytest.raises(ConfigError) as caught:
        refuse(listed, 500, step_each=False)
    assert f"{__file__}:" in str(caught.value)
    assert str(caught.value).endswith("IndexError: list index out of range. With num_steps=500 it takes 500 of them. "
                                      "Let it last as long.")  # fmt: skip


def trainer(folder: Path, lr_scheduler: Make, **pipeline: Any) -> PipelineTrainer:
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))
    return PipelineTrainer(
        torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)),
        optimizer=sgd, lr_scheduler=lr_scheduler, loss_fn=torch.nn.functional.cross_entropy, train_data=data,
        pipeline=PipelineConfig(
            num_stages=2, minibatch_size=8, num_microbatches=4, partitioner="parameters", **pipeline
        ),
        run_config=SimpleNamespace(name="run", storage_path=str(folder)),
    )  # fmt: skip


def test_a_run_knows_its_length_before_it_trains(tmp_path: Path) -> None:
    made = trainer(tmp_path, one_cycle)
    with pytest.raises(ConfigError, match=r"With num_epochs=2, which is 6 steps, it takes 6 of them"):
        made.fit(num_epochs=2, local=True, progress=False)
    assert not (tmp_path / "run").exists()
    assert len(made.fit(num_steps=5, local=True, progress=False).records) == 5
    asynchronous = trainer(tmp_path / "2bw", one_cycle, schedule="pipedream", update_interval=2)
    with pytest.raises(ConfigError, match=r"takes 7 of them\. Let it last as long, total_steps=7\.$"):
        asynchronous.fit(num_steps=4, local=True, progress=False)


@pytest.mark.parametrize(("steps", "updates"), [(2, 4), (3, 5), (5, 9), (6, 10)])
def test_an_incomplete_mini_batch_of_an_asynchronous_run_has_one_update(
    steps: int, updates: int, tmp_path: Path
) -> None:
    """20 samples in mini-batches of 8, of 4 micro-batches each: two updates, two, and one of what is left."""
    given = {"schedule": "pipedream", "update_interval": 2}
    short = trainer(tmp_path / "short", partial(one_cycle, steps=updates - 1), **given)
    with pytest.raises(ConfigError, match=rf"it takes {updates} of them"):
        short.fit(num_steps=steps, local=True, progress=False)
    enough = trainer(tmp_path / "enough", partial(one_cycle, steps=updates), **given)
    assert len(enough.fit(num_steps=steps, local=True, progress=False).records) == steps


class Surprise(schedulers.LRScheduler):
    """Fails in the middle, and not at the end."""

    def get_lr(self) -> list[float | torch.Tensor]:
        if self.last_epoch == 3:
            raise KeyError("rate 3")
        return [0.1]


def test_what_fails_all_the_same_is_named_at_its_step(tmp_path: Path) -> None:
    with pytest.raises(StageError) as caught:
        trainer(tmp_path, Surprise, checkpoint_interval_steps=2).fit(num_steps=5, local=True, progress=False)
    assert str(caught.value).startswith(f"lr_scheduler: step 3 of Surprise fails at {__file__}:")
    assert "KeyError: 'rate 3'. It is called once for every update of the run" in str(caught.value)
    assert "begins anew where there is none yet" in str(caught.value)
    assert len(list((tmp_path / "run/checkpoints").glob("step_*/manifest.json"))) == 1

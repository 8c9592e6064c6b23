"""The meter of bench_codec_loss: without codecs it is plain training; gaps are of equal seeds."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from jobs.bench.codec_loss.bench import ROWS, figures_of, heldout_loss
from jobs.bench.codec_loss.tasks import TASKS, Task, both
from jobs.train.lm import warmup_then_cosine

STEPS, RATE = 3, 1e-2


def build(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))


def rows() -> tuple[TensorDataset, TensorDataset]:
    """Make one mini-batch for training, so that the order of rows does not matter, and two held out."""
    drawn = torch.Generator().manual_seed(1)
    train, held = (
        TensorDataset(torch.randn(count, 4, generator=drawn), torch.randint(3, (count,), generator=drawn))
        for count in (ROWS, 2 * ROWS)
    )
    return train, held


def plain_loss(seed: int) -> float:
    """Train in plain PyTorch, a mini-batch at once."""
    model, (train, held) = build(seed), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    inputs, targets = train.tensors
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * warmup_then_cosine(step, STEPS)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    inputs, targets = held.tensors
    return float(functional.cross_entropy(model(inputs), targets).detach())


def test_without_codecs_it_is_plain_training_and_codecs_change_it() -> None:
    task = Task(build, ("2",), rows, functional.cross_entropy, STEPS, RATE, both("none", "int4"))
    exact = heldout_loss(task, "none", 2, STEPS)
    assert exact == pytest.approx(plain_loss(2), rel=1e-5)
    assert heldout_loss(task, "int4", 2, STEPS) != pytest.approx(exact, rel=1e-5)


def test_gaps_are_of_equal_seeds() -> None:
    losses = {"wan": {"none": {"0": 2.0, "1": 2.5}, "tah4": {"1": 2.625, "2": 9.0}, "int8": {}}}
    assert figures_of(losses) == {"loss_wan_none": 2.25, "loss_wan_tah4": 2.625, "loss_gap_wan_tah4": 0.125}


def test_every_task_has_runs_without_codecs_and_eight_stages_for_the_twin() -> None:
    assert all(task.codecs["none"] == ("none", "none") for task in TASKS.values())
    assert len(TASKS["wan"].cuts) + 1 == 8

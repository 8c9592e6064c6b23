"""Seconds of stages and of their optimizer steps: measured without touching what the user built."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.engine.profile import measure_stages, measure_steps


class SlowAdam(torch.optim.Adam):
    """Takes 20 ms where it has the wide layer."""

    def step(self, closure: Any = None) -> Any:
        if any(p.numel() > 100 for group in self.param_groups for p in group["params"]):
            time.sleep(0.02)
        return super().step(closure)


def job(make_optimizer: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 32), nn.Linear(32, 2))
    pipeline = PipelineConfig(num_stages=3, minibatch_size=4, num_microbatches=2, partitioner=("1", "2"))
    trainer = PipelineTrainer(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=make_optimizer,
        train_data=TensorDataset(torch.randn(8, 4), torch.randn(8, 2)),
        pipeline=pipeline,
    )
    return trainer._prepared()


def test_steps_are_measured_by_stage_and_change_nothing() -> None:
    prepared = job(lambda named: SlowAdam(named, lr=0.1))
    before = {name: tensor.clone() for name, tensor in prepared.tensors.items()}
    seconds = measure_steps(prepared.programs, prepared.tensors, prepared.make_optimizer)
    assert len(seconds) == 3
    assert seconds[1] >= 0.02
    assert all(s > 0 for s in seconds)
    assert all(torch.equal(before[name], tensor) for name, tensor in prepared.tensors.items())
    assert all(tensor.grad is None for tensor in prepared.tensors.values())


def test_a_stage_that_cannot_step_counts_as_nothing() -> None:
    """The error belongs to the plan, which says what to do about it."""

    def refuses(named: Any) -> torch.optim.Optimizer:
        if any(name.startswith("1.") for name, _ in named):
            raise ValueError("not these")
        return torch.optim.SGD([p for _, p in named], lr=0.1)

    prepared = job(lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    first, second, third = measure_steps(prepared.programs, prepared.tensors, refuses)
    assert (first > 0, second, third > 0) == (True, 0.0, True)


def test_stages_are_measured() -> None:
    prepared = job(lambda named: torch.optim.SGD([p for _, p in named], lr=0.1))
    seconds = measure_stages(prepared.programs, prepared.tensors, prepared.example)
    assert len(seconds.forward_s) == len(seconds.backward_s) == 3
    assert all(s > 0 for s in (*seconds.forward_s, *seconds.backward_s))
    assert seconds.boundary_bytes == (2 * 8 * 4, 2 * 32 * 4)

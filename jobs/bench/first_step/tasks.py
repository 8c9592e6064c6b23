"""Tasks of both sides of bench/first_step: a model, its data and how its loss is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from jobs.lib import pipeline_nets

__all__ = ["TASKS", "Task", "optimizer_of", "task_of"]

TASKS = ("readme", "resnet50", "gpt2")
PIXELS = 64
TOKENS = 128
WORDS, WIDTH, LAYERS, CONTEXT = 50257, 768, 12, 1024
"""GPT-2 small: 124 million parameters."""


@dataclass(frozen=True, slots=True)
class Task:
    """One model to start.

    Attributes:
        data: samples are (x, y), or dicts if the model returns its own loss.
        minibatch_size: samples of the one step.
    """

    model: torch.nn.Module
    data: Any
    minibatch_size: int

    @property
    def owns_loss(self) -> bool:
        return isinstance(self.data[0], dict)


def task_of(name: str) -> Task:
    """Make one of TASKS, with equal initial weights every time."""
    torch.manual_seed(0)
    if name == "readme":
        layers = torch.nn.Sequential(
            torch.nn.Linear(64, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 256),
            torch.nn.ReLU(),
            torch.nn.Linear(256, 10),
        )
        data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
        return Task(layers, data, 64)
    if name == "resnet50":
        return Task(pipeline_nets.resnet50(), pipeline_nets.images(PIXELS, 4096), 32)
    if name == "gpt2":
        model = pipeline_nets.gpt2(width=WIDTH, layers=LAYERS, words=WORDS, context=CONTEXT)
        return Task(model, pipeline_nets.sentences(TOKENS, 4096, words=WORDS), 8)
    raise ValueError(f"task {name!r} is unknown: give one of {', '.join(TASKS)}")


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer of all tasks."""
    return torch.optim.AdamW(parameters, lr=3e-4)

"""Trainers of two stages and small mini-batches: a test names what matters to it, and the rest is as usual."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from raypipe import PipelineConfig, PipelineTrainer

__all__ = ["adamw", "sgd", "trainer_of"]

USUAL = {"num_stages": 2, "minibatch_size": 8, "num_microbatches": 4, "partitioner": "parameters"}
"""Fields of PipelineConfig."""
FIELDS = {field.name for field in dataclasses.fields(PipelineConfig)}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def trainer_of(model: Any, folder: Path | str | None = None, name: str | None = "run", **given: Any) -> PipelineTrainer:
    """Make a trainer with cross-entropy and SGD.

    Args:
        folder: that holds the run; None for a run without a folder and a name.
        given: fields of PipelineConfig and arguments of PipelineTrainer instead of the usual ones.
    """
    fields = {name: value for name, value in given.items() if name in FIELDS}
    arguments = {name: value for name, value in given.items() if name not in FIELDS}
    if folder is not None:
        arguments = {"run_config": SimpleNamespace(name=name, storage_path=str(folder))} | arguments
    return PipelineTrainer(
        model,
        pipeline=PipelineConfig(**USUAL | fields),
        **{"loss_fn": functional.cross_entropy, "optimizer": sgd} | arguments,
    )

"""Seconds of whole stages, measured by running one micro-batch through all of them in this process.

Parameters are read, never changed; buffers are copies.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raypipe.engine.one_thread import one_thread
from raypipe.engine.randomness import RandomKey
from raypipe.engine.stage import GraphFunction, StageProgram

__all__ = ["StageSeconds", "measure_stages"]


class StageSeconds(NamedTuple):
    """One micro-batch on every stage: seconds, and bytes of the boundary after it."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    boundary_bytes: tuple[int, ...]


def measure_stages(
    programs: Sequence[StageProgram],
    tensors: Mapping[str, torch.Tensor],
    columns: Mapping[Any, torch.Tensor],
    repeats: int = 3,
) -> StageSeconds:
    """Medians over ``repeats`` runs after one to warm up.

    Args:
        tensors: parameters and buffers by canonical name.
        columns: one micro-batch of data by column name.
    """
    # Copies, because a child of an nn.Sequential may count its calls: training begins with what the user built.
    programs = [
        program
        if isinstance(program.train, GraphFunction)
        else dataclasses.replace(program, train=copy.deepcopy(program.train))
        for program in programs
    ]
    with one_thread():  # as in the stages
        rounds = [_round(programs, tensors, columns) for _ in range(repeats + 1)][1:]
    stages = range(len(programs))
    return StageSeconds(
        tuple(statistics.median(r[0][s] for r in rounds) for s in stages),
        tuple(statistics.median(r[1][s] for r in rounds) for s in stages),
        rounds[0][2],
    )


def _round(
    programs: Sequence[StageProgram], tensors: Mapping[str, torch.Tensor], columns: Mapping[Any, torch.Tensor]
) -> tuple[list[float], list[float], tuple[int, ...]]:
    key = RandomKey(0, 0, 0)
    inputs: tuple[torch.Tensor, ...] = ()
    forward_s, sizes, done = [], [], []
    for program in programs:
        function = program.train
        leaves = [
            tensors[site.parameter].detach().requires_grad_(site.parameter in program.trainable)
            for site in function.sites
        ]
        buffers = [tensors[name].detach().clone() for name in function.buffers]
        arrived = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        begin_s = time.perf_counter()
        outputs = function(leaves, buffers, arrived, [columns[name] for name in function.columns], key)
        if program.loss is not None:
            outputs = (program.whole_loss(outputs, [columns[name] for name in program.targets]),)
        forward_s.append(time.perf_counter() - begin_s)
        sizes.append(sum(t.nbytes for t in outputs))
        done.append((leaves, arrived, outputs))
        inputs = outputs
    backward_s = [0.0] * len(programs)
    seeds: list[torch.Tensor | None] = [torch.ones_like(t) for t in inputs]
    for stage in range(len(programs) - 1, programs[0].first_trainable - 1, -1):
        leaves, arrived, outputs = done[stage]
        pairs = [(o, g) for o, g in zip(outputs, seeds, strict=True) if g is not None and o.requires_grad]
        targets = [t for t in (*leaves, *arrived) if t.requires_grad]
        begin_s = time.perf_counter()
        found = iter(torch.autograd.grad([o for o, _ in pairs], targets, [g for _, g in pairs], allow_unused=True))
        backward_s[stage] = time.perf_counter() - begin_s
        for leaf in leaves:
            if leaf.requires_grad:
                next(found)
        seeds = [next(found) if x.requires_grad else None for x in arrived]
    return forward_s, backward_s, tuple(sizes[:-1])

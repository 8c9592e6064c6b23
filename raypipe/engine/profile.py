"""Seconds of every stage, measured by running one micro-batch through all of them in this process.

Parameters are read, never changed; buffers are copies. What the model leaves out: another device or another
load on the machine that will run the stage.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raypipe.engine.local import one_thread
from raypipe.engine.randomness import RandomKey
from raypipe.engine.stage import GraphFunction, StageProgram
from raypipe.engine.state import MakeOptimizer, StageState

__all__ = ["StageSeconds", "measure_stages", "measure_steps"]


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


def measure_steps(
    programs: Sequence[StageProgram],
    tensors: Mapping[str, torch.Tensor],
    make_optimizer: MakeOptimizer,
    repeats: int = 3,
) -> tuple[float, ...]:
    """Seconds of every stage's optimizer step: medians after one to warm up, on copies, one stage at a time.

    A stage whose optimizer cannot be made or refuses to step counts as 0; training will say what is wrong with it.

    Args:
        tensors: parameters and buffers by canonical name.
        make_optimizer: the user's.
    """
    found = []
    with one_thread():
        for program in programs:
            seconds = [0.0]
            with contextlib.suppress(Exception):
                seconds = _steps(program, tensors, make_optimizer, repeats)
            found.append(statistics.median(seconds))
    return tuple(found)


def _steps(
    program: StageProgram, tensors: Mapping[str, torch.Tensor], make_optimizer: MakeOptimizer, repeats: int
) -> list[float]:
    names = (*program.parameters, *program.buffers)
    state = StageState(program, {name: tensors[name].detach().clone() for name in names}, make_optimizer, None)
    if state.optimizer is None:
        return [0.0]
    for parameter in state.parameters.values():
        if parameter.requires_grad:
            # Adam's step takes more than twice as long on zeros.
            parameter.grad = torch.full_like(parameter, 1e-3)
    seconds = []
    for _ in range(repeats + 1):
        begin_s = time.perf_counter()
        state.optimizer.step()
        seconds.append(time.perf_counter() - begin_s)
    return seconds[1:]


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

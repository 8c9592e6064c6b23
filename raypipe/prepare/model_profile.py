"""Facts of a model for the planner: seconds and bytes by operation, and the size of the optimizer's state."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from raypipe.capture import Capture
from raypipe.engine.optim.state import MakeOptimizer, new_optimizer
from raypipe.errors import ConfigError, PlanError, StageError
from raypipe.ir.profile import Profile
from raypipe.preflight.dry_run import no_reads_of
from raypipe.profiling import PROFILE_BUDGET_S, Rates, estimate_graph, in_seconds_of, powers_of_two
from raypipe.profiling.profile_cache import cached_estimate, cached_profile
from raypipe.progress import ProfilingBar

MOST_SIDE = 512
ADAM_FACTOR = 2.0
"""Bytes of Adam's state per byte of parameters."""


def profile_of(
    captured: Capture,
    example: Mapping[Any, torch.Tensor],
    larger: Mapping[Any, torch.Tensor] | None = None,
    *,
    by_size: bool,
    budget_s: float = PROFILE_BUDGET_S,
    rates: Rates | None = None,
) -> Profile:
    """Return the seconds and bytes of every operation: from the cache, else measured on this machine's CPU.

    Both are estimated if parameters are on the meta device, or the model cannot be run on the example.

    Args:
        example: one micro-batch by column.
        larger: more samples by column, for micro-batches above the example's size; used only with ``by_size``.
        by_size: True to measure the seconds of other micro-batch sizes too.
        budget_s: seconds of processor time for measuring.
        rates: speed of the device on which stages compute, for which seconds are estimated; None for this CPU.

    Raises:
        StageError: the model can neither be run nor estimated.
    """
    samples = min((len(x) for x in example.values() if x.dim()), default=1)
    further = powers_of_two(samples) if by_size else ()

    def estimate() -> Profile:
        if rates is None:
            return estimate_graph(captured, samples, sizes=further)
        return cached_estimate(captured, example, rates, sizes=further)[0]

    if any(p.is_meta for p in captured.parameters.values()):  # meta tensors have no memory, and cannot be timed
        return estimate()
    bar = ProfilingBar()
    try:
        sizes, more = (None, larger) if by_size else ((), None)
        profile, _ = cached_profile(captured, example, more, sizes=sizes, budget_s=budget_s, progress=bar)
    except StageError as error:
        with contextlib.suppress(ConfigError):  # an nn.Sequential cannot be estimated: raise the first error
            return estimate()
        raise error from None
    finally:
        bar.close()
    return profile if rates is None else in_seconds_of(rates, captured, profile)


def shared_processors() -> int | None:
    """Return the number of processors of this process if all workers will be on this machine.

    None if not, or unknown.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processors if _alone() else None


def _alone() -> bool:
    """Return True if all workers will be on this machine, according to the nodes of Ray or the environment."""
    ray = sys.modules.get("ray")  # a connected process has loaded it
    if ray is None or not ray.is_initialized():
        return not os.environ.get("RAY_ADDRESS")
    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1


def refuse_other_graph(captured: Capture, profiled: Profile) -> None:
    """Raise PlanError if ``profiled`` is the profile of a model with other operations."""
    own, other = ([node.name for node in graph.nodes] for graph in (captured.graph, profiled.graph))
    if own != other:
        at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
        raise PlanError(
            f"The profile is of another model: it has {len(other)} operations and this one {len(own)}, and they differ "
            f"from operation {at} on. Make it anew with `raypipe profile`."
        )


def optimizer_facts(make_optimizer: MakeOptimizer, captured: Capture) -> tuple[float, str]:
    """Step the optimizer once on the model's smallest matrix, and measure the size of its state.

    Returns:
        (bytes of state per byte of parameters, class name of the optimizer); (ADAM_FACTOR, "") if the optimizer cannot
        be stepped for a single parameter.
    """
    optimizer = _tried(make_optimizer, captured)
    if optimizer is None:
        return ADAM_FACTOR, ""
    (copy,) = (p for group in optimizer.param_groups for p in group["params"])
    kept = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    kept = [x for x in kept if x.layout is torch.strided]  # the trial of the optimizer refuses others
    # A step counter is one number, whatever the size of the parameter.
    factor = sum(x.nbytes for x in kept if x.numel() > 1) / max(1, copy.nbytes)
    return factor, type(optimizer).__name__


def _tried(make_optimizer: MakeOptimizer, captured: Capture) -> torch.optim.Optimizer | None:
    """Create the user's optimizer for a copy of one parameter and take one step; return None if either fails."""
    trained = [(name, p) for name, p in captured.parameters.items() if name in captured.trainable]
    name, like = min(trained, key=lambda pair: (pair[1].dim() < 2, pair[1].numel()), default=("", None))
    if like is None:
        return None
    with contextlib.suppress(Exception):
        part = torch.zeros([min(size, MOST_SIDE) for size in like.shape], dtype=like.dtype)  # all of it may not fit
        copy = torch.nn.Parameter(part if like.is_meta else like.detach().clone())
        copy.grad = torch.zeros_like(copy)
        optimizer = new_optimizer(make_optimizer, [(name, copy)])
        with no_reads_of(captured.parameters, "optimizer"):  # refused by preflight/optimizer.py
            optimizer.step()
        return optimizer if sum(len(group["params"]) for group in optimizer.param_groups) == 1 else None
    return None

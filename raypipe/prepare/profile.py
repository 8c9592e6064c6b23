"""What the planner has to be told of a model: seconds by operation, and what the optimizer keeps."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from raypipe.engine.capture import Capture
from raypipe.engine.profile_cache import cached_profile
from raypipe.engine.profiling import PROFILE_BUDGET_S, Rates, estimate_graph, in_seconds_of, powers_of_two
from raypipe.engine.state import MakeOptimizer
from raypipe.engine.trial.reads import no_reads_of
from raypipe.errors import ConfigError, PlanError, StageError
from raypipe.ir.profile import Profile
from raypipe.progress import ProfilingBar

__all__ = [
    "optimizer_facts",
    "profile_of",
    "refuse_other_graph",
    "shared_processors",
]

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
    """The graph with seconds, measured here or read from the cache; estimated where the model cannot be run alone.

    Whoever waits is told how far it is.

    Args:
        example: one micro-batch by column.
        larger: more samples, see ``profile_graph``; they count with ``by_size`` only.
        by_size: measure smaller micro-batches too.
        budget_s: of processor time.
        rates: of the device that stages compute on, whose seconds are wanted; None for this machine's CPU.
    """
    found = _on_cpu(captured, example, larger, by_size, budget_s, rates)
    return found if rates is None or found.device == rates.device else in_seconds_of(rates, captured, found)


def _on_cpu(
    captured: Capture,
    example: Mapping[Any, torch.Tensor],
    larger: Mapping[Any, torch.Tensor] | None,
    by_size: bool,
    budget_s: float,
    rates: Rates | None,
) -> Profile:
    """Measured here; of a model that cannot be run, estimated by these rates."""
    samples = min((len(x) for x in example.values() if x.dim()), default=1)
    if any(p.is_meta for p in captured.parameters.values()):  # what has no memory runs in no time
        return estimate_graph(captured, samples, rates, sizes=powers_of_two(samples) if by_size else ())
    bar = ProfilingBar()
    try:
        sizes, more = (None, larger) if by_size else ((), None)
        return cached_profile(captured, example, more, sizes=sizes, budget_s=budget_s, progress=bar)[0]
    except StageError as error:
        with contextlib.suppress(ConfigError):  # an nn.Sequential cannot be estimated: what stopped it counts
            return estimate_graph(captured, samples, rates, sizes=powers_of_two(samples) if by_size else ())
        raise error from None
    finally:
        bar.close()


def shared_processors() -> int | None:
    """Processors of this machine, where all workers will be on it; None where they will not, or nobody knows yet."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processors if _alone() else None


def _alone() -> bool:
    """Whether the workers will be on this machine, as far as can be said before Ray is asked for places."""
    ray = sys.modules.get("ray")  # who is connected has loaded it
    if ray is None or not ray.is_initialized():
        return not os.environ.get("RAY_ADDRESS")
    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1


def refuse_other_graph(captured: Capture, profiled: Profile) -> None:
    """A profile says nothing of a model with other operations.

    Raises:
        PlanError: names the first operation that differs.
    """
    own, other = ([node.name for node in graph.nodes] for graph in (captured.graph, profiled.graph))
    if own != other:
        at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
        raise PlanError(
            f"The profile is of another model: it has {len(other)} operations and this one {len(own)}, and they differ "
            f"from operation {at} on. Make it anew with `raypipe profile`."
        )


def optimizer_facts(make_optimizer: MakeOptimizer, captured: Capture) -> tuple[float, str]:
    """(bytes of optimizer state per byte of parameters, class of the optimizer; "" where it cannot be made).

    Measured by one step on a copy of the smallest matrix that is trained. An optimizer that cannot be made for one
    parameter counts as Adam; training will say what is wrong with it.
    """
    made = _tried(make_optimizer, captured)
    if made is None:
        return ADAM_FACTOR, ""
    (copy,) = (p for group in made.param_groups for p in group["params"])
    kept = [x for state in made.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    kept = [x for x in kept if x.layout is torch.strided]  # the trial of the optimizer has words for others
    # A step counter is one number, whatever the size of the parameter.
    factor = sum(x.nbytes for x in kept if x.numel() > 1) / max(1, copy.nbytes)
    return factor, type(made).__name__


def _part(like: torch.Tensor) -> torch.Tensor:
    """A corner of a matrix that has no memory here, and may be too large to have any."""
    return torch.zeros([min(size, MOST_SIDE) for size in like.shape], dtype=like.dtype)


def _tried(make_optimizer: MakeOptimizer, captured: Capture) -> torch.optim.Optimizer | None:
    """The user's optimizer after one step on one parameter; None where it cannot be made for one."""
    trained = [(name, p) for name, p in captured.parameters.items() if name in captured.trainable]
    name, like = min(trained, key=lambda pair: (pair[1].dim() < 2, pair[1].numel()), default=("", None))
    if like is None:
        return None
    with contextlib.suppress(Exception):
        copy = torch.nn.Parameter(_part(like) if like.is_meta else like.detach().clone())
        copy.grad = torch.zeros_like(copy)
        made = make_optimizer([(name, copy)])
        with no_reads_of(captured.parameters, "optimizer"):  # which engine/trial/optimizer_trial.py has words for
            made.step()
        return made if sum(len(group["params"]) for group in made.param_groups) == 1 else None
    return None

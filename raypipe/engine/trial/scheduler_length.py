"""Whether the scheduler of a run takes as many steps as the run has updates.

Most of torch's schedulers have a rate for any number of steps. OneCycleLR refuses to step past its total_steps, and a
LambdaLR may look its factor up in a list: such a run would end in the middle of training.

A scheduler is a function of the number of steps, so it is first asked for the last one alone. Only where that fails are
all steps taken, on a stand-in, to tell which is the first that does, and to accuse nobody who counts by himself.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raypipe.engine.item_randomness import own_generators
from raypipe.engine.state import new_optimizer
from raypipe.engine.user_lines import quoted, short
from raypipe.errors import ConfigError

__all__ = ["refuse_too_short", "why_not_further"]

_MOST = 1_000_000
"""Steps that are taken one by one: some 10 s."""


def refuse_too_short(
    parameters: Mapping[str, torch.Tensor], make_optimizer: Callable[[Any], Any],
    make_scheduler: Callable[[Any], Any] | None, updates: int, length: str, *, step_each: bool,
) -> None:  # fmt: skip
    """Refuse a scheduler that has an end before that of the run.

    Args:
        parameters: of one stage, those that train; their values are not read.
        updates: of the run, each of which the scheduler follows by a step.
        length: of the run, in the words of whoever asked for it.
        step_each: a step of the run is an update.

    Raises:
        ConfigError: names the scheduler, the step that it cannot take, and what to write.
    """
    if make_scheduler is None:
        return
    with warnings.catch_warnings(), own_generators():
        warnings.simplefilter("ignore")
        try:
            made = make_scheduler(new_optimizer(make_optimizer, _stand_ins(parameters)))
            again = make_scheduler(new_optimizer(make_optimizer, _stand_ins(parameters)))
        except Exception:  # noqa: BLE001  (it goes by sizes; engine/trial/optimizer_trial.py has tried it)
            return
        try:
            _ask_for_the_last(made, updates)
        except Exception:  # noqa: BLE001  (whatever a scheduler raises; told below)
            done, error = _first_failure(again, min(updates, _MOST))
            if error is not None:
                raise ConfigError(_too_short(again, done, error, updates, length, step_each=step_each)) from None


def why_not_further(scheduler: Any, step: int, error: Exception) -> str:
    """What to say of a run that trains when its scheduler fails at this step, counted from 1."""
    return (
        f"lr_scheduler: step {step} of {type(scheduler).__name__} fails{quoted(error)}: {short(error)} It is called "
        f"once for every update of the run, so it must have a rate for each{_cure(scheduler)}. A run of the same name "
        "goes on from its newest checkpoint, and begins anew where there is none yet: one is saved every ten minutes, "
        "or as PipelineConfig(checkpoint_interval_steps=...) says."
    )


def _too_short(scheduler: Any, done: int, error: Exception, updates: int, length: str, *, step_each: bool) -> str:
    shorter = f", or train no longer: num_steps={done}" if step_each and done else ""
    return (
        f"lr_scheduler makes {type(scheduler).__name__}, whose step {done + 1} fails{quoted(error)}: {short(error)} "
        f"With {length} it takes {updates} of them. Let it last as long{_cure(scheduler, updates)}{shorter}."
    )


def _cure(scheduler: Any, updates: int | None = None) -> str:
    """The argument that says how long torch's own ones last."""
    if not hasattr(scheduler, "total_steps"):
        return ""
    return f", total_steps={updates}" if updates is not None else f"; its total_steps is {scheduler.total_steps}"


def _stand_ins(parameters: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.nn.Parameter]]:
    """Of the same names, types and numbers of dimensions."""
    return [(name, torch.nn.Parameter(torch.zeros([1] * x.dim(), dtype=x.dtype))) for name, x in parameters.items()]


def _ask_for_the_last(scheduler: Any, updates: int) -> None:
    """Take the last of so many steps, and no other; in its parts, where it is one after the other or all together."""
    parts: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    milestones: Sequence[int] = getattr(scheduler, "_milestones", ())
    if not parts:
        if isinstance(getattr(scheduler, "last_epoch", None), int):
            scheduler.last_epoch = updates - 1
            scheduler.step()
        return
    for part, steps in zip(parts, _shares(milestones, len(parts), updates), strict=True):
        if steps:
            _ask_for_the_last(part, steps)


def _shares(milestones: Sequence[int], parts: int, updates: int) -> list[int]:
    """The last step of each part: of all together, or of SequentialLR's, of which each begins at a milestone."""
    if len(milestones) != parts - 1 or parts == 1:
        return [updates] * parts
    current = bisect_right(milestones, updates)
    begins = [0, *milestones]
    ends = [*(milestone - 1 for milestone in milestones[:current]), updates]
    return [ends[at] - begins[at] if at <= current else 0 for at in range(parts)]


def _first_failure(scheduler: Any, steps: int) -> tuple[int, Exception | None]:
    """How many of so many steps it takes, and what it says to the next one."""
    for done in range(steps):
        try:
            scheduler.step()
        except Exception as error:  # noqa: BLE001  (as above)
            return done, error
    return steps, None

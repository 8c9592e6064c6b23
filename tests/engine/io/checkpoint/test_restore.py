"""Stopping and going on changes no bit, whatever the number of stages before and after.

uninterrupted   step 0 1 2 3 4
with a break    step 0 1 2 | save or copy on S stages, load on S' | 3 4
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.engine.copy import StageCopies, copy_source
from raypipe.engine.io.checkpoint import find_checkpoint, load_stage
from raypipe.engine.io.storage import Place
from tests.checkpoints import Training
from tests.engine.copy.stages import piece_of
from tests.exactness import Shape, same_bits

BREAK, STEPS = 3, 5
SHAPE = Shape(19, 8, 4)  # the break is where an epoch of 8, 8 and 3 samples ends
MIDDLE = Shape(40, 8, 4)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Changes momentum too, and cannot be asked for the options of a step."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=9)


def groups(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Without decay for biases, and with a tensor as learning rate."""
    biases = [pair for pair in named if pair[0].endswith("bias")]
    others = [pair for pair in named if not pair[0].endswith("bias")]
    made = [{"params": others, "lr": torch.tensor(0.02)}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in made if group["params"]], lr=1e-2, weight_decay=0.1, amsgrad=True)


MANNERS: dict[str, tuple[Any, Any]] = {
    "adamw": (lambda named: torch.optim.AdamW(named, lr=1e-2, betas=(0.8, 0.95)), cosine),
    "sgd": (lambda named: torch.optim.SGD(named, lr=5e-2, momentum=0.9), cosine),
    "groups": (groups, None),
    "one-cycle": (lambda named: torch.optim.SGD(named, lr=5e-2, momentum=0.9, nesterov=True), one_cycle),
    "adagrad": (lambda named: torch.optim.Adagrad(named, lr=5e-2), None),  # has state before its first step
}


def training(name: str, stages: int, manner: str, shape: Shape) -> Training:
    return Training(name, stages, shape, *MANNERS[manner], norm=0.5)


@cache
def uninterrupted(name: str, manner: str, shape: Shape) -> tuple[Training, dict[str, torch.Tensor]]:
    whole = training(name, 1, manner, shape)
    whole.run_to(STEPS)
    whole.fleet.stop()
    return whole, everything(whole)


def everything(of: Training) -> dict[str, torch.Tensor]:
    """All that a step depends on, by name; all holders of shared tensors must agree on it."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str, value: Any) -> None:
        tensor = torch.as_tensor(float("nan") if value is None else value).detach()
        assert same_bits(found.setdefault(name, tensor), tensor), f"holders of {name} differ"

    for state in of.states:
        for name, held in (*state.parameters.items(), *state.buffers.items()):
            note(name, held)
        for group in state.optimizer.param_groups if state.optimizer else ():
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                for key, value in (*options.items(), *state.optimizer.state[parameter].items()):
                    note(f"{key} of {name}", value)
    return found


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [key for key, value in found.items() if not same_bits(value, expected[key])]


def broken(name: str, before: int, after: int, manner: str, shape: Shape, run: Place, copied: bool) -> Training:
    first = training(name, before, manner, shape)
    first.run_to(BREAK)
    second, held = training(name, after, manner, shape), list(zip(first.programs, first.states, strict=True))
    if copied:
        copies = [StageCopies(program, state) for program, state in held]
        for copy in copies:
            copy.take(BREAK, BREAK)
        source: Any = copy_source([piece_of(copy, BREAK) for copy in copies])
    else:
        manifest = first.save(run)
        source, refusals = find_checkpoint(run)
        assert source is not None
        assert (source.manifest, refusals) == (manifest, ())
    first.fleet.stop()
    for program, state in zip(second.programs, second.states, strict=True):
        load_stage(source, program, state, None if copied else second.persistent)
    second.at, second.losses, second.norms = first.at, first.losses, first.norms
    second.run_to(STEPS)
    second.fleet.stop()
    return second


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True], ids=["checkpoint", "copies"])
@pytest.mark.parametrize(
    ("name", "manner"),
    [
        ("noisy", "adamw"), ("cnn", "sgd"), ("tied-lm", "groups"), ("mlp", "one-cycle"), ("frozen-middle", "adagrad"),
        ("unet", "groups"),
    ],
)  # fmt: skip
def test_a_break_changes_no_bit(name: str, manner: str, copied: bool, tmp_path: Path) -> None:
    """Dropout, BatchNorm and parameters used twice; options and state of any optimizer."""
    for before, after, shape in ((3, 2, SHAPE), (1, 4, MIDDLE)):
        whole, expected = uninterrupted(name, manner, shape)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # among them torch's about the order of steps
            second = broken(name, before, after, manner, shape, Place.of(tmp_path / f"{before}"), copied)
        assert (second.losses, second.norms) == (whole.losses, whole.norms)
        assert differences(everything(second), expected) == []

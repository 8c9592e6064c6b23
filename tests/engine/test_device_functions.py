"""Stages of traced models where they compute: nothing of them stays in host memory, seen on the meta device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import nn

from raypipe.capture import Capture, capture
from raypipe.engine.device.device import TransferKind
from raypipe.engine.device_functions import placed, placed_loss, why_no_graphs, why_not_compiled
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.stage.randomness import RandomKey
from raypipe.engine.stage.stage import GraphFunction
from raypipe.planner.partition.chain import equal_parameters
from tests.exactness import programs
from tests.fake_device import FakeDevice

META = torch.device("meta")
KEY = RandomKey(0, 0, 0)


class Maker(nn.Module):
    """Makes tensors and closes over one.

    Args:
        chooses: by torch.cond, whose bodies make tensors too, and whose condition the host reads.
    """

    def __init__(self, *, chooses: bool) -> None:
        super().__init__()
        self.chooses = chooses
        self.inner, self.outer = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3, device=x.device)
        if self.chooses:
            x = torch.cond(x.sum() > 0, lambda y: y + torch.ones(3), lambda y: y - torch.ones(3), (x,))
        return self.outer(x) + torch.zeros(3, dtype=x.dtype)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0])


@cache
def made(*, chooses: bool = False) -> Capture:
    torch.manual_seed(0)
    columns = (torch.randn(5, 4), torch.randint(0, 3, (5,)))
    return capture(Maker(chooses=chooses), columns, (0, 1), nn.CrossEntropyLoss(weight=WEIGHTS))


def stages(*, chooses: bool = False) -> list[GraphFunction]:
    taken = made(chooses=chooses)
    found = [stage.train for stage in taken.programs(equal_parameters(taken.graph, 2).cuts)]
    assert all(isinstance(function, GraphFunction) for function in found)
    assert any(function.constants for function in found)  # type: ignore[attr-defined]
    return found  # type: ignore[return-value]


def forward(functions: list[GraphFunction], tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Of all stages, one after the other."""
    outputs: tuple[torch.Tensor, ...] = ()
    for function in functions:
        leaves = [tensors[site.parameter] for site in function.sites]
        outputs = function(leaves, [], outputs, [x] * len(function.columns), KEY)
    return outputs[0]


def test_on_the_meta_device_nothing_is_made_in_host_memory() -> None:
    there = [
        replace(function, constants=tuple(c.to(META) for c in function.constants), place=META, _function=None)
        for function in stages(chooses=True)
    ]
    tensors = {name: p.detach().to(META) for name, p in made().parameters.items()}
    assert forward(there, tensors, torch.empty(5, 4, device=META)).is_meta


def test_a_device_that_is_late_computes_the_same_bits() -> None:
    device = FakeDevice(eager=False)
    crossing, x = DeviceTransfer(device), torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    plain = forward(stages(), dict(made().parameters), x)
    there = [placed(function, crossing) for function in stages()]
    assert any(wait.startswith(TransferKind.CONSTANTS) for wait in device.waits)
    with device.prepare_thread():
        tensors = crossing.named(made().parameters, TransferKind.PARAMETERS)
        (given,) = crossing.to_device((x,), TransferKind.COLUMNS)
        (found,) = crossing.to_host((forward(there, tensors, given),), TransferKind.OUTPUTS)  # type: ignore[arg-type]
    assert torch.equal(found.detach(), plain.detach())  # type: ignore[union-attr]


def test_weights_of_classes_go_to_the_device_with_the_loss() -> None:
    loss = made().programs(())[-1].loss
    crossing = DeviceTransfer(FakeDevice(eager=False))
    there = placed_loss(loss, crossing)
    assert crossing.device.holds(there.loss_fn.weight)  # type: ignore[attr-defined, union-attr]
    assert not crossing.device.holds(loss.loss_fn.weight)  # type: ignore[attr-defined, union-attr]
    copied = crossing.copied({"weight": there.loss_fn.weight}, TransferKind.SNAPSHOT)  # type: ignore[union-attr]
    assert torch.equal(copied["weight"], WEIGHTS)


def test_python_code_is_not_recorded_but_draws_are() -> None:
    drawing, sequential = (programs(name, 1)[0].train for name in ("noisy", "dropout-sequential"))
    assert why_not_compiled(drawing) == "it draws random numbers (dropout)"
    assert why_no_graphs(drawing) == ""
    assert "nn.Sequential" in why_no_graphs(sequential)
    assert any("torch.cond" in why_no_graphs(function) for function in stages(chooses=True))

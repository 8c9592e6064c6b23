"""What constructors do beside filling parameters: values that follow from them, memory that is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from raypipe.engine.initial import tape
from raypipe.engine.initial.building import built_without_weights
from raypipe.errors import ConfigError

pytestmark = pytest.mark.engine


def filled(make: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """(the model that is built without weights, the parameters that workers make)."""
    built, recorded = built_without_weights(make, 0)
    source = recorded.source(built.named_parameters(), 0)
    source.check()
    return built, dict(source.read(source.names))


class Follows(nn.Module):
    """Small buffers that have values, written from parameters that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.constant_(self.linear.weight, 2.0)
        nn.init.constant_(self.linear.bias, 1.0)
        self.register_buffer("copied", torch.zeros(4))
        self.copied.copy_(self.linear.weight.detach().sum(0))
        self.register_buffer("added", torch.ones(4))
        self.added.add_(self.linear.weight.data[0])
        self.register_buffer("one", torch.zeros(4))
        self.one[2] = self.linear.weight.detach()[0, 0]
        self.norm = nn.BatchNorm1d(4)
        self.width = self.norm(self.linear(torch.ones(3, 4))).shape[1]


def test_what_follows_from_parameters_is_written_to_tensors_that_have_values() -> None:
    built, _ = filled(Follows)
    for (name, found), expected in zip(built.named_buffers(), Follows().buffers(), strict=True):
        assert torch.equal(found, expected), name
    assert built.copied.tolist() == [8.0] * 4
    assert built.norm.running_mean.any()


def test_the_vectors_of_spectral_norm_are_those_of_the_weight_that_workers_make() -> None:
    built, weights = filled(lambda: spectral_norm(nn.Linear(12, 8), n_power_iterations=60))
    norm, weight = built.parametrizations.weight[0], weights["parametrizations.weight.original"]
    assert torch.allclose(norm._u @ weight @ norm._v, torch.linalg.matrix_norm(weight, 2), rtol=1e-4)


def test_what_follows_from_values_that_nobody_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_VALUE_BYTES", 8)

    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = nn.Parameter(torch.arange(4.0))
            self.register_buffer("start", torch.zeros(4))
            self.start.copy_(self.given.detach())

    with pytest.raises(ConfigError, match=r"aten::copy_.*weights_on='client'"):
        built_without_weights(Unknown, 0)


class Shared(nn.Module):
    """Large buffers that are changed after they are registered, views of them, and large tensors in lists."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(6, 4)
        self.register_buffer("table", table)
        self.register_buffer("left", table[:, :2])
        self.plain = table
        table[:, 0::2] = 1.0
        self.masks = [torch.ones(2, 2), {"a": torch.full((2,), 3.0)}, (table[0],)]
        self.linear = nn.Linear(2, 2)


def test_large_buffers_keep_later_changes_and_share_memory_as_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "LEAST_ELEMENTS", 1)
    built, _ = filled(Shared)
    real = Shared()
    assert torch.equal(built.table, real.table)
    assert torch.equal(built.left, real.left)
    assert torch.equal(built.masks[0], real.masks[0])
    assert torch.equal(built.masks[1]["a"], real.masks[1]["a"])
    assert built.table.untyped_storage().data_ptr() == built.left.untyped_storage().data_ptr()
    built.table.fill_(5.0)
    assert built.left.unique().tolist() == built.plain.unique().tolist() == built.masks[2][0].unique().tolist() == [5]


def test_what_is_written_to_the_tensor_of_a_parameter_is_written_to_the_parameter() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.zeros(10)
            self.all = nn.Parameter(values)
            others = torch.zeros(10)
            self.few, self.rest = nn.Parameter(others[2:4]), nn.Parameter(others[4:])
            values.fill_(3.0)
            others.fill_(3.0)
            others[3] = 4.0

    _, found = filled(Late)
    real = Late()
    assert torch.equal(found["all"], real.all)
    assert torch.equal(found["few"], real.few)
    assert torch.equal(found["rest"], real.rest)


class Twice(nn.Module):
    """One memory, told by how it is used a second time."""

    def __init__(self, use: Callable[[Any, nn.Parameter, torch.Tensor], None]) -> None:
        super().__init__()
        values = torch.zeros(4, 4)
        self.given = nn.Parameter(values)
        self.linear = nn.Linear(4, 4)
        use(self, self.linear.weight, values)


TWICE: dict[str, Callable[[Any, nn.Parameter, torch.Tensor], None]] = {
    "buffer": lambda net, weight, _: net.register_buffer("again", weight.detach()),
    "part": lambda net, weight, _: net.register_buffer("again", weight.detach()[1:]),
    "attribute": lambda net, weight, _: setattr(net, "again", weight.data),
    "in a list": lambda net, weight, _: setattr(net, "again", [weight.detach()]),
    "buffer of the values": lambda net, _, values: net.register_buffer("again", values),
    "parameter of the values": lambda net, _, values: setattr(net, "again", nn.Parameter(values[:2])),
}


@pytest.mark.parametrize("use", TWICE.values(), ids=TWICE)
def test_two_tensors_over_one_memory_are_refused(use: Any) -> None:
    with pytest.raises(ConfigError, match=r"weights_on='workers': .* memory .*clone\(\)"):
        built_without_weights(lambda: Twice(use), 0)
    built_without_weights(lambda: Twice(lambda net, *_: setattr(net, "again", torch.zeros(4, 4))), 0)


@pytest.mark.parametrize("use", [torch.Tensor.clone, torch.Tensor.zero_], ids=["read", "written"])
def test_the_tensor_of_a_parameter_that_was_written_to_is_refused(use: Any) -> None:
    class Stale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = torch.zeros(10)
            self.first = nn.Parameter(values)
            nn.init.ones_(self.first)
            use(values)

    with pytest.raises(ConfigError, match=r"tensor of shape \[10\], wrote to the parameter.*Use the parameter"):
        built_without_weights(Stale, 0)


def test_values_set_from_outside_are_refused_with_a_cure() -> None:
    class Set(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = nn.Parameter(torch.zeros(4))
            self.given.data = torch.ones(4)

    class Numpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.given = nn.Parameter(torch.zeros(4), requires_grad=False)
            self.given.numpy()[:] = 5

    for made in (Set, Numpy):
        with pytest.raises(ConfigError, match=r"cannot be built without weights.*weights_on='client'"):
            built_without_weights(made, 0)

"""Weight norm and spectral norm, old by hooks and new by parametrization, traced and untraced."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from raypipe.engine.stage.module_copy import copy_of, skeleton_of
from tests.exactness import SHAPES, Shape, captured, differences, expected, faults, programs, same_bits, train
from tests.operation_nets import normed


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_in_a_traced_model(stages: int) -> None:
    """The old spectral norm reads its weight twice, whose gradients are summed use by use over the micro-batches."""
    whole = Shape(40, 8, 1)
    assert faults("normed", train("normed", stages, whole, "1f1b", "sgd"), expected("normed", whole, "sgd")) == []
    run, plain = train("normed", stages, SHAPES["even"], "1f1b", "sgd"), expected("normed", SHAPES["even"], "sgd")
    assert all(torch.allclose(run.parameters[name], found, atol=1e-6) for name, found in plain.parameters.items())
    assert all(torch.allclose(run.buffers[name], found, atol=1e-6) for name, found in plain.buffers.items())
    assert differences(run, train("normed", 1, SHAPES["even"], "gpipe", "sgd")) == []


@pytest.mark.slow
def test_capture_leaves_the_users_weights_in_place() -> None:
    """Tracing runs the hooks, whose weights are not the traced ones afterwards."""
    layers, fresh = captured("normed")[0].layers, normed()
    fresh.load_state_dict(layers.state_dict())
    for layer, other in zip(layers[::2], fresh[::2], strict=True):
        assert type(layer.weight) is type(other.weight)
        assert layer.weight.shape == other.weight.shape


def test_stages_travel_without_weights() -> None:
    (program,) = programs("normed-sequential", ())
    there = pickle.loads(pickle.dumps(program.train))
    tensors = {**captured("normed-sequential")[1].parameters, **captured("normed-sequential")[1].buffers}
    leaves = [tensors[site.parameter] for site in there.sites]
    x = torch.ones(2, 6)
    first, second = (
        function(leaves, [tensors[name].clone() for name in function.buffers], (), (x,), None)[0]
        for function in (program.train, there)
    )
    assert same_bits(first, second)
    for child in there.children:
        held = [value for module in child.module.modules() for value in vars(module).values()]
        assert all(value.is_meta for value in held if isinstance(value, torch.Tensor))
    assert pickle.dumps(replace(there, children=there.children[:1]))


def test_copies_have_no_history() -> None:
    model = normed()
    copied = copy_of(model)
    assert model[0].weight.grad_fn is not None
    assert copied[0].weight.grad_fn is None
    assert same_bits(copied[0].weight, model[0].weight)
    assert all(p.is_meta for p in skeleton_of(model).parameters())
    shared = nn.Module()
    shared.one = shared.other = model[0].weight * 2
    twice = copy_of(shared)
    assert twice.one is twice.other


def test_a_skeleton_of_a_buffer_that_requires_a_gradient_can_be_copied() -> None:
    """vector-quantize-pytorch calls requires_grad_() on a buffer in every forward."""
    model = nn.BatchNorm1d(3)
    model.running_mean.requires_grad_()  # type: ignore[union-attr]
    assert copy.deepcopy(skeleton_of(model)).running_mean.is_meta  # type: ignore[union-attr]

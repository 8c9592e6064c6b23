"""Control flow that depends on the data, and state that a stage cannot have."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.zoo.row import Refused, Row
from tests.zoo.samples import vectors

__all__ = ["ROWS"]

Between = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers, and between them whatever ``between`` does."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.between, self.count, self.seen = between, 0, []
        self.average = torch.zeros(8)
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("kept", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(self.between(self, self.first(x)))))


def conditional(net: Net, x: torch.Tensor) -> torch.Tensor:
    """By what training has made of a buffer: it takes both ways."""
    if net.training:
        net.kept.add_(1)
    return torch.cond(net.kept.sum() > 40, lambda x: x * 2, lambda x: x - 1, (x,))


def where(net: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.sum(1, keepdim=True) > 0, 2 * x, x - 1)


def indexed(net: Net, x: torch.Tensor) -> torch.Tensor:
    """As many rows as the mask says, and back again."""
    positive = x[:, 0] > 0
    y = x.clone()
    y[positive] = torch.sigmoid(x[positive])
    return y


def nonzero(net: Net, x: torch.Tensor) -> torch.Tensor:
    rows = (x[:, 0] > 0).nonzero().squeeze(1)
    return x.index_add(0, rows, x[rows].square())


def mapped(net: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: row * row.norm())(x)


def in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    """By operations whose twins have other names, other types, or no derivative."""
    x = torch.sigmoid(x) * 1.0
    x += torch.ones(8, dtype=torch.float64)
    y = x.pow_(-0.5) * 1.0
    y **= 2
    z = torch.empty_like(y).copy_(y)
    return z * y.clone().gt_(0.4).sub_(0.5)


def of_data(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Values that autograd does not see, and conversions that change nothing."""
    net.second.weight.data = net.second.weight.data.to(x.device)
    net.last = net.last.to(x.dtype)
    y = 2 * x
    y.data.clamp_(-1, 1)
    return y - x.data.mean(1, keepdim=True)


def looped(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Over the samples of a micro-batch, which must all have as many."""
    return torch.stack([sample * (1 + at % 2) for at, sample in enumerate(x)])


def checking(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Whatever the data are, only one way of each branch can go on."""
    if x.isnan().any() or x.abs().max().item() > 1e6:
        raise ValueError(f"activations of {x.shape} are too large")
    assert torch.isfinite(x).all()
    torch._assert((x.amax(0) >= x.amin(0)).all(), "no order")
    return x * 0.5


def validated(net: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(x, torch.nn.functional.softplus(x)).log_prob(2 * x)


def branching(net: Net, x: torch.Tensor) -> torch.Tensor:
    if x.mean() > 0:
        x = 2 * x
    return x


def counting(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.count += 1
    return x if net.count % 3 else x * 0.5


def appending(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.seen.append(x.detach().mean())
    return x * len(net.seen)


def averaging(net: Net, x: torch.Tensor) -> torch.Tensor:
    if net.training:
        net.average = 0.9 * net.average + 0.1 * x.detach().mean(0)
    return x - net.average


def averaging_in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.average.lerp_(x.detach().mean(0), 0.1)
    return x - net.average


def pythons(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def numpys(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x + float(np.random.randn())


def seeding(net: Net, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return x + torch.randn(8)


def of_its_own(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn(8, generator=net.generator)


def buffered(net: Net, x: torch.Tensor) -> torch.Tensor:
    """What a buffer keeps is kept."""
    if net.training:
        net.kept.lerp_(x.detach().mean(0), 0.1)
    return x - net.kept


def halved(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.second.weight.mul_(0.99)
    return x


class Warming:
    """A loss that begins small, by the number of its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return cross_entropy(output, target) * min(1.0, self.count / 100)


_REMEMBERS = (
    "{} with every call: {} after one call, {} after the next. Stages of a pipeline are traced or copied and would not "
    "share it, and no checkpoint holds it. Make it a buffer (register_buffer) that tensor operations update in place, "
    "or keep it out of forward and loss."
)
_TENSOR = "a tensor of shape (8,) that begins with {number}, {number}, {number}"
_DRAWS = (
    "Net.forward draws from {} generator or seeds it. A traced model would repeat one draw for ever, and "
    "stages would not agree on it. {}."
)
_DRAW_WITH_TORCH = (
    "Draw with torch (torch.rand, dropout), whose draws are keyed and equal on every stage, or switch it off if a "
    "setting does (as apply_spec_augment=False of transformers)"
)


def remembers(what: str, one: Any = 1, two: Any = 2) -> Refused:
    return Refused(_REMEMBERS.format(what, one, two), "it remembers its calls")


def draws(whose: str, remedy: str = _DRAW_WITH_TORCH) -> Refused:
    return Refused(_DRAWS.format(whose, remedy), "its draws are not keyed")


BRANCHES = Refused(
    'Net decides by values of its data or buffers at {line}, in branching, "if x.mean() > 0:". A graph of stages has '
    "one way only: use torch.where or torch.cond, move the branch out of forward, switch it off if a setting does (as "
    "layerdrop=0.0 of transformers), or build the model as an nn.Sequential of blocks, which are not traced.",
    "a branch that the data take",
)
IN_PLACE = Refused(
    "forward changes a tensor in place that is an attribute of the model, a global or in a closure ('average' at "
    "{line}); no stage would share it and no checkpoint hold it. Make it a buffer: self.register_buffer(name, tensor).",
    "no stage would share it",
)
OF_A_GENERATOR = Refused(
    "forward reads 'lifted_custom_0' (CUSTOM_OBJ), which is not a tensor, and stages are given tensors only. If it is "
    "a torch.Generator, draw without generator=: every draw is keyed by seed, step and micro-batch.",
    "its draws are not keyed",
)
OF_THE_OPTIMIZER = Refused(
    "forward changes the parameter 'second.weight' in place; a pipeline stage may only change buffers. Register it as "
    "a buffer or drop the update.",
    "only the optimizer changes parameters",
)
row = partial(Row, "control flow")
old = partial(Row, "hidden state")
_LOSS = (vectors, cross_entropy, "cross_entropy", "vectors")


def flow(words: str, between: Between, *verdict: Any, **more: Any) -> Row:
    return row(words, lambda: Net(between), *_LOSS, *verdict, **more)


def state(words: str, between: Between, *verdict: Any, **more: Any) -> Row:
    return old(words, lambda: Net(between), *_LOSS, *verdict, **more)


ROWS = (
    flow("torch.where", where),
    flow("torch.cond", conditional),
    flow("rows picked by a mask", indexed),
    flow("nonzero", nonzero),
    flow("vmap", mapped),
    flow("activations changed in place", in_place),
    flow("x.data", of_data),
    flow("a loop over the samples", looped, note="all micro-batches have one size"),
    flow("checks that only raise", checking),
    flow("torch.distributions with validate_args", validated),
    flow("if on the data", branching, BRANCHES),
    state("running average in a buffer", buffered),
    state("counter with a branch", counting, remembers("Net.forward changes model.count")),
    state("list that grows", appending, remembers("Net.forward changes the number of items in model.seen")),
    state("average in an attribute", averaging, remembers("Net or its loss changes model.average", _TENSOR, _TENSOR)),
    state("average in an attribute, in place", averaging_in_place, IN_PLACE),
    state("random.random()", pythons, draws("Python's")),
    state("numpy.random", numpys, draws("numpy's")),
    state("torch.manual_seed in forward", seeding, draws("torch's",
        "Leave seeding out of forward: PipelineConfig(seed=...) keys every draw of every step")),
    state("generator of its own", of_its_own, OF_A_GENERATOR),
    state("parameter changed in forward", halved, OF_THE_OPTIMIZER),
    old("MLP", lambda: Net(where), vectors, Warming(), "a loss that counts its calls", "vectors",
        remembers("Net or its loss changes loss_fn.count")),
)  # fmt: skip
"""What a graph can carry, and what not."""

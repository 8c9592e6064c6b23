"""Idioms of public code, each in a small net: what a forward returns, changes in place, checks, and takes as its batch.

The nets are those of the zoo, with the idiom between two layers or around the loss; every row trains in four
micro-batches to the gradients and parameters of plain PyTorch, bit by bit, and its first step to those of the whole
mini-batch. test_optimizers_as_written.py has those of optimizers.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from tests.zoo.cases.hidden import Between, Net
from tests.zoo.cases.losses import Judging, Returning, few_labels, weighed
from tests.zoo.row import Row
from tests.zoo.samples import vectors
from tests.zoo.training import differences_of

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.usefixtures("captures_of_a_test")]

Tensor = torch.Tensor


def by_name(functions: Iterable[Callable[..., Any]]) -> Any:
    return pytest.mark.parametrize("idiom", [pytest.param(one, id=one.__name__) for one in functions])


def differences_between(idiom: Between, folder: Path, **more: Any) -> list[str]:
    row = Row("as written", idiom.__name__, lambda: Net(idiom), vectors, cross_entropy, "", "", **more)
    return differences_of(row, 4, folder)


# What a forward returns: its loss among other things.


class Pair(NamedTuple):
    logits: Tensor
    objective: Tensor


@dataclass
class Output:
    objective: Tensor
    logits: Tensor
    attentions: Any = None


class AttributeDict(dict):
    __getattr__ = dict.__getitem__


def accuracy(logits: Tensor) -> Tensor:
    return (logits.argmax(-1) == 1).float().mean()


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "NamedTuple": Pair,
    "dataclass": lambda logits, loss: Output(loss, logits),
    "SimpleNamespace": lambda logits, loss: SimpleNamespace(objective=loss, logits=logits),
    "dict with attributes": lambda logits, loss: AttributeDict(loss=loss, logits=logits),
    "BERT's tuple": lambda logits, loss: (loss, logits, None, (logits, logits.mean())),
    "Lightning's step": lambda logits, loss: {"loss": loss, "log": {"loss": loss.detach(), "acc": accuracy(logits)}},
    "numbers to log": lambda logits, loss: {"loss": loss, "log_vars": {"ce": loss.item()}, "samples": len(logits)},
    "logits, loss, accuracy": lambda logits, loss: (logits, loss, accuracy(logits)),
    "logits, loss, detached parts": lambda logits, loss: (logits, loss, {"ce": loss.detach(), "kl": loss.detach() * 2}),
    "shape (1,), as for DataParallel": lambda logits, loss: loss.unsqueeze(0),
    "view(1) in an OrderedDict": lambda logits, loss: OrderedDict(logits=logits, loss=loss.view(1)),
    "a list and what is left out": lambda logits, loss: (logits, None, [loss]),
}


@pytest.mark.parametrize("words", OUTPUTS)
def test_a_loss_is_found_in_what_a_forward_returns(words: str, tmp_path: Path) -> None:
    row = Row("as written", words, lambda: Returning(OUTPUTS[words]), few_labels, None, "", "",
              twin=lambda: Judging(weighed))  # fmt: skip
    assert differences_of(row, 4, tmp_path) == []


# Models that take one number of samples.


def rows_stacked(net: Net, x: Tensor) -> Tensor:
    return torch.stack([x[i] * x[i].norm() for i in range(x.shape[0])])


def rows_written(net: Net, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 8)
    for i in range(len(x)):
        out[i] = x[i].softmax(0)
    return out


def rows_appended(net: Net, x: Tensor) -> Tensor:
    out = []
    for row in x:
        out.append(row.cumsum(0))
    return torch.stack(out, dim=0)


def rows_zipped(net: Net, x: Tensor) -> Tensor:
    return torch.stack([a * b.sigmoid() for a, b in zip(x, x.flip(1), strict=True)])


def rows_split(net: Net, x: Tensor) -> Tensor:
    return torch.cat([row / (1 + row.norm()) for row in x.split(1)])


def rows_chunked(net: Net, x: Tensor) -> Tensor:
    return torch.cat([row.tanh() for row in x.chunk(x.shape[0])])


def rows_unbound(net: Net, x: Tensor) -> Tensor:
    return torch.stack([row - row.mean() for row in x.unbind()])


def rows_in_a_dict(net: Net, x: Tensor) -> Tensor:
    rows = dict(enumerate(x))
    return torch.stack([rows[i].relu() for i in sorted(rows)])


def rows_padded(net: Net, x: Tensor) -> Tensor:
    return nn.utils.rnn.pad_sequence([row * 2 for row in x], batch_first=True)


def lengths_listed(net: Net, x: Tensor) -> Tensor:
    lengths = ((x > 0).sum(1) + 1).tolist()
    return torch.stack([row * length for row, length in zip(x, lengths, strict=True)])


def filters_of_each_row(net: Net, x: Tensor) -> Tensor:
    """StyleGAN2's convolution: every sample is a group with filters of its own."""
    filters = x.sigmoid()[:, None].expand(-1, 8, -1).reshape(-1, 8, 1)
    return functional.conv1d(x.reshape(1, -1, 1), filters, groups=x.shape[0]).view(-1, 8)


def pairs_of_rows(net: Net, x: Tensor) -> Tensor:
    assert x.shape[0] % 2 == 0, "even batches only"
    return x.view(-1, 2, 8).flip(2).reshape(-1, 8)


ONE_SIZE = [
    rows_stacked, rows_written, rows_appended, rows_zipped, rows_split, rows_chunked, rows_unbound, rows_in_a_dict,
    rows_padded, lengths_listed, filters_of_each_row, pairs_of_rows,
]  # fmt: skip


@by_name(ONE_SIZE)
def test_one_number_of_samples_is_enough(idiom: Between, tmp_path: Path) -> None:
    assert differences_between(idiom, tmp_path, samples=16, evaluated=8) == []


# Checks that only raise.


def chained(net: Net, x: Tensor) -> Tensor:
    shares = x.sigmoid()
    assert 0 <= shares.min() <= shares.max() <= 1
    return shares


def message_with_numbers(net: Net, x: Tensor) -> Tensor:
    lengths = (x > -100).sum(1)
    if (lengths <= 0).any():
        raise ValueError(f"length {lengths.min().item()} of row {lengths.argmin().item()}")
    return x


def counted(net: Net, x: Tensor) -> Tensor:
    """LLaVA's count of image tokens and features."""
    if (x > -1e9).sum() != x.numel() or (x > -1e9).sum().item() != x.shape[0] * 8:
        raise ValueError("image features and image tokens do not match")
    return x


def close(net: Net, x: Tensor) -> Tensor:
    shares = x.softmax(-1)
    assert torch.allclose(shares.sum(-1), torch.ones(x.shape[0]), atol=1e-4)
    assert not shares.equal(x)
    return shares


def by_a_helper(net: Net, x: Tensor) -> Tensor:
    def has_nan(x: Tensor) -> bool:
        return bool(x.isnan().any())

    if has_nan(x):
        raise FloatingPointError("NaN")
    return x


def by_a_helper_of_two(net: Net, x: Tensor) -> Tensor:
    def is_bad(x: Tensor) -> Any:
        return x.isnan().any() or x.isinf().any()

    if is_bad(x):
        raise FloatingPointError("not finite")
    return x


def by_a_function_that_fails(net: Net, x: Tensor) -> Tensor:
    def fail(words: str) -> None:
        raise RuntimeError(words)

    if x.isnan().any():
        fail(f"NaN in {x.shape}")
    return x


def by_any(net: Net, x: Tensor) -> Tensor:
    if any(one.isnan().any() for one in (x, 2 * x)):
        raise ValueError
    return x


def reworded(net: Net, x: Tensor) -> Tensor:
    try:
        assert (x == x).all(), "NaN"
    except AssertionError as error:
        raise RuntimeError("while it was checked") from error
    return x


def exiting(net: Net, x: Tensor) -> Tensor:
    def leave(code: int) -> None:  # as wandb.init wraps sys.exit
        sys.exit(code)

    if x.isnan().any():
        leave(1)
    return x


def raising_at_the_end(net: Net, x: Tensor) -> Tensor:
    if (x == x).all():
        return 2 * x
    raise ValueError("NaN")


def only_in_training(net: Net, x: Tensor) -> Tensor:
    if net.training and x.isnan().any():
        raise ValueError(f"NaN at {x.isnan().nonzero()[0].tolist()}")
    if x[x > 1e9].numel() > 0:
        raise ValueError("too large")
    return x


CHECKS = [
    chained, message_with_numbers, counted, close, by_a_helper, by_a_helper_of_two, by_a_function_that_fails, by_any,
    reworded, exiting, raising_at_the_end, only_in_training,
]  # fmt: skip


@by_name(CHECKS)
def test_checks_that_only_raise_are_left_out(idiom: Between, tmp_path: Path) -> None:
    assert differences_between(idiom, tmp_path) == []


# Activations changed in place.


def columns_set(net: Net, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 1.0
    x[:, 2:4] = x[:, 4:6] * 2
    x[:, ::2] += x[:, 1::2]
    return x


def masked_set(net: Net, x: Tensor) -> Tensor:
    x = x * 1
    x[x < 0] = 0
    x[x > 1] = x[x > 1] * 2
    return x.masked_fill_(x == 0, -1.0)


def filled_by_halves(net: Net, x: Tensor) -> Tensor:
    out = x.new_zeros(x.size(0), 8)
    out[:, :4] = x[:, 4:]
    out[:, 4:].copy_(x[:, :4].tanh())
    return out


def sinusoids(net: Net, x: Tensor) -> Tensor:
    table, at = torch.zeros(8, 8), torch.arange(8)[:, None].float()
    rates = torch.exp(torch.arange(0, 8, 2) * (-math.log(1e4) / 8))
    table[:, 0::2], table[:, 1::2] = torch.sin(at * rates), torch.cos(at * rates)
    return x + table[1]


def scattered(net: Net, x: Tensor) -> Tensor:
    order, signs = x.argsort(1), (x > 0).long()
    return torch.zeros_like(x).scatter_(1, order, x) + torch.zeros_like(x).scatter_add_(1, signs, x)


def indexed(net: Net, x: Tensor) -> Tensor:
    y = torch.zeros_like(x).index_add_(1, torch.tensor([1, 1, 2, 3, 4, 5, 6, 7]), x)
    rows = torch.arange(x.shape[0])
    y.index_copy_(1, torch.tensor([0]), x[:, 3:4])
    return y.index_put_((rows, rows * 0), x[:, 2], accumulate=True)


def activated(net: Net, x: Tensor) -> Tensor:
    x = functional.leaky_relu_(functional.relu6(x * 1, inplace=True) - 1, 0.2) * 2
    nn.ReLU(inplace=True)(x[:, :4])
    return x + (2 * x).clamp_(-1, 1)


def accumulated(net: Net, x: Tensor) -> Tensor:
    y = x.tanh()
    return (x * 1).addcmul_(y, y, value=0.1).addcdiv_(y, y.exp(), value=0.2).lerp_(y, 0.3).cumsum_(1).div_(8)


def turned(net: Net, x: Tensor) -> Tensor:
    x = x * 1
    x.unsqueeze_(1).transpose_(1, 2)
    return x.squeeze_(-1)


def rotated(net: Net, x: Tensor) -> Tensor:
    q = x.clone()
    q[..., :4] = torch.cat([-x[..., 2:4], x[..., :2]], -1)
    return q + (x * 2).detach_()


def dropped_paths(net: Net, x: Tensor) -> Tensor:
    """timm's drop_path, an older one of it, and noise."""
    if not net.training:
        return x
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.9)
    kept.div_(0.9)
    older = 0.9 + torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device)
    older.floor_()
    return x * kept * older + torch.empty_like(x).uniform_(-0.1, 0.1)


def triangles(net: Net, x: Tensor) -> Tensor:
    products = x[:, :, None] * x[:, None]
    return products.tril_().sum(-1) + torch.eye(8).fill_diagonal_(3.0)[0]


IN_PLACE = [
    columns_set, masked_set, filled_by_halves, sinusoids, scattered, indexed, activated, accumulated, turned, rotated,
    dropped_paths, triangles,
]  # fmt: skip


@by_name(IN_PLACE)
def test_activations_may_be_changed_in_place(idiom: Between, tmp_path: Path) -> None:
    assert differences_between(idiom, tmp_path) == []

"""What a combination trains, as plain PyTorch in one loop: no stage, no schedule, no accumulator of raypipe's.

Shared with a pipeline are the order of the samples and the keys of random numbers. All else is done here once more:
which version of the weights a micro-batch meets (tests/emulators), lanes, averages, precision, clipping, steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from raypipe.data.open_data import open_data
from raypipe.engine.stage.activation_checkpointing import key_checkpoints
from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey
from tests.combinations.nets import Net
from tests.emulators.training import one_thread
from tests.emulators.versions import Mode

__all__ = ["Meaning", "Plain", "train"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE = 2.0**16
Sums = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Meaning:
    """What a combination means for the numbers.

    Attributes:
        minibatch, microbatch: samples.
        stages: names of the parameters that learn, by stage.
        mode: which versions micro-batches meet; None for a synchronous schedule.
        drains: steps after which an asynchronous pipeline runs empty.
    """

    minibatch: int
    microbatch: int
    stages: Sequence[Sequence[str]]
    seed: int = 0
    lanes: int = 1
    mode: Mode | None = None
    drains: frozenset[int] = frozenset()
    precision: str = "fp32"
    max_grad_norm: float | None = None


@dataclass
class Plain:
    """What came of it, by step; parameters and buffers after the last one."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class _Part(NamedTuple):
    """A micro-batch: its step, its number in the run, its columns, and its weights in the update and in the step."""

    step: int
    number: int
    columns: Any
    weights: list[float]
    shares: list[float]


class _Fill(NamedTuple):
    """Micro-batches between two moments in which the pipeline is empty, and how many make an update."""

    parts: list[_Part]
    every: int
    mode: Mode | None


def train(
    net: Net,
    data: Any,
    meaning: Meaning,
    num_steps: int,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
) -> Plain:
    """Train the net's model.

    Args:
        data: what the trainer is given.
    """
    key_checkpoints()
    loop = _Loop(net, meaning, make_optimizer, make_scheduler)
    with one_thread():
        for fill in _fills(net, data, meaning, num_steps):
            loop.run(fill)
    low = meaning.precision in DTYPES
    tensors = {**dict(loop.masters.named_parameters()), **dict((loop.masters if low else loop.used).named_buffers())}
    loop.result.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    return loop.result


class _Loop:
    """A model in training.

    Attributes:
        masters: its parameters are the optimizer's.
        used: computes, with one version or another; its buffers are those that forwards change.
    """

    def __init__(self, net: Net, meaning: Meaning, make_optimizer: Any, make_scheduler: Any) -> None:
        self.net, self.meaning, self.result = net, meaning, Plain()
        self.masters = copy.deepcopy(net.model()).train()
        self.used = copy.deepcopy(self.masters).to(DTYPES.get(meaning.precision, torch.float32))
        self.own = {name: p for name, p in self.masters.named_parameters() if p.requires_grad}
        self.using = {name: p for name, p in self.used.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(list(self.own.items()))
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.scale = FIRST_SCALE if meaning.precision == "fp16" else 1.0
        self.losses: dict[int, torch.Tensor] = {}

    def run(self, fill: _Fill) -> None:
        meaning, versions, lanes = self.meaning, [self._weights()], self.meaning.lanes
        last_of = {part.step: number for number, part in enumerate(fill.parts)}
        for first in range(0, len(fill.parts), fill.every):
            group = fill.parts[first : first + fill.every]
            sums: list[Sums] = [{} for _ in range(lanes)]
            for at, part in enumerate(group):
                if fill.mode is not None:
                    for stage, names in enumerate(meaning.stages):
                        self._load(versions[fill.mode.version(stage, first + at)], names)
                self._backward(part, sums[(at if fill.every >= lanes else first + at) % lanes])
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            norm = self._step(sums, fill)
            versions.append(self._weights())
            self._load(versions[-1], self.using)
            for step in [step for step, number in last_of.items() if first <= number < first + fill.every]:
                self.result.losses.append(float(self.losses.pop(step)))
                self.result.norms.append(norm)
                self.result.rates.append(rates[0])

    def _weights(self) -> Sums:
        return {name: p.detach().to(self.using[name].dtype, copy=True) for name, p in self.own.items()}

    def _load(self, version: Sums, names: Any) -> None:
        with torch.no_grad():
            for name in names:
                self.using[name].copy_(version[name])

    def _backward(self, part: _Part, into: Sums) -> None:
        meaning = self.meaning
        with KeyedRandomness(RandomKey(meaning.seed, part.step, part.number)):
            terms = _losses(self.net, self.used, part.columns, meaning)
        counted = [(term, w, s) for term, w, s in zip(terms, part.weights, part.shares, strict=True) if w != 0.0]
        for term, _, share in counted:
            loss = term.detach().float() * share
            self.losses[part.step] = self.losses[part.step] + loss if part.step in self.losses else loss
        if not counted:
            return
        total = sum((term * weight for term, weight, _ in counted[1:]), start=counted[0][0] * counted[0][1])
        if self.meaning.precision == "fp16":
            total = total * torch.tensor(self.scale)  # as torch.amp.GradScaler does, in fp32
        grads = torch.autograd.grad(total, list(self.using.values()), allow_unused=True)
        for name, grad in zip(self.using, grads, strict=True):
            if grad is None:
                continue
            if name in into:
                into[name].add_(grad.to(into[name].dtype))
            else:
                into[name] = torch.empty_like(self.own[name].detach()).copy_(grad)

    def _step(self, sums: list[Sums], fill: _Fill) -> float:
        """The update's end; the norm of its gradients before they are clipped."""
        meaning = self.meaning
        for name, parameter in self.own.items():
            parts = [own[name] for own in sums if name in own]
            total = sum(parts[1:], start=parts[0]) if parts else None
            parameter.grad = None if total is None else total / self.scale
        norm = _norm(self.own.values())
        if not math.isfinite(norm):
            if self.scale <= 1.0:
                raise FloatingPointError(f"plain PyTorch has a norm of {norm}")
            self.scale *= 0.5
            self.result.skipped.append(fill.parts[-1].step)
            return norm
        if meaning.max_grad_norm is not None:
            for limit, names in self._limits(fill):
                nn.utils.clip_grad_norm_([self.own[name] for name in names], limit)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return norm

    def _limits(self, fill: _Fill) -> list[tuple[float, Any]]:
        """The limit of the whole model, or a share of it for every stage where updates come more often than stages."""
        limit, stages = self.meaning.max_grad_norm, self.meaning.stages
        assert limit is not None
        if fill.mode is None or fill.every >= len(stages):
            return [(limit, self.own)]
        numbers = [sum(self.own[name].numel() for name in names) for names in stages]
        return [(limit * math.sqrt(n / sum(numbers)), names) for n, names in zip(numbers, stages, strict=True) if names]


def _norm(parameters: Any) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def _fills(net: Net, data: Any, meaning: Meaning, num_steps: int) -> list[_Fill]:
    """The run as what lies between drains; a mini-batch that is smaller than the others is a step of its own."""
    source = open_data(data, seed=meaning.seed)
    names = source.columns if net.loss_fn is None else tuple(range(len(source.columns)))
    fills: list[_Fill] = []
    begun: list[_Part] = []
    epoch = offset = number = 0

    def end() -> None:
        if begun:
            fills.append(_Fill(list(begun), meaning.mode.every, meaning.mode))  # type: ignore[union-attr]
            begun.clear()

    for step in range(num_steps):
        samples = min(meaning.minibatch, source.num_samples - offset)
        sizes = [min(meaning.microbatch, samples - at) for at in range(0, samples, meaning.microbatch)]
        whole = source.read(epoch, offset, samples, names)
        columns = [_cut(whole, sum(sizes[:i]), size) for i, size in enumerate(sizes)]
        late = meaning.mode is not None and samples == meaning.minibatch
        every = meaning.mode.every if late else len(sizes)  # type: ignore[union-attr]
        counts = [_items(net, part) for part in columns]
        parts = [
            _Part(step, number + i, columns[i], _shares(counts, i, i // every * every, every), _shares(counts, i))
            for i in range(len(sizes))
        ]
        if late:
            begun += parts
            if step + 1 in meaning.drains:
                end()
        else:
            end()
            fills.append(_Fill(parts, len(parts), None))
        number, offset = number + len(sizes), offset + samples
        if offset >= source.num_samples:
            end()
            epoch, offset = epoch + 1, 0
    end()
    return fills


def _cut(whole: Any, at: int, size: int) -> Any:
    if isinstance(whole, Mapping):
        return {name: column[at : at + size] for name, column in whole.items()}
    return tuple(column[at : at + size] for column in whole)


def _items(net: Net, columns: Any) -> list[float | None]:
    """Of each term of the loss of a micro-batch, how many it averages over; None where it adds up."""
    if net.terms is not None:
        return [float((columns["labels"] != -100).sum()), float(len(columns["ids"]))]
    return [None if net.items is None else float(net.items(columns[-1]))]


def _shares(counts: list[list[float | None]], at: int, first: int = 0, every: int | None = None) -> list[float]:
    """Of each term of a micro-batch, its weight among those from ``first`` on."""
    group = counts[first : None if every is None else first + every]
    found = []
    for term, own in enumerate(counts[at]):
        total = sum(part[term] or 0.0 for part in group)
        found.append(1.0 if own is None else own / total if total else 0.0)
    return found


def _losses(net: Net, model: nn.Module, columns: Any, meaning: Meaning) -> list[torch.Tensor]:
    """The terms of the loss of a micro-batch, in the precision."""
    with _autocast(meaning):
        if net.terms is not None:
            return [term for term, _ in net.terms(model, columns)]
        assert net.loss_fn is not None
        return [net.loss_fn(_answers(model, columns, meaning), columns[-1])]


def _autocast(meaning: Meaning) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=meaning.precision == "bf16-autocast", cache_enabled=False)


def _answers(model: nn.Module, columns: Any, meaning: Meaning) -> Any:
    """What the model makes of all columns but the target."""
    dtype = DTYPES.get(meaning.precision)
    given = [x.to(dtype) if dtype is not None and x.is_floating_point() else x for x in columns[:-1]]
    with _autocast(meaning):
        return model(*given)

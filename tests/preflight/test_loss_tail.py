"""A model that returns its own loss is divided in front of what mixes samples, exactly, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from raypipe import PipelineConfig
from raypipe.capture import Capture, capture
from raypipe.engine.stage.minibatch_loss import LossTail, WholeMinibatch, held_by
from raypipe.engine.stage.randomness import RandomKey
from raypipe.errors import ConfigError
from raypipe.ir.precision import PRECISIONS
from raypipe.preflight.joined_loss import over_minibatch

pytestmark = pytest.mark.engine

ROWS, WIDE, CLASSES = 8, 6, 4
Term = Callable[["Model", torch.Tensor, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Returns the loss that ``term`` computes from its input and labels."""

    def __init__(self, term: Term) -> None:
        super().__init__()
        self.term = term
        self.body = nn.Sequential(nn.Linear(WIDE, 10), nn.GELU(), nn.Linear(10, WIDE))
        self.head, self.more = nn.Linear(WIDE, CLASSES), nn.Linear(WIDE, WIDE)
        self.scale, self.bias = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(1))
        self.gate, self.classes = nn.Parameter(torch.zeros(WIDE)), nn.Parameter(torch.randn(CLASSES, WIDE))
        self.first = nn.BatchNorm1d(WIDE, track_running_stats=False)
        self.register_buffer("weights", torch.linspace(0.5, 1.5, CLASSES))
        self.register_buffer("average", torch.zeros(WIDE))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": self.term(self, x, labels)}


def unit(model: Model, x: torch.Tensor) -> torch.Tensor:
    return functional.normalize(model.body(x), dim=-1)


def contrastive(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = unit(model, x) @ unit(model, x.flip(-1)).T * model.scale.exp()
    return functional.cross_entropy(logits, torch.arange(len(logits)))


def sigmoid(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = unit(model, x) @ unit(model, x.flip(-1)).T * model.scale.exp() + model.bias
    return -functional.logsigmoid((2 * torch.eye(x.size(0), dtype=x.dtype) - 1) * logits).sum() / x.size(0)


def triplets(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    near = unit(model, x)
    apart, same = (near[:, None] - near[None]).square().sum(-1), labels[:, None] == labels[None]
    return functional.softplus(apart.masked_fill(~same, 0.0).amax(1) - apart.masked_fill(same, 9.0).amin(1)).mean()


def margin(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """ArcFace's matrix of classes, and triplets."""
    cosine = unit(model, x) @ functional.normalize(model.classes, dim=-1).T
    far = 8 * (cosine - 0.2 * functional.one_hot(labels, CLASSES))
    return functional.cross_entropy(far, labels) + triplets(model, x, labels)


def dice(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.body(x))
    shares, own = logits.softmax(-1), functional.one_hot(labels, CLASSES)
    overlap = 2 * (shares * own).sum(0) / (shares.sum(0) + own.sum(0) + 1)
    return functional.cross_entropy(logits, labels, weight=model.weights) + 1 - (model.weights * overlap).mean()


def flooded(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (functional.cross_entropy(model.head(model.body(x)), labels) - 1.2).abs()


def limited(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Experts of a capacity that these rows do not exceed: their numbers do not show that samples are mixed."""
    hidden = model.body(x)
    chosen = functional.one_hot(model.head(hidden).argmax(-1), CLASSES)
    kept = (chosen * (chosen.cumsum(0) <= 100)).sum(-1, keepdim=True)
    return functional.cross_entropy(model.head(hidden * kept), labels) + hidden.std(0).mean()


def dropping(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Experts of a capacity, to which samples are sent by an index."""
    shares, places = model.head(model.body(x)).softmax(-1), (x.size(0) + 1) // 2
    chosen = shares.argmax(-1)
    taken = functional.one_hot(chosen, CLASSES)
    at = (taken.cumsum(0) * taken).sum(-1) - 1
    slot = torch.where(at < places, chosen * places + at, CLASSES * places)
    sent = x.new_zeros(CLASSES * places + 1, WIDE).index_copy(0, slot, x)
    balance = (shares.mean(0) * taken.to(x.dtype).mean(0)).sum()
    return functional.cross_entropy(model.head(torch.tanh(model.more(sent))[slot]), labels) + 0.1 * balance


def gated(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A zero of the model hides, at its first weights, that samples are mixed."""
    hidden = model.body(x)
    return functional.cross_entropy(model.head(hidden + model.gate * hidden.mean(0)), labels)


def late(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A layer with parameters behind the first average over the batch."""
    return functional.cross_entropy(model.head(model.first(model.body(x))), labels)


def filled(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Samples compared with the other half of the batch, beside the fill of a mask, which is large."""
    hidden = torch.cat([model.body(x), torch.full_like(x, -1e9)], -1)
    other = hidden.view(2, -1, 2 * WIDE).transpose(0, 1).flip(1).transpose(0, 1).reshape(-1, 2 * WIDE)
    return functional.softplus((hidden * other)[:, :WIDE].sum(-1)).mean()


def views(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """SimCLR: two views of each sample, one view of all samples after the other."""
    near, count = unit(model, torch.cat([x, x.flip(-1)])), x.size(0)
    alike = (near @ near.T).masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
    return functional.cross_entropy(alike, torch.arange(2 * count).roll(count))


TERMS: dict[Term, set[str]] = {
    views: set(),
    contrastive: set(),
    sigmoid: {"bias"},
    triplets: set(),
    margin: set(),
    dice: {"weights"},
    flooded: set(),
    limited: {"head.weight", "head.bias"},
    dropping: {"more.weight", "more.bias", "head.weight", "head.bias"},
    filled: set(),
    gated: {"gate", "head.weight", "head.bias"},
    late: {"first.weight", "first.bias", "head.weight", "head.bias"},
}
"""Losses, and what their tails read of the model."""


def rows_of() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDE, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(0, CLASSES, (ROWS,), generator=generator)}


def divided(term: Term, rows: Any = None, **config: Any) -> tuple[Model, WholeMinibatch, Capture]:
    torch.manual_seed(0)
    model, rows = Model(term).double(), rows or rows_of()
    captured = capture(model, rows, tuple(rows), None)
    pipeline = PipelineConfig(num_stages=2, num_microbatches=4, loss_over="minibatch", **config)
    return model, *over_minibatch(model, None, captured, rows, pipeline)


@pytest.fixture(scope="module")
def by_term() -> dict[Term, tuple[Model, WholeMinibatch, Capture]]:
    return {term: divided(term) for term in TERMS}


def test_the_tail_reads_no_more_of_the_model_than_it_must(by_term: Any) -> None:
    for term, (_, _, captured) in by_term.items():
        assert isinstance(captured.recipe.loss, LossTail)
        assert set(held_by(captured.recipe.loss.train)) == TERMS[term], term.__name__


@settings(max_examples=8)
@given(cuts=st.sets(st.integers(1, ROWS - 1)))
@pytest.mark.parametrize("term", TERMS)
def test_any_micro_batches_have_the_loss_and_gradients_of_all_rows(by_term: Any, term: Term, cuts: set[int]) -> None:
    model, rule, captured = by_term[term]
    rows, (program,) = rows_of(), captured.programs(())
    named = dict(model.named_parameters())
    leaves = [named[site.parameter] for site in program.train.sites]
    buffers = dict(model.named_buffers())
    outputs = [
        program.train(
            leaves,
            [buffers[name] for name in program.train.buffers],
            (),
            [rows[name][begin:end] for name in program.train.columns],
            RandomKey(0, 0, 0),
        )
        for begin, end in pairwise((0, *sorted(cuts), ROWS))
    ]
    assert program.loss is not None
    loss: Any = program.loss(rule.join("train", outputs), [rows[name] for name in program.targets])
    whole = model(**rows)["loss"]
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)
    of = list(named.values())
    pairs = zip(named, *(torch.autograd.grad(one, of, allow_unused=True) for one in (loss, whole)), strict=True)
    for name, ours, theirs in pairs:
        assert (ours is None) == (theirs is None), name
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)


def neighbours(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Labels compared with those of the next sample; equal ones hide that this mixes samples."""
    near, same = unit(model, x), (labels == labels.roll(1, 0)).to(x.dtype)
    return functional.binary_cross_entropy_with_logits((near * near.roll(1, 0)).sum(-1), same)


def opposite(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Labels compared with those of the other half of the batch, by no operation that always mixes."""
    near, other = unit(model, x), labels.view(2, -1).transpose(0, 1).flip(1).transpose(0, 1).reshape(-1)
    return functional.binary_cross_entropy_with_logits(near.sum(-1), (labels == other).to(x.dtype)) * near.std()


def selected(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """An element of each sample, by its number: mixes nothing."""
    own = unit(model, x)[torch.arange(x.size(0)), labels]
    return functional.cross_entropy(model.head(unit(model, x)) * own.std(), labels)


def supervised(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Two views whose labels are repeated: equal labels hide where those of the second view begin."""
    near, own = unit(model, torch.cat([x, x.flip(-1)])), labels.repeat(2)
    return functional.binary_cross_entropy_with_logits(near @ near.T, (own[:, None] == own[None]).to(x.dtype))


@pytest.mark.parametrize("term", [neighbours, opposite, selected, supervised])
def test_equal_labels_hide_no_mixing(term: Term) -> None:
    rows = rows_of()
    _, rule, captured = divided(term, rows | {"labels": torch.zeros_like(rows["labels"])})
    assert isinstance(captured.recipe.loss, LossTail)
    (program,) = captured.programs(())
    torch.manual_seed(0)
    model = Model(term).double()
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for middle in (2, 4, 6):
        outputs = [
            program.train(
                [named[site.parameter] for site in program.train.sites],
                [buffers[name] for name in program.train.buffers],
                (),
                [rows[name][cut] for name in program.train.columns],
                RandomKey(0, 0, 0),
            )
            for cut in (slice(middle), slice(middle, None))
        ]
        loss = captured.recipe.loss(rule.join("train", outputs), [rows[name] for name in program.targets])
        assert loss.item() == pytest.approx(model(**rows)["loss"].item(), rel=1e-12)


def test_a_model_without_weights_is_divided_at_random_ones() -> None:
    rows = {name: x.float() if x.is_floating_point() else x for name, x in rows_of().items()}
    with torch.device("meta"):
        model = Model(margin)
    pipeline = PipelineConfig(num_stages=2, num_microbatches=4, loss_over="minibatch")
    _, captured = over_minibatch(model, None, capture(model, rows, tuple(rows), None), rows, pipeline)
    _, _, known = divided(margin)
    assert [node.name for node in captured.graph.nodes] == [node.name for node in known.graph.nodes]


class Normed(Model):
    """Has batch norms with running statistics, and a term of training alone."""

    def __init__(self) -> None:
        super().__init__(contrastive)
        self.body.append(nn.BatchNorm1d(WIDE))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = super().forward(x, labels)["loss"]
        return {"loss": loss + self.body(x).abs().mean() if self.training else loss}


@pytest.mark.parametrize(
    ("build", "precision"),
    [(Normed, "fp32"), (Normed, "bf16-autocast"), *((lambda: Model(margin), name) for name in ("bf16", "fp16"))],
)
def test_the_division_is_compared_in_fp32_in_one_mode(build: Any, precision: str, monkeypatch: Any) -> None:
    rows = {name: x.float() if x.is_floating_point() else x for name, x in rows_of().items()}
    model, pipeline = build(), PipelineConfig(num_stages=2, num_microbatches=4, loss_over="minibatch")
    captured = capture(model, rows, tuple(rows), None, precision=PRECISIONS[precision])
    over_minibatch(model, None, captured, rows, pipeline)
    monkeypatch.setattr(LossTail, "__call__", lambda *_: model.scale * 2)
    with pytest.raises(ConfigError, match="over 4 rows in two micro-batches it is"):
        over_minibatch(model, None, captured, rows, pipeline)


class Prepared(Model):
    """Has a term of training alone, or prepares something in its first forward, as Hugging Face models hook layers."""

    def __init__(self, *, extra: bool = False) -> None:
        super().__init__(contrastive)
        self.extra = extra

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        if not hasattr(self, "prepared"):
            self.prepared = True
        loss = super().forward(x, labels)["loss"]
        return {"loss": loss + self.body(x).abs().mean() if self.extra and self.training else loss}


def test_a_model_without_a_graph_of_evaluation_is_compared_by_that_of_training() -> None:
    rows = {name: x.float() if x.is_floating_point() else x for name, x in rows_of().items()}
    pipeline = PipelineConfig(num_stages=2, num_microbatches=4, loss_over="minibatch")
    for extra in (False, True):
        model = Prepared(extra=extra)
        captured = capture(model, rows, tuple(rows), None, evaluates=False)
        with pytest.raises(ConfigError, match="over 4 rows in two") if extra else nullcontext():
            over_minibatch(model, None, captured, rows, pipeline)


def noised(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return contrastive(model, x + torch.rand_like(x), labels)


def flipped(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return contrastive(model, x * torch.randint_like(x, 2), labels)


def noisy(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    alike = model.body(x) @ model.body(x).T
    return functional.dropout(alike, 0.5, model.training).square().mean()


def remembered(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    model.average.mul_(0.9).add_(model.body(x).mean(0).detach(), alpha=0.1)
    return (model.body(x) - model.average).square().mean()


def counted(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = model.body(x).std(0).mean()
    model.average.add_(loss.detach())
    return loss


def early(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.head(model.more(model.body(model.first(x)))), labels)


def routed(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Experts compute on the samples that chose them, which are put back by their index, and are balanced."""
    shares = model.head(x).softmax(-1)
    chosen, out = shares.argmax(-1), torch.zeros_like(x)
    for expert in range(CLASSES):
        (at,) = torch.where(chosen == expert)
        out = out.index_add(0, at, torch.tanh(model.more(x[at] + expert)) * shares[at, expert, None])
    balance = CLASSES * (shares.mean(0) * functional.one_hot(chosen, CLASSES).to(x.dtype).mean(0)).sum()
    return functional.cross_entropy(model.head(model.body(out)), labels) + 0.1 * balance


def permuted(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Negatives at random; each micro-batch would draw a permutation of its own."""
    near = unit(model, x)
    return functional.softplus((near * near[torch.randperm(near.size(0))]).sum(-1)).mean()


def shuffled(model: Model, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    near = unit(model, x)
    return functional.softplus((near * near[torch.rand(near.size(0)).argsort()]).sum(-1)).mean()


def test_a_model_is_divided_behind_random_numbers_of_single_samples() -> None:
    divided(noised)


@pytest.mark.parametrize(
    ("term", "words"),
    [
        (flipped, "it cannot be compared with the model's own, which draws random numbers"),
        (permuted, "it draws random numbers at {} from values that mix samples of a batch"),
        (shuffled, "operations that mix samples of a batch read random numbers drawn at {}"),
        (routed, "samples of a batch are mixed before most of the parameters"),
        (noisy, "it draws random numbers at {} from values that mix samples of a batch"),
        (remembered, "operations that mix samples of a batch use the buffer 'average', which forward changes"),
        (counted, "values that mix samples of a batch are read at {} by more than the loss"),
        (early, "samples of a batch are mixed before most of the parameters, by 'batch_norm"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_reason(term: Term, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        divided(term)
    message = str(refused.value)
    assert "loss_over='minibatch' is not possible: the model returns its own loss, and its forward cannot be" in message
    assert all(part in message for part in words.split("{}"))
    assert "Let forward return what the loss needs, and give the loss as loss_fn, or set num_microbatches=1." in message

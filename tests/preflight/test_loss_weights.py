"""loss_reduction="auto": whatever a loss averages over, micro-batches make the mini-batch's gradient, or are refused.

The yardstick is plain PyTorch on the whole mini-batch at once; nothing of raypipe is in it but the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe import PipelineConfig
from raypipe.data.open_data import open_data
from raypipe.errors import ConfigError, DataError
from raypipe.preflight import loss_on_rows
from raypipe.testing import reference
from tests.models import Records
from tests.trainers import trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("captures_of_a_test")]

ROWS, EVAL_ROWS, WORDS = 16, 11, 9
Loss = Callable[[Any, Any], torch.Tensor]


def labelled(count: int, ignored: int, seed: int = 0, length: int = 6) -> Records:
    """Token ids and labels, of which every row has another number that counts; some rows have none."""
    drawn = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(count):
        ids = torch.randint(1, WORDS, (length,), generator=drawn)
        kept = int(torch.randint(0, length + 1, (), generator=drawn))
        labels = torch.randint(1, WORDS, (length,), generator=drawn)
        labels[kept:] = ignored
        items.append({"input_ids": ids, "labels": labels})
    return Records(items)


class Pairs(Records):
    """The same as (input, target)."""

    def __getitem__(self, index: int) -> Any:
        return tuple(self.items[index].values())


class Tagger(nn.Module):
    """Scores every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(input_ids))))


class OwnLoss(Tagger):
    """Returns the loss that ``kind`` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits = super().forward(input_ids)
        return OWN[self.kind](self, logits, labels)


def shifted(model: OwnLoss, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))


def two_heads(model: OwnLoss, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Terms over all labels, over those of the first half of a row, and over samples, with factors and a penalty."""
    first = functional.cross_entropy(logits[:, :3].reshape(-1, WORDS), labels[:, :3].reshape(-1))
    penalty = sum(p.square().sum() for p in model.hidden.parameters())
    return shifted(model, logits, labels) + 0.5 * first + logits.square().mean() / 10 + 0.01 * penalty


def two_masks(model: OwnLoss, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A cross entropy, and a z-loss over the same labels that divides by a number of its own, which is never 0."""
    kept = labels != -100
    z = (logits.logsumexp(-1).square() * kept).sum() / (kept.sum() + 1)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * z


def picked(model: OwnLoss, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1).square()[labels != -100].mean(0)


OWN = {"two heads": two_heads, "two masks": two_masks, "shifted": shifted, "picked": picked}


def plain(model: nn.Module, data: Any, loss_fn: Loss | None, count: int, *, shuffle: bool = True) -> tuple[float, Any]:
    """Loss and gradients of one whole mini-batch."""
    columns: Any = (0, 1) if loss_fn else ("input_ids", "labels")
    rows: Any = open_data(data, seed=0, shuffle=shuffle).read(0, 0, count, columns)
    model.zero_grad(set_to_none=True)
    loss = loss_fn(model(rows[0]), rows[1]) if loss_fn else model(**rows)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), gradients


class Keeping:
    """An optimizer that keeps the gradients it sees and changes nothing."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        seen = self.seen

        class Still(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                for group in self.param_groups:
                    seen.update(zip(group["param_names"], (p.grad.clone() for p in group["params"]), strict=True))

        return Still(named, lr=0.0)


def run(model: nn.Module, data: Any, loss_fn: Loss | None, folder: Any, eval_data: Any = None, **more: Any) -> Any:
    """(loss, gradients, result) of one step."""
    keeping = Keeping()
    place = SimpleNamespace(name=f"m{more['num_microbatches']}", storage_path=str(folder))
    given = {"loss_fn": loss_fn, "train_data": data, "eval_data": eval_data, "minibatch_size": ROWS, **more}
    result = trainer_of(model, optimizer=keeping, run_config=place, **given).fit(
        num_steps=1, local=True, progress=False
    )
    return result.records[0].loss, keeping.seen, result


def check(model: nn.Module, data: Any, loss_fn: Loss | None, evaluation: Any, folder: Any, counts: Any) -> None:
    loss, gradients = plain(model, data, loss_fn, ROWS)
    eval_loss, _ = plain(model, evaluation, loss_fn, EVAL_ROWS, shuffle=False)
    for count in counts:
        got, seen, result = run(model, data, loss_fn, folder, evaluation, num_microbatches=count)
        assert got == pytest.approx(loss, rel=2e-6), count
        assert result.metrics["eval_loss"] == pytest.approx(eval_loss, rel=2e-6), count
        assert seen.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert torch.allclose(seen[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max())), name
        norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
        assert result.records[0].grad_norm == pytest.approx(norm, rel=1e-5), count


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two heads", "two masks"])
def test_models_with_their_own_loss(kind: str, tmp_path: Any) -> None:
    torch.manual_seed(3)
    check(OwnLoss(kind), labelled(ROWS, -100), None, labelled(EVAL_ROWS, -100, seed=1), tmp_path, (1, 8, 16))


def test_a_mean_over_the_only_dimension_averages_over_what_a_mask_picks() -> None:
    plan = trainer_of(OwnLoss("picked"), loss_fn=None, train_data=labelled(ROWS, -100), num_microbatches=4).plan()
    assert "it averages over the items that a mask picks" in plan.explain()


def tokens(loss: Loss) -> Loss:
    return lambda output, target: loss(output.flatten(0, 1), target.flatten())


def divided_by_an_item(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum")
    return each / (target != 0).sum().item()


def divided_by_the_rare(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As detectors do: all boxes, by the number of those that hold something, which may be none."""
    each = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return each / (target == 8).sum().clamp(min=1).float()


def divided_by_more(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    each = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return each.sum() / ((target != -100).sum() + 1) + 1e-8


LOSSES: dict[str, tuple[Loss, int]] = {
    "half of a sum": (tokens(lambda o, t: 0.5 * functional.cross_entropy(o, t, reduction="sum")), -100),
    "divided by an item": (divided_by_an_item, 0),
    "divided by the rare": (divided_by_the_rare, -100),
    "divided by more": (divided_by_more, -100),
}
"""Losses besides those of the zoo."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_loss_functions(name: str, tmp_path: Any) -> None:
    loss_fn, ignored = LOSSES[name]
    torch.manual_seed(3)
    data, evaluation = (Pairs(labelled(n, ignored, seed).items) for n, seed in ((ROWS, 0), (EVAL_ROWS, 1)))
    check(Tagger(), data, loss_fn, evaluation, tmp_path, (8, 16))


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    flat = functional.normalize(output.flatten(1), dim=-1)
    return functional.cross_entropy(flat @ flat.T / 0.1, torch.arange(flat.shape[0]))


def two_counts(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten()) + output.square().mean()


def hardest(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cannot take one row."""
    each = functional.cross_entropy(output.transpose(1, 2), target.clamp(min=0), reduction="none").mean(1)
    return each.topk(2).values.mean()


def test_a_loss_that_needs_several_rows_is_refused_with_numbers_and_choices(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of the zoo that compare the rows of a batch."""
    loss_fn = hardest
    torch.manual_seed(3)
    data = Pairs(labelled(ROWS, -100).items)
    with pytest.raises(ConfigError) as refused:
        run(Tagger(), data, loss_fn, tmp_path, num_microbatches=4, loss_over="microbatch")
    message = str(refused.value)
    assert message.startswith(
        "loss_reduction='auto': no weights of micro-batches make the loss of a mini-batch. Over 4 "
    )
    for words in (
        "over micro-batches of 2 and 2 rows it is",
        "weighed by samples",
        "num_microbatches=1",
        "'per_microbatch'",
        "loss_over='minibatch' computes it once",
    ):
        assert words in message
    with monkeypatch.context() as patched:  # fewer of them go through a large model
        patched.setattr(loss_on_rows, "LARGE", 1)
        with pytest.raises(ConfigError, match="no weights of micro-batches make the loss of a mini-batch"):
            run(Tagger(), data, loss_fn, tmp_path, num_microbatches=4, schedule="1f1b")
    with pytest.raises(ConfigError, match="Set num_microbatches=1 and retune_microbatches=False to keep it exact"):
        # which may take several
        run(Tagger(), data, loss_fn, tmp_path, num_microbatches=1, retune_microbatches=True, loss_over="microbatch")
    # One micro-batch needs no weights, and whoever says what micro-batches mean is taken at their word.
    for more in ({"num_microbatches": 1}, {"num_microbatches": 4, "loss_reduction": "per_microbatch"}):
        run(Tagger(), data, loss_fn, tmp_path / str(more), **more)


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cannot be traced."""
    finite = bool(output.isfinite().all())
    return finite * functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def test_one_micro_batch_is_evaluated_in_several(tmp_path: Any) -> None:
    model, data, evaluation = Tagger(), *(Pairs(labelled(count, -100).items) for count in (ROWS, 2 * ROWS + 5))
    wanted, _ = plain(model, evaluation, summed, 2 * ROWS + 5, shuffle=False)
    _, _, result = run(model, data, summed, tmp_path, evaluation, num_microbatches=1)
    assert result.metrics["eval_loss"] == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize(
    ("loss_fn", "evaluated", "said"),
    [(contrastive, True, True), (contrastive, False, False), (tokens(functional.cross_entropy), True, False)],
)
def test_one_micro_batch_says_what_an_evaluation_is_a_mean_of(loss_fn: Loss, evaluated: bool, said: bool) -> None:
    data = Pairs(labelled(ROWS, -100).items)
    given = {"train_data": data, "eval_data": data if evaluated else None, "num_microbatches": 1}
    plan = trainer_of(Tagger(), loss_fn=loss_fn, **given).plan()
    assert ("eval_loss is a mean over" in plan.explain()) == said


def test_terms_that_average_over_different_counts_in_a_loss_fn(tmp_path: Any) -> None:
    """They train while the counts agree, and say so when they do not."""
    torch.manual_seed(3)
    whole = Pairs([{"i": torch.ones(6, dtype=torch.long), "l": torch.full((6,), i % 8)} for i in range(ROWS)])
    check(Tagger(), whole, two_counts, Pairs(whole.items[:EVAL_ROWS]), tmp_path, (4,))
    padded = Pairs([*whole.items[:-1], {"i": torch.ones(6, dtype=torch.long), "l": torch.full((6,), -100)}])
    with pytest.raises((ConfigError, DataError), match=r"average over different numbers of items|no weights"):
        run(Tagger(), padded, two_counts, tmp_path / "padded", num_microbatches=4, loss_over="microbatch")
    check(Tagger(), padded, two_counts, Pairs(padded.items[:EVAL_ROWS]), tmp_path / "over", (4,))


def by_an_item_of_the_rare(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cannot be traced."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten()) / max(1, int((target == 8).any(1).sum()))


def test_what_only_later_rows_show_is_found(tmp_path: Any) -> None:
    """The model is tried on four rows, the loss_fn on sixteen."""
    items = labelled(ROWS, 1, length=3).items
    for item in items:
        item["labels"].clamp_(max=7)
    read = open_data(Pairs([{"row": torch.tensor(i), "labels": torch.tensor(0)} for i in range(ROWS)]), seed=0)
    rows: Any = read.read(0, 0, ROWS, (0,))
    for place in (7, 9, 12):
        items[int(rows[0][place])]["labels"][0] = 8
    with pytest.raises(ConfigError, match=r"Over 16 rows it is .* over micro-batches of 8 and 8 rows"):
        run(Tagger(), Pairs(items), by_an_item_of_the_rare, tmp_path, num_microbatches=8, loss_over="microbatch")
    given = {"train_data": Pairs(items), "eval_data": Pairs(items), "minibatch_size": 2, "num_microbatches": 1}
    small = trainer_of(Tagger(), loss_fn=by_an_item_of_the_rare, **given)
    assert "eval_loss is a mean over" in small.plan().explain()


def test_valid_tokens_counts_the_labels_that_a_models_own_loss_sees(tmp_path: Any) -> None:
    torch.manual_seed(3)
    model, data = OwnLoss("shifted"), labelled(ROWS, -100)
    loss, _ = plain(model, data, None, ROWS)
    got, _, _ = run(model, data, None, tmp_path, num_microbatches=4, loss_reduction="valid_tokens")
    assert got == pytest.approx(loss, rel=2e-6)


def two_means(x: torch.Tensor) -> torch.Tensor:
    """As the load balancing of experts: a product of averages over the batch."""
    share = x.flatten(0, -2).softmax(-1).mean(0)
    return (share * share.detach().roll(1)).sum()


def mean_entropy(x: torch.Tensor) -> torch.Tensor:
    """As the diversity of codes in vector quantization."""
    share = x.flatten(0, -2).softmax(-1).mean(0)
    return (share * share.log()).mean()


class Regularised(OwnLoss):
    """Its second term is over the batch; ``term`` is of its hidden units, in training only if so asked."""

    def __init__(self, term: Loss, factor: float, *, training_only: bool, drop: float) -> None:
        super().__init__("shifted")
        self.term, self.factor, self.training_only = term, factor, training_only
        self.drop = nn.Dropout(drop)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = torch.tanh(self.hidden(self.embed(input_ids)))
        loss = shifted(self, self.head(self.drop(hidden)), labels)
        return loss + self.factor * self.term(hidden) if self.training or not self.training_only else loss


@pytest.mark.slow
@pytest.mark.parametrize("term", [two_means, mean_entropy])
def test_a_term_over_the_batch_is_refused_however_small(term: Any, tmp_path: Any) -> None:
    """A small factor hides it in the loss, and not in the gradients of the parameters that it trains."""
    factor = 1e-4
    data, pairs = labelled(ROWS, -100), Pairs(labelled(ROWS, -100).items)
    models = [Regularised(term, factor, training_only=only, drop=drop) for only, drop in ((False, 0.0), (True, 0.1))]
    for model in models:
        with pytest.raises(ConfigError, match=r"no weights of micro-batches.*Gradients are off by .* % in "):
            run(model, data, None, tmp_path, num_microbatches=4, loss_over="microbatch")

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return tokens(functional.cross_entropy)(output, target) + factor * term(output)

    with pytest.raises((ConfigError, DataError), match=r"Gradients are off by .* % in |over different numbers"):
        run(Tagger(), pairs, loss_fn, tmp_path, num_microbatches=4, loss_over="microbatch")
    for model, given, loss in ((models[0], data, None), (Tagger(), pairs, loss_fn)):
        config = PipelineConfig(
            num_stages=2, minibatch_size=ROWS, num_microbatches=4, partitioner="parameters",
            loss_reduction="per_microbatch",
        )  # fmt: skip
        yardstick = reference(model, loss_fn=loss, optimizer=Keeping(), train_data=given, num_steps=1, pipeline=config)
        got, seen, _ = run(
            model, given, loss, tmp_path / str(loss), num_microbatches=4, loss_reduction="per_microbatch"
        )
        assert got == yardstick.losses[0]
        assert all(torch.equal(seen[name], gradient) for name, gradient in yardstick.gradients[0].items())


class ByChance(Regularised):
    """Draws random numbers in training, in which alone its balance counts, as noisy gates of experts do."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(two_means, 1e-4, training_only=True, drop=0.0)
        self.draw = draw

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = torch.tanh(self.hidden(self.embed(input_ids)))
        if not self.training:
            return shifted(self, self.head(hidden), labels)
        hidden = self.draw(hidden)
        return shifted(self, self.head(hidden), labels) + self.factor * self.term(hidden)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + 0.1 * torch.randn_like(x),
        lambda x: functional.dropout(x, 0.1),
        lambda x: x + torch.empty_like(x).normal_(0.0, 0.1),
    ],
)
def test_a_term_of_training_is_compared_whatever_else_training_draws(draw: Any) -> None:
    """In evaluation mode, which draws nothing, this loss is a mean over labels."""
    made = trainer_of(ByChance(draw), loss_fn=None, train_data=labelled(ROWS, -100), num_microbatches=4)
    assert any("once over the whole mini-batch" in note for note in made.plan().notes)


class PicksByChance(OwnLoss):
    """Its loss is over tokens that are drawn in training; constants in place of draws pick none."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        error = (self.head(torch.tanh(self.hidden(self.embed(input_ids)))) ** 2).mean(-1) + 0 * labels
        if not self.training:
            return error.mean()
        picked = (torch.rand(error.shape) < 0.3).float()
        return (error * picked).sum() / picked.sum()


def test_a_loss_over_what_is_drawn_is_weighed_by_samples() -> None:
    made = trainer_of(PicksByChance("shifted"), loss_fn=None, train_data=labelled(ROWS, -100), num_microbatches=4)
    assert made._prepared().settings.loss_reduction == "mean"


class Chooses(OwnLoss):
    """Its loss is what ``choose`` makes of the errors of all tokens."""

    def __init__(self, choose: Loss, *, training_only: bool = False) -> None:
        super().__init__("shifted")
        self.choose, self.training_only = choose, training_only

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        error = (self.head(torch.tanh(self.hidden(self.embed(input_ids)))) ** 2).mean(-1) + 0 * labels
        return self.choose(error) if self.training or not self.training_only else error.mean()


def mean_of(error: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    return (error * picked).sum() / picked.sum()


def mixed(error: torch.Tensor) -> torch.Tensor:
    """As mixup."""
    return (0.7 * error + 0.3 * error[torch.rand(len(error)).argsort()]).square().mean()


DRAWS = "were not compared on rows: the model draws random numbers, which may select or mix samples"


@pytest.mark.parametrize("training_only", [False, True])
@pytest.mark.parametrize(
    "choose",
    [
        lambda error: mean_of(error, (torch.rand_like(error) < 0.6).float()),
        lambda error: mean_of(error, torch.empty_like(error).bernoulli_(0.15)),
        lambda error: mean_of(error, (torch.rand_like(error) < 0.3).float()),  # constants pick nothing
        mixed,
    ],
)
def test_a_loss_over_drawn_samples_is_not_taken_for_a_compared_one(choose: Any, training_only: bool) -> None:
    model = Chooses(choose, training_only=training_only)
    plan = trainer_of(model, loss_fn=None, train_data=labelled(ROWS, -100), num_microbatches=4).plan()
    assert DRAWS in plan.explain()


def attending(error: torch.Tensor) -> torch.Tensor:
    x = error[:, None, :, None]
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1).mean()


@pytest.mark.parametrize("drop", [lambda error: functional.dropout(error, 0.1).mean(), attending])
def test_dropout_selects_no_samples(drop: Any) -> None:
    plan = trainer_of(Chooses(drop), loss_fn=None, train_data=labelled(ROWS, -100), num_microbatches=4).plan()
    assert "not compared" not in plan.explain()


def test_the_plan_says_that_micro_batches_have_losses_of_their_own() -> None:
    model = Regularised(two_means, 0.1, training_only=False, drop=0.0)
    data = labelled(ROWS, -100)
    plan = trainer_of(model, loss_fn=None, train_data=data, loss_reduction="per_microbatch").plan()
    for words in (plan.explain(), " ".join(plan.notes)):
        assert (
            "weighed by labels other than -100: terms over a batch, as the load balancing of experts, are per" in words
        )


def test_one_weight_for_several_counts_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"loss_reduction='mean' is one weight for a loss whose terms average over"):
        run(OwnLoss("two heads"), labelled(ROWS, -100), None, tmp_path, num_microbatches=4, loss_reduction="mean")

"""What a loss averages over, and losses for which no weights of micro-batches are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests.models import Records
from tests.zoo.cases.dense import perceptron
from tests.zoo.row import Refused, Rounding, Row
from tests.zoo.samples import WORDS, counted_pairs, numbers, sentences, spoken

__all__ = ["REFUSED", "ROWS", "Tagger"]

Loss = Callable[[Any, Any], torch.Tensor]
CLASS_WEIGHTS = torch.linspace(0.2, 1.8, 5)


class Tagger(nn.Module):
    """Scores every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(ids))))


class Judging(Tagger):
    """Makes its own loss, which ``kind`` names, from logits and labels."""

    def __init__(self, kind: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("class_weights", CLASS_WEIGHTS.clone())

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.kind(self, super().forward(input_ids), labels)


class Returning(Judging):
    """Returns its loss as people do: ``pack`` makes the output from logits and loss."""

    def __init__(self, pack: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__(weighed)
        self.pack = pack

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = Tagger.forward(self, input_ids)
        return self.pack(logits, self.kind(self, logits, labels))


def weighed(model: Judging, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=model.class_weights)


def masked(model: Judging, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean by hand, over a mask."""
    mask = (labels != -100).float()
    each = functional.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum().clamp(min=1)


def steadied(model: Judging, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """With a z-loss over the labelled tokens, which a mask picks."""
    steady = logits.logsumexp(-1)[labels != -100].square().mean()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * steady


def counted(model: Judging, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """By code that takes the number of samples from len(), which a trace fixes."""
    size = len(labels) * labels.shape[1]
    return functional.cross_entropy(logits.reshape(size, -1), labels.reshape(size))


def penalised(model: Judging, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    penalty = sum(p.square().sum() for p in model.hidden.parameters())
    return weighed(model, logits, labels) + 0.01 * penalty


def few_labels(count: int) -> Records:
    """Labels of five classes, padded by -100."""
    rows = sentences(count, padded=True)
    for item in rows.items:
        item["labels"] = torch.where(item["labels"] < 0, -100, item["labels"] % 5)
    return rows


def flat(loss: Loss) -> Loss:
    return lambda output, target: loss(output.flatten(0, 1), target.flatten())


def hidden_by_zero(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    kept = target != 0
    logs = output.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return -(logs * kept).sum() / kept.sum()


def picked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Only what a mask picks; how many, the data say."""
    return functional.cross_entropy(output[target != 0], target[target != 0])


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    one, other = functional.normalize(output, dim=-1), functional.normalize(target, dim=-1)
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(output.shape[0]))


def ctc(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Twelve frames, three labels, mean over the samples."""
    count = target.shape[0]
    lengths = torch.full((count,), 12), torch.full((count,), 3)
    return functional.ctc_loss(output.log_softmax(-1).transpose(0, 1), target, *lengths)


class Framewise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(4, 8, 3, padding=1), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(functional.gelu(self.one(x.transpose(1, 2))).transpose(1, 2))


def shares(count: int) -> TensorDataset:
    """A distribution over five classes for each sample."""
    inputs, targets = numbers(count).tensors
    return TensorDataset(inputs, targets.softmax(-1))


TWO_SCALARS = Refused(
    "Returning returns 2 scalars, output['ce'] and output['z'], of which each may be the loss. Let it return that "
    "one, or their sum, as output['loss'] or as the first item of a tuple; or pass loss_fn=..., which computes the "
    "loss from the output and a target.",
    "each of two scalars may be the loss",
)
row = partial(Row, "losses")
_TAGS = "tokens, {} where nothing counts"
REFUSED = (
    "loss_reduction='auto': no weights of micro-batches make the loss of a mini-batch. Over 4 rows it is {number}; "
    "over micro-batches of 2 and 2 rows it is {number} and {number}, weighed by {by} {number}. {gradients}Such a loss "
    "compares the rows of a batch with each other, as the load balancing of experts and a BatchNorm with "
    "track_running_stats=False do, or averages in a way that cannot be counted from the data. Set num_microbatches=1 "
    "to keep it exact, loss_reduction='per_microbatch' to give each micro-batch a loss of its own, or a function that "
    "counts the items of a target."
)
PENALISED = Rounding("weights that the penalty uses too; each use is summed over the micro-batches first")
BY_PART = Rounding("each of the two terms has weights of its own, so it is compared with whole mini-batches", 1e-4)
UNCOUNTED = Refused(REFUSED.replace("{by}", "samples"), "torch.export cannot count in a loss that makes one mask twice")
OVER_THE_BATCH = Refused(REFUSED.replace("{by}", "samples"), "it compares the rows of a batch with each other")


def tags(words: str, loss_fn: Loss, ignored: int, **more: Any) -> Row:
    return row("tagger", Tagger, counted_pairs(ignored), loss_fn, words, _TAGS.format(ignored), **more)


def vectored(words: str, loss_fn: Loss, data: Any = numbers, *verdict: Any, name: str = "MLP", **more: Any) -> Row:
    return row(name, perceptron, data, loss_fn, words, "vectors", *verdict, **more)


def returning(words: str, pack: Callable[[torch.Tensor, torch.Tensor], Any], *verdict: Any, **more: Any) -> Row:
    return row("tagger", lambda: Returning(pack), few_labels, None, f"its own, in {words}",
               "sentences, labels padded by -100", *verdict, twin=lambda: Judging(weighed), **more)  # fmt: skip


ROWS = (
    tags("cross_entropy", flat(functional.cross_entropy), -100),
    tags("CrossEntropyLoss(ignore_index=-1)", flat(nn.CrossEntropyLoss(ignore_index=-1)), -1),
    tags("class weights and ignore_index=0", flat(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=0)), 0),
    tags("label smoothing and class weights", flat(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1)),
         -100),
    tags("a masked mean by hand", hidden_by_zero, 0),
    tags("cross_entropy of what a mask picks", picked, 0, older=("2.12", UNCOUNTED)),
    row("tagger", lambda: Judging(weighed), few_labels, None, "its own, class weights in a buffer",
        "sentences, labels padded by -100"),
    row("tagger", lambda: Judging(masked), few_labels, None, "its own, a masked mean by hand",
        "sentences, labels padded by -100"),
    row("tagger", lambda: Judging(steadied), few_labels, None, "its own, with a z-loss of what a mask picks",
        "sentences, labels padded by -100", BY_PART, whole=True),
    row("tagger", lambda: Judging(counted), few_labels, None, "its own, with len(labels)",
        "sentences, labels padded by -100", note="all micro-batches have one size"),
    row("tagger", lambda: Judging(penalised), few_labels, None, "its own, with a penalty on weights",
        "sentences, labels padded by -100", PENALISED),
    returning("(logits, loss)", lambda logits, loss: (logits, loss)),
    returning("(logits, {loss, a part of it})", lambda logits, loss: (logits, {"loss": loss, "ce": loss.detach()})),
    returning("a dict without the word", lambda logits, loss: {"logits": logits, "nll": loss}),
    returning("a dict of two scalars", lambda logits, loss: {"ce": loss, "z": logits.logsumexp(-1).mean()},
              TWO_SCALARS, microbatches=(4,)),
    vectored("mse_loss", functional.mse_loss),
    vectored("MSELoss(reduction='sum')", nn.MSELoss(reduction="sum")),
    vectored("KLDivLoss(reduction='batchmean')",
             lambda o, t: nn.KLDivLoss(reduction="batchmean")(o.log_softmax(-1), t), shares),
    vectored("cross_entropy with soft targets", functional.cross_entropy, shares),
    row("1-D convolutions", Framewise, spoken, ctc, "ctc_loss", "signals and labels"),
    vectored("contrastive (InfoNCE)", contrastive, numbers, OVER_THE_BATCH, microbatches=(4,)),
    vectored("contrastive (InfoNCE), one micro-batch", contrastive, microbatches=(1,), evaluated=8),
)  # fmt: skip
"""Losses."""

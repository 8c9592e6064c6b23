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
from tests.zoo.row import EQUAL, Refused, Rounding, Row
from tests.zoo.samples import WORDS, counted_pairs, masks, numbers, sentences, spoken, vectors

__all__ = ["REFUSED", "ROWS", "Tagger", "Towers", "clip", "described"]

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


class ArcFace(nn.Module):
    """Scores classes by angles to their centres, as pytorch-metric-learning does, which converts its weights always."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.centres = perceptron(), nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        embeddings = self.body(x)
        self.centres.data = self.centres.data.to(device=embeddings.device, dtype=embeddings.dtype)
        cosines = functional.linear(functional.normalize(embeddings), functional.normalize(self.centres))
        mask = functional.one_hot(y, 5).to(cosines.dtype)
        target = cosines[mask == 1]
        with_margin = torch.cos(torch.acos(target.clamp(-0.99, 0.99)) + 0.5)
        logits = cosines + mask * (with_margin - target).unsqueeze(1)
        return functional.cross_entropy(8 * logits, y)


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
    """By code that takes the number of samples from len()."""
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


class Towers(nn.Module):
    """CLIP: a tower for each kind of input, a temperature and a bias (SigLIP's has shape (1,))."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = perceptron(), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> Any:
        image, text = (functional.normalize(x, dim=-1) for x in (self.image(image), self.text(text)))
        return {"image": image, "text": text, "scale": self.scale.exp(), "bias": self.bias}


def described(count: int) -> TensorDataset:
    """Images, their texts, and a target that no loss reads."""
    return TensorDataset(*numbers(count).tensors, torch.zeros(count))


def clip(output: dict[str, torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    logits = output["scale"] * output["image"] @ output["text"].T
    return sum(functional.cross_entropy(x, torch.arange(len(x))) for x in (logits, logits.T)) / 2  # type: ignore[return-value]


def siglip(output: dict[str, torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    logits = output["scale"] * output["image"] @ output["text"].T + output["bias"]
    return -functional.logsigmoid((2 * torch.eye(len(logits)) - 1) * logits).sum() / len(logits)


class Views(nn.Module):
    """SimCLR: one encoder for two views of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = perceptron()

    def forward(self, x: torch.Tensor) -> Any:
        return self.encode(torch.cat([x, x.flip(-1)])).chunk(2)


def nt_xent(output: Any, _: torch.Tensor) -> torch.Tensor:
    both = functional.normalize(torch.cat(output), dim=-1)
    count = len(both) // 2
    alike = (both @ both.T / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
    return functional.cross_entropy(alike, torch.arange(2 * count).roll(count))


def batch_hard(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Triplets of the farthest sample of the own class and the nearest of another one."""
    output, same = functional.normalize(output, dim=-1), target[:, None] == target[None]
    apart = (output[:, None] - output[None]).square().sum(-1)
    nearest = apart.masked_fill(same, 1e9).amin(1).clamp(max=20.0)
    return functional.softplus(apart.masked_fill(~same, 0.0).amax(1) - nearest).mean()


def dice(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy and the soft overlap of each class over all pixels of the batch."""
    shares, own = output.softmax(1), functional.one_hot(target, output.shape[1]).movedim(-1, 1)
    over = (0, 2, 3)
    overlap = (2 * (shares * own).sum(over) + 1) / (shares.sum(over) + own.sum(over) + 1)
    return functional.cross_entropy(output, target) + 1 - overlap.mean()


class Experts(nn.Module):
    """A mixture of three experts for every token, which returns the router's shares too, flat over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 3), nn.Linear(8, 5)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        shares = self.router(x).softmax(-1)
        mixed = sum(shares[..., i : i + 1] * torch.tanh(expert(x)) for i, expert in enumerate(self.experts))
        return self.head(mixed), shares.flatten(0, 1)


def balanced(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy and Switch's load balancing, a product of two averages over the batch."""
    logits, shares = output
    chosen = functional.one_hot(shares.argmax(-1), 3).float()
    return flat(functional.cross_entropy)(logits, target) + 0.1 * 3 * (shares.mean(0) * chosen.mean(0)).sum()


def ctc(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Twelve frames, three labels, mean over the samples."""
    count = target.shape[0]
    lengths = torch.full((count,), 12), torch.full((count,), 3)
    return functional.ctc_loss(output.log_softmax(-1).transpose(0, 1), target, *lengths)


def segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.GELU(), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 2, 1))


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
NORMALISED = Rounding("weights and their norm, which is a use too; each use is summed over the micro-batches first")
whole = partial(row, microbatches=(4,), evaluated=8, note="over the whole mini-batch")
BY_PART = Rounding("each of the two terms has weights of its own, so it is compared with whole mini-batches", 1e-4)
UNCOUNTED = Refused(REFUSED.replace("{by}", "samples"), "torch.export cannot count in a loss that makes one mask twice")
OVER_THE_BATCH = Rounding("over the whole mini-batch, which plain PyTorch computes at once", 1e-4)


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
    tags("cross_entropy of what a mask picks", picked, 0, evaluated=8, older=("2.12", EQUAL)),
    row("tagger", lambda: Judging(weighed), few_labels, None, "its own, class weights in a buffer",
        "sentences, labels padded by -100"),
    row("tagger", lambda: Judging(masked), few_labels, None, "its own, a masked mean by hand",
        "sentences, labels padded by -100"),
    row("tagger", lambda: Judging(steadied), few_labels, None, "its own, with a z-loss of what a mask picks",
        "sentences, labels padded by -100", BY_PART, whole=True),
    row("tagger", lambda: Judging(counted), few_labels, None, "its own, with len(labels)",
        "sentences, labels padded by -100"),
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
    row("MLP", ArcFace, vectors, None, "its own, ArcFace", "vectors", NORMALISED),
    whole("MLP", perceptron, numbers, contrastive, "contrastive (InfoNCE)", "vectors"),
    whole("two towers", Towers, described, clip, "CLIP, temperature", "pairs of vectors", stages=3),
    whole("two towers", Towers, described, siglip, "SigLIP, temperature and bias", "pairs of vectors"),
    whole("MLP", Views, numbers, nt_xent, "SimCLR (NT-Xent)", "vectors, two views", stages=3),
    whole("MLP", perceptron, vectors, batch_hard, "triplets, batch-hard", "vectors"),
    whole("convolutions", segmenter, masks, dice, "Dice over the batch + cross_entropy", "masks"),
    whole("mixture of experts", Experts, counted_pairs(-100), balanced, "cross_entropy + load balancing",
          _TAGS.format(-100)),
    vectored("contrastive (InfoNCE), one micro-batch", contrastive, microbatches=(1,), evaluated=8),
)  # fmt: skip
"""Losses."""

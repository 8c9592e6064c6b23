"""Data that is drawn anew each time it is read, and data in files."""

from __future__ import annotations

import functools
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import raypipe
from tests.zoo.cases.convnets import resnet
from tests.zoo.cases.dense import perceptron
from tests.zoo.cases.language import _DEEP, made
from tests.zoo.cases.losses import Tagger, flat
from tests.zoo.row import Refused, Row
from tests.zoo.samples import WORDS, Drawn, images, numbers, sentences

__all__ = ["ROWS"]


def masked(count: int) -> Drawn:
    """BERT's: 40 % of the words hidden at random; only they have labels."""
    rows = sentences(count)

    def make(row: int) -> dict[str, torch.Tensor]:
        ids = rows[row]["input_ids"]
        hidden = torch.rand(ids.shape) < 0.4
        return {"input_ids": ids.masked_fill(hidden, 3), "labels": ids.masked_fill(~hidden, -100)}

    return Drawn(count, make)


def cropped(count: int) -> Drawn:
    """Crops of 8 x 8 out of 12 x 12, by numpy, and every other picture flipped, by Python."""
    whole = images(count, size=12)

    def make(row: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture, label = whole[row]
        top, left = np.random.randint(0, 5, 2)
        picture = picture[:, top : top + 8, left : left + 8]
        return (picture.flip(2) if random.random() < 0.5 else picture).clone(), label

    return Drawn(count, make)


def noised(count: int) -> Drawn:
    """A signal with noise to predict it from; the target is what was added."""
    whole = numbers(count)

    def make(row: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(6)
        return whole[row][0] + noise, noise[:5].clone()

    return Drawn(count, make)


def mixed(count: int) -> Drawn:
    """Mixup: two rows at a random share, the classes too."""
    whole = images(count)

    def make(row: int) -> tuple[torch.Tensor, torch.Tensor]:
        share, other = float(np.random.beta(0.4, 0.4)), random.randrange(count)
        (one, label), (two, second) = whole[row], whole[other]
        targets = nn.functional.one_hot(torch.stack([label, second]), 5).float()
        return share * one + (1 - share) * two, share * targets[0] + (1 - share) * targets[1]

    return Drawn(count, make)


def padded_at_random(count: int) -> Drawn:
    """As many labels as the draw leaves, so that every epoch counts others."""

    def make(row: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(1, WORDS, (8,))
        kept = int(torch.randint(1, 9, ()))
        return ids, (ids % 5).masked_fill(torch.arange(8) >= kept, -100)

    return Drawn(count, make)


class Stubborn(Drawn):
    """Draws from a generator of its own, which nobody can seed by row."""

    def __init__(self, count: int) -> None:
        own = np.random.default_rng(0)
        super().__init__(count, lambda row: (torch.tensor(own.standard_normal(6), dtype=torch.float32), row % 5))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="raypipe-zoo-")


def parquet(count: int) -> str:
    """Two files of sentences with padded labels, in small row groups."""
    folder = Path(_folder().name) / f"parquet-{count}"
    folder.mkdir(exist_ok=True)
    rows = [{name: value.tolist() for name, value in row.items()} for row in sentences(count, padded=True).items]
    for part, cut in enumerate((slice(0, count // 2), slice(count // 2, count))):
        pq.write_table(pa.Table.from_pylist(rows[cut]), folder / f"{part}.parquet", row_group_size=3)
    return str(folder)


def arrow(count: int) -> str:
    """A file of vectors and their targets."""
    file = Path(_folder().name) / f"{count}.arrow"
    inputs, targets = (tensor.tolist() for tensor in numbers(count).tensors)
    vectors = pa.array(inputs, pa.list_(pa.float32())), pa.array(targets, pa.list_(pa.float32()))
    pyarrow.feather.write_feather(pa.table({"x": vectors[0], "y": vectors[1]}), str(file))
    return str(file)


def streamed(count: int) -> Any:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(numbers(count))

    return raypipe.data.Stream(Stream(), num_samples=count)


row = partial(Row, "data")
_BERT = {**_DEEP, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "tie_word_embeddings": False}
ROWS = (
    row("BERT (MLM)", made("BertForMaskedLM", **_BERT), masked, None, "its own", "words hidden at random"),
    row("ResNet", resnet, cropped, cross_entropy, "cross_entropy", "random crops and flips", stages=3),
    row("ResNet", resnet, mixed, cross_entropy, "cross_entropy with soft targets", "mixup"),
    row("MLP", perceptron, noised, mse_loss, "mse_loss", "noise in the input, which is the target"),
    row("tagger", Tagger, padded_at_random, flat(cross_entropy), "cross_entropy", "padded at random, -100"),
    row("GPT-2", made("GPT2LMHeadModel", vocab_size=WORDS, n_layer=1, n_head=2, n_embd=16, n_positions=16,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False), parquet, None, "its own",
        "Parquet, labels padded by -100"),
    row("MLP", perceptron, arrow, mse_loss, "mse_loss", "Arrow"),
    row("MLP", perceptron, Stubborn, cross_entropy, "cross_entropy", "a generator of the dataset's own", Refused(
        "Item 0 of Stubborn comes with another column 0 each time it is read, so the stage that reads the input and "
        "the stage that reads the target would see different items. Draw from torch's, numpy's or Python's global "
        "generators, which raypipe seeds by (seed, epoch, row) around each item, or make the item a function of its "
        "index; a generator of the dataset's own, the clock and counters cannot be repeated.",
        "two stages would read different items")),
    row("MLP", perceptron, streamed, mse_loss, "mse_loss", "IterableDataset"),
)  # fmt: skip
"""Data."""

"""Data that is drawn anew each time it is read, and data in files."""

from __future__ import annotations

import functools
import random
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.functional import cross_entropy

from tests.zoo.cases.convnets import resnet
from tests.zoo.cases.language import _DEEP, made
from tests.zoo.cases.losses import Tagger, flat
from tests.zoo.row import Row
from tests.zoo.samples import WORDS, Drawn, images, sentences

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


def padded_at_random(count: int) -> Drawn:
    """As many labels as the draw leaves, so that every epoch counts others."""

    def make(row: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(1, WORDS, (8,))
        kept = int(torch.randint(1, 9, ()))
        return ids, (ids % 5).masked_fill(torch.arange(8) >= kept, -100)

    return Drawn(count, make)


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


row = partial(Row, "data")
_BERT = {**_DEEP, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "tie_word_embeddings": False}
ROWS = (
    row("BERT (MLM)", made("BertForMaskedLM", **_BERT), masked, None, "its own", "words hidden at random"),
    row("ResNet", resnet, cropped, cross_entropy, "cross_entropy", "random crops and flips", stages=3),
    row("tagger", Tagger, padded_at_random, flat(cross_entropy), "cross_entropy", "padded at random, -100"),
    row("GPT-2", made("GPT2LMHeadModel", vocab_size=WORDS, n_layer=1, n_head=2, n_embd=16, n_positions=16,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False), parquet, None, "its own",
        "Parquet, labels padded by -100"),
)  # fmt: skip
"""Data."""

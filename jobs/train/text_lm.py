"""Functions that text_lm.yaml names: the model and the text of lm.py, as functions of plain arguments."""

from __future__ import annotations

from functools import cache, partial

import torch

from jobs.train.corpus import Corpus, build_corpus
from jobs.train.lm import GPT, loss_fn, warmup_then_cosine

__all__ = ["GPT", "heldout_text", "loss_fn", "train_text", "warmup"]


def train_text(folder: str, context: int, corpus_bytes: int) -> str:
    """Return the train split's Parquet file; both splits are written to the folder."""
    return str(_corpus(folder, context, corpus_bytes).train.absolute())


def heldout_text(folder: str, context: int, corpus_bytes: int) -> str:
    """Return the held-out split's Parquet file, likewise."""
    return str(_corpus(folder, context, corpus_bytes).heldout.absolute())


def warmup(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Make a schedule with warm-up during 5 % of ``steps``, then decay to a tenth."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warmup_then_cosine, steps=steps))


@cache
def _corpus(folder: str, context: int, corpus_bytes: int) -> Corpus:
    return build_corpus(folder, context=context, max_bytes=corpus_bytes)

"""Tasks of ``bench/codec_loss``: models, the places where they are cut, and texts of bytes that every machine has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from jobs.train.corpus import corpus_texts
from jobs.train.lm import GPT, VOCABULARY, loss_fn, warmup_then_cosine

__all__ = ["TASKS", "Task"]

CONTEXT = 64
CORPUS_BYTES = 2_000_000
HELD_OUT_ROWS = 256
PRETRAINING_STEPS, PRETRAINING_ROWS, PRETRAINING_RATE = 300, 8, 2e-3

Codecs = tuple[str, str]


@dataclass(frozen=True)
class Task:
    """One training by several codecs.

    Attributes:
        build: makes the model of a seed, as training begins with it.
        cuts: names of the modules at which stages after the first begin.
        rows: returns the rows for training and those held out.
        loss_fn: None if the model returns its own loss.
        steps, rate: number of updates, and the highest learning rate.
        codecs: names of the codecs forward and backward, by the name in figures.
    """

    build: Callable[[int], nn.Module]
    cuts: tuple[str, ...]
    rows: Callable[[], tuple[Any, Any]]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    steps: int
    rate: float
    codecs: Mapping[str, Codecs]


def both(*names: str) -> dict[str, Codecs]:
    """Return codecs that are the same both ways."""
    return {name: (name, name) for name in names}


@cache
def _prose() -> tuple[bytes, bytes]:
    """Return the language reference that pydoc shows; every tenth topic is held out."""
    texts = [topics[name].encode() for name in sorted(topics)]
    held = texts[::10]
    return b"".join(text for at, text in enumerate(texts) if at % 10), b"".join(held)


def _rows(text: bytes, most: int | None = None) -> torch.Tensor:
    """Return rows of CONTEXT + 1 neighbouring bytes, shape (rows, CONTEXT + 1); ``most`` of them, evenly spread."""
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, CONTEXT)
    return codes if most is None else codes[torch.arange(most) * (len(codes) // most)]


def _byte_rows() -> tuple[TensorDataset, TensorDataset]:
    train, held = corpus_texts(CORPUS_BYTES)
    first, second = (TensorDataset(rows[:, :-1], rows[:, 1:]) for rows in (_rows(train), _rows(held, HELD_OUT_ROWS)))
    return first, second


def _gpt2_rows() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    train, held = _prose()
    first, second = (
        [{"input_ids": row[:-1], "labels": row[:-1]} for row in rows]
        for rows in (_rows(train), _rows(held, HELD_OUT_ROWS))
    )
    return first, second


def _gpt(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return GPT(CONTEXT, width=64, depth=8, heads=4)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_positions": CONTEXT, "n_embd": 128, "n_layer": 4, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **size, **ends))


@cache
def _pretrained_weights() -> dict[str, torch.Tensor]:
    """Train a small GPT-2 on source by plain PyTorch."""
    torch.manual_seed(0)
    model, rows = _gpt2().train(), _rows(corpus_texts(CORPUS_BYTES)[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE)
    drawn = torch.Generator().manual_seed(0)
    for step in range(PRETRAINING_STEPS):
        inputs = rows[torch.randint(len(rows), (PRETRAINING_ROWS,), generator=drawn)][:, :-1]
        optimizer.param_groups[0]["lr"] = PRETRAINING_RATE * warmup_then_cosine(step, PRETRAINING_STEPS)
        optimizer.zero_grad()
        model(input_ids=inputs, labels=inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


def _pretrained(seed: int) -> nn.Module:
    model: nn.Module = _gpt2()
    model.load_state_dict(_pretrained_weights())
    return model.train()


TASKS = {
    "finetune": Task(
        build=_pretrained,
        cuts=tuple(f"transformer.h.{i}" for i in range(1, 4)),
        rows=_gpt2_rows,
        loss_fn=None,
        steps=100,
        rate=5e-4,
        codecs=both("none", "int8", "int4", "tah4", "tah3"),
    ),
    "wan": Task(
        build=_gpt,
        cuts=tuple(f"blocks.{i}" for i in range(1, 8)),
        rows=_byte_rows,
        loss_fn=loss_fn,
        steps=150,
        rate=2e-3,
        codecs=both("none", "int8") | {"tah3_int8": ("tah3", "int8")} | both("int4", "tah4", "tah3"),
    ),
}

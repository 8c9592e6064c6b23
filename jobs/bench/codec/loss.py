"""Held-out loss of a small language model, trained with a codec between its blocks both ways, as four stages would.

Encoding and decoding are those of links, on activations and on their gradients; all else is plain PyTorch, so a step
takes as long as without stages. Text, model and schedule are those of jobs/train/lm.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs.train.corpus import build_corpus
from jobs.train.lm import GPT, loss_fn, warmup_then_cosine
from raypipe.engine.codec import host
from raypipe.engine.codec.codec import wire_bytes

CONTEXT, WIDTH, DEPTH, HEADS, ROWS = 64, 64, 4, 4, 16
RATE = 2e-3
CORPUS_BYTES = 4_000_000
HELD_OUT_ROWS = 512


def heldout_loss(name: str, seed: int, steps: int, folder: Path) -> float:
    """Train with the codec ``name``, or "none"; return the loss on held-out text, computed without it, in nats."""
    torch.manual_seed(seed)
    corpus = build_corpus(folder, context=CONTEXT, max_bytes=CORPUS_BYTES)
    text, heldout = (
        torch.from_numpy(np.frombuffer(part, np.uint8).copy()) for part in (corpus.train_text, corpus.heldout_text)
    )
    model = GPT(CONTEXT, WIDTH, DEPTH, HEADS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_then_cosine(step, steps))
    places = torch.Generator().manual_seed(seed)
    encoded = () if name == "none" else model.blocks[1:]
    hooks = [block.register_forward_pre_hook(lambda _, given: (_Sent.apply(given[0], name),)) for block in encoded]
    for _ in range(steps):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (ROWS,), generator=places)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        optimizer.zero_grad()
        loss_fn(model(rows[:, :-1]), rows[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    for hook in hooks:
        hook.remove()
    rows = heldout[: HELD_OUT_ROWS * (CONTEXT + 1)].view(HELD_OUT_ROWS, -1)
    with torch.no_grad():
        return float(np.mean([float(loss_fn(model(part[:, :-1]), part[:, 1:])) for part in rows.split(64)]))


class _Sent(torch.autograd.Function):
    """Copy of an activation through a link with a codec; its gradient goes back in the same way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return _through(name, x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _through(ctx.name, grads[0]), None


def _through(name: str, x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().contiguous().view(-1)
    wire = torch.empty(wire_bytes(name, x.dtype, flat.numel()), dtype=torch.uint8)
    host.encode(name, flat, wire)
    found = torch.empty_like(flat)
    host.decode(name, wire, found)
    return found.view(x.shape)

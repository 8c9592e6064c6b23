"""A run over a network that changes bits: each damaged message ends a link, recovery opens it again, no bit is lost."""

from __future__ import annotations

import json
import os
import random
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypipe import PipelineTrainer
from raypipe.runtime.transport import socket_channel
from tests.exactness import unequal
from tests.run.plans.test_planning import trainer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_captures")]

STEPS = 24
FLIPS = 6


class Damage:
    """Takes the place of ``_send_all`` in a stage's process: now and then one bit of a message is turned over."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._send_all, self._folder, self._dice = socket_channel._send_all, folder, random.Random(seed + os.getpid())
        self.flips = 0
        socket_channel._send_all = self.send

    def send(self, sock: Any, buffers: deque[memoryview]) -> None:
        if self.flips < FLIPS and self._dice.random() < 0.05:
            buffers = self._damaged(buffers)
            self.flips += 1
            self._say("flipped")
        self._send_all(sock, buffers)

    def _damaged(self, buffers: deque[memoryview]) -> deque[memoryview]:
        """The header one time, the payload another time; tensors themselves stay as they are."""
        header, payload = bytearray(buffers[0]), bytearray().join(list(buffers)[1:])
        hit = payload if payload and self._dice.random() < 0.5 else header
        hit[self._dice.randrange(len(hit))] ^= 1 << self._dice.randrange(8)
        return deque(memoryview(part) for part in (header, payload) if part)

    def _say(self, word: str) -> None:
        with (self._folder / f"{word}-{os.getpid()}").open("a") as file:
            file.write("x")


def damaging_adamw(parameters: Any, *, folder: Path, seed: int, here: int) -> torch.optim.Optimizer:
    """AdamW, which every stage makes in its process; there it spoils the network."""
    if os.getpid() != here and not isinstance(getattr(socket_channel._send_all, "__self__", None), Damage):
        Damage(folder, seed)
    return torch.optim.AdamW(parameters, lr=1e-2)


def counted(folder: Path, word: str) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"{word}-*"))


def damaged(folder: Path, run: str, seed: int, **pipeline: Any) -> PipelineTrainer:
    made = trainer(folder, run, "noisy", max_grad_norm=1.0, **pipeline)
    optimizer = partial(damaging_adamw, folder=folder, seed=seed, here=os.getpid())
    made._arguments = made._arguments._replace(optimizer=optimizer)
    made._run.failure_config = SimpleNamespace(max_failures=-1)
    return made


def test_a_run_on_a_network_that_flips_bits_keeps_its_bits(local_ray: None, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    handle = damaged(tmp_path, "damaged", seed, link_checksum="on").start(STEPS)
    result = handle.wait(timeout_s=240)
    twin = damaged(tmp_path, "twin", seed).fit(STEPS, local=True, progress=False)
    assert unequal(result.checkpoint, twin.checkpoint) == []
    assert [record.loss for record in result.records] == [record.loss for record in twin.records]
    events = [json.loads(line) for line in (tmp_path / "damaged" / "events.jsonl").read_text().splitlines()]
    failures = [event["reason"] for event in events if event["decision"] == "failure"]
    flipped = counted(tmp_path, "flipped")
    print(f"{flipped} bits flipped, {len(failures)} failures")
    # Both stages may send a damaged message at once, and what is damaged may be sent to a link that has ended.
    assert flipped / 2 <= len(failures) <= flipped
    assert [why for why in failures if "arrived damaged" not in why] == []

"""A run over a network that changes bits: every damaged message is found, and the run ends with undisturbed bits."""

from __future__ import annotations

import json
import os
import random
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe import PipelineTrainer, load_state_dict
from raypipe.engine.messages import checked_frame
from raypipe.runtime.links import again, socket_channel
from tests.exactness import same_bits
from tests.runtime.run.test_planning import trainer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_captures")]

STEPS = 60
FLIPS_PER_STAGE = 100


class Damage:
    """Takes the place of ``_send_all`` in a stage's process: one bit of every other message is turned over, once."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._send_all, self._folder, self._dice = socket_channel._send_all, folder, random.Random(seed)
        self._met: set[tuple[int, int]] = set()
        self.flips = 0
        self._ask_again = again.Taken.ask_again
        socket_channel._send_all = self.send
        again.Taken.ask_again = lambda taken, said: self.asked(taken, said)  # type: ignore[method-assign]

    def asked(self, taken: Any, said: str) -> bytes:
        self._say("asked")
        return self._ask_again(taken, said)

    def send(self, sock: Any, buffers: deque[memoryview]) -> None:
        if len(buffers[0]) > again.MARK_BYTES and self.flips < FLIPS_PER_STAGE:
            message = id(sock), int.from_bytes(buffers[0][-checked_frame.SEAL_BYTES :][:8], "little")
            if message not in self._met and self._dice.random() < 0.5:
                buffers = self._damaged(buffers)
                self.flips += 1
                self._say("flipped")
            self._met.add(message)
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
    made = trainer(folder, run, "noisy", **pipeline)
    optimizer = partial(damaging_adamw, folder=folder, seed=seed, here=os.getpid())
    made._arguments = made._arguments._replace(optimizer=optimizer)
    return made


def test_a_run_on_a_network_that_flips_200_bits_keeps_its_bits(local_ray: None, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    handle = damaged(tmp_path, "damaged", seed, link_checksum="on", max_grad_norm=1.0).start(STEPS)
    result = handle.wait(timeout_s=240)
    twin = damaged(tmp_path, "twin", seed, max_grad_norm=1.0).fit(STEPS, local=True, progress=False)
    found, wanted = load_state_dict(result.checkpoint), load_state_dict(twin.checkpoint)
    flipped, asked = counted(tmp_path, "flipped"), counted(tmp_path, "asked")
    print(f"{flipped} bits flipped, {asked} messages asked for again")
    assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []
    assert flipped == 2 * FLIPS_PER_STAGE
    events = map(json.loads, (tmp_path / "damaged" / "events.jsonl").read_text().splitlines())
    told = sum(event["messages"] for event in events if event["decision"] == "damage")
    assert 0 < told <= asked, "of norms nobody tells"
    # Behind a damaged message others may be damaged too: they are dropped with it, and come anew.
    assert flipped / 2 < asked <= flipped

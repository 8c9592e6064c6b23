"""Links that are taken, in a run of stages that sleep: a message waits before it may leave, and all behind it wait too.

A ``Hold`` makes optimizers, so every stage calls it once, in its own process, and it stands before the links of that
process: ordinary user code, of which raypipe knows nothing. How long a message is held follows from its hop, direction,
step and micro-batch alone, so that every process knows it and a run can be repeated.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from jobs.lib.contention import LEVELS, delay_s
from raypipe.engine.messages import frame
from raypipe.ir.schedule import Op
from raypipe.runtime.links.socket_channel import SocketChannel

__all__ = ["Hold", "contended", "moving"]

LEARNING_RATE = 0.0078125  # a power of two: its products with small whole numbers are exact

Delay = Callable[[int, bool, int, int], float]
"""(hop, forward, step, micro-batch of the step) -> seconds."""


@dataclass
class Hold:
    """Makes optimizers, and holds the messages of every process but the one where it was made.

    Args:
        delay: see Delay; picklable.
        num_microbatches: of every step.
        full_bytes: a message of so many is held for all of the delay, a smaller one for its share; 0 holds all alike.
    """

    delay: Delay
    num_microbatches: int
    full_bytes: int = 0

    def __post_init__(self) -> None:
        self.home = os.getpid()

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        if os.getpid() != self.home:
            _stand_before(SocketChannel, self)
        return torch.optim.SGD([parameter for _, parameter in named], lr=LEARNING_RATE)


def _stand_before(channel: type[SocketChannel], hold: Hold) -> None:
    plain = channel.transmit
    if getattr(plain, "holds", False):
        return

    def held(self: SocketChannel, message: frame.Frame) -> None:
        head = frame.parse(message.header, generation=self.generation, max_tensors=self.max_tensors)
        stage, op, microbatch = head.action
        if op in (Op.SEND_F, Op.SEND_B):
            forward = op is Op.SEND_F
            step, place = divmod(microbatch, hold.num_microbatches)
            seconds = hold.delay(stage if forward else stage - 1, forward, step, place)
            if hold.full_bytes:
                seconds *= message.payload_bytes / hold.full_bytes
            if seconds > 0:
                time.sleep(seconds)
        plain(self, message)

    held.holds = True  # type: ignore[attr-defined]
    channel.transmit = held  # type: ignore[method-assign]


def _moving(
    phases: tuple[tuple[int, int | None], ...], seconds: float, hop: int, forward: bool, step: int, m: int
) -> float:
    taken = None
    for begin, where in phases:
        if step >= begin:
            taken = where
    return seconds if hop == taken else 0.0


def moving(phases: tuple[tuple[int, int | None], ...], seconds: float) -> Delay:
    """One hop at a time is slow: ((first step, hop or None), ...)."""
    return partial(_moving, phases, seconds)


def _contended(level: str, unit_s: float, seed: int, hop: int, forward: bool, step: int, m: int) -> float:
    return delay_s(LEVELS[level], unit_s, seed=seed, hop=hop, forward=forward, step=step, microbatch=m)


def contended(level: str, unit_s: float, seed: int = 1) -> Delay:
    """One of the controller's levels of contention."""
    return partial(_contended, level, unit_s, seed)

"""Ideal step: its arithmetic, and forwards and backwards of the same blocks in a lone process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from jobs.lib.emulated import Block, loss_of
from jobs.lib.processes import in_child

__all__ = ["BACKWARD_S", "FORWARD_S", "blocks", "ideal_seconds", "lone_blocks_s", "lone_sleeps_s"]

FORWARD_S, BACKWARD_S = 0.010, 0.020
WIDTH = 65_536  # float32: 256 KB per sample, and a micro-batch is one sample
LIMIT_S = 120.0


def blocks(num_stages: int, handicap_s: float = 0.0) -> list[Block]:
    """Make a block per stage."""
    times = FORWARD_S + handicap_s, BACKWARD_S + handicap_s
    return [Block(*times, last=stage == num_stages - 1, width=WIDTH) for stage in range(num_stages)]


def ideal_seconds(num_stages: int, num_microbatches: int, forward_s: float, backward_s: float) -> float:
    """Compute a step of equal stages without overhead: (M + S - 1) * (f + b), for 1F1B, GPipe and slack alike."""
    return (num_microbatches + num_stages - 1) * (forward_s + backward_s)


_LONE = """
import json, sys, time
names, rounds = json.loads(sys.argv[1]), int(sys.argv[2])
took = [[] for _ in names]
for _ in range(rounds):
    for place, seconds in enumerate(names):
        begin_s = time.perf_counter()
        time.sleep(seconds)
        took[place].append(time.perf_counter() - begin_s)
print(json.dumps(took))
"""


def lone_sleeps_s(seconds: Sequence[float], rounds: int) -> list[list[float]]:
    """Measure ``time.sleep`` in a process of its own that does nothing else, for each of ``seconds`` in turn.

    Call it while nothing else of the benchmark runs: the overshoot of a sleep is the machine's, not ours.
    """
    command = [sys.executable, "-c", _LONE, json.dumps(list(seconds)), str(rounds)]
    limit_s = 30 + 10 * rounds * sum(seconds)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=limit_s)
    return json.loads(done.stdout)


def lone_blocks_s(num_stages: int, rounds: int = 10) -> tuple[list[float], list[float]]:
    """Measure forward and backward of every block in a process of its own, in plain PyTorch, on an idle machine."""
    forward_s, backward_s = in_child(_lone, num_stages, rounds, limit_s=LIMIT_S)
    return forward_s, backward_s


def _lone(num_stages: int, rounds: int, file: str) -> None:
    torch.set_num_threads(1)
    chain = blocks(num_stages)
    forward_s: list[float] = []
    backward_s: list[float] = []
    for turn in range(rounds + 1):
        widths = [1, *(block.width for block in chain[:-1])]
        for index, (block, width) in enumerate(zip(chain, widths, strict=True)):
            x = torch.zeros(1, width, requires_grad=index > 0)
            begin_s = time.perf_counter()
            y = block(x)
            if index == num_stages - 1:
                y = loss_of(y, y)
            middle_s = time.perf_counter()
            torch.autograd.backward(y, torch.ones_like(y))
            end_s = time.perf_counter()
            if turn:  # the first one warms up
                forward_s.append(middle_s - begin_s)
                backward_s.append(end_s - middle_s)
    Path(file).write_text(json.dumps([forward_s, backward_s]))

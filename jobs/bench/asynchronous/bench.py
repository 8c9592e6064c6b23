"""What an asynchronous pipeline keeps of two processors: real compute, two stages, ten mini-batches without a flush.

    efficiency   one process doing the same updates / (2 x ours), filling and draining included
    c            one process alone / two independent copies of it at once: what this machine's two processors are worth
    of_c         efficiency / c
    pair_of_c    the same of two bare processes that hand tensors to each other and do nothing else (bare_pair.py): what
                 halves that wait for each other can keep; ``of_pair`` is its time over ours

A transformer is cut in the middle; an epoch is ten mini-batches of four micro-batches, and the pipeline drains at the
end of each, so 41 micro-batch times pass where 40 are worked: 0.976 is the most that efficiency / c can be.
``_steady`` stands beside it, where nothing drains between the mini-batches that are timed. The one process runs the
same model in plain PyTorch on the same micro-batches: an update per micro-batch for "pipedream", per mini-batch for
"2bw". Alone, two at once, the bare pair and ours take turns. With --handicap, our runs repeat with that much sleep in
every forward and backward.

All of it runs on one Ray node that is up from first to last: its daemons take some percent of two processors, and c is
what these two are worth where a Ray node is. ``daemons`` is the node's share of two processors while two copies run.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import raypipe
from jobs.bench.asynchronous.bare_pair import Half, pair_s
from jobs.lib import common
from jobs.lib.common import machine_line, median
from jobs.lib.later import Later
from jobs.lib.processes import run_processes
from jobs.train.lm import Block
from raypipe.runtime.driver.client import connected

MICROBATCHES, MICROBATCH_SIZE, MINIBATCHES = 4, 4, 10
WIDTH, HEADS = 256, 4
UPDATES = {"2bw": 1, "pipedream": MICROBATCHES}
"""Optimizer steps per mini-batch, by schedule."""
LIMIT_S = 300.0
LAYOUT: dict[str, str] = {
    "efficiency": r"efficiency_(2bw|pipedream)",
    "c": r"c_(2bw|pipedream)",
    "efficiency / c": r"of_c_(2bw|pipedream)",
    "nothing draining": r"of_c_(2bw|pipedream)_steady",
    "bare pair's": r"pair_of_c_(2bw|pipedream)",
    "bare pair / ours": r"of_pair_(2bw|pipedream)",
    "daemons' share": r"daemons_(2bw|pipedream)",
}
TARGETS: dict[str, str] = {r"of_c_(2bw|pipedream)": ">= 0.96"}


class Settings(NamedTuple):
    """How much is measured; an epoch is ten mini-batches, and the first one warms up."""

    depth: int = 8
    context: int = 128
    epochs: int = 3
    rounds: int = 3
    local: bool = False


QUICK = Settings(depth=4, epochs=2, rounds=1)


class Handicap(nn.Module):
    """Slows a stage down by so many seconds in its forward and as many in its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Later.apply(x, self.seconds, self.seconds)


def model(depth: int, handicap_s: float = 0.0) -> tuple[nn.Sequential, str]:
    """Equal blocks, (b, context, width) in and out, and the name of the child that begins the second stage."""
    torch.manual_seed(0)
    slow = [Handicap(handicap_s)] if handicap_s else []
    halves = [[*(Block(WIDTH, HEADS) for _ in range(depth // 2)), *slow] for _ in range(2)]
    return nn.Sequential(*halves[0], *halves[1]), str(len(halves[0]))


def samples(context: int) -> TensorDataset:
    """An epoch."""
    drawn = torch.Generator().manual_seed(1)
    shape = (MICROBATCHES * MICROBATCH_SIZE * MINIBATCHES, context, WIDTH)
    return TensorDataset(torch.randn(shape, generator=drawn), torch.randn(shape, generator=drawn))


def half(depth: int, which: int) -> nn.Sequential:
    """Of the model, the first or the second."""
    net, second = model(depth)
    return nn.Sequential(*list(net)[: int(second)] if which == 0 else list(net)[int(second) :])


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=1e-3, momentum=0.9)


# One process.


def _alone(settings: Settings, updates: int, barrier: Any, file: str) -> None:
    """Plain PyTorch; writes the seconds of every mini-batch after the warm-up."""
    torch.set_num_threads(1)
    net, _ = model(settings.depth)
    stepper = optimizer(list(net.named_parameters()))
    minibatch = MICROBATCHES * MICROBATCH_SIZE
    inputs, targets = samples(settings.context).tensors
    every = MICROBATCHES // updates
    seconds = []
    for epoch in range(settings.epochs):
        if epoch == 1:
            barrier.wait(LIMIT_S)  # both copies are warm, and from here on at work together
        for start in range(0, len(inputs), minibatch):
            begin_s = time.perf_counter()
            x, y = (t[start : start + minibatch].split(MICROBATCH_SIZE) for t in (inputs, targets))
            for k in range(MICROBATCHES):
                (functional.mse_loss(net(x[k]), y[k]) / every).backward()
                if (k + 1) % every == 0:
                    stepper.step()
                    stepper.zero_grad()
            seconds.append(time.perf_counter() - begin_s)
    Path(file).write_text(json.dumps(seconds[MINIBATCHES:]))


def copies_s(settings: Settings, updates: int, count: int) -> list[float]:
    """Seconds of every mini-batch of so many copies at once, each a process of its own."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count)
    with tempfile.TemporaryDirectory(prefix="bench-asynchronous-") as folder:
        files = [Path(folder) / f"{copy}.json" for copy in range(count)]
        processes = [
            context.Process(target=_alone, args=(settings, updates, barrier, str(file)), daemon=True) for file in files
        ]
        run_processes(processes, LIMIT_S)
        return [s for file in files for s in json.loads(file.read_text())]


def node_s() -> float:
    """Processor seconds so far of the Ray node that this process started."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            ours = b"/ray/" in (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if ours and int(fields[1]) == os.getpid():
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def bare_s(settings: Settings, updates: int) -> list[float]:
    """Seconds per mini-batch of every epoch of a bare pair."""
    shape = (MICROBATCHES * MINIBATCHES, MICROBATCH_SIZE, settings.context, WIDTH)
    inputs, targets = (t.view(shape) for t in samples(settings.context).tensors)
    task = Half(
        partial(half, settings.depth), optimizer, functional.mse_loss, inputs, targets, MICROBATCHES,
        MICROBATCHES // updates, settings.epochs,
    )  # fmt: skip
    return pair_s(task, shape[1:])


# Ours.


class Trial(NamedTuple):
    """Seconds per mini-batch: of each epoch as a whole, and of single ones away from filling and draining."""

    whole_s: list[float]
    steady_s: list[float]


def run_ours(settings: Settings, schedule: str, handicap_s: float = 0.0) -> Trial:
    """Through the public interface; the time of an epoch is from the end of the one before to its own end."""
    import ray.train

    net, second = model(settings.depth, handicap_s)
    minibatch = MICROBATCHES * MICROBATCH_SIZE
    with tempfile.TemporaryDirectory(prefix="bench-asynchronous-") as folder:
        result = raypipe.PipelineTrainer(
            net,
            loss_fn=functional.mse_loss,
            optimizer=optimizer,
            train_data=samples(settings.context),
            pipeline=raypipe.PipelineConfig(
                num_stages=2,
                minibatch_size=minibatch,
                num_microbatches=MICROBATCHES,
                partitioner=(second,),
                schedule=schedule,
            ),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(name="bench", storage_path=folder),
        ).fit(num_epochs=settings.epochs, local=settings.local, progress=False)
    if not all(math.isfinite(record.loss) for record in result.records):
        raise RuntimeError(f"{schedule}: the loss is no number")
    return timed([record.seconds for record in result.records])


def timed(seconds: list[float]) -> Trial:
    """From the seconds of every mini-batch of a run; the first epoch is left out."""
    epochs = [seconds[at : at + MINIBATCHES] for at in range(MINIBATCHES, len(seconds), MINIBATCHES)]
    if not epochs or any(len(epoch) != MINIBATCHES for epoch in epochs):
        raise RuntimeError(f"{len(seconds)} mini-batches are not whole epochs of {MINIBATCHES} after a first one")
    return Trial(
        [sum(epoch) / MINIBATCHES for epoch in epochs], [s for epoch in epochs for s in epoch[2 : MINIBATCHES - 1]]
    )


# Figures.


class Measured(NamedTuple):
    """Everything of one schedule, over all rounds."""

    alone_s: list[float]
    both_s: list[float]
    whole_s: list[float]
    steady_s: list[float]
    slowed_s: list[float]
    node_share: list[float]
    pair_s: list[float]


def figures_of(schedule: str, found: Measured) -> dict[str, float]:
    """Efficiencies and c of a schedule."""
    alone_s = median(found.alone_s)
    c = alone_s / median(found.both_s)
    efficiency, steady, pair = (alone_s / (2 * median(s)) for s in (found.whole_s, found.steady_s, found.pair_s))
    return {
        f"efficiency_{schedule}": efficiency,
        f"c_{schedule}": c,
        f"of_c_{schedule}": efficiency / c,
        f"of_c_{schedule}_steady": steady / c,
        f"pair_of_c_{schedule}": pair / c,
        f"of_pair_{schedule}": efficiency / pair,
        f"daemons_{schedule}": median(found.node_share),
    }


def handicap_predicted(found: Measured, handicap_s: float) -> float:
    """The efficiency of our handicapped runs by arithmetic: every micro-batch, and the one time to fill, takes more."""
    more_s = 2 * handicap_s * (MICROBATCHES * MINIBATCHES + 1) / MINIBATCHES
    return median(found.alone_s) / (2 * (median(found.whole_s) + more_s))


def measure(settings: Settings, handicap_s: float) -> dict[str, Measured]:
    """Alone, two at once and ours in turn, round by round."""
    found = {schedule: Measured([], [], [], [], [], [], []) for schedule in UPDATES}
    for _ in range(settings.rounds):
        for schedule, updates in UPDATES.items():
            kept = found[schedule]
            kept.alone_s.extend(copies_s(settings, updates, 1))
            begin_s, used_s = time.monotonic(), node_s()
            kept.both_s.extend(copies_s(settings, updates, 2))
            kept.node_share.append((node_s() - used_s) / (time.monotonic() - begin_s) / 2)
            kept.pair_s.extend(bare_s(settings, updates))
            trial = run_ours(settings, schedule)
            kept.whole_s.extend(trial.whole_s)
            kept.steady_s.extend(trial.steady_s)
            if handicap_s:
                kept.slowed_s.extend(run_ours(settings, schedule, handicap_s).whole_s)
            numbers = tuple(map(median, (kept.alone_s, kept.both_s, kept.pair_s, kept.whole_s)))
            print(
                f"{schedule}: one, both, bare pair, ours {[f'{s * 1e3:.1f} ms' for s in numbers]}; {machine_line()}",
                flush=True,
            )
    return found


def main() -> int:
    """1 when a handicap did not show as predicted, else 0."""
    asked = common.arguments(__doc__, handicap=True)
    settings = QUICK if asked.quick else Settings()
    torch.set_num_threads(1)
    with connected(2, {"CPU": 1}):
        measured = measure(settings, asked.handicap)
    figures: dict[str, float] = {}
    rows, seen = [], True
    for schedule, found in measured.items():
        figures |= figures_of(schedule, found)
        times_ms = [median(s) * 1e3 for s in (found.alone_s, found.both_s, found.pair_s, found.whole_s)]
        names = ("efficiency", "c", "of_c", "pair_of_c", "of_pair")
        shown = [figures[f"{name}_{schedule}"] for name in names] + [figures[f"of_c_{schedule}_steady"]]
        rows.append([schedule, *times_ms, *shown])
        if asked.handicap:
            slowed = median(found.alone_s) / (2 * median(found.slowed_s))
            moves_by = handicap_predicted(found, asked.handicap) - shown[0]
            seen = common.handicap_seen(schedule, asked.handicap, shown[0], slowed, moves_by) and seen
    columns = (
        "schedule", "one ms", "two at once", "bare pair", "ours", "efficiency", "c", "of c", "pair of c", "of pair",
        "of c, steady",
    )  # fmt: skip
    print("\n" + common.table(f"per mini-batch; {machine_line()}", columns, rows))
    raw = {schedule: found._asdict() for schedule, found in measured.items()}
    common.finish("bench_asynchronous", figures, raw, asked)
    return 0 if seen else 1

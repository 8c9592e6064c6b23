"""Cost of our runtime: measured step / ideal step on emulated accelerators, and torch's own runtime beside it.

A block sleeps 10 ms forward and 20 ms backward, like a process that waits for its accelerator, and outputs 256 KB per
micro-batch. With one block per stage an ideal step takes (M + S - 1)(f + b), where f and b are medians of a single
process that calls time.sleep just before. Two other ratios: to a single process that runs these blocks one after the
other in plain PyTorch (``_modules``), and to the nominal 30 ms (``_nominal``).

    ours    PipelineTrainer.fit on Ray: run folder, metrics, progress line and optimizer step included
    torch   torch.distributed.pipelining, 1F1B over gloo on the loopback, optimizer step included

Below the ratios, one traced step of each of our runs shows the rest of its time. With --handicap, our runs
repeat with that much more sleep in every forward and backward: the ratio must change by the computed amount.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing.connection
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from torch import nn
from torch.utils.data import TensorDataset

from jobs.bench.runtime.gaps import StageGaps, gap_table, stage_gaps
from jobs.bench.runtime.ideal import BACKWARD_S, FORWARD_S, blocks, ideal_seconds, lone_blocks_s, lone_sleeps_s
from jobs.lib.common import Bench, machine_line, median
from jobs.lib.emulated import loss_of

WARM_UP_STEPS = 3
LEARNING_RATE = 0.01
TORCH_TIMEOUT_S = 120.0
_ALL = ((2, 8), (4, 16), (8, 32))
TRANSPORTS = ("collective", "object_store")
"""Measured with the automatic schedule; every other candidate of ours goes over "tcp"."""


@dataclass(frozen=True)
class Settings:
    """Extent of a measurement; a configuration is (stages, micro-batches)."""

    configurations: tuple[tuple[int, int], ...] = _ALL
    torch_configurations: tuple[tuple[int, int], ...] = _ALL
    candidates: tuple[str, ...] = ("auto", "1f1b")
    transport_configurations: tuple[tuple[int, int], ...] = _ALL[-1:]
    num_steps: int = WARM_UP_STEPS + 20
    rounds: int = 2


BENCH = Bench(
    "bench_runtime",
    __doc__,
    settings=Settings(),
    quick=Settings(_ALL[:2], _ALL[:1], ("auto",), (), WARM_UP_STEPS + 6, rounds=1),
    layout={
        "of bare sleeps": r"overhead_(\w*s\d+_m\d+)",
        "of the lone modules": r"overhead_(\w*s\d+_m\d+)_modules",
        "of the nominal seconds": r"overhead_(\w*s\d+_m\d+)_nominal",
        "torch, of bare sleeps": r"torch_overhead_(s\d+_m\d+)",
        "torch, of the lone modules": r"torch_overhead_(s\d+_m\d+)_modules",
        "torch, of the nominal seconds": r"torch_overhead_(s\d+_m\d+)_nominal",
    },
    targets={r"overhead_s\d+_m\d+": "<= 1.03"},
    handicap=True,
)


class Trial(NamedTuple):
    """One run: seconds of the steps after the warm-up, the first weight at the end, one traced step by stage."""

    step_s: list[float]
    weight: float
    gaps: dict[int, StageGaps]


def run_ours(num_stages: int, num_microbatches: int, candidate: str, num_steps: int, handicap_s: float) -> Trial:
    """Run through the public interface; a candidate is a schedule, or a transport with the automatic one."""
    import ray.train

    import raypipe

    count = num_microbatches * num_steps
    with tempfile.TemporaryDirectory(prefix="bench-runtime-") as folder:
        result = raypipe.PipelineTrainer(
            nn.Sequential(*blocks(num_stages, handicap_s)),
            loss_fn=loss_of,
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=LEARNING_RATE),
            train_data=TensorDataset(torch.ones(count, 1), torch.full((count, 1), 2.0)),
            pipeline=raypipe.PipelineConfig(
                num_stages=num_stages,
                minibatch_size=num_microbatches,
                num_microbatches=num_microbatches,
                schedule="auto" if candidate in TRANSPORTS else candidate,
                transport=candidate if candidate in TRANSPORTS else "tcp",
            ),
            # Stages that sleep share processors, so that a small cluster can run many of them.
            scaling_config=ray.train.ScalingConfig(num_workers=num_stages, resources_per_worker={"CPU": 0.1}),
            run_config=ray.train.RunConfig(name="bench", storage_path=folder),
        ).fit(num_steps=num_steps)
        weight = raypipe.load_state_dict(result.checkpoint)["0.weight"].item()
        rows = pq.read_table(Path(result.path) / "timeline" / "spans.parquet").to_pylist()
    gaps = stage_gaps(row for row in rows if row["source"] == "measured")
    return Trial([r.seconds for r in result.records[WARM_UP_STEPS:]], weight, gaps)


def run_torch(num_stages: int, num_microbatches: int, num_steps: int) -> Trial:
    """Run torch.distributed.pipelining once, one process per stage."""
    context = multiprocessing.get_context("spawn")
    limit_s = TORCH_TIMEOUT_S + 10 * num_steps * ideal_seconds(num_stages, num_microbatches, FORWARD_S, BACKWARD_S)
    deadline_s = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="bench-runtime-") as folder:
        work = (num_stages, num_microbatches, num_steps, folder)
        stages = [context.Process(target=_torch_stage, args=(rank, *work)) for rank in range(num_stages)]
        try:
            for stage in stages:
                stage.start()
            while any(stage.exitcode is None for stage in stages) and not any(stage.exitcode for stage in stages):
                multiprocessing.connection.wait([s.sentinel for s in stages if s.exitcode is None], timeout=1)
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"torch's stages did not end within {limit_s:.0f} s")
            if any(stage.exitcode for stage in stages):
                raise RuntimeError(f"torch's stages ended with {[stage.exitcode for stage in stages]}")
            files = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(num_stages)]
        finally:
            for stage in stages:
                if stage.pid is not None:
                    stage.kill()
                    stage.join(10)
    # A step ends when its last stage does, as in our records; all processes read the same clock.
    ends_s = [max(at) for at in zip(*(file["ends_s"] for file in files), strict=True)]
    seconds = [after - before for before, after in itertools.pairwise(ends_s)]
    return Trial(seconds[WARM_UP_STEPS - 1 :], files[0]["weight"], {})


def _torch_stage(rank: int, num_stages: int, num_microbatches: int, num_steps: int, folder: str) -> None:
    """Run one process of torch's pipeline. Ranks meet in a file and gloo chooses its ports, so no port can be taken."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    limit = timedelta(seconds=TORCH_TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{folder}/store", limit, num_stages, rank)
    try:
        block = blocks(num_stages)[rank]
        optimizer = torch.optim.SGD(block.parameters(), lr=LEARNING_RATE)
        stage = PipelineStage(block, rank, num_stages, torch.device("cpu"))
        schedule = Schedule1F1B(stage, num_microbatches, loss_of, scale_grads=False)
        inputs = [torch.ones(num_microbatches, 1)] if rank == 0 else []
        target = torch.full((num_microbatches, 1), 2.0)
        ends_s: list[float] = []
        losses: list[torch.Tensor] = []
        for _ in range(num_steps):
            losses.clear()
            last: dict[str, Any] = {"target": target, "losses": losses} if rank == num_stages - 1 else {}
            schedule.step(*inputs, **last, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            ends_s.append(time.monotonic())
        (Path(folder) / f"{rank}.json").write_text(json.dumps({"ends_s": ends_s, "weight": block.weight.item()}))
        dist.barrier()  # no rank leaves while another one still sends to it
    finally:
        dist.destroy_process_group()


class Measured(NamedTuple):
    """All trials of one configuration by candidate, and what a lone process took: the blocks, and bare sleeps."""

    shape: tuple[int, int]
    trials: dict[str, list[Trial]]
    forward_s: list[float]
    backward_s: list[float]
    sleep_forward_s: list[float]
    sleep_backward_s: list[float]

    @property
    def costs_s(self) -> tuple[float, float]:
        """f and b."""
        return median(self.forward_s), median(self.backward_s)

    def step_s(self, candidate: str) -> float:
        """Compute the median over the steps of all trials."""
        return median(s for trial in self.trials[candidate] for s in trial.step_s)

    def ratio(self, candidate: str) -> float:
        """Compute the median step over the ideal one."""
        return self.step_s(candidate) / ideal_seconds(*self.shape, *self.costs_s)

    def sleep_ratio(self, candidate: str) -> float:
        """Compute the median step over the ideal of stages that only sleep."""
        sleeps = median(self.sleep_forward_s), median(self.sleep_backward_s)
        return self.step_s(candidate) / ideal_seconds(*self.shape, *sleeps)

    def nominal_ratio(self, candidate: str) -> float:
        return self.step_s(candidate) / ideal_seconds(*self.shape, FORWARD_S, BACKWARD_S)


def measure(shape: tuple[int, int], settings: Settings, handicap_s: float) -> Measured:
    """Measure the candidates in turn, each after the lone process has slept again."""
    measured = Measured(shape, {}, [], [], [], [])
    candidates = [*settings.candidates[:1], *(["torch"] if shape in settings.torch_configurations else [])]
    candidates += [*(["handicapped"] if handicap_s else []), *settings.candidates[1:]]
    candidates += TRANSPORTS if shape in settings.transport_configurations else ()
    for candidate in candidates * settings.rounds:
        lone = (*lone_blocks_s(shape[0]), *lone_sleeps_s((FORWARD_S, BACKWARD_S), 20))
        for kept, took in zip(measured[2:], lone, strict=True):
            kept.extend(took)
        begin_s = time.monotonic()
        if candidate == "torch":
            trial = run_torch(*shape, settings.num_steps)
        elif candidate == "handicapped":
            trial = run_ours(*shape, "auto", settings.num_steps, handicap_s)
        else:
            trial = run_ours(*shape, candidate, settings.num_steps, 0.0)
        measured.trials.setdefault(candidate, []).append(trial)
        print(f"S={shape[0]} M={shape[1]} {candidate}: median step {median(trial.step_s) * 1e3:.1f} ms", end=", ")
        print(f"{time.monotonic() - begin_s:.0f} s in all; {machine_line()}", flush=True)
        expected = -LEARNING_RATE * shape[1] * settings.num_steps
        if abs(trial.weight - expected) > 1e-4 * abs(expected):
            raise RuntimeError(f"{candidate} trained to {trial.weight}, every micro-batch of every step to {expected}")
    return measured


def figures_of(measured: Measured) -> dict[str, float]:
    """Compute figures such as overhead_s2_m8."""
    names = {"auto": "overhead", "torch": "torch_overhead", "handicapped": "handicapped_overhead"}
    found = {}
    for candidate in measured.trials:
        name = "{}_s{}_m{}".format(names.get(candidate, f"overhead_{candidate}"), *measured.shape)
        found[name] = measured.sleep_ratio(candidate)
        found[f"{name}_modules"] = measured.ratio(candidate)
        found[f"{name}_nominal"] = measured.nominal_ratio(candidate)
    return found


def raw_of(measured: Measured) -> dict[str, Any]:
    """Return everything that the figures are computed from."""
    trials = {
        candidate: [{**trial._asdict(), "gaps": {s: g._asdict() for s, g in trial.gaps.items()}} for trial in found]
        for candidate, found in measured.trials.items()
    }
    alone = {name: getattr(measured, name) for name in Measured._fields[2:]}
    return {"lone": alone, "trials": trials}


def main() -> int:
    """Return 1 if a handicap did not show as predicted, else 0."""
    run = BENCH.begin()
    torch.set_num_threads(1)
    settings: Settings = run.settings
    handicap_s: float = run.options.handicap
    run.raw |= {"nominal_s": [FORWARD_S, BACKWARD_S], "handicap_s": handicap_s}
    rows, seen = [], True
    for shape in settings.configurations:
        measured = measure(shape, settings, handicap_s)
        run.figures |= figures_of(measured)
        run.raw["s{}_m{}".format(*shape)] = raw_of(measured)
        for name in measured.trials:
            ideal_ms = ideal_seconds(*shape, *measured.costs_s) * 1e3
            ratios = (measured.ratio(name), measured.sleep_ratio(name), measured.nominal_ratio(name))
            rows.append([name, *shape, ideal_ms, measured.step_s(name) * 1e3, *ratios])
        gaps = {name: [trial.gaps for trial in trials if trial.gaps] for name, trials in measured.trials.items()}
        print("\n" + gap_table(gaps, *measured.costs_s) + "\n")
        if handicap_s:
            before, after = measured.ratio("auto"), measured.ratio("handicapped")
            moves_by = 2 * handicap_s / sum(measured.costs_s)
            seen = run.handicap_seen(f"S, M = {shape}", before, after, moves_by) and seen
    columns = ("schedule", "S", "M", "ideal ms", "step ms", "ratio", "to sleeps", "to nominal")
    run.table("measured / ideal", columns, rows)
    run.end()
    return 0 if seen else 1

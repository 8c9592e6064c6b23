"""Price of codecs: held-out loss of small models trained through them, less that of training without.

    python jobs/bench/codec_loss --folder FOLDER          every run that ended is a file there, and is not run again
    python jobs/bench/codec_loss --folder FOLDER --kept   measures nothing: the record of the runs that are there

    finetune   GPT-2 of transformers with four layers of width 128 on four stages. Plain PyTorch trains it on source of
               the standard library, then raypipe on the language reference that pydoc shows: other text, same bytes
    wan        twin of Protocol NanoGPT (jobs/bench/wan) on its eight stages: eight layers, but of width 64 instead of
               1024, bytes of source instead of FineWeb, AdamW instead of Muon, 150 steps

Runs of a task and seed differ in codecs only: same weights, same rows in the same order, same dropout, 1F1B on stages
in threads. ``loss_gap_*`` is the mean over seeds, in nats per byte, at equal steps. How many steps reach a target loss
was not measured: jobs/bench/wan takes them from the publication, and only the gap is of this benchmark.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

import raypipe
from jobs.bench.codec_loss.tasks import TASKS, Task
from jobs.lib.common import Bench, BenchRun
from jobs.lib.kept_cells import ONLY_KEPT, OPTION, KeptCells
from jobs.train.lm import warmup_then_cosine

ROWS, MICROBATCHES = 8, 4
STEPS_NOTE = "steps to the target loss are from the publication (jobs/bench/wan); only the gap at equal steps is ours"


@dataclass(frozen=True)
class Settings:
    """Tasks and number of seeds; steps of a run, 0 for those of the task."""

    tasks: tuple[str, ...] = tuple(TASKS)
    seeds: int = 3
    steps: int = 0


BENCH = Bench(
    "bench_codec_loss",
    __doc__,
    settings=Settings(),
    quick=Settings(tasks=("wan",), seeds=1, steps=3),
    layout={
        "held-out loss": r"loss_((?:finetune|wan)_\w+)",
        "gap": r"loss_gap_((?:finetune|wan)_\w+)",
        "standard error": r"loss_gap_error_((?:finetune|wan)_\w+)",
    },
    targets={r"loss_gap_(finetune|wan)_tah4": "<= 0.005"},
    options={
        **OPTION,
        **ONLY_KEPT,
        "--tasks": {"nargs": "+", "choices": tuple(TASKS), "help": "tasks to run; all by default"},
        "--seeds": {"type": int, "help": "number of seeds, 3 by default"},
    },
)


def heldout_loss(task: Task, name: str, seed: int, steps: int) -> float:
    """Train on stages in threads; return the held-out loss in nats, whose messages stay exact."""
    forward, backward = task.codecs[name]
    train, held = task.rows()
    with tempfile.TemporaryDirectory(prefix="codec-loss-") as folder:
        trainer = raypipe.PipelineTrainer(
            task.build(seed),
            loss_fn=task.loss_fn,
            optimizer=lambda named: torch.optim.AdamW(named, lr=task.rate, betas=(0.9, 0.95)),
            lr_scheduler=lambda it: torch.optim.lr_scheduler.LambdaLR(it, partial(warmup_then_cosine, steps=steps)),
            train_data=train,
            eval_data=held,
            pipeline=raypipe.PipelineConfig(
                num_stages=len(task.cuts) + 1, partitioner=task.cuts, schedule="1f1b", minibatch_size=ROWS,
                num_microbatches=MICROBATCHES, max_grad_norm=1.0, codec_forward=forward, codec_backward=backward,
                seed=seed, loss_reduction="mean", profile_budget_s=0.1, retune_interval_steps=0,
            ),
            scaling_config=SimpleNamespace(num_workers=len(task.cuts) + 1, resources_per_worker={"CPU": 0.1}),
            run_config=SimpleNamespace(name="run", storage_path=folder),
        )  # fmt: skip
        result = trainer.fit(num_steps=steps, local=True, progress=False)
    return float(result.metrics["eval_loss"])


def losses_of(run: BenchRun, cells: KeptCells) -> dict[str, dict[str, dict[str, float]]]:
    """Measure {task: {codecs: {seed: held-out loss}}}, seed by seed, so that a table can be made early."""
    losses: dict[str, dict[str, dict[str, float]]] = {}
    for name in run.settings.tasks:
        task = TASKS[name]
        steps = run.settings.steps or task.steps
        by_codec = losses.setdefault(name, {codec: {} for codec in task.codecs})
        for seed in range(run.settings.seeds):
            for codec, found in by_codec.items():
                title = f"{name}-{codec}-{seed}"
                if cells.counts(title):
                    options = {"codecs": task.codecs[codec], "steps": steps, "rate": task.rate}
                    loss = cells.measured(title, options, partial(heldout_loss, task, codec, seed, steps))
                    found[str(seed)] = loss
    return losses


def figures_of(losses: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """Compute mean losses, and means and standard errors of the gaps, over seeds that were trained without codecs."""
    figures = {}
    for task, by_codec in losses.items():
        exact = by_codec["none"]
        for codec, by_seed in by_codec.items():
            gaps = gaps_of(by_seed, exact)
            if not gaps:
                continue
            figures[f"loss_{task}_{codec}"] = statistics.fmean(by_seed[seed] for seed in by_seed if seed in exact)
            if codec != "none":
                figures[f"loss_gap_{task}_{codec}"] = statistics.fmean(gaps)
                if len(gaps) > 1:
                    figures[f"loss_gap_error_{task}_{codec}"] = statistics.stdev(gaps) / len(gaps) ** 0.5
    return figures


def gaps_of(by_seed: dict[str, float], exact: dict[str, float]) -> list[float]:
    """Return the gaps of the seeds that both have."""
    return [loss - exact[seed] for seed, loss in by_seed.items() if seed in exact]


def main() -> int:
    """Train, print a table for each task, record."""
    run = BENCH.begin()
    torch.set_num_threads(1)
    cells = KeptCells(run.options.folder, only_kept=run.options.kept)
    run.raw["losses"] = losses = losses_of(run, cells)
    run.raw["cells"] = cells.kept
    cells.date(run)
    run.figures |= figures_of(losses)
    for task, by_codec in losses.items():
        rows: list[list[Any]] = [
            [codec, statistics.fmean(by_seed.values()), *(f"{gap:+.4f}" for gap in gaps_of(by_seed, by_codec["none"]))]
            for codec, by_seed in by_codec.items()
            if len(gaps_of(by_seed, by_codec["none"])) == run.settings.seeds
        ]
        seeds = [f"gap, seed {seed}" for seed in range(run.settings.seeds)]
        run.table(f"{task}: held-out loss in nats per byte", ("codecs", "loss", *seeds), rows)
    print(STEPS_NOTE)
    run.end()
    return 0

"""What staleness costs: held-out loss and accuracy of every policy of weight versions against exact training.

Four stages, the same model, data and number of updates for every policy; an update is 32 samples everywhere, so that
only the age of the weights differs. That is a mini-batch of four micro-batches, and for policies with an update per
micro-batch a micro-batch:

    flush            exact: every micro-batch meets the newest weights
    2bw              the weights of one update ago, on every stage
    bounded          two versions: one update ago for most micro-batches, and less on later stages
    pipedream        3, 2, 1, 0 updates ago on stages 0, 1, 2, 3
    pipedream_sync   3 updates ago on every stage (vertical sync)
    bf16, int8_bf16  exact weights, but activations in bf16 or int8 and gradients in bf16 between stages

The learning rate of each task and optimizer is the one with which exact training of two other seeds has the least
held-out loss, among a few; no other policy has a say. That rate may lie at the edge of what exact training bears, where
any delay is too much, and people would choose another; so a second table, figures ``own_rate_*``, gives every policy of
old weights the rate that suits itself, chosen in the same way, against exact training with the first.
Two tasks, each trained long enough for exact training to arrive:

    digits   scikit-learn's, accuracy on a third that nobody trained on; exact training must reach 95 %
    text     bytes of the standard library's source, held-out nats per byte; exact training must lose 60 % of its
             excess over the bigram entropy of that text

``accuracy_drop_*`` is in points and ``loss_gap_*`` in nats, both less is better, means over seeds: initial weights
and the order of the data; ``loss_gap_error_*`` is one standard error of that. A run whose loss
stops being a number counts as chance. It runs in threads of this process
(``fit(local=True)``), which is the same arithmetic as on actors.

With --json FILE, every run that has ended is a line of FILE.runs.jsonl: the benchmark goes on where it was cut off.
"""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import raypipe
from jobs.bench.convergence.kept_runs import KeptRuns
from jobs.bench.convergence.tasks import TASKS, Task
from jobs.lib import common
from jobs.lib.common import machine_line
from jobs.lib.processes import end_with_parent
from raypipe.errors import StageError

STAGES, MICROBATCHES, UPDATE_SAMPLES = 4, 4, 32
RUN_LIMIT_S = 1800.0
LAYOUT: dict[str, str] = {
    "accuracy": r"accuracy_((?:digits|text)_flush_\w+)",
    "drop, points": r"accuracy_drop_(\w+)",
    "loss gap": r"loss_gap_((?:digits|text)_\w+)",
    "standard error": r"loss_gap_error_(\w+)",
    "own rate: drop": r"own_rate_accuracy_drop_(\w+)",
    "own rate: loss gap": r"own_rate_loss_gap_((?:digits|text)_\w+)",
    "own rate: standard error": r"own_rate_loss_gap_error_(\w+)",
}
TARGETS: dict[str, str] = {r"accuracy_drop_digits_(2bw|bounded)_sgd": "<= 0.5"}


class Policy(NamedTuple):
    """Fields of PipelineConfig, and how many micro-batches an update has."""

    fields: dict[str, Any]
    every: int = MICROBATCHES


POLICIES = {
    "flush": Policy({"schedule": "1f1b"}),
    "2bw": Policy({"schedule": "2bw"}),
    "bounded": Policy({"schedule": "pipedream", "weight_versions": 2}),
    "pipedream": Policy({"schedule": "pipedream"}, 1),
    "pipedream_sync": Policy({"schedule": "pipedream", "vertical_sync": True}, 1),
    "bf16": Policy({"schedule": "1f1b", "codec_forward": "bf16", "codec_backward": "bf16"}),
    "int8_bf16": Policy({"schedule": "1f1b", "codec_forward": "int8", "codec_backward": "bf16"}),
}
"""By the name in the figures; "flush" is what the others are held against."""
STALE = ("2bw", "bounded", "pipedream", "pipedream_sync")
"""Those that compute with old weights."""
CHOOSING_SEEDS = (100, 101)

OPTIMIZERS: dict[str, Callable[[float], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": lambda lr: lambda named: torch.optim.SGD(named, lr=lr, momentum=0.9),
    "adamw": lambda lr: lambda named: torch.optim.AdamW(named, lr=lr),
}


class Settings(NamedTuple):
    """How much is run."""

    seeds: int = 5
    tasks: tuple[str, ...] = ("digits", "text")
    policies: tuple[str, ...] = tuple(POLICIES)
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    share: float = 1.0


QUICK = Settings(1, ("digits",), ("flush", "2bw"), ("sgd",))
"""One comparison of one seed: shows that everything runs, and little else."""


class Found(NamedTuple):
    """One run: held-out loss in nats and accuracy from 0 to 1; not ``ended`` where the loss stopped being a number."""

    loss: float
    accuracy: float
    ended: bool
    seconds: float


Runs = dict[tuple[str, str, str], list[Found]]
"""By task, optimizer and policy: one for each seed."""
Rates = dict[tuple[str, str, str], float]
"""Learning rates by task, optimizer and policy."""


def decayed(optimizer: torch.optim.Optimizer, num_updates: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Down to nothing in a straight line, so that the last few updates decide little."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: max(0.02, 1 - update / num_updates))


def train(task: Task, policy: Policy, optimizer: str, seed: int, rate: float, share: float = 1.0) -> Found:
    """One run from new weights."""
    begin_s = time.monotonic()
    torch.manual_seed(seed)
    model = task.build()
    samples = UPDATE_SAMPLES * MICROBATCHES // policy.every
    num_updates = int(task.num_updates * share) // MICROBATCHES * MICROBATCHES
    with tempfile.TemporaryDirectory(prefix="bench-convergence-") as folder:
        trainer = raypipe.PipelineTrainer(
            model,
            loss_fn=task.loss_fn,
            optimizer=OPTIMIZERS[optimizer](rate),
            lr_scheduler=partial(decayed, num_updates=num_updates),
            train_data=task.train(),
            pipeline=raypipe.PipelineConfig(
                num_stages=STAGES,
                minibatch_size=samples,
                num_microbatches=MICROBATCHES,
                partitioner=task.cuts,
                seed=seed,
                **policy.fields,
            ),
            run_config=SimpleNamespace(name="run", storage_path=folder),
        )
        try:
            result = trainer.fit(num_steps=num_updates * policy.every // MICROBATCHES, local=True, progress=False)
        except StageError as error:
            if "gradient norm" not in str(error):  # every refusal of what is not finite names it
                raise
            return Found(*task.chance, False, time.monotonic() - begin_s)
        model.load_state_dict(raypipe.load_state_dict(result.checkpoint))
    loss, accuracy = task.evaluate(model)
    return Found(loss, accuracy, True, time.monotonic() - begin_s)


def _run(key: tuple[str, str, str], seed: int, rate: float, share: float) -> Found:
    """In a process of its own."""
    torch.set_num_threads(1)
    task, optimizer, policy = key
    return train(TASKS[task], POLICIES[policy], optimizer, seed, rate, share)


class Bench:
    """Runs in processes of a pool, as many at a time as there are processors; none of them twice.

    Args:
        keep_in: file of runs that have ended, which are not run again.
    """

    def __init__(self, settings: Settings, pool: ProcessPoolExecutor, keep_in: Path | None) -> None:
        self._settings, self._pool = settings, pool
        self._kept: KeptRuns[Found] = KeptRuns(keep_in, Found)
        if len(self._kept):
            print(f"{len(self._kept)} runs are in {keep_in}; delete it to begin anew", flush=True)

    def keys(self, policies: Iterable[str]) -> list[tuple[str, str, str]]:
        """Every task and optimizer with those of these policies that are asked for."""
        asked = [policy for policy in self._settings.policies if policy in policies]
        return list(itertools.product(self._settings.tasks, self._settings.optimizers, asked))

    def choose_rates(self, policies: Iterable[str]) -> Rates:
        """By the held-out loss of each policy itself, with seeds that count for nothing else."""
        keys = self.keys(policies)
        futures = {
            (*key, rate): [self._submit(key, seed, rate) for seed in CHOOSING_SEEDS]
            for key in keys
            for rate in TASKS[key[0]].learning_rates[key[1]]
        }
        losses = {key: statistics.mean(future.result(RUN_LIMIT_S).loss for future in futures[key]) for key in futures}
        found = {}
        for key in keys:
            rates = TASKS[key[0]].learning_rates[key[1]]
            found[key] = min(rates, key=lambda rate: losses[(*key, rate)])
            tried = ", ".join(f"{rate:g}: {losses[(*key, rate)]:.4f}" for rate in rates)
            print(f"{' '.join(key)}: rate {found[key]:g}; held-out loss {tried}", flush=True)
        return found

    def runs(self, rates: Rates) -> Runs:
        """One run for each seed of all these."""
        futures = {key: [self._submit(key, seed, rates[key]) for seed in range(self._settings.seeds)] for key in rates}
        found = {}
        for key, asked in futures.items():
            found[key] = [future.result(RUN_LIMIT_S) for future in asked]
            spent_s = sum(run.seconds for run in found[key])
            print(f"{' '.join(key)}: {spent_s:.0f} process seconds; {machine_line()}", flush=True)
        return found

    def _submit(self, key: tuple[str, str, str], seed: int, rate: float) -> Future[Found]:
        return self._kept.submit(self._pool, _run, key, seed, rate, self._settings.share)


class Measured(NamedTuple):
    """All runs with the rate of exact training, and with each policy's own."""

    runs: Runs
    own: Runs
    rates: Rates


def measure(settings: Settings, keep_in: Path | None = None) -> Measured:
    """Everything."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), spawn, initializer=end_with_parent) as pool:
        bench = Bench(settings, pool, keep_in)
        exact = bench.choose_rates(["flush"])
        runs = bench.runs({key: exact[*key[:2], "flush"] for key in bench.keys(POLICIES)})
        rates = exact | bench.choose_rates(STALE)
        return Measured(runs, bench.runs(rates), rates)


def figures_of(runs: Runs) -> dict[str, float]:
    """Means over seeds of what each policy loses against exact training of the same seed, and what that reached."""
    figures = {}
    for (task, optimizer, policy), found in runs.items():
        key = f"{task}_{policy}_{optimizer}"
        exact = runs[task, optimizer, "flush"]
        if policy == "flush":
            figures[f"accuracy_{key}"] = statistics.mean(run.accuracy for run in found)
            figures[f"loss_{key}"] = statistics.mean(run.loss for run in found)
            continue
        pairs = list(zip(exact, found, strict=True))
        figures[f"accuracy_drop_{key}"] = statistics.mean(100 * (e.accuracy - f.accuracy) for e, f in pairs)
        gaps = [f.loss - e.loss for e, f in pairs]
        figures[f"loss_gap_{key}"] = statistics.mean(gaps)
        if len(gaps) > 1:
            figures[f"loss_gap_error_{key}"] = statistics.stdev(gaps) / len(gaps) ** 0.5
    return figures


def shortfalls(runs: Runs) -> list[str]:
    """Where exact training did not arrive, so that a comparison with it would mean nothing."""
    found = []
    for (name, optimizer, policy), done in runs.items():
        task = TASKS[name]
        reached = statistics.mean(task.arrived(run.loss, run.accuracy) for run in done)
        if policy == "flush" and reached < task.enough:
            found.append(f"{name} with {optimizer}: {task.measure} {reached:.3f}, wanted {task.enough}")
    return found


def rows_of(runs: Runs) -> list[list[Any]]:
    """Table rows: task, optimizer, policy, loss, accuracy, both against exact training, runs that ended."""
    figures, rows = figures_of(runs), []
    for (task, optimizer, policy), found in runs.items():
        key = f"{task}_{policy}_{optimizer}"
        loss, accuracy = (statistics.mean(getattr(run, name) for run in found) for name in ("loss", "accuracy"))
        against = [
            f"{figures[name]:+.3f}" if name in figures else "--" for name in (f"loss_gap_{key}", f"accuracy_drop_{key}")
        ]
        spread = statistics.stdev(100 * run.accuracy for run in found) if len(found) > 1 else 0.0
        ended = f"{sum(run.ended for run in found)} of {len(found)}"
        rows.append([f"{task} {optimizer} {policy}", loss, f"{100 * accuracy:.2f}", f"{spread:.2f}", *against, ended])
    return rows


def _by_name(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    return {" ".join(key): [run._asdict() for run in found] for key, found in runs.items()}


def main() -> int:
    """1 when exact training did not arrive (not with --quick), else 0."""
    asked = common.arguments(__doc__)
    if importlib.util.find_spec("sklearn") is None:
        raise SystemExit("The digits are scikit-learn's: pip install scikit-learn, which the extra 'bench' has.")
    settings = QUICK if asked.quick else Settings()
    keep_in = None if asked.json is None else asked.json.with_name(f"{asked.json.name}.runs.jsonl")
    measured = measure(settings, keep_in)
    columns = ("task, optimizer, policy", "loss", "accuracy %", "spread", "loss gap", "drop, points", "ended")
    for title, runs in (("the rate of exact training", measured.runs), ("each policy's own rate", measured.own)):
        heading = f"{title}: held out, means over {settings.seeds} seeds"
        print("\n" + common.table(heading, columns, rows_of(runs)))
    short = shortfalls(measured.runs)
    for line in short:
        print(f"exact training did not arrive: {line}")
    own = {f"own_rate_{name}": value for name, value in figures_of(measured.own).items() if "_flush_" not in name}
    raw = {
        "runs": _by_name(measured.runs),
        "own": _by_name(measured.own),
        "rates": {" ".join(key): rate for key, rate in measured.rates.items()},
    }
    common.finish("bench_convergence", figures_of(measured.runs) | own, raw, asked)
    return 1 if short and not asked.quick else 0

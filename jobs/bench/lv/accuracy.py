"""What the bounded ring with encoded links costs in held-out accuracy, on both tasks of bench/convergence.

Four stages, four micro-batches and one update per mini-batch, as there. Exact training and the policy each get the
learning rate that suits themselves, chosen by the held-out loss of two seeds that count for nothing else: one for all
rates, and both for the two that were best then. Every cell (task, optimizer) is told, and the worst one named.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jobs.bench.convergence.bench import CHOOSING_SEEDS, POLICIES, RUN_LIMIT_S, Found, Policy, train
from jobs.bench.convergence.kept_runs import KeptRuns
from jobs.bench.convergence.tasks import TASKS
from jobs.bench.lv.policy import LV
from jobs.lib.common import machine_line
from jobs.lib.processes import end_with_parent

__all__ = ["Cells", "figures_of", "measure", "rows_of", "worst_of"]

BOTH = {"exact": POLICIES["flush"], "lv": Policy(LV)}
Cell = tuple[str, str]
"""(task, optimizer)."""


class Cells(NamedTuple):
    """All runs of both, by cell, and the rates that they had."""

    exact: dict[Cell, list[Found]]
    lv: dict[Cell, list[Found]]
    rates: dict[str, float]


def measure(
    tasks: tuple[str, ...], optimizers: tuple[str, ...], seeds: int, share: float, keep_in: Path | None
) -> Cells:
    """Choose the rates and run all seeds, as many at a time as there are processors.

    Args:
        seeds: compared, from 0 on; the same weights and order of data for both.
        share: of each task's updates.
        keep_in: file of runs that have ended, which are not run again; None keeps nothing.
    """
    kept: KeptRuns[Found] = KeptRuns(keep_in, Found)
    spawn = multiprocessing.get_context("spawn")
    found: dict[str, dict[Cell, list[Found]]] = {name: {} for name in BOTH}
    rates: dict[str, float] = {}
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), spawn, initializer=end_with_parent) as pool:

        def asked(name: str, cell: Cell, seed: int, rate: float) -> Future[Found]:
            return kept.submit(pool, _run, name, *cell, seed, rate, share)

        cells = list(itertools.product(BOTH, itertools.product(tasks, optimizers)))
        one, other = CHOOSING_SEEDS
        trials = {
            (name, cell, rate): asked(name, cell, one, rate)
            for name, cell in cells
            for rate in TASKS[cell[0]].learning_rates[cell[1]]
        }
        losses = {key: run.result(RUN_LIMIT_S).loss for key, run in trials.items()}
        best = {
            (name, cell): sorted(TASKS[cell[0]].learning_rates[cell[1]], key=lambda rate: losses[name, cell, rate])[:2]
            for name, cell in cells
        }
        again = {(*key, rate): asked(*key, other, rate) for key, rates in best.items() for rate in rates}
        losses |= {key: (losses[key] + run.result(RUN_LIMIT_S).loss) / 2 for key, run in again.items()}
        for name, cell in cells:
            tried = TASKS[cell[0]].learning_rates[cell[1]]
            rate = min(best[name, cell], key=lambda rate: losses[name, cell, rate])
            rates[" ".join((name, *cell))] = rate
            runs = [asked(name, cell, seed, rate) for seed in range(seeds)]
            found[name][cell] = [run.result(RUN_LIMIT_S) for run in runs]
            shown = ", ".join(f"{rate:g}: {losses[name, cell, rate]:.4f}" for rate in tried)
            print(f"{name} {' '.join(cell)}: rate {rate:g}; held-out loss {shown}; {machine_line()}", flush=True)
    return Cells(found["exact"], found["lv"], rates)


def _run(name: str, task: str, optimizer: str, seed: int, rate: float, share: float) -> Found:
    """In a process of its own."""
    torch.set_num_threads(1)
    return train(TASKS[task], BOTH[name], optimizer, seed, rate, share)


def drops_of(exact: list[Found], lv: list[Found]) -> list[float]:
    """Points of accuracy lost, seed by seed."""
    return [100 * (e.accuracy - f.accuracy) for e, f in zip(exact, lv, strict=True)]


def figures_of(cells: Cells) -> dict[str, float]:
    """Means over seeds in points, with one standard error, and what exact training reached."""
    figures = {}
    for (task, optimizer), exact in cells.exact.items():
        drops = drops_of(exact, cells.lv[task, optimizer])
        figures[f"accuracy_drop_{task}_{optimizer}"] = statistics.mean(drops)
        if len(drops) > 1:
            figures[f"accuracy_drop_error_{task}_{optimizer}"] = statistics.stdev(drops) / len(drops) ** 0.5
        figures[f"accuracy_exact_{task}_{optimizer}"] = statistics.mean(run.accuracy for run in exact)
    return figures


def worst_of(figures: Mapping[str, float], cells: Cells) -> str:
    """The cell that loses most, in words."""
    task, optimizer = max(cells.exact, key=lambda cell: figures[f"accuracy_drop_{cell[0]}_{cell[1]}"])
    return f"worst cell: {task} with {optimizer}, {figures[f'accuracy_drop_{task}_{optimizer}']:+.2f} points"


def rows_of(figures: Mapping[str, float], cells: Cells) -> list[list[Any]]:
    """A row for each cell: accuracy of both, the drop, its standard error, both rates, runs that ended."""
    rows: list[list[Any]] = []
    for (task, optimizer), lv in cells.lv.items():
        key = f"{task}_{optimizer}"
        exact, reached = figures[f"accuracy_exact_{key}"], statistics.mean(run.accuracy for run in lv)
        error = figures.get(f"accuracy_drop_error_{key}")
        rates = [f"{cells.rates[f'{name} {task} {optimizer}']:g}" for name in BOTH]
        ended = f"{sum(run.ended for run in lv)} of {len(lv)}"
        drop = f"{figures[f'accuracy_drop_{key}']:+.2f}"
        shown = "--" if error is None else f"{error:.2f}"
        rows.append([f"{task} {optimizer}", f"{100 * exact:.2f}", f"{100 * reached:.2f}", drop, shown, *rates, ended])
    return rows

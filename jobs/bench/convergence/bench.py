"""Price of stale gradients: held-out loss of weight-version policies against a flush, by optimizer and correction.

    python jobs/bench/convergence --folder FOLDER          every cell that ended is a file there, and is not run again
    python jobs/bench/convergence --folder FOLDER --kept   measures nothing: the record of the cells that are there

Arithmetic in one process and one thread (delayed.py): every policy has the same model, data and number of updates, so
that only the age of the weights differs, and the learning rate, which suits each.

    flush       gradients of the newest weights
    2bw         weights of one update ago on every stage (four stages or any other number)
    pipedream   eight stages; weights of 7, 6, ..., 0 updates ago

    sgd         momentum 0.9
    adamw       betas 0.9, 0.999
    nadam       betas 0.99, 0.999, decoupled weight decay (Ajanthan et al., arXiv:2505.01099)
    muon        Muon (muon.py) for the matrices between the first and the last part, AdamW for the rest

    predict     gradients at w + d (w - w before the last update), for weights w that are d updates old
    discount    rate / d ** (1 - min(t / K, 1)) for update t; K is a quarter of the run; nothing changes where d <= 1
    momentum    nadam with 0.9 + 0.09 d / 8 as its first beta on a stage that is d updates late

Learning rates are of 1, 2 and 5 times powers of ten. That of the flush has the least held-out loss for two other seeds;
rates are tried until the best is not at the edge. That of a policy is the flush's, lowered while its own loss for the
same two seeds falls. Rates warm up for a twentieth of a run and then fall linearly. Tasks: images of digits
(scikit-learn), bytes of the standard library's source with a small transformer ("text") and a wider one ("gpt").

``own_rate_loss_gap_*`` is the mean over seeds of the held-out loss in nats minus that of the flush with the same seed;
less is better. A run that diverges counts with the loss of a uniform prediction.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from jobs.bench.convergence.delayed import train
from jobs.bench.convergence.muon import BatchedMuon
from jobs.bench.convergence.tasks import PARTS, TASKS, Task
from jobs.lib.common import Bench, BenchRun
from jobs.lib.kept_cells import ONLY_KEPT, OPTION, KeptCells

POLICIES: dict[str, tuple[int, ...]] = {
    "flush": (0,) * PARTS,
    "2bw": (1,) * PARTS,
    "pipedream": tuple(range(PARTS - 1, -1, -1)),
}
"""Updates by which the gradients of every part are late."""
OPTIMIZERS = ("adamw", "nadam", "muon", "sgd")
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "flush": ("none",),
    "2bw": ("none", "predict"),
    "pipedream": ("none", "predict", "discount", "momentum"),
}
USED_BY = {"discount": ("sgd", "adamw"), "momentum": ("nadam",)}
"""Optimizers with which a correction is tried; all if it is not listed."""
CHOOSING_SEEDS = (100, 101)
LEAST_FACTOR = 0.02
DIGITS = (1, 2, 5)


@dataclass(frozen=True)
class Settings:
    """Number of seeds, names of tasks and optimizers, and whether rates are chosen (else the first is taken)."""

    seeds: int = 5
    tasks: tuple[str, ...] = ("digits", "text", "gpt")
    optimizers: tuple[str, ...] = OPTIMIZERS
    choose: bool = True


BENCH = Bench(
    "bench_convergence",
    __doc__,
    settings=Settings(),
    quick=Settings(seeds=1, tasks=("digits",), optimizers=("adamw",), choose=False),
    layout={
        "flush: loss": r"loss_((?:digits|text|gpt)_flush_\w+)",
        "loss gap": r"own_rate_loss_gap_((?:digits|text|gpt)_\w+)",
        "standard error": r"own_rate_loss_gap_error_(\w+)",
    },
    targets={r"worst_of_best_gap_2bw": "<= 0.02", r"worst_of_best_gap_pipedream": "<= 0.05"},
    options={
        **OPTION,
        **ONLY_KEPT,
        "--tasks": {"nargs": "+", "choices": tuple(TASKS), "help": "tasks to run; all by default"},
        "--optimizers": {"nargs": "+", "choices": OPTIMIZERS, "help": "optimizers to run; all by default"},
        "--seeds": {"type": int, "help": "number of seeds, 5 by default"},
    },
)


class Kind(NamedTuple):
    """Runs that differ in seed and rate only."""

    task: str
    policy: str
    optimizer: str
    correction: str


Runs = dict[Kind, dict[int, float]]
"""Held-out losses by kind and seed."""


def optimizers_of(
    name: str, model: nn.Sequential, rate: float, delays: Sequence[int], correction: str
) -> list[torch.optim.Optimizer]:
    """Make the optimizers of a run; every group has the number of its part as ``stage``."""
    groups = []
    for stage, part in enumerate(model):
        group: dict[str, Any] = {"params": list(part.parameters()), "stage": stage}
        if correction == "momentum":
            group["betas"] = (0.9 + 0.09 * delays[stage] / PARTS, 0.999)
        groups.append(group)
    if name == "sgd":
        return [torch.optim.SGD(groups, lr=rate, momentum=0.9, foreach=True)]
    if name == "adamw":
        return [torch.optim.AdamW(groups, lr=rate, fused=True)]
    if name == "nadam":
        return [
            torch.optim.NAdam(
                groups, lr=rate, betas=(0.99, 0.999), weight_decay=0.01, decoupled_weight_decay=True, foreach=True
            )
        ]
    inner = {id(p) for part in list(model)[1:-1] for p in part.parameters() if p.ndim == 2}
    halves: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for group in groups:
        for half, chosen in zip(halves, (True, False), strict=True):
            half.append({**group, "params": [p for p in group["params"] if (id(p) in inner) is chosen]})
    matrices = [group for group in halves[0] if group["params"]]
    return [
        BatchedMuon(matrices, rate),
        torch.optim.AdamW(halves[1], lr=rate, fused=True),
    ]


def run_cell(kind: Kind, rate: float, seed: int) -> dict[str, float]:
    """Train, and compute the held-out loss in nats."""
    task, delays = TASKS[kind.task], POLICIES[kind.policy]
    torch.manual_seed(seed)
    model = task.build()
    steppers = optimizers_of(kind.optimizer, model, rate, delays, kind.correction)
    losses = train(
        model,
        [[part] for part in model],
        delays,
        task.batches(seed),
        loss_fn=task.loss_fn,
        steppers=steppers,
        rate=lambda update: rate_factor(update, task.num_updates),
        correction=kind.correction,
        fades_after=task.num_updates // 4,
    )
    last = statistics.mean(losses[-20:])
    return {"loss": task.heldout_loss(model), "train_loss": min(last, task.chance) if math.isfinite(last) else 99.0}


def rate_factor(update: int, num_updates: int) -> float:
    """Warm up for a twentieth of the updates, then fall linearly."""
    return min((update + 1) / (num_updates // 20), max(LEAST_FACTOR, 1 - update / num_updates))


class Study:
    """All cells of a run, in the order in which they are measured.

    Attributes:
        runs: losses with the rate that suits each policy, optimizer and correction, by kind and seed.
        choosing: losses of the same kinds and rates with CHOOSING_SEEDS.
        losses: losses of all cells by title.
    """

    def __init__(self, settings: Settings, cells: KeptCells) -> None:
        self._settings, self._cells = settings, cells
        self.runs: Runs = {}
        self.choosing: Runs = {}
        self.losses: dict[str, float] = {}

    def measure(self) -> None:
        """Choose rates and run all cells, task by task and seed by seed, so that a table can be made early."""
        for task in self._settings.tasks:
            rates: dict[Kind, float] = {}
            for optimizer in self._settings.optimizers:
                for kind in kinds(task, optimizer):
                    exact = rates.get(kind._replace(policy="flush", correction="none"))
                    rate = self._best_rate(kind, TASKS[task].rates[optimizer]) if exact is None else exact
                    if exact is not None and self._settings.choose:
                        rate = self._lower_rate(kind, exact)
                    if rate is None:
                        break
                    rates[kind] = rate
            for seed, kind in itertools.product(range(self._settings.seeds), rates):
                self._run(self.runs, kind, rates[kind], seed)
            for seed, kind in itertools.product(CHOOSING_SEEDS if self._settings.choose else (), rates):
                self._run(self.choosing, kind, rates[kind], seed)  # measured already

    def _run(self, runs: Runs, kind: Kind, rate: float, seed: int) -> None:
        if (loss := self._loss(kind, rate, seed)) is not None:
            runs.setdefault(kind, {})[seed] = loss

    def _loss(self, kind: Kind, rate: float, seed: int) -> float | None:
        """Return the held-out loss of a cell; None if it is not kept and nothing may be measured."""
        title = f"{'-'.join(kind)}-{rate:g}-{seed}"
        if title in self.losses:
            return self.losses[title]
        if not self._cells.counts(title):
            return None
        task = TASKS[kind.task]
        options = {**kind._asdict(), "rate": rate, "seed": seed, "updates": task.num_updates, "batch": task.batch}
        found = self._cells.measured(title, options, lambda: run_cell(kind, rate, seed))
        self.losses[title] = found["loss"]
        return float(found["loss"])

    def _mean_loss(self, kind: Kind, rate: float) -> float | None:
        """Return the mean held-out loss over CHOOSING_SEEDS; None if cells are missing."""
        losses = [self._loss(kind, rate, seed) for seed in CHOOSING_SEEDS]
        known = [loss for loss in losses if loss is not None]
        return statistics.mean(known) if len(known) == len(losses) else None

    def _best_rate(self, kind: Kind, first: Sequence[float]) -> float | None:
        """Find the rate with the least held-out loss; further rates are tried while the best is at the edge."""
        if not self._settings.choose:
            return first[0]
        rates, found = list(first), dict[float, float]()
        while True:
            for rate in rates:
                if rate not in found:
                    loss = self._mean_loss(kind, rate)
                    if loss is None:
                        return None
                    found[rate] = loss
            best = min(found, key=found.__getitem__)
            if best not in (rates[0], rates[-1]):
                print(f"{' '.join(kind)}: rate {best:g} of " + ", ".join(f"{r:g}: {found[r]:.4f}" for r in rates))
                return best
            if best == rates[0]:
                rates.insert(0, neighbour(best, -1))
            else:
                rates.append(neighbour(best, 1))

    def _lower_rate(self, kind: Kind, rate: float) -> float | None:
        """Lower the rate of the flush while the held-out loss falls; None if cells are missing."""
        loss = self._mean_loss(kind, rate)
        while loss is not None:
            lower = neighbour(rate, -1)
            lower_loss = self._mean_loss(kind, lower)
            if lower_loss is not None and lower_loss > loss:  # equal if both diverged
                return rate
            rate, loss = lower, lower_loss
        return None


def neighbour(rate: float, step: int) -> float:
    """Return the next rate (step 1) or the one before it (-1) in 0.001, 0.002, 0.005, 0.01, ..."""
    power = math.floor(math.log10(rate) + 1e-9)
    tens, digit = divmod(DIGITS.index(round(rate / 10**power)) + step, len(DIGITS))
    return float(f"{DIGITS[digit]}e{power + tens}")


def kinds(task: str, optimizer: str) -> Iterator[Kind]:
    """Yield the kinds of runs of an optimizer, that of the flush first."""
    for policy in POLICIES:
        for correction in CORRECTIONS[policy]:
            if optimizer in USED_BY.get(correction, OPTIMIZERS):
                yield Kind(task, policy, optimizer, correction)


def gaps_of(runs: Runs) -> dict[Kind, list[float]]:
    """Return the gaps to the flush of each kind, one for every seed that both have."""
    found = {}
    for kind, by_seed in runs.items():
        exact = runs.get(kind._replace(policy="flush", correction="none"), {})
        gaps = [loss - exact[seed] for seed, loss in by_seed.items() if seed in exact]
        if gaps and kind.policy != "flush":
            found[kind] = gaps
    return found


def figures_of(runs: Runs, choosing: Runs) -> dict[str, float]:
    """Compute losses of the flush, gaps and standard errors; and of every policy the worst gap of the best choices.

    The best choice of a task is the optimizer and correction with the least gap at its own rate, among optimizers whose
    flush is no worse than that of AdamW, both for the seeds in ``choosing``. Its gap is that for the other seeds.
    """
    exact = {
        (kind.task, kind.optimizer): statistics.mean(by_seed.values())
        for kind, by_seed in runs.items()
        if kind.policy == "flush"
    }
    figures = {f"loss_{task}_flush_{optimizer}": loss for (task, optimizer), loss in exact.items()}
    gaps_by_kind = gaps_of(runs)
    for kind, gaps in gaps_by_kind.items():
        name = "_".join((kind.task, kind.policy, kind.optimizer, *[kind.correction][kind.correction == "none" :]))
        figures[f"own_rate_loss_gap_{name}"] = statistics.mean(gaps)
        if len(gaps) > 1:
            figures[f"own_rate_loss_gap_error_{name}"] = statistics.stdev(gaps) / len(gaps) ** 0.5
    able = {
        (kind.task, kind.optimizer): statistics.mean(by_seed.values())
        for kind, by_seed in choosing.items()
        if kind.policy == "flush"
    }
    by_gap = sorted(gaps_of(choosing).items(), key=lambda item: -statistics.mean(item[1]))
    best = {
        (kind.policy, kind.task): kind
        for kind, _ in by_gap
        if able[kind.task, kind.optimizer] <= able.get((kind.task, "adamw"), math.inf)
    }
    for policy in POLICIES:
        kinds_of = [kind for (one, _), kind in best.items() if one == policy and kind in gaps_by_kind]
        if kinds_of:
            figures[f"worst_of_best_gap_{policy}"] = max(statistics.mean(gaps_by_kind[kind]) for kind in kinds_of)
    return figures


def show(run: BenchRun, runs: Runs) -> None:
    """Print the gaps of all kinds, and the worst."""
    gaps = gaps_of(runs)
    rows = [
        [" ".join(kind), len(of), statistics.mean(of), statistics.stdev(of) / len(of) ** 0.5 if len(of) > 1 else 0.0]
        for kind, of in sorted(gaps.items())
    ]
    columns = ("task, policy, optimizer, correction", "seeds", "gap", "error")
    run.table("gap to the flush in nats, at their own rates", columns, rows)
    if gaps:
        worst = max(gaps, key=lambda kind: statistics.mean(gaps[kind]))
        print(f"worst: {' '.join(worst)}, {statistics.mean(gaps[worst]):+.4f} nats")


def main() -> int:
    """Measure all cells, print the gaps, and record."""
    run = BENCH.begin()
    if importlib.util.find_spec("sklearn") is None:
        raise SystemExit("The digits are scikit-learn's: pip install scikit-learn, which the extra 'bench' has.")
    torch.set_num_threads(1)
    cells = KeptCells(run.options.folder, only_kept=run.options.kept)
    study = Study(run.settings, cells)
    study.measure()
    run.figures |= figures_of(study.runs, study.choosing)
    run.raw["losses"] = study.losses
    run.raw["cells"] = cells.kept
    show(run, study.runs)
    short = shortfalls(run.settings.tasks, run.figures)
    for line in short:
        print(f"a flush did not arrive: {line}")
    cells.date(run)
    run.end()
    return 1 if short and not run.options.quick else 0


def shortfalls(tasks: Sequence[str], figures: dict[str, float]) -> list[str]:
    """List tasks whose flush missed ``Task.enough`` with AdamW, so that a gap to it would mean little."""
    found = []
    for name in tasks:
        task: Task = TASKS[name]
        loss = figures.get(f"loss_{name}_flush_adamw")
        if loss is not None and loss > task.enough():
            found.append(f"{name}: {loss:.3f} nats, wanted {task.enough():.3f}")
    return found

"""Cost of a retune: steps that run another schedule than the step before, against the steps just before and after them.

Stages on Ray actors sleep 10 and 20 ms, and links are free. In place of the controller, a script sets more slack every
few steps. On a free link slack beyond 2 does not change the length of a step, so any difference is the cost of the
change. Every setting is new to the run, so its rows are also built, checked, sent and stored. ``retune_ms_s*`` is the
median, over the steps with a change, of their excess over the median of the steps just before and after;
``others_ms_s*`` is the same for steps without a change. ``same_processes`` is 1 if no stage changed its process.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch

from jobs.lib.common import Bench, median
from jobs.lib.emulated import CPU_SHARE, Block, trainer_of
from raypipe.ir.communication import LinkEstimate
from raypipe.planner.controller import Choice, ControllerConfig, ControllerDecision, StepDone, Verdict
from raypipe.run.controller_thread import ControllerThread
from raypipe.run.journal import Journal
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import assemble
from raypipe.run.requests import Requests
from raypipe.runtime.driver.ray_cluster import connected
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.roster import Terms
from raypipe.runtime.worker.packing import stored

TIMES_S = (0.010, 0.020)
EVERY = 5
"""Steps from one turn to the next."""


@dataclass(frozen=True)
class Settings:
    """Extent of a measurement; a shape is (stages, micro-batches)."""

    shapes: tuple[tuple[int, int], ...] = ((2, 16), (4, 16))
    turns: int = 12
    rounds: int = 3


BENCH = Bench(
    "bench_retune",
    __doc__,
    settings=Settings(),
    quick=Settings(((2, 8),), 4, 1),
    layout={"a turn adds, ms": r"retune_ms_(s\d+)", "no turn, ms": r"others_ms_(s\d+)"},
    targets={r"same_processes": ">= 1"},
)


class Script:
    """Controller that raises the slack every few steps."""

    def __init__(self, setup: ControllerConfig) -> None:
        self.wanted = setup.choice
        self._hops = len(setup.budgets) - 1
        self._slack = 2

    def estimates(self) -> tuple[LinkEstimate, ...]:
        return ()

    def handle(self, event: StepDone) -> list[ControllerDecision]:
        if event.step % EVERY:
            return []
        self._slack = self._slack + 1 if self._slack < self.wanted.num_microbatches else 3
        self.wanted = Choice(self.wanted.spec.as_kind("slack", slack=(self._slack,) * self._hops))
        return [ControllerDecision(event.step, Verdict.SWITCH, "The benchmark turns.", {}, self.wanted)]

    def to_json(self) -> str:
        return "{}"


class Ran(NamedTuple):
    """Measurements of one run.

    Attributes:
        step_s: median seconds of a step.
        turned_s, others_s: seconds that steps with a new schedule, and other steps, took longer than their neighbours.
        same_processes: True if no stage changed its process.
    """

    step_s: float
    turned_s: list[float]
    others_s: list[float]
    same_processes: bool


def optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.01)


def train(shape: tuple[int, int], turns: int) -> Ran:
    """Train once; the first steps, which warm up, are not counted."""
    num_stages, count = shape
    steps = EVERY * (turns + 1)
    blocks = [Block(*TIMES_S, last=index == num_stages - 1) for index in range(num_stages)]
    needs = {"CPU": CPU_SHARE}
    with tempfile.TemporaryDirectory(prefix="bench-retune-") as folder, connected(num_stages, needs):
        trainer = trainer_of(blocks, count, steps, optimizer, folder)
        job = trainer._prepared()
        blueprint = trainer._blueprint(job, steps, local=False)
        spec, assembled = blueprint.spec, assemble(blueprint, job.planned)
        fleet = Fleet(num_stages, Terms(needs))
        try:
            processes = [member["process"] for member in fleet.members]
            fleet.configure(blueprint.setup, assembled.setup, [stored(job.tensors)])
            made = lambda setup, state: ControllerThread(setup, state, Script(setup))  # noqa: E731
            run_loop(LoopSetup(fleet, spec, assembled, Journal(spec.name, str(spec.place)), Requests(), made))
            same = all(Path(f"/proc/{process}").exists() for process in processes)
        finally:
            fleet.stop()
        rows = pq.read_table(Path(folder) / Path(folder).name / "metrics.parquet").to_pylist()
    turned = [row["schedule"] != before["schedule"] for before, row in itertools.pairwise(rows)]
    seconds = [row["seconds"] for row in rows[1:]]
    excess_s: dict[bool, list[float]] = {True: [], False: []}
    for place in range(EVERY, len(seconds) - 2):
        beside = [at for at in range(place - 2, place + 3) if at != place and not turned[at]]
        excess_s[turned[place]].append(seconds[place] - median(seconds[at] for at in beside))
    turned_s, others_s = excess_s[True], excess_s[False]
    if len(turned_s) < turns // 2:
        raise RuntimeError(f"only {len(turned_s)} of {turns} turns were carried out: {json.dumps(rows[-1])}")
    return Ran(median(seconds[EVERY:]), turned_s, others_s, same)


def main() -> int:
    """Measure all shapes, in turn."""
    run = BENCH.begin()
    trials: dict[tuple[int, int], list[Ran]] = {shape: [] for shape in run.settings.shapes}
    for _, shape in run.turns(trials, run.settings.rounds):
        trials[shape].append(train(shape, run.settings.turns))
        run.note(f"{shape}: a turn adds {median(trials[shape][-1].turned_s) * 1e3:.1f} ms")
    rows: list[list[Any]] = []
    for (num_stages, count), of_shape in trials.items():
        turned_ms, others_ms = (
            [s * 1e3 for one in of_shape for s in getattr(one, name)] for name in ("turned_s", "others_s")
        )
        run.figures[f"retune_ms_s{num_stages}"] = median(turned_ms)
        run.figures[f"others_ms_s{num_stages}"] = median(others_ms)
        low, _, high = statistics.quantiles(turned_ms, n=4)
        step_ms = median(one.step_s for one in of_shape) * 1e3
        rows.append([num_stages, count, len(turned_ms), step_ms, median(turned_ms), median(others_ms), low, high])
        run.raw[f"{num_stages}"] = [one._asdict() for one in of_shape]
    run.figures["same_processes"] = float(all(one.same_processes for ones in trials.values() for one in ones))
    columns = ("stages", "micro-batches", "turns", "step, ms", "a turn adds, ms", "no turn", "lower quartile", "upper")
    run.table("turned steps", columns, rows)
    run.end()
    return 0

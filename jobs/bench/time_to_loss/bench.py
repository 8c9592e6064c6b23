"""Time to a fixed loss: asynchronous training (2bw) against 1F1B and "auto", on four emulated devices.

    python jobs/bench/time_to_loss --folder FOLDER    every training that ended is a file there, and is not run again

A byte model, the task "text" of bench/convergence, is trained from the beginning until its held-out loss reaches a
fixed one. Stages are threads that take a device's times; links are free or have a latency (training.py). A step has 8
micro-batches. ``seconds_*`` is the sum of the steps until then, with all that the runtime adds. The held-out loss is
computed afterwards, of copies of the weights after every tenth update. "auto" begins with the schedule that the planner
chose, and changes it while it trains.

All ways have the same model, data, optimizer (Muon beside AdamW), number of updates and fall of the learning rate. The
rates and the correction are those with which Muon had the least held-out loss at the end, for these schedules, in runs
of bench/convergence with its choosing seeds 100 and 101 and 1,000 updates. The fixed loss is that of 1F1B with
seed 100, which no other figure has, after 0.7 of its updates; plain arithmetic finds it before anything is measured.

Losses depend on neither links nor durations: on links a run ends where that with free links reached the loss, and it is
an error if one of its losses is another number, or one of "auto" another than of 1F1B. ``of_simulated_*`` is the
measured step over the simulated step of the schedule, which has no other times than the emulated ones.
``work_share_*`` is the share of emulated forwards and backwards in which the stage computed or waited for a processor.

Without latency a step of 2bw is at most 1.375 times as quick: the bubble of 1F1B is 3/11 of its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from jobs.bench.time_to_loss.training import EVERY, MICROBATCHES, STAGES, Device, Ran, Way, arithmetic, train
from jobs.lib.common import Bench, BenchRun, median
from jobs.lib.kept_cells import ONLY_KEPT, OPTION, KeptCells
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.search import step_of
from raypipe.planner.simulator import Costs

WAYS = {
    "1f1b": Way("1f1b", 0.02),
    "auto": Way("auto", 0.02),
    "2bw": Way("2bw", 0.02, slack=(3, 3, 2), correction="predict"),
}
"""The slack of 2bw lets stage 0 run 8 forwards ahead, as many as two weight versions allow; it changes no loss."""
CHOOSING_SEED = 100
FIXED_AT = 0.7
"""Share of its updates after which 1F1B has the fixed loss, with CHOOSING_SEED."""


@dataclass(frozen=True)
class Settings:
    """Extent of a measurement.

    Attributes:
        updates: updates over which the learning rate falls, after which runs with free links end.
        seeds: number of seeds with free links; "auto" has the losses of 1F1B, and is run with the first only.
        seeds_on_links: number of seeds with a latency.
        forward_ms, backward_ms: emulated time of a micro-batch on a stage.
        latencies_ms: latencies of the links.
    """

    updates: int = 600
    seeds: int = 3
    seeds_on_links: int = 1
    forward_ms: float = 10.0
    backward_ms: float = 20.0
    latencies_ms: tuple[int, ...] = (0, 100)

    def device(self, latency_ms: int) -> Device:
        """Return the emulated times in seconds."""
        return Device(self.forward_ms / 1e3, self.backward_ms / 1e3, latency_ms / 1e3)


BENCH = Bench(
    "bench_time_to_loss",
    __doc__,
    settings=Settings(),
    quick=Settings(updates=20, seeds=1),
    layout={
        "seconds to the loss": r"seconds_(\w+)",
        "1F1B's over them": r"times_1f1b_(\w+)",
        "updates to the loss": r"updates_(\w+)",
        "held-out loss at the end": r"heldout_(\w+)",
        "ms of a step": r"step_ms_(\w+)",
        "of the simulated step": r"of_simulated_(\w+)",
        "share of real work": r"work_share_(\w+)",
    },
    targets={
        r"times_1f1b_2bw_0ms": ">= 1.15",
        r"times_1f1b_2bw_100ms": ">= 1.4",
        r"of_simulated_(1f1b|2bw)_\w+": "0.95 to 1.15",
    },
    options={**OPTION, **ONLY_KEPT, "--seeds": {"type": int, "help": "number of seeds with free links, 3 by default"}},
)


class Cell(NamedTuple):
    """Training to measure."""

    way: str
    latency_ms: int
    seed: int

    @property
    def title(self) -> str:
        return f"{self.way}_{self.latency_ms}ms_{self.seed}"


def cells_of(settings: Settings) -> Iterator[Cell]:
    """Yield the cells in the order in which they are measured; those with free links decide where others end."""
    for latency_ms in settings.latencies_ms:
        for seed in range(settings.seeds_on_links if latency_ms else settings.seeds):
            for way in WAYS:
                if way != "auto" or not seed:
                    yield Cell(way, latency_ms, seed)


def simulated_s(ran: Ran, device: Device) -> float:
    """Simulate the step of the schedule that a run had at its end; without clipping, steps overlap where they can."""
    hops, half_s = STAGES - 1, device.backward_s / 2
    costs = Costs(
        forward_s=(device.forward_s,) * STAGES,
        backward_s=(device.backward_s,) * STAGES,
        backward_input_s=(half_s,) * STAGES,
        backward_weight_s=(half_s,) * STAGES,
        forward_latency_s=(device.latency_s,) * hops,
        backward_latency_s=(device.latency_s,) * hops,
    )
    spec = ScheduleSpec.parse(f"{ran.schedules[-1]}, M={MICROBATCHES}, overlap")
    return step_of(lower(schedule_of(spec, STAGES)), costs)[0]


def fixed_loss(updates: int) -> float:
    """Compute the held-out loss of 1F1B after FIXED_AT of the updates, with CHOOSING_SEED."""
    return arithmetic(WAYS["1f1b"], CHOOSING_SEED, updates)[int(FIXED_AT * updates) // EVERY - 1]


def updates_to(loss: float, ran: Ran) -> int:
    """Count the updates until the held-out loss is at most ``loss``.

    Raises:
        SystemExit: it never is.
    """
    for place, heldout in enumerate(ran.heldout, start=1):
        if heldout <= loss:
            return place * EVERY
    raise SystemExit(f"A held-out loss of {loss} nats was not reached: the least was {min(ran.heldout):.4f}.")


def measure(settings: Settings, loss: float, cells: KeptCells) -> dict[Cell, Ran]:
    """Measure all cells, or read them.

    Raises:
        RuntimeError: a loss is not that of the run with free links.
    """
    found: dict[Cell, Ran] = {}
    for cell in cells_of(settings):
        if not cells.counts(cell.title):
            continue
        way, device = WAYS[cell.way], settings.device(cell.latency_ms)
        exact = Cell("1f1b" if cell.way == "auto" else cell.way, 0, cell.seed)
        num_steps = updates_to(loss, found[exact]) if exact in found else settings.updates
        options = {"way": way, "device": device, "updates": settings.updates, "num_steps": num_steps}
        work = partial(_trained, way, device, cell.seed, settings.updates, num_steps)
        ran = found[cell] = Ran(**cells.measured(cell.title, options, work))
        if exact in found and ran.losses != found[exact].losses[:num_steps]:
            raise RuntimeError(
                f"{cell.title} has other losses than {exact.title}: what was timed is not that training."
            )
        simulated = simulated_s(ran, device)
        share = median(ran.step_s) / simulated
        BenchRun.note(f"{cell.title}: {median(ran.step_s):.3f} s per step, {share:.3f} of the simulated step")
    return found


def _trained(*arguments: Any) -> dict[str, Any]:
    return train(*arguments)._asdict()


def figures_of(settings: Settings, loss: float, found: Mapping[Cell, Ran]) -> dict[str, float]:
    """Compute medians over seeds; ratios are of equal seeds."""
    seconds = {cell: sum(ran.step_s[: updates_to(loss, ran)]) for cell, ran in found.items()}
    figures = {}
    for way, latency_ms in dict.fromkeys((cell.way, cell.latency_ms) for cell in found):
        name = f"{way}_{latency_ms}ms"
        own = [cell for cell in found if (cell.way, cell.latency_ms) == (way, latency_ms)]
        rans = [found[cell] for cell in own]
        if way != "1f1b":
            figures[f"times_1f1b_{name}"] = median(seconds[cell._replace(way="1f1b")] / seconds[cell] for cell in own)
        if not latency_ms and way != "auto":
            figures[f"heldout_{name}"] = median(ran.heldout[-1] for ran in rans)
        step_s = median(second for ran in rans for second in ran.step_s)
        figures |= {
            f"seconds_{name}": median(seconds[cell] for cell in own),
            f"updates_{name}": median(updates_to(loss, ran) for ran in rans),
            f"step_ms_{name}": step_s * 1e3,
            f"of_simulated_{name}": step_s / simulated_s(rans[-1], settings.device(latency_ms)),
            f"work_share_{name}": median(ran.work_share for ran in rans),
        }
    return figures


def main() -> int:
    """Measure, print the tables, and record."""
    run = BENCH.begin()
    torch.set_num_threads(1)
    cells = KeptCells(run.options.folder, only_kept=run.options.kept)
    updates = run.settings.updates
    loss = float(cells.measured("fixed_loss", {"updates": updates}, partial(fixed_loss, updates)))
    print(f"The fixed held-out loss is {loss:.4f} nats per byte.", flush=True)
    found = measure(run.settings, loss, cells)
    run.figures |= {"fixed_loss": loss, **figures_of(run.settings, loss, found)}
    run.raw |= {cell.title: ran._asdict() for cell, ran in found.items()}
    run.raw["cells"] = cells.kept
    names = dict.fromkeys(f"{cell.way}_{cell.latency_ms}ms" for cell in found)
    columns = ("seconds", "times_1f1b", "updates", "heldout", "step_ms", "of_simulated", "work_share")
    rows = [[name, *(run.figures.get(f"{column}_{name}", "") for column in columns)] for name in names]
    run.table(f"to a held-out loss of {loss:.4f} nats per byte", ("", *columns), rows)
    run.table(
        "by seed",
        ("", "updates", "seconds", "held-out loss at the end", "schedules"),
        [
            [
                cell.title,
                (count := updates_to(loss, ran)),
                sum(ran.step_s[:count]),
                ran.heldout[-1],
                "; ".join(ran.schedules),
            ]
            for cell, ran in found.items()
        ],
    )
    cells.date(run)
    run.end()
    return 0

"""Cost of a lost stage: from the fault to the end of the first new step, less one undisturbed step.

Stages are killed or stopped in turns in the middle of a run; each trial waits until the spare is back.

    sigkill     two stages on this machine, AdamW; warm: a spare worker waits, with torch and the optimizer imported;
                cold: a new process is started
    sigstop     a stage's process is stopped for good
    node        the raylet of a stage's node is killed, with the health checks that docs/cluster.md recommends
    resize      2 -> 3 -> 1 -> 4 -> 2 stages on four raylets, spares warm
    overhead    copies of 1 GB per stage over a wire of 2 Gbit/s, in turns with steps that have none
    ray_train, torchft    one of two workers is killed; each is a replica of a model with 96 MB of state

    --part sigkill --megabytes 96     only these parts; nothing is recorded
    --way warm                        only this way
    --at-step 4 --megabytes 10        kill a stage of a separate run at this step, while its spare starts (warm) or
                                      without one (cold); print the times of each recovery, and record nothing
    --folder FOLDER                   keep parts there and do not measure them again; all of them make the record
    --folder FOLDER --kept            make the record of the parts that are there; it names those not measured

    *_seconds*          median over trials; *_max is the largest
    lost_steps          steps that the final records lack
    redone_steps_*      mean number of steps that all stages did again; redone_seconds_*: mean seconds of these
    resize_bytes_*      bytes that moved over those of the layers whose worker changed
    *_overhead          1.02 is 2 % of a step
    equal               1: parameters are those of undisturbed runs, to the bit
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

from jobs.bench.recovery import clusters, faults, overhead, peers
from jobs.lib.common import Bench, machine_line, median
from jobs.lib.kept_cells import ONLY_KEPT, OPTION, KeptCells

SIZES_MB = (10, 96, 500)
WAYS = ("warm", "cold")
PEER_MB = 96
OVERHEAD_MB, OVERHEAD_MBIT, OVERHEAD_TURNS = 1000, 2000.0, 2
BLOCK_MB = 16.0


class Found(NamedTuple):
    """Figures and raw numbers of a part."""

    figures: dict[str, float]
    raw: Any


class Part(NamedTuple):
    """Part that can be run alone.

    Attributes:
        name: name of the kind, shared by its parts.
        megabytes: state per stage.
        way: variant of the kind.
        measure: (trials) -> results.
        trials: number of trials of a full run.
    """

    name: str
    megabytes: int
    way: str
    measure: Callable[[int], Found]
    trials: int = 10

    @property
    def title(self) -> str:
        return "-".join(filter(None, [self.name, str(self.megabytes), self.way]))


def sigkill(megabytes: int, way: str, trials: int) -> Found:
    outcome = faults.measured(megabytes, trials, warm=way == "warm")
    found = over(f"sigkill_seconds_{way}", (trial.seconds for trial in outcome.trials), f"_{megabytes}mb")
    of_size = {}
    redone = mean(trial.redone for trial in outcome.trials)
    redone_s = mean(trial.redone * trial.step_s for trial in outcome.trials)
    if way == "warm":
        of_size = {
            "step_seconds": median(trial.step_s for trial in outcome.trials),
            "redone_steps": redone,
            "redone_seconds": redone_s,
        }
    found |= {f"{name}_{megabytes}mb": value for name, value in of_size.items()}
    return Found(found | common_of(outcome), raw_of(outcome))


def early(megabytes: int, way: str, at_step: int, trials: int) -> Found:
    outcome = faults.measured_early(megabytes, trials, at_step, warm=way == "warm")
    found = over(f"sigkill_seconds_{way}_at_{at_step}", (trial.seconds for trial in outcome.trials), f"_{megabytes}mb")
    return Found(found | common_of(outcome), raw_of(outcome))


def sigstop(megabytes: int, trials: int) -> Found:
    outcome = faults.measured(megabytes, trials, signal.SIGSTOP, warm=True)
    found = over("sigstop_detect_seconds", (trial.noticed_s for trial in outcome.trials))
    found |= over("sigstop_seconds", (trial.seconds for trial in outcome.trials))
    return Found(found | common_of(outcome), raw_of(outcome))


def node(megabytes: int, trials: int) -> Found:
    outcome = clusters.node_outcome(megabytes, trials)
    found = over("node_seconds", (trial.seconds for trial in outcome.trials))
    found |= over("node_noticed_seconds", (trial.noticed_s for trial in outcome.trials))
    return Found(found | common_of(outcome), {"health": clusters.HEALTH, **raw_of(outcome)})


def resize(megabytes: int, trials: int) -> Found:
    moves, outcome = clusters.resized(megabytes * 2 / clusters.BLOCKS, trials)
    found: dict[str, float] = {}
    for pair in clusters.TRANSITIONS:
        suffix = f"_{pair[0]}_{pair[1]}"
        found |= over("resize_seconds", (move.seconds for move in moves if move.stages == pair), suffix)
    shares = [move.moved_bytes / move.expected_bytes for move in moves]
    found |= {"resize_bytes_least": min(shares), "resize_bytes_most": max(shares)}
    return Found(found | common_of(outcome), {"moves": [move._asdict() for move in moves]})


def copies(megabytes: int, trials: int) -> Found:
    found = overhead.overhead(OVERHEAD_MBIT, {"megabytes": megabytes, "turns": trials})
    figures = {
        "copy_overhead": median(found["ratios"]),
        "copy_interval_seconds": found["interval_steps"] * found["step_s"],
        "copy_sent_seconds": found["sent_s"],
    }
    return Found(figures, found)


def peer(name: str, measure: Callable[[int, int], list[peers.PeerTrial] | str], megabytes: int, trials: int) -> Found:
    found = measure(megabytes, trials)
    if isinstance(found, str):
        print(f"  {found}", flush=True)
        return Found({}, {"missing": found})
    redone = {f"{name}_redone_steps": mean(trial.redone for trial in found)}
    figures = over(f"{name}_seconds", (trial.seconds for trial in found))
    return Found(figures | redone, [trial._asdict() for trial in found])


def over(name: str, seconds: Iterable[float], suffix: str = "") -> dict[str, float]:
    """Compute median and largest."""
    known = list(seconds)
    return {f"{name}{suffix}": median(known), f"{name}_max{suffix}": max(known)}


def common_of(outcome: faults.Outcome) -> dict[str, float]:
    return {"lost_steps": float(outcome.lost), "equal": float(outcome.equal)}


def raw_of(outcome: faults.Outcome) -> dict[str, Any]:
    return {"trials": [trial._asdict() for trial in outcome.trials]}


def parts(at_step: int = 0) -> list[Part]:
    """List all parts in running order; with a step, only those whose fault comes at it."""
    if at_step:
        return [Part("sigkill", size, way, partial(early, size, way, at_step)) for size in SIZES_MB for way in WAYS]
    found = [Part("sigkill", size, way, partial(sigkill, size, way)) for size in SIZES_MB for way in WAYS]
    found.append(Part("sigstop", 10, "", partial(sigstop, 10)))
    found.append(Part("node", 96, "", partial(node, 96)))
    found.append(Part("resize", 96, "", partial(resize, 96), trials=5))
    found.append(Part("overhead", OVERHEAD_MB, "", partial(copies, OVERHEAD_MB), trials=OVERHEAD_TURNS))
    for name, measure in (("ray_train", peers.ray_train), ("torchft", peers.torchft)):
        found.append(Part(name, PEER_MB, "", partial(peer, name, measure, PEER_MB)))
    return found


BENCH = Bench(
    "recovery",
    __doc__,
    layout={
        "warm, s": r"sigkill_seconds_warm_(\d+mb)",
        "largest, s": r"sigkill_seconds_warm_max_(\d+mb)",
        "cold, s": r"sigkill_seconds_cold_(\d+mb)",
        "largest cold, s": r"sigkill_seconds_cold_max_(\d+mb)",
        "undisturbed step, s": r"step_seconds_(\d+mb)",
        "steps of all again": r"redone_steps_(\d+mb)",
        "they take, s": r"redone_seconds_(\d+mb)",
    },
    targets={
        r"equal": ">= 1",
        r"lost_steps": "<= 0",
        r"sigkill_seconds_warm_10mb": "<= 1.0",
        r"sigkill_seconds_warm_96mb": "<= 1.5",
        r"sigkill_seconds_warm_500mb": "<= 2.5",
        r"sigkill_seconds_cold_\d+mb": "<= 6.0",
        r"sigstop_detect_seconds": "<= 2.0",
        r"node_seconds": "<= 5.0",
        r"redone_seconds_\d+mb": "<= 2.0",
        r"resize_seconds_\d_\d": "<= 1.0",
        r"resize_bytes_(least|most)": "0.99 to 1.01",
        r"copy_overhead": "<= 1.03",
    },
    options={
        "--part": {
            "nargs": "+",
            "choices": sorted({part.name for part in parts()}),
            "default": [],
            "help": "only these",
        },
        "--megabytes": {"type": int, "default": 0, "help": "only parts with so much state per stage"},
        "--way": {"nargs": "+", "choices": WAYS, "default": [], "help": "only these ways of sigkill"},
        "--at-step": {"type": int, "default": 0, "help": "sigkill at this step, each time of another run"},
        "--trials": {"type": int, "default": 0, "help": "of each part, instead of its own number"},
        **OPTION,
        **ONLY_KEPT,
    },
)


def main() -> int:
    """Measure the parts that the command line names, unless they are kept."""
    run = BENCH.begin()
    options = run.options
    kept = KeptCells(None if options.at_step else options.folder, only_kept=options.kept)
    wanted = [part for part in parts(options.at_step) if is_wanted(part, options) and kept.counts(part.title)]
    if options.quick and not options.part:
        wanted = wanted[:1]
    print(f"health checks of node: {json.dumps(clusters.HEALTH)}")
    print(f"timeouts of the others: {peers.TIMEOUTS}", flush=True)
    cells = {
        part.title: run_part(part, options.trials or (2 if options.quick else part.trials), kept) for part in wanted
    }
    kept.date(run)
    partial_run = bool(options.at_step) or (len(wanted) < len(parts()) and not options.kept)
    options.no_record = options.no_record or partial_run
    run.figures, run.raw = figures_of(cells), {"parts": cells, "measured": kept.kept}
    run.end()
    return 0


def is_wanted(part: Part, asked: argparse.Namespace) -> bool:
    """Return True if the command line selects the part."""
    return (
        (not asked.part or part.name in asked.part)
        and asked.megabytes in (0, part.megabytes)
        and (not asked.way or part.way in asked.way)
    )


def run_part(part: Part, trials: int, kept: KeptCells) -> dict[str, Any]:
    """Return the fields of a part's ``Found``: the saved result, or that of a new measurement."""
    print(f"{part.title}, {trials} trials; {machine_line()}", flush=True)
    found: dict[str, Any] = kept.measured(part.title, {"trials": trials}, lambda: part.measure(trials)._asdict())
    print(", ".join(f"{name} {value:.4g}" for name, value in found["figures"].items()), flush=True)
    return found


def figures_of(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Collect the figures of all parts; the worst value of those that several parts have."""
    worst = {"equal": min, "lost_steps": max}
    figures: dict[str, float] = {}
    for part in found.values():
        for name, value in part["figures"].items():
            figures[name] = worst[name](figures[name], value) if name in worst and name in figures else value
    return figures

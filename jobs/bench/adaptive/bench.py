"""Link that changes while a run trains: the controller against fixed plans and an oracle.

    a   real compute on two hosts (the GPT of bench/links, M = 8): free, 50 Mbit/s, 200 Mbit/s, 200 shared with another
        flow, free; 40 steps each
    b   four stages that sleep 10 and 20 ms, M = 16, at most 6 micro-batches on a stage: a link that is taken for 25 ms
        by every message, hop 0, then 1, then 2, then none; 40 steps each
    t   simulated traces of links (traces.py), from calm to moving ones, of 200 steps each, without Ray or a network;
        ``t_lock_out_steps`` are the most in which a change is answered after switches that did not pay

A fixed plan runs fewer steps of each phase, and their mean counts for the whole phase. The adaptive run counts every
step, also those before the controller reacts. All take turns in every round, in one order and then in the reverse. The
oracle is the best fixed plan of each phase. It is chosen in another round than the one in which it is timed, because
the least of many noisy measurements is too small; but a plan chosen so may not be the best. ``vs_oracle_of_means``
takes the least mean over all rounds, so that the truth is between the two. With the controller frozen
(retune_interval_steps=0) b must miss its target: then ``frozen_fails`` is 1. ``free_link_penalty`` is the step of the
adaptive run over that of the best fixed plan on a free link, from the beginning of the runs. They live at the same time
and take turns of eight steps, of which the first and the last do not count. ``free_link_best_took_turns`` is 0 if the
best fixed plan of a's first phase is not among them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from jobs.bench.adaptive.sleeping import Ran, run_sleeping
from jobs.bench.adaptive.traces import TRACES, locked_out, run_trace
from jobs.lib.common import Bench, BenchRun, machine_line
from jobs.lib.emulated import moving
from jobs.lib.shaped import Rig, rig
from jobs.lib.turns import in_turns

LIMIT_S = 500.0
PHASE_STEPS = 40
A_PHASES = ("free", "50 Mbit/s", "200 Mbit/s", "200 shared", "free again")
A_RATES = (None, 50.0, 200.0, 200.0, None)
A_SHARED = 3
A_FIXED: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "slack 2": {"schedule": "slack", "slack": 2},
    "slack 3": {"schedule": "slack", "slack": 3},
    "zb-h1 1": {"schedule": "zb-h1", "slack": 1},
    "zb-h1 2": {"schedule": "zb-h1", "slack": 2},
    "zb-h1 3": {"schedule": "zb-h1", "slack": 3},
    "zb-h1 5": {"schedule": "zb-h1", "slack": 5},
    "kfkb 2": {"schedule": "kfkb", "group_size": 2},
    "kfkb 4": {"schedule": "kfkb", "group_size": 4},
}
A_FREE = ("1f1b", "slack 2", "zb-h1 2", "zb-h1 3")
"""1F1B, and those that have been the best on a free link."""
ADAPTIVE = "adaptive"
B_PHASES = ("hop 0", "hop 1", "hop 2", "none")
B_TAKEN_S, B_STAGES, B_COUNT, B_HELD = 0.025, [(0.010, 0.020)] * 4, 16, 6
B_MARK = 1.25


@dataclass(frozen=True)
class Settings:
    """Extent of a measurement.

    Attributes:
        rounds: number of rounds in which all plans take turns.
        phase_steps: steps of a phase of an adaptive run.
        fixed_steps: steps of a phase of a run with a fixed plan, of which the first ``settling`` are not counted.
        scenario: letters of the scenarios to run.
        fixed: largest number of fixed plans.
        turns, turn_steps: turns of each run on the free link, and steps of a turn.
    """

    rounds: int = 2
    phase_steps: int = PHASE_STEPS
    fixed_steps: int = 10
    settling: int = 3
    scenario: str = "abt"
    fixed: int = 100
    turns: int = 12
    turn_steps: int = 8


BENCH = Bench(
    "bench_adaptive",
    __doc__,
    settings=Settings(),
    quick=Settings(1, 6, 4, 2, "b", 2),
    layout={
        "against 1F1B": r"(a|b)_vs_static_1f1b",
        "against the best fixed plan": r"(a|b|t_\w+)_vs_best_static",
        "over the oracle": r"(a|b)_vs_oracle",
        "over the oracle of means": r"(a|b)_vs_oracle_of_means",
        "the oracle against 1F1B": r"(a|b)_oracle_vs_static_1f1b",
    },
    targets={
        r"b_vs_static_1f1b": ">= 1.25",
        r"free_link_penalty": "<= 1.01",
        r"frozen_fails": ">= 1",
        r"t_at_least_0_99": ">= 12",
        r"t_least_where_links_change_for_good": ">= 1",
        r"t_lock_out_steps": "<= 5",
    },
    options={
        "--scenario": {"choices": ("a", "b", "t"), "help": "only this one"},
        "--rounds": {"type": int, "default": Settings.rounds, "help": "how often all plans take turns"},
    },
)


class Fixed(NamedTuple):
    """A fixed plan: mean seconds of a step by round and phase, and the seconds of all steps by round."""

    name: str
    rounds: list[list[float]]
    seconds: list[list[float]]

    @property
    def phase_s(self) -> list[float]:
        """Mean seconds by phase, over all rounds."""
        return [fmean(column) for column in zip(*self.rounds, strict=True)]

    def add(self, seconds: list[float], settings: Settings) -> None:
        """Add one round."""
        self.rounds.append(phase_means(seconds, settings))
        self.seconds.append(seconds)


def run_a(lab: Rig, pipeline: dict[str, Any], steps: int) -> dict[str, Any]:
    """Run all phases of ``steps`` steps; the link changes when a phase's last step has been reported."""
    with contextlib.ExitStack() as traffic:
        phase = [0]

        def on_line(line: str) -> None:
            if not line.startswith("step"):
                return
            now = min(int(line.split()[1]) // steps, len(A_RATES) - 1)
            while phase[0] < now:
                phase[0] += 1
                traffic.close()  # the other flow, where there was one
                lab.rate(A_RATES[phase[0]])
                if phase[0] == A_SHARED:
                    traffic.enter_context(lab.lab.competing(0, 1))

        lab.rate(None)
        asked = json.dumps({"steps": steps * len(A_RATES), "pipeline": pipeline})
        found: dict[str, Any] = lab.answer(lab.start(0, "bench/links/ours.py", asked), LIMIT_S, on_line)
    return found


def phase_means(seconds: list[float], settings: Settings) -> list[float]:
    """Compute the mean seconds of a step in each phase of a fixed plan, without the steps at its beginning."""
    steps, settling = settings.fixed_steps, settings.settling
    return [fmean(seconds[begin + settling : begin + steps]) for begin in range(0, len(seconds), steps)]


def scenario_a(settings: Settings) -> tuple[dict[str, float], dict[str, Any], list[list[Any]]]:
    """Run scenario a; return figures, raw numbers and rows."""
    fixed = {name: Fixed(name, [], []) for name in itertools.islice(A_FIXED, settings.fixed)}
    adaptive = []
    with rig() as lab:
        lab.rate(None)
        pipelines = {ADAPTIVE: {}, **{name: A_FIXED[name] for name in A_FREE}}
        free = in_turns(lab, "bench/links/ours.py", pipelines, settings.turns, settings.turn_steps)
        for name, ran in free.items():
            print(f"a free link, in turns, {name}: {_in_ms([mean_of(ran)])}; {machine_line()}", flush=True)
        for _, name in BenchRun.turns([ADAPTIVE, *fixed], settings.rounds):
            if name == ADAPTIVE:
                adaptive.append(run_a(lab, {}, settings.phase_steps))
                print(f"a adaptive: {sum(adaptive[-1]['seconds']):.1f} s; {machine_line()}", flush=True)
                continue
            one = fixed[name]
            one.add(run_a(lab, A_FIXED[name], settings.fixed_steps)["seconds"], settings)
            print(f"a {name}: {_in_ms(one.rounds[-1])}; {machine_line()}", flush=True)
    plans = list(fixed.values())
    figures = _judged("a", [ran["seconds"] for ran in adaptive], plans, settings)
    figures["free_link_penalty"] = mean_of(free[ADAPTIVE]) / min(mean_of(free[name]) for name in A_FREE)
    figures["free_link_vs_1f1b"] = mean_of(free[ADAPTIVE]) / mean_of(free["1f1b"])
    best = min(plans, key=lambda one: one.phase_s[0]).name
    figures["free_link_best_took_turns"] = float(best in A_FREE)
    raw = {"adaptive": adaptive, "fixed": [one._asdict() for one in plans], "free": free}
    return figures, raw, _rows("a", [ran["seconds"] for ran in adaptive], plans, settings)


def mean_of(ran: dict[str, Any]) -> float:
    """Compute the mean seconds of a step over all turns of a run."""
    return fmean(seconds for turn in ran["turns"] for seconds in turn)


def fixed_plans_b() -> list[tuple[int, ...]]:
    """List slacks by hop that keep to the micro-batches allowed on stage 0, which holds most."""
    found = itertools.product(range(1, B_HELD), repeat=len(B_STAGES) - 1)
    return [slack for slack in found if 1 + sum(slack) <= B_HELD]


def run_b(steps: int, **pipeline: Any) -> Ran:
    """Run all phases of ``steps`` steps."""
    where = (*range(len(B_STAGES) - 1), None)
    delay = moving(tuple((steps * place, hop) for place, hop in enumerate(where)), B_TAKEN_S)
    return run_sleeping(B_STAGES, B_COUNT, steps * len(where), delay, **pipeline)


def scenario_b(settings: Settings) -> tuple[dict[str, float], dict[str, Any], list[list[Any]]]:
    """Run scenario b; return figures, raw numbers and rows."""
    slacks = fixed_plans_b()[: settings.fixed]
    fixed = [Fixed(f"slack {','.join(map(str, slack))}", [], []) for slack in slacks]
    frozen = Fixed("frozen", [], [])
    adaptive = []
    for _ in range(settings.rounds):
        adaptive.append(run_b(settings.phase_steps, most_in_flight=B_HELD))
        print(f"b adaptive: {sum(adaptive[-1].seconds):.1f} s; {machine_line()}", flush=True)
        for one, slack in zip(fixed, slacks, strict=True):
            ran = run_b(settings.fixed_steps, schedule="slack", slack=slack)
            one.add(ran.seconds, settings)
            print(f"b {one.name}: {_in_ms(one.rounds[-1])}; {machine_line()}", flush=True)
        still = run_b(settings.fixed_steps, most_in_flight=B_HELD, retune_interval_steps=0)
        frozen.add(still.seconds, settings)
    figures = _judged("b", [ran.seconds for ran in adaptive], fixed, settings)
    figures["b_frozen_vs_static_1f1b"] = sum(fixed[0].phase_s) / sum(frozen.phase_s)
    figures["frozen_fails"] = float(figures["b_frozen_vs_static_1f1b"] < B_MARK)
    figures["b_most_in_flight"] = float(max(max(ran.peaks) for ran in adaptive))
    raw = {
        "adaptive": [ran._asdict() for ran in adaptive],
        "frozen": frozen._asdict(),
        "fixed": [one._asdict() for one in fixed],
    }
    return figures, raw, _rows("b", [ran.seconds for ran in adaptive], fixed, settings)


def scenario_t() -> tuple[dict[str, float], dict[str, Any], list[list[Any]]]:
    """Run the simulated traces; return figures, raw numbers and rows."""
    found = {name: run_trace(trace) for name, trace in TRACES.items()}
    for name, one in found.items():
        print(f"t {name}: {one.ratio:.4f} of {one.best}; switches {one.switches}, undone {one.undone}", flush=True)
    ratios = {name: one.ratio for name, one in found.items()}
    figures = {f"t_{name.replace(',', '').replace(' ', '_')}_vs_best_static": ratio for name, ratio in ratios.items()}
    figures["t_at_least_0_99"] = float(sum(ratio >= 0.99 for ratio in ratios.values()))
    figures["t_least_where_links_change_for_good"] = min(ratios[name] for name in TRACES if TRACES[name].lasting)
    figures["t_lock_out_steps"] = float(max(locked_out(range(100, 171)).values()))
    rows = [
        [kind, name, fmean(seconds) * 1e3]
        for name, one in found.items()
        for kind, seconds in (("t adaptive", one.own_s), (f"t best fixed: {one.best}", one.fixed_s))
    ]
    return figures, {name: one._asdict() for name, one in found.items()}, rows


def _in_ms(phase_s: list[float]) -> str:
    return f"{' '.join(f'{s * 1e3:.0f}' for s in phase_s)} ms"


def _chosen_elsewhere(fixed: list[Fixed], seconds: Callable[[list[float]], float]) -> float:
    """Compute the mean seconds of the best fixed plan, which is timed in one round and chosen by all other rounds.

    Args:
        seconds: function of the seconds of one round by phase, which returns the seconds to compare.
    """
    count, found = len(fixed[0].rounds), []
    for here in range(count):
        others = [r for r in range(count) if r != here] or [here]
        best = min(fixed, key=lambda one: fmean(seconds(one.rounds[r]) for r in others))
        found.append(seconds(best.rounds[here]))
    return fmean(found)


def _judged(name: str, runs: list[list[float]], fixed: list[Fixed], settings: Settings) -> dict[str, float]:
    """Compare the adaptive runs with 1F1B (the first of the fixed plans), the best fixed plan, and the oracle."""
    own_s = fmean(map(sum, runs)) / settings.phase_steps
    phases = range(len(fixed[0].phase_s))
    oracle_s = sum(_chosen_elsewhere(fixed, itemgetter(place)) for place in phases)
    return {
        f"{name}_vs_static_1f1b": sum(fixed[0].phase_s) / own_s,
        f"{name}_vs_best_static": _chosen_elsewhere(fixed, sum) / own_s,
        f"{name}_vs_oracle": own_s / oracle_s,
        f"{name}_vs_oracle_of_means": own_s / sum(map(min, zip(*(one.phase_s for one in fixed), strict=True))),
        f"{name}_oracle_vs_static_1f1b": sum(fixed[0].phase_s) / oracle_s,
    }


def _rows(name: str, runs: list[list[float]], fixed: list[Fixed], settings: Settings) -> list[list[Any]]:
    phases = A_PHASES if name == "a" else B_PHASES
    steps = settings.phase_steps
    rows = []
    for place, phase in enumerate(phases):
        own_s = fmean(fmean(run[place * steps : (place + 1) * steps]) for run in runs)
        best = min(fixed, key=lambda one: one.phase_s[place])
        rows.append([f"{name} adaptive", phase, own_s * 1e3])
        rows.append([f"{name} best fixed: {best.name}", phase, best.phase_s[place] * 1e3])
        rows.append([f"{name} 1F1B", phase, fixed[0].phase_s[place] * 1e3])
    return rows


def main() -> int:
    """Measure all scenarios."""
    run = BENCH.begin()
    settings = run.settings
    rows: list[list[Any]] = []
    for name, scenario in (("a", scenario_a), ("b", scenario_b)):
        if name not in settings.scenario:
            continue
        figures, run.raw[name], more = scenario(settings)
        run.figures |= figures
        rows += more
    if "t" in settings.scenario:
        figures, run.raw["t"], more = scenario_t()
        run.figures |= figures
        rows += more
    run.table("milliseconds per step", ("plan", "phase", "mean ms"), rows)
    run.end()
    return 0

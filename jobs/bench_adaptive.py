"""A link that changes while a run trains: what the controller makes of it, against fixed plans and an oracle.

    a   real compute on two hosts (bench_links' GPT, M = 8): free, 50 Mbit/s, 200 Mbit/s, 200 shared with another flow,
        free; 40 steps each
    b   four stages that sleep 10 and 20 ms, M = 16, at most 6 micro-batches on a stage: a link that is taken for 25 ms
        by every message, hop 0, then 1, then 2, then none; 40 steps each

Fixed plans run each phase for fewer steps, whose median counts for all of the phase; the adaptive runs count every
step, those in which the controller had not yet answered among them. The oracle takes the best fixed plan of each phase.
With the controller frozen (retune_interval_steps=0) b must miss its mark: ``frozen_fails`` is 1 then. ``--plot FOLDER``
keeps the histories as pictures.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import bench_common
from bench_common import machine, machine_line, median
from held_links import moving
from history_plot import history_svg
from shaped import Rig, rig
from sleeping import Ran, run_sleeping

LIMIT_S = 500.0
PHASE_STEPS = 40
A_PHASES = ("free", "50 Mbit/s", "200 Mbit/s", "200 shared", "free again")
A_RATES = (None, 50.0, 200.0, 200.0, None)
A_SHARED = 3
A_FIXED: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "slack 2": {"schedule": "slack", "slack": 2},
    "slack 3": {"schedule": "slack", "slack": 3},
    "slack 4": {"schedule": "slack", "slack": 4},
    "kfkb 2": {"schedule": "kfkb", "group_size": 2},
    "kfkb 4": {"schedule": "kfkb", "group_size": 4},
}
B_PHASES = ("hop 0", "hop 1", "hop 2", "none")
B_TAKEN_S, B_STAGES, B_COUNT, B_HELD = 0.025, [(0.010, 0.020)] * 4, 16, 6
B_MARK = 1.25


class Settings(NamedTuple):
    """How much is measured: steps of a phase, of a phase with a fixed plan, and of those that warm it up."""

    phase_steps: int = PHASE_STEPS
    fixed_steps: int = 10
    settling: int = 3
    scenarios: str = "ab"
    fixed: int = 100


QUICK = Settings(6, 4, 2, "b", 2)


class Fixed(NamedTuple):
    """Median seconds of a step by phase."""

    name: str
    phase_s: list[float]


def run_a(lab: Rig, pipeline: dict[str, Any], steps: int) -> dict[str, Any]:
    """One run through all phases of ``steps`` steps; the link changes when a phase's last step has been reported."""
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
        found: dict[str, Any] = lab.answer(lab.start(0, "links_ours.py", asked), LIMIT_S, on_line)
    return found


def phase_medians(seconds: list[float], steps: int, settling: int) -> list[float]:
    """Of each phase, without the steps at its beginning."""
    return [median(seconds[begin + settling : begin + steps]) for begin in range(0, len(seconds), steps)]


def scenario_a(settings: Settings) -> tuple[dict[str, float], dict[str, Any], list[list[Any]]]:
    """Figures, raw numbers and rows of scenario a."""
    fixed = []
    with rig() as lab:
        adaptive = run_a(lab, {}, settings.phase_steps)
        print(f"a adaptive: {sum(adaptive['seconds']):.1f} s; {machine_line()}", flush=True)
        for name, pipeline in itertools.islice(A_FIXED.items(), settings.fixed):
            ran = run_a(lab, pipeline, settings.fixed_steps)
            fixed.append(Fixed(name, phase_medians(ran["seconds"], settings.fixed_steps, settings.settling)))
            print(f"a {name}: {' '.join(f'{s * 1e3:.0f}' for s in fixed[-1].phase_s)} ms; {machine_line()}", flush=True)
        # Beside each other in time: what the controller costs where there is nothing to gain.
        again = run_a(lab, {}, settings.fixed_steps)["seconds"]
    figures = _judged("a", adaptive["seconds"], fixed, settings)
    free = [
        *adaptive["seconds"][settings.settling : settings.phase_steps],
        *again[settings.settling : settings.fixed_steps],
    ]
    figures["free_link_penalty"] = median(free) / min(one.phase_s[0] for one in fixed)
    figures["free_link_vs_1f1b"] = median(free) / fixed[0].phase_s[0]
    raw = {"adaptive": adaptive, "again": again, "fixed": [one._asdict() for one in fixed]}
    return figures, raw, _rows("a", adaptive["seconds"], fixed, settings)


def fixed_plans_b() -> list[tuple[int, ...]]:
    """Slack by hop that keeps to the micro-batches allowed on stage 0, which holds most."""
    found = itertools.product(range(1, B_HELD), repeat=len(B_STAGES) - 1)
    return [slack for slack in found if 1 + sum(slack) <= B_HELD]


def run_b(steps: int, **pipeline: Any) -> Ran:
    """One run through all phases of ``steps`` steps."""
    where = (*range(len(B_STAGES) - 1), None)
    delay = moving(tuple((steps * place, hop) for place, hop in enumerate(where)), B_TAKEN_S)
    return run_sleeping(B_STAGES, B_COUNT, steps * len(where), delay, **pipeline)


def scenario_b(settings: Settings) -> tuple[dict[str, float], dict[str, Any], list[list[Any]]]:
    """Figures, raw numbers and rows of scenario b."""
    adaptive = run_b(settings.phase_steps, most_in_flight=B_HELD)
    print(f"b adaptive: {sum(adaptive.seconds):.1f} s; {machine_line()}", flush=True)
    fixed = []
    for slack in fixed_plans_b()[: settings.fixed]:
        ran = run_b(settings.fixed_steps, schedule="slack", slack=slack)
        phase_s = phase_medians(ran.seconds, settings.fixed_steps, settings.settling)
        fixed.append(Fixed(f"slack {','.join(map(str, slack))}", phase_s))
        print(f"b {fixed[-1].name}: {' '.join(f'{s * 1e3:.0f}' for s in phase_s)} ms; {machine_line()}", flush=True)
    frozen = run_b(settings.fixed_steps, most_in_flight=B_HELD, retune_interval_steps=0)
    figures = _judged("b", adaptive.seconds, fixed, settings)
    static_s = _total_s(fixed[0], settings)
    frozen_s = _total_s(
        Fixed("frozen", phase_medians(frozen.seconds, settings.fixed_steps, settings.settling)), settings
    )
    figures["b_frozen_vs_static_1f1b"] = static_s / frozen_s
    figures["frozen_fails"] = float(static_s / frozen_s < B_MARK)
    figures["b_most_in_flight"] = float(max(adaptive.peaks))
    raw = {"adaptive": adaptive._asdict(), "frozen": frozen._asdict(), "fixed": [one._asdict() for one in fixed]}
    return figures, raw, _rows("b", adaptive.seconds, fixed, settings)


def _total_s(one: Fixed, settings: Settings) -> float:
    return settings.phase_steps * sum(one.phase_s)


def _judged(name: str, seconds: list[float], fixed: list[Fixed], settings: Settings) -> dict[str, float]:
    """The adaptive run against 1F1B (the first of the fixed plans), the best fixed plan, and the oracle."""
    total_s = sum(seconds)
    oracle_s = settings.phase_steps * sum(map(min, zip(*(one.phase_s for one in fixed), strict=True)))
    return {
        f"{name}_vs_static_1f1b": _total_s(fixed[0], settings) / total_s,
        f"{name}_vs_best_static": min(_total_s(one, settings) for one in fixed) / total_s,
        f"{name}_vs_oracle": total_s / oracle_s,
    }


def _rows(name: str, seconds: list[float], fixed: list[Fixed], settings: Settings) -> list[list[Any]]:
    phases = A_PHASES if name == "a" else B_PHASES
    steps = settings.phase_steps
    own = [sum(seconds[begin : begin + steps]) / steps for begin in range(0, len(seconds), steps)]
    rows = [[f"{name} adaptive, mean", phases[place], value * 1e3] for place, value in enumerate(own)]
    for place, phase in enumerate(phases):
        best = min(fixed, key=lambda one: one.phase_s[place])
        rows.append([f"{name} best fixed: {best.name}", phase, best.phase_s[place] * 1e3])
        rows.append([f"{name} 1F1B", phase, fixed[0].phase_s[place] * 1e3])
    return rows


def main() -> int:
    """Both scenarios."""
    asked = bench_common.arguments(__doc__, folders={"--plot": "keep the histories there as pictures"})
    plot: Path | None = asked.plot
    settings = QUICK if asked.quick else Settings()
    raw: dict[str, Any] = {"before": machine(), "settings": settings._asdict()}
    figures: dict[str, float] = {}
    rows: list[list[Any]] = []
    for name, run, phases in (("a", scenario_a, A_PHASES), ("b", scenario_b, B_PHASES)):
        if name not in settings.scenarios:
            continue
        some, raw[name], more = run(settings)
        figures |= some
        rows += more
        if plot is not None:
            plot.mkdir(parents=True, exist_ok=True)
            begins = [(place * settings.phase_steps, phase) for place, phase in enumerate(phases)]
            own = raw[name]["adaptive"]
            picture = history_svg(f"bench_adaptive, scenario {name}", own["seconds"], own["schedules"], begins)
            (plot / f"adaptive_{name}.svg").write_text(picture)
    print("\n" + bench_common.table(f"milliseconds per step; {machine_line()}", ("plan", "phase", "ms"), rows))
    bench_common.finish("bench_adaptive", figures, raw, asked.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

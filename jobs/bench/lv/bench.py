"""Few weight versions, encoded links and a prefix-sum cut together: time, memory and accuracy beside GPipe, PipeDream.

    lv          1F1B that never flushes, two weight versions, int8 forwards and bf16 backwards on links, the cut of
                "prefix_sum" (after Lv et al., CCGrid'23; policy.py)
    ring        the same without codecs
    pipedream   an update per micro-batch, a version for each that is under way (SOSP'19)
    gpipe       ours; torch_gpipe is torch.distributed.pipelining over gloo

*Time.* Stages that sleep, eight of them with eight micro-batches, links of 100 Mbit/s (chain.py). ``time_vs_*`` are
steps over those of "lv", every candidate with the same prefix-sum cut, which is the best for all of them. A message
takes four times as long on its link as its micro-batch on a stage: accelerators are further from 100 Mbit/s than that,
processors nearer, so ``*_load1`` and ``*_load0_25`` say the same of messages that take as long and a quarter as long,
and a table tells what the simulator makes of more. ``layers`` is "lv" with equal numbers of layers on every stage, at
the last of these: where links decide, no cut of a model whose messages are all alike is better than another.

*Memory.* Sums over the stages at eight stages and micro-batches: against PipeDream on a model of large weights, against
GPipe on one of large activations (memory.py), measured, and as planned, with the count of weight versions beside them.

*Accuracy.* Points lost against exact training, each with its own learning rate, for both tasks of bench/convergence and
both optimizers (accuracy.py): the worst is named.

The last lines say of every target whether it is met and, where not, what keeps the figure from it.

    --folder FOLDER    runs that have ended are kept there, with their load and commit, and not done again
    --part memory      only this is measured, and kept in --folder; without --part all of it makes the record
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from jobs.bench.lv import accuracy, memory, paper
from jobs.bench.lv.chain import Chain, Cut, equal_cut, planned_cut, run_ours
from jobs.bench.lv.policy import POLICIES
from jobs.bench.lv.torch_gpipe import run_torch
from jobs.check.results import matching, met
from jobs.lib import common
from jobs.lib.common import machine_line, median
from jobs.lib.emulated import CPU_SHARE
from jobs.lib.kept_cells import OPTION, KeptCells
from raypipe.runtime.driver.client import connected

WARM_UP_STEPS, LAST_STEPS = 4, 2
PARTS = ("time", "memory", "accuracy")
LAYOUT: dict[str, str] = {
    "step / lv's": r"time_vs_(\w+)",
    "on paper": r"paper_vs_(\w+)",
    "peak of lv / its": r"peak_vs_(\w+)",
    "as planned": r"predicted_peak_vs_(\w+)",
    "versions": r"versions_(\w+)",
    "accuracy drop, points": r"accuracy_drop_((?:digits|text)_\w+)",
    "standard error": r"accuracy_drop_error_(\w+)",
    "accuracy of exact training": r"accuracy_exact_(\w+)",
}
TARGETS: dict[str, str] = {
    r"time_vs_(pipedream|gpipe|torch_gpipe)": ">= 1.8",
    r"peak_vs_(pipedream|gpipe)_(sgd|adamw)": "<= 0.70",
    r"accuracy_drop_(digits|text)_sgd": "<= 0.5",
}


class Settings(NamedTuple):
    """How much is measured.

    Attributes:
        loads: ratios of a message's to a stage's seconds; figures of the first one have no suffix, and have the
            targets. At the last of several, equal numbers of layers are tried too.
        rounds: of the first load; the others, which show where it comes from, are run once.
    """

    chain: Chain = Chain()
    loads: tuple[float, ...] = (4.0, 1.0, 0.25)
    num_steps: int = 12
    torch_steps: int = 7
    rounds: int = 2
    models: Mapping[str, memory.Model] = memory.MODELS
    local: bool = False
    tasks: tuple[str, ...] = ("digits", "text")
    optimizers: tuple[str, ...] = ("sgd", "adamw")
    seeds: int = 5
    share: float = 1.0


QUICK = Settings(
    chain=Chain(4, 4, 0.012),
    loads=(4.0,),
    num_steps=9,
    torch_steps=4,
    rounds=1,
    models={
        "weights": memory.MODELS["weights"]._replace(
            sizes=memory.MODELS["weights"].sizes._replace(width=512, watched=1, num_steps=5), beside=()
        )
    },
    local=True,
    tasks=("digits",),
    optimizers=("sgd",),
    seeds=1,
    share=0.1,
)
"""Four stages, one model, one task for a few updates: whether all of it works."""

Steps = dict[str, list[float]]
"""Counted steps by candidate, as in the figures."""


# Time.


def suffix_of(settings: Settings, load: float) -> str:
    """What figures of a load end in."""
    return "" if load == settings.loads[0] else f"_load{load:g}".replace(".", "_")


def candidates_of(settings: Settings) -> dict[str, tuple[str, float, bool]]:
    """By name in the figures: the policy, the load, and whether stages have equal numbers of layers."""
    found: dict[str, tuple[str, float, bool]] = {}
    for place, load in enumerate(settings.loads):
        for policy in ("gpipe", "pipedream", "lv") if place else ("gpipe", "torch_gpipe", "pipedream", "ring", "lv"):
            found[f"{policy}{suffix_of(settings, load)}"] = (policy, load, False)
    if len(settings.loads) > 1:
        load = settings.loads[-1]
        found[f"layers{suffix_of(settings, load)}"] = ("lv", load, True)
    return found


def time_all(settings: Settings, kept: KeptCells) -> tuple[Cut, Steps]:
    """The cut, and every candidate, round by round."""
    cut = tuple(kept.measured("cut", settings.chain, lambda: planned_cut(settings.chain)))
    found: Steps = {}
    for turn in range(settings.rounds):
        for name, (policy, load, layers) in candidates_of(settings).items():
            if turn and load != settings.loads[0]:
                continue
            chain = settings.chain._replace(load=load)
            where = equal_cut(chain) if layers else cut
            counted = kept.measured(
                f"time-{name}-{turn}",
                [chain, where, POLICIES.get(policy), settings.num_steps, settings.torch_steps],
                functools.partial(time_one, settings, chain, where, policy),
            )
            found.setdefault(name, []).extend(counted)
            print(f"{name}: {median(counted) * 1e3:.0f} ms a step; {machine_line()}", flush=True)
    return cut, found


def time_one(settings: Settings, chain: Chain, cut: Cut, policy: str) -> list[float]:
    """Seconds of the steps that count."""
    if policy == "torch_gpipe":
        return run_torch(chain, cut, settings.torch_steps)[1:]
    return run_ours(chain, cut, POLICIES[policy], settings.num_steps)[WARM_UP_STEPS:-LAST_STEPS]


def on_paper(settings: Settings, cut: Cut) -> dict[str, float]:
    """Seconds of a step by candidate, simulated; torch's GPipe is GPipe."""
    return {
        name: paper.paper_s(
            settings.chain._replace(load=load),
            equal_cut(settings.chain) if layers else cut,
            POLICIES[policy.removeprefix("torch_")],
        )
        for name, (policy, load, layers) in candidates_of(settings).items()
    }


def time_figures(steps: Mapping[str, list[float]], told: Mapping[str, float], settings: Settings) -> dict[str, float]:
    """Steps of all candidates over those of "lv" with the planned cut at the same load, measured and on paper."""
    figures = {}
    for name, (_, load, _) in candidates_of(settings).items():
        ours = f"lv{suffix_of(settings, load)}"
        if name != ours:
            figures[f"time_vs_{name}"] = median(steps[name]) / median(steps[ours])
            figures[f"paper_vs_{name}"] = told[name] / told[ours]
    figures["measured_vs_paper"] = median(steps["lv"]) / told["lv"]
    return figures


# What is said of it.


def verdicts(figures: Mapping[str, float], reasons: Mapping[str, str]) -> list[str]:
    """A line for every target: what was wanted and what came of it; where it is missed, why."""
    lines = []
    for pattern, bound in TARGETS.items():
        found = matching(pattern, figures)
        for name, value in found.items():
            if met(bound, value):
                lines.append(f"{name} {value:.3f}, wanted {bound}: met")
            else:
                lines.append(f"{name} {value:.3f}, wanted {bound}: MISSED; {reasons[name]}")
        if not found:
            lines.append(f"{pattern}, wanted {bound}: not measured")
    return lines


def reasons_of(
    figures: Mapping[str, float],
    steps: Mapping[str, list[float]],
    told: Mapping[str, float],
    plans: Mapping[str, Mapping[str, memory.Told]],
    cells: accuracy.Cells,
    settings: Settings,
) -> dict[str, str]:
    """What to know of a figure that misses its target, by figure."""
    reasons = {}
    for pattern in TARGETS:
        for name in matching(pattern, figures):
            if name.startswith("time_vs_"):
                other = name.removeprefix("time_vs_")
                took = [median(steps[candidate]) / told[candidate] for candidate in ("lv", other)]
                reasons[name] = (
                    f"on paper it is {figures[f'paper_vs_{other}']:.2f}, and steps took {took[0]:.2f} (lv) and "
                    f"{took[1]:.2f} ({other}) of theirs on paper"
                )
            elif name.startswith("peak_vs_"):
                reasons[name] = memory.reason_of(settings.models, plans, name)
            else:
                error = figures.get(name.replace("drop", "drop_error"))
                known = "one seed" if error is None else f"one standard error is {error:.2f}"
                reasons[name] = f"{known}; {accuracy.worst_of(figures, cells)}"
    return reasons


def main() -> int:
    """Measure all three."""
    further = {"nargs": "+", "choices": PARTS, "default": [], "help": "only these, kept in --folder; no record"}
    asked = common.arguments(__doc__, options={"--part": further, **OPTION})
    if asked.part and asked.folder is None:
        raise SystemExit("--part keeps what it measures in a folder: name it with --folder.")
    if importlib.util.find_spec("sklearn") is None:
        raise SystemExit("The digits are scikit-learn's: pip install scikit-learn, which the extra 'bench' has.")
    settings = QUICK if asked.quick else Settings()
    torch.set_num_threads(1)
    kept = KeptCells(asked.folder)

    chain = settings.chain

    def time() -> tuple[Cut, Steps]:
        with connected(chain.num_stages, {"CPU": CPU_SHARE}):
            return time_all(settings, kept)

    def peaks_of_all() -> memory.Peaks:
        return memory.measure(settings.models, settings.optimizers, kept, local=settings.local)

    def cells_of_all() -> accuracy.Cells:
        runs_in = asked.folder and asked.folder / "runs.jsonl"
        return accuracy.measure(settings.tasks, settings.optimizers, settings.seeds, settings.share, runs_in)

    if asked.part:
        for name, measure in zip(PARTS, (time, peaks_of_all, cells_of_all), strict=True):
            if name in asked.part:
                measure()
        return 0

    cut, steps = time()
    told = on_paper(settings, cut)
    figures = time_figures(steps, told, settings)
    rows: list[list[Any]] = [
        [
            name, median(seconds) * 1e3, told[name] * 1e3, figures.get(f"time_vs_{name}", 1.0),
            figures.get(f"paper_vs_{name}", 1.0),
        ]
        for name, seconds in steps.items()
    ]  # fmt: skip
    columns: tuple[str, ...] = ("candidate", "ms", "on paper", "/ lv", "on paper / lv")
    title = f"{chain.num_stages} stages begin at layers 0, {', '.join(map(str, cut))}; {machine_line()}"
    print("\n" + common.table(title, columns, rows))
    loads = ("message / stage", *(f"{name} / lv" for name in POLICIES if name != "lv"))
    print("\n" + common.table("on paper, for other links", loads, paper.ratios_by_load(chain, cut, POLICIES)))

    plans = memory.told_of(settings.models)
    peaks = peaks_of_all()
    figures |= memory.figures_of(settings.models, peaks, plans)
    columns = ("model, candidate", "MiB", "planned MiB", "versions", "lv / it", "planned")
    print(
        "\n"
        + common.table("all stages at their fullest", columns, memory.rows_of(settings.models, peaks, plans))
        + "\n"
    )

    cells = cells_of_all()
    lost = accuracy.figures_of(cells)
    figures |= lost
    columns = ("cell", "exact %", "lv %", "drop", "standard error", "rate", "lv's rate", "ended")
    print("\n" + common.table(f"held out, means over {settings.seeds} seeds", columns, accuracy.rows_of(lost, cells)))
    print(accuracy.worst_of(lost, cells))

    print("\n" + "\n".join(verdicts(figures, reasons_of(figures, steps, told, plans, cells, settings))))
    raw = {
        "step_s": steps,
        "paper_s": told,
        "cut": cut,
        "peak_bytes": {" ".join(key): stages for key, stages in peaks.items()},
        "planned": {name: {key: plan._asdict() for key, plan in found.items()} for name, found in plans.items()},
        "rates": cells.rates,
        "runs": {
            f"{name} {' '.join(cell)}": [run._asdict() for run in runs]
            for name in ("exact", "lv")
            for cell, runs in getattr(cells, name).items()
        },
        "measured": kept.told,
    }
    kept.date(asked)
    common.finish("bench_lv", figures, raw, asked)
    return 0

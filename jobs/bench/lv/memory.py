"""What all stages together hold, with two weight versions against stashing and against GPipe: S = 8, M = 8.

    weights       square layers and few samples: versions of the weights are most of it; held against PipeDream
    activations   narrower layers and many samples: what forwards keep is most of it; held against GPipe

Every stage is a process of its own that is watched from outside (jobs/bench/memory/runs.py), each at its own fullest
moment. ``versions_*`` count copies of a stage's weights, summed over the stages: 8 + 7 + ... + 1 with stashing, 2 on
every stage but the last with the ring, 8 with GPipe. What ``plan`` says of the same runs stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jobs.bench.memory.runs import CANDIDATES, Sizes, Told, peak_of, predicted, run
from jobs.lib.common import machine_line
from jobs.lib.kept_cells import KeptCells

__all__ = ["MODELS", "Model", "Peaks", "figures_of", "measure", "reason_of", "rows_of", "told_of"]

MIB = 2**20


class Model(NamedTuple):
    """What is trained, and what the ring is held against on it.

    Attributes:
        against: a candidate of jobs/bench/memory/runs.py.
        named: what figures call it.
        beside: further candidates, without a target.
    """

    sizes: Sizes
    against: str
    named: str
    beside: tuple[str, ...] = ()

    @property
    def candidates(self) -> tuple[str, ...]:
        return ("lv", self.against, *self.beside)


WHOLE = {"stages": 8, "microbatches": 8, "watched": 8}
MODELS = {
    "weights": Model(Sizes(width=1024, depth=6, later=6, microbatch=16, **WHOLE), "stash", "pipedream", ("gpipe",)),
    "activations": Model(
        Sizes(width=192, depth=16, later=16, microbatch=768, **WHOLE), "gpipe", "gpipe", ("stash", "torch_gpipe")
    ),
}

Peaks = dict[tuple[str, str, str], list[int]]
"""By model, candidate and optimizer: bytes of each stage, less those of a model of no size."""


def told_of(models: Mapping[str, Model]) -> dict[str, dict[str, Told]]:
    """By model, what ``plan`` says of every candidate that is ours with every optimizer."""
    return {name: predicted(model.sizes, model.candidates) for name, model in models.items()}


def measure(models: Mapping[str, Model], optimizers: tuple[str, ...], kept: KeptCells, *, local: bool = False) -> Peaks:
    """Train and watch; what has no target, with the first optimizer only.

    Args:
        kept: what was measured before.
        local: all stages in threads of one process, which is then watched as a whole.
    """
    found: Peaks = {}
    for name, model in models.items():
        nothing = model.sizes._replace(width=8)
        floors: dict[bool, list[int]] = {}
        for candidate in model.candidates:
            ours = CANDIDATES[candidate] is not None
            if local and not ours:
                continue
            if ours not in floors:
                floors[ours] = _peaks(kept, f"{name}-nothing", nothing, candidate, "sgd", local=local)
            for optimizer in optimizers[:1] if candidate in model.beside else optimizers:
                seen = _peaks(kept, name, model.sizes, candidate, optimizer, local=local)
                found[name, candidate, optimizer] = [a - b for a, b in zip(seen, floors[ours], strict=True)]
                total = sum(found[name, candidate, optimizer])
                print(f"{name} {candidate} {optimizer}: {total / MIB:.1f} MiB; {machine_line()}", flush=True)
    return found


def _peaks(kept: KeptCells, name: str, sizes: Sizes, candidate: str, optimizer: str, *, local: bool) -> list[int]:
    """Bytes of each stage, of one run."""

    def seen() -> list[int]:
        stages = run(sizes, candidate, optimizer, local=local)
        return [peak_of(looks, sizes.num_steps, sizes.microbatches) for looks in stages]

    asked = [sizes._asdict(), candidate, optimizer, local]
    found: list[int] = kept.measured(f"memory-{name}-{candidate}-{optimizer}", asked, seen)
    return found


def figures_of(models: Mapping[str, Model], peaks: Peaks, told: Mapping[str, Mapping[str, Told]]) -> dict[str, float]:
    """Ratios of sums over the stages, measured and as planned, and the versions."""
    figures: dict[str, float] = {}
    for (name, candidate, optimizer), stages in peaks.items():
        model = models[name]
        if candidate == model.against:
            figures[f"peak_vs_{model.named}_{optimizer}"] = sum(peaks[name, "lv", optimizer]) / sum(stages)
        elif candidate in model.beside:
            figures[f"{name}_peak_vs_{candidate}_{optimizer}"] = sum(peaks[name, "lv", optimizer]) / sum(stages)
        if plan := told[name].get(f"{candidate}_{optimizer}"):
            figures[f"predicted_vs_measured_{name}_{candidate}_{optimizer}"] = bytes_of(plan) / sum(stages)
    for name, model in models.items():
        for optimizer in dict.fromkeys(key.rpartition("_")[2] for key in told[name]):
            ours, other = (told[name][f"{candidate}_{optimizer}"] for candidate in ("lv", model.against))
            figures[f"predicted_peak_vs_{model.named}_{optimizer}"] = bytes_of(ours) / bytes_of(other)
            figures["versions_lv"] = sum(ours.versions)
            figures[f"versions_{model.named}"] = sum(other.versions)
    return figures


def bytes_of(plan: Told) -> int:
    """Of all stages."""
    return sum(sum(stage.values()) for stage in plan.memory)


def shares_of(plan: Told) -> dict[str, float]:
    """Of all stages together, by purpose: "activations of 8 micro-batches" and of 7 are activations."""
    shares: dict[str, float] = {}
    for stage in plan.memory:
        for purpose, count in stage.items():
            word = purpose.split()[0]
            shares[word] = shares.get(word, 0.0) + count / bytes_of(plan)
    return shares


def reason_of(models: Mapping[str, Model], told: Mapping[str, Mapping[str, Told]], figure: str) -> str:
    """What the bytes behind ``peak_vs_<named>_<optimizer>`` are for, in words."""
    name, model = next((name, model) for name, model in models.items() if f"_{model.named}_" in figure)
    optimizer = figure.rpartition("_")[2]
    parts = []
    for candidate in ("lv", model.against):
        shares = shares_of(told[name][f"{candidate}_{optimizer}"])
        parts.append(f"{candidate} {', '.join(f'{share:.0%} {purpose}' for purpose, share in shares.items())}")
    return f"on the model of {name}, as planned: {'; '.join(parts)}"


def rows_of(models: Mapping[str, Model], peaks: Peaks, told: Mapping[str, Mapping[str, Told]]) -> list[list[Any]]:
    """A row for each run: MiB measured and planned, versions, ratio of the ring's sum to its own."""
    rows: list[list[Any]] = []
    for name, model in models.items():
        for optimizer in dict.fromkeys(key.rpartition("_")[2] for key in told[name]):
            for candidate in model.candidates:
                plan = told[name].get(f"{candidate}_{optimizer}")
                stages, ours = peaks.get((name, candidate, optimizer)), peaks.get((name, "lv", optimizer))
                if plan is None and stages is None:
                    continue
                rows.append([
                    f"{name} {candidate} {optimizer}",
                    "--" if stages is None else f"{sum(stages) / MIB:.1f}",
                    "--" if plan is None else f"{bytes_of(plan) / MIB:.1f}",
                    "--" if plan is None else sum(plan.versions),
                    "--" if stages is None or ours is None else f"{sum(ours) / sum(stages):.3f}",
                    "--" if plan is None else f"{bytes_of(told[name][f'lv_{optimizer}']) / bytes_of(plan):.3f}",
                ])  # fmt: skip
    return rows

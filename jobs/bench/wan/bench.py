"""Pipeline of eight stages over home links: published records in our simulator, our plan, and a scaled-down run of it.

    records    the step of two records of Protocol NanoGPT, 1F1B without a choice of ours, beside what was published
    plans      the planner's choice of codecs, micro-batches and schedule for the dense model, by permitted codecs
    metered    some of these plans trained in threads that receive through the same meter: eight stages, messages of a
               1024th of the bytes, all seconds of the wire divided by 8, computing left out

Each worker receives over one wire of 200 Mbit/s; each message takes 50 ms besides its bytes (setting.py has the facts,
their sources and the assumptions). ``plan_total_ks`` is the computed step of a plan x the 2,925 steps of the dense
record. It assumes that no codec costs a step: on the scaled twin of docs/results/codec_loss.md tah4 costs 0.006 nats at
equal steps, and int4 and tah3, which "any" permits, 0.07. ``measured_over_simulated`` compares the metered step with
the simulator's, in which computing takes what it took in the metered run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jobs.bench.wan.metered import Metered, Wire, run_metered
from jobs.bench.wan.setting import LOSSY, MILD, RECORDS, STEPS, WAN, WIDTH, chosen, codec_of, reproduced
from jobs.lib.common import Bench, median
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.search import Decision, spec_of, step_of
from raypipe.planner.simulator import Costs

PERMITTED = {
    "none": ((), (), "auto"),
    "bf16": (("bf16",), ("bf16",), "auto"),
    "auto": (MILD, MILD[:1], "auto"),
    "int8": (MILD, MILD, "auto"),
    "gradients_int8": (LOSSY, MILD, "auto"),
    "tah4": ((*MILD, "tah4"), (*MILD, "tah4"), "auto"),
    "int4": ((*MILD, "int4"), (*MILD, "int4"), "auto"),
    "any": (LOSSY, LOSSY, "auto"),
    "any_kfkb": (LOSSY, LOSSY, "kfkb"),
}
"""Permitted codecs of activations and of gradients, and the schedule, by name of a plan. "auto" is what
``codec_forward="auto"`` and ``codec_backward="auto"`` permit; "any" permits every codec."""
BYTES, SECONDS = 1024, 8
"""Divisors of bytes and of the wire's seconds in metered runs."""
LEFT_OUT = 2
"""Steps at the beginning of a metered run that do not count."""


@dataclass(frozen=True)
class Settings:
    """Names of the plans that are trained through the meter, and number of steps."""

    metered: tuple[str, ...] = ("bf16", "auto", "tah4", "any")
    num_steps: int = 5


BENCH = Bench(
    "bench_wan",
    __doc__,
    settings=Settings(),
    quick=Settings(("any",), 5),
    layout={
        "published step": r"published_step_s_(\w+)",
        "simulated step": r"simulated_step_s_(\w+)",
        "simulated / published": r"simulated_over_published_(\w+)",
        "step": r"plan_step_s_(\w+)",
        "micro-batches": r"plan_microbatches_(\w+)",
        "thousand seconds for 2,925 steps": r"plan_total_ks_(\w+)",
        "measured / simulated": r"measured_over_simulated_(\w+)",
    },
    targets={
        r"simulated_over_published_\w+": "0.99 to 1.01",
        r"plan_total_ks_(tah4|any)": "<= 147",
        r"measured_over_simulated_\w+": "0.95 to 1.05",
    },
)


def described(plan: Decision) -> str:
    """Name a plan's codecs and schedule."""
    return f"{'/'.join(codec.name for codec in plan.request.codecs)}, {_spec_of(plan)}"


def _spec_of(plan: Decision) -> ScheduleSpec:
    return spec_of(plan.request, plan.partition.num_stages, plan.num_microbatches)


def metered(plan: Decision, num_steps: int) -> tuple[Metered, float]:
    """Train a plan through the meter; return the measurement and the simulated seconds of its step.

    The meter serves messages in the order in which the simulator does, so their ratio checks computing times, delays
    and the runtime, not that order.
    """
    spec, stages = _spec_of(plan), plan.partition.num_stages
    names = [codec.name for codec in plan.request.codecs]
    numbers = plan.microbatch_size * 1024 * WIDTH // BYTES
    wire = Wire(WAN.bandwidth_bytes_s * SECONDS / BYTES, WAN.latency_s / SECONDS)
    settings: dict[str, Any] = {"schedule": spec.kind, "codec_forward": names[0], "codec_backward": names[1]}
    if spec.kind == "kfkb":
        settings["group_size"] = spec.group_size
    if spec.slack:
        settings["slack"] = spec.slack
    ran = run_metered(stages, numbers, spec.num_microbatches, num_steps, wire, **settings)
    held_s = [4 * numbers / codec_of(name).ratio / wire.bytes_s + wire.latency_s for name in names]
    inputs_s, weights_s = ran.work_s["I"], ran.work_s["W"]
    costs = Costs(
        forward_s=tuple(ran.work_s["F"]),
        backward_s=tuple(map(max, ran.work_s["B"], map(sum, zip(inputs_s, weights_s, strict=True)))),
        backward_input_s=tuple(inputs_s),
        backward_weight_s=tuple(weights_s),
        forward_occupancy_s=(held_s[0],) * (stages - 1),
        backward_occupancy_s=(held_s[1],) * (stages - 1),
        half_duplex=(True,) * (stages - 1),
    )
    return ran, step_of(lower(schedule_of(spec, stages)), costs)[0]


def main() -> int:
    """Reproduce, plan, and measure."""
    run = BENCH.begin()
    rows: list[list[Any]] = []
    for name, record in RECORDS.items():
        step_s = reproduced(record).prediction.step_s
        run.figures |= {
            f"published_step_s_{name}": record.step_s,
            f"simulated_step_s_{name}": step_s,
            f"simulated_over_published_{name}": step_s / record.step_s,
        }
        rows.append([name, record.step_s, step_s, step_s / record.step_s, record.step_s * record.steps / 1e3])
    run.table("records", ("record", "published s", "simulated s", "ratio", "published ks in all"), rows)
    plans = {name: chosen(*permitted) for name, permitted in PERMITTED.items()}
    rows = []
    for name, plan in plans.items():
        step_s, count = plan.prediction.step_s, plan.num_microbatches
        run.figures |= {
            f"plan_step_s_{name}": step_s,
            f"plan_microbatches_{name}": count,
            f"plan_total_ks_{name}": step_s * STEPS / 1e3,
        }
        run.raw[name] = {"plan": described(plan), "reasons": [list(reason) for reason in plan.reasons]}
        rows.append([name, described(plan), count, plan.microbatch_size, step_s, step_s * STEPS / 1e3])
    columns = ("permitted", "chosen", "micro-batches", "sequences", "step s", f"ks in {STEPS} steps")
    run.table("plans, if no codec costs a step", columns, rows)
    rows = []
    for name in run.settings.metered:
        ran, simulated_s = metered(plans[name], run.settings.num_steps)
        step_s = median(ran.step_s[LEFT_OUT:])
        run.figures[f"measured_over_simulated_{name}"] = step_s / simulated_s
        run.raw[name] |= {**ran._asdict(), "simulated_s": simulated_s}
        rows.append([name, described(plans[name]), simulated_s, step_s, step_s / simulated_s])
        run.note(f"{name}: {step_s:.3f} s measured, {simulated_s:.3f} simulated")
    run.table("through the meter, scaled down", ("permitted", "plan", "simulated s", "measured s", "ratio"), rows)
    run.end()
    return 0

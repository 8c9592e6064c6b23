"""Our pipeline against torch's over a slow link: two namespaces, one stage on each, the same model and micro-batches.

    auto     PipelineTrainer.fit on two raylets, schedule "auto": the controller measures the link and sets the slack
    codec    the same with both codecs on "auto"
    tah4     at the lowest rate, the same with that codec both ways; int4 too
    torch    torch.distributed.pipelining over gloo through the same wire: its seven schedules
    plan     torch's own runtime with the schedule that "auto" ended with
    zb-v     at the highest rate, ours with two stages on each worker: twice the messages, a smaller bubble

Real compute: a GPT of eight blocks, 256 KiB per boundary message, M = 8, AdamW, one thread per process. At each rate
ours and torch's take turns. Only the last ``counted`` steps count; before them the controller finds its schedule.
With ``--emulated`` the blocks sleep instead, so that a stage takes 17.8 ms forward and 35.5 ms back per micro-batch;
sleeps are shorter by the overhead of a block that runs alone. Such stages compete with the runtimes' threads for no
processor. Their figures end in ``_emulated``.

The limit is the shortest possible step of a lossless schedule, computed from the stages' seconds in our runs and from
the goodput of the link, measured with a flow of its own. ``fraction_of_limit`` is the limit over our step. A stage's
seconds per forward and backward are those of the traced step, scaled by the busy time of all counted steps over that of
the traced one; if that step ran whole backwards, half of each counts as W. Torch's steps and ours include the
optimizer's: ``fraction_of_limit`` counts it in the limit, ``fraction_of_bare_limit`` does not.
``fraction_of_whole_limit`` is the limit with whole backwards, as before "auto" could split them.
``most_vs_torch_1f1b`` is the step of torch's 1F1B over the limit if messages took no time, which no codec can pass.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from jobs.bench.links import gpt
from jobs.bench.links.torch_peer import SCHEDULES
from jobs.lib.common import Bench, machine_line, median
from jobs.lib.shaped import Rig, rig
from raypipe.ir.schedule import Schedule
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.text import to_csv
from raypipe.planner.search import step_of
from raypipe.planner.simulator import Costs
from tests.lab.flow import flow

MESSAGE_BYTES = 4 * gpt.MICROBATCH_SIZE * gpt.CONTEXT * gpt.WIDTH
MICROBATCHES = gpt.MICROBATCHES
PORT = 29_511
LIMIT_S = 400.0
EMULATED_S = (0.0178, 0.0355)
"""(F, B) of a stage and micro-batch, as the same GPT takes on a machine with quicker processors."""
OPS = ("F", "B", "I", "W", "STEP")
CODEC = {"codec_forward": "auto", "codec_backward": "auto"}
OURS: dict[str, dict[str, Any]] = {
    "auto": {},
    "codec": CODEC,
    "tah4": {"codec_forward": "tah4", "codec_backward": "tah4"},
    "int4": {"codec_forward": "int4", "codec_backward": "int4"},
    "object_store": {"transport": "object_store"},
    "1f1b": {"schedule": "1f1b"},
    "zb-v": {"schedule": "zb-v", "num_stages": 4, "partitioner": ("3", "5", "7")},
}


@dataclass(frozen=True)
class Settings:
    """Extent of a measurement.

    Attributes:
        ours: in every round at every rate; ``once`` in the first round at ``once_at``.
        swift, slow: in every round at ``swift_at`` and ``slow_at``.
    """

    rates_mbit: tuple[int, ...] = (1000, 100, 50, 25)
    steps: int = 32
    counted: int = 14
    torch_steps: int = 5
    rounds: int = 2
    ours: tuple[str, ...] = ("auto", "codec")
    once: tuple[str, ...] = ("1f1b", "object_store")
    once_at: int = 50
    swift: tuple[str, ...] = ("zb-v",)
    swift_at: int = 1000
    slow: tuple[str, ...] = ("tah4", "int4")
    slow_at: int = 25
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    half_s: tuple[float, ...] = ()


BENCH = Bench(
    "bench_links",
    __doc__,
    settings=Settings(),
    quick=Settings((50,), 14, 4, 4, 1, ("auto",), (), schedules=("1F1B",)),  # too short for the controller to settle
    layout={
        "against torch 1F1B": r"vs_torch_1f1b_(\d+mbit)(?:_emulated)?",
        "against torch 1F1B, codecs": r"vs_torch_1f1b_(\d+mbit)_codec(?:_emulated)?",
        "against torch 1F1B, tah4": r"vs_torch_1f1b_(\d+mbit)_tah4(?:_emulated)?",
        "against torch 1F1B, int4": r"vs_torch_1f1b_(\d+mbit)_int4(?:_emulated)?",
        "most against torch 1F1B": r"most_vs_torch_1f1b_(\d+mbit)(?:_emulated)?",
        "against torch's best": r"vs_torch_best_(\d+mbit)(?:_emulated)?",
        "against torch's best, codecs": r"vs_torch_best_(\d+mbit)_codec(?:_emulated)?",
        "against torch with our plan": r"vs_torch_runtime_our_plan_(\d+mbit)(?:_emulated)?",
        "against torch with our plan, codecs": r"vs_torch_runtime_our_plan_(\d+mbit)_codec(?:_emulated)?",
        "limit / ours": r"fraction_of_limit_(\d+mbit)(?:_emulated)?",
        "bare limit / ours": r"fraction_of_bare_limit_(\d+mbit)(?:_emulated)?",
        "limit of whole backwards / ours": r"fraction_of_whole_limit_(\d+mbit)(?:_emulated)?",
    },
    targets={
        r"vs_torch_1f1b_1000mbit(_emulated)?": ">= 1.0",
        r"vs_torch_1f1b_100mbit(_emulated)?": ">= 1.35",
        r"vs_torch_1f1b_50mbit(_emulated)?": ">= 1.75",
        r"vs_torch_1f1b_50mbit_codec(_emulated)?": ">= 1.95",
        r"vs_torch_1f1b_25mbit_codec(_emulated)?": ">= 2.6",
        r"vs_torch_1f1b_25mbit_tah4(_emulated)?": ">= 3.5",
        r"vs_torch_best_\d+mbit(_emulated)?": ">= 1.0",
        r"vs_torch_runtime_our_plan_(1000|100|25)mbit(_emulated)?": ">= 1.0",
        r"vs_torch_runtime_our_plan_50mbit(_emulated)?": ">= 1.2",
        r"fraction_of_limit_\d+mbit(_emulated)?": ">= 0.92",
    },
    options={
        "--emulated": {"action": "store_true", "help": "stages sleep instead of computing"},
        "--rates_mbit": {"type": int, "nargs": "+", "metavar": "MBIT", "help": "only these rates"},
    },
)


def run_ours(lab: Rig, name: str, settings: Settings) -> dict[str, Any]:
    """Run one of our candidates."""
    asked = json.dumps({"steps": settings.steps, "pipeline": OURS[name], "half_s": settings.half_s})
    found: dict[str, Any] = lab.answer(lab.start(0, "bench/links/ours.py", asked), LIMIT_S)
    return found


def run_torch(lab: Rig, settings: Settings, plans: dict[str, str]) -> dict[str, Any]:
    """Run all of torch's schedules and ``plans``: seconds of the steps after the first two, and peaks, by name."""
    wanted = {"steps": settings.torch_steps + 2, "schedules": settings.schedules, "plans": plans}
    asked = json.dumps({**wanted, "half_s": settings.half_s})
    meeting = f"10.79.0.1:{PORT}"
    ranks = [
        lab.start(rank, "bench/links/torch_peer.py", str(rank), meeting, f"to{1 - rank}", asked) for rank in range(2)
    ]
    answers = [lab.answer(rank, LIMIT_S) for rank in ranks]
    found = {}
    for name in answers[0]:
        # A step ends when its last stage does, as in our records; all processes read the same clock.
        ends_s = [max(at) for at in zip(*(answer[name]["ends_s"] for answer in answers), strict=True)]
        seconds = [after - before for before, after in itertools.pairwise(ends_s)]
        found[name] = {"seconds": seconds[1:], "peak_bytes": [answer[name]["peak_bytes"] for answer in answers]}
        found[name]["losses"] = (
            answers[-1][name]["losses"] if any(answers[-1][name]["losses"]) else answers[0][name]["losses"]
        )
    return found


def schedule_named(text: str) -> Schedule:
    """Parse the schedule of a step's record: "zb-h1 r=3", "kfkb k=2 + int8/bf16 on hop 0", ..."""
    spec = ScheduleSpec.parse(text.partition(" + ")[0])
    return schedule_of(spec.with_microbatches(MICROBATCHES), 2)


def limit_s(work: dict[str, tuple[float, ...]], occupancy_s: float, *, split: bool) -> float:
    """Simulate the quickest lossless step: 1F1B with any slack, kFkB with any k, GPipe; full duplex, no latency.

    Args:
        work: seconds on every stage by operation; STEP may be missing.
        split: zb-h1 with any slack too, whose steps overlap.
    """
    costs = Costs(
        forward_s=work["F"],
        backward_s=tuple(i + w for i, w in zip(work["I"], work["W"], strict=True)),
        backward_input_s=work["I"],
        backward_weight_s=work["W"],
        forward_occupancy_s=(occupancy_s,),
        backward_occupancy_s=(occupancy_s,),
        step_s=work.get("STEP", ()),
    )
    candidates = [ScheduleSpec("gpipe", MICROBATCHES)]
    for number in range(1, MICROBATCHES + 1):
        candidates.append(ScheduleSpec("slack", MICROBATCHES, slack=(number,)))
        candidates.append(ScheduleSpec("kfkb", MICROBATCHES, group_size=number))
        if split:
            candidates.append(ScheduleSpec("zb-h1", MICROBATCHES, slack=(number,), overlap=True))
    return min(step_of(lower(schedule_of(candidate, 2)), costs)[0] for candidate in candidates)


def seconds_of(run: dict[str, Any], name: str, settings: Settings) -> list[float]:
    """Return the seconds of a run's passes of one kind ("0F"), scaled to its counted steps."""
    usual = median(run["busy_s"][-settings.counted :]) / run["busy_s"][run["traced"]]
    return [seconds * usual for seconds in run["stage_s"].get(name, ())]


def work_of(runs: list[dict[str, Any]], settings: Settings) -> dict[str, tuple[float, ...]]:
    """Compute median seconds on every stage, by operation (F, I, W, STEP)."""
    found: dict[str, list[float]] = {"F": [], "I": [], "W": [], "STEP": []}
    for stage in range(2):
        by_op = {op: [s for run in runs for s in seconds_of(run, f"{stage}{op}", settings)] for op in OPS}
        for op in ("F", "STEP"):
            found[op].append(median(by_op[op]))
        if by_op["W"]:
            for op in "IW":
                found[op].append(median(by_op[op]))
        else:  # whole backwards; no stage waits for those of the first stage
            whole_s = median(by_op["B"])
            found["W"].append(whole_s / 2 if stage else whole_s)
            found["I"].append(whole_s - found["W"][-1])
    return {op: tuple(seconds) for op, seconds in found.items()}


def measure(lab: Rig, rate: int, settings: Settings) -> dict[str, Any]:
    """Measure all candidates at one rate: ours, torch's, ours again."""
    lab.rate(rate)
    with flow(lab.lab, 0, 1) as meter:
        goodput = meter.mbit_per_s(1.0)
    found: dict[str, Any] = {"goodput_mbit": goodput, "ours": {}, "torch": {}}
    for turn in range(settings.rounds):
        once = settings.once if turn == 0 and rate == settings.once_at else ()
        swift = settings.swift if rate == settings.swift_at else ()
        slow = settings.slow if rate == settings.slow_at else ()
        for name in settings.ours + once + swift + slow:
            run = run_ours(lab, name, settings)
            found["ours"].setdefault(name, []).append(run)
            step_s = median(run["seconds"][-settings.counted :])
            last = run["schedules"][-1] or name
            print(f"{rate} Mbit/s {name}: {step_s * 1e3:.0f} ms, {last}; {machine_line()}", flush=True)
        plan = to_csv(schedule_named(found["ours"]["auto"][-1]["schedules"][-1]))
        for name, row in run_torch(lab, settings, {"plan": plan}).items():
            found["torch"].setdefault(name, []).append(row)
            print(f"{rate} Mbit/s torch {name}: {median(row['seconds']) * 1e3:.0f} ms", flush=True)
    return found


def figures_of(rate: int, found: dict[str, Any], settings: Settings) -> tuple[dict[str, float], list[list[Any]]]:
    """Compute figures such as vs_torch_1f1b_50mbit, and the rows of the table."""
    ours = {
        name: [s for run in runs for s in run["seconds"][-settings.counted :]] for name, runs in found["ours"].items()
    }
    torch_s = {name: [s for row in rows for s in row["seconds"]] for name, rows in found["torch"].items()}
    middle = {name: median(seconds) for name, seconds in torch_s.items()}
    best = min((name for name in middle if name != "plan"), key=middle.__getitem__)
    work, occupancy_s = work_of(found["ours"]["auto"], settings), MESSAGE_BYTES * 8e-6 / found["goodput_mbit"]
    bound_s, whole_s = (limit_s(work, occupancy_s, split=split) for split in (True, False))
    bare_s = limit_s({op: seconds for op, seconds in work.items() if op != "STEP"}, occupancy_s, split=True)
    figures: dict[str, float] = {}
    for name, kind in (("auto", ""), ("codec", "_codec"), ("tah4", "_tah4"), ("int4", "_int4"), ("zb-v", "_zb_v")):
        if name in ours:
            step_s = median(ours[name])
            figures[f"vs_torch_1f1b_{rate}mbit{kind}"] = middle["1F1B"] / step_s
            figures[f"vs_torch_best_{rate}mbit{kind}"] = middle[best] / step_s
            if name in settings.ours:  # the plan is that of "auto"
                figures[f"vs_torch_runtime_our_plan_{rate}mbit{kind}"] = middle["plan"] / step_s
    free_s = limit_s(work, 0.0, split=True)
    figures[f"most_vs_torch_1f1b_{rate}mbit"] = middle["1F1B"] / free_s
    figures[f"fraction_of_limit_{rate}mbit"] = bound_s / median(ours["auto"])
    figures[f"fraction_of_bare_limit_{rate}mbit"] = bare_s / median(ours["auto"])
    figures[f"fraction_of_whole_limit_{rate}mbit"] = whole_s / median(ours["auto"])
    rows: list[list[Any]] = [["limit", rate, bound_s * 1e3, middle["1F1B"] / bound_s, "", ""]]
    rows.append(["without the optimizer", rate, bare_s * 1e3, middle["1F1B"] / bare_s, "", ""])
    rows.append(["with whole backwards", rate, whole_s * 1e3, middle["1F1B"] / whole_s, "", ""])
    rows.append(["if messages took no time", rate, free_s * 1e3, middle["1F1B"] / free_s, "", ""])
    for name, seconds in ours.items():
        peak = max(max(run["peak_bytes"], default=0) for run in found["ours"][name]) / 2**20
        last = found["ours"][name][-1]["schedules"][-1] or name
        rows.append([f"ours {name}", rate, median(seconds) * 1e3, middle["1F1B"] / median(seconds), round(peak), last])
    for name in torch_s:
        peak = max(max(row["peak_bytes"]) for row in found["torch"][name]) / 2**20
        rows.append([f"torch {name}", rate, middle[name] * 1e3, middle["1F1B"] / middle[name], round(peak), ""])
    return figures, rows


def main() -> int:
    """Measure at every rate."""
    run = BENCH.begin()
    settings, emulated = run.settings, run.options.emulated
    if emulated:
        torch.set_num_threads(1)
        settings = replace(settings, half_s=gpt.slept(EMULATED_S))
        run.raw["settings"] = asdict(settings)
        print(f"half of the blocks sleep {' and '.join(f'{s * 1e3:.1f}' for s in settings.half_s)} ms", flush=True)
    rows: list[list[Any]] = []
    with rig() as lab:
        for host in range(2):  # gloo takes the address of an interface
            lab.lab.address(host, 1 - host, f"10.79.0.{host + 1}/24")
        for rate in settings.rates_mbit:
            run.raw[str(rate)] = measured = measure(lab, rate, settings)
            figures, more = figures_of(rate, measured, settings)
            run.figures |= {f"{key}_emulated" if emulated else key: value for key, value in figures.items()}
            rows += more
    run.table("median steps", ("candidate", "Mbit/s", "ms", "x torch 1F1B", "peak MiB", "at the end"), rows)
    run.end(variant="emulated" if emulated else "")
    return 0

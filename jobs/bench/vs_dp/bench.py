"""Pipelines with replicas against data parallelism: VGG-16 on paper and, with --train, two models that are trained.

On paper, beside what PipeDream published: four hosts of four devices, 10 Gbit/s between hosts, 64 images per device.
"hierarchical" plans, and its plan and plain data parallelism are replayed (replay.py). PipeDream reports 15-1 and 5.28
times data parallelism's speed (SOSP'19, table 1, cluster A: V100). What it comes to depends on how fast a device is, so
several rates are told:

    speedup_vgg16_<t>tflops   data parallelism's seconds per image over the plan's, its sums hidden behind backwards
    unhidden_vgg16_<t>tflops  the same where data parallelism hides none of its sums
    gbit_vgg16_<t>tflops      rate between hosts at which the former would be 5.28

Nothing is run and nothing is timed: seconds follow from the layers' operations (vgg16.py), and all of it is arithmetic.
So both sides get all that their links carry. Where the published factor is larger than what a V100's rate makes, data
parallelism had less of its links than that: no overlap, or rings below the rate of the wire.

    --train --folder FOLDER           scenes of the race are kept there as they end, and not measured again
    --train --folder FOLDER --kept    those that are there make the record
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.bench.vs_dp.replay import Hosts, Stage, all_reduce_s, period_s
from jobs.bench.vs_dp.vgg16 import BATCH, vgg16
from jobs.lib import common
from jobs.lib.kept_cells import ONLY_KEPT, OPTION, KeptCells
from raypipe.ir.cluster import Cluster, Link
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.memory import MemoryModel
from raypipe.planner.partition.hierarchical import hierarchical
from raypipe.planner.partition.limits import Limits

NUM_HOSTS, PER_HOST = 4, 4
INSIDE_GBIT, BETWEEN_GBIT = 80.0, 10.0
"""PCIe inside a host, and what joins hosts."""
PUBLISHED = 5.28
TFLOPS = (10, 15, 20, 30)
"""Of a device. A V100 has 15.7 in fp32; a library that saves products in convolutions is above what it counts here."""
LAYOUT: dict[str, str] = {
    "speedup": r"speedup_(vgg16_\d+tflops)",
    "nothing hidden": r"unhidden_(vgg16_\d+tflops)",
    "Gbit/s for 5.28": r"gbit_(vgg16_\d+tflops)",
    "replicas of the first stage": r"replicas_(vgg16_\d+tflops)",
    "time to accuracy, DDP / choice": r"time_to_accuracy_(\w+_\d+w_\d+mbit)",
    "step, DDP / choice": r"step_(\w+_\d+w_\d+mbit)",
    "step, DDP bf16 / choice": r"bf16_step_(\w+_\d+w_\d+mbit)",
    "step, best candidate / choice": r"choice_(\w+_\d+w_\d+mbit)",
    "the same on paper": r"limit_(\w+_\d+w_\d+mbit)",
    "step, DDP / our data parallelism": r"data_parallel_(\w+_\d+w_\d+mbit)",
    "hidden of the exchange": r"hidden_(\w+_\d+w_\d+mbit)",
    "MB of a step": r"mb_choice_(\w+_\d+w_\d+mbit)",
    "DDP's MB of a step": r"mb_ddp_(\w+_\d+w_\d+mbit)",
}
TARGETS: dict[str, str] = {
    r"choice_\w+_\d+w_\d+mbit": ">= 0.97",
    r"time_to_accuracy_parameters_[48]w_200mbit": ">= 3.0",
    r"data_parallel_\w+_2w_\d+mbit": ">= 0.97",
    r"hidden_\w+_200mbit": ">= 0.7",
}
COMPUTED = r"python jobs/bench/vs_dp"


def planned(graph: ModelGraph, between_gbit: float) -> Partition:
    """What "hierarchical" makes of it."""
    inside, between = (Link(gbit * 1e9 / 8) for gbit in (INSIDE_GBIT, between_gbit))
    memory = MemoryModel(ScheduleSpec("pipedream"), microbatch_size=BATCH)
    cluster = Cluster.hosts(NUM_HOSTS, PER_HOST, inside=inside, between=between)
    return hierarchical(graph, cluster, Limits(memory=memory))


def stage_of(graph: ModelGraph, first: int, last: int, devices: Sequence[int], input_bytes: int = 0) -> Stage:
    """Of nodes [first, last).

    Args:
        input_bytes: per image.
    """
    nodes = graph.nodes[first:last]
    return Stage(
        tuple(devices),
        sum(node.forward_s for node in nodes),
        sum(node.backward_s for node in nodes),
        sum(node.param_bytes for node in nodes),
        input_bytes * BATCH,
    )


def seconds_of(graph: ModelGraph, between_gbit: float) -> tuple[Partition, float, float, float]:
    """The plan, and seconds per micro-batch: its own, data parallelism's, and the latter's where nothing is hidden."""
    hosts = Hosts(PER_HOST, INSIDE_GBIT * 1e9 / 8, between_gbit * 1e9 / 8)
    plan = planned(graph, between_gbit)
    stages = [stage_of(graph, s.start, s.stop, s.devices, s.input_bytes) for s in plan.stages]
    whole = stage_of(graph, 0, len(graph.nodes), range(NUM_HOSTS * PER_HOST))
    round_s = whole.forward_s + whole.backward_s + all_reduce_s(whole.sync_bytes, whole.devices, hosts)
    return plan, period_s(stages, hosts), period_s([whole], hosts), round_s / len(whole.devices)


def gbit_for(graph: ModelGraph, speedup: float) -> float:
    """The rate between hosts at which the plan is so many times as fast as data parallelism, to a hundredth of itself.

    Slower links make more of it, so the rate is halved in on.
    """
    low, high = 0.01, 100.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        _, ours_s, parallel_s, _ = seconds_of(graph, middle)
        low, high = (middle, high) if parallel_s / ours_s > speedup else (low, middle)
    return low


def main() -> None:
    """Work it out at every rate; the last line has the figures."""
    asked = common.arguments(
        __doc__,
        options={
            "--train": {"action": "store_true", "help": "race plans and DDP on emulated devices too"},
            **OPTION,
            **ONLY_KEPT,
        },
    )
    figures: dict[str, float] = {}
    rows: list[list[Any]] = []
    raw: dict[str, Any] = {}
    for tflops in TFLOPS[:2] if asked.quick else TFLOPS:
        graph = vgg16(tflops * 1e12)
        plan, ours_s, parallel_s, unhidden_s = seconds_of(graph, BETWEEN_GBIT)
        name = f"vgg16_{tflops}tflops"
        figures[f"speedup_{name}"] = parallel_s / ours_s
        figures[f"unhidden_{name}"] = unhidden_s / ours_s
        figures[f"gbit_{name}"] = gbit_for(graph, PUBLISHED)
        figures[f"replicas_{name}"] = plan.replicas[0]
        shape = "-".join(map(str, plan.replicas))
        raw[name] = {"plan": shape, "plan_s": ours_s, "parallel_s": parallel_s, "unhidden_s": unhidden_s}
        images = [round(BATCH / seconds) for seconds in (graph.busy_s, ours_s, parallel_s)]
        rows.append([
            f"{tflops} TFLOP/s", shape, plan.stages[-1].first_node, *images, figures[f"speedup_{name}"],
            figures[f"unhidden_{name}"], figures[f"gbit_{name}"],
        ])  # fmt: skip
    columns = (
        "device", "plan", "last begins at", "images/s of one", "of the plan", "data parallel", "speedup",
        "nothing hidden", f"Gbit/s for {PUBLISHED}",
    )  # fmt: skip
    hosts = f"{NUM_HOSTS} hosts of {PER_HOST} devices, {BETWEEN_GBIT:g} Gbit/s between them"
    print(common.table(f"VGG-16, {hosts}; published: 15-1, {PUBLISHED}", columns, rows))
    if asked.train:
        from jobs.bench.vs_dp import race  # not above: what is worked out on paper needs no torch

        kept = KeptCells(asked.folder, only_kept=asked.kept)
        raced, told = race.run(kept, quick=asked.quick)
        figures |= raced
        raw |= {**told, "measured": kept.told}
        kept.date(asked)
    common.finish("bench_vs_dp", figures, raw, asked)

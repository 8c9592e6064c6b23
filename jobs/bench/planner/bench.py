"""How long a whole decision takes on long chains: ``planner.tune.decide``, which ``raypipe plan`` calls.

Stages, micro-batches, cut and schedule are chosen and the step is predicted; nothing is captured or profiled. Processor
seconds of this process, medians: the machine may do something else meanwhile.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from typing import Any

from jobs.lib import common
from jobs.lib.common import machine_line
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.profile import Profile
from raypipe.planner.tune import Request, decide, plan_of

REQUEST = Request(None, None, (), 64, None, num_samples=100_000)
WORKERS = 8
LAYOUT: dict[str, str] = {
    "8 stages": r"plan_seconds_(\d+)_8_stages",
    "open": r"plan_seconds_(\d+)_open",
    "8 stages, tight memory": r"plan_seconds_(\d+)_8_stages_tight_memory",
    "open, tight memory": r"plan_seconds_(\d+)_open_tight_memory",
}


def chain(size: int) -> Profile:
    """Nodes of uneven costs, and a curve with an overhead of two samples."""
    drawn = random.Random(size)
    nodes = []
    for i in range(size):
        third = drawn.uniform(0.2, 1.8) / 3e3
        params, kept, output = drawn.randrange(1 << 18), drawn.randrange(1 << 16), drawn.randrange(1 << 12, 1 << 16)
        nodes.append(
            Node(
                f"op{i}", f"layers.{i // 10}", (), params, output, third, third, third,
                activation_bytes=kept, output_bytes=output, source="measured",
            )
        )  # fmt: skip
    graph = ModelGraph(tuple(nodes))
    return Profile(graph, 4, tuple((b, graph.busy_s * (b + 2) / 6) for b in (1, 2, 4, 8)))


def tight(profile: Profile) -> int:
    """Bytes per worker at which eight workers do, and seven do not."""
    graph = profile.graph
    trained = graph.param_bytes * (1 + 2 + 2)
    return round(1.1 * trained / WORKERS + 4 * sum(n.activation_bytes for n in graph.nodes) / WORKERS)


def cases(size: int) -> dict[str, tuple[Request, Cluster]]:
    """Eight stages asked for, and the number left open; with memory to spare, and just enough."""
    profile = chain(size)
    roomy, scarce = Cluster.uniform(WORKERS), Cluster.uniform(WORKERS, memory_bytes=tight(profile))
    fixed = dataclasses.replace(REQUEST, num_stages=WORKERS)
    return {
        "8 stages": (fixed, roomy),
        "open": (REQUEST, roomy),
        "8 stages, tight memory": (fixed, scarce),
        "open, tight memory": (REQUEST, scarce),
    }


def main() -> None:
    """Time every case; the last line has the figures."""
    asked = common.arguments(__doc__)
    rows: list[list[Any]] = []
    figures: dict[str, float] = {}
    trials: dict[str, list[float]] = {}
    for size in (1_000,) if asked.quick else (1_000, 10_000):
        profile = chain(size)
        for name, (request, cluster) in cases(size).items():
            seconds = []
            for _ in range(3 if asked.quick else 5):
                begin_s = time.process_time()
                plan = plan_of(decide(request, profile, cluster))
                seconds.append(time.process_time() - begin_s)
            took_s = statistics.median(seconds)
            figure = f"plan_seconds_{size}_{name.replace(', ', '_').replace(' ', '_')}"
            figures[figure], trials[figure] = took_s, seconds
            rows.append(
                [f"{size}, {name}", plan.partition.num_stages, plan.num_microbatches, plan.schedule.kind, took_s]
            )
    print(common.table("a whole plan", ("nodes, asked", "stages", "micro-batches", "schedule", "seconds"), rows))
    print(machine_line())
    common.finish("planner", figures, {"seconds": trials}, asked)

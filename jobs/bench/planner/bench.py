"""Time of a whole decision on long chains: ``planner.search.decide``, which ``raypipe plan`` calls.

Stages, micro-batches, cut and schedule are chosen and the step is predicted; nothing is captured or profiled. Figures
are medians of processor seconds of this process, so that other work on the machine counts little.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from jobs.lib.common import Bench
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.profile import Profile
from raypipe.planner.search import Request, decide, plan_of

REQUEST = Request(None, None, (), 64, None, num_samples=100_000)
WORKERS = 8


@dataclass(frozen=True)
class Settings:
    """Sizes of the chains in nodes, and trials of each case."""

    sizes: tuple[int, ...] = (1_000, 10_000)
    trials: int = 5


BENCH = Bench(
    "planner",
    __doc__,
    settings=Settings(),
    quick=Settings((1_000,), 3),
    layout={
        "8 stages": r"plan_seconds_(\d+)_8_stages",
        "open": r"plan_seconds_(\d+)_open",
        "8 stages, tight memory": r"plan_seconds_(\d+)_8_stages_tight_memory",
        "open, tight memory": r"plan_seconds_(\d+)_open_tight_memory",
    },
)


def chain(size: int) -> Profile:
    """Make nodes of uneven costs, and a t(b) with an overhead of two samples."""
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
    """Compute bytes per worker at which eight workers suffice, and seven do not."""
    graph = profile.graph
    trained = graph.param_bytes * (1 + 2 + 2)
    return round(1.1 * trained / WORKERS + 4 * sum(n.activation_bytes for n in graph.nodes) / WORKERS)


def cases(size: int) -> dict[str, tuple[Request, Cluster]]:
    """Build the cases: eight stages and an open number of them, with ample and with tight memory."""
    profile = chain(size)
    roomy, scarce = Cluster.uniform(WORKERS), Cluster.uniform(WORKERS, memory_bytes=tight(profile))
    fixed = dataclasses.replace(REQUEST, num_stages=WORKERS)
    return {
        "8 stages": (fixed, roomy),
        "open": (REQUEST, roomy),
        "8 stages, tight memory": (fixed, scarce),
        "open, tight memory": (REQUEST, scarce),
    }


def main() -> int:
    """Time every case."""
    run = BENCH.begin()
    rows: list[list[Any]] = []
    trials: dict[str, list[float]] = {}
    for size in run.settings.sizes:
        profile = chain(size)
        for name, (request, cluster) in cases(size).items():
            seconds = []
            for _ in range(run.settings.trials):
                begin_s = time.process_time()
                plan = plan_of(decide(request, profile, cluster))
                seconds.append(time.process_time() - begin_s)
            took_s = statistics.median(seconds)
            figure = f"plan_seconds_{size}_{name.replace(', ', '_').replace(' ', '_')}"
            run.figures[figure], trials[figure] = took_s, seconds
            rows.append(
                [f"{size}, {name}", plan.partition.num_stages, plan.num_microbatches, plan.schedule.kind, took_s]
            )
    run.raw["seconds"] = trials
    run.table("a whole plan", ("nodes, case", "stages", "micro-batches", "schedule", "seconds"), rows)
    run.end()
    return 0

"""How long a partition takes, how good it is, and what it is worth when run: ten vision nets on 4 and 8 equal devices.

Each net is profiled on this machine's CPU and put at the grain of layers; grouping counts as solving, profiling is
timed apart. Links are free, so that the optimum is a matter of balance and other methods can be held beside it:

    vs_optimum          our bottleneck / the optimum over all closed sets, by another algorithm (reference.py)
    vs_optimum_fine     the same with every operation a node of its own, for both
    layers_vs_fine      our bottleneck at the grain of layers / that optimum: what the coarser grain costs
    vs_uniform          the bottleneck of equal numbers of layers / ours
    vs_by_time, by_size torchgpipe's block partition by seconds and by parameters / ours, where torchgpipe is installed
    predicted_speedup   one device's step / the pipeline's, M = 32: total x M / (bottleneck x (M + n - 1))
    replayed_*          the planned layers on emulated accelerators, M = 32 (replay.py)

With --handicap, the emulated runs repeat with that much more in every forward and backward of theirs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jobs.bench.partition.reference import least_bottleneck
from jobs.bench.partition.replay import COLUMNS as REPLAY_COLUMNS
from jobs.bench.partition.replay import Replay, bound, figures_of, handicaps_seen, replay, row_of
from jobs.lib import common
from jobs.lib.common import machine, machine_line
from jobs.lib.vision_nets import IMAGE_SIZES, build

DEVICES = (4, 8)
MICROBATCHES = 32
BATCH = 4
PICO = 1e12
PAPER_SECONDS = {
    "vgg16": (0.01, 0.03), "resnet18": (0.07, 0.21), "resnet50": (0.38, 1.17), "resnet101": (1.20, 3.69),
    "alexnet": (0.02, 0.01), "resnext50_32x4d": (0.41, 1.17), "resnext101_32x8d": (1.21, 3.58),
    "inception_v3": (3.07, 4.12), "densenet121": (1.29, 3.73), "squeezenet1_0": (0.06, 0.20),
}  # fmt: skip
"""What the antichain-DAG paper's table gives for 4 and 8 devices."""
FINE_STATES = 10**6
COLUMNS = (
    "net, devices", "layers", "solve s", "paper s", "vs optimum", "uniform", "by time", "by size", "speedup",
    "of bound",
)  # fmt: skip
FINE_COLUMNS = ("net, devices", "operations", "solve s", "vs optimum", "layers / fine")


class Net(NamedTuple):
    """A profiled net: the graph of its operations, seconds that the profile took, and its raw ratios."""

    graph: Any
    capture_s: float
    profile_s: float
    raw_ratio: tuple[float, float]


class Solved(NamedTuple):
    """One partition: seconds to find it, its bottleneck, and the grouped graph that was cut."""

    solve_s: float
    bottleneck_s: float
    stages: list[float]
    graph: Any


def profiled(name: str, repeats: int) -> Net:
    """Capture and profile a net; nothing is read from a cache."""
    import torch

    from raypipe.engine.capture import capture
    from raypipe.engine.profiling import profile_graph

    size = IMAGE_SIZES[name]
    net = build(name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 3, size, size, generator=generator)
    y = torch.randint(0, 10, (BATCH,), generator=generator)
    begin_s = time.perf_counter()
    captured = capture(net, (x, y), ("x", "y"), torch.nn.functional.cross_entropy, evaluates=False)
    captured_s = time.perf_counter()
    profile = profile_graph(captured, {"x": x, "y": y}, sizes=(), repeats=repeats)
    return Net(profile.graph, captured_s - begin_s, time.perf_counter() - captured_s, profile.raw_ratio)


def solved(graph: Any, num_devices: int, repeats: int) -> Solved:
    """Group and cut; the median time of several, each from the graph of operations."""
    from raypipe.ir.cluster import Cluster
    from raypipe.ir.coarse import group_nodes, module_groups
    from raypipe.planner.partition.antichain import antichain
    from raypipe.planner.partition.limits import Limits

    seconds = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        layers = group_nodes(graph, module_groups(graph)).graph
        found = antichain(layers, Cluster.uniform(num_devices), Limits(num_stages=num_devices))
        seconds.append(time.perf_counter() - begin_s)
    return Solved(statistics.median(seconds), found.bottleneck_s, [s.period_s for s in found.stages], layers)


def cut_bottleneck_s(graph: Any, sizes: Sequence[int]) -> float:
    """Of runs of nodes with these lengths."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return max(sum(node.busy_s for node in graph.nodes[a:b]) for a, b in itertools.pairwise(ends))


def uniform(graph: Any, num_devices: int) -> list[int]:
    """Equal numbers of layers, the first stages one more where they do not divide."""
    each, more = divmod(len(graph.nodes), num_devices)
    return [each + (stage < more) for stage in range(num_devices)]


def block_partition() -> Callable[..., list[list[float]]] | None:
    """torchgpipe's balance_by_time and balance_by_size, from measured costs on; None where it is not installed."""
    try:
        from torchgpipe.balance.blockpartition import solve
    except ImportError:
        return None
    found: Callable[..., list[list[float]]] = solve
    return found


def compare(name: str, net: Net, repeats: int, figures: dict[str, float]) -> tuple[list[list[Any]], Any]:
    """Solve for every number of devices; rows for the table, figures for the last line, and the layers."""
    rows = []
    blocks = block_partition()
    for place, count in enumerate(DEVICES):
        found = solved(net.graph, count, repeats)
        nodes = found.graph.nodes
        optimum_ps = optimum(found.graph, count)
        vs_optimum = found.bottleneck_s * PICO / optimum_ps if optimum_ps else math.nan
        others = {"uniform": cut_bottleneck_s(found.graph, uniform(found.graph, count))}
        if blocks is not None:
            for label, costs in (
                ("by_time", [node.busy_s for node in nodes]),
                ("by_size", [float(node.param_bytes + node.activation_bytes * BATCH) for node in nodes]),
            ):
                others[label] = cut_bottleneck_s(found.graph, [len(b) for b in blocks(costs, partitions=count)])
        total_s = sum(node.busy_s for node in nodes)
        speedup = total_s * MICROBATCHES / (found.bottleneck_s * (MICROBATCHES + count - 1))
        of_bound = speedup / bound([node.busy_s for node in nodes], count, MICROBATCHES)
        key = f"{name}_{count}"
        figures |= {f"solve_seconds_{key}": found.solve_s, f"predicted_speedup_{key}": speedup}
        figures |= {f"vs_{label}_{key}": other_s / found.bottleneck_s for label, other_s in others.items()}
        if optimum_ps:
            figures[f"vs_optimum_{key}"] = vs_optimum
        ratios = [
            others[label] / found.bottleneck_s if label in others else "-"
            for label in ("uniform", "by_time", "by_size")
        ]
        rows.append(
            [key, len(nodes), found.solve_s, PAPER_SECONDS[name][place], vs_optimum, *ratios, speedup, of_bound]
        )
    return rows, found.graph


def optimum(graph: Any, num_devices: int) -> int | None:
    """Picoseconds of the least bottleneck, by the reference; None where the graph has too many closed sets for it."""
    times_ps = [round(node.busy_s * PICO) for node in graph.nodes]
    return least_bottleneck(times_ps, (*(graph.edges or ()), *graph.before), num_devices, graph.together)


def compare_fine(name: str, graph: Any, layers: Any, figures: dict[str, float]) -> list[list[Any]]:
    """The solver and the reference on the graph of operations, and what the grain of layers costs beside it."""
    from raypipe.ir.cluster import Cluster
    from raypipe.planner.partition.antichain import antichain
    from raypipe.planner.partition.limits import Limits

    rows = []
    for count in DEVICES:
        cluster, limits = Cluster.uniform(count), Limits(num_stages=count, max_states=FINE_STATES)
        begin_s = time.perf_counter()
        fine_s = antichain(graph, cluster, limits).bottleneck_s
        solve_s = time.perf_counter() - begin_s
        optimum_ps = optimum(graph, count)
        coarse_s = antichain(layers, cluster, limits).bottleneck_s
        key = f"{name}_{count}"
        figures |= {f"solve_seconds_fine_{key}": solve_s, f"layers_vs_fine_{key}": coarse_s / fine_s}
        if optimum_ps:
            figures[f"vs_optimum_fine_{key}"] = fine_s * PICO / optimum_ps
        vs_optimum = fine_s * PICO / optimum_ps if optimum_ps else math.nan
        rows.append([key, len(graph.nodes), solve_s, vs_optimum, coarse_s / fine_s])
    return rows


def replays(
    layers: dict[str, Any], asked: argparse.Namespace, figures: dict[str, float]
) -> tuple[list[Replay], list[Replay]]:
    """Every plan run, and run with the handicap where one is asked for."""
    from jobs.lib.emulated import CPU_SHARE
    from raypipe.runtime.driver.client import connected

    plain: list[Replay] = []
    slowed: list[Replay] = []
    devices = DEVICES[:1] if asked.quick else DEVICES
    with connected(max(devices), {"CPU": CPU_SHARE}):  # one Ray for all of them
        for count in devices:
            found = replay(layers, count, MICROBATCHES, 3 if asked.quick else 8, asked.handicap)
            plain += found[: len(layers)]
            slowed += found[len(layers) :]
            figures |= figures_of(found[: len(layers)], count)
    return plain, slowed


def main() -> int:
    """1 when a handicap did not show as predicted, else 0."""
    asked = common.arguments(__doc__)
    names = ("alexnet", "squeezenet1_0") if asked.quick else tuple(IMAGE_SIZES)
    repeats = 1 if asked.quick else 5
    figures: dict[str, float] = {}
    rows: list[list[Any]] = []
    fine_rows: list[list[Any]] = []
    nets: dict[str, Any] = {}
    layers: dict[str, Any] = {}
    for name in names:
        net = profiled(name, repeats)
        figures[f"profile_seconds_{name}"] = net.profile_s
        nets[name] = {"capture_s": net.capture_s, "profile_s": net.profile_s, "raw_ratio": net.raw_ratio}
        found, layers[name] = compare(name, net, repeats, figures)
        rows += found
        fine_rows += compare_fine(name, net.graph, layers[name], figures)
        print(
            f"{name}: captured in {net.capture_s:.1f} s, profiled in {net.profile_s:.1f} s; {machine_line()}",
            flush=True,
        )
    for count in DEVICES:
        speedups = [figures[f"predicted_speedup_{name}_{count}"] for name in names]
        figures[f"predicted_speedup_median_{count}"] = statistics.median(speedups)
    plain, slowed = replays(layers, asked, figures)
    print(common.table("partitions; others' bottlenecks over ours", COLUMNS, rows))
    print("\n" + common.table("every operation a node", FINE_COLUMNS, fine_rows))
    title = f"replayed on emulated devices, {MICROBATCHES} micro-batches; {machine_line()}"
    print("\n" + common.table(title, REPLAY_COLUMNS, map(row_of, plain)))
    seen = not asked.handicap or handicaps_seen(plain, slowed, asked.handicap)
    raw = {
        "machine": machine(),
        "nets": nets,
        "rows": rows,
        "fine_rows": fine_rows,
        "replays": [plan._asdict() for plan in plain],
        "handicapped": [plan._asdict() for plan in slowed],
    }
    common.finish("bench_partition", figures, raw, asked.json)
    return 0 if seen else 1

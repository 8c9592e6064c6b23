"""Planned partitions on paper: how long one takes to find, and its bottleneck beside the optimum and other methods'."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jobs.bench.partition.reference import least_bottleneck
from jobs.lib.common import median

__all__ = ["BATCH", "COLUMNS", "FINE_COLUMNS", "Fine", "Solved", "bound", "layers_of", "solve", "solve_fine"]

BATCH = 4
"""Samples at which the nets are profiled."""
PICO = 1e12
FINE_STATES = 10**6
BLOCKS = ("by_time", "by_size")
"""Other methods that torchgpipe has."""
PAPER_SECONDS = {
    "vgg16": (0.01, 0.03), "resnet18": (0.07, 0.21), "resnet50": (0.38, 1.17), "resnet101": (1.20, 3.69),
    "alexnet": (0.02, 0.01), "resnext50_32x4d": (0.41, 1.17), "resnext101_32x8d": (1.21, 3.58),
    "inception_v3": (3.07, 4.12), "densenet121": (1.29, 3.73), "squeezenet1_0": (0.06, 0.20),
}  # fmt: skip
"""What the antichain-DAG paper's table gives for 4 and 8 devices."""
PAPER_DEVICES = (4, 8)
COLUMNS = (
    "net, devices", "layers", "solve s", "paper s", "vs optimum", "uniform", "by time", "by size", "speedup",
    "of bound",
)  # fmt: skip
FINE_COLUMNS = ("net, devices", "operations", "solve s", "vs optimum", "layers / fine")


def bound(busy_s: Sequence[float], num_devices: int, num_microbatches: int) -> float:
    """min(n, total / largest) x M / (M + n - 1): the speedup where all stages take the shortest period there can be.

    Stages of less than the period fill and drain sooner, so a plan with one large stage and small ones can exceed it.
    """
    share = num_microbatches / (num_microbatches + num_devices - 1)
    return min(num_devices, sum(busy_s) / max(busy_s)) * share


class Solved(NamedTuple):
    """A partition at the grain of layers.

    Attributes:
        trials_s: to group and cut, each from the graph of operations.
        optimum_s: the least bottleneck there is; None where there are too many closed sets to know.
        others_s: bottlenecks of other methods.
        layers_s: forward and backward of every layer.
    """

    net: str
    num_devices: int
    num_microbatches: int
    trials_s: list[float]
    bottleneck_s: float
    optimum_s: float | None
    others_s: dict[str, float]
    layers_s: list[float]

    @property
    def key(self) -> str:
        return f"{self.net}_{self.num_devices}"

    @property
    def speedup(self) -> float:
        """One device's step over the pipeline's, on paper."""
        times = self.num_microbatches / (self.num_microbatches + self.num_devices - 1)
        return sum(self.layers_s) / self.bottleneck_s * times

    def figures(self) -> dict[str, float]:
        """solve_seconds_vgg16_4 and its kin."""
        found = {f"solve_seconds_{self.key}": median(self.trials_s), f"predicted_speedup_{self.key}": self.speedup}
        found |= {f"vs_{label}_{self.key}": other_s / self.bottleneck_s for label, other_s in self.others_s.items()}
        if self.optimum_s is not None:
            found[f"vs_optimum_{self.key}"] = self.bottleneck_s / self.optimum_s
        return found

    def row(self) -> list[Any]:
        """For the table under COLUMNS."""
        figures = self.figures()
        ratios = [figures.get(f"vs_{label}_{self.key}", "-") for label in ("optimum", "uniform", *BLOCKS)]
        paper = PAPER_SECONDS[self.net][PAPER_DEVICES.index(self.num_devices)]
        of_bound = self.speedup / bound(self.layers_s, self.num_devices, self.num_microbatches)
        return [self.key, len(self.layers_s), median(self.trials_s), paper, *ratios, self.speedup, of_bound]


def layers_of(graph: Any) -> Any:
    """The graph of operations at the grain of layers."""
    from raypipe.ir.coarse import group_nodes, module_groups

    return group_nodes(graph, module_groups(graph)).graph


def solve(net: str, graph: Any, num_devices: int, num_microbatches: int, repeats: int) -> Solved:
    """Group and cut, several times; then ask the reference and the other methods about the same layers."""
    from raypipe.ir.cluster import Cluster
    from raypipe.planner.partition.antichain import antichain
    from raypipe.planner.partition.limits import Limits

    seconds = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        layers = layers_of(graph)
        found = antichain(layers, Cluster.uniform(num_devices), Limits(num_stages=num_devices))
        seconds.append(time.perf_counter() - begin_s)
    busy_s = [node.busy_s for node in layers.nodes]
    return Solved(
        net, num_devices, num_microbatches, seconds, found.bottleneck_s, _optimum_s(layers, num_devices),
        _others_s(layers, num_devices), busy_s,
    )  # fmt: skip


def _others_s(layers: Any, num_devices: int) -> dict[str, float]:
    """Bottlenecks of equal numbers of layers and, where torchgpipe is installed, of its block partition."""
    found = {"uniform": _cut_s(layers, _uniform(layers, num_devices))}
    blocks = _block_partition()
    if blocks is not None:
        costs = (
            [node.busy_s for node in layers.nodes],
            [float(node.param_bytes + BATCH * node.activation_bytes) for node in layers.nodes],
        )
        for label, values in zip(BLOCKS, costs, strict=True):
            found[label] = _cut_s(layers, [len(block) for block in blocks(values, partitions=num_devices)])
    return found


def _cut_s(graph: Any, sizes: Sequence[int]) -> float:
    """The bottleneck of runs of nodes with these lengths."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return max(sum(node.busy_s for node in graph.nodes[a:b]) for a, b in itertools.pairwise(ends))


def _uniform(graph: Any, num_devices: int) -> list[int]:
    """Equal numbers of layers, the first stages one more where they do not divide."""
    each, more = divmod(len(graph.nodes), num_devices)
    return [each + (stage < more) for stage in range(num_devices)]


def _block_partition() -> Callable[..., list[list[float]]] | None:
    """torchgpipe's balance_by_time and balance_by_size, from measured costs on; None where it is not installed."""
    try:
        from torchgpipe.balance.blockpartition import solve as found
    except ImportError:
        return None
    blocks: Callable[..., list[list[float]]] = found
    return blocks


def _optimum_s(graph: Any, num_devices: int) -> float | None:
    """The least bottleneck by the reference; None where the graph has too many closed sets for it."""
    times_ps = [round(node.busy_s * PICO) for node in graph.nodes]
    found = least_bottleneck(times_ps, (*(graph.edges or ()), *graph.before), num_devices, graph.together)
    return None if found is None else found / PICO


class Fine(NamedTuple):
    """The partition with every operation a node of its own, and what the coarser grain costs beside it."""

    key: str
    operations: int
    solve_s: float
    bottleneck_s: float
    optimum_s: float | None
    of_layers_s: float

    def figures(self) -> dict[str, float]:
        found = {
            f"solve_seconds_fine_{self.key}": self.solve_s,
            f"layers_vs_fine_{self.key}": self.of_layers_s / self.bottleneck_s,
        }
        if self.optimum_s is not None:
            found[f"vs_optimum_fine_{self.key}"] = self.bottleneck_s / self.optimum_s
        return found

    def row(self) -> list[Any]:
        """For the table under FINE_COLUMNS."""
        figures = self.figures()
        ratios = [figures.get(f"{name}_{self.key}", "-") for name in ("vs_optimum_fine", "layers_vs_fine")]
        return [self.key, self.operations, self.solve_s, *ratios]


def solve_fine(net: str, graph: Any, num_devices: int) -> Fine:
    """The solver and the reference on the graph of operations."""
    from raypipe.ir.cluster import Cluster
    from raypipe.planner.partition.antichain import antichain
    from raypipe.planner.partition.limits import Limits

    cluster, limits = Cluster.uniform(num_devices), Limits(num_stages=num_devices, max_states=FINE_STATES)
    begin_s = time.perf_counter()
    fine_s = antichain(graph, cluster, limits).bottleneck_s
    solve_s = time.perf_counter() - begin_s
    coarse_s = antichain(layers_of(graph), cluster, limits).bottleneck_s
    key = f"{net}_{num_devices}"
    return Fine(key, len(graph.nodes), solve_s, fine_s, _optimum_s(graph, num_devices), coarse_s)

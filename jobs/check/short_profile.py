"""What planning from the default profile costs: its cuts and numbers of micro-batches, judged by a longer profile.

    python jobs/check/short_profile.py           ten vision nets, and bench/microbatch's models

Every model is measured twice in this process: within PipelineConfig's budget of processor time, as users' runs are,
and without one, every operation several times; the order of the two changes from model to model.
Plans are made from both.

    cut_<net>_<devices>            bottleneck of the cut by the longer profile's seconds, over that of its own cut
    number_<model>_<stages>        the step at the number of micro-batches chosen, over that at the longer one's choice,
                                   simulated with stages that were measured at every size
    short_s_<net>, long_s_<net>    seconds that the profiles took

Needs torchvision. The exit status is 1 where a choice costs more than 5 %.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

import torch
from torch.utils.data import TensorDataset

from jobs.bench.microbatch.sweeps import MODELS, Model, divisors, seconds_at, simulated_s, stage_seconds, trainer_of
from jobs.bench.partition.solving import BATCH, layers_of
from jobs.lib import common
from jobs.lib.vision_nets import IMAGE_SIZES, build
from raypipe.engine.capture import capture
from raypipe.engine.profiling import profile_graph
from raypipe.engine.profiling.within import profile_within
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.plan_facts import Partition
from raypipe.planner.partition.antichain import antichain
from raypipe.planner.partition.limits import Limits

DEVICES = (4, 8)
STAGES = (2, 4)
"""Of plans whose number of micro-batches is judged."""
REPEATS = 5
TOLERANCE = 0.05
UNLIMITED_S = 1e6
LAYOUT: dict[str, str] = {
    "cut": r"cut_(\w+_\d)",
    "number": r"number_(\w+_\d)",
    "short, s": r"short_s_(\w+)",
    "long, s": r"long_s_(\w+)",
}
TARGETS: dict[str, str] = {r"(cut|number)_\w+_\d": "<= 1.05"}


def images(side: int, count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3, side, side), torch.randint(10, (count,)))


def vision(name: str) -> Model:
    """One of the ten nets, as bench/microbatch has its models."""
    return Model(partial(build, name), partial(images, IMAGE_SIZES[name]), torch.nn.functional.cross_entropy)


NETS = {name: (model, 64) for name, model in MODELS.items()}
NETS |= {name: (vision(name), 16) for name in ("vgg16", "resnet50", "densenet121")}
"""Models whose number of micro-batches is judged, and their mini-batches."""


def profiles_of(name: str, first: str) -> dict[str, tuple[Any, float]]:
    """By "short" and "long": the graph of layers with its seconds, and how long the profile took.

    Args:
        first: which of them is measured first.
    """
    side = IMAGE_SIZES[name]
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 3, side, side, generator=drawn)
    columns = {"x": x, "y": torch.randint(0, 10, (BATCH,), generator=drawn)}
    net = build(name)
    captured = capture(net, (x, columns["y"]), ("x", "y"), torch.nn.functional.cross_entropy, evaluates=False)
    ways = {
        "short": lambda: profile_within(captured, columns, sizes=()),
        "long": lambda: profile_graph(captured, columns, sizes=(), repeats=REPEATS),
    }
    found = {}
    for which in sorted(ways, key=lambda which: which != first):
        begin_s = time.perf_counter()
        profile = ways[which]()
        found[which] = layers_of(profile.graph), time.perf_counter() - begin_s
    return found


def cut_of(layers: Any, count: int) -> Partition:
    return antichain(layers, Cluster.uniform(count), Limits(num_stages=count))


def bottleneck_s(partition: Partition, layers: Any) -> float:
    """Of this cut, by these seconds."""
    return max(sum(layers.nodes[at].busy_s for at in partition.nodes_of(stage)) for stage in partition.stages)


def number_ratio(name: str, count: int) -> tuple[float, dict[str, Any]]:
    """The step at the number of micro-batches that the shorter profile chose, over that at the longer one's; and both.

    Both are simulated with seconds of the stages that were measured at every size: a profile's line is no judge of the
    other's, because kernels change with the size (16 samples of ResNet-50 take less time than 8 on some processors).
    """
    model, minibatch_size = NETS[name]
    torch.manual_seed(0)
    built, data = model.make(), model.data(2 * minibatch_size)
    cluster = Cluster(tuple(Device(f"device{i}") for i in range(count)), (Link(),))
    plans = []
    for budget in ({}, {"profile_budget_s": UNLIMITED_S}):
        with tempfile.TemporaryDirectory(prefix="short-profile-") as folder:
            os.environ["RAYPIPE_CACHE_DIR"] = folder  # nothing that was measured before
            trainer = trainer_of(model, built, data, count, minibatch_size, pipeline=budget)
            plans.append(trainer.plan(profiled=trainer.profile(), cluster=cluster))
    short, long = plans
    stage_s = stage_seconds(model, built, data, long.partition.cuts, divisors(minibatch_size), REPEATS)

    def step_s(number: int) -> float:
        return simulated_s(seconds_at(stage_s, minibatch_size / number), number)

    raw = {"short": short.num_microbatches, "long": long.num_microbatches, "stage_s": stage_s}
    return step_s(short.num_microbatches) / step_s(long.num_microbatches), raw


def main() -> int:
    """1 where a choice costs more than 5 %."""
    asked = common.arguments(__doc__)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {"cuts": {}, "numbers": {}}
    rows = []
    names = ("alexnet", "squeezenet1_0") if asked.quick else tuple(IMAGE_SIZES)
    for at, name in enumerate(names):
        found = profiles_of(name, ("short", "long")[at % 2])
        (short, short_s), (long, long_s) = found["short"], found["long"]
        figures |= {f"short_s_{name}": short_s, f"long_s_{name}": long_s}
        for count in DEVICES:
            cuts = [cut_of(layers, count) for layers in (short, long)]
            ours, best = (bottleneck_s(cut, long) for cut in cuts)
            figures[f"cut_{name}_{count}"] = ours / best
            raw["cuts"][f"{name}_{count}"] = {
                "short": cuts[0].cuts,
                "long": cuts[1].cuts,
                "bottlenecks_s": (ours, best),
            }
        rows.append([name, short_s, long_s, *(figures[f"cut_{name}_{count}"] for count in DEVICES)])
        print(f"{name}: {rows[-1][1:]}; {common.machine_line()}", flush=True)
    for name in MODELS if asked.quick else NETS:
        for count in STAGES:
            ratio, chosen = number_ratio(name, count)
            figures[f"number_{name}_{count}"], raw["numbers"][f"{name}_{count}"] = ratio, chosen
            print(f"{name} on {count}: {chosen['short']}, {chosen['long']}; {common.machine_line()}", flush=True)
    columns = ("net", "short, s", "long, s", *(f"cut / long's, {count}" for count in DEVICES))
    print(common.table("cuts made from the default profile", columns, rows))
    numbers = {name: figure for name, figure in figures.items() if name.startswith("number")}
    print(common.table("numbers of micro-batches", ("model, stages", "step / long's"), list(numbers.items())))
    common.finish("check_short_profile", figures, raw, asked)
    judged = [figure for name, figure in figures.items() if name.startswith(("cut", "number"))]
    return 0 if max(judged) <= 1 + TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())

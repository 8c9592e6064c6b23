"""Planned partitions, run: stages of emulated accelerators that take the seconds which the plan gives them.

    layers of a net --> decide, as `raypipe plan` does --> (F, B) by stage --> x factor --> PipelineTrainer.fit

The profile's seconds are multiplied by one factor per plan, so that its slowest stage takes SLOWEST_S per micro-batch
and a wake-up of an emulated accelerator is small beside it. All nets of one number of devices share a fleet and take
turns. Boundary tensors are small and of one size (emulated.py), for the partitions were planned with free links.

    speedup      M x one device's seconds per micro-batch / the measured step
    of bound     speedup / (min(n, total / largest layer) x M / (M + n - 1))
    vs predicted measured step / the plan's own simulated step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jobs.bench.partition.solving import bound
from jobs.lib import common
from jobs.lib.common import machine_line, median

__all__ = ["COLUMNS", "Replay", "figures_of", "handicaps_seen", "replay", "row_of"]

SLOWEST_S = 0.040
COLUMNS = ("net, devices", "factor", "slowest", "predicted ms", "measured ms", "vs predicted", "speedup", "of bound")


class Replay(NamedTuple):
    """One plan and its steps, in emulated seconds.

    Attributes:
        factor: emulated seconds per profiled second.
        times: (forward_s, backward_s) by stage.
        total_s: of one micro-batch on one device.
        bound: of the speedup.
        predicted_s: the plan's simulated step.
        steps_s: measured, after those to warm up.
    """

    name: str
    factor: float
    times: list[tuple[float, float]]
    num_microbatches: int
    total_s: float
    bound: float
    predicted_s: float
    steps_s: list[float]

    @property
    def speedup(self) -> float:
        return self.num_microbatches * self.total_s / median(self.steps_s)

    @property
    def vs_predicted(self) -> float:
        return median(self.steps_s) / self.predicted_s


def planned(name: str, layers: Any, num_devices: int, num_microbatches: int, handicap_s: float = 0.0) -> Replay:
    """The plan of a profiled graph for equal devices with free links, scaled; nothing is run.

    Args:
        handicap_s: added to every forward and backward, after scaling.
    """
    from raypipe.ir.cluster import Cluster
    from raypipe.ir.profile import Profile
    from raypipe.planner.schedule.lower import lower
    from raypipe.planner.simulate.serial import Costs, makespan_s
    from raypipe.planner.tune import Request, build_schedule, decide

    # What the profile calls a micro-batch counts as one sample: its size is settled, and so is their number.
    request = Request(
        num_stages=num_devices,
        num_workers=None,
        split_points=(),
        minibatch_size=num_microbatches,
        num_microbatches=num_microbatches,
        num_samples=num_microbatches,
        partitioner="antichain",
        schedule="slack",  # an emulated backward is one sleep, which no schedule can part
        slack=2,
    )
    decision = decide(request, Profile(layers, 1), Cluster.uniform(num_devices))
    stages = decision.prediction.stages
    factor = SLOWEST_S / max(stage.busy_s for stage in stages)
    times = [(s.forward_s * factor + handicap_s, s.backward_s * factor + handicap_s) for s in stages]
    predicted_s = decision.prediction.step_s * factor
    if handicap_s:
        schedule = lower(build_schedule(decision.request, num_devices, num_microbatches, 0))
        predicted_s = makespan_s(schedule, Costs(*map(tuple, zip(*times, strict=True))))
    busy_s = [node.busy_s for node in layers.nodes]
    limit = bound(busy_s, num_devices, num_microbatches)
    return Replay(
        f"{name}_{num_devices}", factor, times, num_microbatches, sum(busy_s) * factor, limit, predicted_s, []
    )


def replay(
    layers: Mapping[str, Any], num_devices: int, num_microbatches: int, rounds: int, handicap_s: float = 0.0
) -> list[Replay]:
    """Run the plans of all nets in turn; with a handicap, those that have it follow those that have not.

    Args:
        layers: profiled graphs by net.
        rounds: steps of each.
    """
    from jobs.lib.emulated import run_in_turn

    plans = [
        planned(name, graph, num_devices, num_microbatches, extra_s)
        for extra_s in ((0.0, handicap_s) if handicap_s else (0.0,))
        for name, graph in layers.items()
    ]
    steps = run_in_turn([plan.times for plan in plans], num_microbatches, rounds)
    found = [plan._replace(steps_s=seconds) for plan, seconds in zip(plans, steps, strict=True)]
    print(f"{len(plans)} plans on {num_devices} emulated devices, {rounds} steps each; {machine_line()}", flush=True)
    return found


def figures_of(found: Sequence[Replay], num_devices: int) -> dict[str, float]:
    """Of plans without a handicap."""
    figures: dict[str, float] = {}
    for plan in found:
        figures[f"replayed_speedup_{plan.name}"] = plan.speedup
        figures[f"replayed_of_bound_{plan.name}"] = plan.speedup / plan.bound
        figures[f"replayed_vs_predicted_{plan.name}"] = plan.vs_predicted
    for figure in ("speedup", "of_bound", "vs_predicted"):
        values = [figures[f"replayed_{figure}_{plan.name}"] for plan in found]
        figures[f"replayed_{figure}_median_{num_devices}"] = median(values)
    return figures


def row_of(plan: Replay) -> list[Any]:
    """For the table under COLUMNS."""
    slowest = max(range(len(plan.times)), key=lambda stage: sum(plan.times[stage]))
    measured_ms = median(plan.steps_s) * 1e3
    ratios = [plan.vs_predicted, plan.speedup, plan.speedup / plan.bound]
    return [plan.name, plan.factor, f"stage {slowest}", plan.predicted_s * 1e3, measured_ms, *ratios]


def handicaps_seen(plain: Sequence[Replay], slowed: Sequence[Replay], handicap_s: float) -> bool:
    """Whether every plan's step moved as the simulator says; all are printed."""
    seen = True
    for before, after in zip(plain, slowed, strict=True):
        ratio = median(after.steps_s) / before.predicted_s
        moves_by = after.predicted_s / before.predicted_s - 1
        agrees = common.handicap_seen(before.name, handicap_s, before.vs_predicted, ratio, moves_by)
        seen = agrees and seen
    return seen

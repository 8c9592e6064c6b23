"""Planned partitions, run: stages of emulated accelerators that take the seconds which the plan gives them.

    layers of a net --> decide, as `raypipe plan` does --> (F, B) by stage --> x factor --> PipelineTrainer.fit

The profile's seconds are multiplied by one factor per plan, so that its slowest stage takes SLOWEST_S per micro-batch
and a wake-up of an emulated accelerator is small beside it. All nets of one number of devices share a fleet and take
turns. Links are free, or have a rate: then nets are planned for it, with the slack of least predicted step, and every
message is held, in emulated seconds, for what the net's own boundary takes at that rate. Plans of one slack share a
fleet then.

    speedup      M x one device's seconds per micro-batch / the measured step
    of bound     speedup / (min(n, total / largest layer) x M / (M + n - 1)), which counts computation alone
    vs predicted measured step / the plan's own simulated step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jobs.bench.partition.solving import BATCH, bound
from jobs.lib import common
from jobs.lib.common import machine_line, median

__all__ = [
    "COLUMNS",
    "Replay",
    "below",
    "figures_of",
    "handicaps_seen",
    "planned",
    "replay",
    "replay_linked",
    "row_of",
    "slowed",
]

SLOWEST_S = 0.040
SLACKS = (2, 3, 4, 6, 8)
COLUMNS = (
    "net, devices, link", "factor", "slowest", "slack", "most on a link", "predicted ms", "measured ms", "vs predicted",
    "speedup", "of bound",
)  # fmt: skip


class Replay(NamedTuple):
    """One plan and its steps, in emulated seconds.

    Attributes:
        name: of the net, the number of devices and the rate of a link that is not free.
        factor: emulated seconds per profiled second.
        times: (forward_s, backward_s) by stage.
        held_s: by hop, for which a message keeps its link busy, each way.
        total_s: of one micro-batch on one device.
        bound: of the speedup.
        predicted_s: the plan's simulated step.
        steps_s: measured, after those to warm up.
    """

    name: str
    factor: float
    times: list[tuple[float, float]]
    slack: int
    held_s: list[float]
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


def planned(name: str, layers: Any, num_devices: int, num_microbatches: int, gbit_s: float | None = None) -> Replay:
    """The plan of a profiled graph for equal devices, scaled; nothing is run.

    Args:
        gbit_s: rate of every link; None for free ones, with slack 2.
    """
    from raypipe.ir.cluster import Cluster
    from raypipe.ir.profile import Profile
    from raypipe.planner.tune import Request, decide

    samples = num_microbatches * BATCH
    cluster = Cluster.uniform(num_devices) if gbit_s is None else Cluster.uniform(
        num_devices, bandwidth_bytes_s=gbit_s * 1e9 / 8
    )  # fmt: skip
    decisions = {}
    for slack in SLACKS[: 1 if gbit_s is None else None]:
        request = Request(
            num_stages=num_devices,
            num_workers=None,
            split_points=(),
            minibatch_size=samples,
            num_microbatches=num_microbatches,
            num_samples=samples,
            partitioner="antichain",
            schedule="slack",  # an emulated backward is one sleep, which no schedule can split
            slack=slack,
        )
        decisions[slack] = decide(request, Profile(layers, BATCH), cluster).prediction
    slack = min(decisions, key=lambda slack: decisions[slack].step_s)
    found = decisions[slack]
    factor = SLOWEST_S / max(stage.busy_s for stage in found.stages)
    busy_s = [node.busy_s for node in layers.nodes]
    return Replay(
        name=f"{name}_{num_devices}" + ("" if gbit_s is None else f"_{gbit_s:g}gbit"),
        factor=factor,
        times=[(stage.forward_s * factor, stage.backward_s * factor) for stage in found.stages],
        slack=slack,
        held_s=[hop.occupancy_s * factor for hop in found.hops],
        num_microbatches=num_microbatches,
        total_s=sum(busy_s) * factor,
        bound=bound(busy_s, num_devices, num_microbatches),
        predicted_s=found.step_s * factor,
        steps_s=[],
    )


def slowed(plan: Replay, handicap_s: float) -> Replay:
    """The same plan on free links with that much more in every forward and backward."""
    from raypipe.planner.schedule.lower import lower
    from raypipe.planner.schedule.sync import slack
    from raypipe.planner.simulate.serial import Costs, makespan_s

    times = [(forward_s + handicap_s, backward_s + handicap_s) for forward_s, backward_s in plan.times]
    schedule = lower(slack(len(times), plan.num_microbatches, plan.slack))
    predicted_s = makespan_s(schedule, Costs(*map(tuple, zip(*times, strict=True))))
    return plan._replace(times=times, predicted_s=predicted_s)


def replay(
    layers: Mapping[str, Any], num_devices: int, num_microbatches: int, rounds: int, handicap_s: float = 0.0
) -> tuple[list[Replay], list[Replay]]:
    """Run the plans of all nets in turn over free links: without a handicap and, where there is one, with it.

    Args:
        layers: profiled graphs by net.
        rounds: steps of each.
    """
    plain = [planned(name, graph, num_devices, num_microbatches) for name, graph in layers.items()]
    found = _run([*plain, *(slowed(plan, handicap_s) for plan in plain if handicap_s)], rounds)
    return found[: len(plain)], found[len(plain) :]


def replay_linked(
    layers: Mapping[str, Any], num_devices: int, num_microbatches: int, rounds: int, gbit_s: float
) -> list[Replay]:
    """The same over links of a rate."""
    plans = [planned(name, graph, num_devices, num_microbatches, gbit_s) for name, graph in layers.items()]
    found: dict[str, Replay] = {}
    for slack in sorted({plan.slack for plan in plans}):
        found |= {plan.name: plan for plan in _run([plan for plan in plans if plan.slack == slack], rounds)}
    return [found[plan.name] for plan in plans]


def _run(plans: Sequence[Replay], rounds: int) -> list[Replay]:
    """Plans of one number of stages and one slack, in turn."""
    from jobs.lib.emulated import run_in_turn

    first = plans[0]
    holds = [plan.held_s for plan in plans] if any(map(any, (plan.held_s for plan in plans))) else None
    steps = run_in_turn([plan.times for plan in plans], first.num_microbatches, rounds, slack=first.slack, holds=holds)
    print(f"{len(plans)} plans like {first.name}, {rounds} steps each; {machine_line()}", flush=True)
    return [plan._replace(steps_s=seconds) for plan, seconds in zip(plans, steps, strict=True)]


def figures_of(found: Sequence[Replay], num_devices: int) -> dict[str, float]:
    """Of plans without a handicap: over free links, or over links of one rate."""
    figures: dict[str, float] = {}
    kind = found[0].name.partition(f"_{num_devices}_")[2]
    for plan in found:
        figures[f"replayed_speedup_{plan.name}"] = plan.speedup
        figures[f"replayed_of_bound_{plan.name}"] = plan.speedup / plan.bound
        figures[f"replayed_vs_predicted_{plan.name}"] = plan.vs_predicted
    for figure in ("speedup", "of_bound", "vs_predicted"):
        values = [figures[f"replayed_{figure}_{plan.name}"] for plan in found]
        figures[f"replayed_{figure}_median_{num_devices}{kind and '_' + kind}"] = median(values)
    return figures


def below(found: Sequence[Replay], wanted: float) -> str:
    """A line that names the nets whose measured speedup is less than wanted."""
    nets = [f"{plan.name} ({plan.speedup:.2f})" for plan in found if plan.speedup < wanted]
    return f"below a speedup of {wanted:g}: {', '.join(nets) or 'none'}"


def row_of(plan: Replay) -> list[Any]:
    """For the table under COLUMNS."""
    slowest = max(range(len(plan.times)), key=lambda stage: sum(plan.times[stage]))
    ratios = [plan.vs_predicted, plan.speedup, plan.speedup / plan.bound]
    most_ms = max(plan.held_s) * 1e3
    return [
        plan.name, plan.factor, f"stage {slowest}", plan.slack, f"{most_ms:.1f} ms", plan.predicted_s * 1e3,
        median(plan.steps_s) * 1e3, *ratios,
    ]  # fmt: skip


def handicaps_seen(plain: Sequence[Replay], slowed: Sequence[Replay], handicap_s: float) -> bool:
    """Whether every plan's step moved as the simulator says; all are printed."""
    seen = True
    for before, after in zip(plain, slowed, strict=True):
        ratio = median(after.steps_s) / before.predicted_s
        moves_by = after.predicted_s / before.predicted_s - 1
        agrees = common.handicap_seen(before.name, handicap_s, before.vs_predicted, ratio, moves_by)
        seen = agrees and seen
    return seen

"""Price of a planned run, and the choice of the cheapest cluster that meets a deadline.

    plan, cluster --cost_of--> Cost --+
                                      +--cheapest(deadline)--> its position, or None
    plan, cluster --cost_of--> Cost --+

Hosts are rented whole: a host with a stage on one of its devices is paid with all of its devices, and a host that the
plan does not use costs nothing. Seconds of the optimizer, start-up, evaluation and interruptions are not part of a
plan's step, and so not part of its cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice
from raypipe.ir.plan import Plan
from raypipe.ir.units import human_hours, human_price

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one plan on one cluster, in the currency of its prices.

    Attributes:
        per_hour: sum over the hosts that the plan uses.
        hosts: number of hosts that the plan uses.
        step_s: predicted seconds of a step.
        samples: samples per step.
        num_steps: steps of the whole run; 0 if unknown.
        tokens_per_sample: tokens of a sample; 0 if unknown.
    """

    per_hour: float
    hosts: int
    step_s: float
    samples: int
    num_steps: int = 0
    tokens_per_sample: int = 0

    @property
    def step(self) -> float:
        return self.per_hour * self.step_s / HOUR_S

    @property
    def million(self) -> float:
        """Price per million tokens, or per million samples if tokens_per_sample is unknown."""
        return self.step / (self.samples * (self.tokens_per_sample or 1)) * 1e6

    @property
    def run_s(self) -> float:
        return self.num_steps * self.step_s

    @property
    def run(self) -> float:
        return self.num_steps * self.step


def cost_of(plan: Plan, cluster: Cluster, num_steps: int = 0, tokens_per_sample: int = 0) -> Cost | None:
    """Compute the cost of a plan; None if no device of the cluster has a price.

    Raises:
        PlanError: a device of a used host has no price, or the plan has no predicted step time.
    """
    if all(device.price_per_hour is None for device in cluster.devices):
        return None
    if plan.prediction is None:
        raise PlanError("A step that was not timed has no cost: use a partitioner other than 'parameters'.")
    names = {name for stage in plan.prediction.stages for name in stage.devices}
    used = {_host(device) for device in cluster.devices if device.name in names}
    total = 0.0
    for device in cluster.devices:
        if _host(device) not in used:
            continue
        if device.price_per_hour is None:
            raise PlanError(f"Device {device.name!r} has no price, and others have: give every device price_per_hour.")
        total += device.price_per_hour
    return Cost(total, len(used), plan.prediction.step_s, plan.minibatch_size, num_steps, tokens_per_sample)


def _host(device: ComputeDevice) -> str:
    """Return the host of a device; a device without a host counts as its own host."""
    return device.host or f"device {device.name}"


def cheapest(costs: Sequence[Cost | None], deadline_s: float | None) -> int | None:
    """Return the position of the cheapest run that ends in time; None if no run does.

    Args:
        costs: one per cluster; None for a cluster on which the run does not fit.
        deadline_s: seconds that the run may take; None for no deadline.
    """
    in_time = [
        (cost.run or cost.step, position)
        for position, cost in enumerate(costs)
        if cost is not None and (deadline_s is None or cost.run_s <= deadline_s)
    ]
    return min(in_time)[1] if in_time else None


def cost_lines(cost: Cost) -> list[str]:
    """Format the cost as the lines below a printed plan."""
    hosts = "1 host" if cost.hosts == 1 else f"{cost.hosts} hosts"
    unit = "tokens" if cost.tokens_per_sample else "samples"
    line = (
        f"cost:    {human_price(cost.step)} a step, {human_price(cost.million)} per million {unit}; "
        f"{human_price(cost.per_hour)} an hour for {hosts}"
    )
    if not cost.num_steps:
        return [line]
    return [line, f"run:     {human_price(cost.run)} and {human_hours(cost.run_s)} for {cost.num_steps:,} steps"]

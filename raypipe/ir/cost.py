"""What a planned run costs on machines with prices, and which of several clusters is the cheapest that is quick enough.

    plan, cluster --cost_of--> Cost --+
                                      +--cheapest(deadline)--> one of them, or why none
    plan, cluster --cost_of--> Cost --+

Whole hosts are paid, for a host cannot be rented in parts: one of whose devices a stage is on counts with all of its
devices, and one that the plan does not use counts nothing. The optimizer's own seconds, start-up, evaluation and
interruptions are not in a plan's step, and so not in its cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Device
from raypipe.ir.plan_facts import PlanFacts

__all__ = ["Cost", "cheapest", "cost_lines", "cost_of", "human_hours", "human_price"]

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one plan on one cluster, in the currency that its prices are in.

    Attributes:
        per_hour: of all hosts that the plan uses.
        hosts: how many these are.
        step_s: predicted.
        samples: in a step.
        num_steps: of the whole run; 0 where nobody said.
        tokens_per_sample: 0 where nobody said.
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
        """Of a million tokens, or samples where nobody said how many tokens are in one."""
        return self.step / (self.samples * (self.tokens_per_sample or 1)) * 1e6

    @property
    def run_s(self) -> float:
        return self.num_steps * self.step_s

    @property
    def run(self) -> float:
        return self.num_steps * self.step


def cost_of(plan: PlanFacts, cluster: Cluster, num_steps: int = 0, tokens_per_sample: int = 0) -> Cost | None:
    """What the plan costs; None where the cluster names no prices.

    Raises:
        PlanError: a device that is paid has no price, or nothing was timed.
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


def _host(device: Device) -> str:
    """A device that is in no host is one of its own."""
    return device.host or f"device {device.name}"


def cheapest(costs: Sequence[Cost | None], deadline_s: float | None) -> int | None:
    """Position of the cheapest whole run that ends in time; None where there is none.

    Args:
        costs: of the clusters; None for one on which the run does not fit.
        deadline_s: None for any time.
    """
    in_time = [
        (cost.run or cost.step, position)
        for position, cost in enumerate(costs)
        if cost is not None and (deadline_s is None or cost.run_s <= deadline_s)
    ]
    return min(in_time)[1] if in_time else None


def cost_lines(cost: Cost) -> list[str]:
    """For people, below the lines of a plan."""
    hosts = "1 host" if cost.hosts == 1 else f"{cost.hosts} hosts"
    unit = "tokens" if cost.tokens_per_sample else "samples"
    line = (
        f"cost:    {human_price(cost.step)} a step, {human_price(cost.million)} per million {unit}; "
        f"{human_price(cost.per_hour)} an hour for {hosts}"
    )
    if not cost.num_steps:
        return [line]
    return [line, f"run:     {human_price(cost.run)} and {human_hours(cost.run_s)} for {cost.num_steps:,} steps"]


def human_price(amount: float) -> str:
    """0.00001234 -> "0.0000123", 1234.5 -> "1,234.50"."""
    if amount >= 1 or amount == 0:
        return f"{amount:,.2f}"
    digits = 2 - math.floor(math.log10(amount))  # three that count
    return f"{amount:.{digits}f}"


def human_hours(seconds: float) -> str:
    """5400 -> "1 h 30 min"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min"

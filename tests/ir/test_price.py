"""What plans cost: whole hosts are paid, and the cheapest run that ends in time is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.plan import Prediction, StagePrediction
from raypipe.ir.price import Cost, cheapest, cost_lines, cost_of
from raypipe.ir.units import human_hours, human_price


def plan(*devices: str, step_s: float = 0.5) -> Any:
    """What a cost is made of: 32 samples a step, and a stage on each of these devices."""
    stages = tuple(StagePrediction((name,), 0.1, 0.1, 1, "0F0", ()) for name in devices)
    return SimpleNamespace(minibatch_size=32, prediction=Prediction(step_s, 0.2, 64.0, None, "", "", "", stages, ()))


HOSTS = Cluster.hosts(2, 2, inside=Link(), between=Link(), device=ComputeDevice(price_per_hour=1.5))


def test_whole_hosts_are_paid() -> None:
    one, two = cost_of(plan("host0/device0"), HOSTS), cost_of(plan("host0/device0", "host1/device1"), HOSTS)
    assert one is not None
    assert two is not None
    assert (one.hosts, one.per_hour, two.hosts, two.per_hour) == (1, 3.0, 2, 6.0)


def test_a_device_without_a_host_is_one_of_its_own() -> None:
    cluster = Cluster((ComputeDevice("a", price_per_hour=1.0), ComputeDevice("b", price_per_hour=2.0)))
    cost = cost_of(plan("b"), cluster)
    assert cost is not None
    assert (cost.hosts, cost.per_hour) == (1, 2.0)


def test_a_step_a_million_and_a_run() -> None:
    found = Cost(per_hour=7.2, hosts=1, step_s=0.5, samples=32, num_steps=1000)
    assert (found.step, found.run, found.run_s) == (pytest.approx(0.001), pytest.approx(1.0), 500.0)
    assert found.million == pytest.approx(0.001 / 32 * 1e6)
    tokens = Cost(7.2, 1, 0.5, 32, tokens_per_sample=128)
    assert tokens.million == pytest.approx(found.million / 128)
    assert cost_lines(found) == [
        "cost:    0.00100 a step, 31.25 per million samples; 7.20 an hour for 1 host",
        "run:     1.00 and 8 min for 1,000 steps",
    ]
    (line,) = cost_lines(tokens)
    assert line == "cost:    0.00100 a step, 0.244 per million tokens; 7.20 an hour for 1 host"


def test_without_prices_there_is_no_cost() -> None:
    assert cost_of(plan("device0"), Cluster.uniform(2)) is None


def test_half_a_price_list_is_refused() -> None:
    cluster = Cluster((ComputeDevice("a", host="h", price_per_hour=1.0), ComputeDevice("b", host="h")))
    with pytest.raises(PlanError, match=r"'b' has no price, and others have: give every device price_per_hour"):
        cost_of(plan("a"), cluster)
    with pytest.raises(PlanError, match="price_per_hour=-1"):
        ComputeDevice("a", price_per_hour=-1)


def test_what_was_not_timed_has_no_cost() -> None:
    untimed: Any = SimpleNamespace(prediction=None, minibatch_size=1)
    with pytest.raises(PlanError, match="not timed has no cost: use a partitioner"):
        cost_of(untimed, HOSTS)


def test_the_cheapest_that_is_quick_enough() -> None:
    slow, quick, dear = (Cost(p, 1, s, 1, num_steps=100) for p, s in ((1.0, 10.0), (6.0, 2.0), (60.0, 1.0)))
    costs = [None, dear, quick, slow]
    assert cheapest(costs, None) == 3
    assert cheapest(costs, 999.0) == 2
    assert cheapest(costs, 100.0) == 1
    assert cheapest(costs, 99.0) is None
    assert cheapest([None], None) is None
    assert cheapest([Cost(6.0, 1, 2.0, 1), Cost(1.0, 1, 10.0, 1)], None) == 1  # by the step, where no end is known


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0.00"), (1234.5, "1,234.50"), (0.5, "0.500"), (0.0123, "0.0123"), (4.37e-6, "0.00000437")],
)
def test_amounts_are_read_easily(amount: float, text: str) -> None:
    assert human_price(amount) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(10.52, "10.5 s"), (90, "2 min"), (5400, "1 h 30 min"), (4e6, "1,111 h 7 min")]
)
def test_times_are_read_easily(seconds: float, text: str) -> None:
    assert human_hours(seconds) == text

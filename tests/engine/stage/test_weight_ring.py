"""The ring of weight versions: a backward sees the bits of its forward, whatever was updated in between."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.engine.stage.stage import Site
from raypipe.engine.stage.weight_ring import WeightRing
from raypipe.errors import StageError
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.weights import VersionRule, versions_needed
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.replicas import ahead_of
from tests.engine.rings import program_of
from tests.weight_rules import version_of


@dataclass
class Stage:
    """A ring with one parameter used twice, and one that is frozen; an update adds 1."""

    ring: WeightRing
    parameters: dict[str, torch.nn.Parameter]

    @classmethod
    def of(
        cls,
        rule: VersionRule,
        capacity: int,
        ahead: int = 0,
        index: int = 1,
        replicas: int = 1,
        lookahead: float = 0.0,
    ) -> Stage:
        parameters = {
            "w": torch.nn.Parameter(torch.zeros(3)),
            "f": torch.nn.Parameter(torch.full((2,), 7.0), requires_grad=False),
        }
        program = program_of((Site("w", 0), Site("f", 0), Site("w", 1)), parameters, index=index)
        return cls(WeightRing(program, parameters, rule, capacity, ahead, replicas, lookahead), parameters)

    def update(self) -> None:
        self.ring.advance()
        with torch.no_grad():
            self.parameters["w"].add_(1.0)
        self.ring.follow()


@given(
    st.sampled_from(VersionRule), st.lists(st.integers(1, 3), min_size=2, max_size=5), st.integers(1, 4),
    st.integers(1, 2), st.integers(1, 4), st.integers(0, 12),
)  # fmt: skip
def test_a_backward_sees_the_weights_of_its_forward(
    rule: VersionRule, replicas: list[int], updates: int, slack: int, minibatches: int, worker: int
) -> None:
    """On any replica of any stage, which never has to put an update off."""
    holders = [stage for stage, count in enumerate(replicas) for _ in range(count)]
    worker = min(worker, len(holders) - 1)
    stage, lanes = holders[worker], math.lcm(*replicas)
    interval, warmups = updates * lanes, ahead_of(replicas, slack)
    if rule is VersionRule.DELAYED:
        interval = -(-max(interval, warmups[0]) // lanes) * lanes
    spec = ScheduleSpec(
        "pipedream", interval, slack=(slack,) * (len(replicas) - 1), overlap=True, update_interval=interval,
        replicas=tuple(replicas), lanes=lanes,
    )  # fmt: skip
    rows = lower(schedule_of(spec, len(replicas))).rows(minibatches)
    capacity = versions_needed(rule, interval, warmups, stage)
    made = Stage.of(rule, capacity, warmups[0], stage, replicas[stage])
    ring = made.ring
    for fill in range(2):  # a second run on the same ring counts from where the first ended
        base = ring.newest
        first = fill * 1000
        ring.begin(first, interval)
        for action in rows[worker]:
            microbatch = first + action.microbatch
            wanted = base + version_of(rule, action.microbatch, interval, warmups, stage)
            match action.op.value:
                case "F":
                    stamp = base + version_of(VersionRule.NEWEST, action.microbatch, interval, warmups, 0)
                    assert ring.enter(microbatch, stamp) == wanted
                    assert ring.version(microbatch) == wanted
                case "B":
                    own, frozen, again = ring.leaves(microbatch)
                    assert own.tolist() == again.tolist() == [float(wanted)] * 3
                    assert frozen.tolist() == [7.0, 7.0]
                    assert not frozen.requires_grad
                    assert [leaf.requires_grad for leaf in ring.trained(microbatch)] == [True, True]
                    ring.leave(microbatch)
                case "STEP":
                    assert ring.has_room()
                    made.update()
                    assert made.parameters["w"].tolist() == [float(ring.newest)] * 3
        assert ring.held <= versions_needed(rule, interval, warmups, stage)


@given(st.integers(2, 4), st.lists(st.sampled_from("FBU"), max_size=60))
def test_a_full_ring_has_no_room_and_nothing_in_use_is_written(capacity: int, events: list[str]) -> None:
    made = Stage.of(VersionRule.NEWEST, capacity)
    ring = made.ring
    ring.begin(0, 1)
    seen: dict[int, float] = {}
    count = 0
    for event in events:
        if event == "F":
            ring.enter(count, 0)
            seen[count] = float(ring.leaves(count)[0].detach()[0])
            count += 1
        elif event == "B" and seen:
            ring.leave(next(iter(seen)))
            seen.pop(next(iter(seen)))
        elif event == "U":
            alive = len(set(seen.values()) | {float(ring.newest)})
            in_place = float(ring.newest) not in seen.values()
            assert ring.has_room() == (in_place or alive < capacity)
            if ring.has_room():
                made.update()
        assert all(float(ring.leaves(m)[0].detach()[0]) == value for m, value in seen.items())
        assert ring.held <= capacity


def test_an_optimizer_that_assigns_data_is_followed() -> None:
    made = Stage.of(VersionRule.NEWEST, 2)
    made.ring.begin(0, 1)
    made.ring.enter(0, 0)
    made.ring.advance()
    made.parameters["w"].data = torch.full((3,), 9.0)
    made.ring.follow()
    made.ring.enter(1, 0)
    assert made.ring.leaves(0)[0].tolist() == [0.0] * 3
    assert made.ring.leaves(1)[0].tolist() == [9.0] * 3


def test_a_stamp_that_nobody_has_is_refused_by_number() -> None:
    made = Stage.of(VersionRule.STAMPED, 2, ahead=1, index=1)
    made.ring.begin(0, 1)
    with pytest.raises(StageError, match=r"Micro-batch 0 needs weight version 5, but the stage holds \[0\]"):
        made.ring.enter(0, 5)


@pytest.mark.parametrize("rule", VersionRule)
def test_predicted_weights_go_on_as_the_last_update(rule: VersionRule) -> None:
    """An update adds 1, so that weights d updates ahead are d more; parameters and frozen ones stay as they are."""
    made = Stage.of(rule, 2, ahead=1, lookahead=1.5)
    ring = made.ring
    for first in (0, 1000):
        ring.begin(first, 2)
        base = made.parameters["w"].tolist()[0]
        for k in range(4):
            version = ring.enter(first + k, ring.newest)
            assert version == ring.newest or rule is VersionRule.DELAYED
            w, f, again = ring.leaves(first + k)
            ring.leave(first + k)
            updates = version - (ring.newest - k // 2)
            wanted = base + updates + 1.5 * (updates > 0)
            assert w.tolist() == again.tolist() == [wanted] * 3
            assert f.tolist() == [7.0] * 2
            assert made.parameters["w"].tolist() == [base + k // 2] * 3
            if k % 2:
                made.update()

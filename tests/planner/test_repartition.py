"""Re-partition of a running job: where a worker's speed changes, and after it ran out of memory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.communication import StageSample
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.repartition import (
    LESS,
    Offer,
    RepartitionQuery,
    Replanner,
    answer,
    calibrated,
    can_be_cut_again,
    in_force,
    lighter,
    line_of,
    planned_seconds,
)
from raypipe.planner.search import ASSUMED_LINK, Request, decide, plan_of
from tests.planner.partition_cases import TICK, chain_of

pytestmark = pytest.mark.slow

COUNT = 8
STEPS = 10_000
SETTLING = 9
"""Steps until a new pace is known: two that differ, and those after which it counts as lasting; one in between."""


def request_of(stages: int, **fields: object) -> Request:
    made = Request(stages, stages, (), COUNT, COUNT, num_samples=1000, schedule="1f1b")
    return replace(made, **fields)  # type: ignore[arg-type]


class Run:
    """A run on paper: what its stages take is what their layers take, times how slow their workers are.

    Args:
        ticks: of each layer, on a worker as quick as it should be.
    """

    def __init__(self, ticks: list[int], stages: int, steps: int = STEPS, **fields: object) -> None:
        self.request = request_of(stages, **fields)
        self.ticks = ticks
        profile = Profile(chain_of(ticks, params=1000, kept=100), microbatch_size=1)
        self.plan = plan_of(decide(self.request, profile))
        self.replanner = Replanner(profile, steps, 0.25)
        self.replanner.begin(self.plan, line_of(self.plan, None, ASSUMED_LINK))
        self.step = 0
        self.noise = random.Random(0)

    def busy_s(self, slowness: Sequence[float]) -> list[float]:
        parts = self.plan.partition.stages
        return [sum(self.ticks[s.start : s.stop]) * TICK * slow for s, slow in zip(parts, slowness, strict=True)]

    def asked(self, slowness: Sequence[float], steps: int, noise: float = 0.0) -> Iterator[RepartitionQuery]:
        """Questions of so many steps."""
        for _ in range(steps):
            busy_s = [s * self.noise.uniform(1 - noise, 1 + noise) for s in self.busy_s(slowness)]
            samples = [StageSample(at, self.step, s / 2, s / 2) for at, s in enumerate(busy_s)]
            asked = self.replanner.on_step(self.step, max(busy_s) * COUNT, samples)
            self.step += 1
            if asked is not None:
                yield asked

    def offers(self, slowness: Sequence[float], steps: int = SETTLING, noise: float = 0.0) -> list[Offer]:
        """That the run takes at once."""
        found = []
        for asked in self.asked(slowness, steps, noise):
            offer = answer(self.request, asked, 0.03)
            if offer is not None:
                found.append(offer)
                self.plan = replace(plan_of(offer.decision), generation=self.plan.generation + 1)
                self.replanner.taken(offer, self.plan, 1e-6, self.step)
        return found


layers = st.lists(st.integers(1, 9), min_size=8, max_size=16)
several = st.integers(2, 4)
SETTINGS = settings(max_examples=30, deadline=None)


def test_layers_move_away_from_a_slow_worker_and_back_when_it_recovers() -> None:
    run = Run([4] * 24, 4)
    first = run.plan.partition.cuts
    assert run.offers([1.0] * 4, 20) == []
    (offer,) = run.offers([1.0, 1.0, 1.5, 1.0], 20)
    sizes = [s.stop - s.start for s in run.plan.partition.stages]
    assert sizes[2] == 4  # 24 layers, 3.67 workers: 6.5 each, 4.4 of them on the slow one
    assert max(run.busy_s([1.0, 1.0, 1.5, 1.0])) == 7 * 4 * TICK
    assert offer.why == "stage 2 takes 1.50 times as long as before, the stages' median 1.00 times"
    assert 0.1 < offer.gain.share < 1 - 7 / 9  # what the slowest stage gains
    assert run.plan.reasons[0] == ("cut", f"made again, for {offer.why}")
    assert offer.numbers["speeds"] == pytest.approx([1, 1, 0.667, 1])
    assert len(run.offers([1.0] * 4, 20)) == 1
    assert run.plan.partition.cuts == first


@SETTINGS
@given(layers, several, st.floats(1.5, 4.0))
def test_workers_that_become_slower_alike_keep_their_layers(ticks: list[int], stages: int, slower: float) -> None:
    run = Run(ticks, stages)
    assert list(run.asked([1.0] * stages, 20)) == []
    assert list(run.asked([slower] * stages, 40)) == []


@SETTINGS
@given(layers, several)
def test_noise_moves_nothing(ticks: list[int], stages: int) -> None:
    run = Run(ticks, stages)
    assert run.offers([1.0] * stages, 200, noise=0.1) == []


@SETTINGS
@given(layers, several, st.data())
def test_a_slow_minute_that_passes_moves_nothing(ticks: list[int], stages: int, data: st.DataObject) -> None:
    run = Run(ticks, stages)
    run.offers([1.0] * stages, 20)
    slow = [1.0] * stages
    slow[data.draw(st.integers(0, stages - 1))] = 2.0
    assert run.offers(slow, data.draw(st.integers(1, 5))) == []
    assert run.offers([1.0] * stages, 40) == []


@SETTINGS
@given(layers, several, st.lists(st.floats(1.0, 3.0), min_size=4, max_size=4))
def test_a_new_cut_is_quicker_and_is_found_once(ticks: list[int], stages: int, slowness: list[float]) -> None:
    run = Run(ticks, stages)
    run.offers([1.0] * stages, 20)
    before_s = max(run.busy_s(slowness[:stages]))
    found = run.offers(slowness[:stages], 20)
    assert len(found) <= 1
    for offer in found:
        assert offer.gain.after_s < offer.gain.before_s
        assert max(run.busy_s(slowness[:stages])) <= before_s
        assert offer.speeds == pytest.approx([1 / slow for slow in slowness[:stages]])
    assert run.offers(slowness[:stages], 40) == []  # as planned: nothing is left to gain


def test_a_worker_that_becomes_slower_bit_by_bit_gives_layers_away_once_that_pays() -> None:
    """At first none of its two layers can go: three on another worker take longer. No step of it is a drift."""
    run = Run([4] * 8, 4)
    assert list(run.asked([1.0] * 4, 20)) == []
    assert run.offers([1.0, 1.0, 1.35, 1.0], 20) == []
    (offer,) = run.offers([1.0, 1.0, 1.68, 1.0], 20)
    assert offer.speeds == pytest.approx([1, 1, 1 / 1.68, 1])
    assert offer.why == "stage 2 takes 1.68 times as long as before, the stages' median 1.00 times"
    assert [s.stop - s.start for s in run.plan.partition.stages][2] == 1


def test_what_was_looked_at_in_vain_is_not_looked_at_again() -> None:
    run = Run([4] * 8, 4)
    assert list(run.asked([1.0] * 4, 20)) == []
    assert len(list(run.asked([1.0, 1.0, 1.3, 1.0], 100))) == 1


def test_what_does_not_pay_in_the_steps_that_are_left_is_left_alone() -> None:
    run = Run([4] * 24, 4, steps=60)
    run.offers([1.0] * 4, 20)
    assert len(list(run.asked([1.0, 1.0, 1.5, 1.0], 20))) == 1
    run = Run([4] * 24, 4, steps=60)
    run.offers([1.0] * 4, 20)
    assert run.offers([1.0, 1.0, 1.5, 1.0], 20) == []  # 30 steps win 1 s altogether, and a move takes one


def test_memory_limits_hold() -> None:
    # A layer has 1000 bytes of parameters, as much gradient, twice as much state: 6 layers are all that fits.
    run = Run([4] * 24, 4, memory_limit_bytes=6 * 4000 + 4 * 6 * 100)
    run.offers([1.0] * 4, 20)
    assert run.offers([1.0, 1.0, 1.5, 1.0], 20) == []


def test_pauses_between_moves_grow_with_what_a_move_takes() -> None:
    run = Run([4] * 24, 4)
    run.offers([1.0] * 4, 20)
    asked = next(run.asked([1.0, 1.0, 1.5, 1.0], 20))
    offer = answer(run.request, asked, 0.03)
    assert offer is not None
    plan = plan_of(offer.decision)
    step_s = offer.gain.after_s
    run.plan, pause_s = plan, 3 * step_s
    run.replanner.taken(offer, plan, pause_s, run.step)
    begun = run.step
    assert len(list(run.asked([1.0] * 4, 100))) == 1
    assert next(iter(run.asked([1.5, 1.0, 1.0, 1.0], 1)), None) is None
    assert begun + 60 <= run.step


@pytest.mark.parametrize(
    ("stages", "fields", "possible"),
    [
        (2, {}, True),
        (2, {"schedule": "slack", "slack": 2}, True),
        (2, {"schedule": "2bw"}, False),
        (4, {"schedule": "zb-v", "num_workers": 2}, False),
        (1, {}, False),
    ],
)
def test_which_plans_can_be_cut_again(stages: int, fields: dict[str, object], possible: bool) -> None:
    profile = Profile(chain_of([4] * 8, kept=8), microbatch_size=1)
    assert can_be_cut_again(plan_of(decide(request_of(stages, **fields), profile))) is possible


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([1.18, 1.15, 0.92, 1.18], "stage 2 takes 1.09 times as long as before, the stages' median 0.86 times"),
        ([0.46, 0.83], "stage 0 takes 2.17 times as long as before, the stages' median 1.62 times"),
    ],
)
def test_the_reason_names_the_stage_that_stands_out(after: list[float], words: str) -> None:
    run = Run([4] * 12, len(after))
    run.offers([1.0] * len(after), 20)
    (asked,) = run.asked([1 / speed for speed in after], 20)
    assert asked.why == words


def plan_and_profile(ticks: list[int], request: Request) -> tuple[Plan, Profile]:
    profile = Profile(chain_of(ticks, params=1000, kept=1000), microbatch_size=1)
    return plan_of(decide(request, profile)), profile


def held(request: Request, profile: Profile, plan: Plan, worker: int) -> int:
    """Bytes that the plan counts for a worker."""
    assert plan.spec is not None
    now = in_force(request.with_schedule(plan.spec), profile, plan, line_of(plan, None, ASSUMED_LINK))
    return memory_of(now.graph, now.partition, now.limits.memory)[worker].total_bytes


def test_the_thriftiest_schedule_that_may_be_taken_comes_first() -> None:
    request = request_of(2, schedule="auto")
    plan, profile = plan_and_profile([4] * 8, request)
    assert str(plan.spec) == "slack r=2, M=8, overlap"
    found = lighter(request, profile, plan, line_of(plan, None, ASSUMED_LINK), 0, 0)
    assert found.request.schedule == "1f1b"
    assert found.partition.cuts == plan.partition.cuts  # one micro-batch less is enough
    assert found.reasons == (("memory", "made again, as worker 0 ran out of memory: it holds 24.6 KiB at most now"),)


def test_who_asked_for_a_schedule_keeps_it_and_layers_move() -> None:
    request = request_of(2, schedule="gpipe")
    plan, profile = plan_and_profile([4] * 8, request)
    found = lighter(request, profile, plan, line_of(plan, None, ASSUMED_LINK), 1, 0)
    assert found.request.schedule == "gpipe"
    assert found.partition.cuts != plan.partition.cuts
    assert found.partition.stages[1].stop - found.partition.stages[1].start < 4


def test_who_asked_for_deferred_weight_gradients_defers_none_if_that_is_enough() -> None:
    request = request_of(2, schedule="zb-h1")
    plan, profile = plan_and_profile([4, 4], request)
    found = lighter(request, profile, plan, line_of(plan, None, ASSUMED_LINK), 1, 0)
    assert str(plan_of(found).spec) == "zb-h1 r=1 w=0,0, M=8, overlap"
    assert held(request, profile, plan_of(found), 1) <= LESS * held(request, profile, plan, 1)


def test_what_it_held_counts_where_that_is_less_than_planned() -> None:
    request = request_of(2, schedule="1f1b")
    plan, profile = plan_and_profile([4] * 8, request)
    line = line_of(plan, None, ASSUMED_LINK)
    need = held(request, profile, plan, 0)
    assert lighter(request, profile, plan, line, 0, need // 2).cluster.devices[0].memory_bytes == int(
        LESS * (need // 2)
    )
    assert lighter(request, profile, plan, line, 0, 5 * need).cluster.devices[0].memory_bytes == int(LESS * need)


def test_where_nothing_holds_less_worker_bytes_and_fields_are_named() -> None:
    request = request_of(2, schedule="1f1b")
    plan, profile = plan_and_profile([4, 4], request)
    words = r"Worker 0 was planned to hold 5.9 KiB, and no other cut .* 5.3 KiB at most\. .*smaller micro-batches"
    with pytest.raises(PlanError, match=words):
        lighter(request, profile, plan, line_of(plan, None, ASSUMED_LINK), 0, 0)


def test_where_no_other_cut_does_its_stage_computes_forwards_again() -> None:
    request = request_of(2, schedule="1f1b", recompute=None)
    plan, profile = plan_and_profile([4, 4], request)
    assert plan.recompute == (False, False)
    line = line_of(plan, None, ASSUMED_LINK)
    found = lighter(request, profile, plan, line, 0, 0)
    made = plan_of(found)
    assert (made.recompute, found.partition.cuts) == ((True, False), plan.partition.cuts)
    assert held(request, profile, made, 0) <= LESS * held(request, profile, plan, 0)
    never = replace(request, recompute=(False, None))
    with pytest.raises(PlanError, match=r"^Worker 0 was planned to hold"):
        lighter(never, profile, plan, line, 0, 0)


def test_a_stage_that_computes_again_is_measured_with_both_of_its_forwards() -> None:
    request = request_of(2, schedule="1f1b", recompute=(True, False))
    plan, profile = plan_and_profile([4] * 8, request)
    planned_s = planned_seconds(profile, plan)
    assert planned_s == pytest.approx([stage.busy_s for stage in plan.prediction.stages])  # type: ignore[union-attr]
    measured_s = (2 * planned_s[0], planned_s[1])
    assert planned_seconds(calibrated(profile, plan, measured_s, (1.0, 1.0)), plan) == pytest.approx(measured_s)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=6, max_size=12), st.integers(2, 4), st.data())
def test_each_failure_leaves_less_until_nothing_is_left(ticks: list[int], stages: int, data: st.DataObject) -> None:
    request = request_of(stages, schedule=data.draw(st.sampled_from(["auto", "zb-h1"])))
    plan, profile = plan_and_profile(ticks, request)
    line, worker = line_of(plan, None, ASSUMED_LINK), data.draw(st.integers(0, stages - 1))
    before = held(request, profile, plan, worker)
    for _ in range(100):
        try:
            found = lighter(request, profile, plan, line, worker, data.draw(st.sampled_from([0, 10**9])))
        except PlanError:
            return
        made = plan_of(found)
        after = held(request, profile, made, worker)
        assert after <= LESS * before
        assert (made.num_microbatches, made.microbatch_size) == (plan.num_microbatches, plan.microbatch_size)
        assert [stage.devices for stage in made.partition.stages] == [(at,) for at in range(stages)]
        plan, line, before = made, found.cluster, after
    raise AssertionError("a worker holds something")

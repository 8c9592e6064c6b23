"""Plans with replicas that were asked for: cut by what workers share, with the exchange of gradients, or refused."""

from __future__ import annotations

import dataclasses

import pytest

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.communication import exchange_bytes
from raypipe.planner.search import decide, plan_of
from raypipe.planner.search.choose import ASSUMED_LINK
from raypipe.planner.search.replica_cuts import share_notes
from raypipe.planner.search.request import microbatches
from tests.planner.search.test_choose import MIB, REQUEST, chain, rented

FIXED = dataclasses.replace(
    REQUEST, num_stages=2, schedule="1f1b", minibatch_size=48, num_microbatches=12, partitioner="prefix_sum"
)


V = {"num_stages": 4, "schedule": "zb-v"}


def test_a_stage_of_three_workers_gets_three_times_as_much() -> None:
    decision = decide(dataclasses.replace(FIXED, replicas=(3, 1)), chain(4))
    stages = decision.partition.stages
    assert [(stage.stop - stage.start, stage.devices) for stage in stages] == [(3, (0, 1, 2)), (1, (3,))]
    plan = plan_of(decision)
    assert plan.partition.replicas == plan.schedule.wiring.replicas == (3, 1)
    assert plan.schedule.wiring.lanes == 3
    # 12 micro-batches at 1 ms: what three workers need for three nodes each, one needs for one.
    assert plan.prediction is not None
    exchange_s = plan.prediction.stages[0].exchange_s
    assert plan.prediction.step_s - exchange_s == pytest.approx(12e-3 + 3e-3, rel=0.1)
    assert type(plan).from_json(plan.to_json()) == plan


def test_a_step_takes_longer_by_what_replicas_exchange() -> None:
    """2 (R - 1) / R times the parameters, over the link that is assumed; one stage is plain data parallelism."""
    for count in (2, 4):
        request = dataclasses.replace(FIXED, num_stages=1, replicas=count)
        found = decide(request, chain(4)).prediction
        (stage,) = found.stages
        chunks = 1 + 4 * MIB / (8 * MIB)
        sent_s = 2 * (count - 1) / count * 4 * MIB / ASSUMED_LINK.bandwidth_bytes_s
        assert stage.exchange_s == pytest.approx(sent_s + 2 * chunks * ASSUMED_LINK.latency_s)
        assert found.step_s == pytest.approx(12 / count * 4e-3 + stage.exchange_s - stage.hidden_s)
    assert decide(dataclasses.replace(FIXED, lanes=4), chain(4)).prediction.stages[0].exchange_s == 0.0
    (whole,), (half,) = (
        decide(dataclasses.replace(FIXED, num_stages=1, replicas=2, sums_factor=factor), chain(4)).prediction.stages
        for factor in (1.0, 0.5)
    )
    assert whole.exchange_s - half.exchange_s == pytest.approx(4 * MIB / 2 / ASSUMED_LINK.bandwidth_bytes_s)


def test_replicas_that_share_out_the_optimizers_state_hold_a_part_of_it() -> None:
    """Of a stage with one worker all of it; and a limit is kept that whole states would break."""
    stages = decide(dataclasses.replace(FIXED, replicas=(3, 1), shards=True), chain(4)).prediction.stages
    for stage, count in zip(stages, (3, 1), strict=True):
        memory = dict(stage.memory)
        assert memory["optimizer"] == pytest.approx(memory["weights x 1"] * FIXED.optimizer_factor / count, abs=1)
    parallel = dataclasses.replace(FIXED, num_stages=1, replicas=2, shards=True)
    most = sum(size for _, size in decide(parallel, chain(4)).prediction.stages[0].memory)
    limited = dataclasses.replace(parallel, memory_limit_bytes=most)
    decide(limited, chain(4))
    with pytest.raises(PlanError):
        decide(dataclasses.replace(limited, shards=False), chain(4))


def test_parameters_come_back_behind_the_step_and_whole() -> None:
    """As many bytes as totals of gradients; sums in half the bytes leave parameters as they are."""
    found = {
        (shards, factor): decide(
            dataclasses.replace(FIXED, num_stages=1, replicas=2, sums_factor=factor, shards=shards), chain(4)
        ).prediction
        for shards in (False, True)
        for factor in (1.0, 0.5)
    }
    exchange_s = {how: one.stages[0].exchange_s for how, one in found.items()}
    way_s = 4 * MIB / 2 / ASSUMED_LINK.bandwidth_bytes_s
    assert exchange_s[True, 1.0] == pytest.approx(exchange_s[False, 1.0])
    assert exchange_s[False, 1.0] - exchange_s[False, 0.5] == pytest.approx(way_s)
    assert exchange_s[True, 1.0] - exchange_s[True, 0.5] == pytest.approx(way_s / 2)
    for factor in (1.0, 0.5):
        seen = [exchange_s[True, factor] - found[True, factor].stages[0].hidden_s, found[True, factor].step_s]
        assert seen[0] >= way_s, "the way back is waited for"
        assert seen[1] >= found[False, factor].step_s - 1e-12


def test_nothing_lies_beside_a_backward_that_is_split() -> None:
    """The executor begins with what a whole backward completes (``engine.exchange``)."""
    for schedule, hidden in (("1f1b", True), ("zb-h1", False), ("pipedream", False)):
        asked = dataclasses.replace(FIXED, num_stages=1, replicas=2, schedule=schedule)
        (stage,) = decide(asked, chain(6)).prediction.stages
        assert (stage.hidden_s > 0.0) is hidden


def test_memory_is_that_of_the_rows_and_of_the_lanes_of_each_replica() -> None:
    one, two = (
        decide(dataclasses.replace(FIXED, replicas=replicas, lanes=lanes), chain(4)).prediction.stages
        for replicas, lanes in (((1, 1), None), ((1, 2), 4))
    )
    assert [stage.in_flight for stage in one] == [2, 1]
    assert [stage.in_flight for stage in two] == [3, 1]  # floor((3 - 1) / 1) ahead
    assert [dict(stage.memory)["gradients"] // MIB for stage in one] == [2, 2]
    assert [dict(stage.memory)["gradients"] // MIB for stage in two] == [4, 6]


def test_what_one_stage_holds_for_lanes_does_not_count_against_another() -> None:
    """Of 7-1 replicas hold one lane each, and the last stage all seven."""
    asked = dataclasses.replace(FIXED, replicas=(7, 1), minibatch_size=56, num_microbatches=14)
    stages = decide(dataclasses.replace(asked, memory_limit_bytes=70 * MIB), chain(8)).prediction.stages
    assert [dict(stage.memory)["gradients"] // MIB for stage in stages] == [7, 7]
    assert [dict(stage.memory)["weights x 1"] // MIB for stage in stages] == [7, 1]


@pytest.mark.parametrize(
    ("given", "sums"),
    [
        ({}, 3),
        ({"num_microbatches": 3}, 1),
        ({"num_microbatches": 3, "sums_factor": 0.5}, 3),
        ({"num_microbatches": 4}, 3),
        ({"schedule": "pipedream"}, 1),
        ({"schedule": "pipedream", "update_interval": 6}, 3),
        ({"schedule": "pipedream", "num_stages": 4, "replicas": (2, 1, 1, 1), "update_interval": 2}, 1),
        (
            {
                "schedule": "pipedream",
                "num_stages": 4,
                "replicas": (2, 1, 1, 1),
                "weight_versions": 2,
                "update_interval": 2,
            },
            2,
        ),
        ({"schedule": "2bw"}, 3),
    ],
)
def test_a_stage_of_one_worker_holds_one_sum_where_each_lane_has_one_micro_batch(
    given: dict[str, object], sums: int
) -> None:
    """Not where sums are rounded one by one, nor where an update may be put off and joins the next (``weights``)."""
    found = decide(dataclasses.replace(FIXED, **{"replicas": (3, 1), **given}), chain(4))
    held = [dict(stage.memory)["gradients"] for stage in found.prediction.stages]
    first, *others = (stage.param_bytes for stage in found.partition.stages)
    assert held == [first, *(sums * params for params in others)]


@pytest.mark.parametrize(
    ("given", "cluster", "words"),
    [
        ({"num_workers": 3}, None, "3-1 workers for its 2 stages, 4 in all, but scaling_config offers 3"),
        ({}, rented(3), "3-1 workers for its 2 stages, 4 in all, but the cluster has 3"),
        ({"num_stages": None, "replicas": 2}, None, "num_replicas=2 needs a number of stages: set num_stages"),
        ({**V, "num_workers": 3, "replicas": 2}, None, "num_workers=3 with num_replicas=2 .* multiple of 2"),
        ({**V, "num_workers": 6, "replicas": 2}, None, "num_workers=6 .*: make the stages 6, or num_workers=4"),
        ({**V, "replicas": (2, 2, 1, 2)}, None, r"\(2, 2, 1, 2\) with schedule='zb-v': .* num_replicas=2"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(
    given: dict[str, object], cluster: Cluster | None, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        decide(dataclasses.replace(FIXED, **{"replicas": (3, 1), **given}), chain(8), cluster)


def test_memory_of_the_exchange_counts_where_activations_leave_no_room_for_it() -> None:
    """Beside the last backward those of other micro-batches are gone. A limit is kept with it."""
    request = dataclasses.replace(FIXED, replicas=(2, 1))
    wide, narrow = (decide(request, chain(4, kept=kept)) for kept in (64 * MIB, 1 << 10))
    assert [stage.in_flight for stage in wide.prediction.stages] == [2, 1]
    assert "exchange" not in dict(wide.prediction.stages[0].memory)
    held = dict(narrow.prediction.stages[0].memory)
    planned = exchange_bytes(narrow.partition.stages[0].param_bytes, 2, 2)
    assert 0 < planned - held["exchange"] < MIB
    alone = dataclasses.replace(FIXED, num_stages=1, replicas=2)
    (only,) = decide(alone, chain(4, kept=64 * MIB)).prediction.stages
    assert dict(only.memory)["exchange"] == exchange_bytes(4 * MIB, 2, 2), "no other micro-batch is under way"
    enough = only.memory_bytes
    decide(dataclasses.replace(alone, memory_limit_bytes=enough), chain(4, kept=64 * MIB))
    with pytest.raises(PlanError, match="exchange"):
        decide(dataclasses.replace(alone, memory_limit_bytes=enough - MIB), chain(4, kept=64 * MIB))


def test_every_replica_has_something_to_do() -> None:
    """As many micro-batches for each where that is left to the planner, a note where they are not, none is refused."""
    open_ = dataclasses.replace(FIXED, minibatch_size=32, num_microbatches=None, replicas=(2, 1))
    assert microbatches(open_, 2) == (32, 4, 8)
    assert microbatches(dataclasses.replace(open_, replicas=1), 2) == (32, 4, 8)
    assert microbatches(dataclasses.replace(open_, replicas=(3, 1)), 2)[2] == 16
    assert share_notes(open_, 2, 8) == share_notes(dataclasses.replace(FIXED, num_microbatches=7), 2, 7) == ()
    equal = dataclasses.replace(open_, minibatch_size=16, replicas=(3, 1), schedule="pipedream")
    assert microbatches(equal, 2) == (16, 3, 6), "asynchronous replicas need equal shares"
    timed = dataclasses.replace(chain(4), seconds_by_size=((1, 0.01), (4, 0.02), (8, 0.035)))
    assert plan_of(decide(equal, timed)).num_microbatches == 6
    (note,) = plan_of(decide(dataclasses.replace(FIXED, replicas=(5, 1)), chain(8))).notes
    assert "12 micro-batches are no multiple of the 5 lanes: lanes, and so replicas, have unequal shares; 15" in note
    (note,) = share_notes(dataclasses.replace(FIXED, lanes=8), 2, 12)
    assert "of the 8 lanes: lanes have unequal shares; 16" in note
    ahead = dataclasses.replace(FIXED, num_stages=3, num_microbatches=3, replicas=(1, 1, 3), schedule="2bw")
    with pytest.raises(PlanError, match=r"num_replicas=1-1-3 runs 4 forwards ahead on stage 0"):
        decide(ahead, chain(4))
    few = dataclasses.replace(FIXED, minibatch_size=6, num_microbatches=6, replicas=(8, 1))
    with pytest.raises(PlanError, match=r"6 micro-batches, and num_replicas=\(8, 1\) gives a stage 8 workers"):
        plan_of(decide(few, chain(12)))


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_workers_that_hold_several_stages_have_replicas_of_all_of_them(schedule: str) -> None:
    """As many pipelines side by side: each takes as long as alone with its share of the micro-batches."""
    asked = dataclasses.replace(FIXED, num_stages=4, schedule=schedule, replicas=2, partitioner="parameters")
    alone = dataclasses.replace(asked, replicas=1, num_microbatches=6, minibatch_size=24)
    both, one = (decide(each, chain(8)) for each in (asked, alone))
    homes = ((0, 1), (2, 3), (0, 1), (2, 3)) if schedule == "interleaved" else ((0, 1), (2, 3), (2, 3), (0, 1))
    plan = plan_of(both)
    assert plan.schedule.wiring.homes == tuple(stage.devices for stage in plan.partition.stages) == homes
    assert [(s.start, s.stop) for s in both.partition.stages] == [(s.start, s.stop) for s in one.partition.stages]
    waited_s = max(2 * (stage.exchange_s - stage.hidden_s) for stage in both.prediction.stages)
    assert both.prediction.step_s - waited_s == pytest.approx(one.prediction.step_s, abs=1e-9)
    parts, single = (dict(found.prediction.stages[0].memory) for found in (both, one))
    assert parts.pop("exchange") == exchange_bytes(2 * MIB, 2, 2) - (
        parts["activations of 4 micro-batches"] - 2 * 4 * (1 << 16)  # of all but one, what is free by then
    )
    assert parts.keys() == single.keys()
    assert all(parts[what] == single[what] for what in parts if what != "messages")
    assert "2 on each of 2 workers, with 2 replicas of each" in plan.explain()
    assert "compute longest" in both.prediction.bound
    assert type(plan).from_json(plan.to_json()) == plan


def test_devices_are_used_as_many_at_a_time_as_there_are_replicas() -> None:
    asked = dataclasses.replace(FIXED, num_stages=4, schedule="zb-v", replicas=2)
    found = decide(asked, chain(8), rented(5, memory=256 * MIB))
    assert [stage.devices for stage in found.partition.stages] == [(0, 1), (2, 3), (2, 3), (0, 1)]
    with pytest.raises(PlanError, match=r"Worker . needs .* for its stages"):
        decide(asked, chain(8), rented(4, memory=24 * MIB))

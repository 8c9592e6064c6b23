"""The candidates: what is chosen is what trying everything finds, within memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.ir.communication import LinkEstimate, StageSample
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import (
    Choice,
    CodecCost,
    ControllerConfig,
    Measured,
    MemoryBudget,
    budgets_of,
    fits,
    predicted_s,
    search,
    why_not,
)
from raypipe.planner.controller.memory_budget import PeakMemory
from raypipe.planner.cost.columns import Sums
from raypipe.planner.cost.memory import MemoryModel, StageMemory, stage_memory
from raypipe.planner.replay import routes_of
from tests.planner.controller.lab import all_choices
from tests.planner.controller.test_controller import setup_of

SPLIT_S = ((0.0, 0.02), (0.01, 0.01), (0.01, 0.01), (0.01, 0.01))
BF16, INT8 = CodecCost("bf16", 2.0, 1e-10, 1e-10), CodecCost("int8", 3.9, 4e-10, 4e-10)

ONE = Choice(ScheduleSpec("1f1b", 16))


def config(mode: str, budgets: tuple[MemoryBudget, ...], **codecs_and_counts: object) -> ControllerConfig:
    """What may be chosen; a search is told what runs, so that what the run began with plays no part."""
    return ControllerConfig(mode, ONE, budgets, **codecs_and_counts)  # type: ignore[arg-type]


def link(hop: int, forward: bool, occupancy_s: float, latency_s: float = 0.0, raw_bytes: int = 262_144) -> LinkEstimate:
    total_s = occupancy_s + latency_s
    return LinkEstimate(
        hop, forward, raw_bytes, latency_s, occupancy_s, total_s, occupancy_s / raw_bytes,
        (occupancy_s,), True, "given",
    )  # fmt: skip


def measured_of(hops: list[tuple[float, float]], count: int = 16, busy: tuple[float, float] = (0.01, 0.02)) -> Measured:
    """Equal stages; by hop (occupancy_s, latency_s), the same both ways."""
    stages = len(hops) + 1
    links = tuple(link(h, f, *hop) for h, hop in enumerate(hops) for f in (True, False))
    routes = routes_of(ScheduleSpec("1f1b", count), stages)
    return Measured(count, (busy[0],) * stages, (busy[1],) * stages, (0.0,) * stages, links, routes=routes)


def at_most(*counts: int) -> tuple[MemoryBudget, ...]:
    return tuple(MemoryBudget(most_in_flight=count) for count in counts)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0.0, 0.045), st.floats(0.0, 0.06)), min_size=1, max_size=3),
    st.integers(0, 8),
)
def test_the_choice_is_as_quick_as_the_best_of_all_that_fit(hops, spare):
    stages, count = len(hops) + 1, 10
    budgets = at_most(*(stages - s + spare for s in range(stages)))
    measured = measured_of(hops, count)
    found = search(config("auto", budgets), measured, Choice(ScheduleSpec("1f1b", count)))
    every = all_choices(setup_of(budgets=budgets), count, most_slack=6)
    best_s = min(predicted_s(measured, choice, {}) for choice in every)
    assert fits(found.best.choice, budgets)
    assert found.best.seconds <= best_s * 1.02
    assert found.best == found.lossless


@pytest.mark.slow
@given(st.floats(0.0, 0.08), st.floats(0.0, 0.04), st.integers(1, 10), st.integers(2, 4))
def test_k_is_the_optimum_of_all_k_that_fit(latency_s, occupancy_s, most, stages):
    count = 12
    budgets = at_most(*(most * (stages - s) for s in range(stages)))
    measured = measured_of([(occupancy_s, latency_s)] * (stages - 1), count)
    found = search(config("kfkb", budgets), measured, Choice(ScheduleSpec("kfkb", count)))
    every = [Choice(ScheduleSpec("kfkb", count, group_size=k)) for k in range(1, count + 1)]
    seconds = {one: predicted_s(measured, one, {}) for one in every if fits(one, budgets)}
    assert found.best.choice in seconds
    assert found.best.seconds <= min(seconds.values()) * 1.005


@pytest.mark.slow
def test_modes_turn_what_they_are_named_after():
    measured, budgets = measured_of([(0.025, 0.0)] * 3), at_most(16, 16, 16, 16)
    kinds = {
        mode: search(
            config(mode, budgets),
            measured,
            Choice(ScheduleSpec(kind, 16, slack=(1, 1, 1) if kind == "slack" else ())),
        )
        for mode, kind in (("kfkb", "kfkb"), ("slack", "slack"), ("auto", "1f1b"), ("1f1b", "1f1b"), ("gpipe", "gpipe"))
    }
    assert {mode: found.best.choice.spec.kind for mode, found in kinds.items()} == {
        "kfkb": "kfkb", "slack": "slack", "auto": "slack", "1f1b": "1f1b", "gpipe": "gpipe",
    }  # fmt: skip
    assert kinds["kfkb"].best.choice.spec.group_size >= 3
    assert kinds["1f1b"].tried == 1


@pytest.mark.slow
@pytest.mark.parametrize("hops", [[(0.0, 0.0)] * 3, [(0.015, 0.0), (0.0, 0.01), (0.02, 0.0)]])
def test_split_backwards_are_taken_where_they_were_timed(hops):
    """As quick as any slack by hop, and not at all where stages cannot split them."""
    budgets = at_most(16, 16, 16, 16)
    known = replace(measured_of(hops), split_backward_s=SPLIT_S)
    found = search(config("auto", budgets), known, ONE)
    every = [Choice(ScheduleSpec("zb-h1", 16, slack=r)) for r in product(range(1, 6), repeat=3)]
    assert found.best.choice.spec.kind == "zb-h1"
    assert found.best.seconds <= 1.02 * min(predicted_s(known, one, {}) for one in every if fits(one, budgets))
    whole = search(config("auto", budgets), measured_of(hops), ONE)
    assert whole.best.choice.spec.kind != "zb-h1"
    assert found.best.seconds < whole.best.seconds
    nothing = search(
        config("auto", budgets),
        replace(known, split_backward_s=(SPLIT_S[0], *[(0.02, 0.0)] * 3)),
        ONE,
    )
    assert nothing.best.choice.spec.kind != "zb-h1"
    asked = search(config("zb-h1", budgets), measured_of(hops), Choice(ScheduleSpec("zb-h1", 16, slack=(1, 1, 1))))
    assert asked.best.choice.spec.kind == "zb-h1"
    dear = search(
        config("auto", budgets),
        replace(known, split_backward_s=((0.0, 0.04), *[(0.02, 0.02)] * 3)),
        ONE,
    )
    assert dear.best.choice.spec.kind != "zb-h1"


def test_a_stage_that_lacks_memory_defers_fewer_weight_gradients():
    known = replace(measured_of([(0.0, 0.0)] * 3), split_backward_s=SPLIT_S)
    roomy, tight = (search(config("auto", at_most(16, 16, 16, last)), known, ONE) for last in (16, 3))
    assert roomy.best.choice.spec.lag == ()
    assert roomy.best.seconds <= tight.best.seconds < tight.current.seconds
    spec = tight.best.choice.spec
    assert (spec.kind, spec.lag[3]) == ("zb-h1", 2)
    assert all(room == full for room, full in zip(spec.lag[:3], (0, *accumulate(spec.slack)), strict=False))
    none = search(config("zb-h1", at_most(0, 0, 0, 0)), known, ONE)
    assert none.best.choice.spec == ScheduleSpec("zb-h1", 16, slack=(1, 1, 1), lag=(0, 0, 0, 0))
    assert "memory does not allow one more of slack on every hop" in none.limit


def test_free_links_ask_for_nothing():
    found = search(
        config("auto", at_most(*(64,) * 4)),
        measured_of([(0.0, 0.0)] * 3),
        ONE,
    )
    assert found.best.choice == ONE
    assert found.limit == ""


def test_memory_for_one_group_only_is_said_and_compression_takes_its_place():
    budgets = tuple(MemoryBudget(limit_bytes=1000, fixed_bytes=400, activation_bytes=150) for _ in range(4))
    space = config("auto", budgets, forward_codecs=(BF16, INT8), backward_codecs=(BF16,))
    found = search(space, measured_of([(0.025, 0.0)] * 3), ONE)
    assert found.lossless.choice.spec.kind == "1f1b"
    assert found.best.choice.lossy
    assert found.best.seconds < 0.8 * found.lossless.seconds
    assert "memory does not allow" in found.limit
    assert "stage 0 would hold" in found.limit
    assert "its limit is" in found.limit


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(st.floats(0.02, 0.4), min_size=1, max_size=2), st.integers(0, 6))
def test_the_order_suits_the_compressed_messages(occupancy_s, spare):
    """As quick as every order with every pair of codecs on all hops, also where a link is far too slow without."""
    stages, count = len(occupancy_s) + 1, 8
    budgets = at_most(*(stages - s + spare for s in range(stages)))
    measured = measured_of([(s, 0.0003) for s in occupancy_s], count)
    space = config("auto", budgets, forward_codecs=(BF16, INT8), backward_codecs=(BF16,))
    found = search(space, measured, Choice(ScheduleSpec("1f1b", count)))
    hops = stages - 1
    every = [
        replace(choice, forward_codecs=(forward,) * hops, backward_codecs=(backward,) * hops)
        for choice in all_choices(setup_of(budgets=budgets), count, most_slack=6)
        for forward in ("none", "bf16", "int8")
        for backward in ("none", "bf16")
    ]
    codecs = {("bf16", True): BF16, ("int8", True): INT8, ("bf16", False): BF16}
    best_s = min(predicted_s(measured, choice, codecs) for choice in every)
    assert fits(found.best.choice, budgets)
    assert found.best.seconds <= best_s * 1.035  # 3 % are what codecs must gain to be used, half a per cent is even


def test_codecs_stay_away_from_hops_that_are_free():
    space = config("1f1b", at_most(*(16,) * 4), forward_codecs=(BF16, INT8), backward_codecs=(BF16,))
    found = search(space, measured_of([(0.0, 0.0), (0.04, 0.0), (0.0, 0.0)]), ONE)
    choice = found.best.choice
    assert [choice.codec(h, f) for h in (0, 2) for f in (True, False)] == ["none"] * 4
    assert choice.codec(1, True) == "int8"
    assert choice.codec(1, False) == "bf16"


def test_the_mildest_codec_that_does_the_job_is_taken():
    """Of two that save about as much, the one that comes first in the list."""
    both = (BF16, CodecCost("int8", 2.05, 1e-10, 1e-10))
    space = config("slack", at_most(*(32,) * 2), forward_codecs=both, backward_codecs=both)
    found = search(space, measured_of([(0.04, 0.0)]), Choice(ScheduleSpec("slack", 16, slack=(2,))))
    assert {found.best.choice.codec(0, True), found.best.choice.codec(0, False)} == {"bf16"}


def test_a_codec_that_costs_more_than_it_saves_is_not_used():
    slow = CodecCost("int8", 4.0, 3e-7, 3e-7)  # 79 ms for 256 KiB
    space = config("1f1b", at_most(*(16,) * 4), forward_codecs=(slow,), backward_codecs=(slow,))
    found = search(space, measured_of([(0.025, 0.0)] * 3), ONE)
    assert not found.best.choice.lossy


@pytest.mark.slow
def test_slack_comes_before_compression():
    space = config("auto", at_most(*(64,) * 4), forward_codecs=(BF16,), backward_codecs=(BF16,))
    found = search(space, measured_of([(0.002, 0.03)] * 3, count=64), Choice(ScheduleSpec("1f1b", 64)))
    assert found.best.choice.spec.kind == "slack"
    assert not found.best.choice.lossy


def test_micro_batches_stay_unless_they_may_change():
    measured, budgets = measured_of([(0.0, 0.0)] * 3, count=4), at_most(*(64,) * 4)
    assert search(config("1f1b", budgets), measured, Choice(ScheduleSpec("1f1b", 4))).best.choice.num_microbatches == 4
    times = ((4, 0.03), (8, 0.016), (16, 0.0095))  # halving the size does not quite halve the time
    found = search(config("1f1b", budgets, microbatch_seconds=times), measured, Choice(ScheduleSpec("1f1b", 4)))
    assert found.best.choice.num_microbatches == 8
    assert found.best.seconds == pytest.approx(11 * 0.016, rel=1e-6)


def test_rooms_are_the_plan_s_own_memory():
    model = MemoryModel(ScheduleSpec("slack", 8, slack=(2, 2)), microbatch_size=2)
    stage = StageMemory(0, "0F6", 5, 5, 1, 100, 100, 200, 10, 500, 60, 40, 7)
    (budget,) = budgets_of([stage], model, [2000], [((0, 20), (30, 4))])
    assert budget.need_bytes(Choice(ScheduleSpec("slack", 8, slack=(2, 2))), 3) == stage.total_bytes
    assert budget.need_bytes(Choice(ScheduleSpec("1f1b", 8)), 3) == 417 + 3 * 100 + 30 + 40
    assert budget.need_bytes(ONE, 3) == 417 + (3 * 100 + 30) // 2 + 30 + 4  # half as large each
    assert "stage 0 would hold 8 micro-batches" in why_not(
        Choice(ScheduleSpec("gpipe", 8)), (MemoryBudget(limit_bytes=1, fixed_bytes=2),)
    )


def test_a_stage_that_computes_again_has_room_for_a_schedule_that_holds_more():
    spec = ScheduleSpec("slack", 8, slack=(2, 2))
    model = MemoryModel(spec, microbatch_size=2, recompute=(True, False, False))
    again = stage_memory(model, Sums(100, 100, 10, 50), 0, 3, receive_bytes=5, send_bytes=5)
    kept = stage_memory(replace(model, recompute=False), Sums(100, 100, 10, 50), 0, 3, receive_bytes=5, send_bytes=5)
    budgets = [budgets_of([one], model, [kept.total_bytes], [()])[0] for one in (again, kept)]
    assert [b.need_bytes(Choice(spec), 3) for b in budgets] == [again.total_bytes, kept.total_bytes]
    assert again.total_bytes == kept.total_bytes - 4 * 2 * 50
    more = Choice(ScheduleSpec("slack", 8, slack=(3, 3)))
    assert budgets[0].need_bytes(more, 3) == again.total_bytes + 2 * 2 * 5 + 2 * 5 + 2 * 5  # two inputs, one slot more
    assert [fits(more, (b, MemoryBudget(), MemoryBudget())) for b in budgets] == [True, False]


@pytest.mark.parametrize("mode", ["auto", "kfkb", "slack", "gpipe"])
def test_where_nothing_fits_the_smallest_micro_batches_come_nearest(mode: str) -> None:
    counts = ((4, 1.0), (8, 0.5), (16, 0.3), (64, 0.1))  # the last is too far from 8
    current = Choice(ScheduleSpec("gpipe" if mode == "gpipe" else "1f1b", 8))
    for fixed_bytes, count in ((2, 16), (100, 8)):  # what is there anyway grows no smaller
        budget = MemoryBudget(limit_bytes=20, fixed_bytes=fixed_bytes, activation_bytes=100, num_microbatches=8)
        found = search(config(mode, (budget,) * 2, microbatch_seconds=counts), measured_of([(0.0, 0.0)], 8), current)
        assert found.best.choice.num_microbatches == count


SMALL, LARGE = Choice(ScheduleSpec("1f1b", 8)), Choice(ScheduleSpec("gpipe", 8))
BUDGET = MemoryBudget(limit_bytes=1000, fixed_bytes=100, activation_bytes=10)


def sample(peak_bytes: int | None) -> list[StageSample]:
    return [StageSample(0, 0, 1.0, 2.0, peak_bytes=peak_bytes)]


def test_what_a_peak_is_above_the_expected_is_gone_for_good():
    memory = PeakMemory((BUDGET,) * 2).after(SMALL, sample(150))
    assert [budget.extra_bytes for budget in memory.budgets] == [30, 0]
    assert memory.after(SMALL, sample(140)).budgets == memory.budgets
    assert memory.after(SMALL, sample(None)).budgets == memory.budgets


def test_a_peak_belongs_to_the_fullest_choice_that_has_run():
    """A process reports the highest peak of its life: after a larger choice it says nothing of a smaller one."""
    memory = PeakMemory((BUDGET,) * 2).after(LARGE, sample(180))
    assert memory.fullest_bytes == (180, 180)
    assert memory.after(SMALL, sample(180)).budgets == (BUDGET,) * 2


def test_what_an_earlier_process_found_is_taken_over():
    memory = PeakMemory((BUDGET,) * 2).after(SMALL, sample(150))
    assert PeakMemory((BUDGET,) * 2, memory.fullest_bytes).with_extra([30, 0]) == memory

"""Links estimated from the clocks of their ends, against links whose truth is known."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.ir.communication import LinkEstimate, LinkSample, StageSample, stage_sample
from raypipe.ir.schedule import Action, Op
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.timeline import Span
from raypipe.planner.controller import Choice, LinkEstimator
from raypipe.planner.controller.change_detection import Drift, DriftState
from raypipe.planner.controller.links import seconds_per_byte
from tests.planner.controller.lab import Pipeline, constant

SLACK = Choice(ScheduleSpec("slack", 8, slack=(2,)))


def estimated(pipeline: Pipeline, choice: Choice, steps: int = 6) -> LinkEstimator:
    estimator = LinkEstimator(0)
    for step in range(steps):
        estimator.add(pipeline.step(step, choice).messages)
    return estimator


def both(estimator: LinkEstimator) -> tuple[LinkEstimate, LinkEstimate]:
    forward, backward = estimator.estimate(True), estimator.estimate(False)
    assert forward is not None
    assert backward is not None
    return forward, backward


def check_sane(estimate: LinkEstimate) -> None:
    numbers = (estimate.latency_s, estimate.occupancy_s, estimate.p90_s, estimate.seconds_per_byte)
    assert min(numbers) >= 0.0
    assert min(estimate.draws_s) >= 0.0
    assert estimate.bandwidth_bytes_s > 0.0
    assert estimate.p90_s >= estimate.transfer_s


def test_estimates_are_of_messages_without_codec():
    """On the wire they are a quarter; occupancy and the tail are those of the whole."""
    pipeline = Pipeline([(0.01, 0.02)] * 2, constant(0.025, 0.004))
    estimator = LinkEstimator(0)
    for step in range(4):
        messages = pipeline.step(step, Choice(ScheduleSpec("gpipe", 8))).messages
        estimator.add(m._replace(raw_bytes=4 * m.wire_bytes) for m in messages)
    for estimate in both(estimator):
        check_sane(estimate)
        assert estimate.occupancy_s == pytest.approx(0.1, rel=0.05)
        assert estimate.p90_s == pytest.approx(0.104, rel=0.05)


@settings(max_examples=12)
@given(
    occupancy_s=st.floats(0.022, 0.06),
    latency_s=st.floats(0.0, 0.03),
    offset_s=st.floats(-1e6, 1e6),
    gain=st.floats(-1e-4, 1e-4),
)
def test_a_link_that_queues_is_split_whatever_the_clocks_say(occupancy_s, latency_s, offset_s, gain):
    """F takes 10 ms and B 20, so GPipe puts messages behind each other; clocks are days apart and drift by 100 ppm."""
    pipeline = Pipeline([(0.01, 0.02)] * 2, constant(occupancy_s, latency_s), clocks=[(0.0, 0.0), (offset_s, gain)])
    for estimate in both(estimated(pipeline, Choice(ScheduleSpec("gpipe", 8)))):
        check_sane(estimate)
        assert estimate.split
        assert estimate.occupancy_s == pytest.approx(occupancy_s, rel=0.02, abs=2e-4)
        assert estimate.latency_s == pytest.approx(latency_s, abs=0.02 * occupancy_s + 5e-4)
        assert estimate.bandwidth_bytes_s == pytest.approx(262_144 / occupancy_s, rel=0.05)


@settings(max_examples=12)
@given(
    forward_s=st.floats(0.0, 0.06),
    backward_s=st.floats(0.0, 0.06),
    latency_s=st.floats(0.0, 0.05),
    offset_s=st.floats(-1e3, 1e3),
    r=st.integers(1, 4),
)
def test_what_matters_is_right_where_little_can_be_seen(forward_s, backward_s, latency_s, offset_s, r):
    """Whatever the split and the share of each way, a message and its answer together take what they take."""
    pipeline = Pipeline(
        [(0.01, 0.02)] * 2,
        lambda hop, forward, step, m: (forward_s if forward else backward_s, latency_s),
        clocks=[(0.0, 0.0), (offset_s, 0.0)],
    )
    forward, backward = both(estimated(pipeline, Choice(ScheduleSpec("slack", 8, slack=(r,)))))
    check_sane(forward)
    check_sane(backward)
    true_s = forward_s + backward_s + 2 * latency_s
    assert forward.transfer_s + backward.transfer_s == pytest.approx(true_s, rel=0.1, abs=5e-4)
    if not forward.split:
        assert "upper bound" in forward.reason


@settings(max_examples=12)
@given(st.integers(0, 10_000))
def test_noise_of_stamps_losses_and_disorder_cost_little(seed):
    random = Random(seed)
    occupancy_s, latency_s = random.uniform(0.023, 0.05), random.uniform(0.0, 0.02)
    pipeline = Pipeline(
        [(0.01, 0.02)] * 2, constant(occupancy_s, latency_s), noise=0.05, stamp_noise_s=3e-4, lost=0.2, seed=seed,
        clocks=[(random.uniform(-9, 9), 0.0)] * 2,
    )  # fmt: skip
    for estimate in both(estimated(pipeline, Choice(ScheduleSpec("gpipe", 8)), steps=8)):
        check_sane(estimate)
        assert estimate.occupancy_s == pytest.approx(occupancy_s, rel=0.05, abs=1e-3)
        assert estimate.transfer_s == pytest.approx(occupancy_s + latency_s, rel=0.1, abs=1.5e-3)


@settings(max_examples=12)
@given(st.floats(-1e4, 1e4), st.integers(0, 7))
def test_a_clock_that_is_set_while_a_step_runs_spoils_nothing(jump_s, at):
    pipeline = Pipeline([(0.01, 0.02)] * 2, constant(0.025, 0.004))
    estimator = LinkEstimator(0)
    for step in range(9):
        messages = pipeline.step(step, Choice(ScheduleSpec("gpipe", 8))).messages
        if step == 4:  # stage 1's clock is set while micro-batch ``at`` is on its way
            messages = tuple(
                replace_stamps(m, 0.0, jump_s) if m.forward and m.microbatch >= at else m if m.forward
                else replace_stamps(m, jump_s, 0.0)
                for m in messages
            )  # fmt: skip
        if step > 4:
            messages = tuple(
                replace_stamps(m, 0.0, jump_s) if m.forward else replace_stamps(m, jump_s, 0.0) for m in messages
            )
        estimator.add(messages)
    for estimate in both(estimator):
        check_sane(estimate)
        assert estimate.occupancy_s == pytest.approx(0.025, rel=0.05)
        assert estimate.transfer_s == pytest.approx(0.029, rel=0.25)


def replace_stamps(m: LinkSample, sent_s: float, arrived_s: float) -> LinkSample:
    return m._replace(sent_at_s=m.sent_at_s + sent_s, arrived_at_s=m.arrived_at_s + arrived_s)


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.floats(0.2, 0.6))
def test_a_competing_flow_shows_in_the_tail(seed, share):
    """While somebody else sends, a message takes twice as long."""
    random = Random(seed)
    slow = {(f, step, m): random.random() < share for f in (True, False) for step in range(8) for m in range(16)}
    pipeline = Pipeline(
        [(0.01, 0.02)] * 2, lambda hop, forward, step, m: (0.04 if slow[forward, step, m] else 0.02, 0.001)
    )
    for estimate in both(estimated(pipeline, Choice(ScheduleSpec("gpipe", 16)), steps=8)):
        check_sane(estimate)
        mean_s = sum(estimate.draws_s) / len(estimate.draws_s)
        true_s = 0.02 * (1 + sum(v for (f, _, _), v in slow.items() if f is estimate.forward) / 128)
        assert mean_s == pytest.approx(true_s, rel=0.25)  # where the last step is an odd one, it is made of that alone
        assert estimate.p90_s >= (0.035 if len(estimate.draws_s) > 32 else estimate.occupancy_s)


@settings(max_examples=12)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 9), st.integers(0, 5000),
                          st.floats(-1e9, 1e9), st.floats(-1e9, 1e9)), max_size=40))  # fmt: skip
def test_nonsense_gives_no_negative_number_and_no_error(rows):
    estimator = LinkEstimator(0)
    for step in range(4):
        estimator.add(LinkSample(0, f, step, m, n, s, a) for f, at, m, n, s, a in rows if at == step)
    for forward in (True, False):
        if (estimate := estimator.estimate(forward)) is not None:
            check_sane(estimate)


def test_sizes_tell_what_meetings_do_not():
    """Messages long after each other, of 4 ms a byte and 1 s on the way, on a clock 7 s ahead."""
    sizes = [1000, 2000, 500]
    messages = [LinkSample(0, True, 0, m, n, 100.0 * m, 100.0 * m + 4e-3 * n + 8.0) for m, n in enumerate(sizes)]
    way = seconds_per_byte([messages])
    assert way.split
    assert way.seconds_per_byte == pytest.approx(4e-3)
    assert "sizes" in way.reason


def test_a_change_is_suspected_at_once_and_believed_when_it_stays():
    slow = {3: True, 6: True, 7: True, 8: True}
    pipeline = Pipeline([(0.01, 0.02)] * 2, lambda hop, forward, step, m: (0.025 if slow.get(step) else 0.012, 0.0))
    estimator = LinkEstimator(0)
    words = [estimator.add(pipeline.step(step, SLACK).messages) for step in range(9)]
    expected = ["steady"] * 3 + ["suspect", "steady", "steady", "suspect", "changed", "steady"]
    assert [str(word) for word in words] == expected
    estimate = estimator.estimate(True)
    assert estimate is not None
    assert estimate.occupancy_s == pytest.approx(0.025, rel=0.05)


def test_an_outlier_before_another_codec_is_forgotten():
    pipeline = Pipeline([(0.01, 0.02)] * 2, lambda hop, forward, step, m: (0.025 if step == 5 else 0.012, 0.0))
    estimator = LinkEstimator(0)
    words = [str(estimator.add(pipeline.step(step, SLACK).messages)) for step in range(6)]
    assert words[-1] == "suspect"
    messages = pipeline.step(6, SLACK).messages
    assert str(estimator.add(m._replace(raw_bytes=4 * m.wire_bytes) for m in messages)) == "steady"
    estimate = estimator.estimate(True)
    assert estimate is not None
    check_sane(estimate)


@settings(max_examples=12)
@given(st.floats(0.0, 0.1), st.lists(st.floats(-0.2, 0.2), max_size=60))
def test_drift_never_speaks_below_its_threshold(level_s, noise):
    drift, floor_s = Drift(0.25, 1e-3), 1e-3
    for share in [0.0, *[0.5 * x for x in noise]]:
        drift, word = drift.after(max(level_s, floor_s) * (1 + share))
        assert word is DriftState.STEADY


def test_stage_samples_are_medians_of_spans():
    rows = [("F", 0.0, 1.0), ("F", 1.0, 4.0), ("F", 4.0, 6.0), ("B", 6.0, 10.0), ("STEP", 10.0, 10.5)]
    spans = [Span(2, Action(2, Op(op), i), start, end) for i, (op, start, end) in enumerate(rows)]
    assert stage_sample(2, 7, spans) == StageSample(2, 7, 2.0, 4.0, 0.5)
    assert stage_sample(1, 7, spans) == StageSample(1, 7, 0.0, 0.0, 0.0)
    parts = [Span(0, Action(0, Op.I, 0), 0.0, 1.0), Span(0, Action(0, Op.W, 0), 1.0, 1.5)]
    assert stage_sample(0, 0, parts) == StageSample(0, 0, 0.0, 0.0, input_s=1.0, weight_s=0.5)
    told = stage_sample(2, 7, spans, (3.0, 1.25))
    assert told == StageSample(2, 7, 2.0, 4.0, 0.5, input_s=3.0, weight_s=1.25)

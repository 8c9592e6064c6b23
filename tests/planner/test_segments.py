"""Segments: every sample once per epoch, and resuming anywhere gives the same rest of the run."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from raypipe.ir.schedule import EVALUATION
from raypipe.ir.segment import Phase
from raypipe.planner.segments import (
    Flow,
    Position,
    evaluation_segments,
    flowing_segments,
    next_segment,
    num_steps_of,
    train_segments,
)

COUNTS = st.integers(1, 40)


@given(num_samples=COUNTS, minibatch=COUNTS, microbatch=COUNTS, epochs=st.integers(1, 3))
def test_every_epoch_has_every_position_once(num_samples: int, minibatch: int, microbatch: int, epochs: int) -> None:
    steps = num_steps_of(epochs, num_samples, minibatch)
    seen: dict[int, list[int]] = {}
    expected_microbatch = 0
    for segment, _ in train_segments(num_samples, minibatch, microbatch, steps):
        assert segment.first_microbatch == expected_microbatch
        for local in range(len(segment.microbatch_samples)):
            step, start, samples = segment.locate(segment.first_microbatch + local)
            assert step == segment.first_step
            assert 1 <= samples <= microbatch
            seen.setdefault(segment.epoch, []).extend(range(start, start + samples))
        expected_microbatch += len(segment.microbatch_samples)
    assert seen == {epoch: list(range(num_samples)) for epoch in range(epochs)}


@given(num_samples=COUNTS, minibatch=COUNTS, microbatch=COUNTS, steps=st.integers(1, 12), data=st.data())
def test_resuming_gives_the_rest(
    num_samples: int, minibatch: int, microbatch: int, steps: int, data: st.DataObject
) -> None:
    run = list(train_segments(num_samples, minibatch, microbatch, steps))
    assert len(run) == steps
    at = data.draw(st.integers(0, steps - 1))
    start = run[at - 1][1] if at else Position()
    assert list(train_segments(num_samples, minibatch, microbatch, steps, start)) == run[at:]


@given(num_samples=COUNTS, minibatch=COUNTS, sizes=st.lists(COUNTS, min_size=1, max_size=12))
def test_the_size_of_micro_batches_may_change_at_every_step(num_samples: int, minibatch: int, sizes: list[int]) -> None:
    at = Position()
    still = [s for s, _ in train_segments(num_samples, minibatch, 1, len(sizes))]
    for size, plain in zip(sizes, still, strict=True):
        first = at.microbatch
        segment, at = next_segment(num_samples, minibatch, size, at)
        assert (segment.first_step, segment.epoch, segment.offset) == (plain.first_step, plain.epoch, plain.offset)
        assert segment.minibatch_samples == plain.minibatch_samples
        assert max(segment.microbatch_samples) <= size
        assert (segment.first_microbatch, at.microbatch - first) == (first, len(segment.microbatch_samples))


@given(num_samples=COUNTS, minibatch=COUNTS, microbatch=COUNTS)
def test_evaluation_reads_in_order_under_numbers_of_its_own(num_samples: int, minibatch: int, microbatch: int) -> None:
    segments = list(evaluation_segments(num_samples, minibatch, microbatch))
    assert [s.offset for s in segments] == list(range(0, num_samples, minibatch))
    assert sum(s.minibatch_samples for s in segments) == num_samples
    numbers = [s.first_microbatch + i for s in segments for i in range(len(s.microbatch_samples))]
    assert numbers == list(range(EVALUATION, EVALUATION + len(numbers)))


@given(
    num_samples=st.integers(1, 60), minibatch=st.integers(1, 9), microbatch=st.integers(1, 9),
    steps=st.integers(1, 40), drained=st.integers(1, 4), every=st.integers(1, 12), hurry=st.sets(st.integers(0, 60)),
)  # fmt: skip
def test_segments_take_every_sample_once_and_are_empty_where_they_must_be(
    num_samples: int, minibatch: int, microbatch: int, steps: int, drained: int, every: int, hurry: set[int]
) -> None:
    minibatch = min(minibatch, num_samples)
    microbatch = min(microbatch, minibatch)
    queries = iter(range(1000))
    segments = list(
        flowing_segments(
            Flow(1, drained, minibatch, microbatch), num_samples, steps, Position(),
            empty_after=lambda step: step % every == 0, empty_soon=lambda: next(queries) in hurry,
        )
    )  # fmt: skip
    at, flowing = Position(), False
    for segment, after in segments:
        assert (segment.first_step, segment.first_microbatch, segment.epoch, segment.offset) == (
            at.step, at.microbatch, at.epoch, at.offset,
        )  # fmt: skip
        assert segment.phase.begins_empty != flowing
        begun = segment.num_minibatches + (0 if segment.phase.ends_empty else drained)
        assert segment.offset + begun * segment.minibatch_samples <= num_samples, "begins what the epoch does not have"
        assert at.step + begun <= steps
        for step in range(at.step + 1, after.step):
            assert step % every or segment.phase is Phase.DRAIN, "passes a step after which it must be empty"
        flowing = not segment.phase.ends_empty
        if after.step % every == 0 or after.offset == 0:
            assert not flowing
        at = after
    assert at.step == steps
    assert not flowing
    assert segments[-1][1].epoch == steps // math.ceil(num_samples / minibatch)

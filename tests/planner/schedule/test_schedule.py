"""From a spec to compute actions: the right generator, or an error that says what to write instead."""

from __future__ import annotations

import pytest

from raypipe.errors import ScheduleError
from raypipe.ir.schedule_spec import KINDS
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.sync import interleaved
from tests.planner.specs import spec_for


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_what_the_table_says(kind: str) -> None:
    spec = spec_for(kind, 4, 8, group_size=2, slack=(1, 2, 1), chunks=2, first_trainable=1)
    found = schedule_of(spec, 4)
    assert found.kind == spec.name
    assert found.wiring.split_backward == spec.of_kind.splits_backward
    assert found.wiring.first_trainable == 1
    assert bool(found.prologue) != spec.of_kind.synchronous
    assert (found.num_workers < 4) == spec.of_kind.several_stages


def test_steps_overlap_and_updates_come_as_often_as_the_spec_says() -> None:
    assert schedule_of(spec_for("zb-h1", 4, 8, overlap=True), 4).wiring.norm_per_stage
    assert schedule_of(spec_for("pipedream", 4, 8, overlap=True, update_interval=4), 4).wiring.update_interval == 4


@pytest.mark.parametrize(
    ("kind", "stages", "count", "numbers", "part"),
    [
        ("1f1b", 0, 2, {}, "at least one stage, not 0"),
        ("1f1b", 2, 2, {"first_trainable": 2}, "leaves nothing to train: with 2 stages it lies between 0 and 1"),
        ("slack", 3, 2, {"slack": (1,)}, "3 stages have 2 hops, but slack lists 1"),
        ("2bw", 3, 2, {"slack": (1,)}, "3 stages have 2 hops, but slack lists 1"),
        ("interleaved", 3, 2, {"chunks": 2}, "3 stages cannot be shared out evenly, 2 to each worker"),
        ("zb-v", 3, 2, {}, "3 is odd: cut the model into 2 or 4 stages"),
        ("zb-v", 1, 2, {}, "1 is odd: cut the model into 2 stages"),
        ("zb-v", 0, 2, {}, "at least one stage, not 0"),
        ("zb-v", 4, 2, {"first_trainable": 4}, "with 4 stages it lies between 0 and 3"),
    ],
)
def test_what_does_not_go_with_the_number_of_stages_is_refused(kind, stages, count, numbers, part) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule_of(spec_for(kind, stages, count, **numbers), stages)
    assert part in str(caught.value)


def test_interleaved_needs_a_worker() -> None:
    with pytest.raises(ScheduleError, match="at least one worker and one chunk, not 0 and 2"):
        interleaved(0, 2, 2)

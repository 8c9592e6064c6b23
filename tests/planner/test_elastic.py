"""When a run whose number of workers may change waits, begins, grows and asks for more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.config.ray import WorkerRange
from raypipe.planner.elastic import LEAST_GAIN, Shape, asked_for, begins_with, gain_of, move_seconds, shape_of
from raypipe.planner.tune import Request
from raypipe.planner.worth import pays

REQUEST = Request(
    num_stages=None, num_workers=None, split_points=(), minibatch_size=8, num_microbatches=4, num_samples=64
)


def test_the_table_of_the_module_is_what_happens() -> None:
    workers, wanted = WorkerRange(2, 5), 4
    assert [begins_with(workers, wanted, there) for there in range(7)] == [0, 0, 2, 3, 4, 4, 4]
    assert asked_for(workers, wanted, spare=True) == 5
    assert asked_for(workers, wanted, spare=False) == 4


def test_more_than_the_plan_uses_is_not_waited_for() -> None:
    assert begins_with(WorkerRange(4, 8), 2, 2) == 2
    assert asked_for(WorkerRange(4, 8), 2, spare=False) == 4  # which were asked for by the user


def test_the_elastic_sequence_of_ray() -> None:
    """Nodes 0 -> 4 -> 12 -> 8 -> all lost -> 16, one worker on each."""
    workers, wanted = WorkerRange(4, 16), 16
    assert [begins_with(workers, wanted, nodes) for nodes in (0, 4, 12, 8, 0, 16)] == [0, 4, 12, 8, 0, 16]


@pytest.mark.parametrize(
    ("now_s", "then_s", "measured_s", "left", "worth"),
    [
        (1.0, 0.5, 0.0, 100, True),
        (1.0, 0.5, 0.0, 7, False),  # 3.5 s gained, which is less than twice the move
        (1.0, 0.5, 10.0, 1, True),  # steps take ten times what was predicted, and so does the gain
        (1.0, 0.99, 0.0, 10**9, False),  # within what a prediction is off by
        (1.0, 1.5, 0.0, 100, False),
        (1.0, 0.5, 0.0, 0, False),
    ],
)
def test_growing_pays_where_the_rest_of_the_run_gains_more_than_the_move_takes(
    now_s: float, then_s: float, measured_s: float, left: int, worth: bool
) -> None:
    assert pays(gain_of(now_s, then_s, measured_s, 2.0, left), LEAST_GAIN) is worth


def test_a_move_that_was_measured_counts_instead_of_the_assumption() -> None:
    assert move_seconds(2e9) == 12.0
    assert move_seconds(2e9, last_s=0.8) == 0.8


PIPEDREAM = {"num_stages": 2, "replicas": (3, 1)}


@pytest.mark.parametrize(
    ("asked", "there", "shape"),
    [
        ({}, 3, Shape(None, 3)),
        ({"num_stages": 4}, 3, Shape(3, 3)),
        ({"num_stages": 4}, 9, Shape(4, 9)),  # of which five are spares
        ({"split_points": ("a", "b")}, 2, Shape(2, 2)),
        ({"split_points": ("a", "b")}, 5, Shape(3, 5)),
        ({"schedule": "interleaved"}, 3, Shape(None, 3)),
        ({"schedule": "interleaved", "num_stages": 8}, 3, Shape(8, 2)),
        ({"schedule": "interleaved", "num_stages": 8}, 16, Shape(8, 8)),
        ({"schedule": "interleaved", "num_stages": 7}, 3, Shape(7, 1)),
        ({"schedule": "zb-v", "num_stages": 8}, 3, Shape(6, 3)),
        ({"schedule": "zb-v", "num_stages": 8}, 9, Shape(8, 4)),
        *(
            (PIPEDREAM, there, shape)
            for there, shape in enumerate(
                (Shape(1, 1), Shape(2, 2, (1, 1)), Shape(2, 3, (2, 1)), Shape(2, 4, (3, 1)), Shape(2, 5, (3, 1))), 1
            )
        ),
        ({"num_stages": 4, "schedule": "zb-v", "replicas": 3, "num_workers": 6}, 5, Shape(4, 4, 2)),
        ({"num_stages": 4, "schedule": "zb-v", "replicas": 3, "num_workers": 6}, 1, Shape(2, 1)),
        ({"replicas": None}, 3, Shape(None, 3, None)),
        ({"replicas": None, "num_stages": 4}, 3, Shape(3, 3, None)),
    ],
)
def test_stages_follow_the_workers_up_to_what_was_asked_for(asked: dict[str, object], there: int, shape: Shape) -> None:
    assert shape_of(replace(REQUEST, **asked), there) == shape  # type: ignore[arg-type]

"""Schedules by name: the right one, or an error that says what to write instead."""

from __future__ import annotations

import pytest

from raypipe.errors import ScheduleError
from raypipe.planner.schedule import KINDS, make_schedule
from raypipe.planner.schedule.interleaved import interleaved
from raypipe.planner.schedule.sync import gpipe, k_f_k_b, one_f_one_b, slack
from raypipe.planner.schedule.zero_bubble import zb_h1
from raypipe.planner.schedule.zero_bubble_v import zb_v


def test_names_lead_to_generators():
    assert make_schedule("gpipe", 3, 4) == gpipe(3, 4)
    assert make_schedule("1f1b", 3, 4, first_trainable=1) == one_f_one_b(3, 4, 1)
    assert make_schedule("kfkb", 3, 4, group_size=2) == k_f_k_b(3, 4, 2)
    assert make_schedule("slack", 3, 4, slack=(1, 2)) == slack(3, 4, (1, 2))
    assert make_schedule("interleaved", 4, 4, chunks=2) == interleaved(2, 4, 2)
    assert make_schedule("zb-h1", 3, 4, slack=(1, 2)) == zb_h1(3, 4, (1, 2))
    assert make_schedule("zb-h1", 3, 4).body == zb_h1(3, 4, 1).body
    assert make_schedule("zb-v", 4, 3, first_trainable=1) == zb_v(4, 3, 1)
    assert len(KINDS) == 7


def test_labels():
    made = [
        make_schedule("1f1b", 4, 8),
        make_schedule("gpipe", 4, 8),
        make_schedule("kfkb", 4, 8, group_size=2),
        make_schedule("slack", 4, 8, slack=(2, 2, 1)),
        make_schedule("slack", 4, 8, slack=2),
        make_schedule("interleaved", 4, 8, chunks=2),
        make_schedule("zb-h1", 4, 8, slack=(2, 2, 1)),
        make_schedule("zb-v", 4, 8),
    ]
    assert [schedule.kind for schedule in made] == [
        "1f1b", "gpipe", "kfkb(k=2)", "slack(r=2,2,1)", "slack(r=2)", "interleaved(v=2)",
        "zb-h1(r=2,2,1)", "zb-v",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "options", "part"),
    [
        (("kfkbb", 2, 2), {}, "choose one of gpipe, 1f1b, kfkb, slack, interleaved, zb-h1, zb-v. Did you mean 'kfkb'?"),
        (("zzz", 2, 2), {}, "choose one of gpipe, 1f1b, kfkb, slack, interleaved, zb-h1, zb-v."),
        (("kfkb", 2, 2), {}, "'kfkb' needs group_size"),
        (("1f1b", 2, 2), {"group_size": 2}, "'1f1b' has no group_size: leave out group_size=2"),
        (("kfkb", 2, 2), {"group_size": 0}, "not k=0"),
        (("1f1b", 0, 2), {}, "at least one stage, not 0"),
        (("gpipe", 2, 0), {}, "at least one micro-batch, not 0"),
        (("1f1b", 2, 2), {"first_trainable": 2}, "leaves nothing to train: with 2 stages it lies between 0 and 1"),
        (("slack", 3, 2), {"slack": (1,)}, "3 stages have 2 hops, but slack lists 1"),
        (("slack", 3, 2), {"slack": (1, 0)}, "every hop needs at least 1"),
        (("slack", 1, 2), {"slack": 0}, "every hop needs at least 1"),
        (("interleaved", 3, 2), {"chunks": 2}, "3 stages cannot be shared out evenly, 2 to each worker"),
        (("interleaved", 2, 2), {"chunks": 0}, "0 to each worker"),
        (("zb-v", 3, 2), {}, "3 is odd: cut the model into 2 or 4 stages"),
        (("zb-v", 1, 2), {}, "1 is odd: cut the model into 2 stages"),
        (("zb-v", 0, 2), {}, "at least one stage, not 0"),
        (("zb-v", 4, 2), {"slack": 2}, "'zb-v' has no slack: leave out slack=2"),
        (("zb-v", 4, 2), {"first_trainable": 4}, "with 4 stages it lies between 0 and 3"),
    ],
)
def test_refusals(arguments, options, part):
    with pytest.raises(ScheduleError) as caught:
        make_schedule(*arguments, **options)
    assert part in str(caught.value)


def test_unlike_names_get_no_suggestion():
    with pytest.raises(ScheduleError) as caught:
        make_schedule("zzz", 2, 2)
    assert "Did you mean" not in str(caught.value)


def test_interleaved_needs_a_worker():
    with pytest.raises(ScheduleError, match="at least one worker and one chunk, not 0 and 2"):
        interleaved(0, 2, 2)

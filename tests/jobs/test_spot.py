"""A trace of spot machines replayed: what is lost when, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.bench.spot.measured import measured
from jobs.lib import records
from jobs.lib.spot import (
    Change,
    Costs,
    changes_of,
    elastic,
    restarting,
    step_seconds,
    steps_of,
    undisturbed_steps,
    young_interval_s,
)

FREE = Costs(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1e9)


def one_second(machines: int) -> float:
    """Of a step on two machines; half of it on four."""
    return 2.0 / machines


def test_the_trace_is_that_of_its_note() -> None:
    changes = changes_of()
    assert sum(len(change.come) + len(change.go) for change in changes) == 153
    assert changes[0] == Change(480.0, ("node1",), ())
    here: set[str] = set()
    most = 0
    for change in changes:
        assert set(change.go) <= here
        here = (here - set(change.go)) | set(change.come)
        most = max(most, len(here))
    assert most == 24


def test_several_machines_make_one_and_time_runs_quicker(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a\n1000,add,b\n2000,add,c\n3000,remove,a\n4000,add,d\n5000,remove,b\n6000,remove,c\n")
    found = changes_of(trace, speed=10.0, machines_each=2)
    assert found == [Change(0.1, ("machine0",), ()), Change(0.6, (), ("machine0",))]
    assert [len(change.come) - len(change.go) for change in changes_of(trace)] == [1, 1, 1, -1, 1, -1, -1]


# Two machines for 100 s, three for 100 s, two for 100 s.
CHANGES = [Change(0.0, ("a", "b"), ()), Change(100.0, ("c",), ()), Change(200.0, (), ("b",)), Change(300.0, (), ("a",))]


def test_without_costs_both_do_what_the_machines_can() -> None:
    steps = undisturbed_steps(CHANGES, one_second)
    assert steps == pytest.approx(100 + 150 + 100)
    assert elastic(CHANGES, FREE, one_second).steps == pytest.approx(steps)
    costs = FREE._replace(checkpoint_every_s=1e-3)  # else all that was done before the loss is done again
    assert restarting(CHANGES, costs, one_second).steps == pytest.approx(steps, rel=1e-3)


def test_what_a_loss_and_a_machine_more_cost_an_elastic_run() -> None:
    costs = FREE._replace(recover_s=4.0, redone_steps=3.0, resize_s=2.0, join_s=10.0)
    lived = elastic(CHANGES, costs, one_second)
    # (100 s of two machines and 10 s until the third joins) less two pauses, 90 s of three less one, ...
    assert lived.steps == pytest.approx((110 - 10 - 2) + (90 - 2) * 1.5 - 3 + (100 - 4))
    assert (lived.redone, lived.changes) == (3.0, 3)


def test_what_a_loss_and_a_machine_more_cost_a_run_that_starts_again() -> None:
    costs = FREE._replace(restart_s=20.0, checkpoint_s=1.0, checkpoint_every_s=70.0)
    lived = restarting(CHANGES, costs, one_second)
    # It saves at 70 s, with the third machine at 100 s, and 70 s later; what came after that is lost.
    assert lived.redone == pytest.approx((200 - 171) * 1.5)
    assert lived.changes == 3


def test_a_worker_that_goes_with_the_holder_of_its_copy_takes_the_run_back_to_the_checkpoint() -> None:
    together = [Change(0.0, ("a", "b", "c", "d"), ()), Change(100.0, (), ("b", "c")), Change(200.0, (), ("a",))]
    apart = [together[0], Change(100.0, (), ("b", "d")), together[2]]
    costs = FREE._replace(redone_steps=2.0)
    assert elastic(together, costs, one_second).redone == pytest.approx(200)
    assert elastic(apart, costs, one_second).redone == 2.0


def test_machines_that_give_notice_cost_no_step() -> None:
    costs = FREE._replace(recover_s=5.0, redone_steps=3.0, resize_s=2.0, restart_s=20.0, noticed=True)
    assert elastic(CHANGES, costs, one_second).redone == 0
    assert restarting(CHANGES, costs, one_second).redone == 0


def test_with_too_few_machines_nothing_is_done_and_nothing_counts_as_a_pause() -> None:
    costs = FREE._replace(least=3)
    assert undisturbed_steps(CHANGES, one_second, 3) == pytest.approx(150)
    lived = elastic(CHANGES, costs, one_second)
    assert (lived.steps, lived.paused_s) == (pytest.approx(150), 0)


def test_checkpoints_are_as_far_apart_as_losses_say() -> None:
    assert young_interval_s(2.0, CHANGES) == pytest.approx((2 * 2.0 * 150) ** 0.5)


def test_what_changes_cost_is_taken_from_the_record_of_recoveries(tmp_path: Path) -> None:
    figures = {
        "node_seconds": 4.0, "node_noticed_seconds": 3.0, "redone_steps_500mb": 2.5, "copy_overhead": 1.01,
        "resize_seconds_2_3": 0.5, "resize_seconds_3_1": 0.9, "resize_seconds_1_4": 0.7, "resize_seconds_max_2_3": 9.0,
        "ray_train_seconds": 4.2,
    }  # fmt: skip
    records.keep(tmp_path / "recovery.json", "recovery", records.run_of("python x", records.begin(), figures, {"a": 1}))
    found = measured(0.5, tmp_path / "recovery.json")
    more_s = 404 / 200  # MB beyond what the record's stages have, at MB/s
    assert found.recover_s == pytest.approx(4.0 + more_s)
    assert found.resize_s == pytest.approx(0.7 + more_s)
    assert (found.redone_steps, found.notice_s, found.ray_train_s) == (2.5, 3.0, 4.2)
    assert found.overhead == pytest.approx(0.01)
    before = measured(0.5, tmp_path / "none.json")
    assert (before.notice_s, before.ray_train_s) == (1.4, 0.0)
    assert "there is no record" in before.source


def test_steps_are_counted_for_the_stages_that_did_them() -> None:
    seconds = dict(enumerate([9.0, 1.0, 1.0, 9.0, 9.0, 2.0, 2.0, 9.0]))
    seen = [(0, 0), (0, 2), (3, 2), (4, 3), (7, 3), (7, 0), (7, 0)]
    assert step_seconds(seconds, seen) == {2: 1.0, 3: 2.0}


def test_what_machines_would_do_is_told_by_the_steps_that_were_measured() -> None:
    """Until 250 s: two machines for 150 s of it, three for 100 s."""
    assert steps_of(CHANGES, 250.0, {2: 1.0, 3: 0.5}, 4, (1, 4)) == pytest.approx(150 + 200)
    assert steps_of(CHANGES, 250.0, {2: 1.0, 3: 0.5}, 4, (1, 2)) == pytest.approx(250)
    assert steps_of(CHANGES, 250.0, {2: 1.0}, 4, (3, 4)) == pytest.approx(100 / (6 / 3 * 2 / 5))  # 6 slots of a third

"""The parts of bench/first_step that decide what a figure means; its runs are the benchmark itself."""

from __future__ import annotations

import pytest

from jobs.bench.first_step.bench import NETS, figures_of
from jobs.bench.first_step.tasks import TASKS, task_of


def test_a_figure_is_the_median_of_each_rounds_ratio() -> None:
    rounds = [
        {"cold": 2.0, "torch_trainer": 1.0, "warm": 0.5},
        {"cold": 9.0, "torch_trainer": 10.0, "warm": 6.0},
        {"cold": 3.0, "torch_trainer": 3.0, "warm": 3.0},
    ]
    found = figures_of("readme", rounds)
    assert found["cold_readme"] == pytest.approx(1.0)
    assert found["warm_readme"] == pytest.approx(0.6)
    assert (found["cold_seconds_readme"], found["torch_trainer_seconds_readme"]) == (3.0, 3.0)


def test_tasks_have_a_mini_batch_and_say_who_takes_the_loss() -> None:
    assert NETS == TASKS
    task = task_of("readme")
    assert not task.owns_loss
    assert len(task.data) >= task.minibatch_size
    with pytest.raises(ValueError, match="none of"):
        task_of("vgg")

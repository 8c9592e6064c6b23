"""A checkpoint that is due soon, where a driver that took over finds none, changes no bit of the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.ir.work_order import Order
from raypipe.planner.segments import Position
from raypipe.runtime.run.blueprint import assemble
from raypipe.runtime.run.controller_thread import ActiveSettings
from raypipe.runtime.run.ordering import Ordering
from raypipe.runtime.run.requests import Requests
from tests.runtime.run.test_planning import trainer

pytestmark = [pytest.mark.engine]

STEPS = 50


class Never:
    """Checkpoints that are never due by themselves."""

    overdue = False

    def due(self, step: int) -> bool:
        return False

    due_at = due

    def begin(self, step: int) -> str:
        return f"after {step}"


@pytest.mark.parametrize(("schedule", "first"), [("1f1b", "after 1"), ("2bw", "after 20")])
def test_it_comes_at_once_or_beside_the_next_copy(schedule: str, first: str, tmp_path: Path) -> None:
    """Of an asynchronous run the latter: it runs empty there anyway, and nowhere else without other bits."""
    run = trainer(tmp_path, "run", "noisy", schedule=schedule, verify="off")
    survives = SimpleNamespace(max_failures=-1)
    run._run = SimpleNamespace(name="run", storage_path=str(tmp_path), failure_config=survives)
    job = run._prepared()
    blueprint = run._blueprint(job, STEPS, local=True)
    plan = assemble(blueprint, job.planned).plan

    def orders(*, soon: bool) -> list[Order]:
        control: Any = SimpleNamespace(runs=False, settings=ActiveSettings())
        checkpoints: Any = Never()
        ordering = Ordering(blueprint.spec, plan, checkpoints, control, Requests(), lambda step, *, saves: False)
        if soon:
            ordering.save_soon()
        return list(ordering.orders(Position()))

    plain, soon = orders(soon=False), orders(soon=True)
    assert [order.save_to for order in plain if order.save_to] == [f"after {STEPS}"]
    assert [order.save_to for order in soon if order.save_to] == [first, f"after {STEPS}"]
    assert [order.segment for order in soon] == [order.segment for order in plain]

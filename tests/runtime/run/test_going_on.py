"""A loop that goes on where stages stand which another loop has left: no step twice, no record lost, the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from torch.utils.data import TensorDataset

from raypipe import EarlyStopping, PipelineTrainer, load_state_dict
from raypipe.engine.local import LocalFleet
from raypipe.ir.report import StepRecord, StepReport
from raypipe.ir.work_order import Order
from raypipe.runtime.run.blueprint import assemble
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.spec import Outcome
from raypipe.runtime.run.takeover import Done
from tests.exactness import same_bits
from tests.runs import test_evaluation
from tests.runtime.run.test_calls import Listens
from tests.runtime.run.test_planning import trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]

STEPS, KILLED, UNWRITTEN = 14, 9, 4


class Killed(BaseException):
    """The driver's process ends."""


class Dies(Journal):
    """Ends the loop in the middle of its work."""

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None:
        super().step(record, reports)
        if record.step + 1 == KILLED:
            raise Killed


class Remembering:
    """A fleet whose stages remember what they were ordered and what came of it."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._fleet = fleet
        self.done: list[Done] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def run(self, orders: Iterator[Order], *arguments: Any, **more: Any) -> Iterator[list[list[StepReport]]]:
        given: list[Order] = []

        def noted() -> Iterator[Order]:
            for order in orders:
                given.append(order)
                yield order

        for count, reports in enumerate(self._fleet.run(noted(), *arguments, **more)):
            if given[count].training:
                self.done.append(Done(given[count], reports))
            yield reports


def taken_over(made: PipelineTrainer, steps: int) -> tuple[Remembering, Journal, Outcome]:
    """A run whose first driver is killed, and whose second one finds the stages where they stand."""
    job = made._prepared()
    blueprint = made._blueprint(job, steps, local=True)
    spec, (run, setup, plan) = blueprint.spec, assemble(blueprint, job.planned)
    fleet = Remembering(LocalFleet(run, setup, job.tensors))
    try:
        with pytest.raises(Killed):
            run_loop(fleet, spec, plan, Dies("run", ""), Requests())
        told = Journal("run", "")
        return fleet, told, run_loop(fleet, spec, plan, told, Requests(), taken=fleet.done[-UNWRITTEN:])
    finally:
        fleet.stop()


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("noisy", {}),
        ("buffers", {"num_stages": 3, "on_nonfinite": "skip"}),
        ("noisy", {"schedule": "2bw", "verify": "off"}),
    ],
)
def test_a_loop_goes_on_where_stages_stand(name: str, pipeline: dict[str, Any], tmp_path: Path) -> None:
    fleet, told, found = taken_over(trainer(tmp_path, "run", name, **pipeline), STEPS)
    assert found.step == STEPS
    alone = trainer(tmp_path, "alone", name, **pipeline).fit(STEPS, local=True, progress=False)
    rows = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    assert [(row["step"], row["loss"]) for row in rows] == [(r.step, r.loss) for r in alone.records]
    assert [record.step for record in told.news(0, 0.0).records] == list(range(STEPS))
    first = [order.segment.first_step for order, _ in fleet.done]
    assert first == sorted(set(first)), "no step was ordered twice"
    state, wanted = load_state_dict(tmp_path / "run"), load_state_dict(alone.checkpoint)
    assert [key for key in wanted if not same_bits(state[key], wanted[key])] == []


def test_a_take_over_loses_no_evaluation_and_ends_the_run_where_it_would_have_ended(tmp_path: Path) -> None:
    made = test_evaluation.trainer(
        tmp_path, "run", {"eval_interval_steps": 2},
        eval_data=TensorDataset(test_evaluation.EX, test_evaluation.EY), metrics={"same": lambda output, target: 1.0},
        early_stopping=EarlyStopping("eval_same", patience=4, mode="max"),
    )  # fmt: skip
    listens = Listens()
    made._callbacks = (listens,)
    _, told, found = taken_over(made, 20)
    assert (found.step, found.stopped) == (10, "eval_same has not got better than 1 for 4 evaluations")
    rows = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    assert [row["step"] for row in rows if row["eval_same"] == 1.0] == [1, 3, 5, 7, 9]
    heard = {record.step: record.evaluation for record in told.news(0, 0.0).records}
    assert [step for step, numbers in heard.items() if numbers] == [1, 3, 5, 7, 9]
    begins = [at for at, (what, *_) in enumerate(listens.told) if what == "start"]
    assert len(begins) == 2
    steps = [number for what, number, *_ in listens.told[begins[1] :] if what == "step"]
    assert steps == list(range(KILLED - UNWRITTEN, 10)), "steps that the stages did for the driver before are told"


class FailsToEnd(Requests):
    """Something of the run cannot be closed."""

    def end(self) -> None:
        super().end()
        raise OSError("not closed")


def test_callbacks_hear_of_the_end_whatever_else_fails_to_end(tmp_path: Path) -> None:
    listens = Listens()
    made = trainer(tmp_path, "run", "noisy")
    made._callbacks = (listens,)
    job = made._prepared()
    blueprint = made._blueprint(job, 2, local=True)
    run, setup, plan = assemble(blueprint, job.planned)
    fleet = LocalFleet(run, setup, job.tensors)
    try:
        with pytest.raises(OSError, match="not closed"):
            run_loop(fleet, blueprint.spec, plan, Journal("run", ""), FailsToEnd())
    finally:
        fleet.stop()
    assert listens.told[-1] == ("end", 2, "")

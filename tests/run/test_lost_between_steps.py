"""A stage is lost between two steps, in an evaluation or while a checkpoint is taken: the run is as if it was not.

step 6, checkpoint and evaluation due    |  F F F ...(lost)      the checkpoint of step 6 is not complete yet
no stage rolls back, or all do           |                       it is saved, evaluated and published all the same
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import TensorDataset

from raypipe import EarlyStopping, PipelineTrainer
from raypipe.callbacks import Prompts
from raypipe.engine.io.checkpoint import FreshOptions, checkpoint_name, find_checkpoint
from raypipe.engine.io.checkpoint.find_checkpoint import open_checkpoint, read_manifest
from raypipe.engine.io.checkpoint.manifest import MANIFEST
from raypipe.engine.io.storage import Place
from raypipe.engine.local import LocalFleet
from raypipe.errors import StageLostError
from raypipe.ir.report import StepReport
from raypipe.planner.segments import Position
from raypipe.run.journal import Journal
from raypipe.run.requests import Requests
from raypipe.run.same_run import fresh_options
from raypipe.run.spec import Outcome
from raypipe.run.transitions import Recovered
from tests.exactness import unequal
from tests.run.loops import Transitions, looped
from tests.run.test_calls import Listens
from tests.runs import test_evaluation
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

STEPS, SAVES = 10, 3
Reports = list[list[StepReport]]


class Losing(Transitions):
    """Fleet of threads that loses a worker once, and its recovery: in place, or from a checkpoint.

    Args:
        lost: what ends with the loss, of the steps that are done then: "evaluation 6", "text 6", "save 8", "step 6",
            "restore 0".
        back: all go back to the newest checkpoint; else nobody does.
        back_to: to that of this step instead, as if newer ones had come to count only afterwards.
    """

    def __init__(self, arguments: Any, place: Place, lost: str, *, back: bool, back_to: int | None = None) -> None:
        self._back_to, self._arguments, self._place = back_to, arguments, place
        self._lost, self._step, self._unheard = lost, 0, list[Reports]()
        self._now = LocalFleet(*arguments)
        self._stays = not back

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    def run(self, *given: Any, **options: Any) -> Iterator[Reports]:
        for reports in self._now.run(*given, **options):
            training = reports[0][0].grad_norm is not None
            self._step += training
            self._lose(f"{'step' if training else 'evaluation'} {self._step}", [reports] if training else [])
            yield reports

    def save(self, folder: str) -> None:
        self._lose(f"save {self._step}")
        self._now.save(folder)

    def decoding(self, *_given: Any) -> None:
        self._lose(f"text {self._step}")

    def restore(self, folder: str, fresh: FreshOptions) -> None:
        self._lose(f"restore {self._step}")
        self._now.restore(folder, fresh)

    def _lose(self, what: str, unheard: list[Reports] | None = None) -> None:
        if what == self._lost:
            # Steps are quicker than files: without that all might go back further, or a checkpoint be dropped.
            wait_until(lambda: all(self._counts(step) for step in range(SAVES, self._step, SAVES)))
            self._lost, self._unheard = "", unheard or []
            raise StageLostError("Stage 1 died")

    def _counts(self, step: int) -> bool:
        return (self._place / checkpoint_name(step)).exists(MANIFEST)

    def catch_up(self, step: int) -> list[Reports] | None:
        return self._unheard if self._stays else None

    def regroup(self, step: int) -> Recovered:
        return Recovered(step, "where it was")

    def roll_back(self, steps: Collection[int]) -> Recovered:
        if self._back_to is None:
            newest = find_checkpoint(self._place)[0]
        else:
            newest = open_checkpoint(self._place / checkpoint_name(self._back_to))
        self._now.stop()
        self._now = LocalFleet(*self._arguments)
        if newest is None:
            self._step = 0
            return Recovered(0, "the beginning", Position())
        self._now.restore(newest.folder, fresh_options(self._place, newest.manifest.step))
        self._step = newest.manifest.step
        return Recovered(self._step, newest.folder, Position(**newest.manifest.position))


class NoText:
    """Generation by a model that generates nothing."""

    def on(self, decoding: Callable[..., Any], *stages: Any, halted: Callable[[], bool]) -> torch.Tensor:
        decoding(*stages)
        return torch.zeros(1, 1)


class Reads(Listens):
    prompts = Prompts(None)

    def on_text(self, step: int, tokens: Any) -> None:
        self.told.append(("text", step))


def trainer(folder: Path, name: str, config: dict[str, Any], kept: Any = None, **more: Any) -> PipelineTrainer:
    run = SimpleNamespace(
        name=name, storage_path=str(folder), failure_config=SimpleNamespace(max_failures=-1), checkpoint_config=kept
    )
    data = TensorDataset(test_evaluation.EX, test_evaluation.EY)
    config = {"checkpoint_interval_steps": SAVES, **config}
    return test_evaluation.trainer(folder, name, config, run_config=run, eval_data=data, **more)


def disturbed(
    made: PipelineTrainer,
    folder: Path,
    lost: str,
    *,
    back: bool,
    back_to: int | None = None,
    during: Callable[[Requests], None] | None = None,
) -> tuple[Outcome, Listens]:
    """How a run ends that loses a worker, and what its callbacks heard."""
    listens = Reads() if made._evaluations.interval_steps else Listens()
    made._generation = lambda prompts: NoText  # type: ignore[assignment,method-assign,return-value]
    made._callbacks = (listens,)
    requests = Requests()
    if during is not None:
        during(requests)

    def fleet(*arguments: Any) -> Losing:
        return Losing(arguments, Place.of(folder), lost, back=back, back_to=back_to)

    outcome = looped(made, STEPS, fleet, recovery=lambda fleet: fleet, requests=requests)
    assert '"decision": "failure"' in (folder / "events.jsonl").read_text(), "nothing was lost"
    return outcome, listens


def left(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """What a run has in its folder: records without their seconds, and by checkpoint its score."""
    columns = ["step", "loss", "grad_norm", "lr", "eval_loss"]
    rows = pq.read_table(folder / "metrics.parquet", columns=columns).to_pylist()
    saved = sorted((folder / "checkpoints").glob("step_*"))
    return rows, {one.name: read_manifest(Place.of(str(one))).metrics.get("eval_loss") for one in saved}


SCORED = {
    "scored": ({}, SimpleNamespace(num_to_keep=9, checkpoint_score_attribute="eval_loss")),
    "evaluated": ({"eval_interval_steps": SAVES}, None),
}
"""Why there are evaluations: for the sake of checkpoints, or of their own."""


@pytest.mark.parametrize(
    ("why", "lost"),
    [("scored", "evaluation 6"), ("scored", "step 6"), ("evaluated", "evaluation 10"), ("evaluated", "text 6")],
)
@pytest.mark.parametrize("back", [False, True])
def test_checkpoints_and_evaluations_are_those_of_an_undisturbed_run(
    why: str, lost: str, back: bool, tmp_path: Path
) -> None:
    config, kept = SCORED[why]
    alone = trainer(tmp_path, "alone", config, kept).fit(STEPS, local=True, progress=False)
    found, listens = disturbed(trainer(tmp_path, "run", config, kept), tmp_path / "run", lost, back=back)
    assert found.step == STEPS
    assert left(tmp_path / "run") == left(tmp_path / "alone")
    assert unequal(found.checkpoint, alone.checkpoint) == []
    told = [(what, number) for what, number, *_ in listens.told if what in ("checkpoint", "eval")]
    assert [number for what, number in told if what == "checkpoint"] == [3, 6, 9, STEPS]
    assert sorted({number for what, number in told if what == "eval"}) == [3, 6, 9, STEPS]
    if why == "evaluated":
        left_out = {6} if lost == "text 6" else set[int]()
        assert {number for what, number, *_ in listens.told if what == "text"} == {3, 6, 9, STEPS} - left_out
    if not back:
        assert [number for what, number, *_ in listens.told if what == "step"] == list(range(STEPS))


class LosesEachText(Losing):
    """Fleet that loses a worker whenever it generates after 6 steps."""

    def decoding(self, *_given: Any) -> None:
        self._lost = "text 6"
        super().decoding()


@pytest.mark.parametrize("back", [False, True])
def test_a_prompt_that_ends_a_stage_each_time_does_not_end_the_run(back: bool, tmp_path: Path) -> None:
    made, listens, journal = trainer(tmp_path, "run", {"eval_interval_steps": SAVES}), Reads(), Journal("run", "")
    made._generation = lambda prompts: NoText  # type: ignore[assignment,method-assign,return-value]
    made._callbacks = (listens,)

    def fleet(*arguments: Any) -> Losing:
        return LosesEachText(arguments, Place.of(tmp_path / "run"), "", back=back)

    assert looped(made, STEPS, fleet, recovery=lambda fleet: fleet, journal=journal).step == STEPS
    assert {number for what, number, *_ in listens.told if what == "text"} == {3, 9, STEPS}
    assert {number for what, number, *_ in listens.told if what == "eval"} == {3, 6, 9, STEPS}
    assert "No text was generated after 6 steps: a worker or a link was lost" in str(journal.alerts)


def test_a_checkpoint_may_come_to_count_while_all_go_back_to_one_before_it(tmp_path: Path) -> None:
    """What belongs behind its step is done once more, and the last one, which was being taken, is no extra one."""
    config, kept = SCORED["scored"]
    trainer(tmp_path, "alone", config, kept).fit(STEPS, local=True, progress=False)
    made = trainer(tmp_path, "run", config, kept)
    found, listens = disturbed(made, tmp_path / "run", "evaluation 10", back=True, back_to=6)
    assert found.step == STEPS
    assert left(tmp_path / "run") == left(tmp_path / "alone")
    assert [number for what, number, *_ in listens.told if what == "checkpoint"] == [3, 6, 9, 9, STEPS]


@pytest.mark.parametrize("back", [False, True])
def test_a_checkpoint_that_was_asked_for_outlives_a_loss_in_the_evaluation_before_its_manifest(
    back: bool, tmp_path: Path
) -> None:
    kept = SimpleNamespace(num_to_keep=9, checkpoint_score_attribute="eval_loss")
    made = trainer(tmp_path, "run", {"checkpoint_interval_steps": 100}, kept)
    _, listens = disturbed(made, tmp_path / "run", "evaluation 1", back=back, during=Requests.checkpoint)
    saved = [number for what, number, *_ in listens.told if what == "checkpoint"]
    assert saved[-1] == STEPS
    assert [step <= 2 for step in saved] == [True, False]


@pytest.mark.parametrize("back", [False, True])
def test_a_run_that_ends_early_ends_at_the_same_step(back: bool, tmp_path: Path) -> None:
    """Its last checkpoint is being taken when a stage is lost; all go back behind the step that it was to end at."""
    config = {"eval_interval_steps": 2, "checkpoint_interval_steps": 3}
    more = {"metrics": {"same": lambda output, target: 1.0}, "early_stopping": EarlyStopping("eval_same", patience=3)}
    alone = trainer(tmp_path, "alone", config, **more).fit(STEPS, local=True, progress=False)
    found, _ = disturbed(trainer(tmp_path, "run", config, **more), tmp_path / "run", "save 8", back=back)
    assert (found.step, found.stopped) == (8, "eval_same has not got better than 1 for 3 evaluations")
    assert found.stopped == alone.stopped
    assert pq.read_table(tmp_path / "run" / "metrics.parquet").num_rows == 8
    assert left(tmp_path / "run") == left(tmp_path / "alone")
    assert unequal(found.checkpoint, alone.checkpoint) == []


def test_a_worker_lost_while_a_resume_restores_its_checkpoint_costs_nothing(tmp_path: Path) -> None:
    """New values of settings, which the user has accepted, hold after the recovery too."""
    made = {}
    for name in ("alone", "run"):
        trainer(tmp_path, name, {}).fit(6, local=True, progress=False)
        made[name] = trainer(tmp_path, name, {}, optimizer=partial(torch.optim.SGD, lr=0.5), resume=True)
    alone = made["alone"].fit(STEPS, local=True, progress=False)
    found, _ = disturbed(made["run"], tmp_path / "run", "restore 0", back=True)
    assert found.step == STEPS
    assert unequal(found.checkpoint, alone.checkpoint) == []
    assert alone.records[-1].lr == 0.5

"""Callbacks are called in order beside the loop, and nothing that they do reaches it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from raypipe.callbacks import Callback, RunEnd, RunStart
from raypipe.ir.report import StepRecord
from raypipe.run import reporting
from raypipe.run.reporting import CallbackThread

pytestmark = pytest.mark.engine

START = RunStart("digits", "runs/digits", 0, 2, {}, "")


def record(step: int) -> StepRecord:
    return StepRecord(step, 8, 0.5, 1.0, 0.25, 0.1, 0.0, 2)


class Listens(Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_start(self, run: RunStart) -> None:
        self.told.append(("start", run.name))

    def on_step(self, record: StepRecord) -> None:
        self.told.append(("step", record.step))

    def on_eval(self, step: int, metrics: Any) -> None:
        self.told.append(("eval", step, dict(metrics)))

    def on_checkpoint(self, step: int, path: str) -> None:
        self.told.append(("checkpoint", step, path))

    def on_recovery(self, event: Any) -> None:
        self.told.append(("recovery", event.step, event.decision))

    def on_decision(self, event: Any) -> None:
        self.told.append(("decision", event.step, event.decision))

    def on_end(self, end: RunEnd) -> None:
        self.told.append(("end", end.step, end.error))


class Fails(Callback):
    def on_step(self, record: StepRecord) -> None:
        raise ValueError(f"step {record.step} is not liked")


def said(complaints: list[tuple[str, str, int, int]]) -> Callable[[str, str, int, int], None]:
    return lambda *complaint: complaints.append(complaint)


class Waits(Callback):
    def __init__(self, until: threading.Event) -> None:
        self.until = until

    def on_step(self, record: StepRecord) -> None:
        assert self.until.wait(60)


def test_they_are_told_in_order_and_all_of_it_before_the_end_returns() -> None:
    listens, complaints = Listens(), list[tuple[str, str, int, int]]()
    made = CallbackThread([listens], said(complaints))
    made.step(record(7))  # before the start: nobody is told
    made.start(START)
    made.step(record(0))
    made.event("failure", "stage 1 died", {"step": 1})
    made.event("recovery", "from copies", {"step": 1})
    made.event("resize", "asked", {"step": 1})
    made.evaluated(1, {"eval_loss": 0.5})
    made.checkpoint(1, "step_0000001")
    made.end(RunEnd(1, "step_0000001"))
    assert listens.told == [
        ("start", "digits"), ("step", 0), ("recovery", 1, "failure"), ("recovery", 1, "recovery"),
        ("decision", 1, "resize"), ("eval", 1, {"eval_loss": 0.5}), ("checkpoint", 1, "step_0000001"), ("end", 1, ""),
    ]  # fmt: skip
    made.step(record(9))
    assert listens.told[-1] == ("end", 1, "")
    assert complaints == []


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class FailsWithoutWords(Callback):
    def on_step(self, record: StepRecord) -> None:
        raise UnspeakableError


def test_what_one_raises_is_counted_under_its_name_and_the_others_are_called() -> None:
    listens, complaints = Listens(), list[tuple[str, str, int, int]]()
    made = CallbackThread([Fails(), FailsWithoutWords(), listens], said(complaints))
    made.start(START)
    for step in range(3):
        made.step(record(step))
    made.end(RunEnd(3, ""))
    assert [told for told in listens.told if told[0] == "step"] == [("step", 0), ("step", 1), ("step", 2)]
    for name in ("Fails", "FailsWithoutWords"):
        of_one = [(step, in_a_row) for kind, _, step, in_a_row in complaints if kind == f"callback {name}.on_step"]
        assert of_one == [(1, 1), (2, 2), (3, 3)]
    first, second = complaints[0][1], complaints[1][1]
    assert first.startswith("The callback Fails failed in on_step at ")
    assert 'raise ValueError(f"step {record.step} is not liked")' in first
    assert "ValueError: step 0 is not liked." in first
    assert second.startswith("The callback FailsWithoutWords failed in on_step")
    assert "UnspeakableError." in second


WATCHED = nn.Linear(2, 2).requires_grad_(False)


class Unfreezes(Callback):
    """Holds a model, or takes one of its module's."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model

    def on_step(self, record: StepRecord) -> None:
        (self.model or WATCHED).requires_grad_(bool(record.step))


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2)).requires_grad_(False), None])
def test_unfreezing_in_a_callback_is_an_alert_that_names_init_from(model: nn.Module | None) -> None:
    complaints = list[tuple[str, str, int, int]]()
    made = CallbackThread([Unfreezes(model)], said(complaints))
    made.start(START)
    for step in (0, 1, 1):
        made.step(record(step))
    made.end(RunEnd(3, ""))
    ((kind, complaint, step, _),) = complaints
    assert (kind, step) == ("callback Unfreezes unfreezes", 2)
    assert complaint.startswith("The callback Unfreezes changed requires_grad of ")
    assert "in on_step, which has no effect" in complaint
    assert 'PipelineTrainer(..., init_from="runs/digits", run_config=RunConfig(name=...))' in complaint


def test_a_complaint_that_raises_ends_no_other_callback() -> None:
    def complain(kind: str, message: str, step: int, in_a_row: int) -> None:
        raise OSError(message)

    listens = Listens()
    made = CallbackThread([Fails(), listens], complain)
    made.start(START)
    made.step(record(0))
    made.end(RunEnd(1, ""))
    assert listens.told == [("start", "digits"), ("step", 0), ("end", 1, "")]


def test_one_that_hangs_costs_neither_the_loop_nor_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "MOST_WAITING", 5)
    monkeypatch.setattr(reporting, "PATIENCE_S", 0.01)
    monkeypatch.setattr(reporting, "END_S", 0.01)
    until, complaints, messages = threading.Event(), list[tuple[str, str, int, int]](), list[str]()
    made = CallbackThread([Waits(until)], said(complaints), messages.append)
    made.start(START)
    for step in range(100):
        made.step(record(step))
    assert len(made._queue) <= 5
    made.end(RunEnd(100, ""))
    *behind, given_up = complaints
    assert {(kind, why) for kind, why, _, _ in behind} == {
        ("callbacks behind", "Callbacks are 5 calls behind; they miss some steps.")
    }
    assert [in_a_row for _, _, _, in_a_row in behind] == [*range(1, len(behind) + 1)]
    assert len(behind) >= 90
    assert given_up[1].startswith("Callbacks did not end within 0 s; ")
    assert messages == ["waiting for callbacks, 0 s at most"]
    until.set()
    made._thread.join(60)
    assert not made._thread.is_alive()


def test_a_run_that_another_process_has_taken_over_is_not_ended_here() -> None:
    listens = Listens()
    made = CallbackThread([listens], said([]))
    made.start(START)
    made.end(None)
    assert listens.told == [("start", "digits")]

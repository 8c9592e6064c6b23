"""Callbacks of a trainer: which are taken, what they are told, and what a run file says of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.api.callbacks import FromRayTrain
from raypipe.callbacks import Callback, TensorBoard
from raypipe.callbacks.base import RunStart
from raypipe.errors import ConfigError, RaypipeError
from raypipe.runfile.run_file import read_runfile
from tests.exactness import unequal
from tests.models import CASES
from tests.prepare.test_resume import broken_adamw, trainer
from tests.run.test_calls import Fails, Listens

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]


class Misspelt(Callback):
    def on_setp(self, record: Any) -> None: ...


class Empty:
    """Has no method that anybody calls."""


class OfRay:
    """Has what ray.train.UserCallback has."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.errors: list[Any] = []

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self.reports.append((run_context.get_run_config().name, metrics, checkpoint))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self.errors.append(worker_exceptions)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Misspelt()], "The callback Misspelt has a method on_setp, which is never called; did you mean on_step?"),
        ([Callback], "callbacks has the class Callback, not one of its objects. Add the brackets: Callback()."),
        ([Empty()], "callbacks has Empty, which has none of the methods on_start, on_step"),
        ([OfRay()], "callbacks has OfRay, which is Ray Train's: give it as RunConfig(callbacks=[...])."),
        (Callback(), "is not a list; give callbacks=[...]."),
    ],
)
def test_what_nobody_would_call_is_refused(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer("cnn", tmp_path, "run", 2, callbacks=given)
    assert message in str(caught.value)


class OfRaysGroups(OfRay):
    def before_worker_group_shutdown(self, worker_group: Any) -> None: ...


class HalfOfRays:
    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None: ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Listens()], "Listens is no ray.train.UserCallback: it has no method after_report. Give raypipe's own "),
        ([HalfOfRays()], "HalfOfRays is no ray.train.UserCallback: it has no method after_exception."),
        ([OfRay], "it has the class OfRay, not one of its objects. Add the brackets: OfRay()."),
        ([OfRaysGroups()], "OfRaysGroups has the method before_worker_group_shutdown, which is never called"),
        (OfRay(), "it takes a list of ray.train.UserCallback. Give raypipe's own callbacks to the trainer"),
    ],
)
def test_a_run_config_takes_rays_callbacks_alone(given: Any, message: str, tmp_path: Path) -> None:
    run = SimpleNamespace(name="run", storage_path=str(tmp_path), callbacks=given)
    with pytest.raises(ConfigError, match=r"RunConfig\(callbacks=") as caught:
        trainer("cnn", tmp_path, "run", 2, run_config=run)
    assert message in str(caught.value)


@pytest.mark.slow
def test_they_hear_of_a_run_from_its_start_to_its_end_and_change_no_bit(tmp_path: Path) -> None:
    listens = Listens()
    data = CASES["cnn"].data(16)
    heard = trainer("cnn", tmp_path, "heard", 2, callbacks=[Fails(), listens], eval_data=data)
    result = heard.fit(num_steps=4, local=True, progress=False)
    assert listens.told == [
        ("start", "heard"), *(("step", step) for step in range(4)),
        ("eval", 4, {"eval_loss": result.metrics["eval_loss"]}), ("checkpoint", 4, result.checkpoint),
        ("decision", 4, "finish"), ("end", 4, ""),
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "heard/events.jsonl").read_text().splitlines()]
    (warning,) = [line["reason"] for line in lines if line["decision"] == "warning"]
    assert warning.startswith("The callback Fails failed in on_step at ")
    alone = trainer("cnn", tmp_path, "alone", 2, eval_data=data).fit(num_steps=4, local=True, progress=False)
    assert unequal(result.checkpoint, alone.checkpoint) == []


@pytest.mark.slow
def test_they_are_told_why_a_run_failed(tmp_path: Path) -> None:
    listens = Listens()

    with pytest.raises(RaypipeError, match="the optimizer is broken"):
        trainer("cnn", tmp_path, "run", 1, optimizer=broken_adamw, callbacks=[listens]).fit(
            num_steps=4, local=True, progress=False
        )
    kind, _, error = listens.told[-1]
    assert kind == "end"
    assert "the optimizer is broken" in error


def test_the_run_id_of_rays_callbacks_is_the_name_of_the_run_wherever_its_folder_is() -> None:
    adapted = FromRayTrain(OfRay(), SimpleNamespace(name="lm"), None)
    adapted.on_start(RunStart("lm", "s3://bucket/lm?endpoint_override=http://host:9000", 0, 1, {}, ""))
    assert adapted._context.run_id == "lm"


def test_a_run_file_names_the_loggers(tmp_path: Path) -> None:
    made = trainer("cnn", tmp_path, "run", 2, callbacks=[TensorBoard(folder="/tmp/tb", every_steps=3)])
    written = made._described("run", 4)
    assert "raypipe.callbacks.loggers:TensorBoard" in written
    file = tmp_path / "run.yaml"
    file.write_text(
        'model: {target: "torch.nn:Identity"}\noptimizer: {target: "torch.optim:SGD"}\ntrain_data: data\n'
        'callbacks: [{target: "raypipe.callbacks:TensorBoard", args: {every_steps: 3}}]\n'
    )
    assert read_runfile(file).values["callbacks"][0]["args"] == {"every_steps": 3}
    with pytest.raises(ConfigError, match=r"callbacks: .* is not a list"):
        read_runfile(file, ["callbacks=raypipe"])

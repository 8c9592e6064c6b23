"""Controller of a run in threads: every change of schedule, micro-batches and codecs has the bits of plain PyTorch."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.engine.local import LocalFleet
from raypipe.engine.stage_runner import SPLIT_EVERY, SPLIT_FIRST
from raypipe.ir.communication import LinkEstimate, MessageTimes, StageSample, stage_sample
from raypipe.ir.report import StepReport
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import Choice, ControllerConfig, ControllerDecision, StepDone, Verdict
from raypipe.run.controller_thread import ActiveSettings, ControllerThread, step_done
from raypipe.run.journal import Journal
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import assemble, controller_config
from raypipe.run.requests import Requests
from raypipe.testing import reference
from tests.exactness import same_bits
from tests.models import CASES
from tests.prepare.test_resume import adamw, cosine

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures"), pytest.mark.slow]

STEPS, STAGES, COUNT = 9, 3, 4
ANSWER_S = 120.0
PATIENCE = {"retune_interval_steps": 1, "link_drift_threshold": 0.1, "min_gain": 0.01}
KINDS = (
    Choice(ScheduleSpec("kfkb", COUNT, group_size=3)),
    Choice(ScheduleSpec("slack", COUNT, slack=(1, 3))),
    Choice(ScheduleSpec("1f1b", COUNT)),
    Choice(ScheduleSpec("gpipe", COUNT)),
    Choice(ScheduleSpec("zb-h1", COUNT, slack=(2, 1))),
    Choice(ScheduleSpec("zb-h1", COUNT, slack=(2, 1), lag=(0, 1, 0))),
    Choice(ScheduleSpec("slack", COUNT, slack=(4, 2))),
)


class Script:
    """A controller that asks for one choice after the other, whatever it is told."""

    def __init__(self, setup: ControllerConfig, choices: Sequence[Choice]) -> None:
        self._choices = choices
        self.wanted, self._run = setup.choice, setup.choice.spec
        self.events: list[StepDone] = []

    def estimates(self) -> tuple[LinkEstimate, ...]:
        return ()

    def handle(self, event: StepDone) -> list[ControllerDecision]:
        self.events.append(event)
        choice, run = self._choices[event.step % len(self._choices)], self._run
        spec = replace(choice.spec, first_trainable=run.first_trainable, overlap=run.overlap)
        self.wanted = replace(choice, spec=replace(spec, replicas=run.replicas, lanes=run.lanes))
        return [ControllerDecision(event.step, Verdict.SWITCH, "The script says so.", {"gain": 0.5}, self.wanted)]

    def to_json(self) -> str:
        return json.dumps({"steps": len(self.events)})


class Prompt(ControllerThread):
    """Has decided before the loop goes on, so that every step runs something else."""

    def on_step(self, event: StepDone) -> None:
        before = self.setting
        super().on_step(event)
        deadline_s = time.monotonic() + ANSWER_S
        while self.setting is before and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert self.setting is not before, "the script did not answer"


def trainer(folder: Path, run: str, name: str, **pipeline: Any) -> Any:
    case = CASES[name]
    return PipelineTrainer(
        case.model(),
        loss_fn=case.loss_fn,
        optimizer=adamw,
        lr_scheduler=cosine,
        train_data=case.data(30),  # the last mini-batch of an epoch is short
        eval_data=case.data(10),
        pipeline=PipelineConfig(
            num_stages=STAGES,
            minibatch_size=8,
            num_microbatches=COUNT,
            partitioner="parameters",
            **{"max_grad_norm": 0.5, **PATIENCE, **pipeline},
        ),
        run_config=SimpleNamespace(name=run, storage_path=str(folder)),
    )


def train(
    found: Any, make_controller: Callable[[ControllerConfig, str], ControllerThread] | None, num_steps: int = STEPS
) -> list[dict[str, Any]]:
    """Train in threads with a controller, which ``fit(local=True)`` leaves out; the rows of metrics.parquet."""
    job = found._prepared()
    blueprint = found._blueprint(job, num_steps, local=make_controller is None)
    spec, made = blueprint.spec, assemble(blueprint, job.planned)
    fleet = LocalFleet(blueprint.setup, made.setup, job.tensors)
    try:
        run_loop(
            LoopSetup(
                fleet,
                spec,
                made,
                Journal(spec.name, str(spec.place)),
                Requests(),
                make_controller or ControllerThread,
            )
        )
    finally:
        fleet.stop()
    rows: list[dict[str, Any]] = pq.read_table(Path(str(spec.place)) / "metrics.parquet").to_pylist()
    return rows


def numbers(rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


@pytest.mark.parametrize(
    ("name", "replicas", "limit"),  # steps of zb-h1 overlap where nothing is clipped
    [("mlp", 1, 0.5), ("noisy", 1, None), ("cnn", 1, None), ("mlp", (2, 1, 3), None), ("noisy", (1, 2, 2), 0.5)],
)
def test_parameters_do_not_show_how_often_the_schedule_was_turned(
    name: str, replicas: int | tuple[int, ...], limit: float | None, tmp_path: Path
) -> None:
    lanes = "auto" if replicas == 1 else 3
    still = train(trainer(tmp_path, "still", name, max_grad_norm=limit, num_lanes=lanes), None)
    scripts: list[Script] = []

    def make(setup: ControllerConfig, state: str) -> ControllerThread:
        scripts.append(Script(setup, KINDS))
        return Prompt(setup, state, scripts[-1])

    fields = {"max_grad_norm": limit, "num_lanes": lanes, "num_replicas": replicas}
    turned = train(trainer(tmp_path, "turned", name, **fields), make)
    assert [row["schedule"] for row in turned[1 : 1 + len(KINDS)]] == [str(choice) for choice in KINDS]
    assert numbers(turned) == numbers(still)
    expected, found = load_state_dict(tmp_path / "still"), load_state_dict(tmp_path / "turned")
    assert expected.keys() == found.keys()
    assert all(same_bits(found[key], expected[key]) for key in expected)
    initial = CASES[name].model().state_dict()
    assert any(not torch.equal(initial[key], found[key]) for key in initial)
    # The parts of a split backward were timed whatever ran, now and then; nobody waits for the first stage's.
    for event in scripts[0].events:
        split = event.choice.spec.kind == "zb-h1"
        for sample in event.stages:
            if event.step % 4 == 3 and not sample.forward_s:
                assert replicas != 1, "one of several has nothing to do in a short mini-batch"
                continue
            assert (sample.backward_s == 0.0) == split
            if not (split or event.step < SPLIT_FIRST or event.step % SPLIT_EVERY == 0):
                assert sample.input_s is sample.weight_s is None
                continue
            assert sample.input_s is not None
            assert sample.weight_s is not None
            assert sample.weight_s > 0.0
            assert sample.stage > 0 or sample.input_s < sample.weight_s


def same_as_plain(run: Path, name: str, found: Any, counts: Sequence[int], rows: Sequence[dict[str, Any]]) -> Any:
    """Return what plain PyTorch makes with so many micro-batches in each step; the run has its norms and its bits."""
    case = CASES[name]
    plain = reference(
        case.model(), optimizer=adamw, lr_scheduler=cosine, train_data=case.data(30), num_steps=STEPS,
        loss_fn=case.loss_fn, pipeline=found._pipeline, microbatches_by_step=counts,
    )  # fmt: skip
    assert [row["grad_norm"] for row in rows] == list(plain.grad_norms)
    ours, expected = load_state_dict(run), {**plain.parameters, **plain.buffers}
    assert all(same_bits(ours[key], expected[key]) for key in ours)
    return plain


@pytest.mark.parametrize("name", ["noisy", "cnn"])
def test_micro_batches_are_turned_too_and_plain_pytorch_follows(name: str, tmp_path: Path) -> None:
    """Dropout is drawn by the number of the micro-batch and BatchNorm sees smaller batches: both can be followed."""
    choices = (
        Choice(ScheduleSpec("kfkb", 2, group_size=2)),
        Choice(ScheduleSpec("slack", 4, slack=(1, 2))),
        Choice(ScheduleSpec("1f1b", 1)),
        Choice(ScheduleSpec("gpipe", 8)),
        Choice(ScheduleSpec("slack", 2, slack=(2, 2))),
    )

    def make(setup: ControllerConfig, state: str) -> ControllerThread:
        assert [count for count, _ in setup.microbatch_seconds] == [1, 2, 4, 8]
        return Prompt(setup, state, Script(setup, choices))

    found = trainer(tmp_path, "turned", name, retune_microbatches=True)
    rows = train(found, make)
    counts = [COUNT, *(choices[step % len(choices)].num_microbatches for step in range(STEPS - 1))]
    assert [row["schedule"] for row in rows[1:6]] == [f"{choice}, M={choice.num_microbatches}" for choice in choices]
    assert [row["loss"] for row in rows] == list(same_as_plain(tmp_path / "turned", name, found, counts, rows).losses)


def test_a_run_goes_on_with_the_micro_batches_that_it_ended_with(tmp_path: Path) -> None:
    """Stopped while M was 2 instead of the plan's 4; what wanted it comes back from controller.json."""
    half = Choice(ScheduleSpec("slack", 2, slack=(2, 1)))

    def make(setup: ControllerConfig, state: str) -> ControllerThread:
        machine = Script(setup, (half, half, half, Choice(ScheduleSpec("1f1b", 8))))
        if state:
            machine.wanted = half
        return Prompt(setup, state, machine)

    found = trainer(tmp_path, "turned", "noisy", retune_microbatches=True)
    train(found, make, 3)
    rows = train(trainer(tmp_path, "turned", "noisy", retune_microbatches=True), make)
    counts = [COUNT, 2, 2, 2, 8, 2, 2, 2, 8]
    assert rows[3]["schedule"] == "slack r=2,1, M=2"
    same_as_plain(tmp_path / "turned", "noisy", found, counts, rows)


def test_the_controller_is_told_of_every_action_and_message(tmp_path: Path) -> None:
    replicas = (2, 1, 3)
    scripts: list[Script] = []

    def make(setup: ControllerConfig, state: str) -> ControllerThread:
        scripts.append(Script(setup, KINDS[2:3] * 2))
        return Prompt(setup, state, scripts[-1])

    rows = train(trainer(tmp_path, "told", "mlp", num_replicas=replicas), make)
    workers = [(s, r) for s, count in enumerate(replicas) for r in range(count)]
    events = scripts[0].events
    assert [event.step for event in events] == list(range(STEPS))
    assert [event.seconds for event in events] == [row["seconds"] for row in rows]
    assert not events[0].counts, "the first step has the start in it"
    for event in events:
        count = 3 if event.step % 4 == 3 else COUNT  # 6 samples are left at the end of an epoch
        assert [(sample.stage, sample.replica) for sample in event.stages] == workers
        assert all(sample.forward_s > 0 and sample.backward_s > 0 for sample in event.stages)
        places = {(m.hop, m.forward, m.microbatch) for m in event.messages}
        assert places == {(h, f, m) for h in range(STAGES - 1) for f in (True, False) for m in range(count)}
        assert all(m.arrived_at_s >= m.sent_at_s > 0 and m.wire_bytes > 0 for m in event.messages)


def test_codecs_are_turned_by_hop_and_direction(tmp_path: Path) -> None:
    coded = Choice(ScheduleSpec("1f1b", COUNT), forward_codecs=("int8", "none"), backward_codecs=("none", "bf16"))
    scripts: list[Script] = []

    def make(setup: ControllerConfig, state: str) -> ControllerThread:
        scripts.append(Script(setup, (coded, coded, Choice(ScheduleSpec("1f1b", COUNT)))))
        return Prompt(setup, state, scripts[-1])

    train(trainer(tmp_path, "coded", "mlp", codec_forward="auto", codec_backward="auto"), make)
    for event, plain in ((scripts[0].events[2], False), (scripts[0].events[3], True)):
        ratios = {(m.hop, m.forward): m.raw_bytes / m.wire_bytes for m in event.messages if m.raw_bytes}
        assert (ratios.get((0, True), 1.0) > 2) == (not plain)
        assert (ratios.get((1, False), 1.0) == 2.0) == (not plain)
        assert ratios.get((1, True), 1.0) == ratios.get((0, False), 1.0) == 1.0


def test_decisions_are_written_down_and_the_state_is_kept(tmp_path: Path) -> None:
    seen: list[str] = []

    def make(setup: ControllerConfig, state: str) -> ControllerThread:
        seen.append(state)
        return Prompt(setup, state, Script(setup, KINDS))

    found = trainer(tmp_path, "written", "mlp")
    train(found, make)
    lines = [json.loads(line) for line in (tmp_path / "written" / "events.jsonl").read_text().splitlines()]
    retunes = [line for line in lines if line["decision"] == "switch"]
    assert [line["step"] for line in retunes] == list(range(STEPS))
    assert retunes[0]["choice"] == str(KINDS[0])
    assert retunes[0]["gain"] == 0.5
    assert retunes[0]["reason"] == "The script says so."
    assert json.loads((tmp_path / "written" / "controller.json").read_text()) == {"steps": STEPS}
    found = trainer(tmp_path, "written", "mlp")
    train(found, make)  # nothing is left to do, but the controller goes on where it stood
    assert seen == ["", json.dumps({"steps": STEPS})]


def test_a_controller_that_fails_ends_nothing(tmp_path: Path) -> None:
    class Broken(Script):
        def handle(self, event: StepDone) -> list[ControllerDecision]:
            raise ZeroDivisionError("no such number")

    rows = train(
        trainer(tmp_path, "broken", "mlp"), lambda setup, state: ControllerThread(setup, state, Broken(setup, KINDS))
    )
    assert len(rows) == STEPS
    assert "no such number" in (tmp_path / "broken" / "events.jsonl").read_text()


def test_a_state_of_another_pipeline_is_refused_by_name(tmp_path: Path) -> None:
    job = trainer(tmp_path, "refused", "mlp")._prepared()
    setup = controller_config(PipelineConfig(), job.planned)
    assert setup is not None
    controller = ControllerThread(setup, '{"wanted": 1}')
    try:
        (message,) = controller.take_news()
        assert "measured anew" in str(message)
        assert controller.setting.choice == setup.choice
    finally:
        controller.close()


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "auto"),
        ({"schedule": "kfkb"}, "kfkb"),
        ({"schedule": "slack"}, "slack"),
        ({"schedule": "kfkb", "group_size": 2}, None),
        ({"schedule": "1f1b"}, None),
        ({"schedule": "2bw"}, None),
        ({"retune_interval_steps": 0}, None),
        ({"schedule": "1f1b", "codec_forward": "auto"}, "fixed"),
        ({"schedule": "1f1b", "retune_microbatches": True}, "fixed"),
    ],
)
def test_what_is_left_open_is_turned(given: dict[str, Any], mode: str | None, tmp_path: Path) -> None:
    patience = {} if mode else dict.fromkeys(PATIENCE, "auto")  # which is refused where nothing is turned
    found = trainer(tmp_path, "open", "mlp", **{**patience, **given})
    job = found._prepared()
    setup = controller_config(found._pipeline, job.planned)
    assert (None if setup is None else setup.mode) == mode
    if setup is not None and "retune_interval_steps" not in given:
        assert (setup.retune_interval_steps, setup.link_drift_threshold, setup.min_gain) == tuple(PATIENCE.values())
        assert bool(setup.forward_codecs) == ("codec_forward" in given)
        assert not setup.backward_codecs
        assert bool(setup.microbatch_seconds) == ("retune_microbatches" in given)


def test_what_is_decided_last_is_told_too(tmp_path: Path) -> None:
    """A controller that answers late is heard before the run is over."""

    class Late(Script):
        def handle(self, event: StepDone) -> list[ControllerDecision]:
            if event.step < STEPS - 1:
                return []
            time.sleep(0.2)
            return super().handle(event)

    train(trainer(tmp_path, "late", "mlp"), lambda setup, state: ControllerThread(setup, state, Late(setup, KINDS)))
    lines = [json.loads(line) for line in (tmp_path / "late" / "events.jsonl").read_text().splitlines()]
    assert [line["decision"] for line in lines][-2:] == ["switch", "finish"]
    assert json.loads((tmp_path / "late" / "controller.json").read_text()) == {"steps": 1}


def test_the_second_step_has_what_is_decided_after_the_first(tmp_path: Path) -> None:
    """The loop waits for it, and only once; later steps go on while the controller thinks."""

    class Slow(Script):
        def handle(self, event: StepDone) -> list[ControllerDecision]:
            time.sleep(0.1)
            return super().handle(event) if event.step == 0 else []

    rows = train(
        trainer(tmp_path, "slow", "mlp"), lambda setup, state: ControllerThread(setup, state, Slow(setup, KINDS))
    )
    assert [row["schedule"] for row in rows[1:]] == [str(KINDS[0])] * (STEPS - 1)


@pytest.mark.parametrize("copying", [False, True])
def test_a_step_beside_a_copy_is_no_measurement(copying: bool) -> None:
    """Also of the stage that copied nothing: its messages share the way of the other one's copy."""
    times = MessageTimes(0, True, array("I", [8]), array("I", [8]), array("d", [1.0]), array("d", [1.5]))
    sample = stage_sample(0, 7, (), None)
    assert isinstance(sample, StageSample | None)
    quiet = StepReport(1, 7, 4, 0.5, None, 0.0, 1.0, 0.5, 0.1, (0, 0), 1, sample=sample, messages=(times,))
    reports = [replace(quiet, stage=0, copying=copying), quiet]
    event = step_done(2.0, ActiveSettings(Choice(ScheduleSpec("1f1b", 1))), reports, counts=True)
    assert (event.step, event.seconds, event.counts) == (7, 2.0, not copying)
    assert len(event.messages) == (0 if copying else 2)
    assert bool(event.stages) == (not copying and sample is not None)

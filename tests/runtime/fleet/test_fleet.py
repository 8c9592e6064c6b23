"""Stage actors: the same bits as eager PyTorch, and quick, telling ends when something goes wrong.

One fleet of four processes becomes one pipeline after another; tests that kill one of them have a file of their own.
"""

from __future__ import annotations

import itertools
import math
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file

from raypipe.capture import capture
from raypipe.data.open_data import open_data
from raypipe.engine.io.checkpoint import SampleOrder, checkpoint_name, commit, load_state_dict, make_manifest
from raypipe.engine.io.storage import Place
from raypipe.engine.optim.norms import norm_of
from raypipe.engine.optim.state import Settings
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import LinkError, PlanError, StageError
from raypipe.ir.report import StepReport, merge_reports
from raypipe.ir.schedule import single_homes
from raypipe.ir.segment import Order, RowsKey
from raypipe.planner.schedule.lower import lower
from raypipe.planner.search import build_schedule, microbatches
from raypipe.planner.segments import train_segments
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.roster import LEASE_S, Terms
from raypipe.runtime.worker.packing import stored
from tests.exactness import (
    SHAPES,
    STEPS,
    Run,
    Shape,
    captured,
    config_of,
    differences,
    expected,
    programs,
    request_of,
    same_bits,
    train,
)
from tests.mishaps import Fuse, LateWeights, Nap, Spoil, chain
from tests.models import CASES, case
from tests.processes import alive

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

LINK_S = 120.0
SOON_S = 60.0
"""A failure is felt at once, also on a busy machine, and not when the deadline of a link has passed."""
NOWHERE = Place.of("/nowhere")
MANNER: dict[str, Any] = {"max_grad_norm": 0.5}
ON_ACTORS = (
    ("frozen-below", 1, "1f1b", "ragged-epoch", ()),
    ("gpt2-untied", 2, "kfkb3", "even", ()),
    ("tied-lm", 3, "gpipe", "ragged-epoch", ()),
    ("unet", 4, "zb-v", "ragged-epoch", (0, 1, 1, 0)),
    ("tied-lm", 4, "interleaved", "ragged-epoch", (0, 1, 0, 1)),
)
"""Model, stages, schedule, shape and the worker of each stage, () for one of its own each.

Schedules and models in every pair: tests/runs/test_exactness.py, over the same frames.
"""


@dataclass(frozen=True)
class FileRecorder:
    """Makes optimizers that write every gradient, as the optimizer saw it, into a folder that all processes see."""

    folder: str

    def __call__(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        folder = Path(self.folder)

        class Recording(torch.optim.AdamW):
            done = 0

            def step(self, closure: Any = None) -> Any:
                seen = {name: p.grad.contiguous() for name, p in named if p.grad is not None}
                save_file(seen, folder / f"{self.done}.{os.getpid()}.{named[0][0]}.safetensors")
                self.done += 1
                return super().step(closure)

        return Recording(named, lr=1e-2)

    def steps(self) -> list[dict[str, torch.Tensor | None]]:
        found: list[dict[str, torch.Tensor | None]] = [{} for _ in range(STEPS)]
        for path in sorted(Path(self.folder).glob("*.safetensors")):
            step = found[int(path.name.split(".")[0])]
            for name, gradient in load_file(path).items():
                assert name not in step or same_bits(step[name], gradient), f"holders of {name} differ"
                step[name] = gradient
        return found


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def configure(
    fleet: Fleet, stages: Sequence[StageProgram], tensors: dict[str, torch.Tensor], optimizer: Any, data: Any,
    settings: Settings, place: Place = NOWHERE, placement: tuple[int, ...] = (),
) -> tuple[RunSetup, GenerationSetup]:  # fmt: skip
    run_id, sources = uuid.uuid4().hex, {"train": open_data(data, seed=settings.seed)}
    run = RunSetup(optimizer, None, sources, settings, frozenset(tensors), place, run_id, open_timeout_s=30.0)
    setup = GenerationSetup(stages, single_homes(placement or range(len(stages))))
    fleet.configure(run, setup, [stored(tensors)])
    return run, setup


def saved_state(fleet: Fleet, folder: Path) -> dict[str, torch.Tensor]:
    """Parameters and buffers by way of a checkpoint."""
    name = checkpoint_name(STEPS)
    fleet.save(name)
    position = {"step": STEPS, "microbatch": 0, "epoch": 0, "offset": 0, "updates": STEPS}
    manifest = make_manifest(fleet.entries(name), position, SampleOrder(0, 1, 1, 1), {})
    commit(Place.of(folder), name, manifest)
    return load_state_dict(folder)


def steps(
    fleet: Fleet, stages: Sequence[StageProgram], shape: Shape, schedule: str, count: int = STEPS, **more: Any
) -> Iterator[list[StepReport]]:
    """Train; yields the reports of all stages on each step."""
    request = request_of(config_of(shape, len(stages), schedule, **more), shape.samples)
    minibatch, size, _ = microbatches(request, len(stages))

    @cache
    def rows(key: RowsKey) -> Any:
        return lower(build_schedule(request, len(stages), key.num_microbatches, stages[0].first_trainable))

    orders = (Order(segment) for segment, _ in train_segments(shape.samples, minibatch, size, count))
    for reports in fleet.run(orders, rows):
        yield [of_stage[0] for of_stage in reports]


@pytest.mark.parametrize(("name", "stages", "schedule", "shape", "placement"), ON_ACTORS)
def test_the_same_bits(
    fleet: Fleet, tmp_path: Path, name: str, stages: int, schedule: str, shape: str, placement: tuple[int, ...]
) -> None:
    """A worker may have several stages; each writes a part of the checkpoint of its own."""
    found, made, cut = case(name), captured(name)[1], programs(name, stages)
    recorder = FileRecorder(str(tmp_path))
    settings = Settings(0, "mean", MANNER["max_grad_norm"], LINK_S)
    tensors = {**made.parameters, **made.buffers}
    data = found.data(SHAPES[shape].samples)
    configure(fleet, cut, tensors, recorder, data, settings, Place.of(tmp_path), placement)
    assert len(fleet.actors) == len(set(placement) or range(stages))
    told = list(steps(fleet, cut, SHAPES[shape], schedule, **MANNER))
    assert [[report.stage for report in of_stages] for of_stages in told] == [list(range(stages))] * STEPS
    assert [report.worker for report in told[0]] == list(placement or range(stages))
    records = [merge_reports(of_stages, None, norm_of) for of_stages in told]
    state = saved_state(fleet, tmp_path)
    assert len(list(tmp_path.glob("checkpoints/*/stage_*.optimizer.safetensors"))) == stages
    run = Run(
        [record.loss for record in records],
        [record.grad_norm for record in records],
        recorder.steps(),
        {n: state[n] for n in made.parameters},
        {n: state[n] for n in made.buffers},
    )
    if found.tied:
        assert differences(run, train(name, 1, SHAPES[shape], "1f1b", "adamw", **MANNER)) == []
    else:
        assert differences(run, expected(name, SHAPES[shape], "adamw", **MANNER)) == []


def test_what_a_worker_holds_is_not_taken_for_other_stages(fleet: Fleet) -> None:
    stages, tensors = faulty(4, 3, Fuse("F", 10**6))
    data, settings = CASES["mlp"].data(40), Settings(0, "mean", None, LINK_S)
    run, _ = configure(fleet, stages, tensors, sgd, data, settings, placement=(0, 1, 0, 1))
    # Both refuse; whose answer comes first is told.
    either = (
        r"Worker (0 does not hold the parameters of stages 0 and 3|1 does .* of stages 1 and 2) as they are cut now"
    )
    with pytest.raises(StageError, match=either):
        fleet.configure(replace(run, run_id=uuid.uuid4().hex), GenerationSetup(stages, single_homes((0, 1, 1, 0))), [])


def two_healthy(fleet: Fleet, count: int) -> tuple[Any, list[Any]]:
    """Two stages that never fail: their schedule, and the segments of so many steps."""
    shape = SHAPES["even"]
    stages, tensors = faulty(2, 1, Fuse("F", 10**6))
    configure(fleet, stages, tensors, sgd, CASES["mlp"].data(shape.samples), Settings(0, "mean", None, LINK_S))
    request = request_of(config_of(shape, 2, "1f1b"), shape.samples)
    minibatch, size, _ = microbatches(request, 2)
    schedule = lower(build_schedule(request, 2, math.ceil(minibatch / size), stages[0].first_trainable))
    return schedule, [segment for segment, _ in train_segments(shape.samples, minibatch, size, count)]


def test_a_segment_of_another_plan_is_refused(fleet: Fleet) -> None:
    schedule, segments = two_healthy(fleet, 1)
    orders = (Order(replace(segment, generation=1)) for segment in segments)
    with pytest.raises(StageError, match=r"A segment of plan 1 came to a worker of plan 0\."):
        list(fleet.run(orders, lambda key: schedule))


def test_a_halt_while_an_order_is_on_its_way_ends_the_run(fleet: Fleet) -> None:
    """Every order that had begun was reported before; the one that comes after the halt is not carried out."""
    schedule, segments = two_healthy(fleet, 3)

    def orders() -> Iterator[Order]:
        for count, segment in enumerate(segments):
            if count == 1:
                fleet.halt()
            yield Order(segment)

    assert len(list(fleet.run(orders(), lambda key: schedule, ahead=1))) == 1


def faulty(num_stages: int, stage: int, block: torch.nn.Module) -> tuple[tuple[StageProgram, ...], dict[str, Any]]:
    torch.manual_seed(0)
    data = CASES["mlp"].data(4)
    made = capture(chain(num_stages, stage, block), data[:2], (0, 1), torch.nn.functional.cross_entropy)
    return made.programs(range(2, 2 * num_stages, 2)), {**made.parameters, **made.buffers}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.01)


def pids(fleet: Fleet) -> list[int]:
    return [member["process"] for member in fleet.members]


@pytest.mark.parametrize(
    ("phase", "action", "step", "schedule", "placement"),
    [("F", "0F1", 0, "1f1b", (0, 1, 2)), ("B", "1B9", 2, "1f1b", (0, 1, 2)), ("B", "3I5", 1, "zb-v", (0, 1, 1, 0))],
)
def test_a_stage_that_raises(
    fleet: Fleet, phase: str, action: str, step: int, schedule: str, placement: tuple[int, ...]
) -> None:
    """It is named, and not the worker."""
    shape, stage = SHAPES["even"], int(action[0])
    stages, tensors = faulty(len(placement), stage, Fuse(phase, int(action[2:])))
    data, settings = CASES["mlp"].data(shape.samples), Settings(0, "mean", None, LINK_S)
    configure(fleet, stages, tensors, sgd, data, settings, placement=placement)
    finished: list[Any] = []
    begin_s = time.monotonic()
    with pytest.raises(StageError) as caught:
        finished.extend(steps(fleet, stages, shape, schedule))
    assert time.monotonic() - begin_s < SOON_S
    assert len(finished) == step or schedule == "zb-v", "whose steps overlap where nothing is clipped"
    message = str(caught.value)
    assert message.startswith(f"Stage {stage} failed in {action}: ValueError: the user's own mistake")
    assert 'raise ValueError("the user\'s own mistake")' in message
    assert "mishaps.py" in message
    assert all(map(alive, pids(fleet)))
    pulses = ray.get([member.actor.heartbeat.remote(0, LEASE_S) for member in fleet.roster], timeout=SOON_S)
    assert [heartbeat.action for heartbeat in pulses] == [""] * len(pulses)


def test_steps_overlap_where_nothing_is_clipped(fleet: Fleet) -> None:
    """Stage 1 still makes gradients of its weights, for a tenth of a second, when stage 0 begins the next step.

    On a busy machine either may be late now and then, so that one step shows it.
    """
    stages, tensors = faulty(2, 1, LateWeights(0.05))
    data = CASES["mlp"].data(SHAPES["even"].samples)
    began_early = {}
    for limit in (None, 10.0):
        configure(fleet, stages, tensors, sgd, data, Settings(0, "mean", limit, LINK_S))
        reports = list(steps(fleet, stages, SHAPES["even"], "zb-h1", max_grad_norm=limit))
        early = [then[1].end_s - now[0].start_s for then, now in itertools.pairwise(reports)]
        began_early[limit] = max(early) if limit is None else min(early)
        assert all((report.norms is None) == (limit is not None) for of_stages in reports for report in of_stages)
    assert began_early[None] > 0.05
    assert began_early[10.0] < 0.05


def test_a_loss_that_is_no_number_is_told_by_the_stage_that_knows_it(fleet: Fleet) -> None:
    """Its gradients spoil every stage's norm, and no stage waits for another's."""
    shape = SHAPES["even"]
    stages, tensors = faulty(3, 1, Spoil(4 * 2 + 1))
    configure(fleet, stages, tensors, sgd, CASES["mlp"].data(shape.samples), Settings(0, "mean", None, LINK_S))
    finished: list[Any] = []
    with pytest.raises(StageError, match=r"^Step 2: the loss is nan and the gradient norm of stage 2 is nan"):
        finished.extend(steps(fleet, stages, shape, "zb-h1"))
    assert len(finished) == 2


def test_a_missed_deadline_names_the_edge(fleet: Fleet) -> None:
    """Stage 1 sleeps in micro-batch 5, the second of step 1; whoever waits for it says for what."""
    stages, tensors = faulty(2, 1, Nap(5, 1.0))
    settings = replace(Settings(0, "mean", None, LINK_S), timeout_s=0.4)
    configure(fleet, stages, tensors, sgd, CASES["mlp"].data(40), settings)
    begin_s = time.monotonic()
    with pytest.raises(LinkError) as caught:
        list(steps(fleet, stages, SHAPES["even"], "1f1b"))
    assert time.monotonic() - begin_s < SOON_S
    message = str(caught.value)
    assert message.startswith("Stage 0 in 0RECV_B5: ")
    assert "stage 0 <-> stage 1: 1SEND_B5 (micro-batch 5) did not come within 0.4 s" in message
    assert all(map(alive, pids(fleet)))


def test_the_driver_says_and_hears_little(fleet: Fleet) -> None:
    """Orders and reports of one step on 4 stages with 16 micro-batches, as Ray serializes them."""
    shape = Shape(64, 32, 16)
    stages, tensors = faulty(4, 1, Fuse("F", 10**6))
    configure(fleet, stages, tensors, sgd, CASES["mlp"].data(64), Settings(0, "mean", None, LINK_S))
    reports = list(steps(fleet, stages, shape, "slack", count=3))[-1]
    assert len(reports) == 4
    (segment,) = [s for s, _ in train_segments(64, 32, 2, 1)]
    assert len(segment.microbatch_samples) == 16
    orders = len(stages) * len(ray.cloudpickle.dumps((segment, True, False)))
    answers = sum(len(ray.cloudpickle.dumps([report])) for report in reports)
    assert orders + answers < 10_000


def test_a_stage_without_a_place_is_refused(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raypipe.runtime.fleet.missing_resources.PLACE_TIMEOUT_S", 6.0)
    with pytest.raises(PlanError) as caught:
        Fleet(2, Terms({"CPU": 3}))
    message = str(caught.value)
    assert "found no place within 6 s: each of the 2 workers needs 3 CPU, 1 got it" in message
    assert "1 of 4 CPU free" in message
    assert "resources_per_worker" in message

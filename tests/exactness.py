"""Train a cut model in threads, keep everything the optimizer saw, and compare it with the reference bit by bit."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from raypipe import PipelineConfig, load_state_dict
from raypipe.capture import Capture, capture
from raypipe.data.open_data import open_data
from raypipe.engine.device.device import CPU, Device
from raypipe.engine.local import LocalFleet
from raypipe.engine.optim.norms import norm_of
from raypipe.engine.optim.state import Settings
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.randomness import RandomKey
from raypipe.engine.stage.stage import StageProgram
from raypipe.ir.report import StepReport, merge_reports
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import Order, RowsKey
from raypipe.planner.partition.chain import equal_parameters
from raypipe.planner.schedule.lower import lower, validate
from raypipe.planner.search import Request, build_schedule, microbatches
from raypipe.planner.segments import train_segments
from raypipe.prepare.inputs import asked_recompute
from raypipe.testing import Reference, reference
from tests.models import Case, case

__all__ = [
    "SCHEDULES", "SHAPES", "STEPS", "Recorder", "Run", "Shape", "by_hand", "captured", "config_of", "differences",
    "expected", "faults", "optimizer_of", "programs", "rows_of", "same_bits", "storages", "train", "unequal",
]  # fmt: skip

STEPS = 5
TRIALS = ("preflight/optimizer.py",)
"""Files of raypipe in which plans try optimizers on stand-ins."""
SCHEDULES = ("gpipe", "1f1b", "kfkb1", "kfkb2", "kfkb3", "kfkb4", "slack", "zb-h1")


@dataclass(frozen=True)
class Shape:
    """Samples of an epoch and of a mini-batch, and into how many micro-batches that is cut."""

    samples: int
    minibatch: int
    microbatches: int


SHAPES = {
    "even": Shape(40, 8, 4),
    "ragged-microbatch": Shape(35, 7, 4),  # 2 2 2 1
    "fewer-than-stages": Shape(30, 6, 3),
    "indivisible-by-k": Shape(20, 10, 5),
    "ragged-epoch": Shape(19, 8, 4),  # 2 2 2 2, 2 2 2 2, 2 1
}


class Recorder:
    """Makes optimizers that keep a copy of every gradient by step and name, as the optimizer saw it."""

    def __init__(self, base: type[torch.optim.Optimizer], **options: Any) -> None:
        self.base, self.options = base, options
        self.steps: list[dict[str, torch.Tensor | None]] = []
        self.quiet = False
        self._lock = threading.Lock()

    def __call__(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        recorder = self
        steps = itertools.count()  # not an attribute of the optimizer, which no checkpoint would hold

        class Recording(self.base):  # type: ignore[name-defined, misc]
            def step(self, closure: Any = None) -> Any:
                step = next(steps)
                for group in self.param_groups:
                    recorder._keep(step, dict(zip(group["param_names"], group["params"], strict=True)))
                return super().step(closure)

        return Recording(named, **self.options)

    def _keep(self, step: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        if self.quiet or not any(p.grad is not None and p.grad.any() for p in parameters.values()):
            return  # nothing was learnt in it
        frame = sys._getframe()
        while (frame := frame.f_back) is not None:
            if frame.f_code.co_filename.endswith(TRIALS):
                return  # a plan tries steps on stand-ins
        with self._lock:
            while len(self.steps) <= step:
                self.steps.append({})
            for name, parameter in parameters.items():
                seen = None if parameter.grad is None else parameter.grad.clone()
                if name in self.steps[step]:  # shared: every holder must see the same
                    assert same_bits(self.steps[step][name], seen), f"holders of {name} differ in step {step}"
                self.steps[step][name] = seen


def optimizer_of(name: str) -> Recorder:
    """Big enough steps that a wrong gradient shows in the parameters."""
    if name == "adamw":
        return Recorder(torch.optim.AdamW, lr=1e-2)
    return Recorder(torch.optim.SGD, lr=5e-2, momentum=0.9)


@dataclass
class Run:
    """What a cut model did; the same fields as raypipe.testing.Reference."""

    losses: list[float]
    grad_norms: list[float]
    gradients: list[dict[str, torch.Tensor | None]]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    reports: list[list[StepReport]] = field(default_factory=list, repr=False)


@cache
def captured(name: str) -> tuple[torch.nn.Module, Capture]:
    """The user's model and its graph, made once; nobody changes either."""
    found = case(name)
    model = found.model()
    source = open_data(found.data(4), seed=0)
    columns = source.columns if found.loss_fn is None else tuple(range(len(source.columns)))
    return model, capture(model, source.read(0, 0, 2, columns), columns, found.loss_fn)


@cache
def programs(name: str, cuts: int | tuple[int, ...]) -> tuple[StageProgram, ...]:
    """The stages for so many of equal size, or for these cut positions."""
    graph = captured(name)[1].graph
    return captured(name)[1].programs(equal_parameters(graph, cuts).cuts if isinstance(cuts, int) else cuts)


def config_of(shape: Shape, num_stages: int = 1, schedule: str = "auto", **more: Any) -> PipelineConfig:
    """kfkb3 is kFkB with k = 3, or what is left of it where a mini-batch has fewer micro-batches.

    Unless they are said, the loss is that of "mean" and nothing is verified: both belong to planning, which these tests
    leave out.
    """
    more = {"loss_reduction": "mean", "verify": "off", **more}
    kind, k = (schedule[:4], int(schedule[4:])) if schedule.startswith("kfkb") else (schedule, None)
    group = {} if k is None else {"group_size": min(k, shape.microbatches)}
    sizes = {"minibatch_size": shape.minibatch, "num_microbatches": shape.microbatches}
    return PipelineConfig(num_stages=num_stages, schedule=kind, **group, **sizes, **more)


@cache
def expected(name: str, shape: Shape, optimizer: str, device: str = "cpu", **more: Any) -> Reference:
    """The reference, made once for all partitions and schedules."""
    found = case(name)
    return reference(
        captured(name)[0],
        optimizer=optimizer_of(optimizer),
        train_data=found.data(shape.samples),
        num_steps=STEPS,
        loss_fn=found.loss_fn,
        pipeline=config_of(shape, **more),
        device=device,
    )


def request_of(config: PipelineConfig, num_samples: int) -> Request:
    """What the trainer would ask of the planner."""
    group = None if config.group_size == "auto" else config.group_size
    sizes = (config.minibatch_size, config.num_microbatches)
    clips = config.max_grad_norm is not None
    waits = {"clips": clips, "skips": config.on_nonfinite == "skip"}
    again = asked_recompute(config, config.num_stages)  # type: ignore[arg-type]
    return Request(
        config.num_stages, None, (), *sizes, num_samples, config.schedule, group, recompute=again, **waits  # type: ignore[arg-type]
    )  # fmt: skip


def rows_of(request: Request, stages: Sequence[StageProgram]) -> Callable[[RowsKey], Schedule]:
    """Key -> the schedule of a mini-batch of these stages, each made once."""

    @cache
    def rows(key: RowsKey) -> Schedule:
        lowered = lower(build_schedule(request, len(stages), key.num_microbatches, stages[0].first_trainable))
        validate(lowered)
        return lowered

    return rows


def train(
    name: str,
    cuts: int | tuple[int, ...],
    shape: Shape,
    schedule: str,
    optimizer: str,
    steps: int = STEPS,
    workers: int | None = None,
    replicas: int | tuple[int, ...] = 1,
    lanes: int | None = None,
    shards: bool = False,
    device_of: Callable[[int], Device] = lambda _: CPU,
    lag: tuple[int, ...] = (),
    **more: Any,
) -> Run:
    """The same training in stages, in threads of this process.

    Args:
        cuts: number of stages, or positions.
        workers: that share the stages, where the schedule puts several on each.
        device_of: worker -> what it computes on.
        lag: as in Request.
        replicas, lanes, shards: of every stage; as in Request. Of optimizers that step slices no gradients are kept.
        more: further fields of PipelineConfig.
    """
    found, (_, made) = case(name), captured(name)
    stages = programs(name, cuts)
    config = config_of(shape, len(stages), schedule, **more)
    tensors = {**made.parameters, **made.buffers}
    how = (steps, workers, replicas, lanes, shards, device_of, lag)
    return train_stages(found, stages, tensors, config, shape, optimizer_of(optimizer), *how)


def train_stages(
    found: Case,
    stages: Sequence[StageProgram],
    tensors: Mapping[str, torch.Tensor],
    config: PipelineConfig,
    shape: Shape,
    recorder: Recorder,
    steps: int,
    workers: int | None = None,
    replicas: int | tuple[int, ...] = 1,
    lanes: int | None = None,
    shards: bool = False,
    device_of: Callable[[int], Device] = lambda _: CPU,
    lag: tuple[int, ...] = (),
) -> Run:
    """LocalFleet, fed as the trainer feeds it."""
    source = open_data(found.data(shape.samples), seed=config.seed)
    request = replace(request_of(config, shape.samples), num_workers=workers, replicas=replicas, lanes=lanes, lag=lag)
    settings = Settings(
        config.seed, config.loss_reduction, config.max_grad_norm, 30.0, config.on_nonfinite, shard_optimizer=shards
    )
    recorder.quiet = shards
    minibatch, size, _ = microbatches(request, len(stages))
    wiring = build_schedule(request, len(stages), 1, 0).wiring
    setup = GenerationSetup(stages, wiring.homes, recompute=request.recomputed(len(stages)), lanes=wiring.lanes)
    fleet = LocalFleet(RunSetup(recorder, None, {"train": source}, settings), setup, tensors, device_of)
    try:
        orders = (Order(segment) for segment, _ in train_segments(shape.samples, minibatch, size, steps))
        reports = [[r[0] for r in of_stages] for of_stages in fleet.run(orders, rows_of(request, stages))]
        states = [state for executor in fleet.executors for state in executor.states]
        parameters = {name: p.detach() for state in states for name, p in state.parameters.items()}
        for state in states:
            for name, held in state.parameters.items():
                assert same_bits(held.detach(), parameters[name]), f"holders of {name} differ"
        buffers = {name: buffer for state in reversed(states) for name, buffer in state.buffers.items()}
    finally:
        fleet.stop()
    records = [merge_reports(r, None, norm_of) for r in reports]
    losses, norms = [r.loss for r in records], [r.grad_norm for r in records]
    return Run(losses, norms, recorder.steps, parameters, buffers, reports)  # type: ignore[arg-type]


def by_hand(
    name: str, cuts: int | tuple[int, ...], mode: str, columns: Mapping[Any, torch.Tensor], key: RandomKey
) -> tuple[torch.Tensor, ...]:
    """The outputs of the last stage, carried from stage to stage without gradients, links or an executor."""
    tensors = {**captured(name)[1].parameters, **captured(name)[1].buffers}
    carried: tuple[torch.Tensor, ...] = ()
    with torch.no_grad():
        for program in programs(name, cuts):
            function = getattr(program, mode)
            leaves = [tensors[site.parameter] for site in function.sites]
            buffers = [tensors[buffer].clone() for buffer in function.buffers]
            carried = function(leaves, buffers, carried, [columns[column] for column in function.columns], key)
    return carried


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Stricter than torch.equal: -0.0 is not 0.0, and a NaN equals the same NaN."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)


def unequal(one: Mapping[str, torch.Tensor] | str | Path, other: Mapping[str, torch.Tensor] | str | Path) -> list[str]:
    """Names of tensors in which two states, or two checkpoints, differ by a bit, or which one of them lacks."""
    ours, theirs = (load_state_dict(state) if isinstance(state, str | Path) else state for state in (one, other))
    return [name for name in {**ours, **theirs} if not same_bits(ours.get(name), theirs.get(name))]


def differences(ours: Run, theirs: Reference | Run, *, buffers: bool = True) -> list[str]:
    """Everything in which two runs differ by a bit or more; empty if they are equal."""
    found = []
    for what in ("losses", "grad_norms"):
        pairs = zip(getattr(ours, what), getattr(theirs, what), strict=True)
        found += [f"{what}[{i}]: {a!r} is not {b!r}" for i, (a, b) in enumerate(pairs) if a != b]
    steps = [(f"gradients[{i}]", a, b) for i, (a, b) in enumerate(zip(ours.gradients, theirs.gradients, strict=True))]
    ends = [("parameters", ours.parameters, theirs.parameters)]
    if buffers:
        ends.append(("buffers", ours.buffers, theirs.buffers))
    for what, mine, yours in (*steps, *ends):
        if mine.keys() != yours.keys():
            found.append(f"{what}: names differ: {sorted(mine.keys() ^ yours.keys())}")
        found += [f"{what}[{n}]" for n in mine.keys() & yours.keys() if not same_bits(mine[n], yours[n])]
    return found


def faults(name: str, ours: Run, theirs: Reference) -> list[str]:
    """Differences, and everything that could make equality worthless."""
    found = differences(ours, theirs)
    user, fresh = captured(name)[0], case(name).model()
    if not all(map(same_bits, user.state_dict().values(), fresh.state_dict().values())):
        found.append("the user's model changed")
    if any(p.grad is not None for p in user.parameters()):
        found.append("the user's model got a gradient")
    homes = {
        "the user's model": storages(dict(user.named_parameters()) | dict(user.named_buffers())),
        "the reference": storages(theirs.parameters | theirs.buffers).union(*map(storages, theirs.gradients)),
        "the pipeline": storages(ours.parameters | ours.buffers).union(*map(storages, ours.gradients)),
    }
    for one, other in itertools.combinations(homes, 2):
        if homes[one] & homes[other]:
            found.append(f"{one} and {other} share memory")
    for parameter, initial in user.named_parameters():
        moved = not same_bits(ours.parameters[parameter], initial)
        if moved != initial.requires_grad:
            found.append(f"{parameter} {'moved' if moved else 'did not move'}")
    return found


def storages(tensors: Mapping[str, torch.Tensor | None]) -> set[int]:
    """Addresses of the memory behind tensors."""
    return {t.untyped_storage().data_ptr() for t in tensors.values() if t is not None and t.numel()}

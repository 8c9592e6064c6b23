"""One combination, trained by the pipeline in threads and by plain PyTorch, and what differs."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset, IterableDataset

from jobs.lib.combinations.drawn import SEVERAL, Combination, lanes_of
from jobs.lib.combinations.modes import mode_of
from jobs.lib.combinations.nets import NETS, Net
from jobs.lib.combinations.optimizers import optimizer_of, scheduler_of
from jobs.lib.combinations.plain import Meaning, Plain, evaluated, train
from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.data import Stream
from raypipe.errors import CaptureError, ConfigError, DataError, PlanError, RaypipeError, ScheduleError

__all__ = ["Outcome", "carry_out"]

REFUSALS = (ConfigError, PlanError, CaptureError, DataError, ScheduleError)
EVALUATED = 11
"""Samples of eval_data."""
ROUNDING = {"fp32": 3e-4, "bf16-autocast": 0.1, "bf16": 0.1, "fp16": 0.05}
"""Of how far a tensor has moved, where sums are made in another order: such differences grow from step to step."""
EVALUATION = {"fp32": 1e-5, "bf16-autocast": 0.03, "bf16": 0.03, "fp16": 0.01}
"""Of eval_loss, where sums of gradients are made in another order."""


@dataclass(frozen=True)
class Outcome:
    """What became of a combination.

    Attributes:
        word: "equal", "close" (within rounding, where that is all there can be), "refused" before the first step,
            "WRONG" or "CRASHED".
        details: the refusal, the differences, or the traceback.
    """

    word: str
    details: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.word in ("equal", "close", "refused")


class Items(Dataset[Any]):
    """Samples one by one, as the users' own datasets give them."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class Flowing(IterableDataset[Any]):
    """The same samples one after the other, for ever anew."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


def carry_out(found: Combination, folder: Path) -> Outcome:
    """Train it both ways.

    Args:
        folder: an empty one, for runs.
    """
    try:
        return _compared(found, folder)
    except _RefusedError as error:
        return Outcome("refused", [str(error)])
    except Exception:  # noqa: BLE001  (that is what is looked for)
        return Outcome("CRASHED", [traceback.format_exc()])


def _compared(found: Combination, folder: Path) -> Outcome:
    net = NETS[found.net]
    ours = _pipeline(found, net, folder, "run")
    told = dict(ours.result.records[-1].evaluation)
    faults = [
        f"evaluate() of the checkpoint gives {name}={value}, and the run had {told.get(name)}"
        for name, value in ours.evaluated.items()
        if name.startswith("eval_") and repr(value) != repr(told.get(name))
    ]
    compiled = "compile_stages" in found.fields or "compile_stages" in found.first
    exact = not (net.rounds or compiled) and _rounds_as_plain(found, net)
    if _has_reference(found, net):
        theirs, evaluations = _reference(found, net, ours)
        faults += differences(found, net, ours, theirs, evaluations, exact=exact)
    if not exact and not compiled:
        faults += _unlike_simplest(found, net, ours, folder)
    if faults:
        return Outcome("WRONG", faults)
    return Outcome("equal" if exact else "close")


class _RefusedError(Exception):
    """Before the first step."""


@dataclass
class _Ours:
    """What the pipeline did."""

    result: Any
    tensors: dict[str, torch.Tensor]
    stages: list[list[str]]
    persistent: frozenset[str]
    evaluated: dict[str, Any]
    lanes: int


def _pipeline(found: Combination, net: Net, folder: Path, name: str) -> _Ours:
    if found.stop:
        _fit(replace(found, fields=found.first, workers=found.first_workers), net, folder, name, found.stop)
    trainer, result = _fit(found, net, folder, name, found.steps)
    programs, wiring = trainer._prepared().programs, trainer._prepared().plan.schedule.wiring
    assert found.fields.get("num_replicas") == "auto" or wiring.lanes == lanes_of(found.fields)
    stages = [[name for name in program.parameters if name in program.trainable] for program in programs]
    # Of the checkpoint, where that is another way than the run's own: a third of the runs that evaluate.
    beside = found.evaluates and not _replicated(found) and found.samples % 3 == 0
    evaluated = trainer.evaluate(local=True) if beside else {}
    return _Ours(
        result, load_state_dict(result.checkpoint), stages, frozenset(net.model().state_dict()), evaluated, wiring.lanes
    )


def _fit(found: Combination, net: Net, folder: Path, name: str, steps: int) -> tuple[PipelineTrainer, Any]:
    try:
        trainer = _trainer(found, net, folder, name)
        trainer.plan()
        trainer._check(trainer._prepared())
    except RaypipeError as error:
        raise _RefusedError(f"{type(error).__name__}: {error}") from error
    try:
        return trainer, trainer.fit(num_steps=steps, local=True, progress=False)
    except REFUSALS as error:
        if (folder / name / "metrics.parquet").exists():
            raise
        raise _RefusedError(f"{type(error).__name__}: {error}") from error


def _trainer(found: Combination, net: Net, folder: Path, name: str) -> PipelineTrainer:
    more: dict[str, Any] = {}
    fields = dict(found.fields)
    model: Any = net.model()
    if found.evaluates:
        more["eval_data"] = net.data(EVALUATED)
        if net.counted is not None:
            more["metrics"] = {"right": net.counted}
    if found.made_by_workers:
        weights = folder / "weights.safetensors"
        save_file({name: x.clone() for name, x in model.state_dict().items()}, weights)
        fields["weights_on"], more["init_from"], model = "workers", str(weights), net.build
    run = SimpleNamespace(name=name, storage_path=str(folder))
    if found.max_failures:
        run.failure_config = SimpleNamespace(max_failures=found.max_failures)
    if found.workers is not None:
        replicas = fields.get("num_replicas", 1) if found.schedule in SEVERAL else 1
        more["scaling_config"] = SimpleNamespace(num_workers=found.workers * replicas)
    if found.scheduler != "none":
        more["lr_scheduler"] = partial(scheduler_of, found.scheduler)
    return PipelineTrainer(
        model,
        loss_fn=net.loss_fn,
        optimizer=partial(optimizer_of, found.optimizer),
        train_data=_data(found, net),
        pipeline=PipelineConfig(**fields),
        run_config=run,
        **more,
    )


def _data(found: Combination, net: Net) -> Any:
    data = net.data(found.samples)
    if found.data == "items":
        return Items(data)
    if found.data == "stream":
        return Stream(Flowing(data), num_samples=found.samples)
    if found.data == "loader":
        return DataLoader(data, batch_size=found.fields["minibatch_size"], shuffle=True)
    return data


# What it is compared with.


def _rounds_as_plain(found: Combination, net: Net) -> bool:
    """Whether plain PyTorch can round what travels between stages as the run does."""
    codecs = {found.fields.get(name, "none") for name in ("codec_forward", "codec_backward")}
    if codecs == {"none"}:
        return True
    cut = isinstance(found.fields.get("partitioner"), list) and found.schedule not in SEVERAL
    same = not found.stop or found.first.get("partitioner") == found.fields.get("partitioner")
    first = found.stop and found.first.get("schedule", "auto") in SEVERAL
    return bool(net.children) and cut and same and not first and codecs <= {"none", "bf16", "fp16"}


def _has_reference(found: Combination, net: Net) -> bool:
    """A tied weight has the version of each of its stages, which one copy of a model cannot have."""
    codecs = {found.fields.get(name, "none") for name in ("codec_forward", "codec_backward")}
    if codecs != {"none"} and not _rounds_as_plain(found, net):
        return False
    return not (net.tied and found.schedule == "pipedream" and not found.fields.get("vertical_sync"))


def _reference(found: Combination, net: Net, ours: _Ours) -> tuple[Plain, dict[int, dict[str, float]]]:
    meaning = _meaning(found, net, ours)
    told = {record.step + 1 for record in ours.result.records if record.evaluation}
    evaluations: dict[int, dict[str, float]] = {}

    def after(step: int, model: torch.nn.Module) -> None:
        if step in told:
            evaluations[step] = evaluated(net, model, net.data(EVALUATED), meaning)

    make_scheduler = None if found.scheduler == "none" else partial(scheduler_of, found.scheduler)
    plain = train(
        net, _data(found, net), meaning, found.steps, partial(optimizer_of, found.optimizer), make_scheduler, after
    )
    return plain, evaluations


def _meaning(found: Combination, net: Net, ours: _Ours) -> Meaning:
    fields = found.fields
    count, minibatch = fields["num_microbatches"], fields["minibatch_size"]
    steps = range(1, found.steps)
    drains = {found.stop}
    for name in ("checkpoint_interval_steps", "eval_interval_steps"):
        interval = fields.get(name)
        drains |= {step for step in steps if isinstance(interval, int) and step % interval == 0}
    cuts = fields.get("partitioner")
    codecs = (fields.get("codec_forward", "none"), fields.get("codec_backward", "none"))
    return Meaning(
        minibatch,
        math.ceil(minibatch / count),
        ours.stages,
        fields.get("seed", 0),
        ours.lanes,
        mode_of(fields, [bool(names) for names in ours.stages]),
        frozenset(drains),
        fields.get("precision", "fp32"),
        fields.get("max_grad_norm"),
        fields.get("on_nonfinite") == "skip",
        tuple(map(int, cuts)) if isinstance(cuts, list) and net.children else (),
        tuple(None if codec == "none" else codec for codec in codecs),  # type: ignore[arg-type]
        fields.get("codec_sums") == "bf16",
    )


def differences(
    found: Combination,
    net: Net,
    ours: _Ours,
    theirs: Plain,
    evaluations: Mapping[int, Mapping[str, float]],
    *,
    exact: bool,
) -> list[str]:
    """From plain PyTorch."""
    records, precision = ours.result.records, found.fields.get("precision", "fp32")
    bound = 0.0 if exact else ROUNDING[precision]
    if not exact and found.fields.get("codec_sums") == "bf16":
        bound = max(bound, 0.05)
    faults = []
    if [r.step for r in records] != list(range(found.steps)):
        return [f"records are of steps {[r.step for r in records]}"]
    for record, loss, norm, rate in zip(records, theirs.losses, theirs.norms, theirs.rates, strict=True):
        pairs = [("loss", record.loss, loss)]
        if found.synchronous:
            pairs.append(("grad_norm", record.grad_norm, norm))
        if found.optimizer not in ("adamw in groups", "sgd by name"):
            pairs.append(("lr", record.lr, rate))
        for what, mine, yours in pairs:
            if repr(mine) != repr(yours) and not abs(mine - yours) <= bound * max(abs(yours), 1e-3):
                faults.append(f"step {record.step}: {what} is {mine!r}, plain PyTorch has {yours!r}")
    skipped = [record.step for record in records if record.skipped]
    if skipped != theirs.skipped:
        faults.append(f"steps {skipped} were skipped, by plain PyTorch {theirs.skipped}")
    faults += _unlike_tensors(found, net, ours, theirs.tensors, bound)
    # An evaluation takes the statistics of the first replica, which has seen its own micro-batches only.
    for step, wanted in () if net.statistics and _replicated(found) else evaluations.items():
        numbers = dict(records[step - 1].evaluation)
        for name, value in wanted.items():
            exactly = exact and not net.evaluates_otherwise
            least = 0.0 if exactly else EVALUATION[precision] if name == "eval_loss" else 1.0
            if not abs(numbers.get(name, math.nan) - value) <= least * max(1.0, abs(value)):
                faults.append(f"after {step} steps {name} is {numbers.get(name)}, plain PyTorch has {value}")
    return faults


def _replicated(found: Combination) -> bool:
    return any(part.get("num_replicas", 1) != 1 for part in (found.fields, found.first))


def _unlike_tensors(
    found: Combination, net: Net, ours: _Ours, theirs: Mapping[str, torch.Tensor], bound: float
) -> list[str]:
    start, faults = net.model(), []
    begins = {**dict(start.named_parameters()), **dict(start.named_buffers())}
    buffers = dict(start.named_buffers())
    for name, tensor in theirs.items():
        if name in buffers and (name not in ours.persistent or (_replicated(found) and net.statistics)):
            continue
        mine = ours.tensors[name]
        if torch.equal(mine, tensor):
            continue
        moved = float((tensor - begins[name]).detach().abs().max())
        apart = float((mine - tensor).detach().abs().max())
        if not apart <= bound * max(moved, 1e-2):
            faults.append(f"{name} is {apart:.3g} from plain PyTorch's, which has moved by {moved:.3g}")
    return faults


def _unlike_simplest(found: Combination, net: Net, ours: _Ours, folder: Path) -> list[str]:
    """Where plain PyTorch rounds otherwise, the bits are those of the simplest pipeline of this kind."""
    fields = {name: value for name, value in found.fields.items() if name not in ("recompute", "compile_stages")}
    coded = {fields.get(name, "none") for name in ("codec_forward", "codec_backward")} != {"none"}
    if found.synchronous:
        fields["num_lanes"] = ours.lanes
        for name in ("num_replicas", "replicated_buffers", "slack", "group_size"):
            fields.pop(name, None)
        if coded and (found.schedule in SEVERAL or found.stop):
            return []
        fields["schedule"] = "1f1b"
        if not coded:
            fields |= {"num_stages": 1, "partitioner": "parameters"}
    if fields.get("num_lanes") == 1:
        fields.pop("num_lanes")
        fields.pop("codec_sums", None)
    simple = replace(
        found, fields=fields, workers=None, stop=found.stop if not found.synchronous else 0, first=fields,
        data="tensors" if found.data == "items" else found.data, made_by_workers=False, max_failures=0,
    )  # fmt: skip
    try:
        theirs = _pipeline(simple, net, folder, "simplest")
    except _RefusedError as error:
        raise RuntimeError("the simplest pipeline is refused") from error
    faults = [
        f"step {a.step}: loss and norm are {a.loss, a.grad_norm}, of the simplest pipeline {b.loss, b.grad_norm}"
        for a, b in zip(ours.result.records, theirs.result.records, strict=True)
        if repr((a.loss, a.grad_norm)) != repr((b.loss, b.grad_norm)) and found.synchronous
    ]
    faults += [
        f"after step {a.step} the evaluation gives {a.evaluation}, of the simplest pipeline {b.evaluation}"
        for a, b in zip(ours.result.records, theirs.result.records, strict=True)
        if repr(a.evaluation) != repr(b.evaluation) and not found.stop and not (_replicated(found) and net.statistics)
    ]
    buffers = dict(net.model().named_buffers())
    faults += [
        f"{name} is not that of the simplest pipeline"
        for name, tensor in theirs.tensors.items()
        if not torch.equal(tensor, ours.tensors[name]) and not (name in buffers and "num_replicas" in found.fields)
    ]
    return faults

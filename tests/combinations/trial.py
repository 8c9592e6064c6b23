"""Train one combination by the pipeline in threads and by plain PyTorch, and compare."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.errors import CaptureError, ConfigError, DataError, PlanError, RaypipeError, ScheduleError
from tests.combinations.drawn import ASYNCHRONOUS, SEVERAL, Combination, lanes_of, stages_of
from tests.combinations.nets import NETS, Net
from tests.combinations.plain import Meaning, Plain, train
from tests.emulators.versions import Mode, two_buffered

__all__ = ["Outcome", "carry_out"]

REFUSALS = (ConfigError, PlanError, CaptureError, DataError, ScheduleError)
ROUNDING = {"fp32": 3e-4, "bf16-autocast": 0.1, "bf16": 0.1, "fp16": 0.05}
"""Share of a tensor's change, if sums are in another order: such differences grow from step to step."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a combination.

    Attributes:
        word: "equal", "close" (within rounding, if gradients are summed in another order), "refused" before the first
            step, "WRONG" or "CRASHED".
        details: the refusal, the differences, or the traceback.
    """

    word: str
    details: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.word in ("equal", "close", "refused")


class _RefusedError(Exception):
    """Refusal before the first step."""


@dataclass
class _Ours:
    """Result of the pipeline; names of the parameters that each stage trains; names in the state_dict; lanes."""

    result: Any
    tensors: dict[str, torch.Tensor]
    stages: list[list[str]]
    persistent: frozenset[str]
    lanes: int


def carry_out(made: Combination, folder: Path) -> Outcome:
    """Train it both ways.

    Args:
        folder: an empty one, for runs.
    """
    net = NETS[made.net]
    try:
        ours = _pipeline(made, net, folder, "run")
        faults = []
        # A tied weight has the version of each of its stages, which one copy of a model cannot have.
        if not (net.tied and made.schedule == "pipedream" and not made.fields.get("vertical_sync")):
            make_optimizer = partial(optimizer_of, made.optimizer)
            theirs = train(net, net.data(made.samples), _meaning(made, ours), made.steps, make_optimizer, decaying)
            faults = _differences(made, net, ours, theirs)
        if net.rounds:
            faults += _unlike_simplest(made, net, ours, folder)
    except _RefusedError as error:
        return Outcome("refused", [str(error)])
    except Exception:  # noqa: BLE001  (that is what is looked for)
        return Outcome("CRASHED", [traceback.format_exc()])
    return Outcome("WRONG", faults) if faults else Outcome("close" if net.rounds else "equal")


def optimizer_of(name: str, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Make an optimizer whose steps are large enough that a wrong gradient shows in the parameters."""
    if name == "sgd":
        return torch.optim.SGD(named, lr=5e-2, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(named, lr=1e-2)
    if name == "adamw in groups":
        groups = [[(n, p) for n, p in named if (p.dim() > 1) is decays] for decays in (True, False)]
        decays = [{"params": g, "weight_decay": d} for g, d in zip(groups, (0.1, 0.0), strict=True) if g]
        return torch.optim.AdamW(decays, lr=1e-2)
    return torch.optim.SGD([{"params": [(n, p)], "lr": 0.01 + 0.01 * (sum(n.encode()) % 5)} for n, p in named])


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)


def _pipeline(made: Combination, net: Net, folder: Path, name: str) -> _Ours:
    if made.stop:
        _fit(replace(made, fields=made.first, workers=made.first_workers), net, folder, name, made.stop)
    trainer, result = _fit(made, net, folder, name, made.steps)
    programs, wiring = trainer._prepared().programs, trainer._prepared().plan.schedule.wiring
    assert made.fields.get("num_replicas") == "auto" or wiring.lanes == lanes_of(made.fields)
    stages = [[name for name in program.parameters if name in program.trainable] for program in programs]
    persistent = frozenset(net.model().state_dict())
    return _Ours(result, load_state_dict(result.checkpoint), stages, persistent, wiring.lanes)


def _fit(made: Combination, net: Net, folder: Path, name: str, steps: int) -> tuple[PipelineTrainer, Any]:
    try:
        trainer = _trainer(made, net, folder, name)
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


def _trainer(made: Combination, net: Net, folder: Path, name: str) -> PipelineTrainer:
    more: dict[str, Any] = {}
    if made.workers is not None:
        replicas = made.fields.get("num_replicas", 1) if made.schedule in SEVERAL else 1
        more["scaling_config"] = SimpleNamespace(num_workers=made.workers * replicas)
    return PipelineTrainer(
        net.model(),
        loss_fn=net.loss_fn,
        optimizer=partial(optimizer_of, made.optimizer),
        lr_scheduler=decaying,
        train_data=net.data(made.samples),
        pipeline=PipelineConfig(**made.fields),
        run_config=SimpleNamespace(name=name, storage_path=str(folder)),
        **more,
    )


def _meaning(made: Combination, ours: _Ours) -> Meaning:
    fields = made.fields
    count, minibatch = fields["num_microbatches"], fields["minibatch_size"]
    interval = fields.get("checkpoint_interval_steps")
    drains = {step for step in range(1, made.steps) if isinstance(interval, int) and step % interval == 0}
    return Meaning(
        minibatch,
        math.ceil(minibatch / count),
        ours.stages,
        fields.get("seed", 0),
        ours.lanes,
        mode_of(fields, [bool(names) for names in ours.stages]),
        frozenset(drains | {made.stop}),
        fields.get("precision", "fp32"),
        fields.get("max_grad_norm"),
    )


def _differences(made: Combination, net: Net, ours: _Ours, theirs: Plain) -> list[str]:
    """List differences from plain PyTorch."""
    records = ours.result.records
    bound = ROUNDING[made.fields.get("precision", "fp32")] if net.rounds else 0.0
    if [r.step for r in records] != list(range(made.steps)):
        return [f"records are of steps {[r.step for r in records]}"]
    faults = []
    for record, loss, norm, rate in zip(records, theirs.losses, theirs.norms, theirs.rates, strict=True):
        pairs = [("loss", record.loss, loss)]
        pairs += [("grad_norm", record.grad_norm, norm)] if made.synchronous else []
        pairs += [("lr", record.lr, rate)] if made.optimizer in ("sgd", "adamw") else []
        for what, mine, yours in pairs:
            if repr(mine) != repr(yours) and not abs(mine - yours) <= bound * max(abs(yours), 1e-3):
                faults.append(f"step {record.step}: {what} is {mine!r}, plain PyTorch has {yours!r}")
    skipped = [record.step for record in records if record.skipped]
    if skipped != theirs.skipped:
        faults.append(f"steps {skipped} were skipped, by plain PyTorch {theirs.skipped}")
    start = net.model()
    buffers = dict(start.named_buffers())
    begins = {**dict(start.named_parameters()), **buffers}
    replicated = any(part.get("num_replicas", 1) != 1 for part in (made.fields, made.first))
    for name, tensor in theirs.tensors.items():
        if name in buffers and (name not in ours.persistent or (replicated and net.statistics)):
            continue
        mine = ours.tensors[name]
        if torch.equal(mine, tensor):
            continue
        moved = float((tensor - begins[name]).detach().abs().max())
        apart = float((mine - tensor).detach().abs().max())
        if not apart <= bound * max(moved, 1e-2):
            faults.append(f"{name} is {apart:.3g} from plain PyTorch's, which has moved by {moved:.3g}")
    return faults


def _unlike_simplest(made: Combination, net: Net, ours: _Ours, folder: Path) -> list[str]:
    """List differences from the simplest pipeline of this kind: its bits are equal also if plain PyTorch's are not."""
    fields = {name: value for name, value in made.fields.items() if name != "recompute"}
    if made.synchronous:
        for name in ("num_replicas", "replicated_buffers", "slack", "group_size"):
            fields.pop(name, None)
        fields |= {"num_lanes": ours.lanes, "schedule": "1f1b", "num_stages": 1, "partitioner": "parameters"}
    if fields.get("num_lanes") == 1:
        fields.pop("num_lanes")
    stop = 0 if made.synchronous else made.stop
    try:
        theirs = _pipeline(replace(made, fields=fields, workers=None, stop=stop, first=fields), net, folder, "simplest")
    except _RefusedError as error:
        raise RuntimeError("the simplest pipeline is refused") from error
    faults = [
        f"step {a.step}: loss and norm are {a.loss, a.grad_norm}, of the simplest pipeline {b.loss, b.grad_norm}"
        for a, b in zip(ours.result.records, theirs.result.records, strict=True)
        if repr((a.loss, a.grad_norm)) != repr((b.loss, b.grad_norm)) and made.synchronous
    ]
    buffers = dict(net.model().named_buffers())
    return faults + [
        f"{name} is not that of the simplest pipeline"
        for name, tensor in theirs.tensors.items()
        if not torch.equal(tensor, ours.tensors[name]) and not (name in buffers and "num_replicas" in made.fields)
    ]


def mode_of(fields: Mapping[str, Any], learns: list[bool]) -> Mode | None:
    """Versions that micro-batches meet, as in tests/emulators; None for a synchronous schedule.

    Args:
        fields: of PipelineConfig.
        learns: by stage.
    """
    schedule, stages, count = fields.get("schedule", "auto"), stages_of(fields), fields["num_microbatches"]
    if schedule not in ASYNCHRONOUS:
        return None
    if schedule == "2bw":
        return two_buffered(count)
    first = learns.index(True) if fields.get("vertical_sync") else 0  # below it there are no versions to stamp
    every = fields.get("update_interval")
    replicas = fields.get("num_replicas", 1)
    counts = (replicas if isinstance(replicas, list) else [replicas] * stages)[first:]
    slack = fields.get("slack", 1)
    hops = slack if isinstance(slack, list) else [slack] * (stages - 1)
    if every is None and "weight_versions" in fields:
        least = sum(hops) / (fields["weight_versions"] - 1)
        every = next(u for u in range(1, count + 1) if count % u == 0 and u >= least)
    hops = hops[first:]
    every = every or lanes_of(fields)

    def version(stage: int, k: int) -> int:
        at = 0 if fields.get("vertical_sync") else max(0, stage - first)
        ahead = sum(hop * behind for hop, behind in zip(hops[at:], counts[at + 1 :], strict=True))
        own = counts[at]  # each replica runs so many of its own ahead, of one in ``own`` micro-batches
        return max(0, (k // own - math.ceil(ahead / own)) // (every // own))

    return Mode(schedule, every, version)

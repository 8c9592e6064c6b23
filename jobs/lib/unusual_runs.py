"""Folders of runs that are unlike most, for whoever looks at reports of them: `python jobs/check/pictures.py`.

one-stage       nothing is sent
interleaved     eight stages on four workers, two on each
asynchronous    two versions of the weights, replicas of two of three stages
failed          the first loss is infinite, and the run stops
long-names      modules, a metric and the run have names of a hundred letters
eventful        made up: 10,000 steps with 40 recoveries, 12 resizes and losses that are not finite

All but the last are trained here, in threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ray.train import ScalingConfig

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.engine.metrics import MetricsWriter
from raypipe.engine.rundir import RunFolder
from raypipe.engine.storage import Place
from raypipe.errors import RaypipeError
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.ir.report import StepRecord
from raypipe.ir.timeline import Span, Timeline
from raypipe.planner.tune import Request, decide, plan_of, timeline_of

__all__ = ["LONG", "UNUSUAL", "many_stages"]

MIB = 1 << 20
WIDTH, SAMPLES, STEPS = 48, 256, 12
LONG = "the_encoder_of_the_document_retriever_whose_name_nobody_wanted_to_shorten_when_it_was_moved"
"""A name of about a hundred letters."""
BEGAN_S = 1_790_000_000.0


class Folded(torch.nn.Module):
    """Layers inside modules with long names."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(4)]
        self.add_module(LONG, torch.nn.ModuleDict({f"{LONG}_{at}": layer for at, layer in enumerate(layers)}))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in getattr(self, LONG).values():
            inputs = layer(inputs)
        return inputs


def _layers(count: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(m for _ in range(count) for m in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())))


def _train(folder: Path, name: str, model: torch.nn.Module, **fields: Any) -> Place:
    """Train a model in threads; where that fails, its folder says so."""
    torch.manual_seed(0)
    more = {key: fields.pop(key) for key in ("loss_fn", "scaling_config") if key in fields}
    inputs = torch.randn(SAMPLES, WIDTH)
    trainer = PipelineTrainer(
        model,
        **{"loss_fn": torch.nn.functional.mse_loss, **more},
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        train_data=torch.utils.data.TensorDataset(inputs, inputs.roll(1, 1).tanh()),
        pipeline=PipelineConfig(minibatch_size=32, **fields),
        run_config=SimpleNamespace(name=name, storage_path=str(folder)),
    )
    with contextlib.suppress(RaypipeError):
        trainer.fit(num_steps=STEPS, local=True, progress=False)
    return Place.of(folder / name)


def one_stage(folder: Path) -> Place:
    return _train(folder, "one-stage", _layers(3), num_stages=1, num_microbatches=4)


def interleaved(folder: Path) -> Place:
    workers = ScalingConfig(num_workers=4)
    fields: dict[str, Any] = {"num_stages": 8, "num_microbatches": 8, "schedule": "interleaved"}
    return _train(folder, "interleaved", _layers(16), scaling_config=workers, **fields)


def asynchronous(folder: Path) -> Place:
    replicas = (2, 1, 2)
    return _train(
        folder, "asynchronous", _layers(6), num_stages=3, num_replicas=replicas, num_microbatches=4, schedule="2bw"
    )


def _endless(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs, targets) / 0.0


def failed(folder: Path) -> Place:
    return _train(folder, "failed", _layers(4), num_stages=2, num_microbatches=4, loss_fn=_endless)


def long_names(folder: Path) -> Place:
    return _train(folder, f"run-of-{LONG}", Folded(), num_stages=3, num_microbatches=4)


def eventful(folder: Path, steps: int = 10_000) -> Place:
    """Numbers and events as a long run on spot machines leaves them."""
    place = Place.of(folder / "eventful")
    run = RunFolder(place)
    plan = many_stages(4)
    run.write_plan(plan.to_json())
    run.write_config("model: made up\n")
    predicted = timeline_of(plan)
    slower = tuple(Span(s.worker, s.action, 1.2 * s.start_s, 1.25 * s.end_s) for s in predicted.spans)
    run.write_timelines([predicted, Timeline(slower, "measured", name="eventful")])
    metrics = MetricsWriter(place)
    for step in range(steps):
        metrics.append(_record(step, steps))
    metrics.write()
    lines = [{"time": BEGAN_S + 0.12 * at, "step": at, **event} for at, event in _events(steps)]
    place.write_bytes("events.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    return place


def _record(step: int, steps: int) -> StepRecord:
    loss = math.nan if step in (2500, 2501, 7000) else 9.0 * math.exp(-step / 900) + 2.0 + 0.1 * math.sin(step * 1.7)
    paused = step % (steps // 40) == 17
    seconds = 4.0 + math.sin(step) if paused else 0.11 + 0.01 * math.sin(step * 0.7)
    evaluation = (("eval_loss", 9.2 * math.exp(-step / 900) + 2.0),) if step % 500 == 499 else ()
    return StepRecord(
        step, 32, loss, 1.2 + 0.3 * math.cos(step * 0.9), seconds, 0.18 + 0.02 * math.sin(step / 50), 4e7, 4,
        "1f1b" if step < steps // 2 else "kfkb k=2", lr=1e-3 * (1 - step / steps), tokens=32 * 512,
        goodput=0.95 - 0.1 * step / steps, evaluation=evaluation,
    )  # fmt: skip


def _events(steps: int) -> list[tuple[int, dict[str, Any]]]:
    found: list[tuple[int, dict[str, Any]]] = [
        (0, {"decision": "start", "reason": "fit was called", "num_steps": steps})
    ]
    for number in range(40):
        at = 17 + number * (steps // 40)
        why = f"worker {number % 4} on 10.0.{number % 7}.{number} was killed by SIGKILL, which the kernel sent"
        found.append((at, {"decision": "failure", "reason": why, "seconds": 0.2, "failures": number + 1}))
        found.append((at, {"decision": "recovery", "reason": "from copies in memory", "seconds": 3.1 + number / 20,
                           "redone_steps": number % 3, "restore_s": 1.3, "configure_s": 1.5, "moved_bytes": 40 * MIB,
                           "replaced": [f"worker {number % 4}"]}))  # fmt: skip
    for number in range(12):
        at, count = 400 + number * (steps // 12), 4 if number % 2 else 3
        why = f"a machine {'came' if number % 2 else 'is about to be taken away'}"
        found.append((at, {"decision": "resize", "reason": why, "num_stages": count, "seconds": 1.1}))
    link_s = [0.002, 0.001, 0.0004, 0.0003, 0.004, 0.003]
    for number in range(20):
        slower = [value * (1 + number % 5) for value in link_s]
        found.append((number * (steps // 20) + 3, {"decision": "keep", "reason": "1f1b stays.", "link_s": slower}))
    why = "Link 0 changed: kfkb k=2 would take 31 ms."
    found.append((steps // 2, {"decision": "switch", "reason": why, "link_s": link_s}))
    found.append((steps, {"decision": "finish", "reason": "all steps done", "checkpoint": "checkpoints/step_0010000"}))
    return sorted(found, key=lambda event: event[0])


def many_stages(stages: int, *, long: bool = False) -> Plan:
    """A plan of a made-up chain, four operations to a stage; nothing runs it.

    Args:
        long: its modules have long names.
    """
    third_s = 1e-3 / 3
    nodes = tuple(
        Node(
            f"op{at}", f"{LONG}.{at}" if long else f"layers.{at}", (), MIB, 4096, third_s, third_s, third_s,
            activation_bytes=1 << 18, output_bytes=1 << 16, source="measured",
        )
        for at in range(4 * stages)
    )  # fmt: skip
    graph = ModelGraph(nodes)
    profile = Profile(graph, 4, tuple((b, graph.busy_s * (b + 2) / 6) for b in (1, 2, 4, 8)))
    asked = Request(None, None, (), None, None, num_samples=10_000)
    asked = dataclasses.replace(
        asked, num_stages=stages, minibatch_size=8 * max(stages, 8), num_microbatches=2 * max(stages, 4),
        schedule="1f1b", memory_limit_bytes=4096 * MIB,
    )  # fmt: skip
    return plan_of(decide(asked, profile))


UNUSUAL: dict[str, Callable[[Path], Place]] = {
    "one-stage": one_stage, "interleaved": interleaved, "asynchronous": asynchronous, "failed": failed,
    "long-names": long_names, "eventful": eventful,
}  # fmt: skip
"""By name, what makes the run below a folder."""

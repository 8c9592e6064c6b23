"""What a candidate of bench/vs_dp is asked for and what it did; and how raypipe's run: Ray actors with paced links.

Every worker's messages wait before its one way out for bytes / rate, whoever they go to, as on a network card. Layers
and links may be so many times slower than a scene says, so that what the few processors of this machine compute for all
workers is small beside it.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import raypipe
from jobs.bench.vs_dp.models import MODELS, Model, accuracy, heldout, loss_of, samples
from jobs.lib.common import median
from jobs.lib.emulated import CPU_SHARE
from raypipe.engine.messages import frame
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.plan import Plan
from raypipe.runtime.links.socket_channel import SocketChannel

__all__ = [
    "EVAL_EVERY",
    "FEW_STEPS",
    "LEARNING_RATE",
    "MINIBATCH",
    "SEED",
    "Asked",
    "Ran",
    "plan_of",
    "run_plan",
    "shape_of",
]

MINIBATCH, LEARNING_RATE, SEED = 64, 0.02, 0
EVAL_EVERY = 5
WARM_UP, FEW_STEPS = 3, 15
"""Steps that are not counted, and those, they included, that show how long a step takes; evaluations are among them."""
LATENCY_S = 2e-4


class Asked(NamedTuple):
    """One scene: a model on so many workers whose links have a rate, for so many steps.

    Attributes:
        slower: so many times as long as in the scene, layers sleep and messages wait.
    """

    model: str
    workers: int
    mbit: float
    steps: int
    slower: float = 1.0

    @property
    def rate_bytes_s(self) -> float:
        return self.mbit * 1e6 / 8 / self.slower

    @property
    def layers(self) -> Model:
        plain = MODELS[self.model]
        return plain._replace(sample_s=plain.sample_s * self.slower)

    @property
    def name(self) -> str:
        return f"{self.model}_{self.workers}w_{self.mbit:g}mbit"


class Ran(NamedTuple):
    """What a candidate did.

    Attributes:
        step_s: median of the steps behind the first few.
        step_bytes: over all links, of one step.
        losses: by step.
        reached: steps until held-out accuracy was enough, as far as evaluations tell; 0 where it never was.
        accuracy: the last that was measured.
        stage_s: (forward, backward) of a micro-batch by stage, means over one step that was traced; of ours only.
    """

    step_s: float
    step_bytes: float
    losses: list[float]
    reached: int
    accuracy: float
    stage_s: tuple[tuple[float, float], ...] = ()


@dataclass
class Paced:
    """Makes optimizers, and paces the links of every process but the one where it was made."""

    rate_bytes_s: float

    def __post_init__(self) -> None:
        self.home = os.getpid()

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        if os.getpid() != self.home:
            _pace(SocketChannel, self.rate_bytes_s)
        return torch.optim.SGD([parameter for _, parameter in named], lr=LEARNING_RATE)


def _pace(channel: type[SocketChannel], rate_bytes_s: float) -> None:
    plain = channel.transmit
    if getattr(plain, "paces", False):
        return
    way_out = threading.Lock()

    def paced(self: SocketChannel, message: frame.Frame) -> None:
        head = frame.parse(message.header, generation=self.generation, max_tensors=self.max_tensors)
        with way_out:
            time.sleep(head.payload_bytes / rate_bytes_s)
        plain(self, message)

    paced.paces = True  # type: ignore[attr-defined]
    channel.transmit = paced  # type: ignore[method-assign]


def _trainer(asked: Asked, folder: str, **pipeline: Any) -> raypipe.PipelineTrainer:
    return raypipe.PipelineTrainer(
        asked.layers.build(SEED),
        loss_fn=loss_of,
        optimizer=Paced(asked.rate_bytes_s),
        train_data=samples(),
        eval_data=heldout(),
        metrics={"accuracy": accuracy},
        pipeline=raypipe.PipelineConfig(
            minibatch_size=MINIBATCH, seed=SEED, transport="tcp", retune_interval_steps=0, verify="off",
            eval_interval_steps=EVAL_EVERY, **pipeline,
        ),
        scaling_config=SimpleNamespace(num_workers=asked.workers, resources_per_worker={"CPU": CPU_SHARE}),
        run_config=SimpleNamespace(name="run", storage_path=folder),
    )  # fmt: skip


def plan_of(asked: Asked, replicas: Sequence[int] | str = "auto") -> Plan:
    """What the planner makes of a profile that is measured here and of links with this rate.

    Args:
        replicas: workers by stage, where it is to have no choice.
    """
    devices = tuple(Device(f"worker{i}") for i in range(asked.workers))
    cluster = Cluster(devices, (Link(asked.rate_bytes_s, LATENCY_S),))
    stages: dict[str, Any] = {} if isinstance(replicas, str) else {"num_stages": len(replicas)}
    # Kept profiles know a layer by its operations, not by how long it sleeps.
    os.environ["RAYPIPE_CACHE_DIR"] = _profiles(asked.layers).name
    with tempfile.TemporaryDirectory(prefix="bench-vs-dp-") as folder:
        given = replicas if isinstance(replicas, str) else list(replicas)
        return _trainer(asked, folder, num_replicas=given, **stages).plan(cluster=cluster)


@functools.cache
def _profiles(model: Model) -> tempfile.TemporaryDirectory[str]:
    """Where its profile is kept until this process ends, so that all its plans are made from one."""
    return tempfile.TemporaryDirectory(prefix="bench-vs-dp-")


def run_plan(asked: Asked, plan: Plan, enough: float, *, local: bool = False) -> Ran:
    """Train by this plan on Ray actors.

    Args:
        enough: held-out accuracy.
        local: in threads of this process, whose links are free.
    """
    assert plan.spec is not None
    fields: dict[str, Any] = {"partitioner": tuple(str(at) for at in plan.partition.cuts)}
    if plan.partition.num_stages == 1:
        fields = {"partitioner": "parameters", "num_stages": 1}
    if plan.spec.slack:
        fields["slack"] = list(plan.spec.slack)
    with tempfile.TemporaryDirectory(prefix="bench-vs-dp-") as folder:
        trainer = _trainer(
            asked, folder, schedule=plan.spec.kind, num_microbatches=plan.num_microbatches,
            num_replicas=list(plan.partition.replicas), num_lanes=plan.schedule.wiring.lanes, **fields,
        )  # fmt: skip
        result = trainer.fit(num_steps=asked.steps, local=local, progress=False)
        traced = stage_seconds(Path(folder) / "run" / "timeline" / "trace.json", plan.partition.num_stages)
    # What follows an evaluation begins late.
    steady = [r for r in result.records if r.step >= WARM_UP and r.step % EVAL_EVERY] or result.records
    told = [(r.step + 1, dict(r.evaluation)["eval_accuracy"]) for r in result.records if r.evaluation]
    return Ran(
        step_s=median(r.seconds for r in steady),
        step_bytes=median(r.link_bytes_per_s * r.seconds for r in steady),
        losses=[r.loss for r in result.records],
        reached=next((step for step, value in told if value >= enough), 0),
        accuracy=told[-1][1] if told else 0.0,
        stage_s=traced,
    )


def stage_seconds(trace: Path, num_stages: int) -> tuple[tuple[float, float], ...]:
    """(forward, backward) seconds of a micro-batch by stage, means over the measured step that a run has kept."""
    events = json.loads(trace.read_text())["traceEvents"]
    measured = next(e["pid"] for e in events if e["name"] == "process_name" and "measured" in e["args"]["name"])
    took: dict[tuple[int, bool], dict[int, float]] = {}
    for event in events:
        if event["pid"] == measured and event.get("cat") in ("F", "B", "I", "W"):  # one may be split to be timed: I, W
            args, is_forward = event["args"], event["cat"] == "F"
            of_stage = took.setdefault((args["stage"], is_forward), {})
            of_stage[args["microbatch"]] = of_stage.get(args["microbatch"], 0.0) + event["dur"] / 1e6
    forward_s, backward_s = ([mean(took[s, way].values()) for s in range(num_stages)] for way in (True, False))
    return tuple(zip(forward_s, backward_s, strict=True))


def shape_of(plan: Plan) -> str:
    """Its workers by stage, and in how many micro-batches."""
    return f"{'-'.join(map(str, plan.partition.replicas))} x {plan.num_microbatches}"

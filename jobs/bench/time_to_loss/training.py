"""Training of a small byte model on four stages that take fixed times, like devices, over links of a fixed latency.

Everything but the times is real: ``fit(local=True)`` trains the stages in threads, with the rows, messages, weight
versions and optimizers that actors have. A thread that has computed a forward or a backward sleeps until the device
would have ended it, and one that has received a message until the link would have delivered it:

    a forward        begin + forward_s        B: begin + backward_s        I and W: begin + backward_s / 2 each
    a message        sent + latency_s; any number of messages is on a link at once

So four threads on few cores behave like four devices, as long as computing takes less than the emulated times.
``Ran.work_share`` is the share of them that it took.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import raypipe
from jobs.bench.convergence import delayed
from jobs.bench.convergence.bench import rate_factor
from jobs.bench.convergence.muon import BatchedMuon
from jobs.bench.convergence.tasks import PARTS, TASKS, Task
from raypipe.engine.device.device import Mark
from raypipe.engine.messages.channel import InMemoryChannel, Message
from raypipe.engine.stage_runner import StageRunner
from raypipe.ir.schedule import Action, Op

__all__ = ["EVERY", "MICROBATCHES", "STAGES", "Device", "Ran", "Way", "arithmetic", "train"]

STAGES, MICROBATCHES = 4, 8
PER_STAGE = PARTS // STAGES
EVERY = 10
"""Updates from one held-out loss to the next."""


class Way(NamedTuple):
    """Way to train.

    Attributes:
        slack: slack of the schedule by hop; empty for the default.
        correction: ``stale_correction``.
    """

    schedule: str
    rate: float
    slack: tuple[int, ...] = ()
    correction: str = "none"


class Device(NamedTuple):
    """Emulated seconds: of a micro-batch's forward and backward on a stage, and of a message on a link."""

    forward_s: float
    backward_s: float
    latency_s: float


class Ran(NamedTuple):
    """Training that has ended.

    Attributes:
        losses: training loss of every update in nats per byte.
        step_s: seconds of every update, from the end of the one before.
        schedules: names of the schedules that steps had, in the order of their first step.
        heldout: held-out losses in nats per byte, one after every EVERY updates.
        work_share: seconds in which stages computed forwards and backwards over the emulated seconds of these.
    """

    losses: list[float]
    step_s: list[float]
    schedules: list[str]
    heldout: list[float]
    work_share: float


def _task(updates: int) -> Task:
    """Return the task "text" of bench/convergence with one sample per micro-batch and so many updates."""
    return dataclasses.replace(TASKS["text"], batch=MICROBATCHES, num_updates=updates)


class KeepingOptimizer:
    """Optimizer of a stage that keeps copies of its parameters every EVERY updates, which takes no emulated time.

    Args:
        named: parameters of the stage by name.
        rate: learning rate of all parameters.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], rate: float) -> None:
        self._named = dict(named)
        matrices = {name for name, p in self._named.items() if p.ndim == 2 and 0 < int(name.split(".")[0]) < PARTS - 1}
        others = [p for name, p in self._named.items() if name not in matrices]
        self.held: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=rate, fused=True)]
        if matrices:
            own = [p for name, p in self._named.items() if name in matrices]
            self.held.append(BatchedMuon(own, rate))
        self.updates, self.kept = 0, list[dict[str, torch.Tensor]]()

    def step(self) -> None:
        for one in self.held:
            one.step()
        self.updates += 1
        if self.updates % EVERY == 0:
            self.kept.append({name: p.detach().clone() for name, p in self._named.items()})


def train(way: Way, device: Device, seed: int, updates: int, num_steps: int) -> Ran:
    """Train from the beginning.

    Args:
        updates: updates over which the learning rate falls.
        num_steps: updates after which training ends.
    """
    task, optimizers = _task(updates), list[KeepingOptimizer]()
    torch.manual_seed(seed)
    model = task.build()
    batches = itertools.islice(task.batches(seed), num_steps)
    rows = TensorDataset(*map(torch.cat, zip(*batches, strict=True)))

    def optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> KeepingOptimizer:
        optimizers.append(KeepingOptimizer(named, way.rate))
        return optimizers[-1]

    with tempfile.TemporaryDirectory(prefix="time-to-loss-") as folder, _emulated(device) as clock:
        trainer = raypipe.PipelineTrainer(
            model,
            loss_fn=task.loss_fn,
            optimizer=optimizer,
            lr_scheduler=lambda one: LambdaLR(one, lambda update: rate_factor(update, updates)),
            train_data=DataLoader(rows, batch_size=MICROBATCHES),
            pipeline=raypipe.PipelineConfig(
                num_stages=STAGES,
                minibatch_size=MICROBATCHES,
                num_microbatches=MICROBATCHES,
                schedule=way.schedule,
                partitioner=tuple(str(stage * PER_STAGE) for stage in range(1, STAGES)),
                slack=way.slack or "auto",
                stale_correction=way.correction,
                profile_budget_s=1.0,
            ),
            scaling_config=SimpleNamespace(num_workers=STAGES),
            run_config=SimpleNamespace(name="run", storage_path=folder),
        )
        planned = trainer.plan().schedule.kind
        records = list(trainer.fit(num_steps=num_steps, local=True, progress=False).records)
    stages = [one.kept for one in optimizers[-STAGES:]]  # earlier ones were tried while the plan was made
    heldout = []
    for parts in zip(*stages, strict=True):
        model.load_state_dict({name: tensor for part in parts for name, tensor in part.items()})
        heldout.append(task.heldout_loss(model))
    return Ran(
        [record.loss for record in records],
        [record.seconds for record in records],
        list(dict.fromkeys(record.schedule or planned for record in records)),
        heldout,
        clock.work_s / clock.emulated_s,
    )


def arithmetic(way: Way, seed: int, updates: int) -> list[float]:
    """Compute what ``train`` calls ``heldout`` without a pipeline, up to the rounding of sums over micro-batches."""
    task = _task(updates)
    torch.manual_seed(seed)
    model = task.build()
    parts = list(model.named_children())
    stages = [parts[first : first + PER_STAGE] for first in range(0, PARTS, PER_STAGE)]
    steppers = []
    for stage, own in enumerate(stages):
        named = [(f"{at}.{name}", p) for at, part in own for name, p in part.named_parameters()]
        held = KeepingOptimizer(named, way.rate).held
        for group in (group for one in held for group in one.param_groups):
            group["stage"] = stage
        steppers += held
    heldout = dict[int, float]()

    def rate(update: int) -> float:  # called before an update, with the weights of all updates before
        if update and update % EVERY == 0 and update not in heldout:
            heldout[update] = task.heldout_loss(model)
        return rate_factor(update, updates)

    delayed.train(
        model,
        [[part for _, part in own] for own in stages],
        (1 if way.schedule == "2bw" else 0,) * STAGES,
        task.batches(seed),
        loss_fn=task.loss_fn,
        steppers=steppers,
        rate=rate,
        correction=way.correction,
    )
    return [*heldout.values(), *[task.heldout_loss(model)] * (updates % EVERY == 0)]


class _Clock:
    """Sum of all stages' seconds in forwards and backwards, real and emulated."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.work_s = self.emulated_s = 0.0

    def add(self, work_s: float, emulated_s: float) -> None:
        with self._lock:
            self.work_s += work_s
            self.emulated_s += emulated_s


@contextlib.contextmanager
def _emulated(device: Device) -> Iterator[_Clock]:
    """Let actions that train take the device's seconds, and messages the link's, as far as they do not take longer."""
    plain_run_of, plain_recv, clock = StageRunner.run_of, InMemoryChannel.recv, _Clock()
    half_s = device.backward_s / 2
    of_op_s = {Op.F: device.forward_s, Op.B: device.backward_s, Op.I: half_s, Op.W: half_s}

    def run_of(self: StageRunner, op: Op) -> Callable[[Action, Mark], None]:
        plain = plain_run_of(self, op)

        def run(action: Action, since: Mark) -> None:
            begins_s = time.perf_counter()
            plain(action, since)
            if self._training and (seconds := of_op_s.get(op)):
                work_s = time.perf_counter() - begins_s
                clock.add(work_s, seconds)
                time.sleep(max(0.0, seconds - work_s))

        return run

    def recv(self: InMemoryChannel, action: Action, timeout_s: float) -> Message:
        message = plain_recv(self, action, timeout_s)
        if action.op in (Op.SEND_F, Op.SEND_B) and device.latency_s:
            arrives_s = message.stamp.arrived_at_s + device.latency_s
            message.stamp = message.stamp._replace(arrived_at_s=arrives_s)  # the controller measures links by it
            time.sleep(max(0.0, arrives_s - time.time()))
        return message

    StageRunner.run_of, InMemoryChannel.recv = run_of, recv  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        StageRunner.run_of, InMemoryChannel.recv = plain_run_of, plain_recv  # type: ignore[method-assign]

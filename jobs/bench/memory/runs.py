"""The measured runs of ``bench/memory`` and ``bench/lv``: a model of square layers, and the sizes of stages' processes.

Every run is a process of its own that this one watches from outside. The first layer of a watched stage leaves one byte
in a file named after stage and process for every forward, which is how a watcher knows the stage's process and how far
it is. Once per mini-batch the watcher resets that process's high-water mark (5 into clear_refs) and notes what it
reached (VmHWM); the largest one between the warm-up and the last mini-batch is the peak, less that of a model of no
size. So imports, Ray and the final checkpoint are not in it, everything that training holds is.

glibc must give memory back for that: MALLOC_MMAP_THRESHOLD_ is set for all processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import raypipe
from jobs.bench.lv.policy import LV
from jobs.lib.pipeline_nets import Repeated

__all__ = [
    "CANDIDATES", "MICROBATCHES", "OPTIMIZERS", "STAGES", "TORCH", "Sizes", "Told", "Watched", "activation_share",
    "peak_of", "predicted", "run", "weight_bytes",
]  # fmt: skip

STAGES, MICROBATCHES = 4, 4
"""Of bench/memory."""
LIMIT_S = 300.0
POLL_S = 0.002
CANDIDATES: dict[str, dict[str, Any] | None] = {
    "stash": {"schedule": "pipedream"},
    "ring": {"schedule": "pipedream", "weight_versions": 2},
    "2bw": {"schedule": "2bw"},
    "gpipe": {"schedule": "gpipe"},
    "lv": LV,
    "torch_1f1b": None,
    "torch_gpipe": None,
}
"""Fields of PipelineConfig; None is torch's own runtime."""
TORCH = {"torch_1f1b": "Schedule1F1B", "torch_gpipe": "ScheduleGPipe"}
"""Classes of torch.distributed.pipelining."""


class Sizes(NamedTuple):
    """Square layers of ``width`` features, ``depth`` of them on stage 0 and ``later`` on the others.

    Attributes:
        microbatch: samples.
        watched: so many stages from the first on are watched, each in a process of its own.
    """

    width: int = 1024
    depth: int = 12
    later: int = 2
    microbatch: int = 32
    num_steps: int = 6
    stages: int = STAGES
    microbatches: int = MICROBATCHES
    watched: int = 1


class _Mark(torch.autograd.Function):
    """x as it is; leaves a byte behind."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, folder: str, stage: int) -> torch.Tensor:
        with (Path(folder) / f"{stage}-{os.getpid()}").open("ab") as file:
            file.write(b".")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


class Mark(nn.Module):
    """Counts forwards of a stage, see the module."""

    def __init__(self, folder: str, stage: int = 0) -> None:
        super().__init__()
        self.folder, self.stage = folder, stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Mark.apply(x, self.folder, self.stage)


def layers(sizes: Sizes, folder: str) -> list[list[nn.Module]]:
    """By stage; the mark is the first of a watched one."""
    torch.manual_seed(0)
    stages: list[list[nn.Module]] = []
    for stage in range(sizes.stages):
        found: list[nn.Module] = [Mark(folder, stage)] if stage < sizes.watched else []
        for _ in range(sizes.later if stage else sizes.depth):
            found += [nn.Linear(sizes.width, sizes.width, bias=False), nn.Tanh()]
        stages.append(found)
    return stages


def weight_bytes(sizes: Sizes) -> int:
    """Of stage 0."""
    return 4 * sizes.depth * sizes.width**2


def activation_share(sizes: Sizes) -> float:
    """Activations of all micro-batches in flight on stage 0, over its weights: a Tanh keeps its output."""
    return sizes.stages * 4 * sizes.microbatch * sizes.width * (sizes.depth + 1) / weight_bytes(sizes)


def samples(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one micro-batch, (b, width): the same ones every time, so that data take no memory."""
    drawn = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(sizes.microbatch, sizes.width, generator=drawn) for _ in range(2))
    return inputs, targets


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-3, momentum=0.9),
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-4),
}


def trainer_of(sizes: Sizes, candidate: str, optimizer: str, folder: str) -> raypipe.PipelineTrainer:
    """Ours."""
    import ray.train

    stages = layers(sizes, folder)
    num_microbatches = sizes.microbatches * sizes.num_steps
    starts = [sum(map(len, stages[:stage])) for stage in range(1, sizes.stages)]
    return raypipe.PipelineTrainer(
        nn.Sequential(*(layer for stage in stages for layer in stage)),
        loss_fn=functional.mse_loss,
        optimizer=OPTIMIZERS[optimizer],
        # Copies: a row that is a view would take the whole tensor with it into every process.
        train_data=Repeated(
            [(x.clone(), y.clone()) for x, y in zip(*samples(sizes), strict=True)], sizes.microbatch * num_microbatches
        ),
        pipeline=raypipe.PipelineConfig(
            num_stages=sizes.stages,
            minibatch_size=sizes.microbatch * sizes.microbatches,
            num_microbatches=sizes.microbatches,
            partitioner=tuple(map(str, starts)),
            **(CANDIDATES[candidate] or {}),
        ),
        scaling_config=ray.train.ScalingConfig(num_workers=sizes.stages, resources_per_worker={"CPU": 0.1}),
        run_config=ray.train.RunConfig(name="bench", storage_path=str(Path(folder).with_suffix(".run"))),
    )


def _ours(sizes: Sizes, candidate: str, optimizer: str, folder: str, local: bool) -> None:
    trainer_of(sizes, candidate, optimizer, folder).fit(num_steps=sizes.num_steps, local=local, progress=False)


def _torch_stage(rank: int, sizes: Sizes, candidate: str, optimizer: str, folder: str) -> None:
    """One process of torch.distributed.pipelining over gloo."""
    import torch.distributed as dist
    from torch.distributed import pipelining

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    store = Path(folder).with_suffix(".store")
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=LIMIT_S), sizes.stages, rank)
    try:
        module = nn.Sequential(*layers(sizes, folder)[rank])
        stepper = OPTIMIZERS[optimizer](list(module.named_parameters()))
        stage = pipelining.PipelineStage(module, rank, sizes.stages, torch.device("cpu"))
        schedule = getattr(pipelining, TORCH[candidate])(stage, sizes.microbatches, functional.mse_loss)
        inputs, targets = (part.repeat(sizes.microbatches, 1) for part in samples(sizes))
        last: dict[str, Any] = {"target": targets} if rank == sizes.stages - 1 else {}
        for _ in range(sizes.num_steps):
            schedule.step(*([inputs] if rank == 0 else []), **last)
            stepper.step()
            stepper.zero_grad()
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Watched(NamedTuple):
    """One look at a stage's process: forwards that it had begun, the peak since the last look, and shared memory."""

    forwards: int
    peak_bytes: int
    shared_bytes: int


def run(sizes: Sizes, candidate: str, optimizer: str, *, local: bool = False) -> list[list[Watched]]:
    """Train in processes of their own and watch some: what was seen of each watched stage.

    Args:
        local: all stages in threads of one process, which is then the one that is watched, as stage 0.

    Raises:
        RuntimeError: the run failed, or did not end.
    """
    assert not (local and sizes.watched > 1)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as root:
        folder = Path(root) / "marks"
        folder.mkdir()
        if CANDIDATES[candidate] is None:
            work: list[tuple[Any, tuple[Any, ...]]] = [
                (_torch_stage, (rank, sizes, candidate, optimizer, str(folder))) for rank in range(sizes.stages)
            ]
        else:
            work = [(_ours, (sizes, candidate, optimizer, str(folder), local))]
        processes = [context.Process(target=target, args=arguments) for target, arguments in work]
        try:
            for process in processes:
                process.start()
            # Our driver captures and profiles the model, so it leaves marks as well; it is not a stage.
            driver = processes[0].pid if CANDIDATES[candidate] is not None and not local else None
            seen = _watch(folder, processes, driver, sizes)
        finally:
            for process in (process for process in processes if process.pid is not None):
                process.terminate()  # ours then stops its actors; it has ended where nothing went wrong
                process.join(30)
                process.kill()
                process.join(10)
    return seen


def _watch(folder: Path, processes: list[Any], driver: int | None, sizes: Sizes) -> list[list[Watched]]:
    looks: dict[tuple[int, int], list[Watched]] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while any(process.exitcode is None for process in processes):
        if time.monotonic() > deadline_s or any(process.exitcode for process in processes):
            break
        for path in folder.iterdir():
            stage, pid = map(int, path.name.split("-"))
            forwards = path.stat().st_size
            seen = looks.setdefault((stage, pid), [])
            if pid != driver and forwards - (seen[-1].forwards if seen else 0) >= sizes.microbatches:
                found = _look(pid, forwards)
                if found is not None:
                    seen.append(found)
        time.sleep(POLL_S)
    ends = [process.exitcode for process in processes]
    if any(code != 0 for code in ends):
        raise RuntimeError(f"the run ended with {ends} after {LIMIT_S:g} s at most")
    found_looks = [(stage, seen) for (stage, pid), seen in sorted(looks.items()) if pid != driver and seen]
    stages = [stage for stage, _ in found_looks]
    if stages != list(range(sizes.watched)):
        raise RuntimeError(f"processes have run the stages {stages}, and each of the first {sizes.watched} needs one")
    return [seen for _, seen in found_looks]


def _look(pid: int, forwards: int) -> Watched | None:
    """The peak since the last look, which it resets; None where the process is gone."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except (FileNotFoundError, ProcessLookupError):
        return None
    peak, shared = (int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "RssShmem"))
    return Watched(forwards, peak, shared)


def peak_of(looks: list[Watched], num_steps: int, microbatches: int = MICROBATCHES) -> int:
    """Bytes at the fullest moment of the mini-batches between the warm-up (two) and the last one.

    Less shared memory: the initial weights arrived through Ray's object store, whose pages stay mapped although the
    store has given them to others since.

    A look tells of the time since the one before it, so the first of them belongs to the warm-up.
    """
    last = looks[-1].forwards
    first = last - (num_steps - 3) * microbatches
    return max(look.peak_bytes - look.shared_bytes for look in looks if first <= look.forwards)


class Told(NamedTuple):
    """What a plan says of every stage: bytes by purpose, and versions of the weights."""

    memory: list[dict[str, int]]
    versions: list[int]


def predicted(sizes: Sizes, candidates: Sequence[str] = tuple(CANDIDATES)) -> dict[str, Told]:
    """For those candidates that are ours, with every optimizer, as ``plan`` tells it: ``<candidate>_<optimizer>``."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as root:
        file = Path(root) / "predicted.json"
        process = context.Process(target=_predict, args=(sizes, candidates, root, str(file)))
        process.start()
        try:
            process.join(LIMIT_S)
            if process.exitcode != 0:
                raise RuntimeError(f"the predicting process ended with {process.exitcode}")
        finally:
            process.kill()
            process.join(10)
        return {name: Told(*told) for name, told in json.loads(file.read_text()).items()}


def _predict(sizes: Sizes, candidates: Sequence[str], root: str, file: str) -> None:
    torch.set_num_threads(1)
    folder = Path(root) / "marks"
    folder.mkdir()
    found, profiled = {}, None
    for candidate in candidates:
        for optimizer in OPTIMIZERS if CANDIDATES[candidate] is not None else ():
            trainer = trainer_of(sizes, candidate, optimizer, str(folder))
            profiled = profiled or trainer.profile()
            plan = trainer.plan(profiled=profiled)
            assert plan.prediction is not None
            memory = [dict(stage.memory) for stage in plan.prediction.stages]
            versions = [plan.weights.capacity(stage) for stage in range(sizes.stages)]
            found[f"{candidate}_{optimizer}"] = Told(memory, versions)
    Path(file).write_text(json.dumps(found))

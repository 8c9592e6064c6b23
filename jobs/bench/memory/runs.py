"""The measured runs of ``bench/memory``: a model of square layers in four stages, and the size of stage 0's process.

Every run is a process of its own that this one watches from outside. The model's first layer leaves one byte in a file
named after its process for every forward, which is how a watcher knows the process of stage 0 and how far it is. Once
per mini-batch the watcher resets that process's high-water mark (5 into clear_refs) and notes what it reached
(VmHWM); the largest one between the warm-up and the last mini-batch is the peak, less that of a model of no size. So
imports, Ray and the final checkpoint are not in it, everything that training holds is.

glibc must give memory back for that: MALLOC_MMAP_THRESHOLD_ is set for all processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import raypipe

__all__ = [
    "CANDIDATES", "MICROBATCHES", "OPTIMIZERS", "STAGES", "Sizes", "Watched", "activation_share", "peak_of",
    "predicted", "run", "weight_bytes",
]  # fmt: skip

STAGES, MICROBATCHES = 4, 4
LIMIT_S = 300.0
POLL_S = 0.002
CANDIDATES: dict[str, dict[str, Any] | None] = {
    "stash": {"schedule": "pipedream"},
    "ring": {"schedule": "pipedream", "weight_versions": 2},
    "2bw": {"schedule": "2bw"},
    "gpipe": {"schedule": "gpipe"},
    "torch_1f1b": None,
}
"""Fields of PipelineConfig; None is torch's own runtime."""


class Sizes(NamedTuple):
    """Square layers of ``width`` features, ``depth`` of them on stage 0 and ``later`` on the others, which only have to
    be there; samples per micro-batch.
    """

    width: int = 1024
    depth: int = 12
    later: int = 2
    microbatch: int = 32
    num_steps: int = 6


class _Mark(torch.autograd.Function):
    """x as it is; leaves a byte behind."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, folder: str) -> torch.Tensor:
        with (Path(folder) / str(os.getpid())).open("ab") as file:
            file.write(b".")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Mark(nn.Module):
    """Counts forwards, see the module."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Mark.apply(x, self.folder)


def layers(sizes: Sizes, folder: str) -> list[list[nn.Module]]:
    """By stage; the mark is the first of all."""
    torch.manual_seed(0)
    stages: list[list[nn.Module]] = []
    for stage in range(STAGES):
        found: list[nn.Module] = [] if stage else [Mark(folder)]
        for _ in range(sizes.later if stage else sizes.depth):
            found += [nn.Linear(sizes.width, sizes.width, bias=False), nn.Tanh()]
        stages.append(found)
    return stages


def weight_bytes(sizes: Sizes) -> int:
    """Of stage 0."""
    return 4 * sizes.depth * sizes.width**2


def activation_share(sizes: Sizes) -> float:
    """Activations of all micro-batches in flight on stage 0, over its weights: a Tanh keeps its output."""
    return STAGES * 4 * sizes.microbatch * sizes.width * (sizes.depth + 1) / weight_bytes(sizes)


def data(sizes: Sizes) -> TensorDataset:
    count = sizes.microbatch * MICROBATCHES * sizes.num_steps
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(count, sizes.width, generator=drawn) for _ in range(2)))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-3, momentum=0.9),
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-4),
}


def trainer_of(sizes: Sizes, candidate: str, optimizer: str, folder: str) -> raypipe.PipelineTrainer:
    """Ours."""
    import ray.train

    stages = layers(sizes, folder)
    starts = [sum(map(len, stages[:stage])) for stage in range(1, STAGES)]
    return raypipe.PipelineTrainer(
        nn.Sequential(*(layer for stage in stages for layer in stage)),
        loss_fn=functional.mse_loss,
        optimizer=OPTIMIZERS[optimizer],
        train_data=data(sizes),
        pipeline=raypipe.PipelineConfig(
            num_stages=STAGES,
            minibatch_size=sizes.microbatch * MICROBATCHES,
            num_microbatches=MICROBATCHES,
            partitioner=tuple(map(str, starts)),
            **(CANDIDATES[candidate] or {}),
        ),
        scaling_config=ray.train.ScalingConfig(num_workers=STAGES, resources_per_worker={"CPU": 0.1}),
        run_config=ray.train.RunConfig(name="bench", storage_path=str(Path(folder).with_suffix(".run"))),
    )


def _ours(sizes: Sizes, candidate: str, optimizer: str, folder: str, local: bool) -> None:
    trainer_of(sizes, candidate, optimizer, folder).fit(num_steps=sizes.num_steps, local=local, progress=False)


def _torch_stage(rank: int, sizes: Sizes, optimizer: str, folder: str) -> None:
    """One process of torch.distributed.pipelining, 1F1B over gloo."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    store = Path(folder).with_suffix(".store")
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=LIMIT_S), STAGES, rank)
    try:
        module = nn.Sequential(*layers(sizes, folder)[rank])
        stepper = OPTIMIZERS[optimizer](list(module.named_parameters()))
        stage = PipelineStage(module, rank, STAGES, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICROBATCHES, functional.mse_loss)
        inputs, targets = data(sizes).tensors
        size = sizes.microbatch * MICROBATCHES
        for step in range(sizes.num_steps):
            at = slice(step * size, (step + 1) * size)
            last: dict[str, Any] = {"target": targets[at]} if rank == STAGES - 1 else {}
            schedule.step(*([inputs[at]] if rank == 0 else []), **last)
            stepper.step()
            stepper.zero_grad()
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Watched(NamedTuple):
    """One look at stage 0's process: forwards that it had begun, the peak since the last look, and shared memory."""

    forwards: int
    peak_bytes: int
    shared_bytes: int


def run(sizes: Sizes, candidate: str, optimizer: str, *, local: bool = False) -> list[Watched]:
    """Train in processes of their own and watch stage 0's.

    Args:
        local: all stages in threads of one process, which is then the one that is watched.

    Raises:
        RuntimeError: the run failed, or did not end.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as root:
        folder = Path(root) / "marks"
        folder.mkdir()
        if CANDIDATES[candidate] is None:
            work: list[tuple[Any, tuple[Any, ...]]] = [
                (_torch_stage, (rank, sizes, optimizer, str(folder))) for rank in range(STAGES)
            ]
        else:
            work = [(_ours, (sizes, candidate, optimizer, str(folder), local))]
        processes = [context.Process(target=target, args=arguments) for target, arguments in work]
        try:
            for process in processes:
                process.start()
            # Our driver captures and profiles the model, so it leaves marks as well; it is not a stage.
            driver = processes[0].pid if CANDIDATES[candidate] is not None and not local else None
            seen = _watch(folder, processes, driver)
        finally:
            for process in (process for process in processes if process.pid is not None):
                process.terminate()  # ours then stops its actors; it has ended where nothing went wrong
                process.join(30)
                process.kill()
                process.join(10)
    return seen


def _watch(folder: Path, processes: list[Any], driver: int | None) -> list[Watched]:
    looks: dict[int, list[Watched]] = {}
    deadline_s = time.monotonic() + LIMIT_S
    while any(process.exitcode is None for process in processes):
        if time.monotonic() > deadline_s or any(process.exitcode for process in processes):
            break
        for path in folder.iterdir():
            pid, forwards = int(path.name), path.stat().st_size
            seen = looks.setdefault(pid, [])
            if pid != driver and forwards - (seen[-1].forwards if seen else 0) >= MICROBATCHES:
                found = _look(pid, forwards)
                if found is not None:
                    seen.append(found)
        time.sleep(POLL_S)
    ends = [process.exitcode for process in processes]
    if any(code != 0 for code in ends):
        raise RuntimeError(f"the run ended with {ends} after {LIMIT_S:g} s at most")
    found_looks = [seen for pid, seen in looks.items() if pid != driver and seen]
    if len(found_looks) != 1:
        raise RuntimeError(f"{len(found_looks)} processes have run stage 0, not one")
    return found_looks[0]


def _look(pid: int, forwards: int) -> Watched | None:
    """The peak since the last look, which it resets; None where the process is gone."""
    try:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    except (FileNotFoundError, ProcessLookupError):
        return None
    peak, shared = (int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "RssShmem"))
    return Watched(forwards, peak, shared)


def peak_of(looks: list[Watched], num_steps: int) -> int:
    """Bytes at the fullest moment of the mini-batches between the warm-up (two) and the last one.

    Less shared memory: the initial weights arrived through Ray's object store, whose pages stay mapped although the
    store has given them to others since.

    A look tells of the time since the one before it, so the first of them belongs to the warm-up.
    """
    last = looks[-1].forwards
    first = last - (num_steps - 3) * MICROBATCHES
    return max(look.peak_bytes - look.shared_bytes for look in looks if first <= look.forwards)


def predicted(sizes: Sizes) -> dict[str, dict[str, int]]:
    """Stage 0's bytes by purpose, for every candidate of ours with every optimizer, as ``plan`` tells them."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as root:
        file = Path(root) / "predicted.json"
        process = context.Process(target=_predict, args=(sizes, root, str(file)))
        process.start()
        try:
            process.join(LIMIT_S)
            if process.exitcode != 0:
                raise RuntimeError(f"the predicting process ended with {process.exitcode}")
        finally:
            process.kill()
            process.join(10)
        found: dict[str, dict[str, int]] = json.loads(file.read_text())
    return found


def _predict(sizes: Sizes, root: str, file: str) -> None:
    torch.set_num_threads(1)
    folder = Path(root) / "marks"
    folder.mkdir()
    found, profiled = {}, None
    for candidate, fields in CANDIDATES.items():
        for optimizer in OPTIMIZERS if fields is not None else ():
            trainer = trainer_of(sizes, candidate, optimizer, str(folder))
            profiled = profiled or trainer.profile()
            prediction = trainer.plan(profiled=profiled).prediction
            assert prediction is not None
            found[f"{candidate}_{optimizer}"] = dict(prediction.stages[0].memory)
    Path(file).write_text(json.dumps(found))

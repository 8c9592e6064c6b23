"""Pipeline on one GPU: a GPT of 1 B parameters in bf16, beside plain PyTorch and torch's pipelining.

    step_s_*                 seconds of a step: forwards, backwards of all micro-batches, AdamW; under bf16 autocast
        plain                plain PyTorch: mini-batches are copied from pinned memory without a wait, AdamW is fused
        graphs               one stage of ours whose forwards and backwards are CUDA graphs: --quick on a GPU
        stage, two_stages    ours, in threads with the same GPU; messages between two go through host memory
        torch, torch_two_stages   torch.distributed.pipelining in one process, which passes tensors without copies
    *_over_plain             seconds over those of plain PyTorch
    tokens_per_second_*      of a step
    mfu_*                    operations of the model, each counted once, over the peak of the GPU's data sheet
    peak_over_plain          peak memory of the device, one stage over plain PyTorch
    peak_over_plan           peak memory of one stage with precision="bf16", over the bytes that its plan predicts
    seconds_over_plan        a step of "stage" over that of its plan, which estimates it from the data sheet

Two stages pay for messages, but share the one GPU. All take turns. Without a GPU nothing is measured; --device cpu
tests the benchmark, with figures that do not apply to a GPU. A GPU whose data sheet is not known here needs
--peak-tflops for mfu_*. If kernels are short, the host is the bottleneck: --where lists its operations.
"""

from __future__ import annotations

import copy
import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from jobs.bench.gpu import torch_stages, where
from jobs.lib.common import Bench, median
from jobs.lib.machine import gpu_clocks
from jobs.lib.on_device import adamw, gpt, pipeline, sent, texts, trainer_of
from jobs.train.lm import loss_fn
from raypipe.engine.device.cuda_device import CudaDevice, why_not
from raypipe.engine.device.device import CPU, Device
from raypipe.engine.torch_settings import one_thread
from raypipe.profiling.rates import GPUS, kind_of

STAGES = {"stage": 1, "two_stages": 2}
TORCH = {"torch": 1, "torch_two_stages": 2}
LABELS = ("plain", *STAGES, *TORCH)
GRAPHS = "graphs"


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a step; ``steps`` after ``warm_up`` are measured, ``rounds`` times.

    ``graphs`` adds the candidate with CUDA graphs, which save launches: a small model is limited by them.
    """

    context: int = 1024
    width: int = 2048
    depth: int = 20
    minibatch: int = 32
    microbatches: int = 8
    warm_up: int = 3
    steps: int = 10
    rounds: int = 3
    graphs: bool = False


TINY = Size(16, 32, 2, 4, 2, 1, 2, 1)
"""Sizes for a CPU."""
BENCH = Bench(
    "gpu",
    __doc__,
    settings=Size(),
    quick=Size(width=512, depth=8, minibatch=16, warm_up=2, steps=4, rounds=1, graphs=True),
    layout={
        "seconds of a step": r"step_s_(\w+)",
        "over plain PyTorch": r"(\w+)_over_plain",
        "tokens per second": r"tokens_per_second_(\w+)",
        "of the data sheet": r"mfu_(\w+)",
        "peak": r"peak_over_(\w+)",
        "over the plan's": r"(seconds)_over_plan",
    },
    targets={"stage_over_plain": "<= 1.02", "peak_over_plan": "0.9 to 1.1"},
    options={
        "--device": {"default": "cuda", "choices": ("cuda", "cpu"), "help": "cpu: a tiny model, and no record"},
        "--rounds": {"type": int, "default": None, "metavar": "N", "help": "in which all candidates take turns"},
        "--steps": {"type": int, "default": None, "metavar": "N", "help": "of each candidate in a round"},
        "--where": {"action": "store_true", "help": "print what takes the host's time in a step, and measure nothing"},
        "--peak-tflops": {"type": float, "default": None, "help": "of the GPU, dense bf16, by its data sheet"},
    },
)


@functools.cache
def initial(size: Size) -> torch.nn.Module:
    """Make the model, once: every candidate trains a copy."""
    return gpt(size.context, size.width, size.depth)


def fresh(size: Size) -> torch.nn.Module:
    """Copy of the model on the CPU, with the same parameters every time."""
    return copy.deepcopy(initial(size))


def minibatches(size: Size) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield (inputs, targets) of mini-batches in host memory, without end."""
    columns = texts(4 * size.minibatch, size.context).tensors
    while True:
        yield from zip(*(column.split(size.minibatch) for column in columns), strict=True)


def plain(size: Size, device: Device) -> Iterator[None]:
    """Run one step of plain PyTorch at each turn, finished when it returns."""
    place = device.place
    model = fresh(size).to(place)
    optimizer = adamw(model.parameters())
    for minibatch in minibatches(size):
        for x, y in zip(*(column.chunk(size.microbatches) for column in sent(minibatch, place)), strict=True):
            with torch.autocast(place.type, torch.bfloat16, cache_enabled=False):
                loss = loss_fn(model(x), y) / size.microbatches
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        yield


def measured(run: Iterator[Any], size: Size) -> list[float]:
    """Measure the seconds of the steps after the warm-up."""
    for _ in range(size.warm_up):
        next(run)
    found = []
    for _ in range(size.steps):
        begin_s = time.perf_counter()
        next(run)
        found.append(time.perf_counter() - begin_s)
    return found


@contextmanager
def running(label: str, size: Size, device: Device, device_of: Callable[[], Device]) -> Iterator[Iterator[Any]]:
    """Enter the steps of a candidate, whose operations on the host have one thread each, as those of stages do."""
    with ExitStack() as stack:
        run: Any
        if label == "plain":
            run = plain(size, device)
        elif label in TORCH:
            model = fresh(size)
            run = torch_stages.steps(model, minibatches(size), adamw, device, TORCH[label], size.microbatches)  # type: ignore[arg-type]
            stack.callback(run.close)
        else:
            run = stack.enter_context(ours(size, device_of, STAGES.get(label, 1), "bf16-autocast", label == GRAPHS))
        stack.enter_context(one_thread())  # what went before was planned on all cores
        yield run


def trial(label: str, size: Size, device_of: Callable[[], Device]) -> tuple[list[float], int]:
    """Measure (seconds of the steps, peak bytes of the device) of a candidate, and free it."""
    device = device_of()
    if device.place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device.place)
    with running(label, size, device, device_of) as run:
        return measured(run, size), device.peak_bytes()


def where_of(size: Size, device_of: Callable[[], Device]) -> str:
    """Format the table of the host's time in a step of plain PyTorch and of one stage."""
    size, device, found = replace(size, warm_up=where.WARM_UP, steps=where.STEPS), device_of(), []
    for label in ("plain", "stage"):
        with running(label, size, device, device_of) as run:
            found.append(where.profiled(run, device.place))
    return where.compared(*found)


@contextmanager
def ours(
    size: Size, device_of: Callable[[], Device], num_stages: int, precision: str, graphs: bool = False
) -> Iterator[Iterator[Any]]:
    """Enter the steps of a pipeline in threads."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        data, config = texts(4 * size.minibatch, size.context), config_of(size, num_stages, precision)
        if graphs:
            config |= {"cuda_graphs": True, "scaling_config": SimpleNamespace(num_workers=1, use_gpu=True)}
        with pipeline(fresh(size), data, Path(folder), lambda worker: device_of(), **config) as (_, carry_out):
            yield carry_out(size.warm_up + size.steps)


def config_of(size: Size, num_stages: int, precision: str) -> dict[str, Any]:
    """Build fields of PipelineConfig: partitioner and loss_reduction are given, to avoid computing them on the CPU."""
    return {
        "num_stages": num_stages, "minibatch_size": size.minibatch, "num_microbatches": size.microbatches,
        "schedule": "1f1b", "precision": precision, "partitioner": "parameters", "loss_reduction": "mean",
    }  # fmt: skip


def planned(size: Size, device_of: Callable[[], Device], precision: str) -> tuple[float, int]:
    """Plan one stage from shapes alone: (seconds of a step, bytes of the stage)."""
    data = texts(4 * size.minibatch, size.context)
    places = SimpleNamespace(num_workers=1, use_gpu=device_of().place.type == "cuda")
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        config = config_of(size, 1, precision) | {"partitioner": "auto", "weights_on": "workers"}
        made = trainer_of(lambda: gpt(size.context, size.width, size.depth), data, Path(folder), places, **config)
        prediction = made.plan().prediction
    assert prediction is not None, "made from shapes"
    return prediction.step_s, prediction.stages[0].memory_bytes


def peak_in_bf16(size: Size, device_of: Callable[[], Device]) -> int:
    """Measure the device's peak bytes with one stage in bf16; 0 on a processor, which does not count them."""
    device = device_of()
    if device.place.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device.place)
    with ours(size, device_of, 1, "bf16") as run:
        for _ in range(size.warm_up):
            next(run)
        return device.peak_bytes()


def flops_of(size: Size) -> float:
    """Count FLOPs of a step: 6 for each parameter and token, and those of attention (arXiv:2204.02311, B)."""
    model = initial(size)
    looked_up = sum(p.numel() for name, p in model.named_parameters() if name.startswith(("embed.", "position.")))
    parameters = sum(p.numel() for p in model.parameters()) - looked_up
    of_token = 6 * parameters + 12 * size.depth * size.width * size.context
    return float(of_token * size.minibatch * size.context)


def measure(
    size: Size, device_of: Callable[[], Device], peak_flops: float | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Measure (figures, raw numbers) of rounds in which the candidates take turns.

    Args:
        peak_flops: the device's peak FLOPs per second; None leaves out mfu_*.
    """
    labels = (*LABELS, GRAPHS) if size.graphs and device_of().graphs else LABELS
    seconds: dict[str, list[float]] = {label: [] for label in labels}
    peaks = dict.fromkeys(labels, 0)
    for _ in range(size.rounds):
        for label in labels:
            found, peak = trial(label, size, device_of)
            seconds[label] += found
            peaks[label] = max(peaks[label], peak)
            print(f"{label}: {median(found) * 1e3:.2f} ms a step, peak {peak / 2**20:.0f} MiB", flush=True)
            gc.collect()
    raw: dict[str, Any] = {"step_s": seconds, "peak_bytes": peaks, "clocks": gpu_clocks()}  # soon after the last step
    tokens = size.minibatch * size.context
    step_s = {label: median(found) for label, found in seconds.items()}
    figures = {f"step_s_{label}": step_s[label] for label in labels}
    figures |= {f"tokens_per_second_{label}": tokens / step_s[label] for label in labels}
    figures |= {f"{label}_over_plain": step_s[label] / step_s["plain"] for label in labels[1:]}
    figures["peak_over_plain"] = peaks["stage"] / max(peaks["plain"], 1)
    if peak_flops:
        figures |= {f"mfu_{label}": flops_of(size) / step_s[label] / peak_flops for label in labels}
    figures["seconds_over_plan"] = step_s["stage"] / planned(size, device_of, "bf16-autocast")[0]
    promised, in_bf16 = planned(size, device_of, "bf16")[1], peak_in_bf16(size, device_of)
    if in_bf16:
        figures["peak_over_plan"] = in_bf16 / promised
    return figures, raw | {"planned_bytes": promised, "peak_bytes_bf16": in_bf16}


def main() -> int:
    run = BENCH.begin()
    options, on_cpu = run.options, run.options.device == "cpu"
    if not on_cpu and (reason := why_not()):
        print(f"nothing to measure: {reason}")
        return 0
    options.quick = options.quick or on_cpu
    size = run.settings
    if on_cpu:
        size = replace(TINY, rounds=options.rounds or TINY.rounds, steps=options.steps or TINY.steps)
    device_of: Callable[[], Device] = (lambda: CPU) if on_cpu else CudaDevice
    if options.where:
        print(where_of(size, device_of))
        return 0
    place = "cpu" if on_cpu else torch.cuda.get_device_name()
    kind = kind_of(place)
    tflops = options.peak_tflops or (GPUS[kind].half_tflops if kind in GPUS else None)
    if tflops is None and not on_cpu:
        print(f"no mfu_*: the data sheet of {place} is not known here; give --peak-tflops NUMBER")
    run.figures, run.raw = measure(size, device_of, None if tflops is None else tflops * 1e12)
    parameters = sum(p.numel() for p in initial(size).parameters())
    run.table(f"GPT of {parameters / 1e6:.0f} M parameters on {place}", ("figure", "value"), run.figures.items())
    planned_mib, peak_mib = run.raw["planned_bytes"] / 2**20, run.raw["peak_bytes_bf16"] / 2**20
    print(f"one stage in bf16: {planned_mib:.0f} MiB planned, {peak_mib:.0f} MiB at most in use")
    run.raw |= {"device": place, "size": asdict(size)}
    run.end()
    return 0

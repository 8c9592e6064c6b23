"""What a pipeline costs on one GPU: a GPT under bf16 autocast, as one stage and as two, beside plain PyTorch.

    step_s_plain, _stage, _two_stages    seconds of a step: forwards, backwards of all micro-batches, AdamW
    stage_over_plain                     one stage over plain PyTorch; two_stages_over_plain
    tokens_per_second_*                  of a step
    peak_over_plain                      most memory of the device, one stage over plain PyTorch

Two stages are threads with the same GPU, whose messages go through host memory: what a message costs is in it, and no
second GPU. All take turns. Without a GPU nothing is measured; --device cpu shows that everything works, with figures
that say nothing of one.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jobs.lib import common
from jobs.lib.on_device import adamw, gpt, pipeline, texts
from jobs.train.lm import loss_fn
from raypipe.engine.cuda_device import CudaDevice, why_not
from raypipe.engine.device import CPU, Device

LAYOUT: dict[str, str] = {
    "seconds of a step": r"step_s_(\w+)",
    "over plain PyTorch": r"(\w+)_over_plain",
    "tokens per second": r"tokens_per_second_(\w+)",
}
TARGETS: dict[str, str] = {"stage_over_plain": "<= 1.02"}
STAGES = {"stage": 1, "two_stages": 2}


class Size(NamedTuple):
    """Of the model and of a step; ``steps`` after ``warm_up`` are measured, ``rounds`` times."""

    context: int = 1024
    width: int = 2048
    depth: int = 20
    minibatch: int = 32
    microbatches: int = 8
    warm_up: int = 3
    steps: int = 10
    rounds: int = 3


QUICK = Size(width=512, depth=8, minibatch=16, warm_up=2, steps=4, rounds=1)
TINY = Size(16, 32, 2, 4, 2, 1, 2, 1)
"""For a CPU."""


def plain(size: Size, device: Device) -> Iterator[None]:
    """One step of plain PyTorch at each turn, done when it returns."""
    place = device.place
    model, data = gpt(size.context, size.width, size.depth).to(place), texts(4 * size.minibatch, size.context)
    optimizer, at = adamw(model.parameters()), 0
    while True:
        for x, y in zip(*(column[at : at + size.minibatch].chunk(size.microbatches) for column in data.tensors),
                        strict=True):  # fmt: skip
            with torch.autocast(place.type, torch.bfloat16, cache_enabled=False):
                loss = loss_fn(model(x.to(place)), y.to(place)) / size.microbatches
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        float(loss.detach())
        at = (at + size.minibatch) % (4 * size.minibatch)
        yield


def measured(run: Iterator[Any], size: Size) -> list[float]:
    """Seconds of the steps after the warm-up."""
    for _ in range(size.warm_up):
        next(run)
    found = []
    for _ in range(size.steps):
        begin_s = time.perf_counter()
        next(run)
        found.append(time.perf_counter() - begin_s)
    return found


def trial(label: str, size: Size, device_of: Callable[[], Device]) -> tuple[list[float], int]:
    """(seconds of the steps, most bytes that the device had in use) of a candidate, which is gone afterwards."""
    device = device_of()
    if device.place.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device.place)
    with ExitStack() as stack:
        if label == "plain":
            run: Iterator[Any] = plain(size, device)
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-gpu-"))
            _, carry_out = stack.enter_context(
                pipeline(
                    gpt(size.context, size.width, size.depth), texts(4 * size.minibatch, size.context), Path(folder),
                    lambda worker: device_of(), num_stages=STAGES[label], minibatch_size=size.minibatch,
                    num_microbatches=size.microbatches, schedule="1f1b", precision="bf16-autocast",
                    partitioner="parameters",  # a profile would time the model on the CPU
                )
            )  # fmt: skip
            run = carry_out(size.warm_up + size.steps)
        return measured(run, size), device.peak_bytes()


def measure(size: Size, device_of: Callable[[], Device]) -> tuple[dict[str, float], dict[str, Any]]:
    """(figures, raw numbers) of rounds in which the candidates take turns."""
    labels = ("plain", *STAGES)
    seconds: dict[str, list[float]] = {label: [] for label in labels}
    peaks = dict.fromkeys(labels, 0)
    for _ in range(size.rounds):
        for label in labels:
            found, peak = trial(label, size, device_of)
            seconds[label] += found
            peaks[label] = max(peaks[label], peak)
            gc.collect()
    tokens = size.minibatch * size.context
    step_s = {label: common.median(found) for label, found in seconds.items()}
    figures = {f"step_s_{label}": step_s[label] for label in labels}
    figures |= {f"tokens_per_second_{label}": tokens / step_s[label] for label in labels}
    figures |= {f"{label}_over_plain": step_s[label] / step_s["plain"] for label in STAGES}
    figures["peak_over_plain"] = peaks["stage"] / max(peaks["plain"], 1)
    return figures, {"step_s": seconds, "peak_bytes": peaks}


def main() -> None:
    device = {"default": "cuda", "choices": ("cuda", "cpu"), "help": "cpu: a tiny model, and no record"}
    asked = common.arguments(__doc__, options={"--device": device})
    if asked.device == "cuda" and (reason := why_not()):
        print(f"nothing to measure: {reason}")
        return
    on_cpu = asked.device == "cpu"
    asked.quick = asked.quick or on_cpu
    size = TINY if on_cpu else QUICK if asked.quick else Size()
    figures, raw = measure(size, lambda: CPU if on_cpu else CudaDevice())
    where = "cpu" if on_cpu else torch.cuda.get_device_name()
    parameters = sum(p.numel() for p in gpt(size.context, size.width, size.depth).parameters())
    title = f"GPT of {parameters / 1e6:.0f} M parameters on {where}; {common.machine_line()}"
    print(common.table(title, ("figure", "value"), figures.items()))
    common.finish("gpu", figures, {**raw, "device": where, "size": size._asdict()}, asked)

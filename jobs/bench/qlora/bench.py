"""Tokens per second of QLoRA on two workers with one thread each, against one process with one thread and with all.

Adapters are trained over a Llama in NF4, quantized twice, with bitsandbytes on CPUs. One process is a plain loop of
PyTorch over the same micro-batches. ``times_one_thread`` and ``times_all_threads`` are medians over rounds of the
pipeline's tokens per second over those of one process in the same round; steps that warm up are not counted. All
threads are the machine's processors: with two, a pipeline of two workers has no more compute than that process.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from peft import LoraConfig, get_peft_model
from ray.train import RunConfig, ScalingConfig
from transformers import LlamaConfig, LlamaForCausalLM

import raypipe
from jobs.lib.common import Bench, median
from jobs.train.qlora import quantized

WARM = 2
"""Steps that are not counted."""


@dataclass(frozen=True)
class Settings:
    """Size of the model and of its data, steps of a run, and rounds."""

    layers: int = 8
    width: int = 512
    words: int = 512
    length: int = 128
    minibatch_size: int = 16
    num_microbatches: int = 8
    steps: int = 10
    rounds: int = 3


BENCH = Bench("bench_qlora", __doc__, settings=Settings(), quick=Settings(4, 128, 64, 32, 8, 4, steps=5, rounds=1))


def save_model(folder: str, settings: Settings) -> None:
    """Save a Llama with random weights."""
    config = LlamaConfig(
        vocab_size=settings.words, hidden_size=settings.width, intermediate_size=2 * settings.width,
        num_hidden_layers=settings.layers, num_attention_heads=4, max_position_embeddings=settings.length,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def tuned(folder: str) -> Any:
    """Load the model in NF4 with adapters, which are equal every time."""
    torch.manual_seed(0)
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(quantized(folder, 4), lora)


def data(settings: Settings) -> list[dict[str, torch.Tensor]]:
    """Generate the rows of all steps."""
    drawn = torch.Generator().manual_seed(1)
    shape = (settings.steps * settings.minibatch_size, settings.length)
    return [{"input_ids": row, "labels": row} for row in torch.randint(settings.words, shape, generator=drawn)]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def alone(folder: str, threads: int, settings: Settings) -> tuple[list[float], list[float]]:
    """Train in this process; return losses and seconds of all steps."""
    torch.set_num_threads(threads)
    model, rows = tuned(folder).train(), data(settings)
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
    size, losses, seconds = settings.minibatch_size // settings.num_microbatches, [], []
    for step in range(settings.steps):
        begin_s, total = time.perf_counter(), 0.0
        for at in range(step * settings.minibatch_size, (step + 1) * settings.minibatch_size, size):
            batch = {name: torch.stack([row[name] for row in rows[at : at + size]]) for name in rows[at]}
            loss = model(**batch).loss / settings.num_microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        seconds.append(time.perf_counter() - begin_s)
    return losses, seconds


def in_one_process(folder: str, threads: int, settings: Settings) -> tuple[list[float], list[float]]:
    """Call ``alone`` in a new process, whose libraries read the number of threads when they are loaded."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(alone, folder, threads, settings).result()
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def on_two_workers(folder: str, settings: Settings) -> tuple[list[float], list[float]]:
    """Train on two Ray actors with one thread each; return losses and seconds of all steps."""
    with tempfile.TemporaryDirectory(prefix="bench-qlora-") as storage:
        raypipe.PipelineTrainer(
            tuned(folder),
            optimizer=optimizer_of,
            train_data=raypipe.data.Stream(data(settings)),  # in this order
            pipeline=raypipe.PipelineConfig(
                num_stages=2, minibatch_size=settings.minibatch_size, num_microbatches=settings.num_microbatches
            ),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="qlora", storage_path=storage),
        ).fit(num_steps=settings.steps, progress=False)
        rows = pq.read_table(Path(storage) / "qlora" / "metrics.parquet").to_pylist()
    return [row["loss"] for row in rows], [row["seconds"] for row in rows]


def main() -> int:
    """Train in all ways, in turn."""
    run = BENCH.begin()
    settings, threads = run.settings, os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="bench-qlora-model-") as folder:
        save_model(folder, settings)
        ways = {
            "pipeline": lambda: on_two_workers(folder, settings),
            "one_thread": lambda: in_one_process(folder, 1, settings),
            "all_threads": lambda: in_one_process(folder, threads, settings),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        losses: dict[str, list[float]] = {}
        for _, way in run.turns(ways, settings.rounds):
            losses[way], took_s = ways[way]()
            seconds[way].append(median(took_s[WARM:]))
            run.note(f"{way}: {seconds[way][-1]:.3f} s a step, loss {losses[way][-1]:.4f}")
    if any(abs(ours - theirs) > 1e-5 for ours, theirs in zip(losses["pipeline"], losses["one_thread"], strict=True)):
        raise RuntimeError(f"the pipeline trained something else: {losses}")
    tokens = settings.minibatch_size * settings.length
    for way in ways:
        run.figures[f"tokens_per_s_{way}"] = tokens / median(seconds[way])
    for way in ("one_thread", "all_threads"):
        ratios = [alone_s / ours_s for alone_s, ours_s in zip(seconds[way], seconds["pipeline"], strict=True)]
        run.figures[f"times_{way}"] = median(ratios)
    run.raw |= {"step_s": seconds, "threads": threads}
    run.end()
    return 0

"""One run for plans.py: ``python jobs/check/plan_runs.py WHAT NET WORKERS STEPS``; the last line is JSON.

WHAT is seconds, bytes, bits (gradients and parameters against plain PyTorch) or compete (the whole model alone, then
two and three copies at once).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import raypipe
from raypipe.testing import reference

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.check.stage_watch import Watch, read_lines, stage_key
from jobs.lib.pipeline_nets import densenet121, gpt2, images, resnet50, sentences, vgg16

WARM = 2
COMPETE_S = 10.0
COPIES = (1, 2, 3)
FIXED_ROUNDS = 25
MINIBATCH = 32
SAMPLES = 10_000
SIDE = {"vgg16": 64, "resnet50": 64, "densenet121": 64}
BUILD: dict[str, Callable[..., torch.nn.Module]] = {
    "vgg16": vgg16,
    "resnet50": resnet50,
    "densenet121": densenet121,
    "gpt2": gpt2,
    "gpt2_untied": partial(gpt2, tied=False),
}
LENGTH = 128


def model_of(net: str) -> torch.nn.Module:
    """The same initial weights each time."""
    torch.manual_seed(0)
    return BUILD[net]()


def data_of(net: str) -> Any:
    """Small images, or short sentences."""
    return sentences(LENGTH, SAMPLES) if net.startswith("gpt2") else images(SIDE[net], SAMPLES)


def optimizer_of(net: str, folder: Path, what: str) -> Watch:
    """Momentum for the vision nets, AdamW for GPT-2; learning rates at which nothing runs away.

    Where parameters are compared all take momentum: AdamW makes of a gradient of nearly nothing, which a tied parameter
    rounds differently, a whole step.
    """
    if net == "gpt2" and what in ("seconds", "bytes"):
        return Watch(torch.optim.AdamW, {"lr": 1e-4}, folder, what)
    # Large enough for GPT-2 that what is left of a movement is not the last digit of the parameter.
    rate = 1e-1 if net.startswith("gpt2") else 1e-3
    return Watch(torch.optim.SGD, {"lr": rate, "momentum": 0.9}, folder, what)


def trainer_of(net: str, workers: int, folder: Path, what: str) -> raypipe.PipelineTrainer:
    """num_stages="auto" on so many workers; everything else is left open too, but for the mini-batch."""
    from ray.train import RunConfig, ScalingConfig

    return raypipe.PipelineTrainer(
        model_of(net),
        loss_fn=None if net.startswith("gpt2") else torch.nn.functional.cross_entropy,
        optimizer=optimizer_of(net, folder, what),
        train_data=data_of(net),
        pipeline=raypipe.PipelineConfig(num_stages="auto", minibatch_size=MINIBATCH),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=f"{net}-{workers}-{os.getpid()}", storage_path=str(folder / "runs")),
    )


def measured_run(what: str, net: str, workers: int, steps: int, folder: Path) -> dict[str, Any]:
    """Promised and measured, by stage."""
    trainer = trainer_of(net, workers, folder, what)
    at_s = [fixed_work_s()]
    plan = trainer.plan()
    assert plan.prediction is not None
    at_s.append(fixed_work_s())
    trainer.fit(num_steps=steps, progress=False)
    at_s.append(fixed_work_s())
    lines = read_lines(folder)
    job = trainer._prepared()
    predicted, measured = [], []
    for program, promised in zip(job.programs, plan.prediction.stages, strict=True):
        own = lines[stage_key(name for name in program.parameters if name in program.trainable)]
        other = (*program.buffers, *(name for name in program.parameters if name not in program.trainable))
        other_bytes = sum(job.tensors[name].nbytes for name in other)
        counted = own[WARM:]
        predicted.append(
            {
                "busy_s": promised.busy_s * plan.num_microbatches,
                "bytes": promised.memory_bytes,
                "parts": promised.memory,
            }
        )
        measured.append(
            {
                "busy_s": statistics.median(line["busy_s"] for line in counted),
                "all_busy_s": [line["busy_s"] for line in counted],
                "norm_s": statistics.median(line["norm_s"] for line in counted),
                "step_s": statistics.median(line["step_s"] for line in counted),
                "bytes": statistics.median(
                    line["held_bytes"] + other_bytes + _over(line, before) for before, line in pairwise(own[WARM - 1 :])
                ),
                "held_bytes": counted[-1]["held_bytes"] + other_bytes,
                "anonymous_bytes": counted[-1]["end"]["RssAnon"],
            }
        )
    return {
        "cuts": plan.partition.cuts,
        "microbatches": f"{plan.num_microbatches} x {plan.microbatch_size}",
        "schedule": plan.schedule.kind,
        "machine": (at_s[1] + at_s[2]) / (at_s[0] + at_s[1]),
        "predicted": predicted,
        "measured": measured,
    }


def fixed_work_s() -> float:
    """Processor seconds of work that is always the same: what the machine itself does between a plan and its run."""
    torch.set_num_threads(1)
    matrix, stream = torch.full((512, 512), 1e-3), torch.zeros(1 << 20)
    seconds = []
    for _ in range(FIXED_ROUNDS):
        begin_s = time.thread_time()
        for _ in range(10):
            _ = matrix @ matrix
            stream.add_(1.0)
        seconds.append(time.thread_time() - begin_s)
    return statistics.median(seconds)


def _over(line: dict[str, Any], before: dict[str, Any]) -> int:
    """Bytes of a step's high-water mark over what was resident when it began."""
    return int(line["end"]["VmHWM"] - before["end"]["VmRSS"])


def bits(net: str, workers: int, folder: Path) -> dict[str, Any]:
    """Two steps on Ray against plain PyTorch: to the bit, or to rounding where a parameter is tied."""
    trainer = trainer_of(net, workers, folder, "bits")
    plan = trainer.plan()
    result = trainer.fit(num_steps=2, progress=False)
    config = raypipe.PipelineConfig(minibatch_size=plan.minibatch_size, num_microbatches=plan.num_microbatches)
    model = model_of(net)
    expected = reference(
        model,
        optimizer=optimizer_of(net, folder, "none"),
        train_data=data_of(net),
        num_steps=2,
        loss_fn=None if net.startswith("gpt2") else torch.nn.functional.cross_entropy,
        pipeline=config,
    )
    found = raypipe.load_state_dict(str(result.checkpoint))
    unequal, gradients = [], 0
    for path in folder.glob("*.pt"):
        step = int(path.stem.rpartition("-")[2])
        for name, gradient in torch.load(path).items():
            gradients += 1
            wanted_gradient = expected.gradients[step][name]
            if wanted_gradient is None or not torch.equal(gradient, wanted_gradient):
                unequal.append(f"gradient {name} of step {step}")
    worst = 0.0
    initial = dict(model.named_parameters())
    for name, wanted in (*expected.parameters.items(), *expected.buffers.items()):
        if name not in found:
            continue  # a buffer that is not kept
        if not torch.equal(found[name], wanted):
            unequal.append(name)
            if name in initial:
                movement = (wanted - initial[name]).abs().max()
                worst = max(worst, float((found[name] - wanted).abs().max() / movement))
    text = f"{plan.partition.num_stages} stages, {gradients} gradients, {len(expected.parameters)} parameters"
    text += f": {len(unequal)} differ" + (f", by at most {worst:.1e} of the largest movement" if unequal else "")
    return {"text": text, "unequal": unequal[:20], "worst": worst, "gradients": gradients}


def compete(net: str) -> dict[str, Any]:
    """Processor seconds of a forward and backward: one process, then several at once, and again; medians."""
    context = multiprocessing.get_context("spawn")
    found: dict[int, list[float]] = {count: [] for count in COPIES}
    for _ in range(2):
        for count in COPIES:
            with context.Pool(count) as pool:
                found[count] += pool.map(_lone, [(net, COMPETE_S)] * count, chunksize=1)
    alone_s = statistics.median(found[1])
    copies = {count: statistics.median(found[count]) / alone_s for count in COPIES[1:]}
    text = f"{alone_s * 1e3:.1f} ms alone" + "".join(f"; {count} copies {ratio:.3f}" for count, ratio in copies.items())
    return {"text": text, "seconds": found}


def _lone(asked: tuple[str, float]) -> float:
    """Median processor seconds of one micro-batch of eight, plain PyTorch, for a while."""
    net, for_s = asked
    torch.set_num_threads(1)
    model = model_of(net).train()
    data = data_of(net)
    items = [data[i] for i in range(8)]
    seconds: list[float] = []
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s or len(seconds) < 4:
        begin_s = time.thread_time()
        if net.startswith("gpt2"):
            loss = model(**{name: torch.stack([item[name] for item in items]) for name in items[0]}).loss
        else:
            x, y = (torch.stack(column) for column in zip(*items, strict=True))
            loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        seconds.append(time.thread_time() - begin_s)
    return statistics.median(seconds[1:])


def main() -> None:
    """See the module."""
    what, net, workers, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with tempfile.TemporaryDirectory(prefix="check-plans-") as name:
        folder = Path(name)
        os.environ["RAYPIPE_CACHE_DIR"] = str(folder / "profiles")  # measured anew by every run
        if what == "bits":
            found = bits(net, workers, folder)
        elif what == "compete":
            found = compete(net)
        else:
            found = measured_run(what, net, workers, steps, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

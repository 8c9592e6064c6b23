"""Two stages as two processes on one device, beside one process there: the same bits.

    python jobs/check/two_processes.py                two Ray actors, each with half of one GPU
    python jobs/check/two_processes.py --device cpu   on the processor, without a GPU
    python jobs/check/two_processes.py --timed        26 M parameters, transport "auto", and the seconds of a step

A small GPT trains for a few steps: as one stage and as two in threads of this process, and as two in actors, whose
messages go over sockets. Losses and parameters are compared to the bit. One stage trains twice, for where a device's
kernels round otherwise from run to run there is nothing to compare, as the figures show. Without Ray the actors are
left out.

The exit status is 1 if two processes differ from one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

import raypipe
from jobs.lib.common import final_line, machine_line, median
from jobs.lib.on_device import gpt, pipeline, texts, trainer_of
from raypipe.engine.device.cuda_device import CudaDevice, why_not
from raypipe.engine.device.device import CPU, Device


class Size(NamedTuple):
    """Sizes of the model and of a step, and the transport between processes."""

    steps: int = 4
    context: int = 64
    width: int = 64
    depth: int = 4
    minibatch: int = 8
    microbatches: int = 4
    transport: str = "tcp"

    def config(self) -> dict[str, Any]:
        return {
            "minibatch_size": self.minibatch, "num_microbatches": self.microbatches, "schedule": "1f1b",
            "partitioner": "parameters", "loss_reduction": "mean", "max_grad_norm": 1.0,
        }  # fmt: skip


SMALL, TIMED = Size(), Size(23, 1024, 512, 8, 16, 8, "auto")
WARM_UP = 3
"""Steps whose seconds do not count."""


class Trained(NamedTuple):
    """Result of a run: losses and seconds of its steps, parameters by name in host memory."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    seconds: list[float]

    def step_s(self) -> float:
        """Return the median seconds of a step after the warm-up."""
        return median(self.seconds[WARM_UP:])


def in_threads(stages: int, device_of: Callable[[], Device], precision: str, size: Size = SMALL) -> Trained:
    """Train with all stages in this process, on one device."""
    data = texts(size.steps * size.minibatch, size.context)
    config = {**size.config(), "num_stages": stages, "precision": precision}
    model = gpt(size.context, size.width, size.depth)
    with (
        tempfile.TemporaryDirectory() as name,
        pipeline(model, data, Path(name), lambda _: device_of(), **config) as (fleet, carry_out),
    ):
        reports, ends_s = [], [perf_counter()]
        for of_stages in carry_out(size.steps):
            reports += of_stages[-1]
            ends_s.append(perf_counter())
        held = {name: x.detach().cpu().clone() for state in fleet.states for name, x in state.parameters.items()}
    seconds = [end_s - begin_s for begin_s, end_s in pairwise(ends_s)]
    return Trained([report.loss for report in reports if report.loss is not None], held, seconds)


def in_actors(gpu: bool, precision: str, size: Size) -> Trained:
    """Train two stages in two processes, which share the device."""
    from ray.train import ScalingConfig

    share = {"GPU": 0.5, "CPU": 1} if gpu else {"CPU": 1}
    scaling = ScalingConfig(num_workers=2, use_gpu=gpu, resources_per_worker=share)
    with tempfile.TemporaryDirectory() as name:
        made = trainer_of(
            gpt(size.context, size.width, size.depth), texts(size.steps * size.minibatch, size.context), Path(name),
            scaling, num_stages=2, transport=size.transport, precision=precision, **size.config(),
        )  # fmt: skip
        result = made.fit(num_steps=size.steps, progress=False)
        losses, seconds = ([getattr(record, what) for record in result.records] for what in ("loss", "seconds"))
        return Trained(losses, raypipe.load_state_dict(result.path), seconds)


def has_ray() -> bool:
    """Return True if Ray can be imported."""
    try:
        return find_spec("ray") is not None
    except ModuleNotFoundError:
        return False


def apart(one: Trained, other: Trained) -> list[str]:
    """List losses and parameters that differ in a bit."""
    found = [] if one.losses == other.losses else ["losses"]
    return found + [name for name, x in one.parameters.items() if not torch.equal(x, other.parameters[name])]


def main() -> int:
    """Return exit status 1 if a bit differs that should not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "bf16-autocast"))
    parser.add_argument("--timed", action="store_true", help="a larger model and more steps; print seconds too")
    options = parser.parse_args()
    size = TIMED if options.timed else SMALL
    gpu = options.device == "cuda"
    if gpu and (reason := why_not()):
        print(f"nothing to compare: {reason}")
        return 0

    def device() -> Device:
        return CudaDevice() if gpu else CPU

    print(f"{device().title}; {machine_line()}", flush=True)
    one, again = (in_threads(1, device, options.precision, size) for _ in range(2))
    others = {"two_stages": in_threads(2, device, options.precision, size)}
    if has_ray():
        others["two_processes"] = in_actors(gpu, options.precision, size)
    else:
        print("two processes are left out: Ray is not installed")
    steady = not apart(one, again)
    differing = {name: apart(one, other) for name, other in others.items()}
    for name, found in differing.items():
        print(f"{name}: {'equal to one stage' if not found else f'{len(found)} differ, {found[0]} the first'}")
    if not steady:
        print("one stage differs from itself: kernels of this device round otherwise from run to run")
    missed = [name for name, found in differing.items() if found and steady]
    figures = {name: float(len(found)) for name, found in {"itself": apart(one, again), **differing}.items()}
    figures = {f"tensors_apart_{name}": count for name, count in figures.items()}
    if options.timed:
        figures |= {f"{name}_over_one": other.step_s() / again.step_s() for name, other in others.items()}
        print(f"one stage: {again.step_s() * 1e3:.2f} ms a step")
    print(final_line("two_processes", figures, missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Two stages as two processes on one device, beside one process there: the same bits.

    python jobs/check/two_processes.py                two Ray actors, each with half of one GPU
    python jobs/check/two_processes.py --device cpu   on the processor, without a GPU

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
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

import raypipe
from jobs.lib.common import final_line, machine_line
from jobs.lib.on_device import gpt, pipeline, texts, trainer_of
from raypipe.engine.device.cuda_device import CudaDevice, why_not
from raypipe.engine.device.device import CPU, Device

STEPS, CONTEXT, WIDTH, DEPTH, MINIBATCH = 4, 64, 64, 4, 8
CONFIG: dict[str, Any] = {
    "minibatch_size": MINIBATCH, "num_microbatches": 4, "schedule": "1f1b", "partitioner": "parameters",
    "max_grad_norm": 1.0,
}  # fmt: skip


class Trained(NamedTuple):
    """Result of a run: losses of its steps, parameters by name in host memory."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]


def in_threads(stages: int, device_of: Callable[[], Device], precision: str) -> Trained:
    """Train with all stages in this process, on one device."""
    data = texts(STEPS * MINIBATCH, CONTEXT)
    config = {**CONFIG, "num_stages": stages, "precision": precision}
    with tempfile.TemporaryDirectory() as name:
        opened = pipeline(gpt(CONTEXT, WIDTH, DEPTH), data, Path(name), lambda _: device_of(), **config)
        with opened as (fleet, carry_out):
            reports = [report for of_stages in carry_out(STEPS) for report in of_stages[-1]]
            held = {name: x.detach().cpu().clone() for state in fleet.states for name, x in state.parameters.items()}
    return Trained([report.loss for report in reports if report.loss is not None], held)


def in_actors(gpu: bool, precision: str) -> Trained:
    """Train two stages in two processes, which share the device."""
    from ray.train import ScalingConfig

    share = {"GPU": 0.5, "CPU": 1} if gpu else {"CPU": 1}
    scaling = ScalingConfig(num_workers=2, use_gpu=gpu, resources_per_worker=share)
    with tempfile.TemporaryDirectory() as name:
        made = trainer_of(
            gpt(CONTEXT, WIDTH, DEPTH), texts(STEPS * MINIBATCH, CONTEXT), Path(name), scaling, num_stages=2,
            transport="tcp", precision=precision, **CONFIG,
        )  # fmt: skip
        result = made.fit(num_steps=STEPS, progress=False)
        return Trained([record.loss for record in result.records], raypipe.load_state_dict(result.path))


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
    options = parser.parse_args()
    gpu = options.device == "cuda"
    if gpu and (reason := why_not()):
        print(f"nothing to compare: {reason}")
        return 0

    def device() -> Device:
        return CudaDevice() if gpu else CPU

    print(f"{device().title}; {machine_line()}", flush=True)
    one, again = (in_threads(1, device, options.precision) for _ in range(2))
    others = {"two_stages": in_threads(2, device, options.precision)}
    if has_ray():
        others["two_processes"] = in_actors(gpu, options.precision)
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
    print(final_line("two_processes", {f"tensors_apart_{name}": count for name, count in figures.items()}, missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

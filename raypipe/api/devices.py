"""What stages compute on, as far as the process that plans a run can say: GPUs, how fast they are, and their memory."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping

import torch

from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import gpu_share
from raypipe.engine.cuda_device import CudaDevice, share_of, why_not
from raypipe.engine.device import CPU, Device
from raypipe.engine.profiling import Rates, measure_rates
from raypipe.engine.profiling.gpus import ASSUMED, GPUS, kind_of, rates_of_kind, share_of_rates
from raypipe.errors import ConfigError
from raypipe.ir.precision import PRECISIONS

__all__ = ["gpu_rates", "in_threads", "on_devices"]

_KIND = "accelerator_type:"


def gpu_rates(resources: Mapping[str, float], precision: str) -> Rates | None:
    """Of the GPUs, or shares of them, that workers with these resources compute on; None where those are CPUs.

    By the data sheet of the kind that was asked for, else of the slowest of the cluster that this process is connected
    to, else of the one in this machine. A kind without one is measured where it is here, and taken for a middling one
    where it is not.

    Args:
        precision: by its name.
    """
    share, computing = gpu_share(resources), PRECISIONS[precision]
    if not share:
        return None
    here = "" if why_not() else torch.cuda.get_device_name(0)
    asked = [name.removeprefix(_KIND) for name in resources if name.startswith(_KIND)]
    kinds = asked or _kinds_of_cluster() or ([kind_of(here)] if here else [])
    known = [rates_of_kind(kind, computing) for kind in kinds if kind in GPUS]
    if known:
        found = min(known, key=lambda rates: rates.flops_per_s)
    elif here:
        dtype = computing.leaves or computing.autocast or "float32"
        found = measure_rates(torch.device("cuda", 0), getattr(torch, dtype))
    else:
        why = f"nothing is known of {kinds[0]!r}" if kinds else "set ScalingConfig(accelerator_type=...)"
        found = rates_of_kind(ASSUMED, computing)
        found = dataclasses.replace(found, device=f"a middling GPU, for {why}: {found.device}")
    return share_of_rates(found, share)


def _kinds_of_cluster() -> list[str]:
    """Of GPUs, by the names that Ray gives them; none where this process is not connected."""
    ray = sys.modules.get("ray")  # who is connected has loaded it
    if ray is None or not ray.is_initialized():
        return []
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    return sorted({name.removeprefix(_KIND) for found in alive for name in found if name.startswith(_KIND)})


def on_devices(pipeline: PipelineConfig, resources: Mapping[str, float]) -> PipelineConfig:
    """With the memory of the smallest GPU that this process sees, of which workers have these shares, as their limit.

    Where it sees none the workers say what they have once they are there, see runtime/run/device_limits.py. A limit
    that was given stands; a partitioner that knows no bytes keeps to none.
    """
    share = gpu_share(resources)
    if not share or pipeline.memory_limit_bytes != "auto" or pipeline.partitioner == "parameters" or why_not():
        return pipeline
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    least = min(share_of(one.name, one.total_memory, share) for one in found)
    return dataclasses.replace(pipeline, memory_limit_bytes=least)


def in_threads(resources: Mapping[str, float]) -> Callable[[int], Device]:
    """(worker) -> what it computes on, where workers are threads of this process: as Ray would, GPU after GPU.

    Args:
        resources: of one worker.
    """
    share = gpu_share(resources)
    if not share:
        return lambda worker: CPU
    each = max(1, int(1 / share + 1e-6))

    def device_of(worker: int) -> Device:
        if reason := why_not(worker // each):
            shared = f", which {each} workers share" if each > 1 else ""
            raise ConfigError(
                f"ScalingConfig(use_gpu=True) with local=True: worker {worker}, a thread of this process, cannot "
                f"compute on GPU {worker // each} of this machine{shared}: {reason} With use_gpu=False stages compute "
                "on the CPU."
            )
        return CudaDevice(worker // each)

    return device_of

"""What stages compute on, as far as the process that plans a run can say: GPUs of this machine, and their memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import gpu_share
from raypipe.engine.cuda_device import CudaDevice, share_of, why_not
from raypipe.engine.device import CPU, Device
from raypipe.errors import ConfigError

__all__ = ["MEASURED_HERE", "device_notes", "in_threads", "on_devices"]

MEASURED_HERE = (
    "Seconds are those of this machine's processor, and stages compute on GPUs: cuts follow from their ratios, and "
    "predicted steps do not hold. The run measures its stages."
)


def device_notes(resources: Mapping[str, float]) -> tuple[str, ...]:
    """For the plan, of workers with these resources."""
    return (MEASURED_HERE,) if gpu_share(resources) else ()


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

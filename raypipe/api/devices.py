"""GPUs on which stages will compute, with speed and memory, as far as they are known when a run is planned."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping

import torch

from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import gpu_share
from raypipe.engine.device.cuda_device import CudaDevice, share_of, why_not
from raypipe.engine.device.device import CPU, Device
from raypipe.errors import ConfigError
from raypipe.ir.precision import PRECISIONS
from raypipe.profiling import Rates, measure_rates
from raypipe.profiling.rates import ASSUMED, GPUS, kind_of, rates_of_kind, share_of_rates

_KIND = "accelerator_type:"


def gpu_rates(resources: Mapping[str, float], precision: str) -> Rates | None:
    """Return the speed of the GPU, or of the share of a GPU, that a worker has; None if workers compute on CPUs.

    The kind of GPU is the requested accelerator_type, else the slowest kind in the cluster to which this process is
    connected, else the kind in this machine. The speed of this kind is taken from its data sheet. Without a data sheet,
    the GPU of this machine is measured; if this machine has no GPU, a GPU of average speed is assumed.

    Args:
        resources: resources of one worker: {"GPU": 0.5} for half of a GPU, for example.
        precision: value of PipelineConfig.precision.
    """
    share, computing = gpu_share(resources), PRECISIONS[precision]
    if not share:
        return None
    here = "" if why_not() else torch.cuda.get_device_name(0)
    requested = [name.removeprefix(_KIND) for name in resources if name.startswith(_KIND)]
    kinds = requested or _kinds_of_cluster() or ([kind_of(here)] if here else [])
    known = [rates_of_kind(kind, computing) for kind in kinds if kind in GPUS]
    if known:
        slowest = min(known, key=lambda rates: rates.flops_per_s)
    elif here:
        dtype = computing.leaves or computing.autocast or "float32"
        slowest = measure_rates(torch.device("cuda", 0), getattr(torch, dtype))
    else:
        why = f"nothing is known of {kinds[0]!r}" if kinds else "set ScalingConfig(accelerator_type=...)"
        slowest = rates_of_kind(ASSUMED, computing)
        slowest = dataclasses.replace(slowest, device=f"a middling GPU, for {why}: {slowest.device}")
    return share_of_rates(slowest, share)


def _kinds_of_cluster() -> list[str]:
    """List the kinds of GPU in the cluster by Ray's names, such as "A100"; empty without a connection to a cluster."""
    ray = sys.modules.get("ray")  # who is connected has loaded it
    if ray is None or not ray.is_initialized():
        return []
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    return sorted({name.removeprefix(_KIND) for resources in alive for name in resources if name.startswith(_KIND)})


def on_devices(pipeline: PipelineConfig, resources: Mapping[str, float]) -> PipelineConfig:
    """Return the configuration; if memory_limit_bytes is "auto", this field is set from the GPUs of this process.

    The limit is the memory of the smallest GPU that this process sees, times the share of a GPU that a worker has. The
    configuration is returned unchanged if workers use no GPU, if a limit was configured, if partitioner is
    "parameters" (which ignores limits), or if this process sees no GPU. In the last case the workers report their
    memory once they have started, see run/plans/later.py.

    Args:
        resources: resources of one worker.

    Raises:
        ConfigError: CUDA graphs are wanted, and workers use no GPU.
    """
    share = gpu_share(resources)
    if pipeline.cuda_graphs and not share:
        raise ConfigError(
            "cuda_graphs=True has no effect without GPUs, and use_gpu is False. Set use_gpu=True in ScalingConfig, or "
            "cuda_graphs=False."
        )
    if not share or pipeline.memory_limit_bytes != "auto" or pipeline.partitioner == "parameters" or why_not():
        return pipeline
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    least = min(share_of(one.name, one.total_memory, share) for one in gpus)
    return dataclasses.replace(pipeline, memory_limit_bytes=least)


def in_threads(resources: Mapping[str, float]) -> Callable[[int], Device]:
    """Return a function (worker number) -> device, for workers that are threads of this process.

    Workers fill one GPU after the other, as under Ray: with half of a GPU each, workers 0 and 1 use GPU 0.

    Args:
        resources: resources of one worker.

    Raises:
        ConfigError: raised by the returned function if this machine lacks the worker's GPU.
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

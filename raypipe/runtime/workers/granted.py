"""The device that a worker computes on: the CPU, or the GPU of which Ray has given it a share.

    ScalingConfig(use_gpu=True)                      num_gpus=1      one worker on a GPU
    ... resources_per_worker={"GPU": 0.5}            num_gpus=0.5    two workers on a GPU, each with half of its memory
    Ray:  CUDA_VISIBLE_DEVICES=2                     torch in the worker: GPU 2 is cuda:0
    with RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES the worker sees all GPUs, and takes that of the number Ray gave it

Two workers with shares of one GPU may be given the same one or two: Ray fills one before it takes another.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence

import ray

from raypipe.engine.cuda_device import CudaDevice, why_not
from raypipe.engine.device import CPU, Device
from raypipe.errors import ConfigError

__all__ = ["DeviceOf", "granted", "index_of"]

DeviceOf = Callable[[float], Device]
"""(share of a GPU, 0 for none) -> what a worker computes on, called in its process."""


def granted(share: float) -> Device:
    """What Ray has given this process.

    Raises:
        ConfigError: a GPU that torch cannot compute on; says why, and what to do.
    """
    if not share:
        return CPU
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    index = index_of(ids, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if reason := "Ray has named none." if index is None else why_not(index):
        raise ConfigError(
            f"ScalingConfig(use_gpu=True): Ray gave a worker on {platform.node()} a GPU (number "
            f"{', '.join(ids) or 'none'}), but it cannot compute there: {reason} With use_gpu=False stages compute on "
            "the CPU."
        )
    assert index is not None
    return CudaDevice(index, share)


def index_of(ids: Sequence[str], visible: str | None) -> int | None:
    """Number of a GPU among those that torch sees; None where it is not among them.

    Args:
        ids: of the GPUs that Ray gave, of which a worker has one.
        visible: CUDA_VISIBLE_DEVICES of the process; None where it is not set, and all are seen.
    """
    if not ids:
        return None
    if visible is None:
        return int(ids[0]) if ids[0].isdigit() else None
    shown = [one.strip() for one in visible.split(",")]
    return shown.index(ids[0]) if ids[0] in shown else None

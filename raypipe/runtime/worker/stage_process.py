"""Process of a stage actor: sets its working folder, GPU and memory allocator, and collects facts about it.

    ScalingConfig(use_gpu=True)                      num_gpus=1      one worker on a GPU
    ... resources_per_worker={"GPU": 0.5}            num_gpus=0.5    two workers on a GPU, each with half of its memory
    Ray:  CUDA_VISIBLE_DEVICES=2                     torch in the worker: GPU 2 is cuda:0
    with RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES the worker sees all GPUs, and uses the index that Ray assigned

Two workers with shares of a GPU may get the same one or two different ones: Ray fills one GPU before it uses another.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import torch

from raypipe.engine.device.cuda_device import CudaDevice, why_not
from raypipe.engine.device.device import CPU, Device
from raypipe.engine.io.storage import Place
from raypipe.errors import ConfigError, PlanError
from raypipe.run.lease import read_lease


def enter(folder: str) -> None:
    """Change to the working directory ``folder``, so that relative paths in the user's code are equal on all nodes.

    The directory is not changed on a node that lacks it, or if Ray's runtime environment has a working_dir.
    """
    if folder and not ray.get_runtime_context().runtime_env.get("working_dir") and Path(folder).is_dir():
        os.chdir(folder)


def holder_of(place: Place | None) -> str:
    """Return generation and holder of the lease in a run's folder, as text; "" if no lease, or if it is not local."""
    lease = read_lease(place) if place is not None and place.is_local else None
    return "" if lease is None else f"{lease.generation} {lease.holder.id}"


def refuse_another_folder(place: Place, held_by: str) -> None:
    """Raise PlanError if the run's path is another folder on this node than on the driver's, as with separate disks.

    Args:
        place: local folder of the run.
        held_by: result of ``holder_of`` on the driver's node.

    Raises:
        PlanError: the folder has another lease or no lease; the message has the folder and the node.
    """
    for folder in (Path(place.path).parent, Path(place.path)):
        with suppress(OSError):  # reading the lease raises the error
            list(folder.iterdir())  # refreshes the NFS cache, which may lack a lease written a moment ago
    if holder_of(place) != held_by:
        raise PlanError(
            f"The run's folder {place} on node {ray.util.get_node_ip_address()} ({platform.node()}) is not the "
            "same folder as on the driver's node, so that a checkpoint's files would be in two folders. Give a "
            "storage_path that all nodes share (a mounted folder, s3://, gs://), or keep the run on one node."
        )


DeviceOf = Callable[[float], Device]
"""(share of a GPU, 0 for the CPU) -> device of a worker, called in its process."""


def ray_device(share: float) -> Device:
    """Return the device that Ray has assigned to this process.

    Args:
        share: fraction of a GPU; 0 for the CPU.

    Raises:
        ConfigError: torch cannot compute on the GPU; the message has the reason and a remedy.
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
    """Return the index that torch uses for the GPU of this process; None if torch does not see that GPU.

    Args:
        ids: ids of the GPUs that Ray has assigned; a worker has one.
        visible: CUDA_VISIBLE_DEVICES of the process; None if it is not set, so that torch sees all GPUs.
    """
    if not ids:
        return None
    if visible is None:
        return int(ids[0]) if ids[0].isdigit() else None
    shown = [one.strip() for one in visible.split(",")]
    return shown.index(ids[0]) if ids[0] in shown else None


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MOST = (1 << 31) - 1
_PAD_BYTES = 64 << 20
"""Bytes that glibc requests from the system at a time."""


def keep_freed_memory(environment: Mapping[str, str] | None = None) -> bool:
    """Let glibc keep memory that this process frees for the next micro-batch; return True if it accepts all settings.

    glibc returns a large block to the system as soon as it is free, and maps it again for the next micro-batch: the
    kernel then zeroes and maps every page once more. With ResNet-50 that was 20 000 to 75 000 pages per step and stage,
    a tenth of the step and more. All threads share one arena, because other arenas cannot hold a block of 64 MiB.

    Nothing is changed under another allocator, or if glibc's thresholds are set in the environment (``MALLOC_...``,
    ``GLIBC_TUNABLES``), for example to measure memory.

    Args:
        environment: environment variables; None for os.environ.
    """
    variables = os.environ if environment is None else environment
    if (
        any(name.startswith("MALLOC_") for name in variables)
        or "GLIBC_TUNABLES" in variables
        or "LD_PRELOAD" in variables
    ):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (not glibc otherwise)
        mallopt = library.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    settings = {_TRIM_THRESHOLD: _MOST, _TOP_PAD: _PAD_BYTES, _MMAP_THRESHOLD: _MOST, _ARENA_MAX: 1}
    taken = [mallopt(name, value) == 1 for name, value in settings.items()]
    return all(taken)


def facts_of(address: Any, device: Device) -> dict[str, Any]:
    """Collect the facts of this process that its driver needs: node, process, versions, device, and link address."""
    return {
        "address": address,
        "node": ray.get_runtime_context().get_node_id(),
        "host": platform.node(),
        "process": os.getpid(),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        "versions": {"raypipe": _version(), "torch": torch.__version__, "ray": ray.__version__},
        "device": device.title,
        "device_bytes": device.memory_bytes,
        "codes": device.codes or device.immediate,  # can encode messages on the device that computes
    }


def _version() -> str:
    from raypipe import __version__

    # Without the digest of uncommitted changes: an edit during a run does not make another installation.
    return re.sub(r"\.d[0-9a-f]{8}$", "", __version__)

"""What a stage actor says of itself: where it is, what it runs, and what it computes on."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import ray
import torch

from raypipe.engine.device import Device

__all__ = ["facts_of"]


def facts_of(address: Any, device: Device) -> dict[str, Any]:
    """Of this process.

    Args:
        address: that its peers reach it under.
    """
    return {
        "address": address,
        "node": ray.get_runtime_context().get_node_id(),
        "host": platform.node(),
        "process": os.getpid(),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        "versions": {"raypipe": _version(), "torch": torch.__version__, "ray": ray.__version__},
        "device": device.title,
        "device_bytes": device.memory_bytes,
        "codes": device.codes or device.immediate,  # what stages send is encoded where they compute
    }


def _version() -> str:
    from raypipe import __version__

    return __version__

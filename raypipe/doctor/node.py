"""Facts of one machine, as plain values. This file is sent to every node as text and executed there.

A node may have another version of raypipe, or no raypipe at all, which is one of the facts. Therefore this file imports
nothing of raypipe, and arguments and results of its functions are plain values.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_LISTENERS: list[socket.socket] = []
_TORCH_FACTS = r"""
import contextlib, ctypes, importlib.metadata, json, re, torch
found = {"cuda_build": torch.version.cuda or "", "cuda_driver": "", "cupy": [], "nccl": ""}
found["cuda_gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
with contextlib.suppress(Exception):
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
with contextlib.suppress(OSError, AttributeError):
    number = ctypes.c_int()
    if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) == 0:
        found["cuda_driver"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
names = {d.name.lower() for d in importlib.metadata.distributions() if d.name}
found["cupy"] = sorted(name for name in names if re.fullmatch(r"cupy(-cuda\d+x)?", name))
print(json.dumps(found))
"""


def machine_facts(devices: str, under_ray: bool) -> dict[str, Any]:
    """Collect versions, CPUs, GPUs and shared memory.

    Args:
        devices: folder of the device files, /dev.
        under_ray: True if this process is a worker of Ray. Ray hides all GPUs from a worker that reserves no GPU, so
            the environment of the raylet, its parent process, is used instead.
    """
    environment = _environment_of(os.getppid()) if under_ray else dict(os.environ)
    shm = shutil.disk_usage("/dev/shm")
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "cpus": len(os.sched_getaffinity(0)),
        "shm_bytes": shm.total,
        "shm_free_bytes": shm.free,
    } | _gpu_facts(Path(devices), environment)


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, Ray and raypipe that this process imports; "" for a missing package."""
    return {"python": platform.python_version()} | {name: _version(name) for name in ("torch", "ray", "raypipe")}


def storage_facts(storage: str, marker: str) -> dict[str, Any]:
    """Check that a folder, or its nearest existing parent, is writable, and that the file ``marker`` is visible here.

    Args:
        marker: file that another node has created in its storage folder; "" for no comparison.

    Returns:
        {"storage_error": reason or "", "storage_shared": True if ``marker`` is "" or exists}.
    """
    folder = Path(storage)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(prefix=".raypipe-doctor-", dir=folder):
            pass
        error = ""
    except OSError as failure:
        error = f"{failure.strerror or failure}: {folder}"
    return {"storage_error": error, "storage_shared": not marker or Path(marker).exists()}


def listen(host: str, low: int, high: int, word: str) -> dict[str, Any]:
    """Listen on the first free port from ``low`` to ``high``, and answer every connection with ``word``.

    With ``low`` and ``high`` 0, the system chooses a free port.

    Returns:
        {"port": the port, or 0 if no port is free, "port_error": reason or ""}.
    """
    error = ""
    for port in range(low, high + 1):
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listener.bind((host, port))
            listener.listen(64)
        except OSError as failure:
            listener.close()
            error = failure.strerror or str(failure)
            continue
        _LISTENERS.append(listener)
        threading.Thread(target=_answer, args=(listener, word.encode()), daemon=True).start()
        return {"port": listener.getsockname()[1], "port_error": ""}
    return {"port": 0, "port_error": error}


def reach(peers: dict[str, tuple[str, int, str]], timeout_s: float) -> dict[str, str]:
    """Connect to listeners, and compare their answers.

    Args:
        peers: {name: (host, port, expected answer)}.
        timeout_s: seconds for each connection.

    Returns:
        {name: error, or "" for success}.
    """

    def attempt(peer: tuple[str, int, str]) -> str:
        host, port, word = peer
        try:
            with socket.create_connection((host, port), timeout_s) as connection:
                answer = connection.recv(len(word) + 1).decode(errors="replace")
        except OSError as failure:
            return "timed out" if isinstance(failure, TimeoutError) else failure.strerror or str(failure)
        return "" if answer == word else "something else answered"

    with ThreadPoolExecutor(16) as pool:
        return dict(zip(peers, pool.map(attempt, peers.values()), strict=True))


def _answer(listener: socket.socket, word: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(word)


def _version(module: str) -> str:
    try:
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))
    except ImportError:
        return ""


def _environment_of(pid: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)


def _gpu_facts(devices: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Collect facts on GPUs (device files, torch's CUDA, driver, CuPy), as seen with these environment variables."""
    files = sum(1 for _ in devices.glob("nvidia[0-9]*"))
    facts: dict[str, Any] = {"gpus": files, "visible": environment.get("CUDA_VISIBLE_DEVICES")}
    if files:
        keep = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        if facts["visible"] is not None:
            keep["CUDA_VISIBLE_DEVICES"] = str(facts["visible"])
        with contextlib.suppress(subprocess.SubprocessError, OSError, ValueError):
            result = subprocess.run([sys.executable, "-c", _TORCH_FACTS], env=keep, capture_output=True, timeout=60)
            facts |= json.loads(result.stdout)
    return facts

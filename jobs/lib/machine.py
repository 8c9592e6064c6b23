"""Machine of a benchmark: processors, memory, load, versions and commit. Loads neither torch nor Ray."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "commit", "gpu_clocks", "hardware", "load", "machine_line", "versions"]

ROOT = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 30.0
_CODE = ("raypipe", "jobs", "tests", ":(exclude)*.md")
_PACKAGES = ("raypipe", "torch", "ray", "numpy", "pyarrow", "transformers", "scikit-learn")


def hardware() -> dict[str, Any]:
    """Describe the machine: processor model, visible cores, memory in bytes, GPUs by name, and the system."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        cpu = found[1] if found else cpu
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes,
        "gpus": _gpus(),
        "system": platform.platform(),
    }


def _gpus() -> list[str]:
    shown = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return shown.splitlines() if shown else []


def gpu_clocks() -> str:
    """Return the clocks and the power of the GPUs now, as nvidia-smi prints them; "" without it."""
    return _output("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader") or ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the relevant packages that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def load() -> list[float]:
    """Return the load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def commit() -> tuple[str | None, bool | None]:
    """Return the checked-out commit and True if files differ from it; (None, None) without git."""
    head = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if head is None:
        return None, None
    return head, bool(_output("git", "-C", str(ROOT), "status", "--porcelain", "--", *_CODE))


def _output(*command: str) -> str | None:
    """Return the output of a command; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def machine_line() -> str:
    """Format the line that is printed with every table."""
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"load {' '.join(f'{value:.2f}' for value in load())} on {os.cpu_count()} CPUs; {found}"

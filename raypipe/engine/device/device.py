"""Device abstraction: the CPU, which completes each call before it returns, or an asynchronous device; and its memory.

    compute    ... kernels ... | mark ------------------------- wait | kernels ...
    copy_in                        wait? | copy | mark --^               host memory -> device
    copy_out                              wait | copy | mark             device -> host memory
    exchange                                   wait | sum | mark         replicas, in parallel with a backward
    host                                                  finish | reads

Work of one stream runs in order, work of several streams in any order unless one waits for a mark of another; the host
reads a result after it has finished a later mark. Every wait has a name, made of what is transferred (``TransferKind``)
and a reason, so that a test can leave one out and show that it was needed: on a fake device, whose work runs as late as
waits allow, without a GPU.

``transfer`` has the copies between host and device; the rest of the engine does not depend on the kind of device.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import torch

from raypipe.engine.codec import host

_T = TypeVar("_T")

Mark = Any
"""Point in the queued work of a stream, such as a CUDA event. Only the device that recorded it can interpret it."""


ONE_GRAPH = threading.RLock()
"""Lock of the process, which a GPU's graphs are recorded and replayed under.

A recording waits for its whole device, which fails while another thread records there. Up to torch 2.12 it also takes
over the default generator, which no other thread may draw from meanwhile, and no other graph be replayed with.
"""


class StreamName(StrEnum):
    """Names of all streams but the computing stream, which is current outside of ``Device.stream``."""

    COPY_IN = "copy_in"
    COPY_OUT = "copy_out"
    EXCHANGE = "exchange"


class TransferKind(StrEnum):
    """Kind of the tensors in a transfer between host and device; part of the name of each wait."""

    PARAMETERS = "parameters"
    CONSTANTS = "constants"
    COLUMNS = "columns"
    INPUTS = "inputs"
    OUTPUT_GRADS = "output gradients"
    OUTPUTS = "outputs"
    INPUT_GRADS = "input gradients"
    REDUCED = "reduced"
    LOSS = "loss"
    NORMS = "norms"
    METRICS = "metrics"
    SNAPSHOT = "snapshot"
    RESTORED = "restored"


class Device:
    """Device on which the stages of one worker compute: the CPU, unless a subclass overrides all methods.

    A mark (point in a stream's work) of the CPU is the time at which it was recorded, and all waits return at once.

    Attributes:
        place: torch device of the tensors.
        immediate: True if operations are complete when they return and tensors are in host memory, so that no waits and
            no copies are needed.
        title: human-readable name.
        codes: True if ``encode`` and ``decode`` run on the device; False if links encode in host memory.
        memory_bytes: bytes that a worker's tensors may use on the device; None if unknown.
        graphs: True if the device can record work as a graph (``new_pool``, ``record``).
    """

    place = torch.device("cpu")
    immediate = True
    title = "CPU"
    codes = False
    memory_bytes: int | None = None
    graphs = False

    def prepare_thread(self) -> AbstractContextManager[None]:
        """Limit torch to one intra-op thread in this thread; return a context that makes this device current in it."""
        # The number of intra-op threads belongs to the calling thread, and sums over several round differently.
        torch.set_num_threads(1)
        return nullcontext()

    def stream(self, name: StreamName) -> AbstractContextManager[None]:
        """Return a context in which the calling thread queues its device work in this stream."""
        return nullcontext()

    def mark(self) -> Mark:
        """Record a mark after all work queued so far in the current stream."""
        return time.monotonic()

    def wait(self, mark: Mark, why: str) -> None:
        """Make later work of the current stream wait for a mark, without blocking the host; ``why`` names the wait."""

    def reached(self, mark: Mark) -> bool:
        """Return True if the device has reached a mark; return at once."""
        return True

    def finish(self, mark: Mark, why: str) -> None:
        """Block the calling thread until the device reaches a mark; later work may go on. ``why`` names the wait."""

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Return the time at which each mark was reached, in seconds of ``time.monotonic``; wait for the last one."""
        return list(marks)

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate device memory of shape (elements,) in the current stream."""
        return torch.empty(elements, dtype=dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is in device memory; some state, such as the step counts of Adam, is on the host."""
        return tensor.device.type == "cpu"

    def share(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        """Allocate device memory that other processes of this host can open; return it (uint8, (nbytes,)) and a handle.

        Raises:
            ImportError, MemoryError, OSError, RuntimeError: this device cannot.
        """
        raise NotImplementedError("this device shares no memory")

    def open_shared(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """Open memory that ``share`` of another process allocated, until the tensor is freed; raises as ``share``."""
        raise NotImplementedError("this device shares no memory")

    def staging(self, nbytes: int) -> torch.Tensor:
        """Allocate host memory for asynchronous copies to and from the device; uint8, shape (nbytes,)."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Register that the current stream uses a tensor which another stream allocated.

        The tensor's memory is then not reused before the current stream has finished the work queued so far.
        """

    def encode(self, name: str, flat: torch.Tensor, wire: torch.Tensor, key: int | None = None) -> None:
        """Fill ``wire`` from ``flat`` in the current stream; both are in device memory. See ``codec.host.encode``."""
        host.encode(name, flat, wire, key)

    def decode(self, name: str, wire: torch.Tensor, flat: torch.Tensor) -> None:
        """Fill ``flat`` from ``wire`` in the current stream; both are in device memory. See ``codec.host.decode``."""
        host.decode(name, wire, flat)

    def new_pool(self) -> Any:
        """Create a pool for the memory of graphs that are never replayed at the same time."""
        raise NotImplementedError("this device records no graphs")

    def record(
        self, run: Callable[[], _T], pool: Any, generators: Iterable[torch.Generator] = ()
    ) -> tuple[Callable[[], None], _T]:
        """Record the device work of ``run()`` as a graph, instead of doing it.

        Memory that ``run`` allocates and that is still referenced when it returns belongs to the graph; the rest is
        reused by later graphs of the pool.

        Args:
            generators: generators that ``run`` draws from, which it neither creates nor seeds. The recorded work draws
                with the seeds that they have when it is queued.

        Returns:
            (function that queues the recorded work in the current stream, result of ``run``, whose tensors are filled
            by that function). The work reads and writes the same addresses every time.

        Raises:
            RuntimeError: ``run`` reads a value on the host, waits for the device or draws from another generator; or
                what ``run`` raises.
        """
        raise NotImplementedError("this device records no graphs")

    def peak_bytes(self) -> int:
        """Return the peak bytes of tensors on the device; on the CPU, the bytes of this process now, 0 if unknown."""
        return process_bytes()


CPU = Device()


_STATM = Path("/proc/self/statm")


def ran_out(error: BaseException) -> bool:
    """Return True if an exception means that Python, torch or a device is out of memory.

    torch's allocator for host memory raises a plain RuntimeError (c10/core/impl/alloc_cpu.cpp).
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def held_bytes(error: BaseException) -> int:
    """Return the bytes in use after an out-of-memory error; 0 if unknown.

    These are the bytes of the GPU's tensors if ``error`` is a torch.OutOfMemoryError, else the bytes of this process.
    """
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    return process_bytes()


def process_bytes() -> int:
    """Return the resident bytes of this process; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def memory_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory limit of this process in bytes: the machine's memory, or the limit of its container if lower.

    Args:
        groups: folder of Linux control groups (cgroups), of version 1 or 2.
        own: file that names the groups of this process.
    """
    least_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [groups / "memory.max", groups / "memory" / "memory.limit_in_bytes"]
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                limits.append(groups / path.lstrip("/") / "memory.max")
            elif "memory" in kinds.split(","):
                limits.append(groups / "memory" / path.lstrip("/") / "memory.limit_in_bytes")
    for limit in limits:
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            least_bytes = min(least_bytes, int(limit.read_text()))
    return least_bytes

"""The seam to what computes: the CPU, which has done a thing when a call returns, or a device that does it later.

    compute    ... kernels ... | mark ------------------------- wait | kernels ...
    copy_in                        wait? | copy | mark --^               host memory -> device
    copy_out                              wait | copy | mark             device -> host memory
    exchange                                   wait | sum | mark         of replicas, beside a backward
    host                                                  finish | reads

Work of one stream is done in order, that of several in any order unless one waits for a mark of the other; the host
sees what a device computed once it has finished a mark behind it. Every such wait has a name, made of the thing that
crosses (``Crosses``) and a reason. So a test can leave one out and see that it was needed: on a fake device, whose
work is done as late as waits allow, without a GPU.

What crosses between host and device does so in ``crossing``; nothing else in the engine asks which device it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, Protocol

import torch

from raypipe.engine.codec import host
from raypipe.engine.out_of_memory import process_bytes

__all__ = ["CPU", "CpuDevice", "Crosses", "Device", "Mark", "Stream"]

Mark = Any
"""A point in the work of a stream; what it is only the device knows."""


class Stream(StrEnum):
    """Streams beside the one that computes, which is used wherever no other is named."""

    COPY_IN = "copy_in"
    COPY_OUT = "copy_out"
    EXCHANGE = "exchange"


class Crosses(StrEnum):
    """What goes from host to device or back, as waits are named."""

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


class Device(Protocol):
    """Where one worker's stages compute. CpuDevice is one, tests/fake_device.py another.

    Attributes:
        place: of the tensors.
        immediate: what was called has been done, in host memory: there is nothing to wait for or to copy.
        title: what it is, for people.
        codes: ``encode`` and ``decode`` are its own, for tensors that lie there; else links do that in host memory.
        memory_bytes: what a worker may hold there; None where nobody says.
    """

    place: torch.device
    immediate: bool
    title: str
    codes: bool
    memory_bytes: int | None

    def prepare_thread(self) -> AbstractContextManager[None]:
        """Inside, the calling thread computes on this device, with one intra-op thread on the host."""

    def stream(self, name: Stream) -> AbstractContextManager[None]:
        """Inside, what the calling thread does on the device is queued in this stream."""

    def mark(self) -> Mark:
        """Behind all that was queued so far in the current stream."""

    def wait(self, mark: Mark, why: str) -> None:
        """Have the current stream begin nothing that is queued from now on before the mark is reached; returns at once.

        Args:
            why: names the wait.
        """

    def finish(self, mark: Mark, why: str) -> None:
        """Have the host wait until the mark is reached; no other stream and no later work is waited for."""

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """When each was reached, on the clock of ``time.monotonic``. Waits for the last one."""

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the device, of the current stream's allocator; shape (elements,)."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory of the device. Some of what belongs to a stage does not: Adam's counts of steps."""

    def staging(self, nbytes: int) -> torch.Tensor:
        """Host memory that copies to and from the device need not wait for; uint8, shape (nbytes,)."""

    def record_stream(self, tensor: torch.Tensor) -> None:
        """The current stream uses this memory of another stream's, which must not be given away before it has."""

    def encode(self, name: str, flat: torch.Tensor, wire: torch.Tensor, key: int | None = None) -> None:
        """Fill ``wire`` from ``flat``, in the current stream; both lie on the device. See ``codec.host.encode``."""

    def decode(self, name: str, wire: torch.Tensor, flat: torch.Tensor) -> None:
        """Fill ``flat`` from ``wire``, in the current stream; both lie on the device. See ``codec.host.decode``."""

    def peak_bytes(self) -> int:
        """Most memory that was in use on the device; on the CPU what the process uses now, 0 where nobody tells."""


class CpuDevice:
    """The CPU: a mark is the time, and nothing is waited for."""

    place = torch.device("cpu")
    immediate = True
    title = "CPU"
    codes = False
    memory_bytes: int | None = None
    mark = staticmethod(time.monotonic)
    encode = staticmethod(host.encode)
    decode = staticmethod(host.decode)

    def prepare_thread(self) -> AbstractContextManager[None]:
        # The number of intra-op threads belongs to the calling thread, and sums over several round differently.
        torch.set_num_threads(1)
        return nullcontext()

    def stream(self, name: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self, mark: Mark, why: str) -> None:
        pass

    def finish(self, mark: Mark, why: str) -> None:
        pass

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        return list(marks)

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def staging(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def record_stream(self, tensor: torch.Tensor) -> None:
        pass

    def peak_bytes(self) -> int:
        return process_bytes()


CPU = CpuDevice()

"""A CUDA device behind the seam of ``device``: torch's streams, events as marks, pinned memory for staging.

    compute     the device's default stream: what others do with tensors there, such as an optimizer's first state,
                stays in order with it without waits
    copy_in     a stream of its own    |  torch's caching allocator hands memory of one stream out again in the order of
    copy_out    a stream of its own    |  that stream; ``record_stream`` tells it of the others

Nothing here waits for the whole device: ``finish`` waits for one event. Events tell the seconds between each other;
where these lie on the host's clock follows from what the host saw (``placed_s``).

Left out: CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from time import monotonic
from typing import NamedTuple

import torch

from raypipe.engine.codec import cuda
from raypipe.engine.device import Stream
from raypipe.errors import ConfigError
from raypipe.ir.plan import human_bytes

__all__ = ["CONTEXT_BYTES", "CudaDevice", "CudaMark", "placed_s", "share_of", "why_not"]

CONTEXT_BYTES = 768 << 20
"""That a process takes of a GPU beside its tensors: CUDA's context, kernels of libraries, their workspaces. An
estimate."""


class CudaMark(NamedTuple):
    """An event, and when the host asked for it, on the clock of ``time.monotonic``."""

    event: torch.cuda.Event
    asked_s: float


class CudaDevice:
    """One GPU of those that CUDA_VISIBLE_DEVICES shows to this process; see the Device protocol.

    Args:
        index: of the GPU among them; Ray shows a worker its own only, as number 0.
        share: of its memory that this process may take; others have the rest. torch refuses what goes beyond, so that
            a process that needs too much runs out of memory itself, and none beside it does.

    Raises:
        ConfigError: there is none, and why; or the share leaves nothing beside what CUDA takes.
    """

    immediate = False
    encode = staticmethod(cuda.encode)
    decode = staticmethod(cuda.decode)

    def __init__(self, index: int = 0, share: float = 1.0) -> None:
        if reason := why_not(index):
            raise ConfigError(reason)
        self.place = torch.device("cuda", index)
        self.title = torch.cuda.get_device_name(self.place)
        total_bytes = torch.cuda.get_device_properties(self.place).total_memory
        limit_bytes = share_of(self.title, total_bytes, share)
        self.memory_bytes: int | None = limit_bytes
        if share < 1.0:
            torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, self.place)
        self.codes = find_spec("cupy") is not None
        self._streams = {name: torch.cuda.Stream(self.place) for name in Stream}
        self._origin: tuple[CudaMark, float] | None = None  # the last mark that was timed, and when it was reached

    def prepare_thread(self) -> AbstractContextManager[None]:
        torch.set_num_threads(1)
        return torch.cuda.device(self.place)

    def stream(self, name: Stream) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._streams[name])

    def mark(self) -> CudaMark:
        event = torch.cuda.Event(enable_timing=True)
        asked_s = monotonic()
        event.record(torch.cuda.current_stream(self.place))
        return CudaMark(event, asked_s)

    def wait(self, mark: CudaMark, why: str) -> None:
        torch.cuda.current_stream(self.place).wait_event(mark.event)

    def finish(self, mark: CudaMark, why: str) -> None:
        mark.event.synchronize()

    def seconds(self, marks: Sequence[CudaMark]) -> list[float]:
        if not marks:
            return []
        for mark in marks:  # one after the other in a stream: all but the last return at once
            mark.event.synchronize()
        known_s = monotonic()
        first = marks[0]
        since_s = [_between_s(first, mark) for mark in marks]
        guess_s = None if self._origin is None else self._origin[1] + _between_s(self._origin[0], first)
        first_s = placed_s(since_s, [mark.asked_s for mark in marks], known_s, guess_s)
        self._origin = marks[-1], first_s + since_s[-1]
        return [first_s + since for since in since_s]

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device=self.place)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def staging(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def record_stream(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.place))

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.place)


def why_not(index: int = 0) -> str:
    """Why this process cannot compute on a GPU, with the cure; "" where it can."""
    if not torch.backends.cuda.is_built():
        return (
            f"torch {torch.__version__} is built without CUDA, so nothing can compute on a GPU. Install a build with "
            "CUDA (https://pytorch.org/get-started), or compute on the CPU."
        )
    if not torch.cuda.is_available():
        return (
            f"torch sees no GPU: there is none, CUDA_VISIBLE_DEVICES hides it, or its driver is older than the CUDA "
            f"{torch.version.cuda} of torch {torch.__version__}. `raypipe doctor` tells which."
        )
    if index >= torch.cuda.device_count():
        return f"there is no GPU {index}: torch sees {torch.cuda.device_count()}, counted from 0."
    return ""


def share_of(title: str, total_bytes: int, share: float) -> int:
    """Bytes for the tensors of a process with this share of a GPU.

    Raises:
        ConfigError: there are none.
    """
    found = int(total_bytes * share) - CONTEXT_BYTES
    if found <= 0:
        raise ConfigError(
            f"A share of {share:g} of {title} is {human_bytes(int(total_bytes * share))}, and CUDA takes about "
            f"{human_bytes(CONTEXT_BYTES)} of it for each process. Give a larger 'GPU' in "
            "ScalingConfig(resources_per_worker=...), and fewer workers to a GPU."
        )
    return found


def placed_s(since_s: Sequence[float], asked_s: Sequence[float], known_s: float, guess_s: float | None) -> float:
    """Where the moment that a device counts from lies on the host's clock, which the device's drifts against.

    A mark is reached no sooner than it was asked for, and no later than the host knew of it.

    Args:
        since_s: of each mark, seconds on the device since that moment.
        asked_s: of each mark, when it was asked for.
        known_s: when the host knew that all had been reached.
        guess_s: where it would lie if the clocks had not drifted; None for nobody knows, and then the device is taken
            to have been idle. It stays as long as it is possible, so that distances across mini-batches are the
            device's own.
    """
    least = max(asked - since for asked, since in zip(asked_s, since_s, strict=True))
    most = known_s - max(since_s)
    return min(max(least if guess_s is None else guess_s, least), most)


def _between_s(a: CudaMark, b: CudaMark) -> float:
    """From one mark to another, which may have been asked for before it. An event tells milliseconds."""
    if a.asked_s <= b.asked_s:
        return a.event.elapsed_time(b.event) / 1e3
    return -b.event.elapsed_time(a.event) / 1e3

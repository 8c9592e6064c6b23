"""CUDA implementation of ``device.Device``: torch streams, events as marks, pinned staging memory.

    compute     the device's default stream: other work there, such as an optimizer's first state, stays in order
                with it without waits
    copy_in     a stream of its own    |  torch's caching allocator reuses memory of one stream in the order of that
    copy_out    a stream of its own    |  stream; ``record_stream`` registers its use in the others

No call but ``record`` waits for the whole device: ``finish`` waits for one event. Events measure seconds relative to
each other; ``host_offset_s`` maps them to the host's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import torch

from raypipe.engine.codec import cuda
from raypipe.engine.device import cuda_ipc
from raypipe.engine.device.device import ONE_GRAPH, Device, StreamName
from raypipe.errors import ConfigError
from raypipe.ir.units import human_bytes

_T = TypeVar("_T")

CONTEXT_BYTES = 768 << 20
"""Estimate of the GPU memory in bytes that a process uses besides its tensors: CUDA's context, kernels, workspaces."""


class CudaMark(NamedTuple):
    """CUDA event, and the time when the host recorded it, in seconds of ``time.monotonic``."""

    event: torch.cuda.Event
    recorded_s: float


class CudaDevice(Device):
    """One of the GPUs in CUDA_VISIBLE_DEVICES; ``Device`` documents the methods.

    Args:
        index: number of the GPU among the visible ones; under Ray a worker sees only its own, as number 0.
        share: fraction of the GPU's memory that this process may use, CUDA's context included. torch raises
            OutOfMemoryError beyond it, so that other processes on the GPU are not affected.

    Raises:
        ConfigError: the GPU is not usable (the message has the reason), or the share is smaller than CUDA's context.
    """

    immediate = False
    graphs = True
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
        self._streams = {name: torch.cuda.Stream(self.place) for name in StreamName}
        self._recorder = torch.cuda.Stream(self.place)
        self._origin: tuple[CudaMark, float] | None = None  # the last mark that was timed, and when it was reached

    def prepare_thread(self) -> AbstractContextManager[None]:
        torch.set_num_threads(1)
        return torch.cuda.device(self.place)

    def stream(self, name: StreamName) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._streams[name])

    def mark(self) -> CudaMark:
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # threads that wait leave the processor to others
        recorded_s = monotonic()
        event.record(torch.cuda.current_stream(self.place))
        return CudaMark(event, recorded_s)

    def wait(self, mark: CudaMark, why: str) -> None:
        torch.cuda.current_stream(self.place).wait_event(mark.event)

    def reached(self, mark: CudaMark) -> bool:
        return bool(mark.event.query())

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
        first_s = host_offset_s(since_s, [mark.recorded_s for mark in marks], known_s, guess_s)
        self._origin = marks[-1], first_s + since_s[-1]
        return [first_s + since for since in since_s]

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(elements, dtype=dtype, device=self.place)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cuda"

    def share(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        return cuda_ipc.share(self.place.index, nbytes)

    def open_shared(self, handle: bytes, nbytes: int) -> torch.Tensor:
        return cuda_ipc.open_shared(self.place.index, handle, nbytes)

    def staging(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def record_stream(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.place))

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(
        self, run: Callable[[], _T], pool: Any, generators: Iterable[torch.Generator] = ()
    ) -> tuple[Callable[[], None], _T]:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            if generator.device.type != "cuda":
                raise RuntimeError("it draws random numbers in host memory")
            graph.register_generator_state(generator)
        # "thread_local": other threads of this process, such as senders, wait for events meanwhile.
        recording = torch.cuda.graph(graph, pool=pool, stream=self._recorder, capture_error_mode="thread_local")
        with ONE_GRAPH, recording:
            result = run()
        # Up to torch 2.12 a recording writes seeds in its stream, where a replay in this stream is to write others.
        torch.cuda.current_stream(self.place).wait_stream(self._recorder)

        def replay() -> None:
            with ONE_GRAPH:
                graph.replay()

        return replay, result

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.place)


def why_not(index: int = 0) -> str:
    """Explain why this process cannot compute on a GPU, with the fix; "" if it can."""
    if not torch.backends.cuda.is_built():
        return (
            f"torch {torch.__version__} is built without CUDA, so nothing can compute on a GPU. Install a build with "
            "CUDA (https://pytorch.org/get-started), or compute on the CPU."
        )
    if not torch.cuda.is_available():
        return (
            f"torch sees no GPU: the machine has no GPU, CUDA_VISIBLE_DEVICES hides it, or its driver is older than "
            f"CUDA {torch.version.cuda} of torch {torch.__version__}. `raypipe doctor` shows which."
        )
    if index >= torch.cuda.device_count():
        return f"there is no GPU {index}: torch sees {torch.cuda.device_count()}, counted from 0."
    return ""


def share_of(title: str, total_bytes: int, share: float) -> int:
    """Compute the bytes of GPU memory that a process may use for tensors: its share, less CONTEXT_BYTES.

    Args:
        title: name of the GPU, for the error message.
        total_bytes: memory of the GPU.
        share: fraction of the GPU's memory for this process.

    Raises:
        ConfigError: the share is not larger than CUDA's context.
    """
    limit_bytes = int(total_bytes * share) - CONTEXT_BYTES
    if limit_bytes <= 0:
        raise ConfigError(
            f"A share of {share:g} of {title} is {human_bytes(int(total_bytes * share))}, and CUDA takes about "
            f"{human_bytes(CONTEXT_BYTES)} of it for each process. Give a larger 'GPU' in "
            "ScalingConfig(resources_per_worker=...), and fewer workers to a GPU."
        )
    return limit_bytes


def host_offset_s(
    since_s: Sequence[float], recorded_s: Sequence[float], known_s: float, guess_s: float | None
) -> float:
    """Estimate when the device reached the first of several marks, in seconds of the host's clock.

    CUDA events measure only seconds between marks, and the two clocks drift apart. Each mark was reached after the host
    recorded it, and before the host saw it as reached. These bounds limit the estimate.

    Args:
        since_s: device seconds from the first mark to each mark.
        recorded_s: host time at which each mark was recorded.
        known_s: host time at which all marks were known to be reached.
        guess_s: host time of the first mark, computed from earlier marks without clock drift. The guess is returned if
            it is within the bounds, else the nearest bound. None returns the lower bound, as for an idle device.
    """
    least = max(recorded - since for recorded, since in zip(recorded_s, since_s, strict=True))
    most = known_s - max(since_s)
    return min(max(least if guess_s is None else guess_s, least), most)


def _between_s(a: CudaMark, b: CudaMark) -> float:
    """Return the seconds from mark ``a`` to mark ``b``, negative if ``b`` was recorded first."""
    if a.recorded_s <= b.recorded_s:
        return a.event.elapsed_time(b.event) / 1e3
    return -b.event.elapsed_time(a.event) / 1e3

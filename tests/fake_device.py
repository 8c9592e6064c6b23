"""A device whose kernels and copies run late, on a machine without one: what was not waited for is NaN.

    call        memory for the result, filled with NaN (integers: 0); the work joins the queue of the current stream
    finish      the work that the mark depends on is done, and before it, by ``eager``, as much of the other streams
                as waits allow, or none of it

Tensors are in host memory, and every operation on one that the device made is a kernel of it. So an operation that
reads too early, or memory that is written too early, changes bits; memory of another stream that was not recorded there
is taken to be given away. A wait can be left out by name. What reads a value on the host without the seam fails.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from raypipe.engine.codec.cuda import THREADS, grid_of, kernel_name
from raypipe.engine.device.device import Device, StreamName
from tests.emulators.cuda import Emulated
from tests.fake_graphs import NOT_RECORDED, Tape, with_states

__all__ = ["FakeDevice", "Reached"]

_T = TypeVar("_T")

COMPUTE = "compute"
_ONE_KERNEL = threading.Lock()
"""The emulator of kernels has one set of threads."""


READ = "a value of the device was read without the seam"
_READERS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class Reached(NamedTuple):
    """A mark: so many pieces of work of a stream."""

    stream: str
    count: int


class FakeDevice(Device):
    """One worker's device; see the Device protocol.

    Args:
        eager: run other streams as far as waits allow, before the one that is waited for; else only what must be.
        without: name of the wait that is left out.
        kernels: of codecs, run on this processor (tests/emulators/cuda.py); None leaves codecs to the links.
    """

    place = torch.device("cpu")
    immediate = False
    graphs = True
    title = "a fake device"
    memory_bytes: int | None = None

    def __init__(self, *, eager: bool, without: str = "", kernels: Emulated | None = None) -> None:
        self.codes, self._kernels = kernels is not None, kernels
        self.launched: set[str] = set()
        """Names of the kernels that were run."""
        self.eager, self.without = eager, without
        self.waits: set[str] = set()
        """Names of all waits that were asked for."""
        self.calls: Counter[str] = Counter()
        """Calls by kind. Waits are those of the host; after "stalls" among them the computing stream has no work."""
        names = (COMPUTE, *StreamName)
        self._queues: dict[str, deque[Callable[[], None] | Reached]] = {name: deque() for name in names}
        self._done = dict.fromkeys(names, 0)
        self._in = threading.local()  # the thread's stream
        self._lock = threading.RLock()
        self._owner: dict[int, tuple[weakref.ref[Any], set[str]]] = {}
        self.recorded = self.replayed = 0
        """Graphs that were made, and how often one was queued."""

    @contextmanager
    def prepare_thread(self) -> Iterator[None]:
        torch.set_num_threads(1)
        with _Late(self), _Unread(self):
            yield

    @contextmanager
    def stream(self, name: StreamName) -> Iterator[None]:
        before, self._in.stream = self._current, name
        self._count("stream switches")
        try:
            yield
        finally:
            self._in.stream = before

    @property
    def _current(self) -> str:
        return getattr(self._in, "stream", COMPUTE)

    def mark(self) -> Reached:
        with self._lock:
            self._count("events")
            return Reached(self._current, self._done[self._current] + len(self._queues[self._current]))

    def wait(self, mark: Reached, why: str) -> None:
        self.waits.add(why)
        if why != self.without:
            self._queues[self._current].append(mark)

    def reached(self, mark: Reached) -> bool:
        with self._lock:
            return self._done[mark.stream] >= mark.count

    @property
    def tape(self) -> Tape | None:
        """Of the thread's recording; None outside of one."""
        return getattr(self._in, "tape", None)

    def new_pool(self) -> object:
        return object()

    def record(
        self, run: Callable[[], _T], pool: Any, generators: Iterable[torch.Generator] = ()
    ) -> tuple[Callable[[], None], _T]:
        assert self.tape is None, "a recording inside of a recording"
        tape = self._in.tape = Tape(generators)
        try:
            result = run()
        finally:
            self._in.tape = None
        tape.refuse_seeding()
        self.recorded += 1

        def replay() -> None:
            stream, used, states = self._current, tape.used(), tape.states()

            def work() -> None:
                with torch.no_grad(), _disable_current_modes(), _below_autograd():
                    tape.play(used, states)
                    if not all(self._may_use(x, stream) for x in used.values()):
                        for x in used.values():
                            x.fill_(0xFF)

            self._queues[stream].append(work)
            self.replayed += 1

        return replay, result

    def finish(self, mark: Reached, why: str) -> None:
        if self.tape is not None:
            raise RuntimeError(f"{NOT_RECORDED}: the host waits for the device")
        self.waits.add(why)
        self._count("waits")
        if why != self.without:
            with self._lock:
                if self.eager:
                    self._run_others(mark.stream)
                self._run(mark)
                if not self._queues[COMPUTE] and not threading.current_thread().name.startswith("raypipe-send"):
                    self._count("stalls")

    def seconds(self, marks: Sequence[Reached]) -> list[float]:
        if marks:
            self.finish(marks[-1], "times are read once they have passed")
        return [time.monotonic()] * len(marks)

    def empty(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        with _disable_current_modes():
            return self._made(torch.empty(elements, dtype=dtype))

    def share(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        descriptor = os.memfd_create("fake-device", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        memory = mmap.mmap(descriptor, nbytes)
        weakref.finalize(memory, os.close, descriptor)
        return self._own(torch.frombuffer(memory, dtype=torch.uint8)), f"{os.getpid()}/fd/{descriptor}".encode()

    def open_shared(self, handle: bytes, nbytes: int) -> torch.Tensor:
        descriptor = os.open(f"/proc/{handle.decode()}", os.O_RDWR)
        try:
            return self._own(torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8))
        finally:
            os.close(descriptor)

    def staging(self, nbytes: int) -> torch.Tensor:
        self._count("pinned allocations")
        with _disable_current_modes():
            return torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # as floats: NaN

    def record_stream(self, tensor: torch.Tensor) -> None:
        assert self.holds(tensor), "streams share memory of the device"
        self._count("record_streams")
        if self.without != "record_stream":
            self._owner[id(tensor.untyped_storage())][1].add(self._current)

    def encode(self, name: str, flat: torch.Tensor, wire: torch.Tensor, key: int | None = None) -> None:
        self._launch(kernel_name("encode", name, flat.dtype), flat, wire, flat.numel(), key)

    def decode(self, name: str, wire: torch.Tensor, flat: torch.Tensor) -> None:
        self._launch(kernel_name("decode", name, flat.dtype), wire, flat, flat.numel())

    def _launch(
        self, kernel: str, source: torch.Tensor, into: torch.Tensor, elements: int, key: int | None = None
    ) -> None:
        """Queue a kernel of the codecs in the current stream, as ``codec.cuda`` launches it."""
        assert self._kernels is not None, "it codes"
        assert self.holds(source), "kernels read memory of the device"
        assert self.holds(into), "kernels write memory of the device"
        stream, kernels = self._current, self._kernels

        def work() -> None:
            with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
                read, written = (x.detach().view(torch.uint8).numpy() for x in (source, into))
                with _ONE_KERNEL:
                    kernels(kernel, grid_of(kernel, elements), THREADS, read, written, elements, key)
                self.launched.add(kernel)
                if not (self._may_use(source, stream) and self._may_use(into, stream)):
                    _poison(into)

        self._queues[stream].append(work)

    def _count(self, kind: str) -> None:
        with self._lock:
            self.calls[kind] += 1

    def peak_bytes(self) -> int:
        return sum(held().nbytes() for held, _ in list(self._owner.values()) if held() is not None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether this memory is the device's."""
        return id(tensor.untyped_storage()) in self._owner

    def queue(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Carry out an operation later; what it returns is there at once, with nothing in it."""
        with self._lock:
            return self._queue(func, args, kwargs)

    def _queue(self, func: Any, args: Any, kwargs: Any) -> Any:
        meant = with_states((args, kwargs))
        if self.tape is not None:  # where nothing is drawn
            meant, (args, kwargs) = (args, kwargs), meant
        with _disable_current_modes(), _below_autograd():
            changed = _changed(func, args, kwargs)
            copies = {id(x): x.clone() for x in changed}
            outputs = func(*pytree.tree_map(lambda x: copies.get(id(x), x), args),
                           **pytree.tree_map(lambda x: copies.get(id(x), x), kwargs))  # fmt: skip
            given = {id(x.untyped_storage()) for x in _tensors((args, kwargs))}
            originals = {id(copy): x for x in changed for copy in (copies[id(x)],)}
            outputs = pytree.tree_map(lambda x: originals.get(id(x), x), outputs)
            fresh = [x for x in _tensors(outputs) if id(x.untyped_storage()) not in given]
            if not fresh and not changed:
                return outputs  # a view
            for x in fresh:
                self._made(x)
        args, kwargs = meant
        if self.tape is not None:
            self.tape.add(func, args, kwargs, fresh, changed, self.holds)
            return outputs
        stream, used = self._current, list(_tensors((args, kwargs)))

        def work() -> None:
            with torch.no_grad(), _disable_current_modes(), _below_autograd():
                found = func(*args, **kwargs)
                written = [x for x in _tensors(found) if all(x is not y for y in changed)] if fresh else []
                for into, what in zip(fresh, [x for x in written if id(x.untyped_storage()) not in given], strict=True):
                    into.copy_(what)
                if not all(self._may_use(x, stream) for x in used):
                    for x in (*fresh, *changed):
                        _poison(x)

        self._queues[stream].append(work)
        return outputs

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        _poison(tensor)
        return self._own(tensor)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = id(storage)
        self._owner[key] = weakref.ref(storage, lambda _: self._owner.pop(key, None)), {self._current}
        return tensor

    def _may_use(self, tensor: torch.Tensor, stream: str) -> bool:
        owner = self._owner.get(id(tensor.untyped_storage()))
        return owner is None or stream in owner[1]

    def _run(self, mark: Reached) -> None:
        while self._done[mark.stream] < mark.count:
            first = self._queues[mark.stream].popleft()
            if isinstance(first, Reached):
                self._run(first)
            else:
                first()
            self._done[mark.stream] += 1

    def _run_others(self, stream: str) -> None:
        """As far as nothing of this stream is needed."""
        for other, queue in self._queues.items():
            while other != stream and queue:
                if isinstance(queue[0], Reached) and self._done[queue[0].stream] < queue[0].count:
                    break
                self._run(Reached(other, self._done[other] + 1))


class _Late(TorchDispatchMode):
    """Inside, operations on what the device made are queued."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = list(_tensors((args, kwargs)))
        makes = self._device.tape is not None and not used  # memory of the graph, not of the host
        if not makes and not any(self._device.holds(x) for x in used):
            return func(*args, **kwargs)
        if self._device.tape is not None:
            self._device.tape.refuse_unrecordable(func, args, kwargs)
        assert func is not torch.ops.aten._local_scalar_dense.default, READ
        return self._device.queue(func, args, kwargs)


class _Unread(TorchFunctionMode):
    """Inside, what reads memory of the device and is no operation fails."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _READERS or not self._device.holds(args[0]), READ
        return func(*args, **(kwargs or {}))


@contextmanager
def _below_autograd() -> Iterator[None]:
    """As kernels run: they are neither recorded nor counted as changes a second time."""
    hidden = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(hidden):
        yield


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor))


def _changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Arguments that the operation writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    by_name = {argument.name: argument for argument in func._schema.arguments}
    pairs = [*named, *((by_name[name], value) for name, value in kwargs.items())]
    written = [value for a, value in pairs if a.alias_info is not None and a.alias_info.is_write]
    if func is torch.ops.aten.native_batch_norm.default and args[5]:  # whose schema does not say so
        written += args[3:5]
    return list(_tensors(written))


def _poison(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)

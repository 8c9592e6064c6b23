"""What replicas exchange, chunk by chunk: the sums of one worker that has all lanes, in the memory that was planned."""

from __future__ import annotations

import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raypipe.engine.optim.all_reduce import AllReduce
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.stage import Site
from raypipe.ir import communication
from raypipe.ir.communication import exchange_bytes
from tests.engine.rings import exchanges_of, program_of

pytestmark = pytest.mark.engine

SHAPES = {"a": (300, 200), "small": (7,), "unused": (50,), "b": (1000, 99)}


class Live:
    """Bytes of tensors that operations under it have made, and that are still there."""

    def __init__(self) -> None:
        self.bytes = self.most = 0
        self._seen = weakref.WeakSet[Any]()
        self._lock = threading.RLock()

    def add(self, found: Any, *, new: bool) -> None:
        """Tensors that an operation made, or was given and that others made."""
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                with self._lock:
                    if storage not in self._seen:
                        self._seen.add(storage)
                        if new:
                            self._change(storage.nbytes())
                            weakref.finalize(storage, self._change, -storage.nbytes())

    def _change(self, nbytes: int) -> None:
        with self._lock:
            self.bytes += nbytes
            self.most = max(self.most, self.bytes)


class Counting(TorchDispatchMode):
    """Of one thread."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._live.add((args, kwargs), new=False)
        found = function(*args, **(kwargs or {}))
        self._live.add(found, new=True)
        return found


def parameters(dtypes: tuple[torch.dtype, ...]) -> dict[str, torch.nn.Parameter]:
    kinds = itertools.cycle(dtypes)
    return {name: torch.nn.Parameter(torch.ones(shape, dtype=next(kinds))) for name, shape in SHAPES.items()}


def sink_of(lanes: int, dtypes: tuple[torch.dtype, ...]) -> GradientSink:
    known = parameters(dtypes)
    return GradientSink(program_of(tuple(Site(name, 0) for name in known), known), known, lanes=lanes)


def fill(sink: GradientSink, lane: int, update: int) -> None:
    """Of the lanes the last one has nothing for "small", and none has anything for "unused"."""
    draw = torch.Generator().manual_seed(100 * update + lane)
    sink.use_lane(lane)
    last = len(sink._sums_of_lanes) - 1
    skipped = {2, 1} if lane == last else {2}
    sink.add(
        [
            None if site in skipped else torch.randn(x.shape, generator=draw).to(x.dtype)
            for site, x in enumerate(sink.trained)
        ]
    )


@pytest.mark.parametrize(("replicas", "lanes"), [(2, 2), (2, 4), (3, 5)])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16)], ids=["fp32", "mixed"])
def test_chunks_change_no_bit_and_memory_is_as_planned(
    replicas: int, lanes: int, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication, "CHUNK_BYTES", 48_000)
    one, sinks = sink_of(lanes, dtypes), [sink_of(lanes, dtypes) for _ in range(replicas)]
    works, _ = exchanges_of(sinks, lanes)
    live = Live()

    def run(worker: int, microbatch: int) -> None:
        with torch.no_grad(), Counting(live):
            works[worker].run(microbatch)

    gradient_bytes = sum(x.nbytes for x in one.trained)
    memory: list[set[int]] = []
    for update in range(3):
        for lane in range(lanes):
            fill(one, lane, update)
            fill(sinks[lane % replicas], lane, update)
        one.close()
        live.most = live.bytes = 0
        with ThreadPoolExecutor(replicas) as pool:
            list(pool.map(run, range(replicas), itertools.repeat(update)))
        planned = replicas * exchange_bytes(gradient_bytes, lanes, replicas)
        told = replicas**2 * len(SHAPES) * lanes  # a byte for each site, lane and message
        # Sums of the first update's sites that a lane reached elsewhere alone are made on the way, and stay.
        made = SHAPES["small"][0] * 4 * replicas
        assert planned / 8 < live.most <= planned + told + made
        assert live.most < replicas * gradient_bytes, "and it is less than a copy of the gradients"
        for sink in sinks:
            sites = range(len(SHAPES))
            for mine, other in zip(sink.sums_of(0, sites), one.sums_of(0, sites), strict=True):
                assert (mine is None) == (other is None)
                assert mine is None or torch.equal(mine, other)  # type: ignore[arg-type]
        for sink in (one, *sinks):
            sink.reset()
        memory.append({x.data_ptr() for sink in sinks for kept_of_site in sink._kept for x in kept_of_site})
        sizes = [sum(x.nbytes for kept_of_site in sink._kept for x in kept_of_site) for sink in sinks]
        assert max(sizes) <= -(-lanes // replicas) * gradient_bytes, "no more sums than lanes"
    assert memory[1] == memory[2]


def emulated(lanes: int, update: int, dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor | None]:
    """Sums of lanes rounded to bf16, added up in their own type in the order of lanes, and rounded again."""
    sinks = [sink_of(lanes, dtypes) for _ in range(lanes)]
    for lane, sink in enumerate(sinks):
        fill(sink, lane, update)
    found: list[torch.Tensor | None] = []
    for site in range(len(SHAPES)):
        parts = [x for lane, sink in enumerate(sinks) if (x := sink.sums_of(lane, [site])[0]) is not None]
        if not parts:
            found.append(None)
            continue
        total = parts[0].to(torch.bfloat16).to(parts[0].dtype)
        for part in parts[1:]:
            total = total + part.to(torch.bfloat16).to(part.dtype)
        found.append(total.to(torch.bfloat16).to(parts[0].dtype))
    return found


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float64, torch.bfloat16)], ids=["fp32", "mixed"])
def test_sums_in_bf16_are_those_of_an_emulator_for_any_number_of_replicas(
    replicas: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    lanes = 6
    sent_bytes = [0] * replicas
    sinks = [sink_of(lanes, dtypes) for _ in range(replicas)]

    def sent(me: int, tensors: Any) -> None:
        sent_bytes[me] += sum(x.nbytes for x in tensors if x is not None and x.dtype != torch.uint8)

    def run(work: AllReduce) -> None:
        with torch.no_grad():
            work.run(0)

    for lane in range(lanes):
        fill(sinks[lane % replicas], lane, 0)
    with ThreadPoolExecutor(replicas) as pool:
        list(pool.map(run, exchanges_of(sinks, lanes, "bf16", sent)[0]))
    wanted = emulated(lanes, 0, dtypes)
    for sink in sinks:
        for mine, other in zip(sink.sums_of(0, range(len(SHAPES))), wanted, strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or torch.equal(mine, other)  # type: ignore[arg-type]
    elements = sum(x.numel() for x in sinks[0].trained)
    most = 2 * elements * (replicas - 1) * (lanes // replicas + 1) / replicas
    assert all(nbytes <= most + 2 * replicas * lanes for nbytes in sent_bytes), "two bytes for each number"

"""Training from graphs of a fake device has the bits of training without; what a graph must not do changes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import cache, partial
from random import Random
from typing import Any

import pytest
import torch

from raypipe.capture import Capture, capture
from raypipe.data.open_data import open_data
from raypipe.engine import stage_runner
from raypipe.engine.device.device import CPU, Device, TransferKind
from raypipe.engine.device_functions import placed
from raypipe.engine.local import LocalFleet
from raypipe.engine.messages.channel import Message
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import Settings
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage import gradients, graphs, randomness
from raypipe.engine.stage.activation_stash import ActivationStash
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.graphs import StageGraphs
from raypipe.engine.stage.randomness import GraphKey, RandomKey
from raypipe.engine.stage.weight_ring import WeightRing
from raypipe.errors import RaypipeError, StageError
from raypipe.ir.precision import PRECISIONS
from raypipe.ir.schedule import single_homes
from raypipe.ir.segment import Order
from raypipe.planner.partition.chain import equal_parameters
from raypipe.planner.search import microbatches
from raypipe.planner.segments import train_segments
from tests.device_run import gone_back
from tests.exactness import SHAPES, config_of, request_of, rows_of, same_bits
from tests.fake_device import FakeDevice
from tests.models import case

Found = list[torch.Tensor | float | None]
STEPS = 20
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=5e-2, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}


@cache
def captured(name: str, precision: str) -> Capture:
    found = case(name)
    model, source = found.model(), open_data(found.data(4), seed=0)
    columns = source.columns if found.loss_fn is None else tuple(range(len(source.columns)))
    return capture(model, source.read(0, 0, 2, columns), columns, found.loss_fn, precision=PRECISIONS[precision])


def fleet_of(
    device_of: Callable[[int], Device], *, graphs: bool, name: str = "mlp", stages: int = 1, precision: str = "fp32",
    optimizer: str = "sgd", clip: float | None = None, samples: int = 40,
) -> LocalFleet:  # fmt: skip
    made = captured(name, precision)
    programs = made.programs(equal_parameters(made.graph, stages).cuts)
    source, reduction = open_data(case(name).data(samples), seed=0), "valid_tokens" if name == "masked" else "mean"
    settings = Settings(0, reduction, clip, 60.0)
    with device_of if isinstance(device_of, Devices) else nullcontext():
        return LocalFleet(
            RunSetup(OPTIMIZERS[optimizer], None, {"train": source}, settings, cuda_graphs=graphs),
            GenerationSetup(programs, single_homes(range(stages))),
            {**made.parameters, **made.buffers},
            device_of,
        )


def run(
    device_of: Callable[[int], Device], *, schedule: str = "1f1b", shape: str = "even", steps: int = STEPS,
    moves: bool = False, **given: Any,
) -> Found:  # fmt: skip
    """Losses and norms of all steps, and parameters and buffers after the last; the first may move parameters."""
    stages, sizes = given.get("stages", 1), SHAPES[shape]
    request = request_of(config_of(sizes, stages, schedule, max_grad_norm=given.get("clip")), sizes.samples)
    fleet = fleet_of(device_of, samples=sizes.samples, **given)
    try:
        rows = rows_of(request, [program.program for program in fleet._works])
        minibatch, size, _ = microbatches(request, stages)
        orders = (Order(segment) for segment, _ in train_segments(sizes.samples, minibatch, size, steps))
        found: Found = []
        for step, reports in enumerate(fleet.run(orders, rows)):
            found += [x for of_stage in reports for r in of_stage for x in (r.loss, r.grad_norm)]
            if moves and not step:
                move(fleet)
        return found + state_of(fleet)
    finally:
        fleet.stop()


def state_of(fleet: LocalFleet) -> Found:
    """Parameters and buffers of all stages, in host memory."""
    found: Found = []
    for executor in fleet.executors:
        for work in executor.works.values():
            held = {**work.state.parameters, **work.state.buffers}
            found += executor.transfer.copied(held, TransferKind.SNAPSHOT).values()
    return found


def move(fleet: LocalFleet) -> None:
    """Give all parameters other memory, as an optimizer may that assigns ``parameter.data``."""
    state_of(fleet)  # what is queued has the old memory
    for executor in fleet.executors:
        with executor.device.prepare_thread():
            for work in executor.works.values():
                for parameter in work.state.parameters.values():
                    parameter.data = parameter.data.clone()
                work.ring.follow()


@cache
def plainly(**given: Any) -> Found:
    return run(lambda worker: CPU, graphs=False, **given)


def same(found: Found, wanted: Found) -> bool:
    return len(found) == len(wanted) and all(map(_same, found, wanted))


def _same(a: torch.Tensor | float | None, b: torch.Tensor | float | None) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_bits(a, b)
    return repr(a) == repr(b)


class Devices(ExitStack):
    """Makes fake devices and keeps them; what a worker makes while it begins is on its device."""

    def __init__(self, *, eager: bool = False) -> None:
        super().__init__()
        self._eager = eager
        self.made: list[FakeDevice] = []

    def __call__(self, worker: int) -> FakeDevice:
        self.close()
        self.made.append(FakeDevice(eager=self._eager))
        self.enter_context(self.made[-1].prepare_thread())
        return self.made[-1]


RUNS: dict[str, dict[str, Any]] = {
    "one stage": {"schedule": "gpipe"},
    "two stages": {"stages": 2, "clip": 0.5},
    "gpipe in bf16 autocast": {"stages": 2, "schedule": "gpipe", "precision": "bf16-autocast", "optimizer": "adamw"},
    "bf16": {"stages": 2, "precision": "bf16", "optimizer": "adamw", "clip": 0.5},
    "batch norm": {"stages": 2, "name": "cnn"},
    "tied": {"stages": 2, "name": "tied-lm"},
    "no valid target": {"stages": 2, "name": "masked", "schedule": "gpipe"},
    "frozen below": {"stages": 3, "name": "frozen-below"},
    "smaller ones": {"stages": 2, "shape": "ragged-epoch"},
    "draws on one stage": {"name": "noisy"},
    "draws": {"stages": 2, "name": "noisy", "schedule": "gpipe"},
    "dropout in attention": {"stages": 2, "name": "attention"},
    "dropout in attention on one stage": {"name": "attention", "schedule": "gpipe", "precision": "bf16-autocast"},
}


@pytest.mark.parametrize("name", RUNS)
def test_replayed_steps_have_the_bits_of_eager_ones(name: str) -> None:
    devices = Devices()
    assert same(run(devices, graphs=True, **RUNS[name]), plainly(**RUNS[name]))
    assert all(0 < device.recorded <= 8 for device in devices.made), "a forward and a backward for each in flight"
    microbatches = STEPS * SHAPES["even"].microbatches
    if name not in ("smaller ones", "no valid target"):  # where some micro-batches are eager or have no backward
        for device in devices.made:  # the first micro-batch is eager
            both = 2 * (microbatches - 1)
            assert device.replayed in (both, both // 2), "a frozen first stage has no backward"


def test_gradients_that_hooks_add_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of large weights are, before the next one is computed."""
    wanted = plainly(**TWO)
    monkeypatch.setattr(gradients, "LARGE_ON_DEVICE_BYTES", 1)
    assert same(run(Devices(), graphs=True, **TWO), wanted)


def test_output_gradients_of_another_layout_have_a_graph_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other one of a slot has gaps, as those of tensors have that the loss concatenates."""
    wanted, backwards, graphs_of_a_slot = plainly(**TWO), Counter[int](), set()

    def spread(run: Any, self: Any, slot: Any, output_grads: Any) -> Any:
        backwards[id(slot)] += 1
        if backwards[id(slot)] % 2 == 0:
            output_grads = [x if x is None else torch.cat((x, x), -1)[..., : x.shape[-1]] for x in output_grads]
        found = run(self, slot, output_grads)
        graphs_of_a_slot.add(len(slot.backwards))
        return found

    _around("backward", spread)(monkeypatch)
    assert same(run(Devices(), graphs=True, **TWO), wanted)
    assert graphs_of_a_slot == {1, 2}


def test_a_state_that_goes_back_is_read_where_it_is() -> None:
    plain = gone_back(lambda worker: CPU)
    assert same(gone_back(lambda worker: FakeDevice(eager=False), graphs=True), plain)


ALONE: dict[str, tuple[int, int, Sequence[int]]] = {
    "dict-output": (2, 1, (8,)), "cnn": (2, 0, ()), "tied-lm": (1, 0, ()), "frozen-below": (3, 0, ()),
}  # fmt: skip
"""Number of stages; the one that runs by itself: with two outputs, buffers, a parameter used twice, or none trained;
widths of its inputs."""


def alone(device: Device, name: str, *, graphs: bool) -> Found:
    """What leaves a stage, as it is at the end of its step, when slots have been used again.

    Backwards come in a drawn order, and some micro-batches are smaller. In a step, the gradient of the first of
    two outputs may not come, or all have other strides; after it, buffers or parameters may have moved.
    """
    (stages, stage, widths), made, draw = ALONE[name], captured(name, "fp32"), Random(0)
    program = made.programs(equal_parameters(made.graph, stages).cuts)[stage]
    transfer, source, drawn = DeviceTransfer(device), open_data(case(name).data(66), seed=0), torch.Generator()
    given = transfer.named({**made.parameters, **made.buffers}, TransferKind.PARAMETERS)
    found: Found = []
    with device.prepare_thread():
        parameters = {n: torch.nn.Parameter(given[n].clone(), n in program.trainable) for n in program.parameters}
        buffers = [given[n].clone() for n in program.train.buffers]
        sink = GradientSink(program, parameters, fixed=graphs)
        ring = WeightRing(program, parameters, watch=sink.watch)
        stash, function = ActivationStash(sink, ring, sends_input_grads=True), placed(program.train, transfer)
        if graphs:
            function = StageGraphs(function, stage, device, sink)
        for step, special in enumerate(("", "buffers", "none", "strides", "parameters", "none", "none", "")):
            ring.begin(8 * step, 8)
            ahead, flight, left = list(range(8 * step, 8 * step + 8)), list[tuple[int, Any]](), list[Any]()
            while ahead or flight:
                if not flight or (ahead and len(flight) < 3 and draw.random() < 0.6):
                    microbatch, size = ahead.pop(0), draw.choice((2, 2, 2, 1))
                    ins = [torch.randn(size, width, generator=drawn).requires_grad_() for width in widths]
                    inputs = transfer.to_device(ins, TransferKind.INPUTS)
                    read = source.read(0, microbatch, size, program.train.columns)
                    columns = transfer.to_device(read, TransferKind.COLUMNS)  # type: ignore[arg-type]
                    ring.enter(microbatch, 0)
                    key = RandomKey(0, step, microbatch)
                    outputs = function(ring.leaves(microbatch), buffers, inputs, columns, key)  # type: ignore[arg-type]
                    if any(x.requires_grad for x in outputs):
                        stash.hold(microbatch, Message(inputs), outputs)
                        flight.append((microbatch, outputs))
                        left += [x.detach().clone() for x in outputs]
                    else:
                        ring.leave(microbatch)
                        left += outputs
                else:
                    microbatch, outputs = flight.pop(draw.randrange(len(flight)))
                    grads: list[torch.Tensor | None] = [torch.randn(x.shape, generator=drawn) for x in outputs]
                    if special == "none" and len(grads) > 1:
                        grads[0] = None
                    if special == "strides":
                        grads = [x if x is None else x.mT.contiguous().mT for x in grads]
                    stash.set_output_grads(microbatch, transfer.to_device(grads, TransferKind.OUTPUT_GRADS))
                    stash.backward(microbatch)
                    left += stash.take_input_grads(microbatch)
            sink.close()
            sink.finish(())
            left += [parameter.grad for parameter in parameters.values()] + buffers
            found += [None if x is None else x.clone() for x in transfer.to_host(left, TransferKind.SNAPSHOT)]
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=0.05)
                if special == "parameters":
                    parameter.data = parameter.data.clone()
            ring.follow()
            if special == "buffers":
                buffers = [x.clone() for x in buffers]
            sink.reset()
    return found


@pytest.mark.parametrize("name", ALONE)
def test_what_leaves_a_stage_is_not_changed_by_its_next_micro_batches(name: str) -> None:
    device = FakeDevice(eager=False)
    assert same(alone(device, name, graphs=True), alone(CPU, name, graphs=False))
    # A forward and backwards of three layouts of gradients for each of three in flight, recorded again twice.
    assert 0 < device.recorded <= 36
    assert device.replayed > 40


def test_a_device_without_graphs_is_refused() -> None:
    with pytest.raises(StageError, match=r"cuda_graphs=True: stage 0 is on a device without graphs \(CPU\)"):
        fleet_of(lambda worker: CPU, graphs=True)


Patch = Callable[[pytest.MonkeyPatch], None]


def _uncopied(which: Callable[[torch.Tensor], bool]) -> Patch:
    """Some tensors are not copied into their slot."""
    fill = graphs.fill
    return lambda patch: patch.setattr(graphs, "fill", lambda into, x: None if which(x) else fill(into, x))


def _around(name: str, changed: Callable[..., Any], where: Any = StageGraphs) -> Patch:
    """``changed(original, *arguments)`` takes the place of a method."""
    original = getattr(where, name)
    return lambda patch: patch.setattr(where, name, lambda *args, **kwargs: changed(original, *args, **kwargs))


def _shared(call: Any, self: Any, *args: Any) -> Any:
    outputs = call(self, *args)
    self._free[:] = self._slots[:1]
    return outputs


def _freed(record: Any, self: Any, slot: Any, output_grads: Any) -> Any:
    recorded = record(self, slot, output_grads)
    slot.outputs = tuple(x.detach() for x in slot.outputs)
    return recorded


def _once(run: Any, self: Any, slot: Any, output_grads: Any) -> Any:
    before = [recorded.input_grads for recorded in slot.backwards.values() if recorded.input_grads]
    return before[0] if before else run(self, slot, output_grads)


def _read(init: Any, self: Any, function: Any, *args: Any) -> None:
    init(self, _Also(function, lambda x: float(x.sum())), *args)


def _drawn(init: Any, self: Any, function: Any, *args: Any) -> None:
    init(self, _Also(function, lambda x: torch.rand_like(x)), *args)


def _drawn_back(run: Any, self: Any, slot: Any, output_grads: Any) -> Any:
    torch.rand_like(slot.outputs[0])
    return run(self, slot, output_grads)


def _seeded_inside(patch: pytest.MonkeyPatch) -> None:
    generator = randomness._generator
    patch.setattr(randomness, "_generator", lambda *draw: generator(*draw).manual_seed(1))


class _Also:
    """A stage's function that does something else, too."""

    def __init__(self, function: Any, other: Callable[[torch.Tensor], Any]) -> None:
        self.function, self.other = function, other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __call__(self, *args: Any) -> Any:
        if isinstance(args[2], list):  # in a recording
            self.other(args[0][0])
        return self.function(*args)


def _unbegun(begin: Any, sink: Any, uses: Sequence[int]) -> None:
    for use in uses:
        sink._total(sink._trained_at[use])


def _moved(init: Any, self: Any, *args: Any, fixed: bool, **kwargs: Any) -> None:
    init(self, *args, fixed=False, **kwargs)


TWO: dict[str, Any] = {"stages": 2, "steps": 3}
NOISY = TWO | {"name": "noisy"}
FAULTS: dict[str, tuple[Patch, dict[str, Any]]] = {
    "an input is not copied": (_uncopied(lambda x: x.requires_grad), TWO),
    "a column is not copied": (_uncopied(lambda x: x.shape[-1:] == (6,)), TWO),
    "output gradients are not copied": (_uncopied(lambda x: x.shape[-1:] == (3,) and not x.requires_grad), TWO),
    "two micro-batches in flight share a slot": (_around("__call__", _shared), TWO),
    "sums go on from the step before": (_around("open", _unbegun, GradientSink), TWO),
    "sums move": (_around("__init__", _moved, GradientSink), TWO),
    "activations are given away": (_around("_new_backward", _freed), TWO),
    "a backward is not repeated": (_around("backward", _once), TWO),
    "the host reads a value": (_around("__init__", _read), TWO),
    "a graph draws without a generator": (_around("__init__", _drawn), TWO),
    "a backward draws": (_around("_gradients", _drawn_back), TWO),
    "a generator is not registered": (_around("_record", lambda record, self, run, drawn=(): record(self, run)), NOISY),
    "a generator is seeded in a recording": (_seeded_inside, NOISY),
    "draws are not seeded anew": (_around("seed_generators", lambda seed, key: None, GraphKey), NOISY),
    "draws have the seeds of another micro-batch": (_around("seed_generators", lambda seed, key: seed(
        GraphKey(RandomKey(*key)._replace(microbatch=1), key.generators)), GraphKey), NOISY),
    "parameters have moved": (
        lambda patch: patch.setattr(graphs, "_addresses", lambda tensors: []), TWO | {"moves": True, "steps": 4}
    ),
    "another shape is replayed": (
        lambda patch: patch.setattr(graphs, "_layout", lambda tensors: ()), TWO | {"shape": "ragged-microbatch"}
    ),
}  # fmt: skip


@cache
def replays_well(**given: Any) -> bool:
    """Without a fault."""
    return all(same(run(Devices(eager=eager), graphs=True, **given), plainly(**given)) for eager in (False, True))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_graph_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, given = FAULTS[name]
    assert replays_well(**given)
    wanted = plainly(**given)
    patch(monkeypatch)
    with suppress(RaypipeError):
        assert not all(same(run(Devices(eager=eager), graphs=True, **given), wanted) for eager in (True, False))


def test_graphs_of_an_executor_before_are_not_those_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a recovery: the next one has other parameters and sums."""
    kept: dict[int, StageGraphs] = {}

    def same_again(function: Any, stage: int, *more: Any) -> StageGraphs:
        return kept.setdefault(stage, StageGraphs(function, stage, *more))

    monkeypatch.setattr(stage_runner, "StageGraphs", same_again)
    assert same(run(Devices(), graphs=True, **TWO), plainly(**TWO))
    with suppress(RaypipeError):
        assert not same(run(Devices(), graphs=True, **TWO), plainly(**TWO))

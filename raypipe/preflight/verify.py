"""Comparison of the user's module with the captured stages on two micro-batches A and B (verify="first_step").

    module    A, then B, in plain PyTorch
    stages    A, then B, each from the buffers that the module had before it

Loss, gradients and buffers must be equal up to rounding: stages add the gradients of a shared parameter use by use
(docs/design/0002), and another layout of a tensor may select another kernel (docs/design/0017). Random numbers are
keyed as in training, and one thread computes. If the results differ, the model is cut into as many stages as possible
and run again, and the error names the first module whose output differs.

The user's module itself runs, not a copy, because a loss may refer to it; its state is restored afterwards.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from raypipe.capture import Capture
from raypipe.capture.guards import generators_kept, in_mode
from raypipe.capture.own_loss import own_loss
from raypipe.capture.python_state import Memory, read_memory, refuse_change
from raypipe.engine.stage.mixed_precision import computing, converted, model_converted
from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey
from raypipe.engine.stage.stage import GraphFunction, StageFunction, StageProgram
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import CaptureError, RaypipeError
from raypipe.ir.precision import Precision
from raypipe.preflight.dry_run import refuse_changed_by_backward
from raypipe.user_lines import quoted, short

Columns = Mapping[Any, torch.Tensor]
Tensors = Mapping[str, torch.Tensor]
LossFn = Callable[[Any, Any], torch.Tensor]
Calls = list[tuple[str, list[torch.Tensor]]]
"""Path and output tensors of every call of a module, in the order in which the calls end."""

ROUNDING = 1e-5
"""Largest allowed difference, relative to the largest value of a tensor; ``_rounding`` raises it for 16-bit types."""
_CURE = (
    "Forward or loss depends on something besides data, parameters and buffers (a global, a file, an attribute, an "
    "earlier call), or does what a trace loses. Pass it in as data or keep it in a buffer; an nn.Sequential of blocks "
    "is not traced; verify='off' trains the stages as they are."
)


class _Outcome(NamedTuple):
    """Results of one micro-batch.

    Attributes:
        gradients: gradient by parameter name; None for a parameter without one.
        buffers: contents of the buffers afterwards, by name.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def verify(
    model: nn.Module, captured: Capture, programs: Sequence[StageProgram], batches: Sequence[Columns], seed: int
) -> None:
    """Compare the user's module, on the CPU, with the stages that were captured from it, on two micro-batches.

    The module's state and gradients are restored afterwards.

    Args:
        batches: columns of each micro-batch, in the order in which the module takes them.
        seed: seed of the random numbers.

    Raises:
        CaptureError: the results differ (names the value, the difference and the first module), the module keeps state
            between calls, or it fails.
    """
    name = type(model).__name__
    with one_thread(), generators_kept(f"{name} or its loss"), _kept(model):
        before = read_memory(model, captured.loss_fn)
        check = _Check(model, captured, seed, before, _contents(model.named_buffers()))
        try:
            expected, _ = check.module(batches)
            held, added = check.start, dict[str, torch.Tensor | None]()
            for index, (columns, wanted) in enumerate(zip(batches, expected, strict=True)):
                run = functools.partial(check.stages, programs, held, columns, index)
                outcome, _ = _attempt(f"The stages of {name}", run)
                least = _rounding(check.precision, check.tensors)
                if difference := _difference(wanted, outcome, held, added, least):
                    where = check.first_module(batches[: index + 1], held, least)
                    raise CaptureError(
                        f"verify='first_step': on micro-batch {index + 1} of 2 the stages of {name} do not compute "
                        f"what {name} computes: {difference}{where}. {_CURE}"
                    )
                held, added = wanted.buffers, {} if check.precision.leaves else wanted.gradients
        finally:
            before.restore()


@dataclass(frozen=True, slots=True)
class _Check:
    """Comparison of a model with its capture.

    Attributes:
        before: Python state of model and loss_fn at the beginning, which every run starts from.
        start: contents of the buffers at the beginning, by name.
    """

    model: nn.Module
    captured: Capture
    seed: int
    before: Memory
    start: dict[str, torch.Tensor]

    @property
    def tensors(self) -> Tensors:
        """Parameters and buffers by canonical name."""
        return {**self.captured.parameters, **self.captured.buffers}

    @property
    def precision(self) -> Precision:
        return self.captured.recipe.precision

    def module(self, batches: Sequence[Columns], *, watched: bool = False) -> tuple[list[_Outcome], Calls]:
        """Run the user's module on one micro-batch after the other, from its initial state.

        Args:
            watched: True to record the outputs of all its modules on the last micro-batch.

        Returns:
            (results of each micro-batch, recorded outputs); without ``watched`` the latter is empty.
        """
        _fill(self.model, self.start)
        calls: Calls = []
        try:
            with model_converted(self.model, self.precision):
                outcomes = _expected(self, batches[:-1] if watched else batches)
                if watched:
                    with _watching(self.model, calls):
                        outcomes += _expected(self, batches[-1:], begin=len(batches) - 1)
        finally:
            self.before.restore()
        return outcomes, calls

    def stages(
        self, programs: Sequence[StageProgram], held: Tensors, columns: Columns, index: int
    ) -> tuple[_Outcome, list[tuple[torch.Tensor, ...]]]:
        """Run one micro-batch through stages; return its results and the output tensors of each stage.

        Args:
            held: buffers by name, in place of the initial ones.
            index: number of the micro-batch, for its random key.
        """
        key = RandomKey(self.seed, 0, index)
        return _chained(programs, {**self.tensors, **held}, columns, key, self.before.restore)

    def first_module(self, batches: Sequence[Columns], held: Tensors, least: float) -> str:
        """Describe the first module whose output on the last micro-batch differs, or else the last that was compared.

        The model is cut after as many modules as possible, and the outputs of each stage are compared with the output
        of the same module in plain PyTorch. For ``held`` see ``stages``, for ``least`` see ``_rounding``.

        Returns:
            Text to append to the error; "" if no module could be compared.
        """
        nodes, allowed = self.captured.graph.nodes, self.captured.graph.cut_positions()
        cuts = [at for at in allowed if not f"{nodes[at].module}.".startswith(f"{nodes[at - 1].module}.")]
        agreed = ""
        with suppress(Exception):  # the difference itself is the error; this only locates it
            _, calls = self.module(batches, watched=True)
            _, outputs = self.stages(self.captured.programs(cuts), held, batches[-1], len(batches) - 1)
            for at, values in zip(cuts, outputs, strict=False):
                path = nodes[at - 1].module
                wanted = [x for called, tensors in calls if called == path for x in tensors]
                pairs = [(x, y) for x in wanted for y in values if x.shape == y.shape and x.dtype == y.dtype]
                if not path or not pairs:
                    continue
                if not any(_close(x, y, least) for x, y in pairs):
                    kind = type(self.model.get_submodule(path)).__name__
                    return f", first in the output of the module {path!r} ({kind}), {_in_numbers(*pairs[0])}"
                agreed = f", after the output of the module {path!r}, which is equal"
        return agreed


@contextmanager
def _watching(model: nn.Module, calls: Calls) -> Iterator[None]:
    """Append (path, copies of the output tensors) to ``calls`` whenever a module returns."""

    def hook(path: str) -> Callable[..., None]:
        def record(_module: nn.Module, _args: Any, output: Any) -> None:
            leaves = pytree.tree_leaves(output)
            calls.append((path, [x.detach().clone() for x in leaves if isinstance(x, torch.Tensor)]))

        return record

    hooks = [module.register_forward_hook(hook(path)) for path, module in model.named_modules()]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def _expected(check: _Check, batches: Sequence[Columns], begin: int = 0) -> list[_Outcome]:
    """Run forward and backward of the user's module on one micro-batch after the other; gradients accumulate.

    Args:
        begin: number of the first micro-batch, for its random key.

    Raises:
        CaptureError: the module fails, changes a parameter, or keeps Python state that changes with every call.
    """
    model, name = check.model, type(check.model).__name__
    start, before = _contents(model.named_buffers()), read_memory(model, check.captured.loss_fn)
    bytes_before = _checksums(model)
    outcomes: list[_Outcome] = []
    for index, columns in enumerate(batches, begin):
        run = functools.partial(
            _called, model, check.captured.loss_fn, columns, RandomKey(check.seed, 0, index), check.precision,
            last=index + 1 == begin + len(batches),
        )  # fmt: skip
        outcomes.append(_attempt(name, run))
        once = read_memory(model, check.captured.loss_fn) if index == 0 else before
        if any(before.changes(once)):  # a cache, or state: the same rows again distinguish them
            _fill(model, start)
            model.zero_grad(set_to_none=True)
            _attempt(name, run)
            refuse_change(once, read_memory(model, check.captured.loss_fn), f"{name} or its loss")
    for changed, checksum in _checksums(model).items():
        if checksum != bytes_before[changed]:
            raise CaptureError(
                f"{name} changes its parameter {changed!r} while it computes forward, which stages would not do. Let "
                "only the optimizer change parameters; write a constraint as a function of the parameter instead."
            )
    return outcomes


def _called(
    model: nn.Module, loss_fn: LossFn | None, columns: Columns, key: RandomKey, precision: Precision, *, last: bool
) -> _Outcome:
    """Run one micro-batch through the user's module, forward and backward.

    Args:
        last: True for the last micro-batch, whose gradients need no copy because no backward adds to them later.
    """
    *values, last_value = (column.clone() for column in columns.values())
    with computing(precision):
        with KeyedRandomness(key):
            if loss_fn is not None:
                output = model(*converted(values, precision))
            elif all(isinstance(name, int) for name in columns):
                output = model(*converted([*values, last_value], precision))
            else:
                output = model(**dict(zip(columns, converted([*values, last_value], precision), strict=True)))
        loss = own_loss(model, output) if loss_fn is None else loss_fn(output, last_value)
    before = _contents(model.named_buffers())
    loss.backward()
    refuse_changed_by_backward(before, dict(model.named_buffers()))
    named = model.named_parameters()
    gradients = {name: p.grad if p.grad is None or last else p.grad.clone() for name, p in named}
    buffers = _contents(model.named_buffers())
    if precision.leaves:  # only integer buffers change in 16 bits, and gradients are not summed in them
        buffers = {name: x for name, x in buffers.items() if not x.is_floating_point()}
        model.zero_grad(set_to_none=True)
    return _Outcome(loss.detach(), gradients, buffers)


def _chained(
    programs: Sequence[StageProgram], tensors: Tensors, columns: Columns, key: RandomKey, forget: Callable[[], None]
) -> tuple[_Outcome, list[tuple[torch.Tensor, ...]]]:
    """Run forward and backward of one micro-batch through the stages as if each were a process of its own.

    Tensors sent between stages become leaves. Each stage runs in a new thread, after ``forget`` has restored the Python
    state that earlier calls changed.

    Returns:
        (results, output tensors of each stage).
    """
    inputs: tuple[torch.Tensor, ...] = ()
    done: list[_Forward] = []
    buffers: dict[str, torch.Tensor] = {}
    for program in programs:
        # A copy, because a child of an nn.Sequential may keep what it computed.
        function = program.train if isinstance(program.train, GraphFunction) else copy.deepcopy(program.train)
        leaves = [
            tensors[site.parameter].detach().requires_grad_(site.parameter in program.trainable)
            for site in function.sites
        ]
        own = {name: tensors[name].detach().clone() for name in function.buffers}
        arrived = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        read = [columns[name].clone() for name in function.columns]
        targets = [columns[name].clone() for name in program.targets]
        held = [own[name] for name in function.buffers]  # a name may occur twice
        stage = functools.partial(_staged, program, function, (leaves, held, arrived, read, key), targets)
        forget()
        with ThreadPoolExecutor(1) as thread:  # a new thread has new thread-local and context variables
            outputs = thread.submit(stage).result()
        forget()
        buffers.update(own)
        done.append(_Forward(function, leaves, arrived, outputs))
        inputs = outputs
    loss = functools.reduce(torch.add, (x.detach() for x in inputs))
    gradients = _chained_backward(done, [torch.ones_like(x) for x in inputs])
    return _Outcome(loss, gradients, buffers), [step.outputs for step in done]


class _Forward(NamedTuple):
    """Inputs and outputs of one stage's forward."""

    function: StageFunction
    leaves: list[torch.Tensor]
    arrived: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...]


def _chained_backward(done: Sequence[_Forward], seeds: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Run the backwards of all stages, the last stage first; return the gradients by parameter name.

    Args:
        done: forwards of the stages, in order.
        seeds: gradients of the last stage's outputs.
    """
    by_site: dict[str, list[torch.Tensor]] = {}
    for function, leaves, arrived, outputs in reversed(done):
        pairs = [(o, g) for o, g in zip(outputs, seeds, strict=True) if g is not None and o.requires_grad]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for site, leaf in reversed(list(zip(function.sites, leaves, strict=True))):
            if leaf.grad is not None:
                by_site.setdefault(site.parameter, []).append(leaf.grad)
        seeds = [x.grad for x in arrived]
    return {name: functools.reduce(torch.add, gradients) for name, gradients in by_site.items()}


def _staged(
    program: StageProgram,
    function: StageFunction,
    arguments: tuple[Any, ...],
    targets: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Run the forward of one stage and return its outputs; the last stage returns the loss, or its terms."""
    with one_thread():  # the setting is thread-local
        outputs = function(*arguments)
        if program.loss is None:
            return outputs
        loss = program.loss(outputs, targets)
    return loss if isinstance(loss, tuple) else (loss,)


def _rounding(precision: Precision, tensors: Tensors) -> float:
    """Return the tolerance of the comparison, relative to the largest value of a tensor.

    Args:
        tensors: parameters and buffers of the model. If some have 16 bits (a frozen model under adapters), gradients
            pass through them and are as coarse.
    """
    types = {x.dtype for x in tensors.values() if x.is_floating_point()}
    types |= {getattr(torch, name) for name in (precision.autocast, precision.leaves) if name}
    return max([ROUNDING, *(8 * torch.finfo(dtype).eps for dtype in types)])


def _difference(
    wanted: _Outcome, outcome: _Outcome, held: Tensors, added: Mapping[str, torch.Tensor | None], least: float
) -> str:
    """Describe the first difference between module and stages; "" if they agree.

    Args:
        held: buffers before the micro-batch; a buffer that no stage uses keeps this content.
        added: the module's gradients before the micro-batch, which are part of its accumulated gradients now.
        least: tolerance, see ``_rounding``.
    """
    if not _close(wanted.loss, outcome.loss, least):
        return f"the loss is {_in_numbers(wanted.loss, outcome.loss)}"
    pairs = {}
    for parameter, gradient in wanted.gradients.items():
        other, before = outcome.gradients.get(parameter), added.get(parameter)
        shape = gradient if gradient is not None else other
        if shape is not None:
            mine = torch.zeros_like(shape) if gradient is None else gradient
            theirs = torch.zeros_like(shape) if other is None else other.to(mine.dtype)
            pairs[parameter] = mine, theirs if before is None else before + theirs
    differing = {parameter: pair for parameter, pair in pairs.items() if not _equal(*pair)}  # most have the same bits
    largest = max((_size(mine) for mine, _ in pairs.values()), default=0.0) if differing else 0.0
    # From the last parameter: a backward reaches it first, and passes its error on to those before it.
    for parameter, (mine, theirs) in reversed(differing.items()):
        if not _close(mine, theirs, least, largest):
            return f"the gradient of {parameter!r} is {_in_numbers(mine, theirs)}"
    for buffer, value in wanted.buffers.items():
        other = outcome.buffers.get(buffer, held.get(buffer))
        if other is not None and not _close(value, other, least):
            return f"the buffer {buffer!r} becomes {_in_numbers(value, other)}"
    return ""


def _equal(here: torch.Tensor, there: torch.Tensor) -> bool:
    return here.shape == there.shape and here.dtype == there.dtype and torch.equal(here, there)


def _close(here: torch.Tensor, there: torch.Tensor, least: float, largest: float = 0.0) -> bool:
    """Return True if two tensors are equal up to rounding; NaN equals NaN.

    Args:
        least: tolerance relative to the largest value of ``here``, see ``_rounding``.
        largest: largest value of all gradients; a tenth of the tolerance applies to it, since terms of a sum may
            cancel.
    """
    if here.shape != there.shape or here.dtype != there.dtype:
        return False
    if not here.is_floating_point():
        return torch.equal(here, there)
    relative = max(least, 8 * torch.finfo(here.dtype).eps)
    near = (here - there).abs_() <= relative * _size(here) + 0.1 * relative * largest
    return bool(near.all()) or bool((near | (here == there) | (here.isnan() & there.isnan())).all())


def _size(tensor: torch.Tensor) -> float:
    """Return the largest finite absolute value of a tensor; 0 if it has none."""
    if tensor.is_floating_point() and tensor.numel():
        low, high = (bound.item() for bound in torch.aminmax(tensor.detach()))  # NaN if the tensor has one
        if math.isfinite(low) and math.isfinite(high):
            return max(abs(low), abs(high))
    finite = tensor.detach()[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _in_numbers(here: torch.Tensor, there: torch.Tensor) -> str:
    if here.dim() == 0 and there.dim() == 0:
        return f"{here.item():.7g} in the module and {there.item():.7g} in the stages"
    if here.shape != there.shape or here.dtype != there.dtype:
        return (
            f"{tuple(here.shape)} of {here.dtype} in the module and {tuple(there.shape)} of {there.dtype} in the stages"
        )
    worst = (here.double() - there.double()).abs().max().item()
    return f"different by up to {worst:.3g} where its largest value is {here.double().abs().max().item():.3g}"


def _attempt(what: str, run: Callable[[], Any]) -> Any:
    """Call ``run`` in a copy of the context variables; if it fails, raise a CaptureError that begins with ``what``."""
    try:
        return contextvars.copy_context().run(run)
    except RaypipeError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever the user's code raises)
        raise CaptureError(f"{what} cannot train on one micro-batch{quoted(error)}: {short(error)}") from None


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Set training mode and clear gradients; modes, buffers, gradients and requires_grad are restored afterwards."""
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        with in_mode(model, training=True):
            yield
    finally:
        for parameter, gradient, trains in gradients:
            parameter.grad = gradient
            parameter.requires_grad_(trains)


def _contents(named: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in named}


def _fill(model: nn.Module, contents: Tensors) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(contents[name])


def _checksums(model: nn.Module) -> dict[str, int]:
    """Compute a checksum of every parameter by name: the sum of its bytes, as 8-byte integers if possible."""
    sums = {}
    for name, parameter in model.named_parameters():
        held = parameter.detach().contiguous().flatten().view(torch.uint8)
        even = held.numel() % 8 == 0 and held.data_ptr() % 8 == 0
        sums[name] = int(held.view(torch.int64 if even else torch.uint8).sum(dtype=torch.int64))
    return sums

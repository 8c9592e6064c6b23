"""verify="first_step": the user's own module beside the captured stages, before the first step.

    module    rows A, rows B, one after the other, as plain PyTorch calls it
    stages    rows A;  rows B, each as if it were the first call

Loss, gradients and buffers must be the same but for rounding: stages add up the gradient of a shared parameter use by
use (docs/design/0002), and another layout of a tensor may choose another kernel (docs/design/0017). Draws are keyed as
in training, and one thread computes. Whatever forward or loss read besides inputs, parameters and buffers shows here,
if two calls are enough.

The module is the user's, not a copy, because a loss may refer to it; afterwards it holds what it held before.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from raypipe.engine.capture.guards import own_loss
from raypipe.engine.capture.hidden_state import refuse_change
from raypipe.engine.capture.surroundings import surroundings_kept
from raypipe.engine.one_thread import one_thread
from raypipe.engine.precision import computing, converted, model_converted
from raypipe.engine.randomness import KeyedRandomness, RandomKey
from raypipe.engine.remembered import read_memory
from raypipe.engine.stage import GraphFunction, StageFunction, StageProgram
from raypipe.engine.trial.backward_state import refuse_changed_by_backward
from raypipe.engine.user_lines import quoted, short
from raypipe.errors import CaptureError, RaypipeError
from raypipe.ir.precision import Precision

__all__ = ["verify"]

Columns = Mapping[Any, torch.Tensor]
Tensors = Mapping[str, torch.Tensor]
LossFn = Callable[[Any, Any], torch.Tensor]

ROUNDING = 1e-5
"""Of the largest number of a tensor; a tenth of that of the largest gradient too. See ``_rounding``."""
_REMEDY = (
    "So forward or loss depends on something besides the data, parameters and buffers: a global, a file, an attribute, "
    "an earlier call. Pass it in as data or keep it in a buffer; verify='off' trains the stages as they are."
)


class _Outcome(NamedTuple):
    """Of one micro-batch; gradients by parameter, None where there is none."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]


def verify(
    model: nn.Module,
    loss_fn: LossFn | None,
    programs: Sequence[StageProgram],
    tensors: Tensors,
    batches: Sequence[Columns],
    seed: int,
) -> None:
    """Compare the user's module with the stages that were captured from it.

    Args:
        model: on the CPU; unchanged afterwards, its gradients too.
        loss_fn: None where the model returns its own loss.
        tensors: parameters and buffers by canonical name, of the model.
        batches: two micro-batches by column, in the order in which the model takes them.
        seed: of the run.

    Raises:
        CaptureError: they differ; says in what and by how much. Or the module cannot be called like this.
    """
    name = type(model).__name__
    with one_thread(), surroundings_kept(f"{name} or its loss"), _kept(model):
        start = _contents(model.named_buffers())
        least = _rounding(programs[0].precision, tensors)
        before = read_memory(model, loss_fn)
        try:
            with model_converted(model, programs[0].precision):
                expected = _expected(model, loss_fn, batches, seed, programs[0].precision)
            before.restore()
            held: Tensors = start
            added: Mapping[str, torch.Tensor | None] = {}
            for index, (columns, wanted) in enumerate(zip(batches, expected, strict=True)):
                key = RandomKey(seed, 0, index)
                run = functools.partial(_chained, programs, {**tensors, **held}, columns, key, before.restore)
                _compare(name, index, wanted, _attempt(f"The stages of {name}", run), added, least)
                held, added = wanted.buffers, {} if programs[0].precision.leaves else wanted.gradients
        finally:
            before.restore()


def _expected(
    model: nn.Module, loss_fn: LossFn | None, batches: Sequence[Columns], seed: int, precision: Precision
) -> list[_Outcome]:
    """The module's own training, one micro-batch after the other; gradients add up as backward() adds them."""
    name = type(model).__name__
    start, before = _contents(model.named_buffers()), read_memory(model, loss_fn)
    bytes_before = _checksums(model)
    found: list[_Outcome] = []
    for index, columns in enumerate(batches):
        run = functools.partial(
            _called, model, loss_fn, columns, RandomKey(seed, 0, index), precision, last=index + 1 == len(batches)
        )
        found.append(_attempt(name, run))
        once = read_memory(model, loss_fn) if index == 0 else before
        if any(before.changes(once)):  # a cache or a memory: the same rows again tell which
            _fill(model, start)
            for parameter in model.parameters():
                parameter.grad = None
            _attempt(name, run)
            refuse_change(once, read_memory(model, loss_fn), f"{name} or its loss")
    for changed, checksum in _checksums(model).items():
        if checksum != bytes_before[changed]:
            raise CaptureError(
                f"{name} changes its parameter {changed!r} while it computes forward, which stages would not do. Let "
                "only the optimizer change parameters; write a constraint as a function of the parameter instead."
            )
    return found


def _called(
    model: nn.Module, loss_fn: LossFn | None, columns: Columns, key: RandomKey, precision: Precision, *, last: bool
) -> _Outcome:
    """One micro-batch through the user's module, forward and backward.

    Args:
        last: nothing is added to the gradients after it, so that they need no copy.
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
    _check_scalar(loss)
    before = _contents(model.named_buffers())
    loss.backward()
    refuse_changed_by_backward(before, dict(model.named_buffers()))
    named = model.named_parameters()
    gradients = {name: p.grad if p.grad is None or last else p.grad.clone() for name, p in named}
    buffers = _contents(model.named_buffers())
    if precision.leaves:  # nothing but whole numbers changes in 16 bits, and sums of gradients are not made in them
        buffers = {name: x for name, x in buffers.items() if not x.is_floating_point()}
        for _, parameter in model.named_parameters():
            parameter.grad = None
    return _Outcome(loss.detach(), gradients, buffers)


def _chained(
    programs: Sequence[StageProgram], tensors: Tensors, columns: Columns, key: RandomKey, forget: Callable[[], None]
) -> _Outcome:
    """One micro-batch through the stages, as if each was a process of its own: what crosses a boundary is a leaf.

    Args:
        forget: puts back what earlier calls left in memory.
    """
    inputs: tuple[torch.Tensor, ...] = ()
    done: list[_Forward] = []
    buffers: dict[str, torch.Tensor] = {}
    for program in programs:
        # A copy, because a child of an nn.Sequential keeps what it computed.
        function = program.train if isinstance(program.train, GraphFunction) else copy.deepcopy(program.train)
        leaves = [
            tensors[site.parameter].detach().requires_grad_(site.parameter in program.trainable)
            for site in function.sites
        ]
        own = {name: tensors[name].detach().clone() for name in function.buffers}
        arrived = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        read = [columns[name].clone() for name in function.columns]
        targets = [columns[name].clone() for name in program.targets]
        held = [own[name] for name in function.buffers]  # of which one may come twice
        stage = functools.partial(_staged, program, function, (leaves, held, arrived, read, key), targets)
        forget()
        with ThreadPoolExecutor(1) as thread:  # which has its own thread-local and context variables
            outputs = thread.submit(stage).result()
        forget()
        buffers.update(own)
        done.append(_Forward(function, leaves, arrived, outputs))
        inputs = outputs
    loss = functools.reduce(torch.add, (x.detach() for x in inputs))
    return _Outcome(loss, _chained_backward(done, [torch.ones_like(x) for x in inputs]), buffers)


class _Forward(NamedTuple):
    """What one stage computed, and what from."""

    function: StageFunction
    leaves: list[torch.Tensor]
    arrived: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...]


def _chained_backward(done: Sequence[_Forward], seeds: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Gradients of the parameters, by name, from those of the last stage's outputs."""
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
    """Forward of one stage; of the last one the loss, perhaps in parts.

    Args:
        arguments: of the function.
    """
    with one_thread():  # which every thread says for itself
        outputs = function(*arguments)
        if program.loss is None:
            return outputs
        found = program.loss(outputs, targets)
    parts = found if isinstance(found, tuple) else (found,)
    for part in parts:
        _check_scalar(part)
    return parts


def _rounding(precision: Precision, tensors: Tensors) -> float:
    """What two ways to round may differ by, of the largest number of a tensor, whatever its own type.

    Args:
        tensors: of the model. Where some are of 16 bits (a frozen model under adapters) gradients come by way of them.
    """
    types = {x.dtype for x in tensors.values() if x.is_floating_point()}
    types |= {getattr(torch, name) for name in (precision.autocast, precision.leaves) if name}
    return max([ROUNDING, *(8 * torch.finfo(found).eps for found in types)])


def _compare(
    name: str, index: int, wanted: _Outcome, found: _Outcome, added: Mapping[str, torch.Tensor | None], least: float
) -> None:
    """Refuse whatever differs.

    Args:
        index: of the micro-batch.
        added: gradients of the micro-batches before, which the module's own contain.
        least: see ``_rounding``.
    """

    def refuse(what: str, here: torch.Tensor, there: torch.Tensor) -> None:
        raise CaptureError(
            f"verify='first_step': on micro-batch {index + 1} of 2 the stages of {name} do not compute what {name} "
            f"computes: {what} {_in_numbers(here, there)}. {_REMEDY}"
        )

    if not _close(wanted.loss, found.loss, least):
        refuse("the loss is", wanted.loss, found.loss)
    pairs = {}
    for parameter, gradient in wanted.gradients.items():
        other, before = found.gradients.get(parameter), added.get(parameter)
        shape = gradient if gradient is not None else other
        if shape is not None:
            mine = torch.zeros_like(shape) if gradient is None else gradient
            theirs = torch.zeros_like(shape) if other is None else other.to(mine.dtype)
            pairs[parameter] = mine, theirs if before is None else before + theirs
    differing = {parameter: pair for parameter, pair in pairs.items() if not _equal(*pair)}  # most have the same bits
    largest = max((_size(mine) for mine, _ in pairs.values()), default=0.0) if differing else 0.0
    for parameter, (mine, theirs) in differing.items():
        if not _close(mine, theirs, least, largest):
            refuse(f"the gradient of {parameter!r} is", mine, theirs)
    for buffer, value in found.buffers.items():
        if buffer in wanted.buffers and not _close(wanted.buffers[buffer], value, least):
            refuse(f"the buffer {buffer!r} becomes", wanted.buffers[buffer], value)


def _equal(here: torch.Tensor, there: torch.Tensor) -> bool:
    return here.shape == there.shape and here.dtype == there.dtype and torch.equal(here, there)


def _close(here: torch.Tensor, there: torch.Tensor, least: float, largest: float = 0.0) -> bool:
    """The same but for rounding, nan being itself.

    Args:
        least: see ``_rounding``.
        largest: of what the numbers are made of, which may be larger than they are where sums cancel out.
    """
    if here.shape != there.shape or here.dtype != there.dtype:
        return False
    if not here.is_floating_point():
        return torch.equal(here, there)
    relative = max(least, 8 * torch.finfo(here.dtype).eps)
    near = (here - there).abs_() <= relative * _size(here) + 0.1 * relative * largest
    return bool(near.all()) or bool((near | (here == there) | (here.isnan() & there.isnan())).all())


def _size(tensor: torch.Tensor) -> float:
    """Its largest finite absolute value."""
    if tensor.is_floating_point() and tensor.numel():
        low, high = (bound.item() for bound in torch.aminmax(tensor.detach()))  # nan where there is one
        if math.isfinite(low) and math.isfinite(high):
            return max(abs(low), abs(high))
    finite = tensor.detach()[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _in_numbers(here: torch.Tensor, there: torch.Tensor) -> str:
    if here.dim() == 0 and there.dim() == 0:
        return f"{here.item():.7g} there and {there.item():.7g} here"
    if here.shape != there.shape or here.dtype != there.dtype:
        return f"{tuple(here.shape)} of {here.dtype} there and {tuple(there.shape)} of {there.dtype} here"
    worst = (here.double() - there.double()).abs().max().item()
    return f"different by up to {worst:.3g} where its largest value is {here.double().abs().max().item():.3g}"


def _attempt(what: str, run: Callable[[], _Outcome]) -> _Outcome:
    """Call it where it leaves no context variable behind, and say what failed."""
    try:
        return contextvars.copy_context().run(run)
    except RaypipeError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever the user's code raises)
        raise CaptureError(f"{what} cannot train on one micro-batch{quoted(error)}: {short(error)}") from None


def _check_scalar(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(
            f"The loss is {found} instead of a scalar tensor. Let loss_fn reduce over the samples of a micro-batch, as "
            "reduction='mean' does."
        )


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Training mode without gradients from before; mode, gradients and buffers are put back."""
    modes = {name: module.training for name, module in model.named_modules()}
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = dict(model.named_buffers())
    contents = _contents(buffers.items())
    for parameter, _ in gradients:
        parameter.grad = None
    model.train()
    try:
        yield
    finally:
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(contents[name])


def _contents(named: Any) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in named}


def _fill(model: nn.Module, contents: Tensors) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(contents[name])


def _checksums(model: nn.Module) -> dict[str, int]:
    """Of the bytes of every parameter, eight at a time where they come out even: a pass over memory."""
    found = {}
    for name, parameter in model.named_parameters():
        held = parameter.detach().contiguous().flatten().view(torch.uint8)
        even = held.numel() % 8 == 0 and held.data_ptr() % 8 == 0
        found[name] = int(held.view(torch.int64 if even else torch.uint8).sum(dtype=torch.int64))
    return found

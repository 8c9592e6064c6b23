"""Trace of a model by torch.export: one flat graph with parameters, buffers, constants and columns as placeholders.

The exported program is only read. Its graph is copied into a plain fx graph in which nested regions are inlined,
assertions are dropped, every random operation carries the number of its draw, and in-place operations on activations
are replaced by out-of-place ones wherever that is safe (buffer updates stay in place).

The batch dimension is dynamic, and so are the lengths of columns of token ids, shape (b, length), and other sizes that
vary in the data. A branch of forward on such a size goes the way of the example in the graph, under conditions on the
sizes that torch.export records as guards; stages check them for every micro-batch (ColumnSizes). Where torch.export
fails with open sizes, or records a condition that stages cannot check, the graph is that of the example's sizes. Open
sizes make a trace several times slower, so that it ends at the first block after such a condition. Branches on values
are decided if only one way goes on (branches.py).
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from raypipe.capture.analyse import Traced
from raypipe.capture.blocks import watched_blocks
from raypipe.capture.branches import trace_past_checks
from raypipe.capture.explain import Inputs, untraceable
from raypipe.capture.flatten import flatten
from raypipe.capture.guards import (
    data_detached,
    eager_branches,
    generators_kept,
    in_mode,
    nothing_lost,
    one_time_step,
    symbolic_len,
    watched_forward,
)
from raypipe.capture.own_loss import loss_only, own_forward
from raypipe.engine.stage.activation_checkpointing import traced_checkpoints
from raypipe.engine.stage.generated_source import ctc_losses, cumulative_norms
from raypipe.engine.stage.randomness import key_conds
from raypipe.engine.stage.stage import holds
from raypipe.errors import CaptureError
from raypipe.user_lines import quoted, short


class OneSizeError(CaptureError):
    """Error for a model that runs only on the number of samples of its example."""


_UNLIMITED = 1 << 40
"""Size that no data has; a smaller upper bound of an open size comes from the model's code."""


def trace(
    model: torch.nn.Module,
    inputs: Inputs,
    *,
    returns_loss: bool,
    training: bool,
    fixed: str = "",
    one_size: bool = False,
    kept: Sequence[Any] = (),
    progress: Callable[[str], None] = lambda _text: None,
) -> Traced:
    """Export the model in one mode with a dynamic batch dimension (dimension 0 of every input).

    Args:
        inputs: one example micro-batch of at least two samples.
        returns_loss: True if the model computes its own loss; the graph then returns only the loss and ``kept``.
        training: True for training mode, False for evaluation mode.
        fixed: reason to trace for the example's sizes only; "" leaves sizes that vary open if that succeeds.
        one_size: True to trace for the example's number of samples only.
        kept: keys of outputs that a model with its own loss returns after the loss.
        progress: takes a text such as "tracing layer 7 of 24" before each block of the model, see ``blocks_of``.

    Raises:
        OneSizeError: the model takes the example's number of samples only, and ``one_size`` is False.
        CaptureError: torch.export cannot trace the model; quotes the line of the user's code.
    """
    # It also refuses a torch.cond under no_grad: the trace would lose the no_grad.
    key_conds()
    conditions: tuple[str, ...] = ()
    suffix = "" if training else " for evaluation"
    blocks = watched_blocks(model, lambda number, count: progress(f"tracing layer {number} of {count}{suffix}"))
    try:
        mode, named = in_mode(model, training=training), _columns_named(model, inputs.kwargs)
        with mode, named, _as_stages_run(model, kept, returns_loss=returns_loss), blocks:
            with watched_forward(model) as changed:
                exported = None
                if inputs.free_sizes and not fixed:
                    try:
                        with _conditions_checked(model):
                            exported = _export(model, inputs, one_size=one_size, free=inputs.free_sizes)
                        conditions = _conditions(exported.program)
                    except Exception as error:  # noqa: BLE001  (the attempt with fixed sizes raises the better error)
                        where = "" if isinstance(error, CaptureError) else quoted(error)
                        exported, fixed = None, f"a trace with open sizes fails{where}: {short(error)}"
                if exported is None:
                    exported = _export(model, inputs, one_size=one_size)
            if changed:
                with watched_forward(model, twice=True):
                    _export(model, inputs, one_size=one_size)
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        raise _refusal(model, error) or untraceable(model, inputs, error) from None
    flat = flatten(model, exported.program, inputs.columns)
    return replace(flat, checks=exported.checks, one_size=one_size, conditions=conditions, fixed=fixed)


@contextmanager
def _columns_named(model: torch.nn.Module, kwargs: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace ``**kwargs`` in the signature of forward by one named parameter per column; restored afterwards.

    torch.export takes dynamic sizes by the name of a parameter.

    Args:
        kwargs: columns that are passed to forward by name.
    """
    signature, original = inspect.signature(model.forward), model.forward
    kept = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    unknown = [name for name in kwargs if name not in signature.parameters]
    if not unknown or len(kept) == len(signature.parameters):
        yield
        return

    def forward(*args: Any, **named: Any) -> Any:
        return original(*args, **named)

    with own_forward(model, forward):
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in unknown]
        forward.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        yield


@contextmanager
def _as_stages_run(model: torch.nn.Module, kept: Sequence[Any], *, returns_loss: bool) -> Iterator[None]:
    """Prepare a model for torch.export inside the context, and restore the model afterwards.

    Calls that a trace would drop raise a CaptureError. Activation checkpoints, cumulative batch norms, CTC losses
    and the output dtypes of LSTMs are preserved in the trace. If ``returns_loss`` is True, the model returns only its
    loss and the outputs with the keys ``kept``.
    """
    loss = loss_only(model, kept) if returns_loss else nullcontext()
    generators = generators_kept(f"{type(model).__name__}.forward")
    with (  # the lock of the generators first: one thread at a time patches torch
        generators, nothing_lost(), traced_checkpoints(), cumulative_norms(), ctc_losses(), _lstm_types_kept(model),
        data_detached(), symbolic_len(model), eager_branches(model), one_time_step(), loss,
    ):  # fmt: skip
        yield


def _refusal(model: torch.nn.Module, error: Exception) -> CaptureError | None:
    """Return the CaptureError to raise for an error of torch.export; None if that error does not show its cause."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, CaptureError):
        return cause
    if "Constraints violated" not in str(error):
        return None
    return OneSizeError(f"{type(model).__name__} takes one number of samples only.")


class _Exported(NamedTuple):
    """Exported program, and the lines of the checks that it leaves out, see ``trace_past_checks``."""

    program: torch.export.ExportedProgram
    checks: tuple[str, ...] = ()


def _export(
    model: torch.nn.Module, inputs: Inputs, *, one_size: bool, free: Collection[tuple[Any, int]] = ()
) -> _Exported:
    """Export a model.

    Args:
        one_size: True to fix the number of samples.
        free: (column, dimension) of further sizes to leave open.
    """
    args, kwargs = inputs.args, dict(inputs.kwargs)

    def dims(name: Any, value: torch.Tensor) -> dict[int, Any] | None:
        samples = {} if one_size else {0: torch.export.Dim.DYNAMIC}
        lengths = {at: torch.export.Dim.AUTO for at in range(1, value.dim()) if (name, at) in free}
        return {**samples, **lengths} if value.dim() else None

    by_column = [dims(name, value) for name, value in zip(inputs.columns, inputs.tensors, strict=True)]
    shapes = _dynamic_shapes(model, by_column[: len(args)], dict(zip(kwargs, by_column[len(args) :], strict=True)))

    def export() -> torch.export.ExportedProgram:
        # In a context of its own, so that no fake tensor stays in a context variable of the user's.
        run = contextvars.copy_context().run
        # Its passes make many modules of which only the graphs are read: their source would be generated for nothing.
        with _use_lazy_graph_module(True):
            return run(torch.export.export, model, args, kwargs, dynamic_shapes=shapes, strict=False)

    try:
        return _Exported(export())
    except Exception as error:
        if "data-dependent" not in str(error) and not isinstance(error, DataDependentOutputException):
            raise
        # Only as a second attempt: a TorchFunctionMode hides the user's line from torch's warnings.
        if past := trace_past_checks(export):
            return _Exported(*past)
        raise


def _dynamic_shapes(model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Map the parameters of forward to the dynamic shapes of its arguments, in the form that torch.export takes.

    Args:
        args, kwargs: dynamic shapes of the positional and of the keyword arguments.

    Raises:
        CaptureError: forward does not take these arguments.
    """
    parameters = inspect.signature(model.forward).parameters
    shapes: dict[str, Any] = {}
    rest = list(args)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL and rest:
            shapes[name] = tuple(rest)
            rest = []
        elif rest and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            shapes[name] = rest.pop(0)
    unknown = {}
    for name, shape in kwargs.items():
        if name in parameters:
            shapes[name] = shape
        else:
            unknown[name] = shape
    if rest or unknown:
        extra = f"{len(args)} positional inputs" if rest else f"columns {sorted(unknown)}"
        raise CaptureError(
            f"{type(model).__name__}.forward{inspect.signature(model.forward)} does not take the {extra} that the "
            "data brings. Drop the columns it does not know, or name them as its arguments."
        )
    return shapes


def _conditions(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """List the conditions under which a program with open sizes is valid, as Python expressions over its symbols.

    These are the guards that torch.export records where forward branches on a size, and the ranges of the sizes.
    Conditions on the number of samples only are left out: ``rehearse`` tries other numbers.

    Raises:
        CaptureError: a column's size became an expression, which no shape shows, or a condition cannot be evaluated.
    """
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
    sizes = _open_lengths(shapes)
    if not sizes:
        return ()
    _refuse_derived(sizes)
    ranges: list[str] = []
    for symbol in dict.fromkeys(size.expr for size in sizes):
        allowed = sizes[0].shape_env.var_to_range[symbol]
        ranges += [f"{symbol} >= {allowed.lower}"]
        ranges += [f"{symbol} <= {allowed.upper}"] if allowed.upper < _UNLIMITED else []
    conditions = (*ranges, *_guards(sizes, sizes[0].shape_env.guards))
    _refuse_unchecked(conditions, shapes)
    return tuple(dict.fromkeys(conditions))


@contextmanager
def _conditions_checked(model: nn.Module) -> Iterator[None]:
    """End a trace before one of the model's blocks if earlier ones branch on open sizes in a way stages cannot check.

    Conditions are checked only there, because torch.export simplifies a condition as soon as it has further facts about
    the sizes: from ``max(1, s // 2) == s // 2`` nothing is left once ``s // 2 > 0`` follows from other conditions.

    Raises:
        CaptureError: within the forward that is traced, before a block.
    """
    original, shapes, num_checked = model.forward, list[torch.Size](), 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_checked
        num_checked = 0
        shapes[:] = (value.shape for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor))
        return original(*args, **kwargs)

    def check(number: int, _count: int) -> None:
        nonlocal num_checked
        sizes = [size for size in _open_lengths(shapes) if not size.expr.is_number]
        recorded = sizes[0].shape_env.guards if sizes else []
        if number > 1 and len(recorded) > num_checked:
            _refuse_derived(sizes)
            _refuse_unchecked(_guards(sizes, recorded[num_checked:]), shapes)
            num_checked = len(recorded)

    with own_forward(model, forward), watched_blocks(model, check):
        yield


def _open_lengths(shapes: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the SymNode of every open size of columns, except for their numbers of samples."""
    return [size.node for shape in shapes for size in shape[1:] if isinstance(size, torch.SymInt)]


def _refuse_derived(sizes: Sequence[Any]) -> None:
    """Raise CaptureError if one of the SymNodes has become an expression, which cannot be read off a shape."""
    if not all(size.expr.is_Symbol for size in sizes):
        raise CaptureError("forward takes only sizes that follow from other sizes")


def _guards(sizes: Sequence[Any], recorded: Sequence[Any]) -> list[str]:
    """Return the recorded guards that depend on open sizes, as Python expressions.

    Args:
        sizes: SymNodes of the open sizes, each a symbol.
        recorded: guards of torch's ShapeEnv.
    """
    symbols = {size.expr for size in sizes}
    guards = (sizes[0].shape_env.simplify(guard.expr) for guard in recorded)
    return [PythonPrinter().doprint(guard) for guard in guards if guard.free_symbols & symbols]


def _refuse_unchecked(conditions: Sequence[str], shapes: Sequence[Sequence[Any]]) -> None:
    """Raise CaptureError if a condition does not hold for the example, which shows that stages cannot evaluate it."""
    sizes = [size.node for shape in shapes for size in shape if isinstance(size, torch.SymInt)]
    example = {str(size.expr): size.hint for size in sizes}
    for condition in conditions:
        if not holds(condition, example):
            raise CaptureError(f"forward branches on sizes in a way that stages cannot check ({condition})")


@contextmanager
def _lstm_types_kept(model: nn.Module) -> Iterator[None]:
    """Cast the outputs of LSTMs under autocast to the dtypes of eager mode while the code inside traces the model.

    While tracing, an LSTM's outputs are fp32; in eager mode they are bf16. The operation computes the same values, but
    the trace fixes what the model derives from the dtype, such as the zero state of a GRU that follows or
    torch.finfo(h.dtype).
    """
    computing = torch.is_autocast_enabled("cpu")  # of the precision that the model is captured in
    lstms = [module for module in model.modules() if isinstance(module, nn.LSTM)] if computing else []
    # Computed ahead: in the middle of a trace torch runs another operation than in eager mode.
    hooks = [lstm.register_forward_hook(_AsUntraced(lstm), with_kwargs=True) for lstm in lstms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _AsUntraced:
    """Forward hook that casts the outputs of an LSTM to their dtypes in eager mode, see ``_lstm_types_kept``."""

    def __init__(self, lstm: nn.LSTM) -> None:
        own = next(lstm.parameters()).dtype
        self._types = {dtype: _types_of(lstm, dtype) for dtype in (own, torch.get_autocast_dtype("cpu"))}

    def __call__(self, lstm: nn.LSTM, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        inputs = args[0] if args else kwargs["input"]
        if not torch.is_autocast_enabled("cpu") or not isinstance(inputs, torch.Tensor):  # off here; a packed sequence
            return output
        types = self._types.get(inputs.dtype)
        return output if types is None else pytree.tree_map(lambda value, dtype: value.to(dtype), output, types)


def _types_of(lstm: nn.LSTM, dtype: torch.dtype) -> Any:
    """Return the dtypes of an LSTM's outputs for inputs of ``dtype``, in the structure of the outputs.

    A small LSTM with the same options is run to find them.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        small = nn.LSTM(
            4, 4, bias=lstm.bias, batch_first=lstm.batch_first, bidirectional=lstm.bidirectional,
            proj_size=min(lstm.proj_size, 2), dtype=next(lstm.parameters()).dtype,
        )  # fmt: skip
        return pytree.tree_map(lambda value: value.dtype, small.train(lstm.training)(torch.zeros(1, 1, 4, dtype=dtype)))

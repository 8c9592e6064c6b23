"""torch.export in, one flat graph out: parameters, buffers, constants and data columns as placeholders.

The exported program is only ever read. Its graph is copied into a plain fx graph in which nested regions
are inlined, assertions are gone, every random operation carries its number, and activation operations that
work in place are made out of place wherever that is safe (buffer updates stay in place).

Columns of token ids, shape (b, length), get a dynamic length too, unless the code asks what it is: then the graph is
right for one length only, and is traced for that one.
"""

from __future__ import annotations

import contextvars
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from raypipe.engine.capture.certain_draws import CertainDraws
from raypipe.engine.capture.explain import untraceable
from raypipe.engine.capture.fixed_sizes import FixedSizes, watched_sizes
from raypipe.engine.capture.flatten import flatten
from raypipe.engine.capture.guards import loss_only, nothing_lost, own_forward
from raypipe.engine.capture.hidden_state import watched_forward
from raypipe.engine.capture.lengths import asks_for_length, is_tokens
from raypipe.engine.capture.lstm_types import lstm_types_kept
from raypipe.engine.capture.regions import lost_body
from raypipe.engine.capture.surroundings import surroundings_kept
from raypipe.engine.capture.traced import Traced
from raypipe.engine.cumulative import cumulative_norms
from raypipe.engine.eager_cond import run_conds_outside_of
from raypipe.engine.randomness import KeyedRandomness
from raypipe.engine.recompute import traced_checkpoints
from raypipe.errors import CaptureError

__all__ = ["trace"]


def trace(
    model: torch.nn.Module,
    args: Sequence[torch.Tensor],
    kwargs: Mapping[str, torch.Tensor],
    columns: Sequence[str],
    *,
    returns_loss: bool,
    training: bool,
    one_length: bool = False,
    kept: Sequence[Any] = (),
) -> Traced:
    """Export the model in one mode with a dynamic batch dimension (dimension 0 of every input).

    Args:
        args, kwargs: one example micro-batch of at least two samples.
        columns: names of the data columns behind args, then kwargs.
        returns_loss: the model computes its own loss; only that output is kept.
        training: which mode.
        one_length: the other mode was traced for one length, so that this one need not try.
        kept: keys of outputs that come out behind the loss that the model computes.

    Raises:
        CaptureError: torch.export cannot trace the model; quotes the place in the user's code.
    """
    # It also refuses a torch.cond under no_grad: the trace would lose the no_grad.
    run_conds_outside_of(KeyedRandomness)
    sizes, tokens = FixedSizes(), any(is_tokens(value) for value in (*args, *kwargs.values()))
    try:
        mode, named = _in_mode(model, training=training), _columns_named(model, kwargs)
        with mode, named, _as_stages_run(model, kept, returns_loss=returns_loss):
            with watched_forward(model) as changed:
                program = _with_free_length(model, args, kwargs) if tokens and not one_length else None
                if program is None:
                    with watched_sizes() as sizes:
                        program = _export(model, args, kwargs, free_length=False)
            if changed:
                with watched_forward(model, twice=True):
                    _export(model, args, kwargs, free_length=False)
    except CaptureError:
        raise
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        raise _refusal(model, error, sizes) or untraceable(model, args, kwargs, columns, error) from None
    return flatten(model, program, columns)


@contextmanager
def _in_mode(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Every module in one mode, and afterwards in its own again."""
    before = {name: module.training for name, module in model.named_modules()}
    model.train(training)
    try:
        yield
    finally:
        for name, module in model.named_modules():
            module.training = before[name]


@contextmanager
def _columns_named(model: torch.nn.Module, kwargs: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Columns that go into ``**kwargs`` of forward become parameters of it, without which torch.export knows no sizes
    of theirs."""
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
    """What a trace would lose is refused or kept; of a model that returns its loss, that and what metrics read."""
    loss = loss_only(model, kept) if returns_loss else nullcontext()
    surroundings = surroundings_kept(f"{type(model).__name__}.forward")
    with nothing_lost(), surroundings, traced_checkpoints(), cumulative_norms(), lstm_types_kept(model), loss:
        yield


def _with_free_length(
    model: torch.nn.Module, args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor]
) -> torch.export.ExportedProgram | None:
    """With a dynamic length of token ids; None where that does not work out, or the code asks for the length."""
    program = None
    with suppress(Exception):  # whatever it was, the attempt with one length says it better
        program = _export(model, args, kwargs, free_length=True)
    return None if program is None or asks_for_length(program) else program


def _refusal(model: torch.nn.Module, error: Exception, sizes: FixedSizes) -> CaptureError | None:
    """The error in our words, where its cause is known."""
    cause = error.__cause__ or error.__context__
    if isinstance(cause, CaptureError):
        return cause
    name = type(model).__name__
    return sizes.refusal(name) if "Constraints violated" in str(error) else lost_body(name, error)


def _export(
    model: torch.nn.Module, args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor], *, free_length: bool
) -> torch.export.ExportedProgram:
    def dims(value: torch.Tensor) -> dict[int, Any] | None:
        length = {1: torch.export.Dim.AUTO} if free_length and is_tokens(value) else {}
        return {0: torch.export.Dim.DYNAMIC, **length} if value.dim() else None

    shapes = _dynamic_shapes(model, [dims(a) for a in args], {k: dims(v) for k, v in kwargs.items()})

    def export() -> torch.export.ExportedProgram:
        # In a context of its own, so that no stand-in for a tensor stays in a variable of the user's.
        run = contextvars.copy_context().run
        return run(torch.export.export, model, tuple(args), dict(kwargs), dynamic_shapes=shapes, strict=False)

    try:
        return export()
    except Exception as error:
        if "data-dependent" not in str(error):
            raise
        # Only then, for a mode that sees every function of torch stands between a warning and the line that it is of.
        with CertainDraws(), suppress(Exception):
            return export()
        raise


def _dynamic_shapes(model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Dynamic shapes keyed by the parameters of forward, as torch.export wants them."""
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

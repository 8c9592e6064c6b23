"""Models without chance, to compare their losses of some rows with those of parts of these rows.

    dropout                             passes its input on
    rand, randn, normal_, ...           constant 0.5
    bernoulli_(p), so also F.dropout    constant p, if p is a number
    randperm, multinomial, ...          cannot be replaced: whole numbers select or mix samples

Random numbers differ between all rows and parts of them, and constants do not. In evaluation mode, a model may lack
terms of its loss, such as the load balancing of experts, which is why chance is taken out of training mode. Constants
do not show whether draws select or mix samples, as ``rand(x.shape) < 0.6`` and ``rand(n).argsort()`` do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from raypipe.capture import Capture, TracedModel
from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey, bind_arguments, dropout, keyed_call
from raypipe.engine.stage.stage import GraphFunction
from raypipe.ir.precision import FP32

_REPLACED = (
    "aten::bernoulli", "aten::rand", "aten::rand_like", "aten::randn", "aten::randn_like", "aten::normal",
    "aten::uniform", "aten::exponential", "aten::log_normal",
)  # fmt: skip


class DrawsError(Exception):
    """Exception for a model that draws random numbers or changes buffers: losses of its rows cannot be compared."""


class FixedDraws(KeyedRandomness):
    """Dispatch mode that replaces random floating-point tensors by constants, and keys all other draws.

    Attributes:
        replaced: True if a draw was replaced.
        remaining: True if a draw could not be replaced.
        others: number of replaced draws that are not masks of dropout, which are divided by their mean at once.
    """

    def __init__(self, key: RandomKey) -> None:
        super().__init__(key)
        self.replaced = self.remaining = False
        self.others = 0
        self._drawn: torch.Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._drawn is not None and func._schema.name == "aten::div_" and args[0] is self._drawn:
            self.others -= 1
        before, self._drawn = self.index, None
        drawn = super().__torch_dispatch__(func, types, args, kwargs)
        if self.index == before:
            return drawn
        if func._schema.name.rstrip("_") not in _REPLACED or not drawn.is_floating_point():
            self.remaining = True
            return drawn
        self.replaced, self._drawn = True, drawn if "bernoulli" in func._schema.name else None
        self.others += 1
        return drawn.fill_(_constant(func, args, kwargs or {}))


def _constant(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the constant in place of a draw: its argument p if that is a float, as dropout divides by it; else 0.5."""
    probability = bind_arguments(op, args, kwargs).get("p")
    return probability if isinstance(probability, float) else 0.5


def without_draws(captured: Capture, *, training: bool | None = None) -> GraphFunction | None:
    """Return the whole graph as one function that computes in fp32 and without random numbers.

    The function raises DrawsError for a draw that cannot be replaced.

    Args:
        training: True for the graph of training, even if it changes buffers; False for that of evaluation. None for the
            graph of training, or that of evaluation if training changes buffers; the run's precision must then be fp32.

    Returns:
        The function. None if the model has no weights, the graph was not captured, or the precision is another one.
    """
    assert isinstance(captured.model, TracedModel)
    if any(x.is_meta for x in (*captured.parameters.values(), *captured.buffers.values())):
        return None
    if training is None and captured.recipe.precision != FP32:
        return None
    trains, evals = captured.recipe.stages.functions((), ())
    (function,) = trains
    if training is False or (training is None and captured.model.train.changing_buffers):
        (function,) = evals or (None,)  # type: ignore[assignment]
    if function is None:
        return None
    assert isinstance(function, GraphFunction)
    replaced = {dropout: lambda x, p, key, index: x, keyed_call: _call_without_draws}
    names = {name: replaced.get(value, value) if callable(value) else value for name, value in function.names.items()}
    return replace(function, names=names, precision=FP32, _function=None)


def _call_without_draws(op: Any, key: RandomKey, index: int, *args: Any, draws: int = 1, **kwargs: Any) -> Any:
    bound = bind_arguments(op, args, kwargs)
    if op._schema.name.rstrip("_") not in _REPLACED:
        bound |= {name: 0.0 for name in ("dropout_p", "p", "dropout") if name in bound}
    with FixedDraws(key) as mode:
        result = op(**bound)
    if mode.remaining:
        raise DrawsError
    return result

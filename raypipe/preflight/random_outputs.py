"""Replacements of models without weights (weights_on="workers"), or of large ones, to try their loss: random outputs or
random weights.

    rows --shapes of the model's outputs--> random outputs --loss_fn, with the target--> losses and their gradients
                                                                                         by the outputs

A model that returns its own loss gets random weights instead, if it is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from raypipe.capture import Capture, TracedModel
from raypipe.capture.explain import misfit_of_loss
from raypipe.data.item_randomness import own_generators
from raypipe.engine.stage.module_copy import copy_of
from raypipe.engine.stage.randomness import RandomKey
from raypipe.errors import DataError
from raypipe.preflight.dry_run import NUM_ROWS, no_reads_of, scalar
from raypipe.preflight.loss_on_rows import LossTrial, Tried

MOST_BYTES = 1 << 28
"""Most bytes of random outputs."""

Columns = Mapping[Any, torch.Tensor]


def with_random_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Copy a model from the meta device to the CPU, with random floating-point tensors and zeros in other tensors."""
    copied = copy_of(model).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.normal_(0.0, 0.1, generator=generator) if tensor.is_floating_point() else tensor.zero_()
    return copied


class _RandomOutputs(torch.nn.Module):
    """Module in place of a model without weights: takes consecutive row numbers, returns the outputs of these rows.

    Args:
        captured: capture of the replaced model, from which the structure of its output is taken.
        outputs: output tensors for all rows.
        each: by output tensor, how many of its rows belong to one row of data; 0 if its size does not depend on the
            number of rows.
    """

    def __init__(self, captured: Capture, outputs: Sequence[torch.Tensor], each: Sequence[int]) -> None:
        super().__init__()
        loss: Any = captured.recipe.loss
        self._as_returned = loss.as_returned
        self._outputs = [torch.nn.Parameter(x) if x.is_floating_point() else x for x in outputs]
        self._each = each
        for number, x in enumerate(self._outputs):
            if isinstance(x, torch.nn.Parameter):
                self.register_parameter(f"output {number}", x)

    def forward(self, rows: torch.Tensor) -> Any:
        first, stop = int(rows[0]), int(rows[-1]) + 1
        some = [x[first * n : stop * n] if n else x for x, n in zip(self._outputs, self._each, strict=True)]
        return self._as_returned(tuple(x.clone() for x in some))


def _stand_ins(captured: Capture, rows: Columns, most_bytes: int | None = None) -> Iterator[torch.nn.Module]:
    """Yield a module for each of ``_draws``, unless the outputs cannot be divided among the rows."""
    count = len(next(iter(rows.values())))
    bare = bare_outputs(captured, rows)
    twice = bare_outputs(captured, {name: torch.cat([x, x]) if x.dim() else x for name, x in rows.items()})
    each = []
    for x, double in zip(bare, twice, strict=True):
        of_rows = bool(x.dim()) and x.shape[0] % count == 0 and double.shape == (2 * x.shape[0], *x.shape[1:])
        if not of_rows and x.shape != double.shape:
            return
        each.append(x.shape[0] // count if of_rows else 0)
    for outputs in _draws(bare, most_bytes):
        yield _RandomOutputs(captured, outputs, each)


def _draws(bare: Sequence[torch.Tensor], most_bytes: int | None = None) -> Iterator[list[torch.Tensor]]:
    """Yield three lists of random tensors of these shapes, since some losses accept only some numbers.

    The first are normally distributed, the second uniformly between 0 and 1, the third probabilities, which add up to 1
    in the last dimension. Nothing is yielded if they would exceed ``most_bytes`` (at most MOST_BYTES, also the
    default).
    """
    if sum(math.prod(x.shape) * max(4, x.dtype.itemsize) for x in bare) > min(most_bytes or MOST_BYTES, MOST_BYTES):
        return
    for draw in (torch.randn, torch.rand, lambda shape: torch.randn(shape).softmax(-1) if shape else torch.rand(shape)):
        with own_generators():
            torch.manual_seed(0)
            outputs = [
                draw(x.shape).to(torch.promote_types(x.dtype, torch.float32))
                if x.is_floating_point()
                else torch.zeros(x.shape, dtype=x.dtype)
                for x in bare
            ]
        yield outputs


def loss_runs(captured: Capture, rows: Columns, *, training: bool = True) -> bool:
    """Run a loss_fn on random outputs of the model as ``rehearse`` does on its own; return True if one of them passes.

    Args:
        rows: columns of a few rows by name.
        training: True to run its backward too; False for the loss of evaluation.
    """
    (program,) = captured.programs(())
    mode = "train" if training else "eval"
    loss, few = program.loss_by_mode[mode], {name: x[:NUM_ROWS] if x.dim() else x for name, x in rows.items()}
    learning = {name: captured.parameters[name] for name in captured.trainable}
    assert loss is not None
    for outputs in _draws(bare_outputs(captured, few, mode)):
        leaves = [x.requires_grad_() for x in outputs if x.is_floating_point()]
        targets = [few[name].clone() for name in program.targets]
        with suppress(Exception), no_reads_of(learning, "loss_fn", allowed=(*outputs, *targets)):
            total = scalar(loss(tuple(outputs), targets), NUM_ROWS)
            if training:
                torch.autograd.grad(total, leaves, allow_unused=True)
            return True
    return False


def try_on_random_outputs(captured: Capture, rows: Columns, seed: int, most_bytes: int | None = None) -> Tried | None:
    """Compute losses of a loss_fn on random outputs of the model; None if no random outputs give a finite loss.

    Args:
        rows: samples by column; the last column is the target.
        most_bytes: largest size of the outputs; None for MOST_BYTES.

    Raises:
        CaptureError: the loss_fn draws random numbers or changes a buffer of its own.
        DataError: the loss_fn fails with the same error on all random outputs.
    """
    column, errors = list(rows)[-1], []
    for stand_in in _stand_ins(captured, rows, most_bytes):
        trial = LossTrial(stand_in, captured.loss_fn, seed)
        tried, output = trial.losses(_numbered(rows)), trial.outputs(_numbered(rows))
        if tried is not None and math.isfinite(tried.whole.value):  # not the log of a negative number
            trial.refuse_unrepeatable(output, rows[column])
            return tried
        if tried is None and captured.loss_fn is not None:
            errors.append(misfit_of_loss(captured.loss_fn, output, rows[column], column))
    if len({str(error) for error in errors}) == 1 and isinstance(errors[0], DataError):
        raise errors[0]
    return None


def _numbered(rows: Columns) -> dict[Any, torch.Tensor]:
    """Return two columns: the row numbers, which ``_RandomOutputs`` takes as input, and the target."""
    target = list(rows)[-1]
    return {(__name__, "rows"): torch.arange(len(rows[target])), target: rows[target]}


def bare_outputs(captured: Capture, rows: Columns, mode: str = "train") -> Sequence[torch.Tensor]:
    """Return the model's output tensors for these rows as a flat list, without values (on the meta device).

    Args:
        mode: "train" or "eval"; it has no effect on an nn.Sequential that is not traced.

    Raises:
        TypeError: a shape depends on values.
    """
    if isinstance(captured.model, TracedModel):
        traced = captured.model.train if mode == "train" else captured.model.eval
        assert traced is not None
        sizes = {
            size.node.expr: rows[name].shape[dim]
            for node, name in traced.traced.columns.items()
            for dim, size in enumerate(node.meta["val"].shape)
            if isinstance(size, torch.SymInt)
        }
        values = [node.meta["val"] for node in traced.outputs]
        shapes = [[int(d.node.expr.subs(sizes)) if isinstance(d, torch.SymInt) else d for d in x.shape] for x in values]
        return [torch.empty(shape, dtype=x.dtype, device="meta") for shape, x in zip(shapes, values, strict=True)]
    (program,) = captured.programs(())
    function = program.train
    with torch.no_grad():
        return function(
            [captured.parameters[site.parameter].detach().to("meta") for site in function.sites],
            [captured.buffers[name].detach().to("meta") for name in function.buffers],
            (),
            [rows[name].to("meta") for name in function.columns],
            RandomKey(0, 0, 0),
        )

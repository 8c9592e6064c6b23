"""What a model would return, as far as it can be told without its weights: tensors of the right shapes and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raypipe.engine.capture import Capture, TracedModel
from raypipe.engine.capture.analyse import column_with
from raypipe.engine.initial.stand_ins import empty_like_on_host
from raypipe.engine.randomness import RandomKey

__all__ = ["bare_outputs", "outputs_unrun"]


def outputs_unrun(captured: Capture, rows: Mapping[Any, torch.Tensor]) -> Any:
    """Of a model with a loss_fn, for these rows by column, in its own structure; to be traced, not to be read.

    They take no memory, for the scores of a vocabulary would take much.
    """
    loss: Any = captured.recipe.loss
    return loss.as_returned(tuple(empty_like_on_host(tensor) for tensor in bare_outputs(captured, rows)))


def bare_outputs(captured: Capture, rows: Mapping[Any, torch.Tensor]) -> Sequence[torch.Tensor]:
    """The same on the meta device, as a flat list."""
    return _traced(captured, rows) if isinstance(captured.model, TracedModel) else _run_on_meta(captured, rows)


def _traced(captured: Capture, rows: Mapping[Any, torch.Tensor]) -> list[torch.Tensor]:
    """As the trace has them, with the sizes of these rows."""
    assert isinstance(captured.model, TracedModel)
    traced, outputs = captured.model.train.traced, captured.model.train.outputs

    def size(found: Any) -> int:
        place = column_with(traced, found) if isinstance(found, torch.SymInt) else None
        if place is None:
            return int(found.node.hint) if isinstance(found, torch.SymInt) else int(found)
        column, dim = place
        return rows[traced.columns[column]].shape[dim]

    values = [node.meta["val"] for node in outputs]
    return [torch.empty([size(d) for d in x.shape], dtype=x.dtype, device="meta") for x in values]


def _run_on_meta(captured: Capture, rows: Mapping[Any, torch.Tensor]) -> tuple[torch.Tensor, ...]:
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

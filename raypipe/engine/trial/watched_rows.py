"""Outputs of shape (rows, 1) that meet targets of shape (rows,), in a loss that cannot be traced: seen while it runs.

    output (4, 1) - target (4,)  -->  (4, 4)     of 4 rows
    output (3, 1) - target (3,)  -->  (3, 3)     and of 3: it is the rows, not some axis of as many

The rule is that of ``capture/crossed_rows.py``, on operations as torch carries them out instead of those of a graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.engine.capture.crossed_rows import crossed_rows
from raypipe.engine.user_lines import line_outside_torch

__all__ = ["refuse_rows_crossed_in"]

LossFn = Callable[[Any, Any], Any]


def refuse_rows_crossed_in(loss_fn: LossFn, output: Any, target: torch.Tensor) -> None:
    """Run a loss on some rows and refuse it where every output meets the targets of all rows.

    Args:
        output: of the model, in its structure; its tensors and ``target`` have shape (rows, ...).

    Raises:
        DataError: with the line, and what to write.
    """
    if not target.dim() or len(target) < 3:  # of one row, (1,) and (1, 1) meet in one number
        return
    whole, fewer = (_crossing(loss_fn, output, target, rows) for rows in (len(target), len(target) - 1))
    if whole is not None and fewer is not None:
        raise crossed_rows("loss_fn", whole.where, tall_is_output=whole.tall_is_output)


class _Crossing(NamedTuple):
    tall_is_output: bool
    where: str


def _crossing(loss_fn: LossFn, output: Any, target: torch.Tensor, rows: int) -> _Crossing | None:
    """The first operation that does so, of the first of the rows; None where none does, or the loss fails."""

    def some(x: Any) -> Any:
        return x[:rows].clone() if isinstance(x, torch.Tensor) and x.dim() and len(x) == len(target) else x

    outputs, targets = pytree.tree_map(some, output), some(target)
    watch = _Watch(rows, [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)], targets)
    try:
        with torch.no_grad(), watch:
            loss_fn(outputs, targets)
    except Exception:  # noqa: BLE001  (whatever it is, the rehearsal says it)
        return None
    return watch.found


class _Watch(TorchDispatchMode):
    """Follows what is made of outputs and of the target.

    Args:
        rows: of both.
    """

    def __init__(self, rows: int, outputs: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        super().__init__()
        self._rows = rows
        self._of_model = {id(x): x for x in outputs}  # kept, so that no other tensor gets the same id
        self._of_data = {id(target): target}
        self._added = dict[int, torch.Tensor]()
        self.found: _Crossing | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        results = [x for x in pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
        added = "unsqueeze" in str(func) or any(id(x) in self._added for x in given)
        kind = self._of_model if any(id(x) in self._of_model for x in given) else None
        if kind is None and any(id(x) in self._of_data for x in given):
            kind = self._of_data
        for result in results:
            for known in (kind, self._added if added else None):
                if known is not None:
                    known[id(result)] = result
        if not added and self.found is None and any(x.shape == (self._rows, self._rows) for x in results):
            self._note(given)
        return made

    def _note(self, given: Sequence[torch.Tensor]) -> None:
        rows = self._rows
        for tall_is_output, of_tall, of_flat in (
            (True, self._of_model, self._of_data),
            (False, self._of_data, self._of_model),
        ):
            tall = any(x.shape == (rows, 1) and id(x) in of_tall for x in given)
            if tall and any(x.shape == (rows,) and id(x) in of_flat for x in given):
                self.found = _Crossing(tall_is_output, line_outside_torch(sys._getframe(2)))

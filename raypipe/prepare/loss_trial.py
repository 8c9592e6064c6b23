"""The user's model and loss, tried on a few real rows in this process: outputs, and losses of micro-batches of them.

Everything that a call changes is put back: modes, buffers, and what model and loss remember.
"""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from raypipe.engine.capture.guards import own_loss
from raypipe.engine.one_thread import one_thread
from raypipe.engine.randomness import KeyedRandomness, RandomKey
from raypipe.engine.remembered import read_memory
from raypipe.engine.trial.loss_check import Grouping, group_losses
from raypipe.engine.trial.rehearsal import scalar
from raypipe.engine.trial.watched_rows import refuse_rows_crossed_in
from raypipe.errors import CaptureError

__all__ = ["LossTrial"]

LossFn = Callable[[Any, Any], torch.Tensor]
Columns = Mapping[Any, torch.Tensor]


class LossTrial:
    """The user's model and loss as one function of rows, in evaluation mode; nothing of either is changed."""

    def __init__(self, model: torch.nn.Module, loss_fn: LossFn | None, seed: int) -> None:
        self._model, self._loss_fn, self._seed = model, loss_fn, seed
        self._draws = False

    def outputs(self, rows: Columns) -> Any:
        """Of the model, in its own structure; None where it cannot run like this."""
        try:
            with _evaluating(self._model), self._forgetting():
                return self._run(rows)
        except Exception:  # noqa: BLE001  (whatever it is, training says it better)
            return None

    def watch_rows(self, loss_fn: LossFn, outputs: Any, target: torch.Tensor) -> None:
        """See ``refuse_rows_crossed_in``."""
        with self._forgetting(), one_thread(), KeyedRandomness(RandomKey(self._seed, 0, 0)):
            refuse_rows_crossed_in(loss_fn, outputs, target)

    def losses(self, rows: Columns) -> tuple[float, list[Grouping]] | None:
        """Of all rows and of micro-batches of them; None where the model cannot run like this.

        Raises:
            CaptureError: the loss is no scalar.
        """
        try:
            with _evaluating(self._model):
                found = group_losses(rows, self._loss)
        except CaptureError:
            raise
        except Exception:  # noqa: BLE001  (as above)
            return None
        return None if self._draws else found  # other rows would draw other numbers

    def _run(self, rows: Columns) -> Any:
        values = {name: column.clone() for name, column in rows.items()}
        with KeyedRandomness(RandomKey(self._seed, 0, 0)) as mode:
            if self._loss_fn is not None:
                output = self._model(*list(values.values())[:-1])
            elif all(isinstance(name, int) for name in values):
                output = self._model(*values.values())
            else:
                output = self._model(**values)
        self._draws = self._draws or mode.index > 0
        return output

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """What model and loss remember of a call is put back, so that every call here is the first one."""
        memory = read_memory(self._model, self._loss_fn)
        try:
            yield
        finally:
            memory.restore()

    def _loss(self, rows: Columns) -> float:
        with self._forgetting():
            return contextvars.copy_context().run(self._first_loss, rows)

    def _first_loss(self, rows: Columns) -> float:
        output = self._run(rows)
        if self._loss_fn is None:
            return float(own_loss(self._model, output))
        return float(scalar(self._loss_fn(output, list(rows.values())[-1]), len(next(iter(rows.values())))))


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients, on all threads, for a large model takes a while; all is put back."""
    modes = {name: module.training for name, module in model.named_modules()}
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a loss over one row
            yield
    finally:
        for name, module in model.named_modules():
            module.training = modes[name]
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])

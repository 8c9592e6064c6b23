"""The user's model and loss, tried on a few real rows in this process: outputs, and losses of micro-batches of them.

Everything that a call changes is put back: modes, buffers, and what model and loss remember.
"""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raypipe.engine.capture.guards import own_loss
from raypipe.engine.one_thread import one_thread
from raypipe.engine.randomness import KeyedRandomness, RandomKey
from raypipe.engine.remembered import read_memory
from raypipe.engine.stage_buffers import same_bits
from raypipe.engine.trial.loss_check import Grouping, group_losses, tolerance_of
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
        self._loss_dtype = torch.float32

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
            with _evaluating(self._model) as put_back:
                whole, found = group_losses(rows, lambda some: self._loss(some, put_back))
        except CaptureError:
            raise
        except Exception:  # noqa: BLE001  (as above)
            return None
        if self._draws:  # other rows would draw other numbers
            return None
        tolerance = tolerance_of(self._loss_dtype)
        return whole, [replace(grouping, tolerance=tolerance) for grouping in found]

    def refuse_unrepeatable(self, loss_fn: LossFn, outputs: Any, target: torch.Tensor) -> None:
        """Refuse a loss that is not the same function of its arguments whenever it is called.

        Raises:
            CaptureError: it draws random numbers, or changes a buffer of its own.
        """
        buffers = dict(loss_fn.named_buffers()) if isinstance(loss_fn, torch.nn.Module) else {}
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        given = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (outputs, target))
        try:
            with self._forgetting(), one_thread(), KeyedRandomness(RandomKey(self._seed, 0, 0)) as mode:
                loss_fn(*given)
        except Exception:  # noqa: BLE001  (whatever it is, training says it better)
            return
        finally:
            changed = [name for name, buffer in buffers.items() if not same_bits(buffer, before[name])]
            with torch.no_grad():
                for name in changed:
                    buffers[name].copy_(before[name])
        if changed:
            raise CaptureError(
                f"loss_fn changes its buffer {changed[0]!r} in every call. No checkpoint holds what a loss keeps, and "
                "evaluations would change it too. Keep it in a buffer of the model, and let forward return what the "
                "loss needs of it."
            )
        if mode.index:
            raise CaptureError(
                "loss_fn draws random numbers, which nothing but a model's forward may: draws there are keyed by seed, "
                "step and micro-batch, and so the same wherever stages run. Let forward draw them and return what the "
                "loss needs."
            )

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

    def _loss(self, rows: Columns, put_back: Callable[[], None]) -> float:
        with self._forgetting():
            try:
                return contextvars.copy_context().run(self._first_loss, rows)
            finally:
                put_back()

    def _first_loss(self, rows: Columns) -> float:
        output = self._run(rows)
        if self._loss_fn is None:
            loss = own_loss(self._model, output)
        else:
            loss = scalar(self._loss_fn(output, list(rows.values())[-1]), len(next(iter(rows.values()))))
        self._loss_dtype = loss.dtype
        return float(loss)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Evaluation mode, without gradients, on all threads, for a large model takes a while; all is put back.

    Without torch's fast path of encoders: what that gives at masked places depends on the masks of all rows.

    Yields:
        what puts the buffers back between two calls.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def put_back() -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a loss over one row
            yield put_back
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for name, module in model.named_modules():
            module.training = modes[name]
        put_back()

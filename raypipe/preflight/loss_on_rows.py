"""Trial of a loss on real rows: weighted losses of micro-batches against the loss of all rows, with gradients.

    whole      loss of rows 0 1 2 3, and its gradient by each parameter
    parts      loss and gradients of rows 0 1 and rows 2 3; of row 0 and rows 1 2 3; of each row

No weights fit a loss that compares rows with each other (contrastive pairs, a spread over the batch) or multiplies
averages over them (the load balancing of experts). A wrong weight of padding shows if rows have different numbers of
labels. Gradients are compared because a term with a small factor is a small part of the loss, but not of the gradients
of parameters that it alone trains. Everything that a call changes is restored.

    model                               loss of some rows
    the user's model, with its weights  model(rows), and the loss_fn if there is one
    a model that returns several terms  the captured graph without dropout; its terms are weighted and added up
    a model without weights             see random_outputs.py
"""

from __future__ import annotations

import contextvars
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from raypipe.capture import Capture
from raypipe.capture.guards import in_mode
from raypipe.capture.own_loss import own_loss
from raypipe.capture.python_state import Memory, read_memory
from raypipe.engine.device.device import memory_bytes, process_bytes
from raypipe.engine.stage.minibatch_loss import WholeMinibatch
from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey
from raypipe.engine.stage.stage import same_bits
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import CaptureError, RaypipeError
from raypipe.preflight.dry_run import scalar
from raypipe.preflight.loss_gradients import GradientsTooLargeError, Loss, LossGradients, Tolerance
from raypipe.preflight.without_draws import DrawsError, FixedDraws, without_draws

NUM_ROWS, FEW_ROWS, LARGE = 4, 2, 1 << 24
"""A model is tried on NUM_ROWS rows, or on FEW_ROWS if it has at least LARGE parameters: a row then takes seconds."""
MANY_ROWS = 16
"""Rows on which a loss_fn is tried without the model: a loss may depend on values that few rows have."""
_UNLIKE_IN_TRAINING = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)
"""Modules that stay in evaluation mode: they draw random numbers, or depend on the statistics of a micro-batch."""

LossFn = Callable[[Any, Any], torch.Tensor]
Columns = Mapping[Any, torch.Tensor]


class Grouping(NamedTuple):
    """Rows divided into micro-batches.

    Attributes:
        sizes: number of rows of each micro-batch.
        parts: columns of each micro-batch, by name.
        losses: loss of each micro-batch, unweighted.
    """

    sizes: tuple[int, ...]
    parts: tuple[Columns, ...]
    losses: tuple[Loss, ...]


class Tried(NamedTuple):
    """Losses of some rows, and of micro-batches of these rows.

    Attributes:
        whole: loss of all rows.
        groupings: losses of micro-batches, for several ways to divide the rows.
        tolerance: allowed difference between a weighted sum over micro-batches and ``whole``.
        without_gradients: reason why gradients are missing; empty if they were computed.
        training: True if the model was in training mode, see ``LossTrial.losses``.
    """

    whole: Loss
    groupings: tuple[Grouping, ...]
    tolerance: Tolerance
    without_gradients: str = ""
    training: bool = False


class Misfit(NamedTuple):
    """Weighted sum over micro-batches that differs from the loss or the gradients of all rows.

    Attributes:
        total: sum of the weighted losses; NaN if there are no weights.
        gradients: (parameter, distance between the sum and the gradient of all rows, as a fraction of its length) for
            every distance beyond the tolerance, the largest first.
    """

    total: float
    gradients: tuple[tuple[str, float], ...] = ()


def is_large(model: torch.nn.Module) -> bool:
    """Return True if a model has at least LARGE parameters; its loss is tried on few rows then, in its own dtype."""
    return sum(p.numel() for p in model.parameters()) >= LARGE


def rows_through(model: torch.nn.Module) -> int:
    """Return the number of rows on which to try a model."""
    return FEW_ROWS if is_large(model) else NUM_ROWS


def misfit(tried: Tried, grouping: Grouping, weights: Sequence[float] | None) -> Misfit | None:
    """Compare the loss and gradients of all rows with the weighted sums over micro-batches; None if they agree.

    Args:
        weights: weight of each micro-batch. None if the items to weigh by cannot be counted: losses then agree only if
            the loss of all rows is NaN.
    """
    whole = tried.whole
    if weights is None:
        return None if math.isnan(whole.value) else Misfit(math.nan)
    weighted = [(w, loss) for w, loss in zip(weights, grouping.losses, strict=True) if w]
    total = math.fsum(w * loss.value for w, loss in weighted)
    scale = max(abs(whole.value), *(abs(x.value) for x in grouping.losses if math.isfinite(x.value)), 1e-3)
    apart = _gradients_apart(whole, weighted, tried.tolerance)
    fits = abs(total - whole.value) <= tried.tolerance.loss * scale
    return None if fits and not apart else Misfit(total, apart)


def _gradients_apart(
    whole: Loss, weighted: Sequence[tuple[float, Loss]], tolerance: Tolerance
) -> tuple[tuple[str, float], ...]:
    apart: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys((*whole.gradients, *(name for _, loss in weighted for name in loss.gradients))):
        parts = [w * loss.gradients[name] for w, loss in weighted if name in loss.gradients]
        together = whole.gradients.get(name)
        if together is not None and not together.isfinite().all():
            continue  # training stops at such a gradient, or skips its step
        distance = float(torch.stack([*parts, *([] if together is None else [-together])]).sum(0).norm())
        length = 0.0 if together is None else float(together.norm())
        apart[name] = distance, max(length, math.fsum(float(part.norm()) for part in parts))
    longest = max((length for _, length in apart.values() if math.isfinite(length)), default=0.0)
    beyond = {
        name: distance / (length or 1.0)
        for name, (distance, length) in apart.items()
        if not distance <= tolerance.gradient * length + tolerance.least * longest
    }
    return tuple(sorted(beyond.items(), key=lambda item: -item[1]))


def _group_losses(
    rows: Columns, loss_of: Callable[[Columns], Loss], gradients: LossGradients, size: int | None = None
) -> Tried:
    """Compute the losses of all rows, and of the micro-batches of three divisions of these rows.

    The divisions are two halves, the first row and the rest, and single rows. A division is left out if the loss raises
    an exception on one of its micro-batches: some losses, such as a variance, need several rows. If the loss fails on
    every division, the last exception is raised.

    Args:
        loss_of: returns the loss of some rows, with its gradients.
        gradients: only its ``tolerance`` is used, which is returned in the result.
        size: number of rows of every micro-batch of the only division, which is left out if rows would remain; None for
            the three divisions.
    """
    count = len(next(iter(rows.values())))
    whole = loss_of(rows)
    groupings = []
    failed: Exception | None = None
    known: dict[tuple[int, int], Loss] = {}  # the first row is a micro-batch of two groupings
    divisions = [(count // 2, count - count // 2), (1, count - 1), (1,) * count]
    if size is not None:
        divisions = [(size,) * (count // size)] if count % size == 0 else []
    for sizes in dict.fromkeys(divisions):
        cuts = list(zip((0, *itertools.accumulate(sizes)), itertools.accumulate(sizes)))  # noqa: B905
        parts = tuple({name: column[first:stop] for name, column in rows.items()} for first, stop in cuts)
        try:
            for cut, part in zip(cuts, parts, strict=True):
                if cut not in known:
                    known[cut] = loss_of(part)
            groupings.append(Grouping(sizes, parts, tuple(known[cut] for cut in cuts)))
        except RaypipeError:
            raise
        except Exception as error:  # noqa: BLE001  (the user's code)
            failed = error
    if failed is not None and not groupings:
        raise failed
    return Tried(whole, tuple(groupings), gradients.tolerance)


class LossTrial:
    """Computes the losses of a model and its loss_fn on rows of data; neither is changed.

    Args:
        loss_fn: (output, target) -> scalar; None if the model returns its own loss.
        seed: seed of the random key for the model's random operations.
        rule: joins the outputs of both halves of the rows, which the loss_fn gets; the rows are then not divided into
            micro-batches. None: the loss_fn gets the output of all rows.
        size: number of samples that every micro-batch has; None for any number.

    Attributes:
        drew: True if the model drew random numbers other than those of dropout in any run: the constants in their place
            cannot show whether they select or mix samples.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn | None,
        seed: int,
        rule: WholeMinibatch | None = None,
        size: int | None = None,
    ) -> None:
        self._model, self._loss_fn, self._seed, self._rule, self._size = model, loss_fn, seed, rule, size
        self._draws = self._fixed = self.drew = False

    def outputs(self, rows: Columns) -> Any:
        """Return the model's output in evaluation mode; None if the model fails."""
        try:
            with torch.no_grad(), _trying(self._model), self.forgetting():
                return self._run(rows)
        except Exception:  # noqa: BLE001  (the rehearsal and the first step report it)
            return None

    def losses(self, rows: Columns) -> Tried | None:
        """Compute the losses of all rows and of micro-batches; None if the model fails, or draws whole numbers.

        The model is in training mode except for dropout and batch norms, since some terms of a loss exist only in
        training. Random numbers are replaced by constants. If a model draws whole numbers or changes buffers,
        evaluation mode is tried. A small model computes in float64 if it supports that. Without enough memory for a
        backward, only losses are computed.

        Raises:
            CaptureError: the loss is not a scalar.
        """
        few_bytes = max(0, memory_bytes() - process_bytes()) // 2
        for in_float64 in (False,) if is_large(self._model) else (True, False):
            for training in (True, False):
                try:
                    tried = self._tried(rows, training=training, in_float64=in_float64, most_bytes=few_bytes)
                    return tried._replace(training=training)
                except CaptureError:
                    raise
                except DrawsError:
                    if not training:
                        return None
                except GradientsTooLargeError:
                    break
                except Exception:  # noqa: BLE001  (the user's code; the first step reports it)
                    continue
        try:
            why = f"a backward of {len(next(iter(rows.values())))} rows would fail here, or take too much memory"
            return self._tried(rows, training=False, in_float64=False, most_bytes=0)._replace(without_gradients=why)
        except CaptureError:
            raise
        except Exception:  # noqa: BLE001  (as above)
            return None

    def _tried(self, rows: Columns, *, training: bool, in_float64: bool, most_bytes: int) -> Tried:
        """Compute losses in training or evaluation mode, in float64 or in the model's dtype.

        Args:
            most_bytes: limit of the bytes kept for the backward; 0 computes no gradients.

        Raises:
            GradientsTooLargeError: the limit is exceeded.
            DrawsError: the model draws random numbers that cannot be replaced, or changes buffers or Python state in
                training mode.
        """
        named = dict(self._model.named_parameters()) if most_bytes else {}
        gradients = LossGradients(named, in_float64=in_float64, most_bytes=most_bytes)

        def loss_of(some: Columns) -> Loss:
            with self.forgetting() as memory:
                try:
                    loss = gradients.of(lambda: contextvars.copy_context().run(self.loss, some))
                    if training and (changed() or self._remembers(memory)):
                        raise DrawsError
                    if self._fixed and not math.isfinite(loss.value):  # a mask of constants may pick nothing
                        raise DrawsError
                finally:
                    put_back()
            return loss

        self._draws = self._fixed = False
        with _trying(self._model, training=training) as (put_back, changed):
            if self._rule is not None:
                return Tried(loss_of(rows), (), gradients.tolerance)
            return _group_losses(rows, loss_of, gradients, self._size)

    def loss(self, rows: Columns) -> torch.Tensor:
        """Compute the loss of some rows, in the model's current mode.

        Raises:
            CaptureError: the loss is not a scalar.
            DrawsError: the model draws random numbers that cannot be replaced by constants.
        """
        output = self._run(rows)
        if self._draws:  # before a backward, which takes longer
            raise DrawsError
        if self._loss_fn is None:
            return own_loss(self._model, output)
        return scalar(self._loss_fn(output, list(rows.values())[-1]), len(next(iter(rows.values()))))

    def refuse_unrepeatable(self, outputs: Any, target: torch.Tensor) -> None:
        """Call the loss_fn once, and raise an error if a later call with equal arguments might differ from it.

        Raises:
            CaptureError: the loss_fn draws random numbers, or changes a buffer of its own.
        """
        loss_fn = self._loss_fn
        assert loss_fn is not None
        buffers = dict(loss_fn.named_buffers()) if isinstance(loss_fn, torch.nn.Module) else {}
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        copies = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (outputs, target))
        try:
            with self.forgetting(), one_thread(), KeyedRandomness(RandomKey(self._seed, 0, 0)) as mode:
                loss_fn(*copies)
        except Exception:  # noqa: BLE001  (as above)
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
                "loss_fn draws random numbers, which only a model's forward may: there they are keyed by seed, "
                "step and micro-batch, and so equal wherever stages run. Let forward draw them and return what the "
                "loss needs."
            )

    def _run(self, rows: Columns) -> Any:
        values = {name: column.clone() for name, column in rows.items()}
        with FixedDraws(RandomKey(self._seed, 0, 0)) as mode:
            if self._rule is not None:
                inputs, half = list(values.values())[:-1], len(next(iter(values.values()))) // 2
                parts = [[x[cut] for x in inputs] for cut in (slice(0, half), slice(half, None))]
                output = self._rule.join_returned([self._model(*part) for part in parts])
            elif self._loss_fn is not None:
                output = self._model(*list(values.values())[:-1])
            elif all(isinstance(name, int) for name in values):
                output = self._model(*values.values())
            else:
                output = self._model(**values)
        self._draws, self._fixed = self._draws or mode.remaining, self._fixed or mode.replaced
        self.drew = self.drew or mode.remaining or mode.others > 0
        return output

    @contextmanager
    def forgetting(self) -> Iterator[Memory]:
        """Restore the Python state of model and loss_fn after the code inside; yield the state as it was before."""
        memory = read_memory(self._model, self._loss_fn)
        try:
            yield memory
        finally:
            memory.restore()

    def _remembers(self, before: Memory) -> bool:
        return next(before.changes(read_memory(self._model, self._loss_fn)), None) is not None


@contextmanager
def _trying(
    model: torch.nn.Module, *, training: bool = False
) -> Iterator[tuple[Callable[[], None], Callable[[], bool]]]:
    """Set the model to training or evaluation mode, with dropout and batch norms always in evaluation mode.

    Torch's fast path of transformer encoders is switched off within the context, because its values at masked positions
    depend on the masks of all rows. Modes and buffers are restored afterwards.

    Yields:
        (function that restores the buffers, function that returns True if a buffer has changed).
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def put_back() -> None:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])

    def changed() -> bool:
        return any(not same_bits(buffer, kept[name]) for name, buffer in model.named_buffers())

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with in_mode(model, training=training), warnings.catch_warnings():
            for module in model.modules():
                if isinstance(module, _UNLIKE_IN_TRAINING):
                    module.training = False
            warnings.simplefilter("ignore")  # of a loss over one row
            yield put_back, changed
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def try_parts(captured: Capture, rows: Columns, seed: int) -> Tried | None:
    """Compute losses of a captured model that returns the terms of its loss one by one, each with a weight of its own.

    The training graph is used, because some terms exist only in training. Random numbers are left out, because they
    depend on the rows.

    Returns:
        Losses in which the terms of each micro-batch are weighted already, so that they add up to the whole; None if
        the graph still draws random numbers, or ``without_draws`` has no function for it.
    """
    assert captured.terms is not None
    assert captured.terms.counts is not None
    counts, function = captured.terms.counts, without_draws(captured)
    if function is None:
        return None
    tensors = {**captured.parameters, **captured.buffers}
    wide = sum(x.numel() for x in captured.parameters.values()) < LARGE
    gradients = LossGradients(captured.parameters, in_float64=wide)
    totals = counts.divisors(rows, len(next(iter(rows.values()))))

    def weighted_sum(some: Columns) -> torch.Tensor:
        with one_thread():
            terms = function(
                [tensors[site.parameter] for site in function.sites],
                [tensors[name].detach().clone() for name in function.buffers],
                (),
                [some[name].clone() for name in function.columns],
                RandomKey(seed, 0, 0),
            )
        divisors = counts.divisors(some, len(next(iter(some.values()))))
        weighted = [
            term * (divisors[at] / totals[at])
            for term, at in zip(terms, counts.parts, strict=False)
            if divisors[at] and totals[at]
        ]
        return sum(weighted, start=torch.zeros((), dtype=terms[0].dtype))

    try:
        return _group_losses(rows, lambda some: gradients.of(lambda: weighted_sum(some)), gradients)
    except DrawsError:
        return None

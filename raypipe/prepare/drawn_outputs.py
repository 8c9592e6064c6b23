"""A loss_fn tried without the model's weights: on outputs of the right shapes and types, drawn at random.

    rows --shapes--> outputs, drawn   --loss_fn, with the target--> what the first step would fail with
                                      --whole and in parts--------> what micro-batches weigh

Some losses take only probabilities or only positive numbers, so several ways of drawing are tried, and what all of
them fail with is the loss's own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raypipe.engine.capture import Capture
from raypipe.engine.capture.explain import misfit_of_loss
from raypipe.engine.item_randomness import generator_states, own_generators
from raypipe.engine.one_thread import one_thread
from raypipe.engine.remembered import read_memory
from raypipe.engine.trial.loss_check import MANY_ROWS, Grouping, group_losses
from raypipe.engine.trial.rehearsal import NUM_ROWS, scalar
from raypipe.errors import CaptureError, DataError, RaypipeError
from raypipe.prepare.unrun import bare_outputs

__all__ = ["drawn_losses", "losses_of_many", "rehearse_loss"]

MOST_BYTES = 1 << 28
"""Of outputs; a loss over more of them is not tried."""
FEW_BYTES = 1 << 24
"""Of outputs, over which a loss takes milliseconds."""

Columns = Mapping[Any, torch.Tensor]
Draw = Callable[[torch.Tensor], torch.Tensor]


def _normal(bare: torch.Tensor) -> torch.Tensor:
    return torch.randn(bare.shape).to(bare.dtype)


def _uniform(bare: torch.Tensor) -> torch.Tensor:
    return torch.rand(bare.shape).to(bare.dtype)


def _shares(bare: torch.Tensor) -> torch.Tensor:
    """Probabilities that add up to 1 over the last dimension."""
    return torch.randn(bare.shape).softmax(-1).to(bare.dtype) if bare.dim() else _uniform(bare)


_DRAWS: tuple[Draw, ...] = (_normal, _uniform, _shares)


def rehearse_loss(captured: Capture, columns: Columns, *, data: str = "") -> None:
    """The loss_fn and its backward on drawn outputs, where the model has no values to compute with.

    Args:
        columns: a micro-batch by column, of which the first rows are taken; the last one is the target.
        data: which argument they are of, for messages.

    Raises:
        CaptureError, DataError: what a first step would have failed with.
    """
    if captured.loss_fn is None:
        return
    rows = {name: x[:NUM_ROWS] if x.dim() else x for name, x in columns.items()}
    try:
        bare = bare_outputs(captured, rows)
    except Exception:  # noqa: BLE001  (a model in training mode may want more rows than there are)
        return
    if _too_large(bare):
        return
    errors = []
    for draw in _DRAWS:
        try:
            _tried(captured, [_drawn(x, draw) for x in bare], rows)
        except (AssertionError, ArithmeticError, torch.linalg.LinAlgError):
            return  # of values, not of shapes
        except RaypipeError as error:
            errors.append(error)
        else:
            return
    if len({str(error) for error in errors}) == 1:
        raise DataError(f"{data}: {errors[0]}") if data else errors[0]


def losses_of_many(captured: Capture, rows: Columns) -> tuple[float, list[Grouping]] | None:
    """As ``drawn_losses``, of as many of the rows as take no time to speak of; None where it cannot be tried."""
    count = min(MANY_ROWS, len(next(iter(rows.values()))))
    while count > 1:
        try:
            some = {name: column[:count] for name, column in rows.items()}
            if not _too_large(bare_outputs(captured, some), FEW_BYTES):
                return drawn_losses(captured, some)
        except CaptureError:
            raise
        except Exception:  # noqa: BLE001  (a model that needs its weights for shapes)
            return None
        count //= 2
    return None


def drawn_losses(captured: Capture, rows: Columns) -> tuple[float, list[Grouping]] | None:
    """Of all rows and of micro-batches of them, on drawn outputs; None where the loss cannot be tried like this.

    Args:
        rows: as ``group_losses`` takes them.
    """
    count = len(next(iter(rows.values())))
    whole = bare_outputs(captured, rows)
    twice = bare_outputs(captured, {name: torch.cat([x, x]) if x.dim() else x for name, x in rows.items()})
    if _too_large(whole) or not all(
        _of_rows(x, y, count) or x.shape == y.shape for x, y in zip(whole, twice, strict=True)
    ):
        return None
    for draw in _DRAWS:
        drawn = [_drawn(x, draw, least=torch.float32) for x in whole]
        split: dict[Any, torch.Tensor] = {
            (__name__, i): x.view(count, x.shape[0] // count, *x.shape[1:])
            for i, (x, other) in enumerate(zip(drawn, twice, strict=True))
            if _of_rows(x, other, count)
        }

        def loss_of(part: Columns, drawn: Any = drawn) -> float:
            outputs = [part[__name__, i].flatten(0, 1) if (__name__, i) in part else x for i, x in enumerate(drawn)]
            return float(_loss(captured, outputs, part[list(rows)[-1]]))

        try:
            with torch.no_grad(), one_thread(), warnings.catch_warnings(), own_generators():
                warnings.simplefilter("ignore")  # of a loss over one row
                before = generator_states()
                found = group_losses({**split, **rows}, loss_of)
                if not generator_states().same_as(before):
                    return None  # other rows draw other numbers
        except CaptureError:
            raise
        except Exception:  # noqa: BLE001  (whatever it is, training says it better)
            continue
        if math.isfinite(found[0]):  # a logarithm of what no model returns says nothing
            return found
    return None


def _tried(captured: Capture, outputs: Sequence[torch.Tensor], rows: Columns) -> None:
    column = list(rows)[-1]
    leaves = [x.requires_grad_() for x in outputs if x.is_floating_point()]
    with one_thread(), torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")  # compares all rows with all others
        try:
            loss = scalar(_loss(captured, outputs, rows[column]), len(rows[column]))
        except (AssertionError, ArithmeticError, torch.linalg.LinAlgError, RaypipeError):
            raise
        except Exception:  # noqa: BLE001  (told in one paragraph)
            whole: Any = captured.recipe.loss
            output = whole.as_returned(tuple(x.detach() for x in outputs))
            raise misfit_of_loss(captured.loss_fn, output, rows[column], column) from None  # type: ignore[arg-type]
        if not loss.requires_grad or not any(
            x is not None for x in torch.autograd.grad(loss, leaves, allow_unused=True)
        ):
            raise CaptureError(
                "loss_fn returns a loss that no gradient flows through: detach(), no_grad, argmax, a comparison or a "
                "conversion to a number stands between it and the model's output. Compute it by differentiable "
                "operations."
            )


def _loss(captured: Capture, outputs: Sequence[torch.Tensor], target: torch.Tensor) -> Any:
    """As the user's function computes it; what that remembers of a call is put back."""
    loss: Any = captured.recipe.loss
    memory = read_memory(torch.nn.Module(), captured.loss_fn)
    try:
        return loss(tuple(outputs), [target.clone()])
    finally:
        memory.restore()


def _of_rows(whole: torch.Tensor, twice: torch.Tensor, count: int) -> bool:
    """Whether its first dimension has the same number of entries for each row, as twice as many rows tell."""
    if not whole.dim() or whole.shape[0] % count:
        return False
    return twice.shape == (2 * whole.shape[0], *whole.shape[1:])


def _too_large(bare: Sequence[torch.Tensor], most: int | None = None) -> bool:
    return sum(math.prod(x.shape) * max(4, x.dtype.itemsize) for x in bare) > (MOST_BYTES if most is None else most)


def _drawn(bare: torch.Tensor, draw: Draw, least: torch.dtype | None = None) -> torch.Tensor:
    """The same numbers every time; in ``least`` at least, so that sums can be compared."""
    if not bare.is_floating_point():
        return torch.zeros(bare.shape, dtype=bare.dtype)
    with own_generators():
        torch.manual_seed(0)
        found = draw(bare)
    return found if least is None else found.to(torch.promote_types(found.dtype, least))

"""Dry run of one forward and backward on a few rows, to raise errors of the first step before the run starts.

    captured model, as one stage --> loss --> gradients    computed as in a stage; the user's tensors are not changed
    user's model, as it is       --> loss                  only after a failure, to name the module

The user's loss may refer to the model for a size or a function, but must not read tensors that are trained. Stages
train copies of them, so that the loss would always read the initial weights, and give them no gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.capture import Capture
from raypipe.capture.explain import Inputs, misfit_of_loss, misfit_of_model, not_as_captured
from raypipe.capture.own_loss import returned
from raypipe.data.stream_source import ENDLESS
from raypipe.engine.stage.mixed_precision import converted, model_in
from raypipe.engine.stage.randomness import RandomKey
from raypipe.engine.stage.stage import same_bits
from raypipe.errors import CaptureError, ConfigError, DataError, RaypipeError
from raypipe.user_lines import quoted, short


class _Watched(TorchDispatchMode):
    """Dispatch mode that raises a CaptureError before an operation reads a forbidden tensor; see ``no_reads_of``.

    Args:
        named, allowed: as in ``no_reads_of``, but with ``_storage`` of each tensor in place of the tensor.
    """

    def __init__(self, named: Mapping[int, str], whose: str, cure: str, allowed: Collection[int] | None) -> None:
        super().__init__()
        self._named, self._whose, self._cure, self._allowed = named, whose, cure, allowed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten.detach.default:  # it computes nothing yet
            for tensor in pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    self._check(tensor)
        return func(*args, **kwargs)

    def _check(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage in self._named:
            raise CaptureError(
                f"{self._whose} reads {self._named[storage]!r} of the model that the trainer was given. Stages "
                f"train copies of it, so that it would always read the initial values. {self._cure}"
            )
        if self._allowed is None or storage in self._allowed or not torch.is_grad_enabled():
            return
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            raise CaptureError(
                f"{self._whose} computes with a parameter of shape {list(tensor.shape)} that the model does not "
                "have, so no optimizer would train it. Make it a part of the model, which can return its own loss, or "
                "freeze it: requires_grad_(False)."
            )


@contextmanager
def no_reads_of(
    named: Mapping[str, torch.Tensor], whose: str, cure: str = "", *, allowed: Iterable[torch.Tensor] | None = None
) -> Iterator[None]:
    """Refuse operations inside the context that read one of these tensors, or a view of one.

    Args:
        named: forbidden tensors by name.
        whose: owner of the code inside, for the message.
        cure: remedy, for the message.
        allowed: arguments of the code inside, which it may read even if they are in ``named``. Any other trainable
            parameter is then forbidden too. None: only ``named`` is forbidden.

    Raises:
        CaptureError: an operation reads a forbidden tensor; raised before it computes.
    """
    spared = None if allowed is None else {_storage(x) for x in allowed if x.layout is torch.strided}
    held = {_storage(x): name for name, x in named.items() if not x.is_meta and x.numel()}
    for storage in spared or ():
        held.pop(storage, None)
    with _Watched(held, whose, cure, spared):
        yield


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


NUM_ROWS = 2
ANY_SIZE = (
    "For any number, take it from the data, as in x.view(x.shape[0], -1), do not loop over samples, and set "
    "batch_first=True for nn.LSTM, GRU and RNN."
)
_OF_A_LOSS = (
    "Let the model return what the loss needs of its parameters, or its own loss; a penalty on the size of weights is "
    "weight_decay of the optimizer."
)


def scalar(loss: Any, samples: int) -> torch.Tensor:
    """Return ``loss`` if it is a scalar tensor, else raise a CaptureError that names the number of samples."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise CaptureError(
            f"loss_fn returns {returned(loss)} for {samples} samples instead of a scalar tensor. {_cure(loss)}"
        )
    return loss


def _cure(loss: Any) -> str:
    if loss is None:
        return "Let it end in return loss."
    if isinstance(loss, tuple | list | Mapping):
        return "Let it return the loss alone; pass functions of the output as metrics={...}, which evaluations report."
    if isinstance(loss, torch.Tensor):
        return "Let it reduce over the samples, as reduction='mean' does."
    return "Leave out what makes a number of it (.item(), float(), .numpy()): through a number no gradient flows."


def rehearse_evaluation(model: torch.nn.Module, captured: Capture, rows: Mapping[Any, torch.Tensor]) -> None:
    """Run the forward and the loss of evaluation on the first rows of eval_data.

    Raises:
        DataError: the forward or the loss fails; contains the error.
    """
    try:
        rehearse(model, captured, rows, training=False)
    except RaypipeError as error:
        raise DataError(f"eval_data: {error}") from None


def rehearse_single(
    model: torch.nn.Module, captured: Capture, columns: Mapping[Any, torch.Tensor], num_samples: int,
    minibatch_size: int, microbatch_size: int,
) -> None:  # fmt: skip
    """Run a forward and backward on one row if an epoch has a micro-batch of one sample, on which batch norms fail.

    Raises:
        DataError: the model does not train on one sample; names the sizes to change.
    """
    rest = num_samples % minibatch_size
    if microbatch_size > 1 and 1 not in (minibatch_size % microbatch_size, rest % microbatch_size):
        return
    try:
        rehearse(model, captured, _one_row(columns))
    except RaypipeError as error:
        raise DataError(
            f"An epoch of {num_samples} samples, with minibatch_size={minibatch_size} in micro-batches of "
            f"{microbatch_size}, has a micro-batch of one sample, and the model does not train on that. {error} Or "
            "change minibatch_size, num_microbatches or the number of samples."
        ) from None


def refuse_other_sizes(
    one_size: int, num_samples: Mapping[str, int], minibatch_size: int, microbatch_size: int
) -> None:
    """Raise an error unless all micro-batches have ``one_size`` samples, the only number that the model takes.

    Args:
        num_samples: number of samples of the training data ("train"), and of the evaluation data ("eval").

    Raises:
        ConfigError: a micro-batch of training or evaluation has another size; names the number to change.
    """
    wrong = ""
    if microbatch_size != one_size or minibatch_size % one_size:
        wrong = f"mini-batches of {minibatch_size} are divided into micro-batches of {microbatch_size}"
        cure = "Set num_stages, and num_microbatches to a divisor of minibatch_size."
    for data, count in num_samples.items():
        if not wrong and count != ENDLESS and count % minibatch_size % one_size:
            wrong = f"{data}_data has {count} samples, and its last micro-batch {count % minibatch_size % one_size}"
            cure = f"Leave {count % one_size} of them out, or repeat some."
    if wrong:
        raise ConfigError(f"forward takes one number of samples only, here {one_size}, but {wrong}. {cure} {ANY_SIZE}")


def takes_one_row(model: torch.nn.Module, captured: Capture, columns: Mapping[Any, torch.Tensor]) -> bool:
    """Return True if the model trains on a micro-batch of one sample."""
    try:
        rehearse(model, captured, _one_row(columns))
    except RaypipeError:
        return False
    return True


def _one_row(columns: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    return {name: x[:1] if x.dim() else x for name, x in columns.items()}


def rehearse(
    model: torch.nn.Module, captured: Capture, columns: Mapping[Any, torch.Tensor], *, training: bool = True
) -> None:
    """Run one forward and backward of the captured model; the user's parameters and buffers are not changed.

    Does nothing for a model without values (on the meta device).

    Args:
        columns: columns of a micro-batch by name; with a loss_fn the last is the target. The first NUM_ROWS rows are
            used, or ``captured.one_size`` rows.
        training: False to run the forward and loss of evaluation, without a backward.

    Raises:
        CaptureError, DataError: the first step would fail; names the module or the loss and its inputs.
    """
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return  # without values nothing can be computed
    rows = {name: x[: captured.one_size or NUM_ROWS] if x.dim() else x for name, x in columns.items()}
    (program,) = captured.programs(())
    mode = "train" if training else "eval"
    function = program.modes[mode]
    names = [site.parameter for site in function.sites]
    leaves = [captured.parameters[name].detach().requires_grad_(name in program.trainable) for name in names]
    buffers = [captured.buffers[name].detach().clone() for name in function.buffers]
    with torch.set_grad_enabled(training), warnings.catch_warnings():  # on all cores, since bits are not compared
        warnings.filterwarnings("ignore", message="Using a target size")  # the first step warns
        try:
            outputs = function(leaves, buffers, (), _copied(rows, function.columns), RandomKey(0, 0, 0))
        except Exception as error:  # noqa: BLE001  (told in one paragraph)
            raise _explained(model, captured, rows, error, "graph", mode) from None
        if training:
            _refuse_spoiled(captured, function.buffers, buffers, rows)
        loss = program.loss_by_mode[mode]
        assert loss is not None
        outputs = outputs if training else program.loss_outputs(outputs)
        targets = _copied(rows, program.targets)
        learning = {name: captured.parameters[name] for name in captured.trainable}
        try:
            with no_reads_of(learning, "loss_fn", _OF_A_LOSS, allowed=(*outputs, *targets)):
                returned_loss = loss(outputs, targets)
        except Exception as error:  # noqa: BLE001  (as above)
            raise _explained(model, captured, rows, error, "loss", mode) from None
        parts = returned_loss if isinstance(returned_loss, tuple) and captured.loss_fn is None else (returned_loss,)
        total = sum(scalar(part, len(next(iter(rows.values())))) for part in parts)
        if training:
            assert isinstance(total, torch.Tensor)
            trained = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if leaf.requires_grad]
            before = [buffer.clone() for buffer in buffers]
            _backward(total, trained, captured)
            held = (dict(zip(function.buffers, some, strict=True)) for some in (before, buffers))
            refuse_changed_by_backward(*held)


def refuse_failed_checks(
    model: torch.nn.Module, captured: Capture, batches: Iterable[Mapping[Any, torch.Tensor]]
) -> None:
    """Run forward in plain PyTorch on micro-batches (columns by name), since stages leave out its checks on values.

    Raises:
        CaptureError, DataError: forward fails on a micro-batch; contains its error.
    """
    for rows in batches:
        with model_in(model, captured.recipe.precision):
            _, misfit = misfit_of_model(model, _inputs(captured, rows))
        if misfit is not None:
            raise misfit


def refuse_changed_by_backward(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    """Raise CaptureError if a buffer differs ``before`` and ``after`` a backward; both have buffers by name.

    A pipeline runs backwards in another order than plain PyTorch.
    """
    changed = next((name for name, buffer in before.items() if not same_bits(buffer, after[name])), None)
    if changed is not None:
        raise CaptureError(
            f"The backward changes the buffer {changed!r} of the model, and a pipeline runs backwards in another order "
            "than plain PyTorch. Change it in forward; if torch.utils.checkpoint is around its module, take that out "
            "and set recompute='always'."
        )


def _refuse_spoiled(
    captured: Capture, names: Sequence[str], after: Sequence[torch.Tensor], rows: Mapping[Any, torch.Tensor]
) -> None:
    """Raise DataError if a forward on ``rows`` has made one of the finite buffers ``names`` NaN or infinite.

    A batch norm in plain PyTorch refuses a single value per channel, but its traced operation does not. ``after`` has
    the buffers' new contents.
    """
    for name, buffer in zip(names, after, strict=True):
        before = captured.buffers[name]
        if buffer.is_floating_point() and not buffer.isfinite().all() and bool(before.isfinite().all()):
            count = min((len(x) for x in rows.values() if x.dim()), default=1)
            raise DataError(
                f"A forward on {count} sample{'s' * (count > 1)} makes the buffer {name!r} nan or infinite, as the "
                "variance of a batch norm that has a single value per channel, which plain PyTorch refuses."
            )


def _copied(rows: Mapping[Any, torch.Tensor], names: Sequence[Any]) -> list[torch.Tensor]:
    return [rows[name].clone() for name in names]


def _backward(loss: torch.Tensor, leaves: Sequence[tuple[str, torch.Tensor]], captured: Capture) -> None:
    if not loss.requires_grad:
        what = "loss_fn" if captured.loss_fn is not None else "The model"
        raise CaptureError(
            f"{what} returns a loss that no gradient flows through: detach(), no_grad, argmax, a comparison or "
            "a conversion to a number is between it and the parameters. Compute the loss from the model's output "
            "by differentiable operations."
        )
    try:
        gradients = torch.autograd.grad(loss, [leaf for _, leaf in leaves], allow_unused=True)
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        raise CaptureError(
            f"The backward of the model fails{quoted(error)}: {short(error)} It fails in plain PyTorch, too."
        ) from None
    for (name, _), gradient in zip(leaves, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise CaptureError(
                f"The gradient of {name!r} is sparse, and stages add gradients up as dense tensors. Use the operation "
                "with sparse=False: the same numbers, with a gradient as large as the weight."
            )


def _explained(
    model: torch.nn.Module, captured: Capture, rows: Mapping[Any, torch.Tensor], error: Exception, kind: str, mode: str
) -> RaypipeError:
    """Run the user's model on ``rows`` to explain why its capture failed, and return the error to raise.

    Args:
        error: exception of the captured model.
        kind: part of the capture that failed, "graph" or "loss".
        mode: "train" or "eval".
    """
    if kind == "loss" and isinstance(error, RaypipeError):
        return error
    with model_in(model, captured.recipe.precision):
        output, misfit = misfit_of_model(model, _inputs(captured, rows), training=mode == "train")
        if misfit is None and kind == "loss" and captured.loss_fn is not None:
            column = list(rows)[-1]
            return misfit_of_loss(captured.loss_fn, output, rows[column], column)
    if misfit is None and isinstance(error, RaypipeError):
        return error
    return misfit or not_as_captured(kind, error, type(model).__name__)


def _inputs(captured: Capture, rows: Mapping[Any, torch.Tensor]) -> Inputs:
    """Return the arguments of the model: by position if the columns are numbered, else by name."""
    names = tuple(rows)[:-1] if captured.loss_fn is not None else tuple(rows)
    tensors = tuple(converted([rows[name].clone() for name in names], captured.recipe.precision))
    if all(isinstance(name, int) for name in names):
        return Inputs(tensors, {}, names)
    return Inputs((), dict(zip(names, tensors, strict=True)), names)

"""What would fail in the first step, tried before anything is started: one forward and backward, on a few rows.

captured model, as one stage --> loss --> gradients        as a stage computes them; nothing of the user's changes
user's model, as it is       --> loss                      only where that failed, to say why in its own words
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raypipe.engine.capture import Capture
from raypipe.engine.capture.explain import misfit_of_loss, misfit_of_model, not_as_captured
from raypipe.engine.capture.guards import returned
from raypipe.engine.precision import converted, model_in
from raypipe.engine.randomness import RandomKey
from raypipe.engine.trial.backward_state import refuse_changed_by_backward
from raypipe.engine.trial.reads import no_reads_of
from raypipe.engine.user_lines import quoted, short
from raypipe.errors import CaptureError, DataError, RaypipeError

__all__ = [
    "NUM_ROWS",
    "refuse_frequencies",
    "refuse_lazy",
    "refuse_scripted",
    "refuse_sparse",
    "rehearse",
    "rehearse_evaluation",
    "rehearse_single",
    "scalar",
    "takes_one_row",
]

NUM_ROWS = 2
_OF_A_LOSS = (
    "Let the model return what the loss needs of its parameters, or its own loss; a penalty on the size of weights is "
    "weight_decay of the optimizer."
)


def refuse_lazy(model: torch.nn.Module) -> None:
    """A lazy module has no parameters yet that a stage could hold.

    Raises:
        CaptureError: names the first one.
    """
    for name, module in model.named_modules():
        if any(map(torch.nn.parameter.is_lazy, module.parameters(recurse=False))):
            raise CaptureError(
                f"The module {name!r}, {type(module).__name__}, takes its shape from the first batch that it sees, and "
                "stages are cut before. Run the model once on a batch before you give it to the trainer, as in "
                "model(x), or name the sizes."
            )


def refuse_scripted(model: torch.nn.Module) -> None:
    """What torch.jit has compiled can neither be traced nor be sent to a stage.

    Raises:
        CaptureError: names the first such module.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            which = f"The module {name!r}" if name else "The model"
            raise CaptureError(
                f"{which} is a torch.jit.ScriptModule, which holds compiled code instead of a forward that can be cut "
                "into stages. Give the nn.Module that torch.jit.script or torch.jit.trace was given."
            )


def refuse_sparse(model: torch.nn.Module) -> None:
    """Stages add gradients as dense tensors.

    Raises:
        CaptureError: names the first module that makes others.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise CaptureError(
                f"The module {name!r}, {type(module).__name__}(sparse=True), makes sparse gradients, which stages do "
                "not add up and most optimizers do not take. Set sparse=False: the same numbers, with a gradient as "
                "large as the weight."
            )


def refuse_frequencies(model: torch.nn.Module, whole: str) -> None:
    """Of a mini-batch in several micro-batches, gradients that are divided by how often a word is in the batch.

    Args:
        whole: what to set so that mini-batches stay whole.

    Raises:
        CaptureError: names the first module that makes such.
    """
    for name, module in model.named_modules():
        if getattr(module, "scale_grad_by_freq", False) is True:
            raise CaptureError(
                f"The module {name!r}, {type(module).__name__}(scale_grad_by_freq=True), divides gradients by how "
                "often a word is in the batch, and a micro-batch has other numbers than its mini-batch. Set "
                f"scale_grad_by_freq=False, or {whole}."
            )


def scalar(loss: Any, samples: int) -> torch.Tensor:
    """The loss, where it is one number.

    Raises:
        CaptureError: it is not.
    """
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise CaptureError(
            f"loss_fn returns {returned(loss)} for {samples} samples instead of a scalar tensor. {_cure(loss)}"
        )
    return loss


def _cure(loss: Any) -> str:
    if loss is None:
        return "Let it end in return loss."
    if isinstance(loss, tuple | list | Mapping):
        return (
            "Let it return the loss alone; what else is to be seen of an output goes into metrics={...}, which "
            "evaluations tell."
        )
    if isinstance(loss, torch.Tensor):
        return "Let it reduce over the samples, as reduction='mean' does."
    return "Leave out what makes a number of it (.item(), float(), .numpy()): through a number no gradient flows."


def rehearse_evaluation(model: torch.nn.Module, captured: Capture, rows: Mapping[Any, torch.Tensor]) -> None:
    """The forward of evaluation, on rows of eval_data.

    Raises:
        DataError: what the first evaluation would have failed with.
    """
    try:
        rehearse(model, captured, rows, training=False)
    except RaypipeError as error:
        raise DataError(f"eval_data: {error}") from None


def rehearse_single(
    model: torch.nn.Module, captured: Capture, columns: Mapping[Any, torch.Tensor], num_samples: int,
    minibatch_size: int, microbatch_size: int,
) -> None:  # fmt: skip
    """The same on one row, where some micro-batch of an epoch has no more: batch norms do not train on that.

    Args:
        num_samples: of an epoch.

    Raises:
        DataError: what that micro-batch would have failed with; names the numbers.
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
            "change minibatch_size, num_microbatches or the number of samples, so that there is none."
        ) from None


def takes_one_row(model: torch.nn.Module, captured: Capture, columns: Mapping[Any, torch.Tensor]) -> bool:
    """Whether the model trains on a micro-batch of one sample."""
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
    """One forward and backward of the captured model; the user's parameters and buffers stay as they are.

    Args:
        columns: a micro-batch by column, of which the first rows are taken; the last one is a loss_fn's target.
        training: False takes the forward of evaluation, and no backward.

    Raises:
        CaptureError, DataError: what a first step would have failed with; names the module or the loss, what went into
            it, and whether the data or the model is meant.
    """
    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        return  # there are no values to compute with
    rows = {name: x[:NUM_ROWS] if x.dim() else x for name, x in columns.items()}
    (program,) = captured.programs(())
    function = program.modes["train" if training else "eval"]
    names = [site.parameter for site in function.sites]
    leaves = [captured.parameters[name].detach().requires_grad_(name in program.trainable) for name in names]
    buffers = [captured.buffers[name].detach().clone() for name in function.buffers]
    with torch.set_grad_enabled(training), warnings.catch_warnings():  # on all cores: nobody compares the bits
        warnings.filterwarnings("error", message="Using a target size")  # compares all rows with all others
        try:
            outputs = function(leaves, buffers, (), _copied(rows, function.columns), RandomKey(0, 0, 0))
        except Exception as error:  # noqa: BLE001  (told in one paragraph)
            raise _of_model(model, captured, rows, error, training=training) from None
        if training:
            _refuse_spoiled(captured, function.buffers, buffers, rows)
        loss = program.loss_by_mode["train" if training else "eval"]
        assert loss is not None
        outputs = outputs if training else program.without_asked(outputs)
        targets = _copied(rows, program.targets)
        try:
            with no_reads_of(_learning(captured), "loss_fn", _OF_A_LOSS, given=(*outputs, *targets)):
                found = loss(outputs, targets)
        except Exception as error:  # noqa: BLE001  (as above)
            raise _of_loss(model, captured, rows, error, training=training) from None
        parts = found if isinstance(found, tuple) and captured.loss_fn is None else (found,)
        total = sum(scalar(part, len(next(iter(rows.values())))) for part in parts)
        if training:
            assert isinstance(total, torch.Tensor)
            trained = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if leaf.requires_grad]
            before = [buffer.clone() for buffer in buffers]
            _backward(total, trained, captured)
            held = (dict(zip(function.buffers, some, strict=True)) for some in (before, buffers))
            refuse_changed_by_backward(*held)


def _refuse_spoiled(
    captured: Capture, names: Sequence[str], after: Sequence[torch.Tensor], rows: Mapping[Any, torch.Tensor]
) -> None:
    """Refuse a forward after which a buffer holds no numbers any more; a graph has lost what a batch norm checks."""
    for name, buffer in zip(names, after, strict=True):
        before = captured.buffers[name]
        if buffer.is_floating_point() and not buffer.isfinite().all() and bool(before.isfinite().all()):
            count = min((len(x) for x in rows.values() if x.dim()), default=1)
            raise DataError(
                f"A forward on {count} sample{'s' * (count > 1)} makes the buffer {name!r} nan or infinite, as the "
                "variance of a batch norm that has a single value per channel, which plain PyTorch refuses."
            )


def _learning(captured: Capture) -> dict[str, torch.Tensor]:
    return {name: captured.parameters[name] for name in captured.trainable}


def _copied(rows: Mapping[Any, torch.Tensor], names: Sequence[Any]) -> list[torch.Tensor]:
    return [rows[name].clone() for name in names]


def _backward(loss: torch.Tensor, leaves: Sequence[tuple[str, torch.Tensor]], captured: Capture) -> None:
    if not loss.requires_grad:
        what = "loss_fn" if captured.loss_fn is not None else "The model"
        raise CaptureError(
            f"{what} returns a loss that no gradient flows through: detach(), no_grad, argmax, a comparison or a "
            "conversion to a number stands between it and the parameters. Compute the loss from the model's output by "
            "differentiable operations."
        )
    try:
        found = torch.autograd.grad(loss, [leaf for _, leaf in leaves], allow_unused=True)
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        raise CaptureError(
            f"The backward of the model fails{quoted(error)}: {short(error)} Mend the operation, as plain PyTorch "
            "would ask for too."
        ) from None
    for (name, _), gradient in zip(leaves, found, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise CaptureError(
                f"The gradient of {name!r} is sparse, and stages add gradients up as dense tensors. Use the operation "
                "with sparse=False: the same numbers, with a gradient as large as the weight."
            )


def _of_model(
    model: torch.nn.Module, captured: Capture, rows: Mapping[Any, torch.Tensor], error: Exception, *, training: bool
) -> RaypipeError:
    args, kwargs, names = _arguments(captured, rows)
    with model_in(model, captured.recipe.precision):
        _, found = misfit_of_model(model, args, kwargs, names, training=training)
    if isinstance(error, RaypipeError) and found is None:
        return error
    return found or not_as_captured("graph", error, type(model).__name__)


def _of_loss(
    model: torch.nn.Module, captured: Capture, rows: Mapping[Any, torch.Tensor], error: Exception, *, training: bool
) -> RaypipeError:
    if isinstance(error, RaypipeError):
        return error
    args, kwargs, names = _arguments(captured, rows)
    with model_in(model, captured.recipe.precision):
        output, found = misfit_of_model(model, args, kwargs, names, training=training)
        if found is not None or captured.loss_fn is None:
            return found or not_as_captured("loss", error, type(model).__name__)
        column = list(rows)[-1]
        return misfit_of_loss(captured.loss_fn, output, rows[column], column)


def _arguments(
    captured: Capture, rows: Mapping[Any, torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor], list[Any]]:
    """As the model takes them: by position where the data has numbered columns, else by name."""
    names = list(rows)[:-1] if captured.loss_fn is not None else list(rows)
    given = converted([rows[name].clone() for name in names], captured.recipe.precision)
    if all(isinstance(name, int) for name in names):
        return tuple(given), {}, names
    return (), dict(zip(names, given, strict=True)), names

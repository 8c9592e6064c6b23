"""Loss of Trainer as a part of the traced model: ``compute_loss``, and the weight of a batch in the step.

    Trainer, for each batch:     compute_loss(model, inputs, num_items_in_batch) / number of batches
    stages, for micro-batches:   twin(**inputs, num_items_in_batch=..., num_batches=...)

The division is left out where ``compute_loss`` divides by num_items_in_batch. The twin of a model shares its tensors,
and its forward calls ``compute_loss`` of the trainer: that of transformers, of TRL, or of the user. Both numbers are
columns of the data, since only the whole mini-batch has them. A module that the trainer refers to, such as a teacher,
becomes a part of the twin and does not learn.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import nn

from raypipe.data.item_randomness import own_generators
from raypipe.errors import CaptureError, ConfigError

_ROWS = 8
_KEPT = (
    "accelerator", "args", "can_return_loss", "compute_loss_func", "label_names", "label_smoother",
    "model_accepts_loss_kwargs", "processing_class",
)  # fmt: skip
"""Attributes of a Trainer that do not change while it trains, beside its flags and those of the user's subclass."""
_VIEW = "trainer"
"""Name of the attribute of a twin that refers to the trainer, as messages about its state begin with."""


@dataclasses.dataclass(frozen=True, slots=True)
class WithCounts:
    """Collate function that adds columns with the numbers by which Trainer weights a loss.

    Attributes:
        collate: Trainer's collate function.
        counts_items: True adds num_items_in_batch, as Trainer counts it.
        shifts: True if the first label of each row does not count.
        batch_size: samples of one batch of Trainer, of which num_batches follows; 0 sets it to 1, None adds none.
        fixed: values of ``collate`` that are no tensors, and the same for every batch; the twin has them.
    """

    collate: Any
    counts_items: bool = False
    shifts: bool = False
    batch_size: int | None = None
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, items: list[Any]) -> dict[str, Any]:
        batch = dict(self.collate(items))
        for name, value in self.fixed.items():
            if (found := batch.pop(name, None)) != value:
                raise ConfigError(
                    f"The collate function gives {name}={found!r}, and {value!r} before: stages are traced with one "
                    "value. Give a tensor with a row for each sample."
                )
        if self.counts_items:
            labels = batch["labels"][..., 1:] if self.shifts else batch["labels"]
            count = int(batch.get("shift_labels", labels).ne(-100).sum())
            batch["num_items_in_batch"] = torch.full((len(items),), count)
        if self.batch_size is not None:
            count = -(-len(items) // (self.batch_size or len(items)))
            batch["num_batches"] = torch.full((len(items),), count)
        return batch


def loss_of(trainer: Any, dataset: Any, collate_fn: Any) -> tuple[nn.Module, Any, Any]:
    """Return (model, collate function, loss_reduction) with which micro-batches have the loss that Trainer has.

        compute_loss divides by num_items_in_batch       the number is a column of the data, and losses add up
        it ignores the number that it gets               means of accumulated batches add up
        it does not get the number                       they add up too, each divided by the number of batches

    With one batch per step the last two are the mean over the mini-batch.

    Args:
        dataset, collate_fn: those of Trainer's data loader, or a collate function that wraps it.
    """
    args, given = trainer.args, trainer.pipeline.loss_reduction
    with own_generators(), torch.no_grad():
        batch = dict(collate_fn(first_items(dataset)))
        fixed = {name: value for name, value in batch.items() if not isinstance(value, torch.Tensor)}
        columns = [name for name in batch if name not in fixed]
        func = trainer.compute_loss_func is not None
        counted = "labels" in batch and (trainer.model_accepts_loss_kwargs or func)
        weighted = (trainer.model_accepts_loss_kwargs and counted) or func
        divides = not (weighted if trainer.loss_is_scaled_for_ga is None else trainer.loss_is_scaled_for_ga)
        depends = False
        if counted:
            tried = twin_of(trainer, (*columns, "num_items_in_batch"), fixed).eval()
            losses = [tried(**batch, num_items_in_batch=torch.full((1,), number))["loss"] for number in (1, 2)]
            depends = not torch.equal(*losses)
    if given != "auto" or (args.gradient_accumulation_steps == 1 and not depends):
        one = 1 if counted and given == "auto" else None
        counts = WithCounts(collate_fn, fixed=fixed) if fixed else collate_fn
        return twin_of(trainer, columns, fixed, num_items=one), counts, given
    # A divisor also where it is 1: the losses of Trainer's batches add up, whatever terms they consist of.
    batch_size = args.per_device_train_batch_size if divides else 0
    names = ["num_items_in_batch"] * counted + ["num_batches"]
    counts = WithCounts(collate_fn, counted, trainer._loss_shifts_labels, batch_size, fixed)
    return twin_of(trainer, (*columns, *names), fixed), counts, "sum"


def first_items(dataset: Any) -> list[Any]:
    """Read the first items of a dataset, of which a batch shows the columns."""
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return list(itertools.islice(dataset, _ROWS))
    return [dataset[row] for row in range(min(_ROWS, len(dataset)))]


def twin_of(trainer: Any, columns: Any, fixed: Mapping[str, Any], *, num_items: int | None = None) -> nn.Module:
    """Return a model with the tensors of a trainer's model, whose forward takes columns and returns Trainer's loss.

    Args:
        columns: names of the columns, among which num_items_in_batch and num_batches have a number for each sample.
        fixed: further arguments of the model.
        num_items: num_items_in_batch if that is no column; None is None.
    """
    twin = _unpatched(trainer.model)
    kind = type(twin)

    def forward_to_fp32(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.forward(self, *args, **kwargs)
        return convert_to_fp32(output) if torch.is_autocast_enabled("cpu") else output

    def forward(self: Any, **inputs: Any) -> dict[str, torch.Tensor]:
        inner, view = copy.copy(self), vars(self)[_VIEW]
        vars(inner).pop("forward", None)  # of this function, while it is traced
        del vars(inner)[_VIEW]
        replace_forward(inner, kind, forward_to_fp32)
        number = None if num_items is None else torch.tensor(float(num_items))
        if "num_items_in_batch" in inputs:
            number = inputs.pop("num_items_in_batch")[0].float()
        batches = inputs.pop("num_batches", None)
        vars(view).update(model=inner, model_wrapped=inner)
        try:
            loss = view._stage_loss(inner, {**inputs, **fixed}, number)
        finally:  # a trace would take them for state that compute_loss changes
            del view.model, view.model_wrapped
        return {"loss": loss if batches is None else loss / batches[0]}

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in columns]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    twin.__class__ = _subclass(kind, forward=forward)
    view, modules = _view_of(trainer)
    twin._modules = {**twin._modules, **modules}
    vars(twin)[_VIEW] = view
    return twin


def replace_forward(module: Any, kind: type, forward: Any) -> None:
    """Let a module call ``forward``, an attribute of a subclass of ``kind``, without its hooks.

    Module.__call__ is torch.export's while it traces, and takes parts of the traced model only.
    """
    module.__class__ = _subclass(kind, forward=forward, __call__=forward)


def _subclass(kind: type, **attributes: Any) -> Any:
    return type(kind.__name__, (kind,), {**attributes, "__module__": kind.__module__})


def _unpatched(model: nn.Module) -> Any:
    """Return a copy of a model with its tensors, without the forwards that accelerate and TRL have set on the model.

    TRL has set one on the base of a model of peft. Modules on the way to it are copied too.

    Raises:
        ConfigError: another forward is set on the model.
    """
    base = getattr(model, "get_base_model", lambda: model)()

    def copied(module: nn.Module) -> nn.Module:
        twin = copy.copy(module)
        vars(twin).pop("_original_forward", None)
        own = type(module).forward
        innermost = inspect.unwrap(vars(twin).pop("forward", own))
        if getattr(innermost, "__func__", innermost) is not inspect.unwrap(own):
            raise ConfigError(
                f"The forward of this {type(module).__name__} was replaced on the object, and stages trace that of its "
                "class. Define it in a subclass."
            )
        if module is not base:
            twin._modules = {
                name: copied(child) if child is not None and base in child.modules() else child
                for name, child in module._modules.items()
            }
        return twin

    return copied(model)


def _view_of(trainer: Any) -> tuple[Any, dict[str, nn.Module]]:
    """Return a trainer with the attributes that ``compute_loss`` may read, and the modules among them, by name."""
    kind = type(trainer)

    def missing(self: Any, name: str) -> Any:
        if name in vars(trainer):
            raise CaptureError(
                f"{kind.__name__}.compute_loss reads self.{name}, which changes while the model trains, or is not on "
                "the stages: they trace compute_loss once. Leave it out, or compute it from the inputs of the batch."
            )
        raise AttributeError(f"{kind.__name__} has no attribute {name!r}")

    view: Any = object.__new__(_subclass(kind, __getattr__=missing))
    modules: dict[str, nn.Module] = {}
    for name, value in vars(trainer).items():
        if name in trainer._own_attributes and name not in _KEPT and not isinstance(value, bool | str | None):
            continue
        if isinstance(value, nn.Module):
            value = modules[name] = _not_learning(value)
        vars(view)[name] = value
    vars(view).update(trainer._on_stages)
    return view, modules


def _not_learning(module: nn.Module) -> nn.Module:
    """Return a copy of a module, with its tensors, that does not learn and keeps its mode."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in module.parameters()}
    copied = copy.deepcopy(module, memo | {id(buffer): buffer for buffer in module.buffers()})
    copied.__class__ = _subclass(type(copied), train=lambda self, mode=True: self)
    return copied

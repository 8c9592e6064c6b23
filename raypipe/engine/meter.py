"""Metrics of an evaluation, computed on the last stage, in host memory; only numbers leave it.

    metrics={"accuracy": lambda output, target: (output.argmax(1) == target).double().mean()}

    a number            the mean over a micro-batch's samples, weighed by them
    (total, count)      both are added up over all micro-batches: total / count, whatever was counted
    an object           with update, compute and reset, as torchmetrics has them: a copy sees every micro-batch

Either may give several numbers, as torchmetrics' MetricCollection does: those of a dict are told as <name>_<key>, and
of what an object computes of shape (n,), one for each class say, as <name>_0, <name>_1, ...

A model with a loss_fn hands its metrics what it hands the loss_fn: (output, target). One that returns its own loss has
(output, batch), where ``output.logits`` and ``batch["labels"]`` are read by name. What a metric reads is found out by
calling it once before the run is planned, and only that is kept in the stages of evaluation.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from raypipe.engine.user_lines import LEAVING, quoted, short
from raypipe.errors import ConfigError, StageError

__all__ = ["Asked", "Meter", "check_metrics", "is_stateful", "names_of", "part_of", "parts_by_key"]

Numbers = tuple[tuple[str, float], ...]
_NOT_OF_A_NAME = re.compile(r"\W")


class Asked(NamedTuple):
    """What the metrics of a model read that returns its own loss.

    Attributes:
        outputs: keys of what it returns; the last stage's function gives them behind the loss in evaluation.
        columns: of the data.
        output_names, column_names: all that there are, read or not, as ``names_of`` has them.
    """

    outputs: tuple[Any, ...] = ()
    columns: tuple[Any, ...] = ()
    output_names: tuple[Any, ...] = ()
    column_names: tuple[Any, ...] = ()


def parts_by_key(output: Any) -> dict[Any, Any]:
    """The parts of what a model returned: by name, and by number in its own order."""
    if isinstance(output, Mapping):
        named = dict(output)
    elif isinstance(output, tuple | list):
        named = dict(zip(getattr(output, "_fields", ()), output, strict=False))
        return {**dict(enumerate(output)), **named}
    elif isinstance(output, torch.Tensor):
        return {}
    else:
        named = _attributes(output)
    return {**dict(enumerate(named.values())), **named}


def _attributes(output: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(output).items() if not name.startswith("_")}


def names_of(output: Any) -> tuple[Any, ...]:
    """What the parts are called: 0, 1, ... of a tuple or list, else their names."""
    if isinstance(output, tuple | list):
        return tuple(range(len(output)))
    return tuple(output if isinstance(output, Mapping) else _attributes(output))


def part_of(output: Any, key: Any) -> torch.Tensor:
    """The part of that key.

    Raises:
        ConfigError: it is no tensor.
    """
    value = parts_by_key(output).get(key)
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"A metric reads {key!r} of what the model returns in evaluation mode, which is a {type(value).__name__}. "
            "Metrics can read tensors: logits, hidden states, predictions."
        )
    return value


def check_metrics(metrics: Any) -> None:
    """Refuse what cannot be a metric, before anything is looked at.

    Raises:
        ConfigError: names it.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics is a {type(metrics).__name__}; give functions by name, as in metrics={{'accuracy': accuracy}} "
            "with accuracy(output, target) -> a number, or (total, count)."
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name.isidentifier() or name == "loss":
            raise ConfigError(
                f"metrics has the name {name!r}: give one of letters, digits and underscores, other than 'loss'. It "
                "is told as eval_<name>."
            )
        if isinstance(metric, type) or not (callable(metric) or is_stateful(metric)):
            what = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            raise ConfigError(
                f"metrics[{name!r}] is {what}; give a function (output, target) -> a number, or an object with update, "
                "compute and reset, as torchmetrics has them."
            )


class Meter:
    """The metrics of one evaluation after another.

    Args:
        metrics: by name; objects that remember are copied.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = {name: _own(metric) if is_stateful(metric) else metric for name, metric in metrics.items()}
        self._totals: dict[str, dict[str, tuple[float, float]]] = {}
        self.begin()

    def begin(self) -> None:
        """Another evaluation begins."""
        self._totals = {name: {} for name in self._metrics}
        for metric in self._metrics.values():
            if is_stateful(metric):
                metric.reset()

    def add(self, output: Any, target: Sequence[Any], samples: int) -> None:
        """One micro-batch.

        Args:
            target: what stands behind the output in the metrics' arguments.

        Raises:
            StageError: a metric raised, or returned no number; names it.
        """
        for name, metric in self._metrics.items():
            try:
                if is_stateful(metric):
                    metric.update(output, *target)
                    continue
                found = metric(output, *target)
            except LEAVING:
                raise
            except BaseException as error:
                raise StageError(f"The metric {name!r} failed{quoted(error)}: {short(error)}") from error
            totals = self._totals[name]
            for part, value in _parts(name, found).items():
                total, count = _counted(part, value, samples)
                so_far, counted = totals.get(part, (0.0, 0.0))
                totals[part] = so_far + total, counted + count

    def results(self) -> Numbers:
        """By name, over all micro-batches since ``begin``; nan where nothing was counted.

        Raises:
            StageError: as ``add``.
        """
        return tuple(found for name, metric in self._metrics.items() for found in self._results(name, metric))

    def _results(self, name: str, metric: Any) -> Iterator[tuple[str, float]]:
        if not is_stateful(metric):
            for part, (total, count) in (self._totals[name] or {name: (0.0, 0.0)}).items():
                yield part, total / count if count else float("nan")
            return
        try:
            found = metric.compute()
        except LEAVING:
            raise
        except BaseException as error:
            raise StageError(f"The metric {name!r} failed in compute(){quoted(error)}: {short(error)}") from error
        if isinstance(found, torch.Tensor | np.ndarray) and found.ndim == 1 and len(found) > 1:
            found = dict(enumerate(found.tolist()))  # of each class, say
        for part, value in _parts(name, found).items():
            yield part, _number(part, value)


def _parts(name: str, found: Any) -> dict[str, Any]:
    """What a metric gave, by the names that it is told under.

    Raises:
        StageError: it gave nothing, or two of them have one name.
    """
    if not isinstance(found, Mapping):
        return {name: found}
    parts = {f"{name}_{_NOT_OF_A_NAME.sub('_', str(key))}": value for key, value in found.items()}
    if len(parts) < max(1, len(found)):
        raise StageError(
            f"The metric {name!r} gave numbers under {', '.join(map(repr, found)) or 'no name'}; give each one a "
            "name of its own, of letters, digits and underscores."
        )
    return parts


def is_stateful(metric: Any) -> bool:
    return not isinstance(metric, type) and all(
        callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")
    )


def _own(metric: Any) -> Any:
    made = copy.deepcopy(metric)
    for part in made.modules() if isinstance(made, torch.nn.Module) else (made,):
        if hasattr(part, "sync_on_compute"):  # torchmetrics would wait for ranks that evaluate nothing
            part.sync_on_compute = False
    return made


def _counted(name: str, found: Any, samples: int) -> tuple[float, float]:
    """(total, count) of what a function returned."""
    if isinstance(found, tuple | list):
        if len(found) != 2:
            raise StageError(
                f"The metric {name!r} returned {len(found)} values; return one number, or (total, count), which are "
                "added up over all micro-batches."
            )
        return _number(name, found[0]), _number(name, found[1])
    return _number(name, found) * samples, float(samples)


def _number(name: str, value: Any) -> float:
    whole = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)
    if not whole and not (hasattr(value, "item") and getattr(value, "size", 0) == 1):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise StageError(
            f"The metric {name!r} returned {what} instead of a number: reduce over the micro-batch, or return "
            "(total, count)."
        )
    return float(value)

"""Metrics of an evaluation, computed on the last stage, in host memory; only numbers leave it.

    metrics={"accuracy": lambda output, target: (output.argmax(1) == target).double().mean()}

    a number            the mean over a micro-batch's samples, weighted by their number
    (total, count)      both are added up over all micro-batches: total / count, for any unit
    an object           with update, compute and reset, as torchmetrics has them: a copy sees every micro-batch

Either may give several numbers, as torchmetrics' MetricCollection does: those of a dict are reported as <name>_<key>,
values of shape (n,) of an object, as one for each class, as <name>_0, <name>_1, ...

Metrics of a model with a loss_fn are called with (output, target), as the loss_fn is. Those of a model that returns its
own loss are called with (output, batch), whose parts are read like the model's own output:

    output.logits   output["logits"]   output[1]          one part, for any type of output
    loss, logits = output                                 for a tuple or a list
    for name in output: ...   "logits" in output          for a dict or an object: its names

A metric is called once before the run is planned; the parts that it reads then are those kept in evaluations.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from raypipe.errors import ConfigError, StageError
from raypipe.user_lines import LEAVING, quoted, short

Numbers = tuple[tuple[str, float], ...]
_NOT_OF_A_NAME = re.compile(r"\W")


class MetricReads(NamedTuple):
    """Parts that the metrics of a model with its own loss read.

    Attributes:
        outputs: keys of the parts of the output; in evaluation the last stage returns these parts after the loss.
        columns: columns of the data that are read.
        output_names, column_names: names of all parts, read or not, as ``names_of`` returns them.
    """

    outputs: tuple[Any, ...] = ()
    columns: tuple[Any, ...] = ()
    output_names: tuple[Any, ...] = ()
    column_names: tuple[Any, ...] = ()


def parts_by_key(output: Any) -> dict[Any, Any]:
    """Split the output of a model into parts, each by its index and by its name; {} if the output is a tensor."""
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
    """Name the parts of an output: by index if it is a tuple or list, else by their names."""
    if isinstance(output, tuple | list):
        return tuple(range(len(output)))
    return tuple(output if isinstance(output, Mapping) else _attributes(output))


def part_of(output: Any, key: Any) -> torch.Tensor:
    """Return the part of an output under a key of ``parts_by_key``.

    Raises:
        ConfigError: the part is not a tensor.
    """
    value = parts_by_key(output).get(key)
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"A metric reads {key!r} of what the model returns in evaluation mode, which is a {type(value).__name__}. "
            "Metrics can read tensors: logits, hidden states, predictions."
        )
    return value


def check_metrics(metrics: Any) -> None:
    """Refuse metrics that cannot be called.

    Raises:
        ConfigError: names the metric.
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
                "is reported as eval_<name>."
            )
        if isinstance(metric, type) or not (callable(metric) or is_stateful(metric)):
            what = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            raise ConfigError(
                f"metrics[{name!r}] is {what}; give a function (output, target) -> a number, or an object with update, "
                "compute and reset, as torchmetrics has them."
            )


class UserMetrics:
    """Metrics of a run, accumulated over all micro-batches of one evaluation.

    Args:
        metrics: functions and objects by name; objects are copied.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = {name: _own(metric) if is_stateful(metric) else metric for name, metric in metrics.items()}
        self._totals: dict[str, dict[str, tuple[float, float]]] = {}
        self.begin()

    def begin(self) -> None:
        """Begin another evaluation."""
        self._totals = {name: {} for name in self._metrics}
        for metric in self._metrics.values():
            if is_stateful(metric):
                metric.reset()

    def add(self, output: Any, target: Sequence[Any], samples: int) -> None:
        """Add a micro-batch; metrics are called with ``output`` and the elements of ``target``.

        Raises:
            StageError: a metric raised, or did not return a number; names the metric.
        """
        for name, metric in self._metrics.items():
            try:
                if is_stateful(metric):
                    metric.update(output, *target)
                    continue
                result = metric(output, *target)
            except LEAVING:
                raise
            except BaseException as error:
                raise StageError(f"The metric {name!r} failed{quoted(error)}: {short(error)}") from error
            totals = self._totals[name]
            for part, value in _parts(name, result).items():
                total, count = _counted(part, value, samples)
                so_far, counted = totals.get(part, (0.0, 0.0))
                totals[part] = so_far + total, counted + count

    def results(self) -> Numbers:
        """Return the numbers by name, over all micro-batches since ``begin``; NaN if nothing was counted.

        Raises:
            StageError: as for ``add``.
        """
        return tuple(result for name, metric in self._metrics.items() for result in self._results(name, metric))

    def _results(self, name: str, metric: Any) -> Iterator[tuple[str, float]]:
        if not is_stateful(metric):
            for part, (total, count) in (self._totals[name] or {name: (0.0, 0.0)}).items():
                yield part, total / count if count else float("nan")
            return
        try:
            result = metric.compute()
        except LEAVING:
            raise
        except BaseException as error:
            raise StageError(f"The metric {name!r} failed in compute(){quoted(error)}: {short(error)}") from error
        if isinstance(result, torch.Tensor | np.ndarray) and result.ndim == 1 and len(result) > 1:
            result = dict(enumerate(result.tolist()))  # of each class, say
        for part, value in _parts(name, result).items():
            yield part, _number(part, value)


def _parts(name: str, result: Any) -> dict[str, Any]:
    """Split the result of a metric into numbers by their names in reports.

    Raises:
        StageError: two numbers have one name, or a dict is empty.
    """
    if not isinstance(result, Mapping):
        return {name: result}
    parts = {f"{name}_{_NOT_OF_A_NAME.sub('_', str(key))}": value for key, value in result.items()}
    if len(parts) < max(1, len(result)):
        raise StageError(
            f"The metric {name!r} gave numbers under {', '.join(map(repr, result)) or 'no name'}; give each one a "
            "name of its own, of letters, digits and underscores."
        )
    return parts


def is_stateful(metric: Any) -> bool:
    return not isinstance(metric, type) and all(
        callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")
    )


def _own(metric: Any) -> Any:
    copied = copy.deepcopy(metric)
    for part in copied.modules() if isinstance(copied, torch.nn.Module) else (copied,):
        if hasattr(part, "sync_on_compute"):  # torchmetrics would wait for ranks that evaluate nothing
            part.sync_on_compute = False
    return copied


def _counted(name: str, result: Any, samples: int) -> tuple[float, float]:
    """Convert the result of a metric function, called on a micro-batch of ``samples`` samples, to (total, count)."""
    if isinstance(result, tuple | list):
        if len(result) != 2:
            raise StageError(
                f"The metric {name!r} returned {len(result)} values; return one number, or (total, count), which are "
                "added up over all micro-batches."
            )
        return _number(name, result[0]), _number(name, result[1])
    return _number(name, result) * samples, float(samples)


def _number(name: str, value: Any) -> float:
    whole = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, int | float)
    if not whole and not (hasattr(value, "item") and getattr(value, "size", 0) == 1):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise StageError(
            f"The metric {name!r} returned {what} instead of a number: reduce over the micro-batch, or return "
            "(total, count)."
        )
    return float(value)


def fields_of(values: Mapping[Any, Any], names: Sequence[Any], read: dict[Any, None] | None = None) -> Any:
    """Wrap parts of an output for a metric: as a Sequence if all names are indices, else as a Mapping.

    Args:
        values: the available parts by key; a key is an index or a name.
        names: names of all parts in order, including those that are not in ``values``.
        read: dictionary to which each key that is read is added; None records nothing.
    """
    numbered = all(isinstance(name, int) for name in names)
    return (_IndexedOutput if numbered else _NamedOutput)(values, names, read)


class _OutputParts:
    def __init__(self, values: Mapping[Any, Any], names: Sequence[Any], read: dict[Any, None] | None) -> None:
        self._values, self._names, self._read = dict(values), tuple(names), read

    def __len__(self) -> int:
        return len(self._names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in (*self._names, *self._values):
            raise AttributeError(f"there is no {name!r}; there are {', '.join(map(str, self._names))}")
        return self._part(name)

    def _part(self, key: Any) -> Any:
        if isinstance(key, slice):
            return tuple(self._part(at) for at in range(len(self._names))[key])
        if type(key) is int and key < 0:
            key += len(self._names)
        if key in self._values:
            if self._read is not None:
                self._read[key] = None
            return self._values[key]
        if key in self._names or (type(key) is int and 0 <= key < len(self._names)):
            # Not KeyError: ``get`` would return None.
            raise LookupError(
                f"{key!r} is not kept in evaluations, because no metric read it when they were called on a few rows "
                "before the run began. Let the metric read the same parts with every call."
            )
        raise (IndexError if type(key) is int else KeyError)(key)


class _NamedOutput(_OutputParts, Mapping[Any, Any]):
    def __getitem__(self, key: Any) -> Any:
        return self._part(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names


class _IndexedOutput(_OutputParts, Sequence[Any]):
    def __getitem__(self, key: Any) -> Any:
        return self._part(key)

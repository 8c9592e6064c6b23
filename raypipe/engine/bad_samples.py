"""Search for the samples of the data that cause a failure of a forward, or a loss or norm that is NaN.

    a forward fails          a row that fails alone, found by bisection: 16 -> 8 -> 4 -> 2 -> 1
    loss or norm is NaN      NaN and infinite values of the mini-batch

Descriptions use the data's own terms: "item 33 of TensorDataset", "row 12 of train.parquet".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raypipe.data.open_data import Source
from raypipe.data.stream_source import StreamSource
from raypipe.engine.device.device import ran_out
from raypipe.engine.stage.activation_checkpointing import ForwardInputs
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import RaypipeError
from raypipe.ir.segment import Segment

Columns = Mapping[Any, torch.Tensor]


def failing_row(
    run: Callable[[ForwardInputs], object], arguments: ForwardInputs, samples: int, error: Exception
) -> int | None:
    """Find by bisection a row (sample of a micro-batch) that fails alone, with an exception of the same type.

    Returns None if the rows fail only together, if other rows fail alone too, or if ``error`` is a RaypipeError or an
    out-of-memory error.

    Args:
        run: the failing call; called with some of the rows, at most twice per halving and three times at the end.
        arguments: all rows; inputs and columns have shape (samples, ...), or () for a value that all rows share.
        error: exception of the call on all rows.
    """
    tensors = [x for x in (*arguments.inputs, *arguments.columns.values()) if x is not None and x.dim()]
    if isinstance(error, RaypipeError) or ran_out(error) or any(len(x) != samples for x in tensors):
        return None

    def fails(first: int, stop: int) -> bool:
        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[first:stop].detach().clone() if tensor.dim() else tensor

        inputs = [None if x is None else cut(x) for x in arguments.inputs]
        try:
            with torch.no_grad():
                run(arguments._replace(inputs=inputs, columns={name: cut(x) for name, x in arguments.columns.items()}))
        except Exception as raised:  # noqa: BLE001  (whatever the user's code raises)
            return type(raised) is type(error)
        return False

    first, stop = 0, samples
    while stop - first > 1:
        middle = (first + stop) // 2
        if fails(first, middle):
            stop = middle
        elif fails(middle, stop):
            first = middle
        else:
            return None  # they fail together only
    if not fails(first, stop):
        return None
    # Where any row fails alone, one row is what does not do: a batch norm trains on two.
    others = [row for row in range(samples) if row != first]
    return None if all(fails(row, row + 1) for row in others[:2]) else first


def of_failing_row(source: Source, epoch: int, position: int, columns: Columns, row: int) -> str:
    """Describe a sample that makes a forward fail by itself, and a remedy, in text for an error message.

    Args:
        source: data, which gives the sample its name.
        position: position of the sample in the order of the epoch.
        columns: data columns of the sample's micro-batch, by name.
        row: index of the sample in the micro-batch.
    """
    values = " and ".join(f"column {name!r} is {_shown(x[row] if x.dim() else x)}" for name, x in columns.items())
    what = f", whose {values}," if values else ""
    cure = "Mend that one, or leave it out."
    if columns and not any(x.is_floating_point() for x in columns.values()):
        cure = (
            f"Numbers of classes and tokens begin at 0, and the model needs an output or an embedding for each. {cure}"
        )
    who = source.named(epoch, position)
    return f"{who[:1].upper()}{who[1:]}{what} is enough to fail so. {cure}"


def columns_read(programs: Sequence[StageProgram], mode: str) -> tuple[Any, ...]:
    """List the data columns that the model and its loss read in a mode ("train" or "eval"), each once."""
    functions = [program.modes[mode] for program in programs if mode in program.modes]
    targets = [name for program in programs for name in program.targets]
    return tuple(dict.fromkeys([*(name for function in functions for name in function.columns), *targets]))


def describe_nonfinite(source: Source, segment: Segment, step: int, names: Iterable[Any]) -> str:
    """Describe the first NaN or infinite value in a step's mini-batch; "" if every value is finite.

    Args:
        source: data, from which the mini-batch is read again. If reading a stream would take too long, the result
            names the first and the last sample of the mini-batch instead of a value.
        segment: consecutive mini-batches, one of which is the mini-batch of the step.
        step: number of the optimizer step in the run.
        names: columns that the model and its loss read.
    """
    samples, wanted = segment.minibatch_samples, tuple(names)
    start = segment.offset + (step - segment.first_step) * samples
    if isinstance(source, StreamSource):
        read: Any = source.read_again(segment.epoch, start, samples, wanted)
    else:
        read = source.read(segment.epoch, start, samples, wanted)
    if read is None:
        first, last = (source.named(segment.epoch, at) for at in (start, start + samples - 1))
        return f"Look at the data of this mini-batch, which is {first} to {last}, or lower the learning rate."
    columns = read if isinstance(read, dict) else dict(zip(wanted, read, strict=True))
    for name, column in columns.items():
        if not column.is_floating_point():
            continue
        wrong = (~column.isfinite()).reshape(len(column), -1)
        rows = wrong.any(1).nonzero().flatten().tolist()
        if rows:
            at = int(wrong[rows[0]].nonzero()[0])
            place = [int(i) for i in np.unravel_index(at, column.shape[1:])]
            value = f"{column[rows[0]].flatten()[at].item()}{f' at {place}' if place else ''}"
            more = (
                f", as it has in {len(rows) - 1} more of the {samples} samples of this mini-batch" if rows[1:] else ""
            )
            where = source.named(segment.epoch, start + rows[0])
            return f"Column {name!r} of the data has {value} in {where}{more}: mend the data there, or leave that out."
    return ""


def _shown(value: torch.Tensor) -> str:
    """Describe a tensor in words: by its value if it has one element, else by its shape and range of values."""
    if value.numel() == 1:
        return f"{value.item():g}" if value.is_floating_point() else str(value.item())
    text = f"of shape {tuple(value.shape)}"
    if value.numel() and value.dtype is not torch.bool and not value.is_complex():
        least, most = (f"{x.item():g}" for x in value.aminmax())
        text += f" from {least} to {most}"
    return text

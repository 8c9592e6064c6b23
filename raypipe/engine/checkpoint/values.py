"""Small values as JSON, exactly: what is read back is what was written, or it is refused.

0.001 <-> 0.001      (0.9, 0.95) <-> [0.9, 0.95]      inf <-> {"float": "inf"}
tensor(0.001) <-> {"tensor": 0.001, "dtype": "F32"}    (of one element and no dimension)
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from raypipe.engine.checkpoint.dtypes import DTYPES, NAMES
from raypipe.errors import CheckpointError

__all__ = ["decode", "encode", "parse_json"]

_ODD_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, what: str) -> Any:
    """The value as JSON.

    Args:
        what: the value is, for the message.

    Raises:
        CheckpointError: it is neither number, text, None, a tensor of one element nor a sequence of these.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, (list, tuple)):
        return [encode(item, what) for item in value]
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in NAMES and not value.is_complex():
        return {"tensor": encode(value.item(), what), "dtype": NAMES[value.dtype]}
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: only tensors, numbers, texts, None and "
        "sequences of these. Use an optimizer that keeps its state in tensors and numbers."
    )


def decode(value: Any, what: str) -> Any:
    """The value of its JSON; sequences come as tuples.

    Raises:
        CheckpointError: ``encode`` does not write such a thing.
    """
    if value is None or isinstance(value, (bool, str, int, float)):
        return value
    if isinstance(value, list):
        return tuple(decode(item, what) for item in value)
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in tuple(_ODD_FLOATS):
            return _ODD_FLOATS[value["float"]]
        number = decode(value["tensor"], what) if value.keys() == {"tensor", "dtype"} else None
        if isinstance(number, (bool, int, float)) and value["dtype"] in tuple(DTYPES):
            try:
                return torch.tensor(number, dtype=DTYPES[value["dtype"]])
            except (RuntimeError, TypeError, ValueError, OverflowError) as error:
                raise CheckpointError(f"{what} is no {value['dtype']}: {error}") from error
    raise CheckpointError(f"{what} is {str(value)[:80]!r}, which no checkpoint holds.")


def parse_json(data: bytes, what: str) -> Any:
    """Strict JSON: no NaN, no infinity (1e999 is one), no name twice in an object.

    Raises:
        CheckpointError: it is something else.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refused, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is no valid JSON: {str(error)[:200]}.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice in an object")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large for a number")
    return number

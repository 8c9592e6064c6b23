"""Pad: a collate function for items of unequal length, as a tokenizer makes them.

collate_fn=raypipe.data.Pad((128, 256), tokenizer)

{"input_ids": [5, 7, 9]}             input_ids       [[5, 7, 9, 0, ...], ...]    the tokenizer's pad token
{"input_ids": [5, 7, 9, 4, 8]}  -->  attention_mask  [[1, 1, 1, 0, ...], ...]
                                     labels          [[5, 7, 9, -100, ...], ...] with labels="input_ids"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raypipe.errors import ConfigError, DataError

__all__ = ["Pad"]

FILLS: Mapping[str, int] = {"attention_mask": 0, "token_type_ids": 0, "labels": -100, "special_tokens_mask": 1}


class Pad:
    """Pads every list of an item to one length and stacks the items; numbers are stacked as they are.

    Args:
        lengths: one length; or several, of which a mini-batch takes the smallest that holds its longest item. Only for
            models that take any length: an nn.Sequential, or a trace that never asked for it. Others refuse the second.
        tokenizer: whose pad_token_id fills input_ids and whose padding_side says where; None fills with 0 on the right.
        labels: a column that becomes labels too, filled with -100: "input_ids" for a causal language model.
        fill: further values to fill columns with, by name.
        columns: that are kept; None keeps all that are numbers or lists of numbers, so that texts fall away.
        truncate: items that are longer than the greatest length are cut off there; False refuses them.

    Raises:
        ConfigError: an argument is not possible; names it.
    """

    def __init__(
        self,
        lengths: int | Sequence[int],
        tokenizer: Any = None,
        *,
        labels: str | None = None,
        fill: Mapping[str, int] | None = None,
        columns: Sequence[str] | None = None,
        truncate: bool = False,
    ) -> None:
        given = (lengths,) if isinstance(lengths, int) else tuple(lengths)
        if not given or any(type(length) is not int or length < 1 for length in given):
            raise ConfigError(f"Pad(lengths={lengths!r}): give a length of at least 1, or several of them.")
        pad = getattr(tokenizer, "pad_token_id", None)
        if tokenizer is not None and pad is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} has no pad token. Set one: tokenizer.pad_token = tokenizer.eos_token."
            )
        self.lengths = tuple(sorted(set(given)))
        self.fill = {**FILLS, "input_ids": pad or 0, **(fill or {})}
        self.left = getattr(tokenizer, "padding_side", "right") == "left"
        self.labels, self.truncate = labels, truncate
        self.columns = None if columns is None else tuple(columns)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The batch of these items.

        Raises:
            DataError: an item is longer than every length, or a column is no list of numbers.
        """
        names = self.columns or tuple(name for name, value in items[0].items() if _is_numbers(value))
        missing = [name for name in names if any(name not in item for item in items)]
        if missing or not names:
            raise DataError(f"An item has no column {missing[0] if missing else 'of numbers'!r} to pad.")
        if self.labels is not None and self.labels not in names:
            raise DataError(f"Pad(labels={self.labels!r}): the columns that are padded are {', '.join(names)}.")
        if bad := next((name for name in names if not all(_is_numbers(item[name]) for item in items)), None):
            raise DataError(f"The column {bad!r} of an item is no list of numbers, or its lists are of unequal length.")
        lists = {name: [np.asarray(item[name]) for item in items] for name in names}
        ragged = [name for name, values in lists.items() if values[0].ndim]
        longest = max((len(value) for name in ragged for value in lists[name]), default=0)
        length = next((one for one in self.lengths if one >= longest), self.lengths[-1])
        if longest > length and not self.truncate:
            raise DataError(
                f"An item has {longest} values, more than the length {length} that Pad was given. Give a greater "
                "length, or truncate=True to cut such items off."
            )
        found = {
            name: self._padded(name, values, length) if values[0].ndim else torch.from_numpy(np.stack(values))
            for name, values in lists.items()
        }
        if "input_ids" in found and "attention_mask" not in found and self.columns is None:
            ones = [np.ones(len(value), dtype=np.int64) for value in lists["input_ids"]]
            found["attention_mask"] = self._padded("attention_mask", ones, length)
        if self.labels is not None:
            found["labels"] = self._padded("labels", self._labels(items, lists), length)
        return found

    def _labels(self, items: Sequence[Mapping[str, Any]], lists: Mapping[str, list[Any]]) -> list[Any]:
        """Values of the column that becomes labels, filled where a tokenizer has padded already."""
        assert self.labels is not None
        if self.labels != "labels" and any("labels" in item for item in items):
            raise DataError(
                f"Items have a column 'labels', which Pad(labels={self.labels!r}) would replace. Leave labels= out."
            )
        values = lists[self.labels]
        masks = [np.asarray(item.get("attention_mask", 1)) for item in items]
        fill = self.fill["labels"]
        return [
            np.where(mask != 0, value, fill) if mask.ndim == 0 or mask.shape == value.shape else value
            for value, mask in zip(values, masks, strict=True)
        ]

    def _padded(self, name: str, values: list[Any], length: int) -> torch.Tensor:
        kind = np.result_type(*([value for value in values if value.size] or [np.empty(0, dtype=np.int64)]))
        kind = np.dtype(np.int64) if kind.kind in "iu" else kind
        shapes = {value.shape[1:] for value in values if value.size} or {values[0].shape[1:]}
        if len(shapes) > 1:
            raise DataError(f"What is in the column {name!r} has other shapes in other items: {sorted(shapes)}.")
        whole = np.full((len(values), length, *shapes.pop()), self.fill.get(name, 0), dtype=kind)
        for row, value in zip(whole, values, strict=True):
            cut = value[:length] if value.size else row[:0]
            row[length - len(cut) if self.left else 0 :][: len(cut)] = cut
        return torch.from_numpy(whole)


def _is_numbers(value: Any) -> bool:
    try:
        return not isinstance(value, str) and np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # lists of unequal length
        return False

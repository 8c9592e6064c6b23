"""Datasets of packed token documents (Packed) and of folders of images (Images), and a collate function (Pad).

Packed documents are concatenated and cut into blocks, so that no padding is computed:

    documents   [5 7 9] [4 8 2 6] [3 1]           separator 0
    stream       5 7 9 0 4 8 2 6 0 3 1 0
    length 4    [5 7 9 0] [4 8 2 6] [0 3 1 0]     block i begins at token 4 i

A block may hold the end of one document and the beginning of the next. Attention crosses that border, unless
apart=True marks it:

    input_ids      4  8  2  6  3  1       labels    -   8  2  6  -  1      - is -100: not predicted
    position_ids   0  1  2  3  0  1       a token attends to itself and to earlier tokens of its own document

Pad is a collate function for items of unequal length, as a tokenizer makes them:

    collate_fn=raypipe.data.Pad((128, 256), tokenizer)

    {"input_ids": [5, 7, 9]}             input_ids       [[5, 7, 9, 0, ...], ...]    the tokenizer's pad token
    {"input_ids": [5, 7, 9, 4, 8]}  -->  attention_mask  [[1, 1, 1, 0, ...], ...]
                                         labels          [[5, 7, 9, -100, ...], ...] with labels="input_ids"
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from raypipe.config.paths import absolute_path
from raypipe.errors import ConfigError, DataError


class Packed(Dataset[Any]):
    """Map-style dataset of blocks of tokens. The last tokens, which do not fill a block, are left out.

    All documents are read once by the constructor, for their lengths. Each block reads its documents again.

    Args:
        documents: sequence with len() and [i], of lists or arrays of token ids, or of dicts with a column of them.
        length: number of tokens in a block.
        separator: token added after every document, such as a tokenizer's eos_token_id; None adds no separator.
        column: column of the token ids, if documents are dicts.
        labels: "same" returns items {"input_ids", "labels"} with the same tokens twice, for models of transformers,
            which shift the labels themselves. "next" returns (tokens, the token after each), for a model with a
            loss_fn.
        apart: True separates the documents of a block. A document's first token is no target (-100 instead). Items
            also have "position_ids" of shape (length,), which begin at 0 in every document and block, and
            "attention_mask" of shape (1, length, length), float32, to be added to attention scores: 0 if a token
            attends to another, else the smallest float32. Models of transformers accept such a mask with any attention
            but flash. With labels="next" an item is (tokens, position_ids, attention_mask, targets). The mask has
            length * length * 4 bytes.

    Raises:
        DataError: there are too few tokens for one block, or a document is not a list of token ids.
    """

    def __init__(
        self,
        documents: Any,
        length: int,
        *,
        separator: int | None = None,
        column: str = "input_ids",
        labels: Literal["same", "next"] = "same",
        apart: bool = False,
    ) -> None:
        if type(length) is not int or length < 1 or labels not in ("same", "next"):
            raise DataError(
                f"Packed(length={length!r}, labels={labels!r}): give a length of at least 1, and 'same' or 'next'."
            )
        self._documents, self._column, self._length = documents, column, length
        self._separator, self._labels, self._apart = separator, labels, apart
        lengths = [len(self._tokens(number)) for number in range(len(documents))]
        self._ends = np.cumsum(lengths, dtype=np.int64)
        self._more = labels == "next"  # one token after the block
        self.num_tokens = int(self._ends[-1]) if len(lengths) else 0
        if len(self) < 1:
            raise DataError(
                f"{len(lengths)} documents have {self.num_tokens} tokens, too few for one block of {length}. Give more "
                "documents, or a smaller length."
            )

    def __len__(self) -> int:
        return (self.num_tokens - self._more) // self._length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no block {index} of {len(self)}")
        tokens, documents = self._stream(index * self._length, self._length + self._more)
        targets = tokens.copy()
        if self._apart:
            targets[1:][documents[1:] != documents[:-1]] = IGNORED_TARGET
        border = _borders(documents[: self._length]) if self._apart else {}
        if self._more:
            return torch.from_numpy(tokens[:-1]), *border.values(), torch.from_numpy(targets[1:])
        return {"input_ids": torch.from_numpy(tokens), **border, "labels": torch.from_numpy(targets)}

    def _stream(self, begin: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Read tokens begin, ..., begin + count - 1 of all documents; return (tokens, document index of each token)."""
        stream, documents = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        document = int(np.searchsorted(self._ends, begin, side="right"))
        done = 0
        while done < count:
            tokens = self._tokens(document)
            first = begin + done - (int(self._ends[document]) - len(tokens))
            part = tokens[first : first + count - done]
            stream[done : done + len(part)] = part
            documents[done : done + len(part)] = document
            done += len(part)
            document += 1
        return stream, documents

    def _tokens(self, number: int) -> Any:
        """Read the tokens of one document, followed by the separator if there is one."""
        document = self._documents[number]
        if isinstance(document, Mapping):
            if self._column not in document:
                raise DataError(
                    f"Document {number} has no column {self._column!r}, but {', '.join(document)}. Tokenize the "
                    "texts first, or name the column: Packed(column=...)."
                )
            if "labels" in document and self._column != "labels":
                raise DataError(
                    f"Document {number} has a column 'labels', which Packed would replace by its tokens. Remove the "
                    "column if these are the same, or use raypipe.data.Pad, which keeps labels."
                )
            document = document[self._column]
        tokens = np.asarray(document)
        if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
            raise DataError(f"Document {number} is not a list of token ids. Tokenize the texts first.")
        tail = [] if self._separator is None else [self._separator]
        return np.concatenate([tokens.astype(np.int64), np.asarray(tail, dtype=np.int64)])


def _borders(documents: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Compute "position_ids" and "attention_mask" of Packed from each token's document index, shape (length,)."""
    places = np.arange(len(documents))
    begins = np.flatnonzero(np.diff(documents, prepend=-1))
    positions = places - begins[np.searchsorted(begins, places, side="right") - 1]
    attends = (documents[:, None] == documents) & (places[:, None] >= places)
    mask = np.where(attends, np.float32(0), np.finfo(np.float32).min)
    return {"position_ids": torch.from_numpy(positions), "attention_mask": torch.from_numpy(mask[None])}


IGNORED_TARGET = -100  # the ignore_index that torch's losses have by default
FILLS: Mapping[str, int] = {
    "attention_mask": 0,
    "token_type_ids": 0,
    "labels": IGNORED_TARGET,
    "special_tokens_mask": 1,
}


class Pad:
    """Collate function that pads the lists of all items to one length and stacks them; numbers are stacked as they are.

    Args:
        lengths: one length; or several, of which each mini-batch gets the smallest that its longest item fits in.
            Several lengths need a model that accepts all of them: an nn.Sequential, or a forward that takes the same
            branches for every length.
        tokenizer: tokenizer whose pad_token_id fills input_ids, on its padding_side; None fills with 0 on the right.
        labels: column that is copied to the column "labels", which is filled with -100; "input_ids" for a causal
            language model. None adds no labels.
        fill: fill values of other columns, by name.
        columns: columns of the batch; None selects all columns of numbers or lists of numbers, and leaves out texts.
        truncate: True cuts off items at the greatest length; False raises if an item is longer.

    Raises:
        ConfigError: an argument has an impossible value; the message names the argument.
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
        chosen = (lengths,) if isinstance(lengths, int) else tuple(lengths)
        if not chosen or any(type(length) is not int or length < 1 for length in chosen):
            raise ConfigError(f"Pad(lengths={lengths!r}): give a length of at least 1, or several of them.")
        pad = getattr(tokenizer, "pad_token_id", None)
        if tokenizer is not None and pad is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} has no pad token. Set one: tokenizer.pad_token = tokenizer.eos_token."
            )
        self.lengths = tuple(sorted(set(chosen)))
        self.fill = {**FILLS, "input_ids": pad or 0, **(fill or {})}
        self.left = getattr(tokenizer, "padding_side", "right") == "left"
        self.labels, self.truncate = labels, truncate
        self.columns = None if columns is None else tuple(columns)

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return a batch by column: tensors of shape (items, length, ...) for lists, and of shape (items,) for numbers.

        Raises:
            DataError: an item is longer than every length, or a column is not a list of numbers.
        """
        names = self.columns or tuple(name for name, value in items[0].items() if _is_numbers(value))
        missing = [name for name in names if any(name not in item for item in items)]
        if missing or not names:
            raise DataError(f"An item has no column {missing[0] if missing else 'of numbers'!r} to pad.")
        if self.labels is not None and self.labels not in names:
            raise DataError(f"Pad(labels={self.labels!r}): the columns that are padded are {', '.join(names)}.")
        if bad := next((name for name in names if not all(_is_numbers(item[name]) for item in items)), None):
            raise DataError(
                f"The column {bad!r} of an item is not a list of numbers, or its lists are of unequal length."
            )
        lists = {name: [np.asarray(item[name]) for item in items] for name in names}
        ragged = [name for name, values in lists.items() if values[0].ndim]
        longest = max((len(value) for name in ragged for value in lists[name]), default=0)
        length = next((one for one in self.lengths if one >= longest), self.lengths[-1])
        if longest > length and not self.truncate:
            raise DataError(
                f"An item has {longest} values, more than the length {length} that Pad was given. Give a greater "
                "length, or truncate=True to cut such items off."
            )
        batch = {
            name: self._padded(name, values, length) if values[0].ndim else torch.from_numpy(np.stack(values))
            for name, values in lists.items()
        }
        if "input_ids" in batch and "attention_mask" not in batch and self.columns is None:
            ones = [np.ones(len(value), dtype=np.int64) for value in lists["input_ids"]]
            batch["attention_mask"] = self._padded("attention_mask", ones, length)
        if self.labels is not None:
            batch["labels"] = self._padded("labels", self._labels(items, lists), length)
        return batch

    def _labels(self, items: Sequence[Mapping[str, Any]], lists: Mapping[str, list[Any]]) -> list[Any]:
        """Return each item's labels: its column ``self.labels``, with the fill value where attention_mask is 0."""
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


SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


class Images(Dataset[Any]):
    """Map-style dataset of (image, label), sorted by the names of the classes and then of the files.

    An image is a float32 tensor of shape (channels, height, width) with values in [0, 1].

    Args:
        folder: folder that contains one folder of images for each class.
        size: size in pixels to which images are scaled: (height, width), or one number for both; None does not scale
            them, and all images must have the same size.
        mode: "RGB" for 3 channels, "L" for 1.
        transform: function of the image tensor that returns another tensor; it may draw random numbers from torch's,
            numpy's or Python's global generators.

    Attributes:
        classes: names of the classes; a label is an index into them.

    Raises:
        DataError: there is no such folder, or a class has no image.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: int | tuple[int, int] | None = None,
        *,
        mode: str = "RGB",
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        root = Path(absolute_path(os.fspath(folder)))
        if not root.is_dir():
            raise DataError(f"There is no folder {root}. Give the folder that holds one folder for each class.")
        self.classes = tuple(sorted(entry.name for entry in root.iterdir() if entry.is_dir() and entry.name[0] != "."))
        self._files = [
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in SUFFIXES and path.name[0] != "."
        ]
        if not self._files:
            raise DataError(
                f"{root} has no images in folders of classes ({', '.join(self.classes) or 'it has no folder at all'}). "
                f"Files that end in {', '.join(SUFFIXES)} are read, as in {root.name}/cat/1.png."
            )
        empty = sorted(set(range(len(self.classes))) - {label for _, label in self._files})
        if empty:
            raise DataError(
                f"The folder {root / self.classes[empty[0]]} has no images, so its class would be empty. Remove it, "
                "or add images."
            )
        self._size = (size, size) if isinstance(size, int) else size
        self._mode, self._transform = mode, transform

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._files[index]
        try:
            pixels = self._pixels(path)
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's errors for damaged files
            raise DataError(f"{path} cannot be read: {error}. Repair it, or leave it out.") from None
        channels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        tensor = torch.from_numpy(np.ascontiguousarray(channels))
        return (tensor if self._transform is None else self._transform(tensor)), label

    def _pixels(self, path: str) -> NDArray[np.float32]:
        """Decode an image to values in [0, 1], shape (height, width) or (height, width, channels)."""
        from PIL import Image

        with Image.open(path) as opened:
            if opened.mode.startswith(("I", "F")):
                raise DataError(
                    f"{path} has more than 8 bits per pixel (mode {opened.mode}), which {self._mode} would cut "
                    "to black and white. Scale its values to 0 to 255 and save it with 8 bits."
                )
            image = opened.convert(self._mode)
            if self._size is not None:
                image = image.resize((self._size[1], self._size[0]), Image.Resampling.BILINEAR)
            return np.asarray(image, dtype=np.float32) / np.float32(255)

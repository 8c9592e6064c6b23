"""Packed: documents of tokens, one behind the other, cut into blocks of one length: no token of padding is computed.

    documents   [5 7 9] [4 8 2 6] [3 1]           separator 0
    stream       5 7 9 0 4 8 2 6 0 3 1 0
    length 4    [5 7 9 0] [4 8 2 6] [0 3 1 0]     block i is a function of i: found by the documents' lengths

A block may hold the end of one document and the beginning of the next. Attention sees no border there, unless blocks
say where it is (apart=True):

    input_ids      4  8  2  6  3  1       labels    -   8  2  6  -  1      - is -100: nobody predicts a beginning
    position_ids   0  1  2  3  0  1       a token attends to those before it of its own document
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from raypipe.engine.microbatch import IGNORED_TARGET
from raypipe.errors import DataError

__all__ = ["Packed"]


class Packed(Dataset[Any]):
    """A map-style dataset of blocks. What is left at the end of all documents and fills no block is left out.

    Args:
        documents: anything with len() and [i]: lists or arrays of token ids, or dicts that hold one.
        length: tokens of a block.
        separator: token behind every document, a tokenizer's eos_token_id; None puts none.
        column: of the token ids, where documents are dicts.
        labels: "same" gives {"input_ids", "labels"} of the same tokens, as models of transformers want them, which
            shift by themselves; "next" gives (tokens, the tokens that follow each), for a model with a loss_fn, of
            blocks that share one token with the next.
        apart: documents of a block do not see each other, and no first token of one is a target, which has -100
            instead. Adds "position_ids" of shape (length,), from 0 in every document and every block, and
            "attention_mask" of shape (1, length, length), float32, to be added to scores: 0 where a token attends to
            another, else the least number there is, as transformers takes it with any attention but flash. Of
            labels="next" they stand between tokens and targets. A block has length * length * 4 bytes more then.

    The lengths of all documents are read once, here. Blocks read the documents that they need again.

    Raises:
        DataError: there are too few tokens for one block, or documents hold none.
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
        self._more = labels == "next"  # one token behind the block
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
        wanted = tokens.copy()
        if self._apart:
            wanted[1:][documents[1:] != documents[:-1]] = IGNORED_TARGET
        border = _borders(documents[: self._length]) if self._apart else {}
        given, targets = torch.from_numpy(tokens), torch.from_numpy(wanted)
        if self._more:
            return given[:-1], *border.values(), targets[1:]
        return {"input_ids": given, **border, "labels": targets}

    def _stream(self, begin: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens begin, ..., begin + count - 1 of all documents, and the number of each one's document."""
        found, documents = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        document = int(np.searchsorted(self._ends, begin, side="right"))
        done = 0
        while done < count:
            tokens = self._tokens(document)
            first = begin + done - (int(self._ends[document]) - len(tokens))
            part = tokens[first : first + count - done]
            found[done : done + len(part)] = part
            documents[done : done + len(part)] = document
            done += len(part)
            document += 1
        return found, documents

    def _tokens(self, number: int) -> Any:
        """Of one document, with its separator."""
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
            raise DataError(f"Document {number} is no list of token ids. Tokenize the texts first.")
        tail = [] if self._separator is None else [self._separator]
        return np.concatenate([tokens.astype(np.int64), np.asarray(tail, dtype=np.int64)])


def _borders(documents: NDArray[np.int64]) -> dict[str, torch.Tensor]:
    """Positions and mask of a block.

    Args:
        documents: number of each token's document, shape (length,), ascending.
    """
    places = np.arange(len(documents))
    begins = np.flatnonzero(np.diff(documents, prepend=-1))
    positions = places - begins[np.searchsorted(begins, places, side="right") - 1]
    attends = (documents[:, None] == documents) & (places[:, None] >= places)
    mask = np.where(attends, np.float32(0), np.finfo(np.float32).min)
    return {"position_ids": torch.from_numpy(positions), "attention_mask": torch.from_numpy(mask[None])}

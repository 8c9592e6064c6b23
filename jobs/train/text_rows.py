"""Texts as rows of tokens, all of one length, in a Parquet file.

    causal      input_ids, labels                    labels are the tokens, padding -100; the model shifts them; an
                                                     end-of-text token follows every text that is not truncated
    classify    input_ids, attention_mask, labels    one label per row
    seq2seq     input_ids, attention_mask, labels    labels are the target's tokens, padding -100

Padding follows the text, whatever the tokenizer's padding side, which is for generation: padding before the text would
shift its positions. In a causal model no token of the text attends to later padding, so it needs no mask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.engine.io.storage import Place

__all__ = ["TASKS", "Rows", "count_classes", "read_lines", "write_rows"]

TASKS = ("causal", "classify", "seq2seq")
IGNORED = -100
Rows = Mapping[int, Mapping[str, Any]]
"""Rows by the line of their file, from 1."""
_NEEDS = {"causal": ("text",), "classify": ("text", "label"), "seq2seq": ("text", "target")}


def read_lines(file: Path) -> Rows:
    """Read the rows of a .jsonl, .parquet or .txt file; rows with an empty text are left out.

    Raises:
        ValueError: the file has no rows or another suffix, or a line is not JSON.
    """
    if file.suffix == ".parquet":
        rows = pq.read_table(file).to_pylist()
    elif file.suffix in (".jsonl", ".json"):
        rows = [_row(file, number, line) for number, line in enumerate(_lines(file), 1)]
    elif file.suffix == ".txt":
        rows = [{"text": line} for line in _lines(file)]
    else:
        raise ValueError(f"{file}: give a file that ends with .jsonl, .parquet or .txt.")
    found = {n: row for n, row in enumerate(rows, 1) if isinstance(row, dict) and row.get("text")}
    if not found:
        raise ValueError(f'{file} has no row with a "text".')
    return found


def count_classes(*files: Rows) -> int:
    """Count the classes: one more than the greatest label.

    Raises:
        ValueError: a label is missing or is not 0, 1, 2 and so on, or there are not two of them.
    """
    found = set()
    for rows in files:
        _require("classify", rows)
        for number, row in rows.items():
            label = row["label"]
            if not isinstance(label, int | float) or label < 0 or label % 1 != 0:
                raise ValueError(f"Line {number} has the label {label!r}. Labels are whole numbers from 0.")
            found.add(int(label))
    if len(found) < 2:
        raise ValueError(f"Every row has the label {min(found)}; a classifier needs two classes at least.")
    return 1 + max(found)


def write_rows(task: str, rows: Rows, tokenizer: Any, length: int, file: str) -> str:
    """Tokenise and write, replacing an older file as a whole; every node must be able to read it.

    Args:
        length: tokens per row.

    Raises:
        ValueError: a row lacks what the task needs.
    """
    _require(task, rows)
    lines = list(rows.values())
    ids, mask = _tokens(tokenizer, [line["text"] for line in lines], length, ends=task == "causal")
    columns: dict[str, Any] = {"input_ids": _fixed(ids)}
    if task == "causal":
        columns["labels"] = _fixed(np.where(mask == 1, ids, IGNORED))
    else:
        columns["attention_mask"] = _fixed(mask)
        if task == "classify":
            columns["labels"] = pa.array([int(line["label"]) for line in lines], pa.int64())
        else:
            target, present = _tokens(tokenizer, [line["target"] for line in lines], length, target=True)
            columns["labels"] = _fixed(np.where(present == 1, target, IGNORED))
    content = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), content)
    Place.of(file).write_bytes("", content.getvalue())
    return file


def _require(task: str, rows: Rows) -> None:
    for number, row in rows.items():
        missing = [name for name in _NEEDS[task] if row.get(name) is None]
        if missing:
            raise ValueError(f"Line {number} has no {missing[0]!r}, which task {task!r} needs.")


def _lines(file: Path) -> list[str]:
    # str.splitlines would also split at separators that JSON allows in texts without an escape, such as U+2028.
    return file.read_text(encoding="utf-8").split("\n")  # which reads "\r\n" and "\r" as "\n"


def _row(file: Path, number: int, line: str) -> Any:
    if not line.strip():
        return None
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file}, line {number}, column {error.colno} is no JSON: {error.msg}. Each line is one object, as "
            '{"text": "..."}.'
        ) from None


def _tokens(
    tokenizer: Any, texts: list[str], length: int, *, target: bool = False, ends: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Tokenise texts to (tokens, mask of real tokens), int64 of shape (texts, length).

    Args:
        target: the texts are targets of a sequence-to-sequence model, which some tokenizers encode differently.
        ends: add the end-of-text token, which generation needs in order to stop, to each text that is not truncated.
    """
    given = {"text_target" if target else "text": texts}
    ids = np.full((len(texts), length), tokenizer.pad_token_id, dtype=np.int64)
    mask = np.zeros((len(texts), length), dtype=np.int64)
    for row, found in enumerate(tokenizer(**given, truncation=True, max_length=length)["input_ids"]):
        if (
            ends
            and tokenizer.eos_token_id is not None
            and len(found) < length
            and found[-1:] != [tokenizer.eos_token_id]
        ):
            found = [*found, tokenizer.eos_token_id]
        ids[row, : len(found)], mask[row, : len(found)] = found, 1
    return ids, mask


def _fixed(values: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])

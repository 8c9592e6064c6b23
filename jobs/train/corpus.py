"""A text corpus that every machine has: the Python standard library's own source, byte by byte.

No download, some megabytes of real text, 256 symbols. Files go to the train or the held-out split by
the hash of their name, copies left out, so the splits share no file. A row is one context of bytes:

    text      d e f   f ( x ) : \\n
    tokens    d e f               one row, T = 3
    targets   e f                 the same, one byte later

The text differs between Python releases; the bigram entropies below are the yardstick that comes with it.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["Corpus", "bigram_cross_entropy_nats", "bigram_entropy_nats", "build_corpus", "corpus_texts"]

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_HELD_OUT_OF_256 = 26  # one file in ten
_ROWS_PER_GROUP = 1024
_END_OF_FILE = b"\0"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files of the two splits, and their text.

    Attributes:
        train, heldout: Parquet files with columns tokens and targets, fixed_size_list<uint8>[context].
        context: bytes per row.
        train_text, heldout_text: what the rows are cut from.
    """

    train: Path
    heldout: Path
    context: int
    train_text: bytes = field(repr=False)
    heldout_text: bytes = field(repr=False)


def build_corpus(folder: str | Path, *, context: int = 128, max_bytes: int = 16_000_000) -> Corpus:
    """Write ``train.parquet`` and ``heldout.parquet`` to the folder, replacing older ones.

    Args:
        folder: created if missing; every node must be able to read it.
        context: bytes per row, T.
        max_bytes: of text, nine tenths of it for training; files beyond that are left out.

    Raises:
        ValueError: so little text was found or allowed that a split has no row, or the folder is a URI.
    """
    if "://" in str(folder):
        raise ValueError(f"{folder} is a URI, and the corpus is written to a folder: give one that all nodes can read.")
    train_text, heldout_text = corpus_texts(max_bytes)
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(root / "train.parquet", root / "heldout.parquet", context, train_text, heldout_text)
    _write(corpus.train, train_text, context)
    _write(corpus.heldout, heldout_text, context)
    return corpus


@cache
def corpus_texts(max_bytes: int) -> tuple[bytes, bytes]:
    """Read (text for training, text held out) as ``build_corpus`` writes them, once in a process."""
    splits: dict[bool, list[bytes]] = {True: [], False: []}
    # Each split has its share, so that a small corpus has held-out text too.
    left = {True: max_bytes // 10, False: max_bytes - max_bytes // 10}
    seen: set[bytes] = set()
    for name, path in _sources(Path(sysconfig.get_path("stdlib"))):
        held_out = hashlib.sha256(name.encode()).digest()[0] < _HELD_OUT_OF_256
        text = path.read_bytes() if left[held_out] else b""
        if not text or text in seen:  # a copy must not be in both splits
            continue
        seen.add(text)
        splits[held_out].append(text[: left[held_out]] + _END_OF_FILE)
        left[held_out] -= len(text[: left[held_out]])
    return b"".join(splits[False]), b"".join(splits[True])


def bigram_cross_entropy_nats(train: bytes, heldout: bytes) -> float:
    """Compute the cross entropy, in nats per byte, of an add-one-smoothed bigram model of ``train`` on ``heldout``.

    A model that reads only the previous byte reaches this; training must be better.
    """
    counts = _pairs(train) + 1.0
    log_p = np.log(counts) - np.log(counts.sum(axis=1, keepdims=True))
    seen = _pairs(heldout)
    return float(-(seen * log_p).sum() / seen.sum())


def bigram_entropy_nats(text: bytes) -> float:
    """Compute H(x_t | x_{t-1}) of the text itself in nats per byte, the bound of all bigram models."""
    counts = _pairs(text)
    totals = counts.sum(axis=1, keepdims=True)
    p = np.divide(counts, totals, out=np.ones_like(counts), where=counts > 0)
    return float(-(counts * np.log(p)).sum() / counts.sum())


def _pairs(text: bytes) -> np.ndarray:
    """Count byte j after byte i; shape (256, 256)."""
    codes = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
    return np.bincount(codes[:-1] * 256 + codes[1:], minlength=256 * 256).reshape(256, 256).astype(np.float64)


def _sources(library: Path) -> Iterator[tuple[str, Path]]:
    """Yield the library's modules with their names, sorted by name; without tests and packages that pip installed."""
    found = []
    for folder, below, files in os.walk(library):
        below[:] = [name for name in below if name not in _LEFT_OUT]  # not entered: site-packages is large
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    yield from sorted((path.relative_to(library).as_posix(), path) for path in found)


def _write(path: Path, text: bytes, context: int) -> None:
    """Write one Parquet file, complete or absent: to a temporary name, then renamed."""
    codes = np.frombuffer(text, dtype=np.uint8)
    rows = (len(codes) - 1) // context
    if rows < 1:
        raise ValueError(
            f"{path.stem} has {len(codes)} bytes of text, too few for one row of {context}: "
            "allow more max_bytes, or take a smaller context."
        )
    columns = {
        name: pa.FixedSizeListArray.from_arrays(pa.array(codes[first : first + rows * context]), context)
        for first, name in enumerate(("tokens", "targets"))
    }
    aside = path.with_suffix(".tmp")
    pq.write_table(pa.table(columns), aside, row_group_size=_ROWS_PER_GROUP)
    aside.replace(path)

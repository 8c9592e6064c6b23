"""Labelled images as rows of bytes, from the usual places.

    nothing given                     scikit-learn's digits: 1797 of 8 x 8 grey pixels
    data_batch_1.bin, test_batch.bin  CIFAR-10's binary version: a label, then 3 x 32 x 32 bytes
    train.bin, test.bin               CIFAR-100's: a coarse label, a fine one, then the same
    train/CLASS/*.png, val/CLASS/*    a folder of images, resized; without train and val, every tenth is held out

CIFAR's version for Python is made of pickles, which may run anything, so it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.engine.io.storage import Place

__all__ = ["Images", "Split", "read_images", "write_split"]

HELD_OUT = 10
"""One of this many images is held out, if no split is given."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
_CIFAR_SIZE, _ROWS_PER_GROUP = 32, 1024


class Split(NamedTuple):
    """Pixels, uint8 of shape (samples, channels * size * size), channel by channel; and labels, uint8 or int64."""

    pixels: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Images:
    """Splits "train" and "heldout", and what is in them."""

    splits: dict[str, Split]
    channels: int
    size: int
    classes: Sequence[str]


def read_images(folder: Path | None, size: int) -> Images:
    """Read all images below a folder, or the digits without a folder.

    Args:
        size: pixels of a side; images of a folder are resized to it.

    Raises:
        ValueError: the folder has no images or an unknown layout; names the expected files.
    """
    if folder is None:
        return _digits()
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder. Give one of images or of CIFAR's binary files.")
    if (folder / "data_batch_1.bin").is_file():
        return _cifar(folder, sorted(folder.glob("data_batch_*.bin")), folder / "test_batch.bin", labels=1, classes=10)
    if (folder / "train.bin").is_file():
        return _cifar(folder, [folder / "train.bin"], folder / "test.bin", labels=2, classes=100)
    if (folder / "data_batch_1").is_file() or (folder / "train").is_file():
        raise ValueError(
            f"{folder} has CIFAR's version for Python, made of pickles, which may run anything. Give the folder of the "
            "binary version, cifar-10-batches-bin or cifar-100-binary."
        )
    return _folder(folder, size)


def write_split(split: Split, file: str) -> str:
    """Write one Parquet file with columns pixels and labels, replaced as a whole, where every node can read it."""
    width = split.pixels.shape[1]
    pixels = pa.FixedSizeListArray.from_arrays(pa.array(split.pixels.reshape(-1)), width)
    table = pa.table({"pixels": pixels, "labels": pa.array(split.labels)})
    content = pa.BufferOutputStream()
    pq.write_table(table, content, row_group_size=_ROWS_PER_GROUP)
    Place.of(file).write_bytes("", content.getvalue())
    return file


def _digits() -> Images:
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.minimum(found.images * 16, 255).astype(np.uint8).reshape(len(found.target), -1)
    splits = _parted(pixels, found.target.astype(np.int64))
    return Images(splits, 1, 8, [str(digit) for digit in range(10)])


def _cifar(folder: Path, train: Sequence[Path], test: Path, *, labels: int, classes: int) -> Images:
    names = ("batches.meta.txt", "fine_label_names.txt")
    words = next(((folder / name).read_text().split() for name in names if (folder / name).is_file()), None)
    splits = {"train": _batches(train, labels, classes), "heldout": _batches([test], labels, classes)}
    return Images(splits, 3, _CIFAR_SIZE, words or [str(label) for label in range(classes)])


def _batches(files: Sequence[Path], labels: int, classes: int) -> Split:
    row = labels + 3 * _CIFAR_SIZE * _CIFAR_SIZE
    found = []
    for file in files:
        data = np.frombuffer(file.read_bytes(), dtype=np.uint8)
        if len(data) == 0 or len(data) % row:
            raise ValueError(f"{file} has {len(data)} bytes, which are no rows of {row}: is it whole?")
        found.append(data.reshape(-1, row))
    rows = np.concatenate(found)
    fine = rows[:, labels - 1].astype(np.int64)
    if fine.max() >= classes:
        raise ValueError(f"{files[0].parent} has label {fine.max()}, but there are {classes} classes.")
    return Split(np.ascontiguousarray(rows[:, labels:]), fine)


def _folder(folder: Path, size: int) -> Images:
    train = folder / "train" if (folder / "train").is_dir() else folder
    held = next((folder / name for name in ("val", "valid", "test") if (folder / name).is_dir()), None)
    classes = sorted(path.name for path in train.iterdir() if path.is_dir() and path.name[0] != ".")
    if len(classes) < 2:
        raise ValueError(f"{train} has {len(classes)} folders of images; give one for each class.")
    known = _labelled(train, classes, size)
    if empty := sorted(set(range(len(classes))) - set(known.labels.tolist())):
        raise ValueError(f"{train / classes[empty[0]]} has no images, so its class has none. Remove it, or add some.")
    if train is folder or held is None:
        if len(known.labels) < HELD_OUT:
            raise ValueError(
                f"{train} has {len(known.labels)} images, of which none would be held out: give {HELD_OUT} or more, or "
                "the folders train and val."
            )
        return Images(_parted(*known), 3, size, classes)
    unknown = sorted(path.name for path in held.iterdir() if path.is_dir() and not path.name.startswith("."))
    unknown = [name for name in unknown if name not in classes]
    if unknown:
        raise ValueError(f"{held} has images of {', '.join(unknown)}, which {train} has not: no model can learn them.")
    return Images({"train": known, "heldout": _labelled(held, classes, size)}, 3, size, classes)


def _labelled(folder: Path, classes: Sequence[str], size: int) -> Split:
    from PIL import Image

    rows, labels = [], []
    for label, name in enumerate(classes):
        for file in sorted((folder / name).glob("*")):
            if file.suffix.lower() in SUFFIXES and file.name[0] != ".":
                with Image.open(file) as image:
                    if image.mode.startswith(("I", "F")):
                        raise ValueError(f"{file} has more than 8 bits per pixel (mode {image.mode}). Save it with 8.")
                    try:
                        pixels = np.asarray(image.convert("RGB").resize((size, size)), dtype=np.uint8)
                    except OSError as error:  # which does not name the file
                        raise ValueError(f"{file} cannot be read: {error}. Mend it, or leave it out.") from None
                rows.append(pixels.transpose(2, 0, 1).reshape(-1))
                labels.append(label)
    if not rows:
        raise ValueError(f"{folder} has no images in {', '.join(classes)}; looked for {', '.join(SUFFIXES)}.")
    return Split(np.stack(rows), np.asarray(labels, dtype=np.int64))


def _parted(pixels: np.ndarray, labels: np.ndarray) -> dict[str, Split]:
    held = np.arange(len(labels)) % HELD_OUT == HELD_OUT - 1
    return {"train": Split(pixels[~held], labels[~held]), "heldout": Split(pixels[held], labels[held])}

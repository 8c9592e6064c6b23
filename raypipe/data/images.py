"""Images: a folder of images, one folder of it for each class, as a dataset.

    animals/cat/1.png         Images("animals", size=32)[0]  ->  (image of shape (3, 32, 32) in [0, 1], 0)
    animals/cat/2.jpg         .classes                       ->  ("cat", "dog")
    animals/dog/1.png

Only paths are kept; a stage that needs an image reads and decodes it, so all nodes must see the folder. Needs Pillow.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from raypipe.errors import DataError

__all__ = ["Images"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


class Images(Dataset[Any]):
    """(image, label) by number, in the order of the classes' and the files' names.

    Args:
        folder: with a folder for each class.
        size: height and width that images are scaled to, one number or both; None leaves them, and they must be alike.
        mode: "RGB" for 3 channels, "L" for 1.
        transform: (image as a tensor) -> tensor; it may draw random numbers of torch's, numpy's or Python's global
            generators, as every item may.

    Attributes:
        classes: their names; a label is a place among them.

    Raises:
        DataError: there is no such folder, or no image in it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: int | tuple[int, int] | None = None,
        *,
        mode: str = "RGB",
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        root = Path(folder).expanduser().absolute()
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
                f"The folder {root / self.classes[empty[0]]} has no images, so its class has none. Remove it, or "
                "add some."
            )
        self._size = (size, size) if isinstance(size, int) else size
        self._mode, self._transform = mode, transform

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self._files[index]
        try:
            pixels = self._pixels(path)
        except (OSError, SyntaxError, ValueError) as error:  # as Pillow says that a file is damaged
            raise DataError(f"{path} cannot be read: {error}. Mend it, or leave it out.") from None
        channels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        tensor = torch.from_numpy(np.ascontiguousarray(channels))
        return (tensor if self._transform is None else self._transform(tensor)), label

    def _pixels(self, path: str) -> NDArray[np.float32]:
        """In [0, 1], shape (height, width) or (height, width, channels)."""
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

"""Deterministic, resumable batches: any samples of any epoch by their position, and nothing in between.

    source = open_data("corpus/train", seed=0)
    tokens, targets = source.read(epoch=0, start=64, count=32, columns=(0, 1))

A source keeps no position: where a run stands is (epoch, start), two integers of a checkpoint. Every
stage that needs data opens the same source and reads its own columns of the same samples.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.fs
import torch

from raypipe.engine.data.arrow_source import ArrowSource, survey
from raypipe.engine.data.collate import Collate
from raypipe.engine.data.loader import taken_over
from raypipe.engine.data.map_source import MapSource
from raypipe.engine.data.stream_source import ENDLESS, StreamSource, has_numbered_items, is_stream
from raypipe.errors import DataError

if TYPE_CHECKING:
    import pyarrow.dataset

__all__ = ["Source", "open_data"]

_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}


class Source(Protocol):
    """Samples by position."""

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""

    @property
    def columns(self) -> tuple[Any, ...]:
        """Names in file order (or in the order of a dict's keys), or 0, 1, ... for tuples."""

    def read(
        self, epoch: int, start: int, count: int, columns: Sequence[str] | Sequence[int]
    ) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
        """The samples at positions start, ..., start + count - 1 of this epoch's order.

        Args:
            epoch: from 0; every sample comes exactly once in each.
            start: from 0.
            count: samples; start + count is at most num_samples.
            columns: only these are read. By number they come as a tuple in the order asked for, by
                name as a dict.

        Returns:
            Tensors of shape (count, ...) that the caller may write to, with the data's own dtype.

        Raises:
            DataError: no such column or samples, a column that cannot become a tensor, a missing file.
        """

    def named(self, epoch: int, position: int) -> str:
        """Which sample stands there, for messages: "item 33 of TensorDataset", "row 12 of train.parquet"."""


def open_data(
    source: Any,
    *,
    seed: int,
    shuffle: bool = True,
    rows_per_window: int | None = None,
    collate: Collate | None = None,
) -> Source:
    """Open training data without reading more of it than row counts and column types.

    Args:
        source: path of a Parquet or Arrow file or of a folder of them (local, s3://, gs://), a
            pyarrow.dataset.Dataset, a torch map-style dataset, a DataLoader of one, or a stream: an iterable that can
            be iterated over again, a ray.data.Dataset, or either in a Stream.
        seed: of the order, at least 0.
        shuffle: False keeps the order of the files, and looks at all of them once, as an evaluation does; streams
            always keep their order.
        rows_per_window: rows of a file that are shuffled among each other; more mixes better and
            keeps more row groups in memory. Default: 65,536 or what 128 MiB hold. Map-style datasets
            are always shuffled as a whole.
        collate: makes columns of the items of a map-style dataset.

    Raises:
        DataError: nothing there, not data, or empty; names the path and says what to do.
    """
    if rows_per_window is not None and rows_per_window < 1:
        raise DataError(f"rows_per_window={rows_per_window} is not possible: give at least 1, or shuffle=False.")
    again = shuffle  # what is evaluated is read once
    if (taken := taken_over(source)) is not None:
        source, shuffle = taken.dataset, shuffle and taken.shuffles
        if collate is not None and taken.collate not in (None, collate):
            raise DataError(
                "The DataLoader has a collate_fn of its own, and another collate_fn was given beside it, of which only "
                "one can make the batches. Give one of them: leave the other collate_fn out, or give the DataLoader's "
                "dataset."
            )
        collate = collate or taken.collate
    mapped = has_numbered_items(source)
    streams = not mapped and not isinstance(source, str | os.PathLike | pa.Table | pa.RecordBatch) and is_stream(source)
    if streams and not _is_dataset(source):
        found = StreamSource(source, seed=seed, collate=collate, again=again)
        if not shuffle and found.num_samples == ENDLESS:
            raise DataError(
                f"{type(source).__name__} is a stream without an end, so nobody can tell when all of it was looked at. "
                "Give raypipe.data.Stream(data, num_samples=...), which takes its first samples each time."
            )
        return found
    if collate is not None and (not mapped or isinstance(source, str | pa.Table | pa.RecordBatch)):
        what = f"{source!r}" if isinstance(source, str | os.PathLike) else f"a {type(source).__name__}"
        raise DataError(
            f"collate_fn makes batches of the items of a dataset, and {what} has rows of columns. Leave collate_fn "
            "out, or give a dataset with __len__ and __getitem__, such as datasets.load_dataset makes of such files."
        )
    if isinstance(source, str | os.PathLike):
        filesystem, paths = _find(os.fspath(source))
    elif _is_dataset(source):
        filesystem, paths = _fragments(source)
    elif isinstance(source, pa.Table | pa.RecordBatch):
        raise DataError(_IN_MEMORY.format("A pyarrow table"))
    elif mapped:
        _refuse_containers(source)
        return MapSource(source, seed=seed, shuffle=shuffle, collate=collate)
    elif isinstance(source, type):
        raise DataError(f"The class {source.__name__} is no data; make one of it, as in {source.__name__}().")
    elif hasattr(source, "__getitem__"):
        raise DataError(
            f"{type(source).__name__} has items, but nobody can tell how many: an epoch is cut from their number. Let "
            "its __len__ return it; or write the data as a torch IterableDataset, which needs none."
        )
    else:
        raise DataError(
            f"{type(source).__name__} is not a data source of this release: it runs Parquet and Arrow paths, "
            "pyarrow.dataset.Dataset, torch datasets with __len__ and __getitem__, and iterables. Write the data as "
            "Parquet and give its folder."
        )
    files, schema, default_window = survey(filesystem, paths)
    if _is_dataset(source):
        _refuse_views(source, schema, sum(sum(file.rows_per_group) for file in files))
    window = (rows_per_window or default_window) if shuffle else 0
    return ArrowSource(filesystem, files, schema, seed=seed, rows_per_window=window)


_IN_MEMORY = (
    "{} in memory would travel to every worker. Write it with pyarrow.parquet.write_table to a place that all "
    "nodes can read, and give that path."
)


def _find(path: str) -> tuple[pyarrow.fs.FileSystem, list[tuple[str, str]]]:
    """Data files under a path or URI, sorted by path, each with its format."""
    if not path:
        raise DataError("The path of the data is empty. Give that of a Parquet or Arrow file, or of a folder of them.")
    try:
        uri = path if "://" in path else str(Path(path).expanduser().absolute())
        filesystem, root = pyarrow.fs.FileSystem.from_uri(uri)
        info = filesystem.get_file_info(root)
    except (pa.ArrowException, OSError, RuntimeError) as error:  # RuntimeError: nobody has that home folder
        raise DataError(
            f"The data at {path} cannot be reached: {error}. Give a local path, or a URI such as s3:// or gs://."
        ) from None
    if info.type == pyarrow.fs.FileType.NotFound:
        raise DataError(
            f"There is no data at {path}. Check the path, or build the data first; every node must be able to read it."
        )
    if info.type == pyarrow.fs.FileType.File:
        return filesystem, [(root, _FORMATS.get(info.extension and f".{info.extension}") or _sniff(filesystem, root))]
    found = filesystem.get_file_info(pyarrow.fs.FileSelector(root, recursive=True))
    paths = sorted(
        (entry.path, _FORMATS[f".{entry.extension}"])
        for entry in found
        if entry.type == pyarrow.fs.FileType.File
        and f".{entry.extension}" in _FORMATS
        and not entry.base_name.startswith(("_", "."))
    )
    if not paths:
        raise DataError(f"The folder {path} holds no data: {', '.join(_FORMATS)} files are read. Check the path.")
    return filesystem, paths


def _sniff(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    """Format of a file without a telling name, by its first bytes."""
    with filesystem.open_input_file(path) as opened:
        magic = opened.read(6)
    if magic.startswith(b"PAR1"):
        return "parquet"
    if magic == b"ARROW1":
        return "arrow"
    raise DataError(f"The file {path} is neither Parquet nor Arrow. Write it with pyarrow.parquet.write_table.")


def _is_dataset(source: object) -> TypeGuard[pyarrow.dataset.Dataset]:
    """Whoever holds one has imported it. Importing it here brings pandas: 0.6 s of every process that starts."""
    module = sys.modules.get("pyarrow._dataset")
    return module is not None and isinstance(source, module.Dataset)


def _fragments(data: pyarrow.dataset.Dataset) -> tuple[pyarrow.fs.FileSystem, list[tuple[str, str]]]:
    """The files of a pyarrow dataset, in its own order."""
    import pyarrow.dataset

    if getattr(data, "_scan_options", None):
        raise DataError(
            "A filtered pyarrow.dataset does not know its number of rows. Write the filtered rows with "
            "pyarrow.dataset.write_dataset and give that folder."
        )
    paths: list[tuple[str, str]] = []
    filesystem: pyarrow.fs.FileSystem | None = None
    for fragment in data.get_fragments():
        if not isinstance(fragment, pyarrow.dataset.FileFragment):
            raise DataError(_IN_MEMORY.format("A pyarrow.dataset"))
        kind = {"ipc": "arrow", "feather": "arrow"}.get(
            fragment.format.default_extname, fragment.format.default_extname
        )
        if kind not in ("parquet", "arrow"):
            raise DataError(
                f"{fragment.path} is a {kind} file; Parquet and Arrow files are read. Convert it with "
                "pyarrow.dataset.write_dataset(..., format='parquet')."
            )
        filesystem = fragment.filesystem
        paths.append((fragment.path, kind))
    if filesystem is None:
        raise DataError("The pyarrow.dataset has no files. Check the path that it was made from.")
    return filesystem, paths


def _refuse_views(data: pyarrow.dataset.Dataset, schema: pa.Schema, num_rows: int) -> None:
    """Only the files of a pyarrow dataset are read, so what it makes of them must be what they hold.

    Raises:
        DataError: it shows other columns or rows.
    """
    shows, holds = ([f"{field.name}: {field.type}" for field in one] for one in (data.schema, schema))
    if shows != holds:
        raise DataError(
            f"The pyarrow.dataset shows the columns ({', '.join(shows)}), but its files have ({', '.join(holds)}), and "
            "raypipe reads the files: a schema of its own or columns from folder names would be lost. Write it with "
            "pyarrow.dataset.write_dataset(data, folder, format='parquet') and give that folder."
        )
    # Not by count_rows(), which counts all rows of the files too.
    groups = [group for fragment in data.get_fragments() for group in getattr(fragment, "row_groups", ())]
    if groups and (count := sum(group.num_rows for group in groups)) != num_rows:
        raise DataError(
            f"The pyarrow.dataset shows {count} rows of files that have {num_rows}, and raypipe reads the files: what "
            "was chosen of them would be lost. Write it with pyarrow.dataset.write_dataset(data, folder, "
            "format='parquet') and give that folder."
        )


def _refuse_containers(source: Any) -> None:
    """What has a length and items, but none that are samples.

    Raises:
        DataError: says what to give instead.
    """
    kind = type(source).__name__
    if isinstance(source, Mapping):
        names = ", ".join(repr(name) for name in list(source)[:5])
        raise DataError(
            f"A {kind} of {names} is no dataset: data[0] must be its first sample. Give one of its parts, as in "
            f"data[{next(iter(source), 'train')!r}], or of columns a datasets.Dataset.from_dict(data)."
        )
    if isinstance(source, tuple) and source and all(isinstance(part, torch.Tensor | np.ndarray) for part in source):
        raise DataError(
            f"A tuple of {len(source)} {type(source[0]).__name__}s is no dataset: data[0] would be all of the inputs. "
            "Give torch.utils.data.TensorDataset(x, y); torch.from_numpy makes tensors of arrays."
        )
    if kind == "DataFrame" and hasattr(source, "columns"):
        raise DataError(
            "A DataFrame in memory would travel to every worker, and data[0] is none of its rows. Write it as Parquet "
            "to a place that all nodes can read, and give that path; or give datasets.Dataset.from_pandas(data)."
        )

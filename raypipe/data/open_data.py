"""Training data by position: any samples of any epoch, equal in every process. Only a stream is read in its order.

A source keeps no position: a run resumes at (epoch, start), two integers of a checkpoint. Every stage that needs data
reads its own columns of the same samples.

A torch DataLoader is replaced by its parts:

    DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=pad)
               |        |              |             called with the samples of a mini-batch
               |        |              every epoch in raypipe's own order, keyed by the seed
               |        minibatch_size
               every stage reads the items that it needs by index
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.fs
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import default_collate as torchs_own

from raypipe.config.paths import absolute_path
from raypipe.data.arrow_source import ArrowSource, Table, as_arrow, survey
from raypipe.data.map_source import MapSource
from raypipe.data.stacking import Collate
from raypipe.data.stream_source import ENDLESS, StreamSource, has_numbered_items, is_stream
from raypipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow.dataset


class Taken(NamedTuple):
    """Parts of a DataLoader that a run uses instead of the DataLoader.

    Attributes:
        dataset: map-style dataset.
        collate: collate function, (list of items) -> batch; None stacks the items.
        shuffles: True if every epoch has another order.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] | None
    shuffles: bool

    def one_collate(self, other: Collate | None) -> Collate | None:
        """Return the DataLoader's collate function or ``other``, the trainer's; None if neither has one.

        Raises:
            DataError: both have one, and they differ.
        """
        if other is not None and self.collate not in (None, other):
            raise DataError(
                "The DataLoader has a collate_fn of its own, which differs from the trainer's. Only one can make the "
                "batches: leave the other collate_fn out, or give the DataLoader's dataset."
            )
        return other or self.collate


def taken_over(data: Any) -> Taken | None:
    """Return the parts of a DataLoader; None for any other data.

    Raises:
        DataError: the DataLoader has an argument that a pipeline cannot follow; the message names the argument.
    """
    if not isinstance(data, DataLoader):
        if any(isinstance(part, DataLoader) for part in getattr(data, "pipeline", None) or ()):  # of webdataset
            raise DataError(f"The {type(data).__name__} gives batches of a DataLoader, but {_STREAM}")
        return None
    for name, value, cure in _faults(data):
        raise DataError(f"The DataLoader has {name}={value}, which raypipe would not follow: {cure}")
    collate = None if data.collate_fn is torchs_own else data.collate_fn
    return Taken(data.dataset, collate, isinstance(data.sampler, RandomSampler))


def batch_size_of(data: Any, minibatch_size: Any) -> Any:
    """Return the minibatch_size of a run on this data: "auto" becomes the batch size of a DataLoader.

    Raises:
        ConfigError: the given minibatch_size differs from the DataLoader's batch size.
    """
    if not isinstance(data, DataLoader) or data.batch_size is None:
        return minibatch_size
    if minibatch_size not in ("auto", data.batch_size):
        raise ConfigError(
            f"train_data is a DataLoader with batch_size={data.batch_size}, but minibatch_size={minibatch_size}. Set "
            "only one of them: leave minibatch_size out, or give the DataLoader's dataset and collate_fn instead."
        )
    return data.batch_size


def notes_on(data: Any) -> Iterator[str]:
    """Yield sentences for the plan on what a run does differently from a training loop over the DataLoader."""
    if not isinstance(data, DataLoader):
        return
    if isinstance(data.sampler, RandomSampler):
        yield (
            "train_data is a DataLoader with shuffle=True: epochs are shuffled in raypipe's own order, keyed by "
            "PipelineConfig(seed=...), not in that of the sampler's generator, so that a run can resume at any sample."
        )
    if data.num_workers:
        yield (
            f"train_data is a DataLoader with num_workers={data.num_workers}: each stage reads its data ahead in a "
            "thread, and starts no processes for it."
        )


_STREAM = (
    "every stage iterates over a stream. Give the dataset itself as the data, and "
    "its batch size and collate function as minibatch_size and collate_fn."
)


def _faults(data: DataLoader[Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (argument, value, remedy) for the first argument of a DataLoader that raypipe does not support.

    Nothing is yielded if all arguments are supported.
    """
    sampler: Any = data.sampler
    if isinstance(data.dataset, IterableDataset):
        yield "dataset", type(data.dataset).__name__, _STREAM
    elif type(data).__iter__ is not DataLoader.__iter__:
        yield "__iter__", f"{type(data).__name__}.__iter__", (
            "stages read the dataset's items by index and never iterate over the loader. Do in __getitem__ or "
            "in collate_fn what it does, and give a plain DataLoader."
        )  # fmt: skip
    elif type(data.batch_sampler) is not BatchSampler:
        yield "batch_sampler", type(data.batch_sampler).__name__, (
            "mini-batches are cut from an epoch's order by minibatch_size. Give batch_size and shuffle instead."
        )  # fmt: skip
    elif data.batch_size is None:
        yield "batch_sampler", type(data.batch_sampler).__name__, (
            "its batch size, order and drop_last would be left out. Give batch_size and shuffle instead."
        )  # fmt: skip
    elif type(sampler) not in (RandomSampler, SequentialSampler):
        yield "sampler", type(sampler).__name__, (
            "only the sampler knows its order, so that a run could not resume in it. Give shuffle=True or False, "
            "or a dataset whose items are in that order (torch.utils.data.Subset(dataset, order))."
        )  # fmt: skip
    elif isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(sampler.data_source)
    ):
        yield "sampler", "RandomSampler with replacement or num_samples", (
            "an epoch has every item once. Give shuffle=True."
        )  # fmt: skip
    elif sampler.data_source is not data.dataset:
        yield "sampler", f"{type(sampler).__name__}({type(sampler.data_source).__name__})", (
            "its indices are of another dataset than the DataLoader's. Give shuffle=True or False; for a part of "
            "a dataset give torch.utils.data.Subset(dataset, indices)."
        )  # fmt: skip
    elif data.drop_last:
        yield "drop_last", "True", (
            "the last mini-batch of an epoch has the rest of the samples, and its loss is weighted by them. Leave "
            "drop_last out, or give a dataset whose length is a multiple of batch_size."
        )  # fmt: skip
    elif data.worker_init_fn is not None:
        yield "worker_init_fn", getattr(data.worker_init_fn, "__name__", "a function"), (
            "there are no worker processes. Do in __getitem__ or in the dataset's __init__ what it does."
        )  # fmt: skip


_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
_LOADERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv"}
"""Suffix of a file -> name of its format for datasets.load_dataset."""


class Source(Protocol):
    """Training or evaluation data, whose samples are read by epoch and position, equally in every process."""

    @property
    def num_samples(self) -> int:
        """Number of samples in one epoch."""

    @property
    def columns(self) -> tuple[Any, ...]:
        """Column names, in the order of the files or of the items' keys; the numbers 0, 1, ... if items are tuples."""

    def read(
        self, epoch: int, start: int, count: int, columns: Sequence[str] | Sequence[int]
    ) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
        """Read the samples at positions start, ..., start + count - 1 of this epoch's order.

        Args:
            epoch: number of the epoch, from 0; every epoch has each sample exactly once.
            start: position of the first sample, from 0.
            count: number of samples; start + count is at most num_samples.
            columns: columns to read, by index or by name.

        Returns:
            A tuple of tensors in the order of ``columns`` if columns are given by index; {name: tensor} if columns are
            given by name. The tensors have shape (count, ...) and the data's dtype; the caller may change them.

        Raises:
            DataError: a column or a sample does not exist, a column cannot become a tensor, or a file is missing.
        """

    def named(self, epoch: int, position: int) -> str:
        """Return the name of a sample for messages, such as "item 33 of TensorDataset" or "row 12 of train.parquet"."""


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
        source: one of:
            - path of a Parquet or Arrow file, or of a folder of them (local, s3://, gs://)
            - pyarrow.dataset.Dataset, or a table in memory (pyarrow, pandas, polars)
            - torch map-style dataset, or a DataLoader of one
            - stream: an iterable that can be iterated over again, or a ray.data.Dataset; either may be in a Stream
        seed: seed of the shuffled order, at least 0.
        shuffle: True shuffles each epoch. False keeps the order of the data, and reads a stream only once, as an
            evaluation does. Streams are never shuffled.
        rows_per_window: number of rows of files that are shuffled among each other. A larger number mixes better, and
            keeps more row groups in memory. Default: 65,536, or fewer if these need more than 128 MiB. Map-style
            datasets are always shuffled as a whole.
        collate: function that creates the columns of a batch from the items of a map-style dataset or a stream.

    Raises:
        DataError: the data is missing, empty or of another kind; the message has the path and the remedy.
    """
    if rows_per_window is not None and rows_per_window < 1:
        raise DataError(f"rows_per_window={rows_per_window} is not possible: give at least 1, or shuffle=False.")
    again = shuffle  # evaluations read a stream once
    if (taken := taken_over(source)) is not None:
        source, shuffle, collate = taken.dataset, shuffle and taken.shuffles, taken.one_collate(collate)
    if (table := as_arrow(source)) is not None:
        source = Table(table, collated=collate is not None)
    mapped = has_numbered_items(source)
    streams = not mapped and not isinstance(source, str | os.PathLike) and is_stream(source)
    if streams and not _is_dataset(source):
        stream = StreamSource(source, seed=seed, collate=collate, again=again)
        if not shuffle and stream.num_samples == ENDLESS:
            raise DataError(
                f"{type(source).__name__} is a stream without an end, and an evaluation reads all of its data. Give "
                "raypipe.data.Stream(data, num_samples=1000), which takes its first 1000 samples each time."
            )
        return stream
    if collate is not None and (not mapped or isinstance(source, str)):
        what = f"{source!r}" if isinstance(source, str | os.PathLike) else f"a {type(source).__name__}"
        raise DataError(
            f"collate_fn makes batches of the items of a dataset, and {what} has rows of columns. Leave collate_fn "
            "out, or give a dataset with __len__ and __getitem__, such as datasets.load_dataset makes of such files."
        )
    if isinstance(source, str | os.PathLike):
        filesystem, paths = _find(os.fspath(source))
    elif _is_dataset(source):
        filesystem, paths = _fragments(source)
    elif mapped:
        _refuse_containers(source)
        return MapSource(source, seed=seed, shuffle=shuffle, collate=collate)
    else:
        raise _no_source(source)
    files, schema, default_window = survey(filesystem, paths)
    if _is_dataset(source):
        _refuse_views(source, schema, sum(sum(file.rows_per_group) for file in files))
    window = (rows_per_window or default_window) if shuffle else 0
    return ArrowSource(filesystem, files, schema, seed=seed, rows_per_window=window)


def _find(path: str) -> tuple[pyarrow.fs.FileSystem, list[tuple[str, str]]]:
    """List the data files under a path or URI: (file system, [(path, format)]), sorted by path."""
    if not path:
        raise DataError("The path of the data is empty. Give that of a Parquet or Arrow file, or of a folder of them.")
    try:
        filesystem, root = pyarrow.fs.FileSystem.from_uri(absolute_path(path))
        info = filesystem.get_file_info(root)
    except ConfigError as error:
        raise DataError(str(error)) from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"The data at {path} cannot be reached: {error}. Give a local path, or a URI such as s3:// or gs://."
        ) from None
    if info.type == pyarrow.fs.FileType.NotFound:
        raise DataError(
            f"There is no data at {path}. Check the path, or build the data first; every node must be able to read it."
        )
    if info.type == pyarrow.fs.FileType.File:
        return filesystem, [(root, _FORMATS.get(info.extension and f".{info.extension}") or _sniff(filesystem, root))]
    entries = filesystem.get_file_info(pyarrow.fs.FileSelector(root, recursive=True))
    paths = sorted(
        (entry.path, _FORMATS[f".{entry.extension}"])
        for entry in entries
        if entry.type == pyarrow.fs.FileType.File
        and f".{entry.extension}" in _FORMATS
        and not entry.base_name.startswith(("_", "."))
    )
    if not paths:
        others = sorted({f".{entry.extension}" for entry in entries} & _LOADERS.keys())
        cure = _loading(f"{path}/*{others[0]}") if others else "Check the path."
        raise DataError(f"The folder {path} holds no data: {', '.join(_FORMATS)} files are read. {cure}")
    return filesystem, paths


def _sniff(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    """Detect the format of a file by its first bytes: "parquet" or "arrow"; else raise a DataError."""
    with filesystem.open_input_file(path) as opened:
        magic = opened.read(6)
    if magic.startswith(b"PAR1"):
        return "parquet"
    if magic == b"ARROW1":
        return "arrow"
    raise DataError(f"The file {path} is neither Parquet nor Arrow. {_loading(path)}")


def _loading(path: str) -> str:
    """Advise how to load a file that is neither Parquet nor Arrow, in Python and as a line of a run file."""
    kind = _LOADERS.get(Path(path).suffix)
    if kind is None:
        return "Load it in Python and give a dataset, or write it with pyarrow.parquet.write_table."
    return (
        f'Give datasets.load_dataset("{kind}", data_files="{path}", split="train"); in a run file train_data: '
        f'{{target: "datasets:load_dataset", args: {{path: {kind}, data_files: "{path}", split: train}}}}.'
    )


def _is_dataset(source: object) -> TypeGuard[pyarrow.dataset.Dataset]:
    """Return True for a pyarrow.dataset.Dataset, without importing pyarrow.dataset: its import takes 0.6 s."""
    module = sys.modules.get("pyarrow._dataset")
    return module is not None and isinstance(source, module.Dataset)


def _fragments(data: pyarrow.dataset.Dataset) -> tuple[pyarrow.fs.FileSystem, list[tuple[str, str]]]:
    """List the files of a pyarrow dataset in its own order, as ``_find`` does."""
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
            raise DataError("The pyarrow.dataset holds a table in memory. Give that table, as data.to_table() does.")
        kind = {"ipc": "arrow", "feather": "arrow"}.get(
            fragment.format.default_extname, fragment.format.default_extname
        )
        if kind not in ("parquet", "arrow"):
            raise DataError(
                f"{fragment.path} is a {kind} file; Parquet and Arrow files are read. Give data.to_table(), which "
                "holds all of it in memory, or convert it with pyarrow.dataset.write_dataset(..., format='parquet')."
            )
        filesystem = fragment.filesystem
        paths.append((fragment.path, kind))
    if filesystem is None:
        raise DataError("The pyarrow.dataset has no files. Check the path that it was made from.")
    return filesystem, paths


def _refuse_views(data: pyarrow.dataset.Dataset, schema: pa.Schema, num_rows: int) -> None:
    """Refuse a pyarrow dataset whose columns or rows differ from those of its files, since only the files are read."""
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
            f"The pyarrow.dataset shows {count} rows of files that have {num_rows}, and raypipe reads the files: the "
            "selection of rows would be lost. Write it with pyarrow.dataset.write_dataset(data, folder, "
            "format='parquet') and give that folder."
        )


def _no_source(source: Any) -> DataError:
    """Create the error for an object that is not data."""
    kind = type(source).__name__
    if isinstance(source, type):
        return DataError(f"The data is the class {source.__name__}; pass an instance: {source.__name__}().")
    if callable(getattr(source, "collect", None)):
        return DataError(f"{kind} has no rows yet. Give data.collect(), which computes them.")
    if hasattr(source, "__getitem__"):
        return DataError(
            f"{kind} has items, but no __len__: an epoch is cut from the number of items. Let __len__ return it, or "
            "write the data as a torch IterableDataset, which needs no length."
        )
    return DataError(
        f"{kind} is not a data source. raypipe reads Parquet and Arrow paths, pyarrow.dataset.Dataset, torch datasets "
        "with __len__ and __getitem__, and iterables. Write the data as Parquet and give its folder."
    )


def _refuse_containers(source: Any) -> None:
    """Raise DataError for a dict of datasets or a tuple of tensors, whose items are not samples."""
    kind = type(source).__name__
    if isinstance(source, Mapping):
        names = ", ".join(repr(name) for name in list(source)[:5])
        raise DataError(
            f"A {kind} of {names} is not a dataset: data[0] must be its first sample. Give one of its parts, as in "
            f"data[{next(iter(source), 'train')!r}], or make a table of columns: pyarrow.table(data)."
        )
    if isinstance(source, tuple) and source and all(isinstance(part, torch.Tensor | np.ndarray) for part in source):
        raise DataError(
            f"A tuple of {len(source)} {type(source[0]).__name__}s is not a dataset: data[0] would be all inputs. Give "
            "torch.utils.data.TensorDataset(x, y); torch.from_numpy makes tensors of arrays."
        )

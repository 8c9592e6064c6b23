"""Training data in Parquet and Arrow files: few row groups decoded at a time, only the asked columns.

A source holds paths and row counts. Files are opened where they are read, so sending a source to a
worker costs a few kilobytes whatever the size of the data.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.ipc
import pyarrow.parquet
import torch
from numpy.typing import NDArray

from raypipe.engine.columns import check_type, dense, ragged
from raypipe.engine.order import EpochOrder
from raypipe.errors import DataError

__all__ = ["ArrowSource", "DataFile", "survey"]

_OPEN_FILES = 8
_WINDOW_BYTES = 256 * 2**20
_WINDOW_ROWS = 65_536


class DataFile(NamedTuple):
    """One file: its path in the file system, "parquet" or "arrow", and the rows of each row group."""

    path: str
    format: str
    rows_per_group: tuple[int, ...]


class ArrowSource:
    """Reads samples of any epoch by position; see ``open_data``.

    Args:
        filesystem: where the files are.
        files: in the order that counts row groups.
        schema: of every file.
        seed: of the order.
        rows_per_window: see EpochOrder; 0 keeps the file order.
    """

    def __init__(
        self,
        filesystem: pyarrow.fs.FileSystem,
        files: Sequence[DataFile],
        schema: pa.Schema,
        *,
        seed: int,
        rows_per_window: int,
    ) -> None:
        self._filesystem = filesystem
        self._files = tuple(files)
        self._schema = schema
        self._seed = seed
        self._rows_per_window = rows_per_window
        self._groups = [(f, g) for f, file in enumerate(files) for g in range(len(file.rows_per_group))]
        self._rows_per_group = [files[f].rows_per_group[g] for f, g in self._groups]
        self._start_reading()

    def _start_reading(self) -> None:
        self._lock = threading.Lock()
        self._order: tuple[int, EpochOrder] | None = None
        self._readers: OrderedDict[int, Any] = OrderedDict()
        self._decoded: OrderedDict[int, dict[str, NDArray[Any]]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_order", "_readers", "_decoded")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_reading()

    @property
    def num_samples(self) -> int:
        return sum(self._rows_per_group)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._schema.names)

    def read(
        self, epoch: int, start: int, count: int, columns: Sequence[str] | Sequence[int]
    ) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
        """See ``raypipe.engine.data.Source.read``."""
        names = [self._name(column) for column in columns]
        if not 0 <= start <= start + count <= self.num_samples:
            raise DataError(
                f"Samples {start} to {start + count} were asked of {self._where(0)}, which has {self.num_samples}."
            )
        with self._lock:
            read = self._gather(epoch, start, count, list(dict.fromkeys(names)))
        if all(isinstance(column, int) for column in columns):
            return tuple(read[name] for name in names)
        return {name: read[name] for name in names}

    def _name(self, column: str | int) -> str:
        names = self._schema.names
        if column not in (range(len(names)) if isinstance(column, int) else names):
            raise DataError(f"{self._where(0)} has no column {column!r}. It has {', '.join(names)}.")
        name: str = names[column] if isinstance(column, int) else column
        check_type(name, self._schema.field(name).type, self._where(0))
        return name

    def _gather(self, epoch: int, start: int, count: int, names: list[str]) -> dict[str, torch.Tensor]:
        """Copies the asked rows out of decoded row groups; the one copy also makes them writable."""
        if self._order is None or self._order[0] != epoch:
            order = EpochOrder(
                self._rows_per_group, seed=self._seed, epoch=epoch, rows_per_window=self._rows_per_window
            )
            self._order = (epoch, order)
        result: dict[str, NDArray[Any]] = {}
        # An empty read still needs shapes and dtypes, so it looks at the first row group.
        empty = np.zeros(0, dtype=np.int64)
        located = self._order[1].locate(start, count) if count else [(0, empty, empty)]
        for group, rows, places in located:
            decoded = self._group(group, names)
            for name in names:
                values = decoded[name]
                if name not in result:
                    result[name] = np.empty((count, *values.shape[1:]), dtype=values.dtype)
                elif result[name].shape[1:] != values.shape[1:]:
                    found = f"shapes {result[name].shape[1:]} and {values.shape[1:]}"
                    raise DataError(ragged(name, found, self._where(group)))
                result[name][places] = values[rows]
        return {name: torch.from_numpy(array) for name, array in result.items()}

    def _group(self, group: int, names: list[str]) -> dict[str, NDArray[Any]]:
        """Decoded columns of one row group; the least recently used groups beyond one window go."""
        decoded = self._decoded.setdefault(group, {})
        self._decoded.move_to_end(group)
        missing = [name for name in names if name not in decoded]
        if missing:
            table = self._table(group, missing)
            for name in missing:
                decoded[name] = dense(name, table.column(name), self._where(group))
        assert self._order is not None
        while len(self._decoded) > self._order[1].groups_per_window:
            self._decoded.popitem(last=False)
        return decoded

    def _table(self, group: int, names: list[str]) -> pa.Table:
        file, index = self._groups[group]
        if self._files[file].format == "parquet":
            return self._reader(file).read_row_group(index, columns=names)
        # Arrow IPC selects columns when it opens, by number.
        fields = [self._schema.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        with self._open(self._files[file].path) as opened:
            return pa.Table.from_batches([pa.ipc.open_file(opened, options=options).get_batch(index)])

    def _reader(self, file: int) -> Any:
        """An open Parquet file, so that its footer is parsed once and not for every row group."""
        if file not in self._readers:
            while len(self._readers) >= _OPEN_FILES:
                self._readers.popitem(last=False)[1].close(force=True)
            opened = self._open(self._files[file].path)
            self._readers[file] = pyarrow.parquet.ParquetFile(opened)
        self._readers.move_to_end(file)
        return self._readers[file]

    def _open(self, path: str) -> Any:
        try:
            return self._filesystem.open_input_file(path)
        except FileNotFoundError as error:
            raise DataError(
                f"Data file {path} is not there on this machine. Put the data where every node can read it: "
                "a shared folder, or s3:// and the like."
            ) from error

    def _where(self, group: int) -> str:
        return self._files[self._groups[group][0]].path


def survey(
    filesystem: pyarrow.fs.FileSystem, paths: Sequence[tuple[str, str]]
) -> tuple[list[DataFile], pa.Schema, int]:
    """Row counts and schema of the files, from their footers.

    Args:
        filesystem: where the files are.
        paths: (path, "parquet" or "arrow") of each file.

    Returns:
        (the files that have rows, their schema, rows of the default window).

    Raises:
        DataError: a file is damaged, has other columns than the first, or all are empty.
    """
    files: list[DataFile] = []
    schema: pa.Schema | None = None
    decoded_bytes = 0
    for path, kind in paths:
        try:
            with filesystem.open_input_file(path) as opened:
                own, rows, size = _parquet_footer(opened) if kind == "parquet" else _arrow_footer(opened)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"Data file {path} cannot be read as {kind}: {error}. Write it again, or take it out of the folder."
            ) from error
        if schema is None:
            schema = own
        elif not own.equals(schema):
            raise DataError(
                f"Data file {path} has the columns ({_columns(own)}), but {paths[0][0]} has ({_columns(schema)}). "
                "Write all files of a data set with one schema."
            )
        decoded_bytes += size
        if sum(rows):
            files.append(DataFile(path, kind, rows))
    total = sum(sum(file.rows_per_group) for file in files)
    if schema is None or not total:
        raise DataError(
            f"The data at {', '.join(path for path, _ in paths)} has no rows. Write some, or give another path."
        )
    fitting = _WINDOW_BYTES * total // max(decoded_bytes, 1)
    return files, schema, max(1, min(_WINDOW_ROWS, fitting))


def _parquet_footer(opened: Any) -> tuple[pa.Schema, tuple[int, ...], int]:
    reader = pyarrow.parquet.ParquetFile(opened)
    groups = [reader.metadata.row_group(i) for i in range(reader.metadata.num_row_groups)]
    size = sum(group.total_byte_size for group in groups)
    return reader.schema_arrow.remove_metadata(), tuple(group.num_rows for group in groups), size


def _arrow_footer(opened: Any) -> tuple[pa.Schema, tuple[int, ...], int]:
    reader = pa.ipc.open_file(opened)
    rows, size = [], 0
    for i in range(reader.num_record_batches):
        batch = reader.get_batch(i)
        rows.append(batch.num_rows)
        size += batch.nbytes
    return reader.schema.remove_metadata(), tuple(rows), size


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)

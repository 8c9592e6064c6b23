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

from raypipe.engine.data.columns import check_type, dense, ragged
from raypipe.engine.data.epoch_order import EpochOrder
from raypipe.engine.user_lines import short
from raypipe.errors import DataError

__all__ = ["ArrowSource", "DataFile", "survey"]

_OPEN_FILES = 8
_WINDOWS_KEPT = 2  # the one being read, and the one that a stage further down still reads
_WINDOW_BYTES = 128 * 2**20
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
        self._orders: OrderedDict[int, EpochOrder] = OrderedDict()
        self._readers: OrderedDict[int, Any] = OrderedDict()
        self._decoded: OrderedDict[tuple[int, int], dict[str, NDArray[Any]]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_lock", "_orders", "_readers", "_decoded")
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
        """See ``raypipe.engine.data.source.Source.read``."""
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

    def named(self, epoch: int, position: int) -> str:
        """See ``raypipe.engine.data.source.Source.named``."""
        with self._lock:
            ((group, rows, _),) = self._order(epoch).locate(position, 1)
        return f"row {self._first_row(group) + int(rows[0])} of {self._where(group)}"

    def _name(self, column: str | int) -> str:
        names = self._schema.names
        if column not in (range(len(names)) if isinstance(column, int) else names):
            raise DataError(f"{self._where(0)} has no column {column!r}. It has {', '.join(names)}.")
        return str(names[column]) if isinstance(column, int) else column

    def _gather(self, epoch: int, start: int, count: int, names: list[str]) -> dict[str, torch.Tensor]:
        """Copies the asked samples out of their windows; the copy may be written to."""
        order = self._order(epoch)
        parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
        position = start
        # An empty read looks at a window too: it still has shapes and dtypes.
        while position < start + count or not all(parts.values()):
            first, stop = order.window_at(min(position, self.num_samples - 1))
            window = self._window(epoch, first, stop, names)
            for name, found in parts.items():
                found.append(window[name][position - first : start + count - first])
                if found[0].shape[1:] != found[-1].shape[1:]:
                    raise DataError(
                        ragged(name, f"shapes {found[0].shape[1:]} and {found[-1].shape[1:]}", self._where(0))
                    )
            position = stop
        return {name: torch.from_numpy(np.concatenate(found)) for name, found in parts.items()}

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            while len(self._orders) >= _WINDOWS_KEPT:
                self._orders.popitem(last=False)
            self._orders[epoch] = EpochOrder(
                self._rows_per_group, seed=self._seed, epoch=epoch, rows_per_window=self._rows_per_window
            )
        return self._orders[epoch]

    def _window(self, epoch: int, first: int, stop: int, names: list[str]) -> dict[str, NDArray[Any]]:
        """Columns of one window in the epoch's order: decoded once, then any batch of it is a slice.

        Even a small batch touches most row groups of its window, so nothing is decoded in vain.
        """
        window = self._decoded.setdefault((epoch, first), {})
        self._decoded.move_to_end((epoch, first))
        while len(self._decoded) > _WINDOWS_KEPT:
            self._decoded.popitem(last=False)
        missing = [name for name in names if name not in window]
        for name in missing:
            check_type(name, self._schema.field(name).type, self._where(0))
        ordered: dict[str, NDArray[Any]] = {}
        for group, rows, places in self._order(epoch).locate(first, stop - first) if missing else ():
            table = self._table(group, missing)
            for name in missing:
                values = dense(name, table.column(name), self._where(group), self._first_row(group))
                if name not in ordered:
                    ordered[name] = np.empty((stop - first, *values.shape[1:]), dtype=values.dtype)
                elif ordered[name].shape[1:] != values.shape[1:]:
                    found = f"shapes {ordered[name].shape[1:]} and {values.shape[1:]}"
                    raise DataError(ragged(name, found, self._where(group)))
                ordered[name][places] = values[rows]
        window.update(ordered)
        return window

    def _table(self, group: int, names: list[str]) -> pa.Table:
        """Columns of a row group.

        Raises:
            DataError: its bytes are no longer what they were; names the file and the rows.
        """
        try:
            return self._decode(group, names)
        except (pa.ArrowException, OSError) as error:
            first = self._first_row(group)
            raise DataError(
                f"Rows {first} to {first + self._rows_per_group[group] - 1} of data file {self._where(group)} cannot "
                f"be read: {short(error)} Write the file again, or take it out of the data."
            ) from None

    def _decode(self, group: int, names: list[str]) -> pa.Table:
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

    def _first_row(self, group: int) -> int:
        """Of a row group, in its file."""
        file, index = self._groups[group]
        return sum(self._files[file].rows_per_group[:index])

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
        own, rows, size = _footer(filesystem, path, kind)
        if len(set(own.names)) < len(own.names):
            raise DataError(f"Data file {path} has two columns of one name: {_columns(own)}. Name each otherwise.")
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


def _footer(filesystem: pyarrow.fs.FileSystem, path: str, kind: str) -> tuple[pa.Schema, tuple[int, ...], int]:
    """Schema, rows of each group and decoded bytes of a file; DataError where it is damaged."""
    try:
        with filesystem.open_input_file(path) as opened:
            return _parquet_footer(opened) if kind == "parquet" else _arrow_footer(opened)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"Data file {path} cannot be read as {kind}: {error}. Write it again, or take it out of the folder."
        ) from error


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

"""Training data in Parquet and Arrow files, and tables in memory.

Only a few row groups of a file are decoded at a time, and only the columns that are read. A source holds paths and row
counts, a few kilobytes that are sent to workers; each worker opens the files itself. Columns become numpy arrays of
shape (rows, ...):

    int16                              (rows,)
    fixed_size_list<uint8>[T]          (rows, T)          and so on for nested lists
    list<float> of equal lengths n     (rows, n)
    fixed_shape_tensor<float, (2, 3)>  (rows, 2, 3)

Arrays of dense columns without missing values are views of Arrow's read-only memory, so rows are copied before they are
returned.

A table in memory is of pyarrow, pandas or polars, or a numpy array with named fields. Its item 3 is row 3 as a dict,
{"x": 0.5, "y": 1}, whose values have the table's types.
"""

from __future__ import annotations

import math
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

from raypipe.data.epoch_order import EpochOrder
from raypipe.data.stacking import by_request, check_range, key_of
from raypipe.errors import DataError
from raypipe.user_lines import short


def check_type(name: str, kind: pa.DataType, where: str) -> None:
    """Check, before a column is read, that its type can become a tensor.

    Args:
        where: name of the file, for messages.

    Raises:
        DataError: the type cannot become a tensor; the message has the column, the type, the file and the remedy.
    """
    leaf = kind
    while True:
        if isinstance(leaf, pa.BaseExtensionType):
            leaf = leaf.storage_type
        elif _is_list(leaf):
            leaf = leaf.value_type
        else:
            break
    if pa.types.is_integer(leaf) or pa.types.is_floating(leaf) or pa.types.is_boolean(leaf):
        return
    if str(leaf) in ("string", "large_string", "string_view") or pa.types.is_dictionary(leaf):
        cure = "Turn text into numbers first, for example token ids in a fixed_size_list<int32>[T] column"
    else:
        cure = "Cast it to integers, floats or booleans, or to (fixed-size) lists of them"
    raise DataError(f"Column {name!r} of {where} has type {kind}, which cannot become a tensor. {cure}.")


def dense(name: str, column: pa.ChunkedArray, where: str, first_row: int = 0) -> NDArray[Any]:
    """Convert a column to an array of shape (rows, ...) with Arrow's dtype.

    Args:
        where: name of the file, for messages.
        first_row: number in the file of the column's first row, for messages.

    Raises:
        DataError: values are missing, or lists differ in length; the message has the column and the remedy.
    """
    array: Any = column.combine_chunks()
    shape = [len(array)]
    while True:
        if array.null_count:
            missing = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            row = first_row + missing // math.prod(shape[1:])
            raise DataError(
                f"Column {name!r} of {where} has {array.null_count} missing values, the first in row {row}, for which "
                "a tensor has no place. Fill or drop them before (fill_null, drop_null of pyarrow; fillna, dropna of "
                "pandas, where NaN is missing)."
            )
        if isinstance(array, pa.ExtensionArray):
            if isinstance(array.type, pa.FixedShapeTensorType):
                shape += _tensor_shape(name, array.type, where)
                array = array.storage.flatten()
            else:
                array = array.storage
        elif pa.types.is_fixed_size_list(array.type):
            shape.append(array.type.list_size)
            array = array.flatten()
        elif _is_list(array.type):
            shape.append(_common_length(name, array, where, first_row, math.prod(shape[1:])))
            array = array.flatten()
        else:
            # Booleans are bits in Arrow, so they are the one case that cannot be a view.
            return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(shape)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _tensor_shape(name: str, kind: pa.FixedShapeTensorType, where: str) -> list[int]:
    if kind.permutation is not None and list(kind.permutation) != sorted(kind.permutation):
        raise DataError(
            f"Column {name!r} of {where} stores its tensors with permuted dimensions {list(kind.permutation)}. "
            "Write them in row-major order."
        )
    return list(kind.shape)


def _common_length(name: str, array: Any, where: str, first_row: int, per_row: int) -> int:
    lengths = np.diff(np.asarray(array.offsets))
    shortest, longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if shortest != longest:
        row = first_row + int(np.flatnonzero(lengths != lengths[0])[0]) // per_row
        raise DataError(ragged(name, f"{shortest} to {longest} values (row {row} is the first to differ)", where))
    return longest


def ragged(name: object, shapes: str, where: str) -> str:
    """Return the error message for a column whose rows have different ``shapes``, a text such as "3 to 5 values"."""
    return (
        f"Column {name!r} of {where} is ragged: rows hold {shapes}, and a batch needs equal shapes. "
        "Pad or cut them to one length and store it as fixed_size_list."
    )


class Table:
    """Rows of a table as a map-style dataset, in which each item is a row as a dict.

    Args:
        table: Arrow table.
        collated: True returns items with plain Python values, including texts, for a collate function. False returns
            numpy values of the table's types.

    Raises:
        DataError: ``collated`` is False, and a column cannot become a tensor.
    """

    def __init__(self, table: pa.Table, *, collated: bool) -> None:
        self._rows = table.num_rows
        self._collated = collated
        self._columns: dict[str, Any] = {}
        for name, column in zip(table.column_names, table.columns, strict=True):
            if not collated:
                check_type(name, column.type, "the table")
            self._columns[name] = column.combine_chunks() if collated else dense(name, column, "the table")

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        values = {name: column[row] for name, column in self._columns.items()}
        return {name: value.as_py() for name, value in values.items()} if self._collated else values


def as_arrow(data: Any) -> pa.Table | None:
    """Convert a table to Arrow; return None if ``data`` is no table. The index of a pandas.DataFrame is left out.

    Raises:
        DataError: Arrow has no type for a column, or two columns have one name.
    """
    try:
        if fields := getattr(getattr(data, "dtype", None), "names", None):
            return pa.table({name: data[name] for name in fields})
        # A series has no columns, and a RecordBatchReader, which can be read only once, no length.
        if not all(hasattr(data, name) for name in ("__arrow_c_stream__", "__len__", "columns")):
            return None
        table = pa.table(data.reset_index(drop=True) if hasattr(data, "reset_index") else data)
    except Exception as error:  # noqa: BLE001  (three libraries, each with errors of its own)
        raise DataError(
            f"The {type(data).__name__} cannot become a table of Arrow: {short(error)} Give every column a name of its "
            "own and one type, numbers or lists of numbers."
        ) from None
    return table


_OPEN_FILES = 8
_WINDOWS_KEPT = 2  # the window being read, and the one before, which a later stage still reads
_WINDOW_BYTES = 128 * 2**20
_WINDOW_ROWS = 65_536


class DataFile(NamedTuple):
    """File of the data: path in the file system, format ("parquet" or "arrow"), and rows of each row group."""

    path: str
    format: str
    rows_per_group: tuple[int, ...]


class ArrowSource:
    """Source of samples in Parquet and Arrow files; see ``open_data.Source``.

    Row groups are numbered over all files, in the order of ``files``. A window is a range of positions whose rows are
    shuffled among each other.

    Args:
        filesystem: file system of the files.
        files: files in their order.
        schema: schema of every file.
        seed: seed of the shuffled order.
        rows_per_window: minimum number of rows in a window; 0 keeps the file order.
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
        """Read samples of an epoch by position; see ``open_data.Source.read``."""
        names = [key_of(self._where(0), self.columns, column) for column in columns]
        check_range(self._where(0), self.num_samples, start, count)
        with self._lock:
            return by_request(columns, names, self._gather(epoch, start, count, list(dict.fromkeys(names))))

    def named(self, epoch: int, position: int) -> str:
        """Return the name of a sample for messages; see ``open_data.Source.named``."""
        with self._lock:
            ((group, rows, _),) = self._order(epoch).locate(position, 1)
        return f"row {self._first_row(group) + int(rows[0])} of {self._where(group)}"

    def _gather(self, epoch: int, start: int, count: int, names: list[str]) -> dict[str, torch.Tensor]:
        """Copy the samples of a ``read`` out of decoded windows into new tensors; return the tensors by column."""
        order = self._order(epoch)
        parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
        position = start
        # An empty read looks at a window too: it still has shapes and dtypes.
        while position < start + count or not all(parts.values()):
            first, stop = order.window_at(min(position, self.num_samples - 1))
            window = self._window(epoch, first, stop, names)
            for name, arrays in parts.items():
                arrays.append(window[name][position - first : start + count - first])
                if arrays[0].shape[1:] != arrays[-1].shape[1:]:
                    shapes = f"shapes {arrays[0].shape[1:]} and {arrays[-1].shape[1:]}"
                    raise DataError(ragged(name, shapes, self._where(0)))
            position = stop
        return {name: torch.from_numpy(np.concatenate(arrays)) for name, arrays in parts.items()}

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            while len(self._orders) >= _WINDOWS_KEPT:
                self._orders.popitem(last=False)
            self._orders[epoch] = EpochOrder(
                self._rows_per_group, seed=self._seed, epoch=epoch, rows_per_window=self._rows_per_window
            )
        return self._orders[epoch]

    def _window(self, epoch: int, first: int, stop: int, names: list[str]) -> dict[str, NDArray[Any]]:
        """Return the rows at positions ``first`` to ``stop`` - 1 of an epoch's order, in that order, by column.

        A whole window is decoded at once and cached, because the rows of even a small batch are spread over most row
        groups of the window.

        Args:
            first, stop: bounds of one window of ``EpochOrder``.
            names: columns to decode if they are not cached.

        Returns:
            The cached columns, which include ``names``; not to be changed.

        Raises:
            DataError: a column cannot become a tensor, or its rows differ in shape.
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
                    shapes = f"shapes {ordered[name].shape[1:]} and {values.shape[1:]}"
                    raise DataError(ragged(name, shapes, self._where(group)))
                ordered[name][places] = values[rows]
        window.update(ordered)
        return window

    def _table(self, group: int, names: list[str]) -> pa.Table:
        """Read columns of a row group; if the file is damaged, raise a DataError that names the file and the rows."""
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
        """Return the open Parquet file of this index, cached, so that its footer is not parsed for every row group."""
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
                f"Data file {path} was not found on this machine. Put the data where every node can read it: "
                "a shared folder, or s3:// and the like."
            ) from error

    def _first_row(self, group: int) -> int:
        """Return the index of a row group's first row in its file."""
        file, index = self._groups[group]
        return sum(self._files[file].rows_per_group[:index])

    def _where(self, group: int) -> str:
        return self._files[self._groups[group][0]].path


def survey(
    filesystem: pyarrow.fs.FileSystem, paths: Sequence[tuple[str, str]]
) -> tuple[list[DataFile], pa.Schema, int]:
    """Read row counts and schema of the files from their footers.

    Args:
        filesystem: file system of the files.
        paths: (path, "parquet" or "arrow") of each file.

    Returns:
        (files that have rows, their schema, default of ``rows_per_window`` in ArrowSource).

    Raises:
        DataError: a file is damaged or has other columns than the first file, or all files are empty.
    """
    files: list[DataFile] = []
    schema: pa.Schema | None = None
    decoded_bytes = 0
    for path, kind in paths:
        own, rows, size = _footer(filesystem, path, kind)
        if len(set(own.names)) < len(own.names):
            raise DataError(f"Data file {path} has two columns of one name: {_columns(own)}. Rename one of them.")
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
    """Read a file's footer: (schema, rows of each row group, decoded bytes); DataError if the file is damaged."""
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

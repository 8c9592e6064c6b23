"""Storage of files: a folder of this machine, a bucket, or any pyarrow file system.

    run = Place.of("s3://bucket/runs/lm")
    run.write_bytes("plan.json", text)          # complete or absent
    run.append_bytes("events.jsonl", line)

A write never shows half a file under its name:

    this machine    name.partial -> fsync -> rename -> fsync of the folder
    object store    one put, which is atomic
    anything else   name.partial -> move

(name.partial may be elsewhere below the run's folder, see ``Place.write_bytes``.)

The message of a failure is one paragraph: the place, the cause, the remedy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.fs

from raypipe.config.paths import absolute_path, is_address
from raypipe.errors import CheckpointError

Write = Callable[[Any], Any]
"""Function that writes the data given to it: bytes, a memoryview or a pyarrow.Buffer."""


_OBJECT_STORES = {"s3", "gcs", "abfs"}
_UNQUOTED = "/:=,+@!$&'()*;~"
"""Characters that are not percent-encoded in the path of a URI."""


class PlaceError(CheckpointError):
    """Failure of storage (full, forbidden, unreachable); the files may be intact."""


class Listed(NamedTuple):
    """Entry of a folder: its name within the folder, and True if it is a folder itself."""

    name: str
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Path of a file or folder on a file system; it need not exist.

    Methods take a name relative to this path; "" means the path itself.

    Attributes:
        filesystem: a pyarrow.fs.FileSystem. The base of a SubTreeFileSystem is moved into ``path``.
        path: path in the form of that file system, without a slash at the end.
        before, query: parts of the URI before and after ``path``, such as ``s3://`` and ``?endpoint_override=...``, so
            that ``Place.of(str(place))`` equals ``place``. Empty for a local path or an explicit file system.
    """

    filesystem: Any
    path: str
    before: str = field(default="", compare=False)
    query: str = field(default="", compare=False)

    @classmethod
    def of(cls, location: str | os.PathLike[str] | Place, filesystem: Any = None, *, written: bool = False) -> Place:
        """Create the Place of a path or URI; return a Place unchanged.

        Args:
            location: a local path or a URI such as s3://bucket/runs; see ``raypipe.config.paths``.
            filesystem: file system on which ``location`` is a path, as in RunConfig(storage_filesystem=...); None
                selects the file system by the URI.
            written: True if a run writes to the place; see ``absolute_path``.

        Raises:
            ConfigError: the URI has credentials, or an unset variable.
            PlaceError: ``location`` is no path, or a URI of an unknown kind.
        """
        if isinstance(location, Place):
            return location
        if not isinstance(location, str | os.PathLike) or not isinstance(text := os.fspath(location), str):
            raise PlaceError(f"{location!r} is not a path: give a path, or a URI such as s3://bucket/runs.")
        if filesystem is not None:
            return cls._on(filesystem, text)
        text = absolute_path(text, written=written)
        if not is_address(text):
            return cls(pyarrow.fs.LocalFileSystem(), text)
        with _explained(f"The place {text} cannot be used"):
            place = cls._on(*pyarrow.fs.FileSystem.from_uri(text))
        return place if place.is_local else replace(place, **_around(text, place.path))

    @classmethod
    def _on(cls, filesystem: Any, path: str) -> Place:
        with _explained(f"The place {path} cannot be used"):
            while isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
                filesystem, path = filesystem.base_fs, f"{filesystem.base_path.rstrip('/')}/{path.lstrip('/')}"
            return cls(filesystem, filesystem.normalize_path(path).rstrip("/"))

    def __truediv__(self, name: str) -> Place:
        """Return a place below this one.

        Raises:
            CheckpointError: ``name`` is empty or absolute, or contains ``.`` or ``..``.
        """
        parts = name.split("/")
        if "" in parts or "." in parts or ".." in parts:
            raise CheckpointError(
                f"{name!r} is not a name below {self}: it must not be empty, absolute, or contain '..'."
            )
        return replace(self, path=f"{self.path}/{name}" if self.path else name)

    def __str__(self) -> str:
        if self.is_local:
            return self.path
        if not self.before:
            return f"{self.filesystem.type_name}://{self.path}"
        return f"{self.before}{quote(self.path, safe=_UNQUOTED)}{self.query}"

    @property
    def is_local(self) -> bool:
        """True if the place is on this machine's file system."""
        return isinstance(self.filesystem, pyarrow.fs.LocalFileSystem)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    def exists(self, name: str = "") -> bool:
        """Return True if a file or folder exists."""
        return bool(self._info(name).type != pyarrow.fs.FileType.NotFound)

    def written_s(self, name: str = "") -> float | None:
        """Return the time of the last write in seconds since 1970; None if unknown."""
        written = self._info(name).mtime_ns
        return None if written is None else written / 1e9

    def size_bytes(self, name: str = "") -> int | None:
        """Return the size of a regular file; None if the name is that of a folder or a pipe, or does not exist."""
        info = self._info(name)
        return int(info.size) if info.type == pyarrow.fs.FileType.File else None

    def list(self, name: str = "") -> list[Listed]:
        """List the entries of a folder, sorted by name; empty if the folder does not exist."""
        place = self._below(name)
        with _explained(f"Listing {place} failed"):
            selector = pyarrow.fs.FileSelector(place.path, allow_not_found=True)
            entries = place.filesystem.get_file_info(selector)
        return sorted(Listed(info.base_name, info.type == pyarrow.fs.FileType.Directory) for info in entries)

    def open_input(self, name: str = "") -> Any:
        """Open the file for random access, as a pyarrow.NativeFile.

        Raises:
            CheckpointError: there is no regular file of this name.
            PlaceError: opening fails.
        """
        place = self._below(name)
        if place.size_bytes() is None:
            raise CheckpointError(f"There is no file {place}. Check the path.")
        with _explained(f"Opening {place} failed"):
            return place.filesystem.open_input_file(place.path)

    def read_bytes(self, name: str = "", most_bytes: int = 1 << 30) -> bytes:
        """Read the whole file.

        Raises:
            CheckpointError: there is no regular file, it cannot be read, or it is larger than ``most_bytes``.
        """
        place = self._below(name)
        with place.open_input() as file, place.reading():
            if file.size() > most_bytes:
                raise CheckpointError(f"{place} has {file.size()} bytes, more than the limit of {most_bytes}.")
            return bytes(file.read())

    def reading(self) -> AbstractContextManager[None]:
        """Return a context that converts file-system errors to PlaceError, with "reading this file" in the message."""
        return _explained(f"Reading {self} failed")

    def write_bytes(self, name: str, data: bytes | pa.Buffer, partial: str = "") -> None:
        """Replace the file completely, or leave it as it was.

        Args:
            partial: name, relative to this place, of the temporary file that is renamed once complete; "" means
                ``<name>.partial``. Name another folder if readers take all files in the folder of ``name`` as a table.
        """
        with self.writer(name, partial) as write:
            write(data)

    @contextmanager
    def writer(self, name: str = "", partial: str = "") -> Iterator[Write]:
        """Write a file piece by piece: ``with folder.writer("x") as write: write(data)``. Missing folders are created.

        If the block raises, the file stays as it was, except in an object store: pyarrow cannot cancel an upload, so
        the pieces written so far replace the file. A checksum in another file can detect this. For ``partial`` see
        ``write_bytes``.
        """
        place = self._below(name)
        unfinished = self / partial if partial else replace(place, path=f"{place.path}.partial")
        with _explained(f"Writing {place} failed"):
            manner = _write_local if place.is_local else _write_elsewhere
            with manner(place, unfinished) as write:
                yield write

    def append_bytes(self, name: str, data: bytes) -> None:
        """Append to the file. If the file system cannot append, the file is read and written anew."""
        place = self._below(name)
        with _explained(f"Appending to {place} failed"):
            try:
                place._make_parent()
                with place.filesystem.open_append_stream(place.path) as stream:
                    stream.write(data)
                return
            except NotImplementedError:  # object stores
                pass
        self.write_bytes(name, (place.read_bytes() if place.exists() else b"") + data)

    def rename(self, name: str, new: str) -> None:
        """Rename the file ``name`` of this folder to ``new``."""
        with _explained(f"Renaming {self / name} failed"):
            self.filesystem.move((self / name).path, (self / new).path)

    def delete(self, name: str = "") -> None:
        """Delete the file, or the folder with its content; do nothing if the name does not exist."""
        place, kinds = self._below(name), pyarrow.fs.FileType
        kind = place._info().type
        with _explained(f"Deleting {place} failed"), suppress(FileNotFoundError):
            if kind == kinds.Directory:
                place.filesystem.delete_dir(place.path)
            elif kind != kinds.NotFound:
                place.filesystem.delete_file(place.path)

    def _below(self, name: str) -> Place:
        return self / name if name else self

    def _info(self, name: str = "") -> Any:
        place = self._below(name)
        with _explained(f"Looking for {place} failed"):
            return place.filesystem.get_file_info(place.path)

    def _make_parent(self) -> None:
        if self.filesystem.type_name not in _OBJECT_STORES and "/" in self.path:
            self.filesystem.create_dir(self.path.rsplit("/", 1)[0], recursive=True)


def _around(address: str, path: str) -> dict[str, str]:
    """Return the fields ``before`` and ``query`` of a Place: the parts of a URI before and after ``path``."""
    base, mark, query = address.partition("?")
    location, behind = unquote(base).rstrip("/"), mark + query
    if path and location.endswith(path):
        return {"before": location.removesuffix(path), "query": behind}
    scheme, _, rest = location.partition("://")
    container, _, host = rest.partition("/")[0].rpartition("@")  # abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/...
    if path.partition("/")[0] == container and host:
        return {"before": f"{scheme}://{host.replace('.dfs.', '.blob.')}/", "query": behind}
    return {"before": f"{scheme}://", "query": behind}


@contextmanager
def _write_local(place: Place, unfinished: Place) -> Iterator[Write]:
    target, partial = Path(place.path), Path(unfinished.path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            yield file.write
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    # The rename, and the name of a new folder, must survive a power cut too.
    for folder in (target.parent, target.parent.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _write_elsewhere(place: Place, unfinished: Place) -> Iterator[Write]:
    filesystem = place.filesystem
    path = place.path if filesystem.type_name in _OBJECT_STORES else unfinished.path
    place._make_parent()
    try:
        with filesystem.open_output_stream(path) as stream:
            yield stream.write
        if path != place.path:
            filesystem.move(path, place.path)
    except BaseException:
        if path != place.path:
            with suppress(OSError, pa.ArrowException):
                filesystem.delete_file(path)
        raise


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Convert file-system errors inside the context to PlaceError; ``doing`` begins its message."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, pa.ArrowException, NotImplementedError) as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise PlaceError(f"{doing}: {cause}. {_remedy(error, cause)}") from error


def _remedy(error: BaseException, cause: str) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "The disk is full: free some, keep fewer checkpoints (num_to_keep), or give another storage_path."
    forbidden = number in (errno.EACCES, errno.EPERM, errno.EROFS)
    if forbidden or "ACCESS_DENIED" in cause or "FORBIDDEN" in cause.upper():
        return "Permission denied: change the rights or credentials, or give another storage_path."
    if number in (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL) or isinstance(error, pa.ArrowInvalid):
        return "Give a storage_path that is a folder, an s3:// or gs:// URI, or a storage_filesystem for other places."
    return "Check that this machine reaches the place and that storage_path is right, then start again."

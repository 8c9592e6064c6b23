"""Where files lie: a folder of this machine, a bucket, or any pyarrow file system, behind one small face.

    run = Place.of("s3://bucket/runs/lm")
    run.write_bytes("plan.json", text)          # there whole or not at all
    run.append_bytes("events.jsonl", line)

A write never shows half a file under its name:

    this machine    name.partial -> fsync -> rename -> fsync of the folder
    object store    one put, which is atomic
    anything else   name.partial -> move

(name.partial may lie elsewhere below the run's folder, see ``Place.write_bytes``.)

Every failure is one paragraph: the place, the cause, what to do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs

from raypipe.errors import CheckpointError

__all__ = ["Listed", "Place", "PlaceError", "Write"]

Write = Callable[[Any], Any]
"""Takes bytes, a memoryview or a pyarrow.Buffer."""


_OBJECT_STORES = {"s3", "gcs", "abfs"}


class PlaceError(CheckpointError):
    """The place itself failed (full, forbidden, unreachable); says nothing about what lies there."""


class Listed(NamedTuple):
    """An entry of a folder: its name without the folder's, and whether it is a folder."""

    name: str
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A path on a file system; it need not exist. Methods take a name below it, or nothing for the path itself.

    Attributes:
        filesystem: a pyarrow.fs.FileSystem; never a SubTreeFileSystem, whose base is part of ``path``.
        path: in that file system's own form, without a slash at the end.
    """

    filesystem: Any
    path: str

    @classmethod
    def of(cls, location: str | os.PathLike[str] | Place, filesystem: Any = None) -> Place:
        """The place that a person means.

        Args:
            location: a local path (``~`` is the home folder) or a URI such as s3://bucket/runs.
            filesystem: takes ``location`` as a path on this file system, as RunConfig(storage_filesystem=...) does.

        Raises:
            PlaceError: no path, or a URI of an unknown kind.
        """
        if isinstance(location, Place):
            return location
        if not isinstance(location, str | os.PathLike) or not isinstance(text := os.fspath(location), str):
            raise PlaceError(f"{location!r} is no place: give a path, or a URI such as s3://bucket/runs.")
        if filesystem is None and "://" not in text:
            try:
                return cls(pyarrow.fs.LocalFileSystem(), str(Path(text).expanduser().absolute()))
            except RuntimeError:
                raise PlaceError(f"There is no user whose home folder {text} could be in. Give another path.") from None
        with _explained(f"The place {text} cannot be used"):
            if filesystem is None:
                filesystem, text = pyarrow.fs.FileSystem.from_uri(text)
            while isinstance(filesystem, pyarrow.fs.SubTreeFileSystem):
                filesystem, text = filesystem.base_fs, f"{filesystem.base_path.rstrip('/')}/{text.lstrip('/')}"
            return cls(filesystem, filesystem.normalize_path(text).rstrip("/"))

    def __truediv__(self, name: str) -> Place:
        """A place below this one; ``name`` may have slashes, but it leads nowhere else."""
        parts = name.split("/")
        if "" in parts or "." in parts or ".." in parts:
            raise CheckpointError(f"{name!r} is no name below {self}: it must not be empty, absolute, or climb up.")
        return Place(self.filesystem, f"{self.path}/{name}" if self.path else name)

    def __str__(self) -> str:
        return self.path if self.is_local else f"{self.filesystem.type_name}://{self.path}"

    @property
    def is_local(self) -> bool:
        """Whether this is an ordinary path of this machine."""
        return isinstance(self.filesystem, pyarrow.fs.LocalFileSystem)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit("/", 1)[-1]

    def exists(self, name: str = "") -> bool:
        """Whether anything is there."""
        return bool(self._info(name).type != pyarrow.fs.FileType.NotFound)

    def written_s(self, name: str = "") -> float | None:
        """When the file was last written, in seconds since 1970; None without it, or where the place does not say."""
        written = self._info(name).mtime_ns
        return None if written is None else written / 1e9

    def size_bytes(self, name: str = "") -> int | None:
        """Of the ordinary file there; None where there is no such file (a pipe is none)."""
        info = self._info(name)
        return int(info.size) if info.type == pyarrow.fs.FileType.File else None

    def list(self, name: str = "") -> list[Listed]:
        """What lies directly in this folder, by name; nothing where there is no folder."""
        place = self._below(name)
        with _explained(f"Listing {place} failed"):
            selector = pyarrow.fs.FileSelector(place.path, allow_not_found=True)
            found = place.filesystem.get_file_info(selector)
        return sorted(Listed(info.base_name, info.type == pyarrow.fs.FileType.Directory) for info in found)

    def open_input(self, name: str = "") -> Any:
        """The file, opened for reading at any position (a pyarrow.NativeFile).

        Raises:
            CheckpointError: there is no ordinary file; PlaceError where reading fails.
        """
        place = self._below(name)
        if place.size_bytes() is None:
            raise CheckpointError(f"There is no file {place}. Check the path.")
        with _explained(f"Opening {place} failed"):
            return place.filesystem.open_input_file(place.path)

    def read_bytes(self, name: str = "", most_bytes: int = 1 << 30) -> bytes:
        """The whole file.

        Raises:
            CheckpointError: there is no ordinary file, or it is larger than ``most_bytes``.
        """
        place = self._below(name)
        with place.open_input() as file, place.reading():
            if file.size() > most_bytes:
                raise CheckpointError(f"{place} has {file.size()} bytes, more than the {most_bytes} that make sense.")
            return bytes(file.read())

    def reading(self) -> AbstractContextManager[None]:
        """Inside, what an opened file raises becomes a PlaceError."""
        return _explained(f"Reading {self} failed")

    def write_bytes(self, name: str, data: bytes | pa.Buffer, partial: str = "") -> None:
        """Replace the file: afterwards it is there whole, or what was there before still is.

        Args:
            partial: name below this place that the file has until it is whole, where that is not to be next to it:
                in a folder that others read as one table.
        """
        with self.writer(name, partial) as write:
            write(data)

    @contextmanager
    def writer(self, name: str = "", partial: str = "") -> Iterator[Write]:
        """Like write_bytes, piece by piece: ``with folder.writer("x") as write: write(data)``. Makes the folders.

        If the block raises, what was there before stays; in an object store, whose uploads cannot be dropped through
        pyarrow, the pieces so far take its place. Write only there what a checksum elsewhere vouches for.
        """
        place = self._below(name)
        unfinished = self / partial if partial else Place(place.filesystem, f"{place.path}.partial")
        with _explained(f"Writing {place} failed"):
            manner = _write_local if place.is_local else _write_elsewhere
            with manner(place, unfinished) as write:
                yield write

    def append_bytes(self, name: str, data: bytes) -> None:
        """Add to the end of the file; where the place cannot do that, the file is written anew."""
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
        """Give a file of this folder another name."""
        with _explained(f"Renaming {self / name} failed"):
            self.filesystem.move((self / name).path, (self / new).path)

    def delete(self, name: str = "") -> None:
        """Remove the file, or the folder with all that is in it; nothing happens where nothing is."""
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
    # The rename, and the folder's own name where it is new, must outlive a power cut too.
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
    """Turn what a file system raises into one paragraph."""
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
        return "There is no room: free some, keep fewer checkpoints (num_to_keep), or give another storage_path."
    forbidden = number in (errno.EACCES, errno.EPERM, errno.EROFS)
    if forbidden or "ACCESS_DENIED" in cause or "FORBIDDEN" in cause.upper():
        return "This process may not do that: change the rights or credentials, or give another storage_path."
    if number in (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL) or isinstance(error, pa.ArrowInvalid):
        return "Give a storage_path that is a folder, an s3:// or gs:// URI, or a storage_filesystem for other places."
    return "Check that this machine reaches the place and that storage_path is right, then start again."

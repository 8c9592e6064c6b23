"""Places: one contract for every kind of file system, whole files or none, and errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.fs
import pytest

from raypipe.engine.io.storage import Place, PlaceError
from raypipe.errors import CheckpointError
from tests.checkpoints import memory_places

ROOT = Path(__file__).parents[3]
KINDS = memory_places()


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with KINDS[request.param](tmp_path) as made:
        yield made


class TestContract:
    def test_what_is_written_is_read(self, place: Place) -> None:
        place.write_bytes("a/b/file", b"one")
        assert place.read_bytes("a/b/file") == (place / "a" / "b/file").read_bytes() == b"one"
        assert (place / "a/b").size_bytes("file") == 3

    def test_a_file_is_replaced_and_no_partial_one_is_left(self, place: Place) -> None:
        for data in (b"a long one", b"x", b""):
            place.write_bytes("file", data)
            assert place.read_bytes("file") == data
        assert [entry.name for entry in place.list()] == ["file"]

    def test_a_write_that_fails_leaves_what_was_there(self, place: Place) -> None:
        place.write_bytes("file", b"before")

        def interrupted() -> None:
            with place.writer("file") as write:
                write(b"half of")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert place.read_bytes("file") == b"before"
        assert [entry.name for entry in place.list()] == ["file"]

    def test_pieces_of_any_kind_are_written_in_order(self, place: Place) -> None:
        with place.writer("file") as write:
            write(b"a")
            write(memoryview(bytearray(b"bc")))
            write(pa.py_buffer(b"d"))
        assert place.read_bytes("file") == b"abcd"

    def test_lines_are_appended(self, place: Place) -> None:
        for line in (b"one\n", b"two\n"):
            place.append_bytes("log/events", line)
        assert place.read_bytes("log/events") == b"one\ntwo\n"

    def test_what_is_not_there(self, place: Place) -> None:
        assert (place.list(), place.exists(), place.exists("x"), place.size_bytes("x")) == ([], False, False, None)
        place.delete()
        place.delete("x")
        with pytest.raises(CheckpointError, match=r"There is no file .*x"):
            place.read_bytes("x")

    def test_folders_are_listed_and_deleted_with_what_is_in_them(self, place: Place) -> None:
        place.write_bytes("folder/deep/file", b"1")
        place.write_bytes("file", b"2")
        assert [tuple(entry) for entry in place.list()] == [("file", False), ("folder", True)]
        assert place.exists("folder")
        assert place.size_bytes("folder") is None
        place.delete("folder")
        assert [entry.name for entry in place.list()] == ["file"]
        place.delete("file")
        assert place.list() == []

    def test_a_file_is_renamed(self, place: Place) -> None:
        place.write_bytes("a/one", b"1")
        (place / "a").rename("one", "two")
        assert [entry.name for entry in place.list("a")] == ["two"]

    def test_reading_anywhere(self, place: Place) -> None:
        place.write_bytes("file", bytes(range(100)))
        target = bytearray(5)
        with place.open_input("file") as file:
            file.seek(40)
            assert (file.readinto(memoryview(target)), file.size()) == (5, 100)
        assert target == bytes(range(40, 45))

    def test_a_file_that_is_too_large_is_not_read(self, place: Place) -> None:
        place.write_bytes("file", b"12345")
        with pytest.raises(CheckpointError, match="5 bytes, more than the limit of 4"):
            place.read_bytes("file", most_bytes=4)

    @pytest.mark.parametrize("name", ["..", "a/../../b", "/etc/passwd", "a//b", ".", "a/"])
    def test_no_name_leads_elsewhere(self, place: Place, name: str) -> None:
        with pytest.raises(CheckpointError, match="not a name below"):
            place / name


class _AppendsNothing(pyarrow.fs.FSSpecHandler):
    """As object stores do."""

    def open_append_stream(self, path: str, metadata: object) -> object:
        raise NotImplementedError("It is not possible to append efficiently to S3 objects")


def test_where_nothing_can_be_appended_the_file_is_written_anew() -> None:
    filesystem = pyarrow.fs.PyFileSystem(_AppendsNothing(fsspec.filesystem("memory", skip_instance_cache=True)))
    place = Place.of("/appends-nothing", filesystem)
    for line in (b"one\n", b"two\n"):
        place.append_bytes("events", line)
    assert place.read_bytes("events") == b"one\ntwo\n"
    place.delete()


def test_paths_uris_and_file_systems_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    local = pyarrow.fs.LocalFileSystem()
    subtree = pyarrow.fs.SubTreeFileSystem(str(tmp_path), local)
    given = [
        Place.of(tmp_path / "run"), Place.of("run"), Place.of("~/run"), Place.of(f"file://{tmp_path}/run/"),
        Place.of(str(tmp_path / "run"), local), Place.of("run", subtree), Place.of("/run", subtree),
    ]  # fmt: skip
    assert {place.path for place in given} == {str(tmp_path / "run")}
    assert {str(place) for place in given} == {str(tmp_path / "run")}
    assert Place.of(given[0]) is given[0]
    assert (given[0].name, given[0].is_local) == ("run", True)


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("s3://bucket?region=us-east-1", "bucket"),
        ("s3://bucket/runs/lm/?region=us-east-1", "bucket/runs/lm"),
        ("s3://bucket/runs?endpoint_override=http://127.0.0.1:9&region=us-east-1", "bucket/runs"),
        ("s3://bucket/my%20runs/100%25?endpoint_override=127.0.0.1:9&scheme=http", "bucket/my runs/100%"),
        ("gs://anonymous@bucket/runs?endpoint_override=127.0.0.1:9&scheme=http", "bucket/runs"),
        ("abfs://account.blob.core.windows.net/container/runs", "container/runs"),
        ("abfs://container@account.dfs.core.windows.net/runs", "container/runs"),
        ("file:///runs/lm", "/runs/lm"),
        ("/runs/lm", "/runs/lm"),
    ],
)
def test_a_printed_place_is_an_address_of_the_same_place(address: str, path: str) -> None:
    place = Place.of(address)
    assert (place.path, place.is_local) == (path, path.startswith("/"))
    for one in (place, place / "step 1", place / "a" / "b"):
        again = Place.of(str(one))
        assert (again.path, str(again)) == (one.path, str(one))
        assert again == one


def test_an_unknown_uri_is_refused() -> None:
    with pytest.raises(PlaceError, match=r"nowhere://a/b cannot be used: .*storage_filesystem"):
        Place.of("nowhere://a/b")


@pytest.mark.parametrize("location", [5, None, {}, b"runs", 5.0])
def test_what_is_no_path_is_refused(location: Any) -> None:
    with pytest.raises(PlaceError, match=r"is not a path: give a path"):
        Place.of(location)


@pytest.mark.slow
def test_an_unreachable_store_is_one_paragraph() -> None:
    """A real S3 client and a port that nobody listens on."""
    once = pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=1)
    nobody = pyarrow.fs.S3FileSystem(
        access_key="a", secret_key="b", endpoint_override="127.0.0.1:9", scheme="http", region="x",
        retry_strategy=once, connect_timeout=1, request_timeout=1,
    )  # fmt: skip
    place = Place.of("bucket/run", nobody)
    begin_s = time.monotonic()
    for attempt in (lambda: place.write_bytes("x", b"1"), lambda: place.exists("x"), lambda: place.list()):
        with pytest.raises(PlaceError, match=r"s3://bucket/run.* failed: .* Check that this machine reaches") as error:
            attempt()
        assert "\n" not in str(error.value)
    assert time.monotonic() - begin_s < 60


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PlaceError, match=r"Writing .*file/run/x failed: .* Give a storage_path that is a folder"):
        Place.of(tmp_path / "file" / "run").write_bytes("x", b"1")


WRITES = """
import sys
from raypipe.engine.io.storage import Place, PlaceError
place = Place.of(sys.argv[1])
for write in (place.write_bytes, place.append_bytes):
    try:
        write("x", b"y" * 500_000)
    except PlaceError as error:
        print(error, place.list() if write == place.write_bytes else "")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("size=200k", ("No space left on device", "free some, keep fewer checkpoints (num_to_keep), or give another")),
        ("ro", ("Read-only file system", "change the rights or credentials, or give another storage_path")),
    ],
)
def test_a_disk_that_is_full_or_must_not_be_written(options: str, words: tuple[str, str], tmp_path: Path) -> None:
    """A real one, in a private mount namespace: skips without the rights."""
    mount = f'mount -t tmpfs -o {options} tmpfs "$1" || exit 77; exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount]
    command += ["sh", str(tmp_path), sys.executable, WRITES]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"no rights to mount: {done.stderr.strip()[:100]}")
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    for line, doing in zip(told, ("Writing", "Appending to"), strict=True):
        assert line.startswith(f"{doing} {tmp_path}"), line
        assert all(part in line for part in words), line
    assert told[0].endswith(" []"), "nothing half is left"


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Opening one for reading would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="There is no file"):
        Place.of(tmp_path).read_bytes("pipe")

"""Whatever happened to a checkpoint's files: it is refused by name, an older one is taken, nothing else is read.

Never another exception, never other numbers than those that were saved.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe import __version__, load_state_dict
from raypipe.engine.initial.weight_files import tensors_of
from raypipe.engine.io.checkpoint import checkpoint_name, find_checkpoint, load_stage, open_checkpoint
from raypipe.engine.io.checkpoint.manifest import _digest
from raypipe.engine.io.checkpoint.tensor_file import TensorFile, write_tensors
from raypipe.engine.io.storage import Place, PlaceError
from raypipe.errors import CheckpointError
from tests.checkpoints import small_checkpoint, small_stage
from tests.exactness import same_bits

Files = dict[str, bytes]
FOLDER = checkpoint_name(2)
NAMES = ["manifest.json", *(f"stage_{i}{kind}.safetensors" for i in (0, 1) for kind in ("", ".optimizer"))]


def memory() -> Place:
    return Place.of("run", pyarrow.fs._MockFileSystem())


@cache
def good() -> tuple[Files, Files, dict[str, torch.Tensor]]:
    """Files of checkpoints 1 and 2 of a run, and the tensors of the second."""
    run = memory()
    found = []
    for step in (1, 2):
        place = small_checkpoint(run, step, scale=float(step))
        found.append({name: place.read_bytes(name) for name in NAMES})
    return found[0], found[1], load_state_dict(run.path, storage_filesystem=run.filesystem)


def laid_out(second: Files) -> Place:
    """A run in memory with a good first checkpoint and these files as the second."""
    run = memory()
    for folder, files in ((checkpoint_name(1), good()[0]), (FOLDER, second)):
        for name, data in files.items():
            run.write_bytes(f"{folder}/{name}", data)
    return run


def check(second: Files, *, refused: bool | None = None) -> str:
    """Refused with a reason, or exactly what was saved; returns the reason.

    Args:
        refused: which of both it must be.
    """
    run = laid_out(second)
    checkpoint, refusals = find_checkpoint(run)
    assert checkpoint is not None
    if checkpoint.manifest.step == 2:
        assert refused is not True
        assert refusals == ()
        state = load_state_dict((run / FOLDER).path, storage_filesystem=run.filesystem)
        assert all(same_bits(state[name], tensor) for name, tensor in good()[2].items())
        return ""
    assert refused is not False
    (refusal,) = refusals
    assert refusal.name == FOLDER
    with pytest.raises(CheckpointError, match=re.escape(refusal.reason)):
        load_state_dict((run / FOLDER).path, storage_filesystem=run.filesystem)
    assert "\n" not in refusal.reason
    return refusal.reason


def resealed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The manifest of the second checkpoint changed by somebody who knows how its checksum is made."""
    body = json.loads(good()[1]["manifest.json"])
    del body["sha256"]
    body = change(body) or body
    return json.dumps({**body, "sha256": _digest(body)} if isinstance(body, dict) else body).encode()


def test_an_undamaged_one_is_taken() -> None:
    check(good()[1], refused=False)
    check({**good()[1], "manifest.json": resealed(lambda body: None)}, refused=False)


@pytest.mark.slow
@settings(max_examples=120)
@given(name=st.sampled_from(NAMES), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit(name: str, at: float, bit: int) -> None:
    data = bytearray(good()[1][name])
    data[int(at * len(data))] ^= 1 << bit
    # A space between two tokens of the manifest may become another one; nothing else may change unseen.
    check({**good()[1], name: bytes(data)}, refused=None if name == "manifest.json" else True)


@pytest.mark.slow
@settings(max_examples=40)
@given(name=st.sampled_from(NAMES), at=st.floats(0, 1, exclude_max=True), tail=st.binary(max_size=20))
def test_a_torn_file(name: str, at: float, tail: bytes) -> None:
    whole = good()[1][name]
    data = whole[: int(at * len(whole))] + tail
    if data != whole:
        check({**good()[1], name: data}, refused=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_gone_or_grew_or_is_a_folder(name: str) -> None:
    assert name in check({other: data for other, data in good()[1].items() if other != name}, refused=True)
    check({**good()[1], name: good()[1][name] + b"\0"}, refused=True)
    second = {other: data for other, data in good()[1].items() if other != name}
    check({**second, f"{name}/x": b""}, refused=True)


@pytest.mark.parametrize("one", NAMES)
@pytest.mark.parametrize("other", NAMES)
def test_swapped_files(one: str, other: str) -> None:
    files = good()[1]
    check({**files, one: files[other], other: files[one]}, refused=one != other)
    check({**files, one: good()[0][one]}, refused=True)  # from another checkpoint of the same run


def test_a_whole_checkpoint_under_the_name_of_another() -> None:
    assert "has the manifest of step 1" in check_find(good()[0])


def check_find(second: Files) -> str:
    checkpoint, refusals = find_checkpoint(laid_out(second))
    assert checkpoint is not None
    assert checkpoint.manifest.step == 1
    return refusals[0].reason


PATHS = ["../../etc/passwd", "../step_0000001/stage_0.safetensors", f"{'/'}etc/passwd", "stage_1.safetensors", "", ".",
         "stage_0.safetensors/../stage_0.safetensors", "file:///x", "stage_0.safetensors\0"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["tensors", "optimizer"])
def test_no_manifest_leads_out_of_its_folder(path: str, kind: str) -> None:
    """Even if what lies there is a good shard of the right size and checksum."""

    def elsewhere(body: dict[str, Any]) -> None:
        body["stages"][0][kind]["file"] = path

    reason = check({**good()[1], "manifest.json": resealed(elsewhere)}, refused=True)
    assert f"{kind}, file: {path[:80]!r} is not 'stage_0" in reason


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where everything in a JSON value is."""
    found = [at]
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += paths(inner, (*at, key))
    return found


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_any_field_may_be_anything(data: st.DataObject) -> None:
    """Resealed: no exception but ours and no other tensors, also when a stage is loaded."""
    places = paths(json.loads(good()[1]["manifest.json"]))
    path = data.draw(st.sampled_from([place for place in places if place != ("sha256",)]))
    value = data.draw(ANY_JSON)

    def change(body: dict[str, Any]) -> Any:
        if not path:
            return value
        target = body
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = value
        return None

    files = {**good()[1], "manifest.json": resealed(change)}
    run = laid_out(files)
    checkpoint, refusals = find_checkpoint(run)
    assert checkpoint is not None
    if checkpoint.manifest.step == 1:
        assert [refusal.name for refusal in refusals] == [FOLDER]
        return
    state = load_state_dict((run / FOLDER).path, storage_filesystem=run.filesystem)
    assert all(same_bits(state[name], tensor) for name, tensor in good()[2].items())
    (program, *_), (fresh, *_) = small_stage(1)
    try:
        load_stage(checkpoint, program, fresh)
    except CheckpointError:
        return
    assert all(same_bits(fresh.parameters[name].detach(), tensor) for name, tensor in good()[2].items())


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_any_field_may_be_gone_or_twice(data: st.DataObject) -> None:
    whole = json.loads(good()[1]["manifest.json"])
    path = data.draw(st.sampled_from([place for place in paths(whole) if place and isinstance(place[-1], str)]))
    if path[-1] == "sha256" and len(path) == 1:
        return
    extra = data.draw(st.booleans())

    def change(body: dict[str, Any]) -> None:
        target: Any = body
        for key in path[:-1]:
            target = target[key]
        value = target.pop(path[-1])
        if extra:
            target[path[-1]] = value
            target["surplus"] = value

    if path[-2:-1] in [("options",), ("metrics",), ("versions",), ("aliases",)] or "scalars" in path[:-1]:
        return  # these have no fixed names
    check({**good()[1], "manifest.json": resealed(change)}, refused=True)


def text_of(files: Mapping[str, bytes]) -> str:
    return files["manifest.json"].decode()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"step": 2,', '"step": 2, "step": 2,', "a name occurs twice"),
        ('"lr": 0.01', '"lr": NaN', "NaN is not a number"),
        ('"lr": 0.01', '"lr": -Infinity', "-Infinity is not a number"),
        ('"lr": 0.01', '"lr": 1e999', "1e999 is too large"),
        ('"lr": 0.01', '"lr": ' + "9" * 5000, "is not valid JSON"),
        ('"lr": 0.01', '"lr": ' + "[" * 100_000, "is not valid JSON"),
        ('"lr": 0.01', '"lr": 0.02', "its checksum differs"),
        (
            '"format": 3',
            '"format": 5',
            f"has format 5; this is raypipe {__version__}, which reads up to format 4. Use raypipe {__version__}",
        ),
        ('"format": 3', '"format": 3.0', "has format 3.0"),
        ('"format": 3', '"format": 2', "its checksum differs"),
        ('"format"', '"form"', "has format None"),
        ("{", "[", "is not valid JSON"),
        ("layers", "\\ud800", "its checksum differs"),
    ],
)
def test_what_is_no_manifest(old: str, new: str, words: str) -> None:
    assert old in text_of(good()[1])
    damaged = text_of(good()[1]).replace(old, new, 1)
    assert words in check({**good()[1], "manifest.json": damaged.encode()}, refused=True)


@pytest.mark.parametrize("surplus", [False, True])
def test_a_manifest_of_the_release_before(surplus: bool) -> None:
    """Format 2 knew neither generation nor holder."""

    def older(body: dict[str, Any]) -> None:
        body["format"] = 2
        for name in ("generation", "holder"):
            if not surplus:
                del body[name]

    check({**good()[1], "manifest.json": resealed(older)}, refused=surplus)


def test_names_twice() -> None:
    def in_one_shard(body: dict[str, Any]) -> None:
        body["stages"][0]["tensors"]["names"].append("layers.0.weight")

    def in_two_groups(body: dict[str, Any]) -> None:
        body["stages"][0]["groups"].append(copy.deepcopy(body["stages"][0]["groups"][0]))

    def in_two_stages(body: dict[str, Any]) -> None:
        body["stages"][1]["tensors"]["names"].append("layers.0.weight")

    def of_nobody(body: dict[str, Any]) -> None:
        body["stages"][0]["tensors"]["names"][0] = "elsewhere"
        body["stages"][0]["groups"][0]["parameters"][0] = "elsewhere"

    for change in (in_one_shard, in_two_groups, in_two_stages, of_nobody):
        check({**good()[1], "manifest.json": resealed(change)}, refused=True)


def test_a_buffer_of_two_stages_must_be_the_same() -> None:
    """A stage's file may hold a constant buffer that an earlier stage has too; another value is a forgery."""
    for value, refused in ((1.0, False), (2.0, True)):
        run = memory()
        body = json.loads(good()[1]["manifest.json"])
        for stage, number in ((0, 1.0), (1, value)):
            shard = body["stages"][stage]["tensors"]
            with TensorFile(laid_out(good()[1]) / f"{FOLDER}/{shard['file']}") as file:
                tensors = {name: file.read(name) for name in file.tensors} | {"mask": torch.tensor([number])}
            with run.writer(f"{FOLDER}/{shard['file']}") as write:
                shard["size_bytes"], shard["sha256"] = write_tensors(write, tensors)
            shard["names"].append("mask")
        files = {
            **good()[1],
            "manifest.json": resealed(lambda _, body=body: {k: v for k, v in body.items() if k != "sha256"}),
        }
        files |= {name: run.read_bytes(f"{FOLDER}/{name}") for name in ("stage_0.safetensors", "stage_1.safetensors")}
        reason = check(files, refused=refused)
        assert ("its 'mask' is not that of stage 0" in reason) == refused


class TestTensorFileHeaders:
    """The reader alone, without a checksum before it."""

    def opened(self, data: bytes) -> dict[str, torch.Tensor]:
        place = memory()
        place.write_bytes("file", data)
        with TensorFile(place / "file") as file:
            return {name: file.read(name) for name in file.tensors}

    def with_header(self, header: Any, body: bytes = b"") -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + body

    @pytest.mark.slow
    @settings(max_examples=150)
    @given(st.data())
    def test_any_header(self, data: st.DataObject) -> None:
        entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
        more = {"dtype": "U8", "shape": [], "data_offsets": [24, 25]}
        header: Any = {"a": entry, "b": more}
        path = data.draw(st.sampled_from(paths(header)))
        value = data.draw(ANY_JSON | st.lists(st.integers(-3, 1 << 64), max_size=3))
        if path:
            target = header
            for key in path[:-1]:
                target = target[key]
            target[path[-1]] = value
        else:
            header = value
        try:
            found = self.opened(self.with_header(header, bytes(25)))
        except CheckpointError:
            return
        assert sum(tensor.nbytes for tensor in found.values()) == 25

    @given(st.binary(max_size=60))
    def test_any_bytes(self, data: bytes) -> None:
        try:
            assert self.opened(data) == {}
        except CheckpointError:
            return
        assert int.from_bytes(data[:8], "little") == len(data) - 8

    @pytest.mark.parametrize(
        ("shape", "end"),
        [([1 << 61, 1 << 61], 25), ([0, 1 << 61, 4], 0), ([1 << 62], 25), ([1] * 65, 4), ([10**4000], 25), ([True], 4)],
    )
    def test_shapes_that_are_not_allocated(self, shape: list[int], end: int) -> None:
        header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}
        with pytest.raises(CheckpointError, match="not a valid safetensors file"):
            self.opened(self.with_header(header, bytes(end)))


class TestFinding:
    def test_the_newest_good_one_is_taken_and_the_others_are_told(self) -> None:
        run = laid_out(good()[1])
        run.write_bytes(f"{checkpoint_name(3)}/stage_0.safetensors", b"not finished")
        run.write_bytes(f"{checkpoint_name(10)}/manifest.json", b"{")
        run.write_bytes("checkpoints/step_x/manifest.json", b"{")
        run.write_bytes("checkpoints/notes", b"")
        checkpoint, refusals = find_checkpoint(run)
        assert checkpoint is not None
        assert checkpoint.manifest.step == 2
        assert [refusal.name for refusal in refusals] == [checkpoint_name(10), checkpoint_name(3)]
        assert "is not valid JSON" in refusals[0].reason
        assert "has no manifest.json" in refusals[1].reason

    def test_nothing_good(self) -> None:
        run = memory()
        run.write_bytes(f"{FOLDER}/manifest.json", b"{")
        found, (refusal,) = find_checkpoint(run)
        assert found is None
        with pytest.raises(CheckpointError, match="holds no complete checkpoint") as error:
            load_state_dict(run.path, storage_filesystem=run.filesystem)
        assert refusal.reason in str(error.value)
        with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
            open_checkpoint(run)

    def test_a_place_that_fails_is_not_an_empty_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else a run would begin anew because of a network that is down for a second."""
        run = laid_out(good()[1])

        def unreachable(*_: Any, **__: Any) -> bytes:
            raise PlaceError("Reading failed")

        with monkeypatch.context() as patch:
            patch.setattr(Place, "read_bytes", unreachable)
            with pytest.raises(PlaceError):
                find_checkpoint(run)

    def test_by_path_by_uri_and_by_file_system(self, tmp_path: Path) -> None:
        place = small_checkpoint(Place.of(tmp_path), 2, scale=2.0)
        for path in (tmp_path, str(tmp_path), tmp_path.as_uri(), place.path, Path(place.path).as_uri()):
            assert all(same_bits(load_state_dict(path)[name], tensor) for name, tensor in good()[2].items())
        with pytest.raises(CheckpointError, match=r"nowhere holds no complete checkpoint.*Give a run folder"):
            load_state_dict(tmp_path / "nowhere")


def test_a_file_that_changes_after_the_check_is_refused() -> None:
    """Between the manifest and the tensors another run may write there."""
    run = laid_out(good()[1])
    checkpoint = open_checkpoint(run / FOLDER)
    assert {name: tensor.shape for name, tensor in tensors_of(checkpoint).items()} == {
        name: tuple(tensor.shape) for name, tensor in good()[2].items()
    }
    run.write_bytes(f"{FOLDER}/stage_0.safetensors", good()[1]["stage_1.safetensors"])
    with pytest.raises(CheckpointError, match=r"stage_0\.safetensors changed while it was read"):
        tensors_of(checkpoint)

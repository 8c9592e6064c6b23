"""Exported files hold every tensor once, under its original name, in files no larger than asked for."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from raypipe.api.export import _parts, export_hugging_face, export_safetensors, shared_names
from raypipe.engine.io.checkpoint import load_state_dict
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError, ConfigError
from tests.checkpoints import small_checkpoint

pytestmark = pytest.mark.engine


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(small_checkpoint(Place.of(tmp_path / "run"), 3).path)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_older_checkpoint_than_the_newest_is_not_taken_in_silence(checkpoint: Path, tmp_path: Path) -> None:
    run = checkpoint.parent.parent
    newest = Path(small_checkpoint(Place.of(run), 5).path)
    file = max(newest.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    for read in (lambda: export_safetensors(run, tmp_path / "x.safetensors"), lambda: load_state_dict(run)):
        with pytest.warns(
            UserWarning, match=r"step_0000005 is passed over, and .*step_0000003 is read.*checksum differs"
        ):
            read()
    assert same(load_file(tmp_path / "x.safetensors"), load_state_dict(checkpoint))


def test_what_cannot_be_done_is_said(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        export_safetensors(tmp_path / "nothing", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(CheckpointError, match="cannot be written"):
        export_safetensors(checkpoint, checkpoint / "manifest.json" / "x")
    with pytest.raises(ConfigError, match="is there already"):
        export_hugging_face(checkpoint, checkpoint)
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        export_hugging_face(checkpoint, tmp_path / "hf", tmp_path)
    assert not (tmp_path / "hf").exists()


def test_shared_tensors_are_found_and_views_are_not_taken_for_them() -> None:
    one, other = torch.arange(6.0).view(2, 3), torch.zeros(0)
    state = {"a": one, "b": one, "turned": one.T, "part": one[:1], "c": one, "empty": other, "nothing": other}
    assert shared_names(state) == {"b": "a", "c": "a"}


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 60))
def test_files_keep_the_order_and_stay_below_the_limit(sizes: list[int], limit: int) -> None:
    state = {str(i): torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    parts = _parts({name: tensor.nbytes for name, tensor in state.items()}, limit)
    assert [name for part in parts for name in part] == list(state)
    assert all(parts)
    for part in parts:
        assert len(part) == 1 or sum(state[name].nbytes for name in part) <= limit
    for left, right in itertools.pairwise(parts):  # the next one would not have fitted
        assert sum(state[name].nbytes for name in [*left, right[0]]) > limit

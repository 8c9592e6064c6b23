"""Profiles are kept: measured once, anew where the file is damaged or the model another."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.capture import Capture, capture
from raypipe.profiling import Rates, estimate_graph, profile_cache
from raypipe.profiling.profile_cache import (
    JsonCache,
    cache_folder,
    cached_estimate,
    cached_profile,
    load_profile,
    profile_key,
    save_profile,
)
from tests import nets
from tests.exactness import captured
from tests.models import CASES
from tests.profiling.test_measure import columns_of, profiled


def made_of(model: nn.Module, samples: int = 4, loss_fn: Any = functional.cross_entropy) -> Capture:
    x, y = CASES["mlp"].data(samples)[:samples]
    return capture(model, (x, y), (0, 1), loss_fn)


def test_a_profile_is_measured_once(tmp_path: Path) -> None:
    made, columns = captured("mlp")[1], columns_of("mlp")
    first, was_read = cached_profile(made, columns, folder=tmp_path)
    assert not was_read
    called: list[int] = []
    again, was_read = cached_profile(made, columns, folder=tmp_path, progress=lambda d, t: called.append(d))
    assert (again, was_read, called) == (first, True, [])
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]
    same = made_of(CASES["mlp"].model())  # built and traced anew, other weights
    assert cached_profile(same, columns, folder=tmp_path) == (first, True)


def test_a_key_changes_with_the_model_and_its_data() -> None:
    columns = columns_of("mlp")
    wider = {**columns, 0: torch.cat([columns[0]] * 2), 1: torch.cat([columns[1]] * 2)}
    frozen = nets.frozen(nets.Mlp(), "layers.0")
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    keys = {
        "as it is": profile_key(captured("mlp")[1], columns, (1, 2), 5),
        "other samples": profile_key(captured("mlp")[1], wider, (1, 2), 5),
        "other sizes": profile_key(captured("mlp")[1], columns, (1, 2, 4), 5),
        "other widths": profile_key(made_of(nets.Mlp((6, 9, 8, 8, 3))), columns, (1, 2), 5),
        "other order": profile_key(made_of(nets.Backwards()), columns, (1, 2), 5),
        "frozen": profile_key(made_of(frozen), columns, (1, 2), 5),
        "other loss": profile_key(made_of(nets.Mlp(), loss_fn=smooth), columns, (1, 2), 5),
        "sequential": profile_key(made_of(nets.sequential()), columns, (1, 2), 5),
        "other children": profile_key(made_of(nets.dropout_sequential()), columns, (1, 2), 5),
    }
    assert len(set(keys.values())) == len(keys)
    assert profile_key(made_of(nets.sequential()), columns, (1, 2), 5) == keys["sequential"]
    assert profile_key(made_of(nets.Mlp(), loss_fn=smooth), columns, (1, 2), 5) == keys["other loss"]


def test_an_estimate_is_made_once_for_each_device(tmp_path: Path) -> None:
    made, columns = captured("mlp")[1], columns_of("mlp")
    slow, fast = Rates(1e9, 1e9), Rates(1e12, 1e11)
    kept = {rates: cached_estimate(made, columns, rates, sizes=(1, 2), folder=tmp_path) for rates in (slow, fast)}
    samples = len(columns[0])
    assert kept == {rates: (estimate_graph(made, samples, rates, sizes=(1, 2)), False) for rates in (slow, fast)}
    again = {rates: cached_estimate(made, columns, rates, sizes=(1, 2), folder=tmp_path) for rates in (slow, fast)}
    assert again == {rates: (profile, True) for rates, (profile, _) in kept.items()}
    wider = {**columns, 0: torch.cat([columns[0]] * 2), 1: torch.cat([columns[1]] * 2)}
    assert not cached_estimate(made, wider, slow, sizes=(1, 2), folder=tmp_path)[1]
    assert not cached_estimate(made_of(nets.Backwards()), columns, slow, sizes=(1, 2), folder=tmp_path)[1]


def test_another_release_estimates_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, columns = captured("mlp")[1], columns_of("mlp")
    cached_estimate(made, columns, Rates(1e9, 1e9), folder=tmp_path)
    monkeypatch.setattr(profile_cache, "_own_source", lambda: "changed")
    assert not cached_estimate(made, columns, Rates(1e9, 1e9), folder=tmp_path)[1]


class Scaled(nn.Module):
    """A model that calls an operation of a library, whose code is not in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = torch.ops.raypipe_tests.scaled(self.layer(x))
        return scaled


class ScaledInABranch(Scaled):
    """A model that calls this operation in one branch of two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = torch.cond(x.sum() > 0, torch.ops.raypipe_tests.scaled, torch.neg, (self.layer(x),))
        return chosen


class Twice(torch.autograd.Function):
    """An operation with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class Doubled(Scaled):
    """A model that calls a custom autograd function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = Twice.apply(self.layer(x))
        return doubled


class Either(Scaled):
    """A model with two branches of torch's own operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.neg, (self.layer(x),))
        return chosen


def test_an_estimate_of_branches_is_kept(tmp_path: Path) -> None:
    made, columns = made_of(Either()), columns_of("mlp")
    read = [cached_estimate(made, columns, Rates(1e9, 1e9), folder=tmp_path)[1] for _ in range(2)]
    assert read == [False, True]


@pytest.mark.parametrize("model", [Scaled, ScaledInABranch, Doubled])
def test_an_estimate_that_follows_from_code_beside_the_graph_is_not_kept(model: Any, tmp_path: Path) -> None:
    library = torch.library.Library("raypipe_tests", "FRAGMENT")
    library.define("scaled(Tensor x) -> Tensor")
    library.impl("scaled", lambda x: 2 * x, "CompositeExplicitAutograd")
    library.impl("scaled", lambda x: 2 * x, "Autograd")
    made, columns = made_of(model()), columns_of("mlp")
    for _ in range(2):
        assert not cached_estimate(made, columns, Rates(1e9, 1e9), folder=tmp_path)[1]
    assert list(tmp_path.iterdir()) == []


def damaged(path: Path) -> list[bytes]:
    whole = path.read_bytes()
    found = json.loads(whole)
    found["content"]["graph"]["nodes"][0]["forward_s"] *= 2
    return [b"", whole[: len(whole) // 2], whole[:-1], b"\xff\xfe", b"[]", b"{}", json.dumps(found).encode()]


def test_a_damaged_file_is_measured_anew(tmp_path: Path) -> None:
    made, columns = captured("mlp")[1], columns_of("mlp")
    first, _ = cached_profile(made, columns, folder=tmp_path, sizes=())
    (path,) = tmp_path.iterdir()
    for content in damaged(path):
        path.write_bytes(content)
        assert load_profile(tmp_path, path.stem) is None
        profile, was_read = cached_profile(made, columns, folder=tmp_path, sizes=())
        assert not was_read
        assert load_profile(tmp_path, path.stem) == profile
    assert first.graph.edges == profile.graph.edges


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    profile, was_read = cached_profile(captured("mlp")[1], columns_of("mlp"), folder=blocked, sizes=())
    assert not was_read
    assert profile.source == "measured"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(content: Any) -> str:
        raise OSError("No space left on device")

    profile = profiled("mlp")
    save_profile(tmp_path, "a", profile)
    monkeypatch.setattr(profile_cache, "_checksum", full)
    with pytest.raises(OSError, match="No space"):
        save_profile(tmp_path, "a", profile)
    monkeypatch.undo()
    assert load_profile(tmp_path, "a") == profile
    assert len(list(tmp_path.iterdir())) == 1


def test_where_profiles_are_kept() -> None:
    assert cache_folder(environment={"RAYPIPE_CACHE_DIR": "/somewhere"}) == Path("/somewhere/profiles")
    assert cache_folder(environment={}) == Path.home() / ".cache" / "raypipe" / "profiles"


def test_the_newest_files_are_kept(tmp_path: Path) -> None:
    cache = JsonCache(tmp_path, most=3)
    for number in range(5):
        cache.save(str(number), [number])
        os.utime(tmp_path / f"{number}.json", (number, number))
    assert [cache.load(str(number)) for number in range(5)] == [None, None, [2], [3], [4]]

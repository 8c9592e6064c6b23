"""Runs whose replicas exchange gradients beside the last backward have the bits of one worker per stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.engine.replicas import all_reduce
from tests.exactness import same_bits
from tests.runs.test_replicas import told, trainer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]


def wide() -> nn.Sequential:
    """Layers of 256 KiB and more, which are exchanged early, and their biases, which are not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.Dropout(0.1), nn.Linear(256, 280), nn.ReLU(),
        nn.Linear(280, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("replicas", "more"),
    [
        ([3], {"num_stages": 1, "num_lanes": 3}),
        ([2], {"num_stages": 1, "num_lanes": 2, "codec_sums": "bf16"}),
        ([2, 2], {"num_lanes": 4, "schedule": "gpipe", "recompute": "always", "max_grad_norm": 0.1}),
        ([2, 2, 2, 2], {"num_stages": 4, "num_lanes": 2, "schedule": "interleaved"}),
    ],
)
def test_the_same_bits_as_one_worker_per_stage(
    replicas: list[int], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = []
    inner = all_reduce._Begun.completed
    monkeypatch.setattr(
        all_reduce._Begun, "completed", lambda begun, site: (completed.append(site), inner(begun, site))[1]
    )
    trainer(tmp_path, "one", wide(), **more).fit(num_steps=3, local=True, progress=False)
    assert completed == []
    trainer(tmp_path, "many", wide(), num_replicas=replicas, **more).fit(num_steps=3, local=True, progress=False)
    assert completed, "layers were exchanged as their gradients came"
    (rows, one), (others, two) = told(tmp_path / "one"), told(tmp_path / "many")
    assert rows == others
    assert all(same_bits(tensor, two[name]) for name, tensor in one.items())


def test_layers_of_16_bits_are_exchanged_as_early_as_their_sums_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """88 KiB of fp32, whose leaf has 44: chunks are exchanged in their order, so one that is late delays all others."""
    completed = []
    inner = all_reduce._Begun.completed
    monkeypatch.setattr(
        all_reduce._Begun, "completed", lambda begun, site: (completed.append(site), inner(begun, site))[1]
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 150), nn.ReLU(), nn.Linear(150, 150), nn.ReLU(), nn.Linear(150, 3))
    more: dict[str, Any] = {"num_stages": 1, "precision": "bf16"}
    trainer(tmp_path, "two", net, num_replicas=2, **more).fit(num_steps=2, local=True, progress=False)
    assert set(completed) == {2}, "the weight of the second layer, and nothing that is small"

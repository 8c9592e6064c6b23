"""Pipelines on a GPU: the bits of plain PyTorch there, which trains the same micro-batches."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.device.cuda_device import CudaDevice
from tests.exactness import SHAPES, differences, expected, train
from tests.models import CASES, TIED
from tests.operations import OPERATIONS

GRAPHS = sorted({*CASES, *OPERATIONS} - {*TIED, "masked", "normed"})
"""Shared parameters are summed use by use, so that eager PyTorch differs in the order of a sum (raypipe.testing); the
loss of "masked" is no mean of its micro-batches'."""

DRAWN_BY_CUDNN = ("gru-deep", "lstm-both-ways", "lstm-deep", "lstm-projected", "recurrent-sequential", "rnn-deep")
"""Whose layers have dropout between them."""


@pytest.fixture(autouse=True)
def _kernels_that_repeat_themselves(kernels_that_repeat_themselves: None) -> None: ...


@pytest.mark.parametrize("name", GRAPHS)
def test_three_stages_are_equal_to_plain_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in DRAWN_BY_CUDNN:
        monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    plain, again = (expected.__wrapped__(name, SHAPES["even"], "sgd", "cuda") for _ in range(2))
    found = train(name, 3, SHAPES["even"], "1f1b", "sgd", device_of=lambda _: CudaDevice())
    assert differences(again, plain) == [], "plain PyTorch differs from itself"  # type: ignore[arg-type]
    assert differences(found, plain) == []


@pytest.mark.parametrize("schedule", ["gpipe", "kfkb2", "slack", "zb-h1"])
@pytest.mark.parametrize("name", ["mlp", "attention", "dropout-sequential", "cnn"])
def test_schedules_are_too(name: str, schedule: str) -> None:
    for shape in (SHAPES["even"], SHAPES["ragged-microbatch"]):
        plain = expected(name, shape, "adamw", device="cuda", max_grad_norm=0.5)
        found = train(name, 3, shape, schedule, "adamw", device_of=lambda _: CudaDevice(), max_grad_norm=0.5)
        assert differences(found, plain) == []


@pytest.mark.parametrize("name", ["mlp", "attention", "dropout-sequential", "cnn", "noisy"])
def test_recomputed_stages_are_too(name: str) -> None:
    plain = expected(name, SHAPES["even"], "sgd", device="cuda")
    gpu = {"device_of": lambda _: CudaDevice()}
    assert differences(train(name, 3, SHAPES["even"], "1f1b", "sgd", recompute="always", **gpu), plain) == []

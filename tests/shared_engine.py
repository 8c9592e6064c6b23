"""Fixtures of the engine's tier: the same numbers drawn in every test, and captures that tests share."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from raypipe.capture import Capture

__all__ = ["captures_of_a_test", "shared_captures", "steady_engine"]

_MADE: dict[Any, Capture] = {}


@pytest.fixture
def steady_engine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One thread and one seed; a run without a storage path goes to the home folder: not to the real one from here."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture
def shared_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One capture for all trainers of equal models: tracing takes two thirds of a small run.

    For tests of what happens to a model once it is traced. Those of tracing itself trace anew.
    """
    _share(_MADE, monkeypatch)


@pytest.fixture
def captures_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``shared_captures``, but each test traces its models, once for each example."""
    _share({}, monkeypatch)


def _share(made: dict[Any, Capture], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("raypipe.prepare.inputs", "raypipe.testing"):
        monkeypatch.setattr(f"{module}.capture", partial(_captured, made))


def _captured(
    made: dict[Any, Capture], model: torch.nn.Module, example: Any, columns: Any, loss_fn: Any, **how: Any
) -> Capture:
    """As ``raypipe.capture.capture``; the same object for equal arguments, which nobody changes."""
    import torch
    from torch.utils import _pytree

    from raypipe.capture import capture

    contents = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *_pytree.tree_leaves(example)]:
        if not isinstance(tensor, torch.Tensor):  # state of a module that is none
            contents.update(repr(tensor).encode())
            continue
        contents.update(f"{tensor.device} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} ".encode())
        if not tensor.is_meta:  # which has no contents
            contents.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    modes = (*(p.requires_grad for p in model.parameters()), *(module.training for module in model.modules()))
    key = (type(model), str(model), modes, contents.digest(), columns, loss_fn, *sorted(how.items()))
    if key not in made:
        made[key] = capture(model, example, columns, loss_fn, **how)
    return made[key]

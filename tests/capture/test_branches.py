"""Branches on values: checks are left out of a graph, and whatever else the data decide is refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raypipe.capture import Capture, capture
from raypipe.errors import CaptureError
from tests.trainers import trainer_of

Before = Callable[[torch.Tensor], torch.Tensor | None]


class Net(nn.Module):
    """A layer, after ``before`` has looked at the input and may have changed it."""

    def __init__(self, before: Before) -> None:
        super().__init__()
        self.before, self.first, self.last = before, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.before(x)
        return self.last(torch.tanh(self.first(x if new is None else new)))


def captured(before: Before) -> Capture:
    torch.manual_seed(0)
    return capture(Net(before), (torch.randn(4, 6), torch.zeros(4, dtype=torch.long)), (0, 1), cross_entropy)


def refuse(x: torch.Tensor) -> None:
    if x.max() > 9:
        raise ValueError("too large")


def either(x: torch.Tensor) -> None:
    if x.min() < -9 or x.max() > 9:
        raise ValueError(f"from {x.min()} to {x.max()}")


def negated(x: torch.Tensor) -> None:
    if not (x.abs() < 9).all():
        worst = x.abs().max()
        raise ValueError(worst)


def asserted(x: torch.Tensor) -> None:
    assert (x < 9).all(), "too large"


def numbers(x: torch.Tensor) -> None:
    if x.max().item() > 9 or not bool((x > -9).all()) or x[x > 9].numel() > 0:
        raise ValueError


def elsewhere(x: torch.Tensor) -> None:
    for one in (x, 2 * x):
        with torch.no_grad():
            refuse(one)


def of_torch(x: torch.Tensor) -> None:
    torch._assert((x < 9).all(), "too large")


def fail(words: str) -> Any:
    raise ValueError(words)


def failing(x: torch.Tensor) -> None:
    if x.max() > 9:
        fail(f"too large: {x.shape}")


def distributed(x: torch.Tensor) -> None:
    torch.distributions.Uniform(x - 1, x + 1, validate_args=True).log_prob(x)


CHECKS = [refuse, either, negated, asserted, numbers, elsewhere, of_torch, failing, distributed]


@pytest.mark.parametrize("before", CHECKS)
def test_a_graph_is_that_of_the_model_without_its_checks(before: Before) -> None:
    bare, checked = captured(lambda x: None), captured(before)
    assert bare.checks == ()
    assert checked.checks
    assert all(line.startswith(f"{__file__}:") for line in checked.checks)
    assert [one.train.source for one in checked.programs((1,))] == [one.train.source for one in bare.programs((1,))]


def test_a_library_whose_name_begins_with_torch_is_no_part_of_torch() -> None:
    code = "def check(x):\n    if x.max() > 9:\n        raise ValueError\n"
    names: dict[str, Before] = {}
    exec(compile(code, str(Path(torch.__file__).parent.with_name("torchvision") / "ops.py"), "exec"), names)
    assert captured(names["check"]).checks


def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2 if x.max() > 9 else x


def caught(x: torch.Tensor) -> torch.Tensor:
    try:
        refuse(x)
    except ValueError:
        return x / 2
    return x


def looped(x: torch.Tensor) -> torch.Tensor:
    while x.max() > 9:
        x = x / 2
    return x


def untraceable(x: torch.Tensor) -> torch.Tensor:
    """The error is of the trace, not of the code."""
    return torch.from_numpy(x.detach().numpy() / 2) if x.max() > 9 else x


def checked_first(x: torch.Tensor) -> torch.Tensor:
    refuse(x)
    return halved(x)


def large(x: torch.Tensor) -> bool:
    return bool(x.max() > 9)


def shared(x: torch.Tensor) -> torch.Tensor:
    """One branch of a check and of a computation, in a function that both call."""
    if large(x):
        raise ValueError
    return x / 2 if large(2 * x) else x


def strict_once(x: torch.Tensor) -> torch.Tensor:
    """Of two layers with the same code only the first raises."""
    for strict in (True, False):
        if x.max() > 9:
            if strict:
                raise ValueError
            x = x.clamp(max=9)
    return x


def crop(x: torch.Tensor, count: object) -> torch.Tensor:
    if not isinstance(count, int):  # of torch.export it is a symbol
        raise TypeError
    return x / count


def cropped(x: torch.Tensor) -> torch.Tensor:
    return crop(x, (x > 9).sum().item()) if x.max() > 9 else x


def reworded(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 9:
        try:
            x = untraceable(x)
        except Exception as error:
            raise RuntimeError from error
    return x


def summed(x: torch.Tensor) -> torch.Tensor:
    return x / len(range(int(x.abs().sum())))


def reworded_number(x: torch.Tensor) -> torch.Tensor:
    """Of torch's errors, too, only that of the branch itself is no other cause."""
    if x.max() > 9:
        try:
            x = summed(x)
        except Exception as error:
            raise RuntimeError from error
    return x


def reworded_in_silence(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 9:
        try:
            x = summed(x)
        except RuntimeError:
            raise RuntimeError from None
    return x


def kernel(x: torch.Tensor) -> torch.Tensor:
    """Stands for a kernel that is missing on this machine only."""
    raise RuntimeError


def optional(rows: int) -> torch.Tensor:
    raise ImportError


def by_a_kernel(x: torch.Tensor) -> torch.Tensor:
    return kernel(x) if x.max() > 9 else x


def by_a_kernel_in_place(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 9:
        kernel(x)
    return x


def by_an_optional_module(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 9:
        optional(3)
    return x


def by_its_value(x: torch.Tensor) -> torch.Tensor:
    return x + fail("rows") if x.max() > 9 else x


def changed_after_a_check(x: torch.Tensor) -> torch.Tensor:
    """One tensor of a check and, changed in place, of a computation."""
    bad = x.isnan().any()
    if bad:
        raise ValueError
    bad |= (x > 9).any()
    return x.clamp(max=9) if bad else x


def drawn_and_changed(x: torch.Tensor) -> torch.Tensor:
    drawn = torch.rand([])
    drawn.mul_(4)
    return x / 2 if drawn < 1.0 else x


GO_ON = [
    halved, caught, looped, untraceable, checked_first, shared, strict_once, cropped, reworded, changed_after_a_check,
    drawn_and_changed, reworded_number, reworded_in_silence, by_a_kernel, by_a_kernel_in_place,
    by_an_optional_module, by_its_value,
]  # fmt: skip


@pytest.mark.parametrize("before", GO_ON)
def test_a_branch_that_goes_on_both_ways_is_refused(before: Before) -> None:
    with pytest.raises(CaptureError, match="Net decides by values of its data"):
        captured(before)


def test_a_branch_in_an_installed_package_names_the_function_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quantized-1.0.dist-info").mkdir()
    (tmp_path / "quantized.py").write_text(
        "class Codebook:\n    def __call__(self, x):\n        return [x / 2 if v > 0 else x for v in x[:, 0]][0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    codebook = importlib.import_module("quantized").Codebook()
    with pytest.raises(CaptureError, match=r"library: .* to Codebook\.__call__ of quantized, or build the model as"):
        captured(codebook)


def test_after_a_check_the_next_fault_is_named() -> None:
    def faulty(x: torch.Tensor) -> torch.Tensor:
        refuse(x)
        return torch.from_numpy(x.detach().numpy())

    with pytest.raises(CaptureError, match=r"Net could not be traced .*numpy"):
        captured(faulty)


def test_a_mode_leaves_torch_as_it_was() -> None:
    before = torch.SymBool.__bool__
    captured(refuse)
    with pytest.raises(CaptureError):
        captured(halved)
    assert torch.SymBool.__bool__ is before


@pytest.mark.parametrize("verify", ["first_step", "off"])
@pytest.mark.parametrize("wrong", [0, 7])
def test_data_that_violate_a_check_end_the_run_before_its_first_step(wrong: int, verify: Any, tmp_path: Any) -> None:
    """Row 7 is in the last of four micro-batches, which verify does not run."""
    inputs = torch.zeros(8, 6)
    data = TensorDataset(inputs, torch.zeros(8, dtype=torch.long))
    trainer = trainer_of(
        Net(refuse), folder=tmp_path, train_data=torch.utils.data.DataLoader(data, batch_size=8), verify=verify,
        minibatch_size=8, num_microbatches=4,
    )  # fmt: skip
    assert any("forward checks values at" in note for note in trainer.plan().notes)
    inputs[wrong] = 10
    with pytest.raises(CaptureError, match="ValueError: too large"):
        trainer.fit(num_steps=1, local=True, progress=False)


@pytest.mark.parametrize("number", [lambda x: int((x > 9).sum()), lambda x: float(x.sum())])
def test_a_number_of_python_is_named_as_such(number: Callable[[torch.Tensor], float]) -> None:
    with pytest.raises(CaptureError, match=r"Net makes a number of Python from values of its data.*take \.item\(\)"):
        captured(lambda x: x * number(x))


def test_what_a_trace_does_not_see_is_named() -> None:
    def changed(x: torch.Tensor) -> torch.Tensor:
        y = 2 * x.as_subclass(torch.Tensor)
        return torch.stack([row * 1 for row in y])  # for one number of samples, which is tried after any number

    with pytest.raises(CaptureError, match=r"Net makes or changes a tensor in a way that a trace does not see"):
        captured(changed)

"""What forward and loss remember or share outside of parameters, buffers and inputs: found before the first step."""

from __future__ import annotations

import contextvars
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.capture import capture
from raypipe.capture.python_state import read_memory
from raypipe.errors import CaptureError
from raypipe.testing import reference
from tests.trainers import sgd
from tests.zoo.cases.hidden import Between, Net, appending, averaging_in_place, counting, numpys, pythons, seeding
from tests.zoo.samples import vectors

ROWS = vectors(16)
CONFIG = PipelineConfig(num_stages=2, partitioner="parameters", minibatch_size=8, num_microbatches=2)
CALLS = {"count": 0}


def trainer(model: nn.Module, loss_fn: Any = cross_entropy, config: PipelineConfig = CONFIG) -> PipelineTrainer:
    return PipelineTrainer(model, loss_fn=loss_fn, optimizer=sgd, train_data=ROWS, pipeline=config)


def counts_in_a_global(net: Net, x: torch.Tensor) -> torch.Tensor:
    CALLS["count"] += 1
    return x / CALLS["count"]


def leaves_a_dtype(net: Net, x: torch.Tensor) -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    return x


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    CALLS["count"] = 0
    states = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    yield
    assert CALLS["count"] == 0
    assert torch.get_default_dtype() is torch.float32
    assert (random.getstate(), np.random.get_state()[2]) == states[:2]


REMEMBERS = r"changes .*{} with every call: 1 after one call, 2 after the next"
SHOWN_BY_A_CAPTURE = [
    (counting, True, REMEMBERS.format(r"model\.0\.count")),
    (appending, True, REMEMBERS.format(r"the number of items in model\.0\.seen")),
    (averaging_in_place, True, r"model\.0\.average with every call: a tensor of shape \(8,\) that begins with"),
    (counts_in_a_global, True, REMEMBERS.format(r"test_hidden_state\.CALLS\['count'\]")),
    (counts_in_a_global, False, REMEMBERS.format(r"test_hidden_state\.CALLS\['count'\]")),
    (pythons, True, r"draws from Python's generator or seeds it\. .*torch\.rand"),
    (numpys, True, r"draws from numpy's generator or seeds it\. .*torch\.rand"),
    (seeding, True, r"draws from torch's generator or seeds it\. .*Leave seeding out"),
    (leaves_a_dtype, True, r"changes torch's default dtype from torch\.float32 to torch\.float64 and leaves it so"),
    (leaves_a_dtype, False, r"changes torch's default dtype from torch\.float32 to torch\.float64 and leaves it so"),
]
"""Besides the traced models of tests/zoo/cases/hidden.py."""


@pytest.mark.parametrize(("between", "chained", "message"), SHOWN_BY_A_CAPTURE)
def test_state_between_calls_is_refused_by_the_capture(between: Between, chained: bool, message: str) -> None:
    net = Net(between)
    model = nn.Sequential(net, nn.Linear(5, 5)) if chained else net
    with pytest.raises(CaptureError, match=message):
        capture(model, ROWS[:4], (0, 1), cross_entropy)
    assert (net.count, len(net.seen), net.average.abs().max()) == (0, 0, 0), "the model was changed"


def caches(net: Net, x: torch.Tensor) -> torch.Tensor:
    if not net.seen:
        net.seen.append(torch.linspace(0, 1, 8))
    return x + net.seen[0]


def keeps_the_last(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.average = x.detach()
    return x


@pytest.mark.parametrize("between", [caches, keeps_the_last])
@pytest.mark.parametrize("chained", [False, True], ids=["traced", "sequential"])
def test_a_cache_and_what_is_only_written_train_as_plain_pytorch(between: Any, chained: bool) -> None:
    model = nn.Sequential(Net(between), nn.Linear(5, 5)) if chained else Net(between)
    found = trainer(model).fit(num_steps=3, local=True, progress=False)
    wanted = reference(
        model, loss_fn=cross_entropy, optimizer=sgd, train_data=ROWS, num_steps=3, pipeline=CONFIG
    )  # fmt: skip
    assert [(r.loss, r.grad_norm) for r in found.records] == list(zip(wanted.losses, wanted.grad_norms, strict=True))


def reads_the_last(net: Net, x: torch.Tensor) -> torch.Tensor:
    last, net.average = net.average, x.detach().mean(0)
    return x + last


def reads_its_gradient(net: Net, x: torch.Tensor) -> torch.Tensor:
    gradient = net.first.weight.grad
    return x if gradient is None else x * (1 + gradient.abs().sum().item())


def draws_from_its_own_generator(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand((), generator=net.generator).item()


def writes_a_file(net: Net, x: torch.Tensor) -> torch.Tensor:
    with open(net.path, "ab", buffering=0) as file:  # noqa: PTH123
        file.write(b".")
        return x / file.tell()


SHOWN_BY_NUMBERS = [reads_the_last, reads_its_gradient, draws_from_its_own_generator, writes_a_file]


@pytest.mark.parametrize("chained", [False, True], ids=["traced", "sequential"])
@pytest.mark.parametrize("between", SHOWN_BY_NUMBERS)
def test_what_shows_in_numbers_is_refused_before_the_first_step(between: Any, chained: bool, tmp_path: Path) -> None:
    net = Net(between)
    net.path = tmp_path / "calls"  # type: ignore[assignment]
    model = nn.Sequential(net, nn.Linear(5, 5)) if chained else net
    before = torch.get_rng_state()
    with pytest.raises(
        CaptureError, match=r"verify=.first_step.: on micro-batch . of 2|with every call|not be traced|torch.Generator"
    ):
        trainer(model, config=replace(CONFIG, loss_reduction="mean")).fit(num_steps=1, local=True, progress=False)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(before, torch.get_rng_state())


class CountingLoss:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return cross_entropy(output, target) / self.calls


def counting_in_a_closure() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    calls = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return cross_entropy(output, target) / calls

    return loss


def weighed_once() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    @functools.cache
    def weight(count: int) -> list[torch.Tensor]:
        return []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept = weight(len(target))
        if not kept:
            kept.append(torch.bincount(target, minlength=5) + 1.0)
        return cross_entropy(output, target, kept[0])

    return loss


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (CountingLoss(), r"changes loss_fn\.calls with every call: 1 after one call, 2 after the next"),
        (counting_in_a_closure(), r"changes counting_in_a_closure\S*:calls with every call: 1 after one call, 2 after"),
        (weighed_once(), r"on micro-batch 2 of 2 .* the loss is \S+ in the module and \S+ in the stages"),
    ],
    ids=["attribute", "closure", "cache of a batch"],
)
def test_a_loss_that_remembers_is_refused(loss_fn: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        trainer(Net(lambda net, x: x), loss_fn, replace(CONFIG, loss_reduction="mean")).fit(
            num_steps=1, local=True, progress=False
        )


def test_what_a_progress_bar_keeps_in_its_class_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that looks after all bars writes there when it wakes, as with peft, whose modules import tqdm."""
    monkeypatch.setattr(tqdm, "woken", 0, raising=False)

    def counts(net: Net, x: torch.Tensor) -> torch.Tensor:
        tqdm.woken += 1  # type: ignore[attr-defined]
        return x

    trainer(Net(counts)).fit(num_steps=1, local=True, progress=False)


def test_what_forward_leaves_for_the_loss_is_refused_where_it_is_verified() -> None:
    penalty = contextvars.ContextVar[torch.Tensor | None]("penalty", default=None)

    def leaves(net: Net, x: torch.Tensor) -> torch.Tensor:
        penalty.set(x.square().mean())
        return x

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        left = penalty.get()
        return cross_entropy(output, target) + (0.0 if left is None else left)

    config = replace(CONFIG, loss_reduction="mean")
    with pytest.raises(
        CaptureError,
        match=r"the stages of Net do not compute what Net computes: the loss is \S+ in the module and \S+ in",
    ):
        trainer(Net(leaves), loss, config).fit(num_steps=1, local=True, progress=False)
    unverified = trainer(Net(leaves), loss, replace(config, verify="off"))
    assert len(unverified.fit(num_steps=2, local=True, progress=False).records) == 2


@pytest.mark.parametrize("by", ["context variable", "global"])
def test_what_one_child_leaves_for_another_is_refused_where_they_are_cut_apart(by: str) -> None:
    held = contextvars.ContextVar("held", default=1.0)

    def leaves(net: Net, x: torch.Tensor) -> torch.Tensor:
        held.set(2.0) if by == "context variable" else CALLS.update(count=2)
        return x

    def reads(net: Net, x: torch.Tensor) -> torch.Tensor:
        return x * (held.get() if by == "context variable" else 1 + CALLS["count"])

    class Second(Net):
        def __init__(self) -> None:
            super().__init__(reads)
            self.first = nn.Linear(5, 8)

    with pytest.raises(
        CaptureError, match=r"on micro-batch 1 of 2 .*, after the output of the module '0', which is equal"
    ):
        trainer(nn.Sequential(Net(leaves), Second())).fit(num_steps=1, local=True, progress=False)


class Answering:
    """Has an answer to every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


def test_an_object_with_an_answer_to_every_name_is_read() -> None:
    net = Net(lambda net, x: x)
    net.answering = Answering()
    assert not any(read_memory(net).changes(read_memory(net)))


def test_parameters_that_forward_changes_are_refused() -> None:
    def clamps(net: Net, x: torch.Tensor) -> torch.Tensor:
        net.first.weight.data.numpy()[:] *= 0.9
        return x

    model = nn.Sequential(Net(clamps), nn.Linear(5, 5))
    with pytest.raises(
        CaptureError, match=r"Child '0' \(Net\) changes its parameter 'first\.weight' while it computes forward"
    ):
        trainer(model).fit(num_steps=1, local=True, progress=False)


def test_the_check_changes_nothing_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 5)).eval()
    model[0].weight.grad = torch.ones(4, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer(model).fit(num_steps=1, local=True, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 6))
    assert model[1].weight.grad is None
    assert not any(module.training for module in model.modules())


def test_memory_is_put_back() -> None:
    """Lists, dicts, sets, deques, slots, class attributes, closures, arrays and generators."""

    class Slotted:
        __slots__ = ("value",)
        shared = 0

        def __init__(self) -> None:
            self.value = 1

    state: dict[str, Any] = {
        "list": [1, [2]], "dict": {"a": 1}, "set": {1}, "deque": deque([1, 2], maxlen=2), "slots": Slotted(),
        "array": np.arange(3), "generator": torch.Generator().manual_seed(1), "python": random.Random(1),
        "numpy": np.random.default_rng(1), "tensor": torch.arange(3),
    }  # fmt: skip
    calls = 0

    def loss_fn(output: Any, target: Any) -> Any:
        nonlocal calls
        calls += 1
        state["list"][1].append(3)
        state["dict"]["b"] = 2
        state["set"].add(2)
        state["deque"].append(3)
        state["slots"].value += 1
        Slotted.shared += 1
        state["array"][0] = 5
        state["tensor"][0] = 5
        for draw in (
            state["python"].random,
            state["numpy"].random,
            lambda: torch.rand(1, generator=state["generator"]),
        ):
            draw()

    model = nn.Linear(1, 1)
    before = read_memory(model, loss_fn)
    loss_fn(None, None)
    changed = {path for path, _, _ in before.changes(read_memory(model, loss_fn))}
    for name in ("list", "dict", "set", "deque", "slots", "array", "tensor", "generator", "python", "numpy"):
        assert any(f"['{name}']" in path for path in changed), f"{name} is not among {sorted(changed)}"
    assert any("shared" in path for path in changed)
    assert any(path.endswith(":calls") for path in changed)
    before.restore()
    assert list(before.changes(read_memory(model, loss_fn))) == []

"""The emulators themselves: against numbers worked out by hand, PipeDream's own queues, and training without stages."""

from __future__ import annotations

import ast
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.emulators.nets import NETS
from tests.emulators.training import Emulated, Fill, emulate, fills_of
from tests.emulators.versions import (
    Mode,
    bounded,
    flush,
    round_robin,
    stashing,
    two_buffered,
    vertical_sync,
)

EMULATORS = Path(__file__).parents[1] / "emulators"
STAGES = st.integers(1, 6)


@pytest.mark.parametrize("path", sorted(EMULATORS.glob("*.py")), ids=lambda path: path.name)
def test_they_import_nothing_of_raypipe(path: Path) -> None:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    ours = ("raypipe", "jobs", "tests")
    assert [m for m in found if m.split(".")[0] in ours and not m.startswith("tests.emulators.")] == []


# Versions.


def test_the_picture() -> None:
    docstring = ast.get_docstring(ast.parse((EMULATORS / "versions.py").read_text())) or ""
    modes = (flush(3), stashing(3), bounded(3, 2), vertical_sync(3), two_buffered(3), round_robin((2, 1, 1), 2))
    drawn = [line.split("     ")[-3:] for line in docstring.splitlines() if line.count("0 0") >= 2]
    assert len(drawn) == len(modes)
    for mode, stages in zip(modes, drawn, strict=True):
        assert [" ".join(str(mode.version(s, k)) for k in range(9)) for s in range(3)] == [s.strip() for s in stages]


def queues(num_stages: int, count: int) -> dict[tuple[int, int], int]:
    """PipeDream as released: a queue of as many versions as micro-batches in flight; a backward takes the oldest."""
    used = {}
    for stage in range(num_stages):
        ahead = num_stages - 1 - stage
        kept = deque([0] * (ahead + 1), maxlen=ahead + 1)
        forwards, backwards = iter(range(count)), iter(range(count))
        seen = {}
        order = ["F"] * ahead + ["F", "B"] * max(0, count - ahead) + ["B"] * ahead  # 1F1B, warm-up first
        for op in order:
            if op == "F" and (k := next(forwards, None)) is not None:
                seen[k] = kept[-1]
            elif op == "B" and (k := next(backwards, None)) is not None:
                assert kept[0] == seen[k], "the backward meets what the forward met"
                used[stage, k] = kept[0]
                kept.append(kept[-1] + 1)
    return used


@given(STAGES, st.integers(6, 20))
def test_stashing_is_pipedreams_queue(num_stages: int, count: int) -> None:
    mode = stashing(num_stages)
    assert queues(num_stages, count) == {(s, k): mode.version(s, k) for s in range(num_stages) for k in range(count)}


@given(STAGES, st.integers(6, 12), st.integers(1, 5))
def test_two_buffers_are_enough_for_2bw(num_stages: int, num_microbatches: int, batches: int) -> None:
    """2BW as released: the last forwards of a batch belong to the next one and use the newer of two buffers."""
    mode = two_buffered(num_microbatches)
    for stage in range(num_stages):
        ahead = num_stages - 1 - stage
        older = newer = 0
        used = [newer] * ahead
        for _ in range(batches):
            used += [older] * (num_microbatches - ahead) + [newer] * ahead
            older, newer = newer, newer + 1
        assert used == [mode.version(stage, k) for k in range(len(used))]


# Training.


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.5)


def mean_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.mean()


ONES = (torch.ones(1, 1, dtype=torch.float64), torch.zeros(1))


@pytest.mark.parametrize(
    ("mode", "microbatches", "expected"),
    [
        # The loss is a b x, so a goes down by b / 2 and b by a / 2, at the versions met; both begin at 1.
        (stashing(2), 4, (0.375, -0.375)),  # a: 1, .5, .25, .25, .375   b: 1, .5, 0, -.25, -.375
        (vertical_sync(2), 4, (-0.25, -0.25)),  # both: 1, .5, 0, -.25, -.25
        (two_buffered(2), 8, (-0.25, -0.25)),  # the same by halves
        (bounded(2, 2), 6, (0.1875, -0.0625)),  # a: 1, .5, .25, .1875   b: 1, .5, .125, -.0625
        (flush(2), 6, (0.125, 0.125)),  # both: 1, .5, .25, .125
    ],
    ids=lambda value: value.name if isinstance(value, Mode) else None,
)
def test_worked_out_by_hand(mode: Mode, microbatches: int, expected: tuple[float, float]) -> None:
    model = nn.Sequential(Scale(), Scale())
    found = emulate(model, (1,), [Fill([ONES] * microbatches)], mode, loss_fn=mean_of, make_optimizer=sgd)
    assert (found.parameters["0.factor"].item(), found.parameters["1.factor"].item()) == expected
    assert all(p.item() == 1.0 for p in model.parameters()), "the caller's model is left alone"


def test_a_drain_counts_versions_anew() -> None:
    model = nn.Sequential(Scale(), Scale())
    fills = [Fill([ONES] * 2), Fill([ONES] * 2, synchronous=True), Fill([ONES] * 2)]
    found = emulate(model, (1,), fills, stashing(2), loss_fn=mean_of, make_optimizer=sgd)
    # a: 1, .5, .25 | mean of b 0: .25 | b .-125: .3125, a .25, b -.25: .4375
    # b: 1, .5, 0   | mean of a .25: -.125 | -.25, a .25: -.375
    assert (found.parameters["0.factor"].item(), found.parameters["1.factor"].item()) == (0.4375, -0.375)
    assert len(found.losses) == 5


def test_a_share_of_the_limit_for_each_stage() -> None:
    """One number on stage 0, three on stage 1, a limit of 1: shares of 1/2 and sqrt(3)/2."""
    model = nn.Sequential(Scale(), nn.Sequential(Scale(), Scale(), Scale()))
    arguments: dict[str, Any] = {"loss_fn": mean_of, "make_optimizer": sgd, "max_grad_norm": 1.0}
    apart = emulate(model, (1,), [Fill([ONES])], stashing(2), **arguments)
    assert apart.norms == [(1.0, math.sqrt(3.0))]
    assert float(apart.parameters["0.factor"]) == pytest.approx(1 - 0.5 * 0.5, abs=1e-5)
    assert float(apart.parameters["1.2.factor"]) == pytest.approx(1 - 0.5 * 0.5, abs=1e-5)
    together = emulate(model, (1,), [Fill([ONES] * 2)], bounded(2, 2), **arguments)
    assert together.norms == [(2.0,)]
    assert float(together.parameters["0.factor"]) == pytest.approx(1 - 0.5 * 0.5, abs=1e-5)


def fills(name: str, samples: int = 44, minibatches: int = 9) -> list[Fill]:
    data = NETS[name].data(samples).tensors
    return list(fills_of(lambda epoch: (data[0], data[1]), 8, 2, minibatches))


def test_fills() -> None:
    """44 samples are five mini-batches of 8 and one of 4, which goes alone."""
    found = fills("mlp", minibatches=13)
    assert [(len(f.microbatches), f.synchronous) for f in found] == [
        (20, False), (2, True), (20, False), (2, True), (4, False)
    ]  # fmt: skip
    inputs = torch.cat([x for f in found[:2] for x, _ in f.microbatches])
    assert torch.equal(inputs, NETS["mlp"].data(44).tensors[0])
    ragged = list(fills_of(lambda epoch: (torch.arange(14), torch.arange(14)), 7, 2, 2))
    assert [len(x) for f in ragged for x, _ in f.microbatches] == [2, 2, 2, 1, 2, 2, 2, 1]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=5e-2, momentum=0.9),
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-2),
}


def plain(name: str, every: int, optimizer: str, limit: float | None) -> dict[str, torch.Tensor]:
    """Ordinary training with gradient accumulation: no versions, no stages."""
    net = NETS[name]
    model = net.model().train()
    stepper = OPTIMIZERS[optimizer](list(model.named_parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.9)
    for fill in fills(name):
        size = len(fill.microbatches) if fill.synchronous else every
        for at in range(0, len(fill.microbatches), size):
            group = fill.microbatches[at : at + size]
            for x, y in group:
                (net.loss_fn(model(x), y) * (len(x) / sum(len(x) for x, _ in group))).backward()
            if limit is not None:
                nn.utils.clip_grad_norm_(model.parameters(), limit)
            stepper.step()
            stepper.zero_grad()
            scheduler.step()
    return {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}


def emulated(name: str, stages: int, mode: Mode, optimizer: str = "sgd", **more: Any) -> Emulated:
    net = NETS[name]
    return emulate(
        net.model(), net.cuts[stages], fills(name), mode, loss_fn=net.loss_fn, make_optimizer=OPTIMIZERS[optimizer],
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), **more,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NETS)
def test_without_staleness_they_are_ordinary_training(name: str, optimizer: str) -> None:
    for limit, stages, mode in (
        (None, 1, stashing(1)), (0.5, 1, stashing(1)), (0.5, 1, bounded(1, 2)), (None, 1, vertical_sync(1)),
        (None, 3, flush(4)), (0.5, 3, flush(4)),
    ):  # fmt: skip
        found = emulated(name, stages, mode, optimizer, max_grad_norm=limit)
        wanted = plain(name, mode.every, optimizer, limit)
        assert [n for n, t in {**found.parameters, **found.buffers}.items() if not torch.equal(t, wanted[n])] == []
        assert all(map(math.isfinite, found.losses))

"""Slices of parameters, as replicas share them out: all elements once, and the bits of whole steps and norms."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raypipe.engine.optim.norms import BLOCK, block_norms, norm_of_blocks
from raypipe.engine.optim.slices import Slices, flat, parts_of
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.stage import Site
from raypipe.errors import ConfigError
from raypipe.ir import communication
from raypipe.preflight import optimizer as preflight
from raypipe.preflight.optimizer import try_optimizers
from tests.engine.rings import program_of
from tests.exactness import captured, programs, same_bits

pytestmark = pytest.mark.engine

SHAPES = {"a": (70, 61), "b": (1000,), "c": (9, 341, 3), "d": (7,), "e": (), "tied": (50, 41)}
SITES = ("tied", "a", "b", "c", "d", "e", "tied")


def parameters() -> dict[str, torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}


def slices_of(replicas: int, known: dict[str, torch.nn.Parameter], replica: int) -> Slices:
    sites = tuple(Site(name, at) for at, name in enumerate(SITES))
    placement = Placement((tuple(range(replicas)),), replica, replicas)
    return Slices([*parts_of(program_of(sites, known), known, placement).values()], replica, known)


@pytest.mark.parametrize("replicas", [2, 3, 5])
@pytest.mark.parametrize("chunk_bytes", [8 << 20, 20_000])
def test_every_element_has_one_replica_and_blocks_stay_whole(
    replicas: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication, "CHUNK_BYTES", chunk_bytes)
    found = slices_of(replicas, parameters(), 0)
    whole = {name: torch.Size(shape).numel() for name, shape in SHAPES.items() if shape}
    ends = sorted(part for parts in found.parts for part in parts)
    for name, parts in itertools.groupby(ends, key=lambda part: part.name):
        at = 0
        for _, first, stop in parts:
            assert first == at
            assert first % BLOCK == 0
            at = stop
        assert at == whole.pop(name)
    assert whole == {}, "a parameter without dimensions is stepped by all"
    if chunk_bytes > 1 << 20:  # of one chunk for the large ones, one for the small ones, one for those that are tied
        counts = [sum(stop - first for _, first, stop in parts) for parts in found.parts]
        assert max(counts) - min(counts) <= 3 * 2 * BLOCK


def test_norms_of_blocks_are_the_same_whoever_has_them() -> None:
    for size in (1, 7, 1023, 1024, 1025, 5000, 40_000):
        x = torch.randn(size, generator=torch.Generator().manual_seed(size))
        whole = block_norms(x)
        assert whole.shape == (-(-size // BLOCK),)
        for cut in range(0, size, BLOCK):
            parts = [block_norms(part) for part in (x[:cut], x[cut:]) if part.numel()]
            assert torch.equal(torch.cat(parts), whole)
        plain = torch.linalg.vector_norm(x)
        torch.testing.assert_close(norm_of_blocks(whole), plain, rtol=1e-6, atol=0.0)
        assert size > BLOCK or torch.equal(norm_of_blocks(whole), plain)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_steps_of_slices_have_the_bits_of_whole_ones_and_share_out_the_state(kind: str) -> None:
    replicas = 3
    whole, copies = parameters(), [parameters() for _ in range(replicas)]

    def made(known: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        groups = [[(n, p) for n, p in known.items() if (p.dim() > 1) is many] for many in (True, False)]
        return MAKERS[kind]([{"params": group} for group in groups])

    one, others = made(whole), [made(known) for known in copies]
    slices = [slices_of(replicas, known, at) for at, known in enumerate(copies)]
    for each, optimizer in zip(slices, others, strict=True):
        each.take_over(optimizer)
    draw = torch.Generator().manual_seed(2)
    for _ in range(3):
        gradients = {name: torch.randn(p.shape, generator=draw) for name, p in whole.items()}
        for known in (whole, *copies):
            for name, p in known.items():
                p.grad = gradients[name].clone()
        one.step()
        for each, optimizer in zip(slices, others, strict=True):
            each.take_gradients()
            optimizer.step()
            each.follow()
    for each, known in zip(slices, copies, strict=True):
        for name, first, stop in each.held:
            assert same_bits(flat(known[name].data)[first:stop], flat(whole[name].data)[first:stop])
        assert same_bits(known["e"], whole["e"])

    def held(optimizer: torch.optim.Optimizer) -> int:
        state = (x for of_one in optimizer.state.values() for x in of_one.values())
        return sum(x.numel() for x in state if isinstance(x, torch.Tensor) and x.numel() > 1)

    assert sum(map(held, others)) == held(one)
    assert max(map(held, others), default=0) <= held(one) / replicas + 6 * BLOCK * 3


def clipping(named: Any) -> torch.optim.Optimizer:
    """By the norm of whole gradients, of which a replica has its slices."""
    made = torch.optim.SGD(named, lr=0.1)
    whole = [p for _, p in named]

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(whole, 1.0)

    made.register_step_pre_hook(clip)
    return made


def bounding(named: Any) -> torch.optim.Optimizer:
    """Each element by itself."""
    made = torch.optim.SGD(named, lr=0.1)
    whole = [p for _, p in named]
    made.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(whole, 1.0))
    return made


class Elsewhere(torch.optim.SGD):
    """Steps the parameters that it was made with, whatever its groups say."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, lr=0.1)
        self.own = [p for _, p in named]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.own:
            self.state[p]["sum"] = self.state[p].get("sum", 0.0) + p.grad
            p.sub_(self.state[p]["sum"], alpha=0.1)


@pytest.mark.parametrize(
    ("maker", "why"),
    [
        (lambda p: torch.optim.Adafactor(p, lr=0.1), "it changes a part of"),
        (clipping, "it changes a part of"),
        (Elsewhere, "On stage 0 it keeps state for other tensors"),
    ],
    ids=["adafactor", "clipping", "elsewhere"],
)
def test_an_optimizer_that_looks_at_whole_parameters_is_refused(maker: Any, why: str) -> None:
    known = captured("mlp")[1].parameters
    try_optimizers(programs("mlp", 1), known, maker, None, replicated=True)
    with pytest.raises(ConfigError, match=f"shard_optimizer=True is not possible with .*{why}.*such as AdamW"):
        try_optimizers(programs("mlp", 1), known, maker, None, replicated=True, sharded=True)


def by_sizes(named: Any) -> torch.optim.Optimizer:
    """Groups by how large parameters are, of which small stand-ins say nothing."""
    wide = [(name, p) for name, p in named if p.numel() > 64]
    if not wide:
        raise ValueError("no wide parameters")
    narrow = [(name, p) for name, p in named if p.numel() <= 64]
    return torch.optim.SGD([{"params": wide}, {"params": narrow, "weight_decay": 0.0}], lr=0.1)


def test_a_model_that_is_too_large_to_try_is_refused_where_sizes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    known, stages = captured("mlp")[1].parameters, programs("mlp", 1)
    try_optimizers(stages, known, by_sizes, None, replicated=True, sharded=True)
    monkeypatch.setattr(preflight, "_FEW", 10)
    try_optimizers(stages, known, by_sizes, None, replicated=True)
    with pytest.raises(
        ConfigError, match=r"shard_optimizer=True: the optimizer depends on sizes of parameters, .* too large"
    ):
        try_optimizers(stages, known, by_sizes, None, replicated=True, sharded=True)
    try_optimizers(stages, known, MAKERS["adamw"], None, replicated=True, sharded=True)


@pytest.mark.parametrize("maker", [*MAKERS.values(), bounding])
def test_one_that_steps_every_element_by_itself_is_taken(maker: Any) -> None:
    try_optimizers(programs("mlp", 2), captured("mlp")[1].parameters, maker, None, replicated=True, sharded=True)

"""Gradients of large parameters are added while the backward runs: the same bits, and never all of them at once."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.stage import gradients as sinks
from raypipe.engine.stage.backward import gradients
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.stage import Site
from raypipe.engine.stage.weight_ring import WeightRing
from tests.engine.rings import program_of
from tests.exactness import same_bits
from tests.runs.test_exactness import compare

SIZE = 600
assert sinks.LARGE_BYTES < SIZE * SIZE * 4 < sinks.LARGE_ON_DEVICE_BYTES


def backwards(
    parameters: dict[str, torch.nn.Parameter], count: int, *, on_device: bool = False
) -> tuple[GradientSink, int]:
    """Some micro-batches through a chain of matrices, the first used twice; most bytes of gradients alive at once."""
    sites = (Site("a", 0), Site("small", 0), Site("b", 0), Site("c", 0), Site("a", 1))
    program = program_of(sites, parameters)
    sink = GradientSink(program, parameters, on_device=on_device)
    ring = WeightRing(program, parameters, watch=sink.watch)
    ring.begin(0, count)
    handed = 0
    for microbatch in range(count):
        ring.enter(microbatch, 0)
        a, small, b, c, again = ring.leaves(microbatch)
        x = torch.arange(4 * SIZE, dtype=torch.float32).reshape(4, SIZE).div(4 * SIZE).add(microbatch)
        y = torch.tanh((torch.tanh(x @ a) + small) @ b)
        loss = torch.tanh(torch.tanh(y @ c) @ again.t()).square().mean()
        found = gradients([loss], [torch.tensor(0.3)], ring.trained(microbatch))
        handed = max(handed, sum(g.untyped_storage().nbytes() for g in found if g is not None))
        ring.leave(microbatch)
        sink.add(found)
    sink.finish(())
    return sink, handed


def made() -> dict[str, torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (SIZE, SIZE), "small": (SIZE,), "b": (SIZE, SIZE), "c": (SIZE, SIZE)}
    return {n: torch.nn.Parameter(torch.randn(shape, generator=draw) / SIZE**0.5) for n, shape in shapes.items()}


def test_the_same_bits_in_less_memory_or_without_hooks() -> None:
    early = made()
    _, handed = backwards(early, 3)
    assert handed < 2 * SIZE * 4, "all but the small parameter's was taken on the way"
    late = made()
    _, handed = backwards(late, 3, on_device=True)
    assert handed > 4 * SIZE * SIZE * 4
    for name, parameter in late.items():
        assert parameter.grad is not None
        assert early[name].grad is not None
        assert torch.equal(parameter.grad, early[name].grad), name
        assert parameter.grad.abs().max() > 0


def test_a_sum_that_a_graph_adds_to_has_the_bits_of_a_copied_one() -> None:
    """The first of an update is copied, or added to a sum that was opened, in memory of the update before."""
    odd = torch.tensor([-0.0, 0.0, 1e-45, torch.inf, torch.nan])
    parameters = {"a": torch.nn.Parameter(torch.ones(5))}
    program, found = program_of((Site("a", 0),), parameters), []
    for fixed in (False, True):
        sink = GradientSink(program, parameters, fixed=fixed)
        for gradient in (torch.ones(5), odd):
            sink.reset()
            if fixed:
                sink.open([0])
            sink.add([gradient])
        found += sink.sums_of(0, [0])
    assert same_bits(*found)


def test_lanes_are_summed_in_their_order() -> None:
    """(g0 + g3) + (g1 + g4) + g2, by hooks and by calls, and the memory of all lanes is used again."""
    parameters = made()
    sites = tuple(Site(name, 0) for name in parameters)
    program = program_of(sites, parameters)
    sink = GradientSink(program, parameters, lanes=3)
    ring = WeightRing(program, parameters, watch=sink.watch)
    draw = torch.Generator().manual_seed(1)
    kept: list[set[int]] = []
    for _ in range(2):
        ring.begin(0, 5)
        scales = torch.rand(5, generator=draw) / 3
        for microbatch, scale in enumerate(scales):
            ring.enter(microbatch, 0)
            sink.use_lane(microbatch % 3)
            leaves = ring.leaves(microbatch)
            roots = [sum(leaf.square().sum() for leaf in leaves if leaf.shape != (SIZE,) or microbatch != 2)]
            sink.add(gradients(roots, [scale], ring.trained(microbatch)))  # type: ignore[list-item]
            ring.leave(microbatch)
        sink.close()
        sink.finish(())
        for name, parameter in parameters.items():
            g = [2 * parameter.detach() * scale for scale in scales]
            lanes = [g[0] + g[3], g[1] + g[4], g[2]]
            total = lanes[0] + lanes[1] + lanes[2] if name != "small" else lanes[0] + lanes[1]
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, total), name
        sink.reset()
        kept.append({x.data_ptr() for kept_of_site in sink._kept for x in kept_of_site})
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("count", "lanes", "first", "sums"),
    [(5, 5, 0, 1), (3, 5, 0, 1), (2, 5, 2, 1), (2, 5, 4, 2), (6, 5, 0, 5), (10, 5, 10, 5)],
    ids=["each", "fewer", "later", "around", "one more", "twice"],
)
def test_lanes_of_one_micro_batch_each_are_summed_as_they_come(count: int, lanes: int, first: int, sums: int) -> None:
    """To the bits of sums that are kept apart, in the memory of one; an update begins at any lane."""
    program = program_of((Site("a", 0),), {"a": torch.nn.Parameter(torch.zeros(1000))})
    draw = torch.Generator().manual_seed(2)
    gradients_of = [torch.randn(1000, generator=draw) for _ in range(count)]
    totals, held = [], []
    for way in ({}, {"apart": True}, {"exchanged": True}):
        parameters = {"a": torch.nn.Parameter(torch.zeros(1000))}
        sink = GradientSink(program, parameters, lanes, **way)
        for number, gradient in enumerate(gradients_of):
            sink.enter(first + number, count)
            sink.add([gradient])
        held.append(sum(x is not None for of_lane in sink._sums_of_lanes for x in of_lane))
        sink.close()
        sink.finish(())
        totals.append(parameters["a"].grad)
    assert held == [sums, min(count, lanes), min(count, lanes)]
    assert totals[0] is not None
    assert all(torch.equal(totals[0], total) for total in totals[1:] if total is not None)
    assert None not in totals


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "cnn", "unet", "buffers", "attention", "frozen-middle"])
def test_whole_steps_are_exact_when_every_gradient_counts_as_large(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "LARGE_BYTES", 1)
    assert compare(name, 2, "slack", "ragged-epoch") == []

"""Replicas exchange gradients beside the backward that makes them: the large ones early, and abandoned with it."""

from __future__ import annotations

import threading

import pytest
import torch

from raypipe.engine.optim.slices import chunks_of
from raypipe.engine.reduction import last_backwards
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.stage import Site
from raypipe.errors import LinkError
from raypipe.ir import communication
from raypipe.ir.schedule import Op, parse_action
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.replicas import Replicas as PlannedReplicas
from raypipe.planner.schedule.sync import one_f_one_b
from tests.engine.rings import exchanges_of, program_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("small_chunks")]

SHAPES = {"first": (300, 200), "bias": (7,), "second": (200, 99), "third": (1000, 90)}
REPLICAS = 2
TIMEOUT_S = 60.0


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 500 kB, which end at a site from 62 kB on."""
    monkeypatch.setattr(communication, "CHUNK_BYTES", 500_000)


class Pair:
    """Two replicas of a stage, with their sinks."""

    def __init__(self) -> None:
        known = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
        program = program_of(tuple(Site(name, 0) for name in known), known)
        self.sinks = [GradientSink(program, known, REPLICAS, exchanged=True) for _ in range(REPLICAS)]
        self.works, self.ends = exchanges_of(self.sinks, REPLICAS)

    def leaves(self, me: int) -> list[torch.Tensor]:
        """Leaves that a backward would have, watched by the sink of a replica."""
        found = []
        for position, shape in enumerate(SHAPES.values()):
            leaf = torch.ones(shape).requires_grad_()
            self.sinks[me].watch(position, leaf)
            found.append(leaf)
        return found


def backward(pair: Pair) -> None:
    """Give the first replica all gradients of its lane."""
    leaves = pair.leaves(0)
    pair.sinks[0].use_lane(0)
    pair.sinks[0].add(list(torch.autograd.grad(sum(leaf.sum() for leaf in leaves), leaves)))  # type: ignore[arg-type]


def test_a_replica_that_is_gone_is_told_where_the_stage_waits() -> None:
    pair = Pair()
    pair.works[0].begin(3)
    backward(pair)
    pair.ends[1, 0].abort("it died")
    with pytest.raises(LinkError, match="it died"):
        pair.works[0].run(3)


def test_an_exchange_is_abandoned_with_its_step() -> None:
    """The thread ends by itself, whether it waits for a gradient or for a replica whose channel is aborted."""
    before = set(threading.enumerate())
    pair = Pair()
    pair.works[0].begin(3)
    backward(pair)  # the thread waits for the other replica
    pair.works[1].begin(3)  # and the other one for a gradient
    for work in pair.works:
        work.abandon()
    pair.ends[0, 1].abort("the step failed")
    for thread in set(threading.enumerate()) - before:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_large_use_sites_come_first_and_the_last_layer_first_of_them() -> None:
    """What a backward completes early is exchanged early; every element is in one chunk."""
    trained = [torch.zeros(shape) for shape in SHAPES.values()]
    chunks = chunks_of(trained, Placement(((0, 1),), 0, REPLICAS))
    assert [chunk.sites for chunk in chunks] == [[3], [2], [0], [1]]
    into: list[torch.Tensor | None] = [torch.full_like(x, -1.0) for x in trained]
    for chunk in chunks:
        flat = chunk.flattened([trained[site] for site in chunk.sites])
        chunk.write([chunk.slice_of(worker, flat) for worker in (0, 1)], into)
    assert all(torch.equal(x, y) for x, y in zip(into, trained, strict=True))  # type: ignore[arg-type]


def test_the_last_backward_of_a_row_is_found() -> None:
    words = "0F5 0B3 0F7 0B5 0B7 0SEND_B7 0REDUCE_GRAD7 0REDUCE_NORM7 0STEP7"
    row = [parse_action(word) for word in words.split()]
    assert last_backwards(row) == {4: 7}
    lowered = lower(one_f_one_b(2, 4, 0, PlannedReplicas((2, 1), 2)))
    for row in lowered.body:
        (place,) = last_backwards(row)
        assert all(action.op is not Op.B for action in row[place + 1 :])

"""The graph of a model says what really crosses a cut, and which orders of its operations change no bit."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.capture import capture
from raypipe.capture.cut import check_order
from raypipe.data.open_data import open_data
from raypipe.engine.stage.randomness import RandomKey
from raypipe.errors import CaptureError, StageError
from raypipe.ir.graph import ModelGraph, Node, link_nodes
from tests import nets
from tests.capture.test_capture import Aliased, evaluated
from tests.exactness import (
    SHAPES,
    by_hand,
    captured,
    config_of,
    differences,
    expected,
    faults,
    optimizer_of,
    train,
    train_stages,
)
from tests.models import CASES, Case, case

pytestmark = pytest.mark.xdist_group("tracing")

SEEDS = range(3)


@pytest.fixture(autouse=True)
def more_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    cross_entropy = functional.cross_entropy
    monkeypatch.setitem(CASES, "branches", Case("branches", nets.Branches, CASES["cnn"].data, cross_entropy))
    monkeypatch.setitem(CASES, "towers", Case("towers", nets.Towers, CASES["mlp"].data, cross_entropy))


def random_order(graph: ModelGraph, num_stages: int, drawn: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(order, cuts): an order that keeps all that the graph asks for, cut anywhere where that parts nothing."""
    assert graph.edges is not None
    pairs = {*graph.edges, *graph.together, *graph.before}
    waits = {i: {a for a, b in pairs if b == i} for i in range(len(graph.nodes))}
    order: list[int] = []
    while waits:
        # Often far ahead in one branch, often all branches side by side.
        ready = sorted(i for i, needs in waits.items() if not needs)
        chosen = drawn.choice([ready[0], ready[-1], drawn.choice(ready)])
        order.append(chosen)
        del waits[chosen]
        for needs in waits.values():
            needs.discard(chosen)
    place = {at: i for i, at in enumerate(order)}
    closed = {cut for a, b in graph.together for cut in range(place[a] + 1, place[b] + 1)}
    return tuple(order), tuple(sorted(drawn.sample(sorted(set(range(1, len(order))) - closed), num_stages - 1)))


def columns_of(name: str, samples: int = 3) -> Any:
    source = open_data(case(name).data(4), seed=0)
    names: Any = (0, 1) if case(name).loss_fn is not None else source.columns
    batch: Any = source.read(0, 0, samples, names)
    return batch if isinstance(batch, dict) else dict(enumerate(batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, "branches", "towers", "gpt2", "llama"])
def test_cut_bytes_are_what_crosses(name: str) -> None:
    """At every place that may be cut, counted by running the stage before it; and edges and outputs say the same."""
    made = captured(name)[1]
    columns = columns_of(name, 2)  # as traced: a table of positions is shared out among these
    assert made.graph.cut_positions()
    for cut in made.graph.cut_positions():
        crossing = boundary(name, cut, columns)
        assert crossing
        assert made.graph.nodes[cut - 1].cut_bytes == sum(-(-t.nbytes // 2) for t in crossing)
    graph = made.graph
    assert graph.edges is not None
    assert link_nodes(graph.nodes, graph.edges, graph.together, graph.before) == graph


def boundary(name: str, cut: int, columns: Any) -> tuple[torch.Tensor, ...]:
    """What the first of two stages sends."""
    tensors = {**captured(name)[1].parameters, **captured(name)[1].buffers}
    function = captured(name)[1].programs((cut,))[0].train
    leaves = [tensors[site.parameter] for site in function.sites]
    buffers = [tensors[buffer].clone() for buffer in function.buffers]
    with torch.no_grad():
        return function(leaves, buffers, (), [columns[column] for column in function.columns], RandomKey(0, 0, 0))


@pytest.mark.parametrize("name", ["cnn", "unet", "buffers", "frozen-middle"])
def test_bytes_are_those_of_the_model(name: str) -> None:
    model, made = captured(name)
    nodes = made.graph.nodes
    assert sum(n.param_bytes for n in nodes) == sum(p.nbytes for p in model.parameters())
    assert sum(n.frozen_bytes for n in nodes) == sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert sum(n.buffer_bytes for n in nodes) == sum(b.nbytes for b in model.buffers())
    if made.graph.edges and nodes[0].name == "conv2d":
        assert nodes[0].output_bytes == 8 * 8 * 4 * made.parameters[nodes[0].param_names[0]].shape[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branches", "towers", "unet", "cnn", "noisy", "gpt2-untied", "llama"])
def test_any_order_that_the_graph_allows_is_exact(name: str) -> None:
    """Gradients, losses, buffers and parameters of plain PyTorch, to the bit."""
    made = captured(name)[1]
    moved = 0
    for seed in SEEDS:
        drawn = random.Random(seed)
        order, cuts = random_order(made.graph, drawn.choice([2, 3, 4]), drawn)
        stages = made.programs(cuts, order)
        first = set(order[: cuts[0]])
        moved += first != set(range(len(first)))
        shape = SHAPES["indivisible-by-k"]
        config = config_of(shape, len(stages), "1f1b", max_grad_norm=0.5)
        tensors = {**made.parameters, **made.buffers}
        run = train_stages(case(name), stages, tensors, config, shape, optimizer_of("adamw"), 5)
        assert faults(name, run, expected(name, shape, "adamw", max_grad_norm=0.5)) == []
    assert moved or name not in ("branches", "towers")  # the others are nearly chains


@pytest.mark.slow
def test_another_order_of_a_tied_model_is_that_of_one_stage() -> None:
    made = captured("gpt2")[1]
    order, cuts = random_order(made.graph, 3, random.Random(3))
    shape = SHAPES["even"]
    config = config_of(shape, 3, "slack")
    tensors = {**made.parameters, **made.buffers}
    run = train_stages(case("gpt2"), made.programs(cuts, order), tensors, config, shape, optimizer_of("adamw"), 5)
    assert differences(run, train("gpt2", 1, shape, "1f1b", "adamw")) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["branches", "towers"])
def test_evaluation_follows_another_order(name: str) -> None:
    made, columns = captured(name)[1], columns_of(name)
    wanted = evaluated(name, columns)
    tensors = {**made.parameters, **made.buffers}
    for seed in SEEDS:
        order, cuts = random_order(made.graph, 3, random.Random(seed))
        carried: tuple[torch.Tensor, ...] = ()
        for program in made.programs(cuts, order):
            function = program.eval
            assert {site.parameter for site in function.sites} == {site.parameter for site in program.train.sites}
            leaves = [tensors[site.parameter] for site in function.sites]
            buffers = [tensors[buffer].clone() for buffer in function.buffers]
            read = [columns[column] for column in function.columns]
            with torch.no_grad():
                carried = function(leaves, buffers, carried, read, RandomKey(0, 0, 0))
        assert torch.equal(carried[0], wanted)


def find(graph: ModelGraph, *modules: str) -> list[int]:
    return [next(i for i, node in enumerate(graph.nodes) if node.module == module) for module in modules]


def test_two_gradients_may_come_in_either_order() -> None:
    """The skip of a U-Net: the pool and the concatenation, of which one comes first anyway; no pair is added."""
    graph = captured("unet")[1].graph
    names = {graph.nodes[a].name.split("_")[0] for a, _ in graph.before}
    assert names <= {"add"} | {"conv2d", "relu"}
    counters = [i for i, node in enumerate(graph.nodes) if node.name.startswith("add_")]
    for at in counters:  # of batches: they feed nothing, and stay at the norm that they belong to
        assert (at, at + 1) in graph.before
        assert graph.nodes[at].module == graph.nodes[at + 1].module


@pytest.mark.slow
def test_what_is_changed_in_place_keeps_its_order_and_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "aliased", Case("aliased", Aliased, CASES["mlp"].data, functional.cross_entropy))
    made = captured("aliased")[1]
    assert made.graph.together
    shape = SHAPES["even"]
    for seed in range(6):
        drawn = random.Random(seed)
        order, cuts = random_order(made.graph, 2, drawn)
        config = config_of(shape, 2, "1f1b")
        tensors = {**made.parameters, **made.buffers}
        run = train_stages(case("aliased"), made.programs(cuts, order), tensors, config, shape, optimizer_of("sgd"), 5)
        assert faults("aliased", run, expected("aliased", shape, "sgd")) == []


@pytest.mark.slow
def test_without_kept_orders_the_bits_would_change() -> None:
    """The last of four branches in the first stage: its gradient is then added last instead of first."""
    made = captured("branches")[1]
    last = find(made.graph, "pool.0")[0]
    first = range(find(made.graph, "one.0")[0])
    order = (*first, last, *(i for i in range(len(made.graph.nodes)) if i not in first and i != last))
    cuts = (len(first) + 1,)
    with pytest.raises(CaptureError, match="must not run before it"):
        made.programs(cuts, order)
    free = dataclasses.replace(made.recipe, graph=dataclasses.replace(made.graph, before=()))
    shape = SHAPES["even"]
    tensors = {**made.parameters, **made.buffers}
    stages = free.programs(cuts, order)
    run = train_stages(case("branches"), stages, tensors, config_of(shape, 2, "1f1b"), shape, optimizer_of("sgd"), 5)
    assert faults("branches", run, expected("branches", shape, "sgd")) != []


NODES = tuple(Node(name, "", (), 0, 0) for name in "abc")


@pytest.mark.parametrize(
    ("graph", "order", "message"),
    [
        (ModelGraph(NODES, ((0, 1), (1, 2))), (1, 0, 2), "'a' in stage 1 and 'b', which reads what is made"),
        (ModelGraph(NODES, ((0, 2),), before=((0, 1),)), (1, 0, 2), "'a' .* 'b', which must not run before it"),
        (ModelGraph(NODES, ((0, 1), (0, 2)), ((0, 1),)), (0, 1, 2), "'b', which must share its stage"),
        (ModelGraph(NODES, ((0, 1),)), (0, 1), "names 2 positions, but the model has 3"),
        (ModelGraph(NODES, ((0, 1),)), (0, 1, 1), "each of which must come exactly once"),
    ],
)  # fmt: skip
def test_an_order_that_breaks_a_rule_is_refused(graph: ModelGraph, order: tuple[int, ...], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        check_order(graph, (1,), order)
    check_order(graph, (3,), (0, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["buffers", "tied-lm", "attention", "gpt2", "llama"])
@pytest.mark.parametrize("length", [2, 5, 11])
def test_another_number_of_tokens_is_exact(name: str, length: int) -> None:
    """Up to the size of the position table, which is the model's own limit."""
    length = min(length, 6) if name in ("buffers", "tied-lm") else length
    made = captured(name)[1]
    ids = torch.randint(0, 11, (3, length), generator=torch.Generator().manual_seed(8))
    numbered = case(name).loss_fn is not None
    columns: Any = {0: ids} if numbered else {"input_ids": ids, "labels": ids}
    wanted = evaluated(name, columns)
    middle = made.graph.cut_positions()[len(made.graph.cut_positions()) // 2]
    assert torch.equal(by_hand(name, (middle,), "eval", columns, RandomKey(0, 0, 0))[0], wanted)


class AsksForLength(nn.Module):
    """Branches on the length in a way that no operation would notice on another length."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.head, self.way = nn.Embedding(11, 8), nn.Linear(8, 3), way

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        match self.way:
            case "more than":
                x = x * 2 if ids.shape[1] > 4 else x
            case "even":
                x = x * 2 if ids.shape[1] % 2 == 0 else x
            case "number":
                x = x / int(ids.shape[1])
            case "share":  # its guard has a function of torch that only symbols have
                x = x * 2 if int(ids.shape[1] * 0.5) > 2 else x
        return self.head(x).mean(1)


@pytest.mark.parametrize(
    ("way", "valid", "refusal"),
    [
        (
            "more than",
            (5, 6, 7, 8),
            r"came with 0.shape\[1\] = 2, but forward branches on sizes.* for 0.shape\[1\] >= 5",
        ),
        ("even", (2, 4, 6, 8), r"came with 0.shape\[1\] = 3, but .*0.shape\[1\].*2"),
        ("share", (6, 7), r"came with 0.shape\[1\] = 2, but forward branches on sizes.*sym_float\(0.shape\[1\]\)"),
        (
            "number",
            (6,),
            r"Column 0 came with shape \(4, 2\), .*traced for \(samples, 6\).*One shape is needed because",
        ),
    ],
)
def test_a_trace_is_used_for_the_lengths_that_take_its_branches(way: str, valid: Sequence[int], refusal: str) -> None:
    model, y = AsksForLength(way), torch.zeros(4, dtype=torch.int64)
    (program,) = capture(model, (torch.zeros(4, 6, dtype=torch.int64), y), (0, 1), functional.cross_entropy).programs(
        ()
    )
    refused = []
    for length in range(2, 9):
        ids = torch.randint(0, 11, (4, length), generator=torch.Generator().manual_seed(length))
        run = functools.partial(program.train, list(model.parameters()), (), (), [ids], RandomKey(0, 0, 0))
        if length in valid:
            assert torch.equal(run()[0], model(ids))
            continue
        with pytest.raises(StageError) as raised:
            run()
        refused.append(str(raised.value))
    assert re.search(refusal, refused[0])
    with pytest.raises(StageError, match=r"Column 0 came with shape \(4, 3, 1\)"):
        program.train(list(model.parameters()), (), (), [ids[:, :3, None]], RandomKey(0, 0, 0))

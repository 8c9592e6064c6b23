"""The memory model: in-flight formulas against the schedules themselves, sums, and refusals with numbers."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph, Node, most
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.cost.columns import Sums, stages_workspace, sums_of, workspace_bytes, workspace_lines
from raypipe.planner.cost.memory import MemoryModel, check_memory, stage_memory
from raypipe.planner.partition.antichain import antichain
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import fitting_partition, memory_of
from raypipe.planner.partition.prefix_sum import prefix_sum
from tests.planner.partition_cases import chain_of, clusters, graphs, limits

SOLVERS = [prefix_sum, antichain]


def node_bytes(model: MemoryModel, graph: ModelGraph, depth: int):
    """What each node adds to a stage of this depth, shape (nodes,)."""
    return model.at_depth(model.node_parts(graph), depth)


def held(node: Node) -> Sums:
    return sums_of(ModelGraph((node,)), range(1))


def test_a_stage_that_computes_again_holds_one_set_of_activations() -> None:
    model = MemoryModel(ScheduleSpec("1f1b", num_microbatches=8), recompute=(True, True, False))
    assert [model.activation_sets(3 - s) for s in range(3)] == [1, 1, 1]
    assert [model.in_flight(3 - s) for s in range(3)] == [3, 2, 1]
    assert MemoryModel(ScheduleSpec("gpipe", num_microbatches=8), recompute=True).activation_sets(1) == 1
    split = MemoryModel(ScheduleSpec("zb-h1", num_microbatches=8, slack=(1, 2, 1)), recompute=True)
    assert [split.activation_sets(4 - s) for s in range(4)] == [1, 3, 7, 9]  # what waits for W counts twice as ever
    node = Node("op", "", ("w",), 100, 0, 1.0, activation_bytes=7)
    found = stage_memory(model, held(node), 0, 3, receive_bytes=4, send_bytes=6)
    assert (found.activation_bytes, found.message_bytes, found.input_bytes) == (7, 4 * (3 + 1) + 6, 4)
    assert "activations of 1 micro-batch, computed again 7 B" in str(found)


def test_leaves_in_16_bits_have_the_versions_and_the_weights_are_there_once() -> None:
    node = Node("op", "", ("w", "f"), 100, 0, 1.0, frozen_bytes=20, activation_bytes=7)
    model = MemoryModel(ScheduleSpec("2bw", num_microbatches=8), optimizer_factor=2.0, leaf_factor=0.5)
    found = stage_memory(model, held(node), 0, 2)
    assert (found.weight_bytes, found.leaf_bytes, found.gradient_bytes, found.optimizer_bytes) == (100, 90, 80, 160)
    assert "weights x 1 100 B, leaves x 2 90 B, gradients 80 B" in str(found)
    (resident,) = node_bytes(model, ModelGraph((node,)), 2)
    assert resident == found.total_bytes - found.message_bytes
    plain = stage_memory(dataclasses.replace(model, leaf_factor=0.0), held(node), 0, 2)
    assert (plain.weight_bytes, plain.leaf_bytes) == (180, 0)
    predicted = dataclasses.replace(model, leaf_factor=0.0, predicts=True)
    found = stage_memory(predicted, held(node), 0, 2)
    assert (found.weight_bytes, found.leaf_bytes) == (100, 160), "frozen weights are not predicted"
    (resident,) = node_bytes(predicted, ModelGraph((node,)), 2)
    assert resident == found.total_bytes - found.message_bytes


def test_copies_of_the_state_are_a_line_of_their_own() -> None:
    """Two of a stage's own and two of another one: weights, optimizer and buffers, and no gradients."""
    graph = ModelGraph((Node("a", "", ("w",), 100, None, frozen_bytes=20, buffer_bytes=7),))
    without = MemoryModel(ScheduleSpec("1f1b"), optimizer_factor=2.0)
    model = dataclasses.replace(without, state_copies=4)
    found, plain = (stage_memory(m, sums_of(graph, range(1)), 0, 1) for m in (model, without))
    assert found.copy_bytes == 4 * (100 + 160 + 7)
    assert found.total_bytes == plain.total_bytes + found.copy_bytes
    assert "copies of the state 1.0 KiB" in str(found)
    assert "copies" not in str(plain)
    assert int(node_bytes(model, graph, 1)[0]) == int(node_bytes(without, graph, 1)[0]) + found.copy_bytes


@pytest.mark.slow
@given(graphs(most=8), limits(), st.integers(1, 5), st.data())
def test_nodes_add_up_to_the_stage(graph, bounds, depth, data):
    cut = data.draw(st.integers(0, len(graph.nodes)))
    by_node = node_bytes(bounds.memory, graph, depth)
    halves = (range(cut), range(cut, len(graph.nodes)))
    parts = [stage_memory(bounds.memory, sums_of(graph, half), 0, depth) for half in halves]
    assert sum(part.total_bytes for part in parts) == by_node.sum()
    assert parts[0].total_bytes == by_node[:cut].sum()


@pytest.mark.slow
@given(graphs(most=6), limits(), st.integers(1, 5))
def test_deeper_stages_never_need_less(graph, bounds, depth):
    assert (node_bytes(bounds.memory, graph, depth) <= node_bytes(bounds.memory, graph, depth + 1)).all()


def test_what_a_stage_holds_by_name() -> None:
    node = Node("op", "", ("w",), 100, 0, 1.0, activation_bytes=7, frozen_bytes=40, buffer_bytes=5)
    model = MemoryModel(ScheduleSpec("pipedream"), microbatch_size=2, optimizer_factor=2.0, reserve_bytes=11)
    found = stage_memory(model, held(node), 1, 3, receive_bytes=4, send_bytes=6)
    assert (found.in_flight, found.versions, found.action) == (3, 3, "1F2")
    assert (found.weight_bytes, found.gradient_bytes, found.optimizer_bytes) == (60 * 3 + 40, 60, 120)
    assert (found.buffer_bytes, found.activation_bytes, found.message_bytes) == (5, 42, 44)
    assert found.total_bytes == 220 + 60 + 120 + 5 + 42 + 44 + 11


@pytest.mark.parametrize(("kind", "versions"), [("1f1b", 1), ("2bw", 2), ("pipedream", 4)])
def test_weight_versions_follow_the_schedule_unless_given(kind: str, versions: int) -> None:
    assert MemoryModel(ScheduleSpec(kind, num_microbatches=8)).versions(4) == versions
    assert MemoryModel(ScheduleSpec(kind, num_microbatches=8), weight_versions=3).versions(4) == 3


def test_fewer_updates_need_fewer_versions() -> None:
    by_interval = [MemoryModel(ScheduleSpec("pipedream", update_interval=u)).versions(4) for u in (1, 2, 3, 4)]
    assert by_interval == [4, 3, 2, 2]
    assert MemoryModel(ScheduleSpec("pipedream"), version_limit=2).versions(4) == 2
    assert MemoryModel(ScheduleSpec("pipedream"), version_limit=2).versions(1) == 1


def test_a_refusal_names_stage_action_numbers_and_the_cure() -> None:
    node = Node("op", "", ("w",), 1 << 20, 0, 1.0, activation_bytes=1 << 19)
    model = MemoryModel(ScheduleSpec("1f1b", num_microbatches=8), microbatch_size=2)
    found = [stage_memory(model, held(node), s, 2 - s) for s in range(2)]
    check_memory(found, [found[0].total_bytes, None])
    with pytest.raises(PlanError) as caught:
        check_memory(found, [5 << 20, 5 << 20])
    text = str(caught.value)
    assert text.startswith(
        "Stage 0 needs 6.0 MiB at 0F1, 1.0 MiB more than its limit of 5.0 MiB: weights x 1 1.0 MiB, "
    )
    assert "activations of 2 micro-batches 2.0 MiB" in text
    assert text.endswith("Use smaller micro-batches, more stages, or a schedule with fewer micro-batches in flight.")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MemoryModel(ScheduleSpec("interleaved")), "No memory model for the schedule 'interleaved'"),
        (lambda: MemoryModel(optimizer_factor=-1.0), "at least 0"),
        (lambda: Limits(num_stages=0), "at least 1"),
    ],
)
def test_impossible_models_are_refused(make, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        make()


# Plans that fit.


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=25, deadline=None)
@given(graphs(most=8), clusters(), limits(exact=False))
def test_a_fitting_partition_fits_with_its_messages(solver, graph, cluster, bounds):
    try:
        found = fitting_partition(solver, graph, cluster, bounds)
    except PlanError:
        return
    for stage, memory in zip(found.stages, memory_of(graph, found, bounds.memory), strict=True):
        assert memory.total_bytes == stage.memory_bytes
        for device in stage.devices:
            limit = cluster.devices[device].memory_bytes
            assert limit is None or memory.total_bytes <= limit


@pytest.mark.parametrize("solver", SOLVERS)
def test_room_is_made_for_messages(solver) -> None:
    """Without messages the even cut fits into 21 bytes; with its 9 it does not, and the cut of 1 byte does."""
    nodes = [Node(f"op{i}", "", (), 0, cut, 1.0, activation_bytes=10) for i, cut in enumerate([1, 9, 9, 0])]
    graph = ModelGraph(tuple(nodes))
    memory = MemoryModel(ScheduleSpec("gpipe"), reserve_bytes=0)
    cluster = Cluster.uniform(2, memory_bytes=28)
    free = solver(graph, cluster, Limits(memory=memory))
    assert free.cuts == (2,)
    assert free.stages[0].memory_bytes == 29
    with pytest.raises(PlanError):  # three nodes behind the cheap cut take 30
        fitting_partition(solver, graph, cluster, Limits(memory=memory))
    wider = Cluster.uniform(3, memory_bytes=28)
    found = fitting_partition(solver, ModelGraph(tuple(nodes[:3])), wider, Limits(memory=memory))
    assert max(stage.memory_bytes for stage in found.stages) <= 28


@pytest.mark.parametrize("solver", SOLVERS)
def test_room_is_made_for_the_workspace(solver) -> None:
    """Every node keeps 10 bytes, and the last one needs 15 more while it runs."""
    nodes = [Node(f"op{i}", "", (), 0, 0, 1.0, activation_bytes=10) for i in range(4)]
    nodes[3] = dataclasses.replace(nodes[3], workspace=((5, 10),))
    graph, memory = ModelGraph(tuple(nodes)), MemoryModel(ScheduleSpec("gpipe"))
    one_each = Limits(memory=memory)
    free = fitting_partition(solver, graph, Cluster.uniform(2, memory_bytes=35), one_each)
    assert (free.cuts, [stage.memory_bytes for stage in free.stages]) == ((2,), [20, 35])
    tight = fitting_partition(solver, graph, Cluster.uniform(3, memory_bytes=25), one_each)
    assert tight.cuts[-1] == 3
    assert [stage.memory_bytes for stage in tight.stages][-1] == 25
    with pytest.raises(PlanError, match="No cut into"):
        fitting_partition(solver, graph, Cluster.uniform(4, memory_bytes=24), one_each)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("all_need", [0, 20])
def test_what_one_stage_needs_takes_no_room_from_the_others(solver, all_need: int) -> None:
    """A head with large logits: the blocks have to fill their devices all the same."""
    nodes = [
        Node(f"op{i}", "", (f"w{i}",), 50, 0, 1.0, activation_bytes=1, workspace=((0, all_need),) if all_need else ())
        for i in range(8)
    ]
    nodes.append(Node("head", "", ("h",), 10, None, 0.1, activation_bytes=1, workspace=((0, 300),)))
    graph, memory = ModelGraph(tuple(nodes)), MemoryModel(ScheduleSpec("1f1b", num_microbatches=8))
    cap = 450 + all_need
    found = fitting_partition(solver, graph, Cluster.uniform(5, memory_bytes=cap), Limits(memory=memory))
    assert found.cuts == (2, 4, 6, 8)
    assert [m.total_bytes for m in memory_of(graph, found, memory)] == [stage.memory_bytes for stage in found.stages]


@pytest.mark.parametrize("nodes", [range(4), (0, 1, 2, 3), (3, 1, 0)])
def test_a_backward_runs_when_later_nodes_have_let_go(nodes) -> None:
    rows = [(5, ((20, 0),)), (9, ((0, 10), (8, 0))), (4, ()), (2, ((1, 2),))]
    graph = ModelGraph(
        tuple(
            Node(f"op{i}", "", (), 0, 0, 1.0, activation_bytes=kept, workspace=lines)
            for i, (kept, lines) in enumerate(rows)
        )
    )
    for samples in (1, 2, 5):
        expected, after = 0, 0
        for node in reversed(nodes):
            expected = max(expected, most(rows[node][1], samples) - after)
            after += samples * rows[node][0]
        assert workspace_bytes(graph, nodes, samples) == expected
        assert most(workspace_lines(graph, nodes), samples) == expected
    assert workspace_bytes(graph, range(0), 1) == workspace_bytes(graph, (2,), 1) == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=3)),
        min_size=1,
        max_size=12,
    )
)
def test_workspaces_of_all_stages_are_those_of_one_after_the_other(rows) -> None:
    graph = ModelGraph(
        tuple(
            Node(f"op{i}", "", (), 0, 0, 1.0, activation_bytes=kept, workspace=tuple(lines))
            for i, (kept, lines) in enumerate(rows)
        )
    )
    cuts = [(0, *cut, len(rows)) for cut in itertools.combinations(range(len(rows) + 1), 2)]
    expected = [[workspace_bytes(graph, range(*stage), 3) for stage in itertools.pairwise(cut)] for cut in cuts]
    assert stages_workspace(graph, np.array(cuts).reshape(-1, 4), 3).tolist() == expected


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_plan_that_does_not_fit_names_the_nearest_cut(solver) -> None:
    graph = chain_of([4, 4, 4, 4], params=10, kept=100)
    memory = MemoryModel(ScheduleSpec("gpipe", num_microbatches=8), microbatch_size=4)
    with pytest.raises(PlanError) as caught:
        fitting_partition(solver, graph, Cluster.uniform(2, memory_bytes=1000), Limits(memory=memory))
    text = str(caught.value)
    assert "In the nearest one, stage 0 needs 6.3 KiB at 0F7, and device0 offers 1000 B" in text

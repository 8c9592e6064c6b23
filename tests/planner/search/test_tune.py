"""Plans: what is left to the planner, and what a plan says to a person."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.plan import Plan
from raypipe.planner.search import Request, make_partition, make_plan, microbatches

GRAPH = ModelGraph(tuple(Node(f"op{i}", f"layers.{i}", (), 1 << 20, 4096) for i in range(8)))
REQUEST = Request(None, None, (), None, None, num_samples=1000)


def _plan(request: Request) -> Plan:
    return make_plan(request, make_partition(GRAPH, request), first_trainable=0)


def test_nothing_asked_for_is_two_stages_of_four_micro_batches_each() -> None:
    plan = _plan(REQUEST)
    assert (plan.partition.num_stages, plan.minibatch_size, plan.num_microbatches) == (2, 32, 8)
    assert plan.schedule.kind == "slack r=2"


def test_workers_offered_become_stages() -> None:
    assert _plan(replace(REQUEST, num_workers=4)).partition.num_stages == 4
    with pytest.raises(PlanError, match="4 stages, but scaling_config offers 2 workers"):
        _plan(replace(REQUEST, num_workers=2, num_stages=4))


def test_the_last_micro_batch_may_be_smaller() -> None:
    assert microbatches(replace(REQUEST, minibatch_size=10, num_microbatches=4), 2) == (10, 3, 4)
    assert microbatches(replace(REQUEST, num_samples=3), 4) == (3, 1, 3)


@pytest.mark.parametrize(("sizes", "said"), [
    ((32, 2), "2 micro-batches for 4 stages leave workers idle 60% of the time; num_microbatches=16 would leave 16%."),
    ((6, 2), "2 micro-batches for 4 stages leave workers idle 60% of the time; num_microbatches=6 would leave 33%."),
    ((3, 3), "3 micro-batches for 4 stages leave workers idle 50% of the time; a larger minibatch_size can be cut into "
     "more."),
    ((32, 1), "1 micro-batch for 4 stages leaves workers idle 75% of the time; num_microbatches=16 would leave 16%, "
     "where the loss allows several."),
])  # fmt: skip
def test_too_few_micro_batches_are_named_with_their_bubble(sizes: tuple[int, int], said: str) -> None:
    minibatch, count = sizes
    assert _plan(replace(REQUEST, num_stages=4, minibatch_size=minibatch, num_microbatches=count)).notes == (said,)


def test_a_plan_reads_as_a_table_and_as_json() -> None:
    plan = _plan(replace(REQUEST, num_stages=2, schedule="1f1b", num_microbatches=4))
    lines = plan.explain().splitlines()[5:]
    assert lines[0] == "plan: 2 stages, schedule 1f1b, 32 samples per step, 4 micro-batches of 8"
    assert lines[2].split() == ["0", "4.0", "MiB", "50%", "data", "2", "op0", "...", "op3"]
    assert lines[3].split() == ["1", "4.0", "MiB", "50%", "4.0", "KiB", "1", "op4", "...", "op7"]
    saved = json.loads(plan.to_json())
    assert saved["schedule"]["rows"][0] == "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"
    assert saved["partition"]["stages"][1]["start"] == 4

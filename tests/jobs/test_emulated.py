"""Emulated accelerators: whose turn it is, and that a run notices when a stage did something else."""

from __future__ import annotations

import itertools

import pytest
import torch

from jobs.lib import emulated
from jobs.lib.emulated import Block, own_seconds, plan_of_step, run_in_turn


def test_plans_take_turns_after_the_warm_up() -> None:
    turns = [plan_of_step(step, 3) for step in range(8)]
    assert turns == [1, 2, 0, 1, 2, 0, 1, 2]
    assert {plan_of_step(step, 1) for step in range(5)} == {0}


def test_a_block_takes_the_seconds_of_the_plan_whose_turn_it_is() -> None:
    block = Block([(0.0, 0.0)] * 3, 2, last=True)
    expected = list(itertools.chain.from_iterable([plan_of_step(step, 3)] * 2 for step in range(3)))
    assert [block.next_forward() for _ in range(6)] == expected


def test_a_lone_block_takes_what_it_is_told_to() -> None:
    """Its sleeps are shorter by what it needs itself, and never below nothing."""
    forward_s, backward_s = own_seconds()
    assert 0.0 <= forward_s < 0.01
    assert 0.0 <= backward_s < 0.01
    block = Block([(0.0, 0.0)], 1, last=True, own_s=(1.0, 1.0))
    block(torch.ones(1, 1)).sum().backward()
    assert block.weight.grad is not None


def test_a_gradient_tells_the_plan() -> None:
    block = Block([(0.0, 0.0)] * 3, 1, last=True)
    found = []
    for _ in range(4):
        block.weight.grad = None
        block(torch.ones(1, 1)).sum().backward()
        assert block.weight.grad is not None
        found.append(block.weight.grad.item())
    assert found == [2.0, 3.0, 1.0, 2.0]


@pytest.mark.slow
def test_every_plan_gets_its_steps() -> None:
    plans = [[(0.0, 0.0)] * 3, [(0.01, 0.02)] * 3]
    found = run_in_turn(plans, num_microbatches=4, rounds=2, local=True)
    assert [len(steps) for steps in found] == [2, 2]
    assert min(found[1]) >= (4 + 3 - 1) * (0.03 - sum(own_seconds()))


@pytest.mark.slow
def test_a_run_that_did_not_do_what_was_planned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Block):
        def next_forward(self) -> int:
            return 0

    monkeypatch.setattr(emulated, "Block", Stuck)
    with pytest.raises(RuntimeError, match="not what was planned"):
        run_in_turn([[(0.0, 0.0)] * 2] * 2, num_microbatches=2, rounds=1, local=True)

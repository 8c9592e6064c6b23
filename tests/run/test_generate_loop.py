"""The loop that generates: all groups go around at once, and each sequence gets the tokens that it gets alone."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from raypipe.engine.decoding import DecodeCall, ThreadDecoding
from raypipe.engine.sampling import Sampling
from raypipe.errors import StageError
from raypipe.run.generate_loop import Ending, HaltedError, Prompt, continued, group_size_of

pytestmark = pytest.mark.engine

VOCABULARY, NEW = 32, 12
EVERY = Ending(NEW)


class Toy:
    """A stage of a model whose next token is the sum of all tokens so far, plus the number of stages."""

    def __init__(self, *, last: bool) -> None:
        self.last = last
        self.totals: dict[int, torch.Tensor] = {}

    def run(self, call: DecodeCall, inputs: Any) -> tuple[torch.Tensor, ...]:
        for group in call.done:
            self.totals.pop(group, None)
        if not inputs:
            known = torch.zeros(1, dtype=torch.long) if call.prefill else self.totals[call.group]
            self.totals[call.group] = known + call.columns["input_ids"].sum(1)
            inputs = (self.totals[call.group],)
        value = inputs[0] + 1
        return (torch.nn.functional.one_hot(value % VOCABULARY, VOCABULARY).float(),) if self.last else (value,)


class OnAClock:
    """Toy stages in a time of their own, in which each stage takes one tick; it counts ticks and calls in flight."""

    def __init__(self, num_stages: int) -> None:
        self.stages = [Toy(last=at == num_stages - 1) for at in range(num_stages)]
        self.now = self.most = 0
        self._free = [0] * num_stages
        self._left: deque[tuple[int, int, torch.Tensor]] = deque()

    def submit(self, call: DecodeCall) -> None:
        outputs: tuple[torch.Tensor, ...] = ()
        at = self.now
        for number, stage in enumerate(self.stages):
            at = self._free[number] = max(at, self._free[number]) + 1
            outputs = stage.run(call, outputs)
        self._left.append((at, call.group, outputs[0]))
        self.most = max(self.most, len(self._left))

    def take(self) -> tuple[int, torch.Tensor]:
        self.now, group, logits = self._left.popleft()
        return group, logits


def prompt(count: int) -> Prompt:
    tokens = torch.randint(VOCABULARY, (count, 3), generator=torch.Generator().manual_seed(count))
    return Prompt(tokens, torch.ones_like(tokens))


def alone(given: Prompt, num_stages: int, ending: Ending) -> torch.Tensor:
    """Continue each sequence in a plain loop."""
    rows = []
    for row in given.tokens.tolist():
        new: list[int] = []
        while len(new) < NEW:
            ended = any(token in ending.eos for token in new)
            new.append(ending.pad if ended else (sum(row) + sum(new) + num_stages) % VOCABULARY)
        rows.append(row + new)
    return torch.tensor(rows)


@pytest.mark.parametrize("group_size", [1, 3, 8])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_each_sequence_is_continued_as_alone(num_stages: int, group_size: int) -> None:
    given = prompt(8)
    whole = alone(given, num_stages, EVERY)
    assert torch.equal(continued(OnAClock(num_stages), given, Sampling(), EVERY, group_size), whole)
    with ThreadDecoding([Toy(last=at == num_stages - 1) for at in range(num_stages)], range(num_stages)) as threads:  # type: ignore[misc]
        assert torch.equal(continued(threads, given, Sampling(), EVERY, group_size), whole)
    ending = Ending(NEW, eos=(int(whole[0, 5]), int(whole[4, 8])), pad=VOCABULARY - 1)
    ended = continued(OnAClock(num_stages), given, Sampling(), ending, group_size)
    wanted = alone(given, num_stages, ending)
    assert torch.equal(ended, wanted[:, : ended.shape[1]])
    assert (wanted[:, ended.shape[1] :] == ending.pad).all()


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
def test_no_stage_waits(num_stages: int) -> None:
    pipeline, size = OnAClock(num_stages), group_size_of(9, num_stages)
    continued(pipeline, prompt(9), Sampling(), EVERY, size)
    groups = -(-9 // size)
    assert pipeline.most == groups >= num_stages
    # Every stage works in every tick. Group by group it would take num_stages times as many.
    assert pipeline.now == groups * NEW + num_stages - 1


@pytest.mark.parametrize(
    ("count", "num_stages", "size"), [(1, 3, 1), (8, 1, 2), (8, 3, 2), (8, 5, 1), (64, 3, 16), (64, 16, 4)]
)
def test_groups_are_as_many_as_stages_need(count: int, num_stages: int, size: int) -> None:
    assert group_size_of(count, num_stages) == size


def test_caches_of_ended_groups_are_dropped() -> None:
    given, pipeline = prompt(4), OnAClock(2)
    whole = alone(given, 2, EVERY)
    first = whole[:, 3]
    assert len(first.unique()) > 1
    continued(pipeline, given, Sampling(), Ending(NEW, eos=(int(first[0]),)), 1)
    assert 0 not in pipeline.stages[0].totals


class Broken:
    def run(self, call: DecodeCall, inputs: Any) -> tuple[torch.Tensor, ...]:
        raise IndexError("index out of range")


def test_a_failure_names_its_stage() -> None:
    with (
        ThreadDecoding([Toy(last=False), Broken()], [0, 1]) as threads,  # type: ignore[list-item]
        pytest.raises(StageError, match="Stage 1 failed while it decoded: IndexError: index out of range"),
    ):
        continued(threads, prompt(4), Sampling(), EVERY, 1)


def test_a_halted_generation_ends_before_its_next_token() -> None:
    answers, pipeline = deque([False, False, True]), OnAClock(1)
    prompt = Prompt(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(HaltedError):
        continued(pipeline, prompt, Sampling(), EVERY, 1, answers.popleft)
    assert pipeline.now == 2

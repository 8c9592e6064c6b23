"""A replica that dies anywhere in a step: those that are left make the step, or begin it anew, to the same bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.engine.optim.state import Settings
from raypipe.engine.worker_progress import WorkerProgress, newest_common_step
from raypipe.ir.segment import Segment
from raypipe.planner.elastic import left
from raypipe.planner.segments import train_segments
from tests.engine.mortal import Counts, Job, Workers, job_of
from tests.exactness import same_bits

pytestmark = pytest.mark.engine

LANES, STEPS, SAMPLES = 3, 3, 24


@cache
def made(batch_norm_at: int) -> Job:
    """Two stages, with dropout in the first one, and statistics of batches in the one that has a single worker."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(8) if batch_norm_at == stage else nn.Identity() for stage in range(2)]
    model = nn.Sequential(nn.Linear(6, 8), norms[0], nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 8), norms[1], nn.ReLU())
    model.append(nn.Linear(8, 3))
    return job_of(
        model, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), Settings(0, "mean", 0.5, 120.0),
        SAMPLES,
    )  # fmt: skip


def workers(batch_norm_at: int, counts: Counts, states: Any = None, mortal: int | None = None) -> Workers:
    return Workers(made(batch_norm_at), counts, LANES, 4, states, mortal)


def segments() -> list[Segment]:
    return [segment for segment, _ in train_segments(SAMPLES, 8, 2, STEPS)]


@cache
def alone(batch_norm_at: int) -> Workers:
    """One worker for each stage, in the same lanes, which nobody disturbs."""
    found = workers(batch_norm_at, (1, 1))
    for segment in segments():
        found.run(segment)
    return found


def disturbed(batch_norm_at: int, counts: Counts, victim: int, messages: int) -> tuple[Workers, int, int]:
    """The run whose victim dies in the second step after so many messages, and who had made that step, of how many."""
    first, second, *rest = segments()
    before = workers(batch_norm_at, counts, mortal=victim)
    before.run(first)
    before.run(second, dies_after=messages)
    living = [worker for worker in range(len(before.executors)) if worker != victim]
    reached = [before.executors[worker].progress for worker in living]
    known = newest_common_step(reached, 1)
    assert known is not None, "nobody may have lost a step that another one has made"
    step, totals = known
    for worker, at in zip(living, reached, strict=True):
        if at.steps == step:
            before.executors[worker].undo()
        else:
            assert totals is not None
            for (report,) in before.executors[worker].finish(*totals):
                assert (report.step, report.grad_norm, report.loss) == (1, totals[0].item(), totals[1].item())
    remaining = left(before.setup.homes, {victim})
    assert [worker for workers in remaining for worker in workers] == living
    after = workers(batch_norm_at, tuple(map(len, remaining)), [before.states[worker] for worker in living])
    for segment in ([] if step == 2 else [second]) + rest:
        after.run(segment)
    return after, sum(at.steps == 2 for at in reached), len(living)


@pytest.mark.parametrize(
    ("batch_norm_at", "counts", "victim"),
    [
        (1, (2, 1), 0),
        (1, (3, 1), 1),
        (0, (1, 2), 1),
        (0, (1, 2), 2),
        (2, (2, 2), 0),
        (2, (2, 2), 3),
        (2, (2,), 0),
        (2, (3,), 2),
    ],
)
def test_a_replica_that_dies_after_any_message_loses_no_step(batch_norm_at: int, counts: Counts, victim: int) -> None:
    wanted = alone(batch_norm_at)
    shares = []
    for messages in range(workers(batch_norm_at, counts, mortal=victim).messages_of(segments()[0]) + 1):
        found, count, living = disturbed(batch_norm_at, counts, victim, messages)
        shares.append(count / living)
        placed = ((stage, worker) for stage, workers in enumerate(found.setup.homes) for worker in workers)
        for stage, worker in placed:
            state = found.states[worker][stage if len(counts) == 1 else 0]
            (twin,) = wanted.states[stage]
            assert state.updates == twin.updates == STEPS
            for ours, theirs in ((state.parameters, twin.parameters), (state.buffers, twin.buffers)):
                assert all(same_bits(ours[name], x) for name, x in theirs.items()), messages
            assert state.optimizer is not None
            assert twin.optimizer is not None
            assert state.optimizer.param_groups[0]["lr"] == twin.optimizer.param_groups[0]["lr"]
    assert shares[0] == 0.0, "without the victim the step cannot end"
    if (
        victim == 0 and len(counts) > 1
    ):  # which knows the norm first: the next stage hears it before the other replica, that has to be told
        assert any(0.0 < share < 1.0 for share in shares), "some have made the step, and others make it afterwards"


NORM, LOSS = torch.tensor(1.5), torch.tensor(0.25)


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([WorkerProgress(4), WorkerProgress(4, ready=True)], (4, None)),
        ([WorkerProgress(5, totals=(NORM, LOSS)), WorkerProgress(4, ready=True)], (5, (NORM, LOSS))),
        ([WorkerProgress(5, totals=(NORM, LOSS)), WorkerProgress(None)], None),  # it has none of the gradients
        ([WorkerProgress(None), WorkerProgress(None)], (4, None)),
        ([WorkerProgress(6, totals=(NORM, LOSS)), WorkerProgress(4, ready=True)], None),
        (
            [WorkerProgress(4, overlapping=True), WorkerProgress(4, overlapping=True)],
            None,
        ),  # parts of the next steps have been made
    ],
)
def test_the_newest_step_that_all_can_have_made(
    workers: list[WorkerProgress], found: tuple[int, tuple[torch.Tensor, torch.Tensor] | None] | None
) -> None:
    assert newest_common_step(workers, 4) == found

"""What a worker of one plan leaves when it is given another: nothing, without a collection of cycles.

A worker freezes what it has when it is configured, so that no collection looks at it again: a cycle of that time stays
for good, and with it the sums of gradients that it holds.
"""

from __future__ import annotations

import gc
import linecache
import pickle
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe.capture import Capture, capture
from raypipe.data.open_data import open_data
from raypipe.engine.local import LocalFleet
from raypipe.engine.optim.state import Settings
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.segment import Order
from raypipe.planner.partition.chain import equal_parameters
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.segments import train_segments

pytestmark = pytest.mark.engine

SAMPLES, GENERATIONS = 16, 3


class Net(nn.Module):
    """Traced, so that its stages are generated source."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x + torch.relu(self.second(x)))  # type: ignore[no-any-return]


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def captured() -> tuple[Capture, RunSetup]:
    torch.manual_seed(0)
    source = open_data(TensorDataset(torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,))), seed=0)
    found = capture(Net(), source.read(0, 0, 2, (0, 1)), (0, 1), functional.cross_entropy)
    settings = Settings(0, "mean", 0.5, 60.0)
    return found, RunSetup(lambda named: torch.optim.AdamW(named, lr=1e-2), None, {"train": source}, settings)


def train_and_let_go(found: Capture, run: RunSetup, spec: ScheduleSpec, stages: int) -> dict[str, weakref.ref[Any]]:
    """One step of workers that are then given up; what they were made of."""
    schedule = lower(schedule_of(spec, stages))
    # As every plan comes to a worker: programs that nobody else has.
    programs = pickle.loads(pickle.dumps(found.programs(equal_parameters(found.graph, stages).cuts)))
    fleet = LocalFleet(run, GenerationSetup(programs, schedule.wiring.homes, lanes=spec.lanes), found.parameters)
    (segment, _), *_ = train_segments(SAMPLES, 16, 4, 1)
    list(fleet.run(iter([Order(segment)]), lambda _: schedule))
    fleet.stop()
    refs: dict[str, weakref.ref[Any]] = {}
    for worker, executor in enumerate(fleet.executors):
        for stage, work in executor.works.items():
            parts = {"work": work, "sums": work.sink, "versions": work.ring}
            beside = {f"channel {at}": one for at, one in enumerate(c for cs in work._channels.values() for c in cs)}
            refs |= {f"{name} of stage {stage}": weakref.ref(one) for name, one in {**parts, **beside}.items()}
        refs |= {f"{name} of worker {worker}": weakref.ref(one) for name, one in _of_worker(executor).items()}
        executor.let_go()
    return refs


def _of_worker(executor: Any) -> dict[str, Any]:
    exchanges = {f"exchange of stage {stage}": one for stage, one in executor._exchanges.items()}
    return {**exchanges, "executor": executor, "reduction": executor._reduction}


@pytest.mark.parametrize(
    ("spec", "stages"),
    [
        (ScheduleSpec("1f1b", 4), 2),
        (ScheduleSpec("zb-v", 4), 2),
        (ScheduleSpec("1f1b", 4, replicas=(2, 1), lanes=2), 2),
    ],
    ids=["a stage on each worker", "two stages on a worker", "replicas"],
)
def test_nothing_is_left_of_workers_that_are_let_go(spec: ScheduleSpec, stages: int, without_collections: None) -> None:
    found, run = captured()
    refs = train_and_let_go(found, run, spec, stages)
    assert not [name for name, ref in refs.items() if ref() is not None]


def test_sources_of_generated_functions_go_with_them(without_collections: None) -> None:
    found, run = captured()
    train_and_let_go(found, run, ScheduleSpec("1f1b", 4), 2)
    before = Counter(name.partition("#")[0] for name in linecache.cache)
    for _ in range(GENERATIONS):
        train_and_let_go(found, run, ScheduleSpec("1f1b", 4), 2)
    assert Counter(name.partition("#")[0] for name in linecache.cache) == before

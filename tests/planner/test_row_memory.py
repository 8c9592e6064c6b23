"""What rows make stages hold: the count against the formulas, the simulator, and the law that it stops growing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.ir.plan import peak_in_flight
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.cost.memory import MemoryModel, resident_of
from raypipe.planner.dependency_tables import build
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.search import Request, memory_model
from tests.planner.specs import spec_for

CHUNKED = ["interleaved", "zb-v"]


def request_for(kind: str, workers: int, chunks: int) -> Request:
    return Request(workers * chunks, workers, (), None, None, num_samples=1000, schedule=kind, optimizer_factor=0.0)


def chunks_of(kind: str, chunks: int) -> dict[str, int]:
    return {"chunks": chunks} if kind == "interleaved" else {}


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 3), st.data())
def test_the_count_is_the_formula_where_there_is_one(stages: int, count: int, k: int, data: st.DataObject) -> None:
    hops = st.lists(st.integers(1, 3), min_size=stages - 1, max_size=stages - 1)
    slack = data.draw(st.integers(1, 3) | hops.map(tuple))
    lag = data.draw(st.just(()) | st.tuples(*[st.integers(0, 6)] * stages))
    for kind in ("gpipe", "1f1b", "kfkb", "slack", "zb-h1"):
        spec = spec_for(kind, stages, count, group_size=k, slack=slack, lag=lag)
        made = schedule_of(spec, stages)
        model, found = MemoryModel(spec), resident_of(made)
        assert peak_in_flight(made) == found.in_flight == tuple(model.in_flight(stages - s) for s in range(stages))
        if kind != "zb-h1":
            assert found.activation_sets == found.in_flight
            assert found.recomputed_sets == (1,) * stages
            assert 1 <= found.message_slots <= max(count, model.message_slots)
        else:
            again = MemoryModel(spec, recompute=True)
            assert all(0 <= n - model.activation_sets(stages - s) <= 1 for s, n in enumerate(found.activation_sets))
            assert all(0 <= n - again.activation_sets(stages - s) <= 1 for s, n in enumerate(found.recomputed_sets))


def test_what_waits_for_its_weights_counts_twice() -> None:
    found = resident_of(schedule_of(ScheduleSpec("zb-h1", 8, slack=(1, 2, 1)), 4))
    formula = MemoryModel(ScheduleSpec("zb-h1", num_microbatches=8, slack=(1, 2, 1)))
    assert [formula.activation_sets(4 - s) for s in range(4)] == [5, 6, 8, 9]
    assert found.activation_sets == tuple(formula.activation_sets(4 - s) + 1 for s in range(4))
    few = MemoryModel(ScheduleSpec("zb-h1", num_microbatches=3, slack=(1, 2, 1)))
    assert [few.activation_sets(4 - s) for s in range(4)] == [3, 4, 5, 5]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHUNKED)
@settings(max_examples=30, deadline=None)
@given(workers=st.integers(1, 4), count=st.integers(1, 20))
def test_the_count_is_the_simulators(kind: str, workers: int, count: int) -> None:
    made = schedule_of(ScheduleSpec(kind, count, **chunks_of(kind, 2)), 2 * workers)
    assert resident_of(made).in_flight == build(lower(made)).peak_in_flight()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHUNKED)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_more_micro_batches_than_fill_it_hold_nothing_more(kind: str, workers: int) -> None:
    for chunks in (2, 3) if kind == "interleaved" else (2,):
        request = request_for(kind, workers, chunks)
        for count in (*range(1, 4 * workers * chunks, 3), *range(4 * workers * chunks, 5 * workers * chunks)):
            found = memory_model(request, workers * chunks, count, 1).resident
            assert found == resident_of(
                schedule_of(ScheduleSpec(kind, count, **chunks_of(kind, chunks)), workers * chunks)
            ), count


@pytest.mark.parametrize("kind", CHUNKED)
def test_a_model_that_was_counted_answers_by_depth(kind: str) -> None:
    model = memory_model(request_for(kind, 2, 2), 4, 8, 3)
    assert model.resident is not None
    assert [model.in_flight(4 - s) for s in range(4)] == list(model.resident.in_flight)
    assert [model.activation_sets(4 - s) for s in range(4)] == list(model.resident.activation_sets)
    assert (model.versions(4), model.message_slots) == (1, model.resident.message_slots)


def test_what_is_kept_free_is_shared_out() -> None:
    request = Request(6, 2, (), None, None, num_samples=9, schedule="interleaved", reserve_bytes=100)
    assert memory_model(request, 6, 4, 1).reserve_bytes == 34

"""torch.distributed.pipelining as a second opinion: its own rules on our plans.

The functions are private to torch, so they are only trusted in the version that they were read in.
"""

from __future__ import annotations

import contextlib
import io

import pytest
import torch

if not torch.__version__.startswith("2.13."):
    pytest.skip(f"the private functions were read in torch 2.13, this is {torch.__version__}", allow_module_level=True)

from torch.distributed.pipelining import schedules as oracle

from raypipe.ir.schedule import Op
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower, validate
from raypipe.planner.schedule.sync import interleaved, k_f_k_b, one_f_one_b
from raypipe.planner.schedule.text import from_csv, to_csv
from raypipe.planner.schedule.zero_bubble import zb_v
from raypipe.planner.simulator import Costs, makespan_s
from tests.planner.specs import sends_between

pytestmark = pytest.mark.engine


def plans():
    for stages in (1, 2, 3, 5, 6):
        uneven = tuple(1 + s % 3 for s in range(stages - 1))
        for microbatches in (1, 2, 5, 8, 12):
            yield schedule_of(ScheduleSpec("1f1b", microbatches), stages)
            yield schedule_of(ScheduleSpec("gpipe", microbatches), stages)
            for k in (2, 3, 5):
                yield schedule_of(ScheduleSpec("kfkb", microbatches, group_size=k), stages)
            yield schedule_of(ScheduleSpec("slack", microbatches, slack=(2,) * (stages - 1)), stages)
            yield schedule_of(ScheduleSpec("slack", microbatches, slack=uneven), stages)
            yield schedule_of(ScheduleSpec("zb-h1", microbatches, slack=(1,) * (stages - 1)), stages)
            yield schedule_of(ScheduleSpec("zb-h1", microbatches, slack=uneven), stages)
    for stages in (2, 4, 6, 8):
        for microbatches in (1, 2, 5, 8, 12):
            yield schedule_of(ScheduleSpec("zb-v", microbatches), stages)
    for workers in (1, 2, 3, 4):
        for microbatches in (1, 2, 3, 4, 7, 8, 12):
            for chunks in (1, 2, 3):
                yield interleaved(workers, microbatches, chunks)


def in_torch(schedule):
    """Rows as torch keeps them: rank -> actions."""
    return {
        worker: [oracle._Action.from_str(str(action)) for action in row] for worker, row in enumerate(schedule.body)
    }


def simulated(schedule):
    """What torch makes of our compute actions: its own sends and receives, run dry."""
    home = schedule.wiring.placement.__getitem__
    with_messages = oracle._add_send_recv(in_torch(schedule), home, schedule.num_stages)
    with contextlib.redirect_stdout(io.StringIO()):
        oracle._simulate_comms_compute({w: list(row) for w, row in with_messages.items()}, home, schedule.num_stages)
    return with_messages


def checked(schedule):
    homes = oracle._validate_schedule(
        in_torch(schedule), schedule.num_workers, schedule.num_stages, schedule.num_microbatches()
    )
    return tuple(homes[stage] for stage in range(schedule.num_stages))


@pytest.mark.slow
def test_torch_accepts_every_plan():
    for schedule in plans():
        assert checked(schedule) == schedule.wiring.placement
        simulated(schedule)
        validate(lower(schedule))


@pytest.mark.slow
def test_torch_sends_the_same_messages_in_the_same_order():
    for schedule in plans():
        lowered = lower(schedule)
        for worker, row in simulated(schedule).items():
            theirs = [str(a) for a in row if a.computation_type in (oracle.SEND_F, oracle.SEND_B)]
            ours = [str(a) for a in lowered.body[worker] if a.op in (Op.SEND_F, Op.SEND_B)]
            assert ours == theirs, (schedule.kind, worker)
            for peer in range(schedule.num_workers):
                arriving = [str(a) for a in sends_between(lowered, peer, worker)]
                placed = [
                    f"{_sender(a)}{'SEND_F' if a.computation_type is oracle.RECV_F else 'SEND_B'}{a.microbatch_index}"
                    for a in row
                    if a.computation_type in (oracle.RECV_F, oracle.RECV_B)
                    and schedule.wiring.placement[_sender(a)] == peer
                ]
                assert arriving == placed, (schedule.kind, peer, worker)


def _sender(receive):
    return receive.stage_index + (-1 if receive.computation_type is oracle.RECV_F else 1)


@pytest.mark.parametrize(
    ("workers", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 4, 3), (3, 2, 2), (4, 10, 2)]
)
def test_interleaved_is_torchs_own_order(workers, microbatches, chunks):
    """Wherever torch has the schedule at all (M a multiple of its rounds), row by row."""
    rows = interleaved(workers, microbatches, chunks).body
    for rank in range(workers):
        theirs = object.__new__(oracle.ScheduleInterleaved1F1B)
        theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches = chunks, workers, microbatches
        theirs.microbatches_per_round = microbatches // max(1, microbatches // workers)
        order = theirs._calculate_single_rank_operations(rank)
        assert [str(a) for a in rows[rank]] == [str(a) for a in order if a is not None]


def test_1f1b_is_torchs_own_order():
    """But for the last stage: torch's listing (not its execution) starts there with micro-batch 1."""
    for stages, microbatches in ((2, 4), (4, 8), (5, 6)):
        theirs = object.__new__(oracle.Schedule1F1B)
        theirs._num_stages, theirs._n_microbatches = stages, microbatches
        listing = theirs._get_pipeline_order()
        for rank in range(stages - 1):
            row = listing[rank]
            ours = [str(a) for a in one_f_one_b(stages, microbatches).body[rank]]
            assert ours == [str(a) for a in row if a is not None and a.computation_type is not oracle.REDUCE_GRAD]


@pytest.mark.slow
@pytest.mark.parametrize("latency_s", [0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_zb_v_is_no_longer_than_torchs(workers, latency_s):
    """As long from M = 2 P - 1 on, which is the least there is on free links, and shorter for fewer micro-batches."""
    ones, hops = (1.0,) * 2 * workers, (latency_s,) * (2 * workers - 1)
    costs = Costs(ones, (2.0,) * 2 * workers, ones, ones, hops, hops)
    for microbatches in (1, workers, 8, 16):
        theirs = object.__new__(oracle.ScheduleZBVZeroBubble)
        theirs.pp_group_size, theirs.num_stages, theirs._n_microbatches = workers, 2 * workers, microbatches
        listing = [theirs._calculate_single_rank_operations(rank) for rank in range(workers)]
        rows = from_csv("".join(",".join(str(a) for a in row if a is not None) + "\n" for row in listing))
        least = makespan_s(lower(rows), costs)
        found = makespan_s(lower(zb_v(2 * workers, microbatches)), costs)
        if microbatches >= 2 * workers - 1:
            assert found == pytest.approx(least)
        else:
            assert found < least


@pytest.mark.parametrize("schedule", [k_f_k_b(3, 5, 2), interleaved(2, 4, 2), zb_v(4, 3)], ids=lambda s: s.kind)
def test_torch_reads_and_writes_our_csv(tmp_path, schedule):
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text(to_csv(schedule))
    runtime = object.__new__(oracle._PipelineScheduleRuntime)
    runtime.pipeline_order = {}
    runtime._num_stages, runtime._n_microbatches = schedule.num_stages, schedule.num_microbatches()
    runtime.pp_group_size, runtime._stages, runtime._defer_pp_recv = schedule.num_workers, [], False
    runtime._load_csv(str(ours), format="compute_only")
    assert runtime.pipeline_order == in_torch(schedule)
    for worker, row in runtime.pipeline_order_with_comms.items():
        assert tuple(str(a) for a in row if a.is_compute_op) == tuple(map(str, schedule.body[worker]))
    runtime._dump_csv(str(theirs), format="compute_only")
    assert from_csv(theirs.read_text(), schedule.kind) == schedule

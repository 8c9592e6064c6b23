"""Plans carried out one after the other on living workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe import load_state_dict
from raypipe.engine.io.checkpoint import find_checkpoint
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import assemble
from raypipe.run.plans.later import another
from raypipe.run.plans.planning import plan_for
from raypipe.run.requests import Requests
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.worker.packing import stored
from tests.exactness import same_bits
from tests.run.plans.test_planning import STEPS, StopsAfter, trainer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_captures")]

STAGES = (2, 3, 2)
"""Of one plan after the other."""


def test_living_workers_take_one_plan_after_the_other(fleet: Fleet, tmp_path: Path) -> None:
    """Two stages, three, and two again, of other members: processes are kept, and the bits are those of one plan."""
    made = trainer(tmp_path, "changed", "noisy")
    job = made._prepared()
    blueprint = made._blueprint(job, STEPS, local=False)
    place, tensors = blueprint.spec.place, stored(job.tensors)
    processes = [member.facts["process"] for member in fleet.roster]
    planned, used = plan_for(blueprint.basis), []
    for generation, count in enumerate(STAGES):
        sources = []
        if generation:
            planned = plan_for(another(blueprint.basis, job.plan, num_stages=count), generation=generation)
            newest, _ = find_checkpoint(place)
            assert newest is not None
            sources = [newest.folder]
            tensors.let_go(job.persistent)
        requests, plan = Requests(), assemble(blueprint, planned)
        members = (3, 0) if generation == 2 else None
        fleet.configure(blueprint.setup, plan.setup, [*sources, tensors], members)
        used.append([fleet.roster.index(member) for member in fleet.in_use])
        run_loop(LoopSetup(fleet, blueprint.spec, plan, StopsAfter(requests, 2 * (generation + 1)), requests))
    assert [len(workers) for workers in used] == list(STAGES)
    assert used[2] == [3, 0]
    assert [member.worker for member in fleet.roster] == [1, None, None, 0]
    assert [member.facts["process"] for member in fleet.roster] == processes
    alone = trainer(tmp_path, "alone", "noisy").fit(STEPS, local=True, progress=False)
    found, wanted = load_state_dict(place.path), load_state_dict(alone.checkpoint)
    assert [key for key in wanted if not same_bits(found[key], wanted[key])] == []

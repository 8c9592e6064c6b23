"""What a worker's copies say besides the state, without a cluster."""

from __future__ import annotations

from pathlib import Path

from raypipe.engine.copy import CopyHeader
from raypipe.engine.data.stream import Mark
from raypipe.engine.local import LocalFleet
from raypipe.runtime.run.blueprint import assemble
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.workers.copies import WorkerCopies, joined
from raypipe.runtime.workers.copying_actor import CopyingActor
from raypipe.runtime.workers.remote_copy import RemoteCopy
from tests.engine.copy.stages import Stage
from tests.runs.test_streams import ResumablePairs, trainer


def test_whoever_takes_a_copy_hears_where_the_stream_goes_on() -> None:
    """Of the first of several stages that reads one."""
    stage, mark = Stage("sgd"), Mark(40, 2, 6, {"at": [6]})
    names, copies = (*stage.program.parameters, *stage.program.buffers), WorkerCopies(lambda: False)
    copies.begin(3, [stage.program], [stage.state], None, ())
    copies.take(5, must=True, mark=lambda number: mark)
    copies.wait_until_taken()
    copies.take(8, must=True)
    copies.wait_until_taken()
    told = []
    for step in (5, 8):
        remote = RemoteCopy(None, "me", 3, stage.program.index, step, names)
        source, moved, found = joined([remote], copies, "me", names)
        assert (set(source.names), moved.total) == (set(names), 0)
        told.append(found)
    copies.close()
    assert told == [mark, None]


def test_a_copy_that_a_worker_keeps_has_the_mark_of_its_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, "run", ResumablePairs(1000))
    job = made._prepared()
    blueprint = made._blueprint(job, 3, local=True)
    run, setup, plan = assemble(blueprint, job.planned)
    fleet, actor = LocalFleet(run, setup, job.tensors), CopyingActor()
    try:
        run_loop(fleet, blueprint.spec, plan, Journal("run", ""), Requests())
        actor._executor = executor = fleet.executors[0]
        actor._copies.begin(7, [work.program for work in executor.works.values()], executor.states, None, ())
        actor.keep_copy(0, 3, False)
        found = CopyHeader.from_json(actor.copy_header(7, 0, 3))
    finally:
        actor._copies.close()
        fleet.stop()
    assert found.mark is not None
    assert (Mark.of(found.mark).position, found.step) == (3 * 8, 3)

"""What torch.compile means for a plan: which stages it leaves as they are, and schedules that it cannot follow."""

from __future__ import annotations

from functools import reduce

from raypipe.engine.compiling import notes_of
from raypipe.errors import PlanError
from raypipe.ir.schedule import Op
from raypipe.prepare.job import Job

__all__ = ["noting_compiled"]

NOTE = (
    "compile_stages={backend!r}: stages are compiled before their first step, and again for every other size of "
    "micro-batch, which takes seconds; predicted seconds are of stages that are not compiled."
)


def noting_compiled(job: Job) -> Job:
    """The job, whose plan says what is compiled; as it is where nothing is asked for.

    Raises:
        PlanError: nothing could be compiled, or the schedule splits backwards.
    """
    backend = job.compile_stages
    if backend == "off":
        return job
    if any(action.op is Op.I for worker in range(job.num_workers) for action in job.plan.schedule.row(worker)):
        raise PlanError(
            f"compile_stages={backend!r} is not possible with this schedule, which runs a backward in two parts: that "
            "of a compiled stage is one piece. Take schedule='slack' or '1f1b', or compile_stages='off'."
        )
    notes = notes_of(job.programs)
    if len(notes) == len(job.programs):
        raise PlanError(
            f"compile_stages={backend!r} would have no effect: no stage can be compiled. {notes[0]} Leave it out, or "
            "give a model without dropout that is no nn.Sequential."
        )
    return reduce(Job.noting, [NOTE.format(backend=backend), *notes], job)

"""Schedules: who does what in which order, as plain data.

``schedule_of`` writes the compute actions of one optimizer step from a ScheduleSpec, one row per worker. ``lower`` adds
messages and the step, ``validate`` refuses what cannot work, ``raypipe.planner.simulate.serial`` tells what it costs,
and the executor carries rows out without thinking.

    ScheduleSpec -> schedule_of (or a CSV) -> lower -> validate -> simulate / execute

1F1B on 4 workers, 8 micro-batches, one slot per action (``draw``):

    0: F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7
    1:  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5  . B6  . B7  .
    2:  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6  . B7  .  .
    3:  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  .

kind         order of a worker                                   needs
gpipe        all forwards, all backwards                         memory of M micro-batches
1f1b         backwards as early as possible                      memory of S - s
kfkb         1F1B in groups of k                                 memory of k * (S - s), hides slow links
slack        1F1B that starts r_h forwards earlier per hop       memory of 1 + sum r_h, hides slow links
interleaved  1F1B over several stages per worker                 more messages, smaller bubble
zb-h1        slack with split backwards,  half of each put off   memory of 1 + sum r_h on every stage, smaller bubble
zb-v         two stages per worker, there and back, B split      memory of 1f1b's first stage, no bubble but the fill
pipedream    1F1B that never runs empty                          weight versions
2bw          the same, an update per mini-batch                  two weight versions

Stages may have replicas: see ``replicas``, and ``side_by_side`` for workers with several stages.

Left out: recomputation, and a limit on the messages
that wait at a receiver: a stage without backward is held back by nobody and may run a whole step ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Schedule
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule.asynchronous import continuous
from raypipe.planner.schedule.interleaved import interleaved
from raypipe.planner.schedule.replicas import Replicas
from raypipe.planner.schedule.side_by_side import side_by_side
from raypipe.planner.schedule.sync import gpipe, k_f_k_b, one_f_one_b, slack
from raypipe.planner.schedule.zero_bubble import zb_h1
from raypipe.planner.schedule.zero_bubble_v import zb_v

__all__ = ["schedule_of"]


def schedule_of(spec: ScheduleSpec, num_stages: int) -> Schedule:
    """The compute actions of one step; of an asynchronous kind, of a run from an empty pipeline to an empty one.

    Args:
        num_stages: S, over all workers.

    Raises:
        ScheduleError: a number is out of range for so many stages.
    """
    return replace(_MAKERS[spec.kind](spec, num_stages), kind=spec.name)


def _interleaved(spec: ScheduleSpec, num_stages: int) -> Schedule:
    if num_stages % spec.chunks:
        raise ScheduleError(
            f"{num_stages} stages cannot be shared out evenly, {spec.chunks} to each worker: make the first a multiple "
            "of the second."
        )
    workers = num_stages // spec.chunks
    return side_by_side(
        lambda count: interleaved(workers, count, spec.chunks, spec.first_trainable),
        spec.num_microbatches,
        _replicas(spec),
    )


def _zb_v(spec: ScheduleSpec, num_stages: int) -> Schedule:
    return side_by_side(
        lambda count: zb_v(num_stages, count, spec.first_trainable), spec.num_microbatches, _replicas(spec)
    )


def _continuous(spec: ScheduleSpec, num_stages: int) -> Schedule:
    return continuous(
        spec.kind,
        num_stages,
        spec.num_microbatches,
        spec.num_microbatches if spec.kind == "2bw" else spec.update_interval or spec.lanes,
        slack=spec.slack,
        first_trainable=spec.first_trainable,
        norm_per_stage=spec.overlap,
        replicas=_replicas(spec),
        per_replica=spec.per_replica,
    )


def _replicas(spec: ScheduleSpec) -> Replicas:
    return Replicas(spec.replicas, spec.lanes)


_MAKERS: Mapping[str, Callable[[ScheduleSpec, int], Schedule]] = {
    "gpipe": lambda spec, stages: gpipe(stages, spec.num_microbatches, spec.first_trainable, _replicas(spec)),
    "1f1b": lambda spec, stages: one_f_one_b(stages, spec.num_microbatches, spec.first_trainable, _replicas(spec)),
    "kfkb": lambda spec, stages: k_f_k_b(
        stages, spec.num_microbatches, spec.group_size, spec.first_trainable, _replicas(spec)
    ),
    "slack": lambda spec, stages: slack(
        stages, spec.num_microbatches, spec.slack, spec.first_trainable, _replicas(spec)
    ),
    "interleaved": _interleaved,
    "zb-h1": lambda spec, stages: zb_h1(
        stages,
        spec.num_microbatches,
        spec.slack,
        spec.first_trainable,
        overlap=spec.overlap,
        replicas=_replicas(spec),
    ),
    "zb-v": _zb_v,
    "pipedream": _continuous,
    "2bw": _continuous,
}

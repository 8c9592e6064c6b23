"""Schedules: the order of actions on every worker, as plain data.

``schedule_of`` writes the compute actions of one optimizer step from a ScheduleSpec, one row per worker. ``lower`` adds
messages and the step, ``validate`` rejects invalid rows, ``raypipe.planner.simulator`` computes the step time,
and the executor runs rows without any decision of its own.

    ScheduleSpec -> schedule_of (or a CSV) -> lower -> validate -> simulate / execute

1F1B on 4 workers, 8 micro-batches, one slot per action (``draw``):

    0: F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2 F6 B3 F7 B4  . B5  . B6  . B7
    1:  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5  . B6  . B7  .
    2:  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6  . B7  .  .
    3:  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7  .  .  .

S is the number of stages, s a stage, M the number of micro-batches, and r_h the slack of hop h, which joins stages h
and h + 1. Memory is counted in micro-batches in flight:

kind         order of a worker                                   needs
gpipe        all forwards, all backwards                         memory of M micro-batches
1f1b         backwards as early as possible                      memory of S - s
kfkb         1F1B in groups of k                                 memory of k * (S - s), hides slow links
slack        1F1B that starts r_h forwards earlier per hop       memory of 1 + sum r_h, hides slow links
interleaved  1F1B over several stages per worker                 more messages, smaller bubble
zb-h1        slack with split backwards, their W put off         memory of 1 + sum r_h, or less where lacking
zb-v         two stages per worker, in a V, with I and W         memory of 1f1b's first stage, no bubble but the fill
pipedream    1F1B that never runs empty                          weight versions
2bw          the same, an update per mini-batch                  two weight versions

Stages may have replicas: see ``replicas``, and ``side_by_side`` for workers with several stages.

Left out: recomputation, and a limit on the messages that wait at a receiver, so that a stage without a backward may run
a whole step ahead.
"""

from __future__ import annotations

from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Schedule
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule.asynchronous import continuous
from raypipe.planner.schedule.replicas import Replicas, side_by_side
from raypipe.planner.schedule.sync import gpipe, interleaved, k_f_k_b, one_f_one_b, slack
from raypipe.planner.schedule.zero_bubble import zb_h1, zb_v

__all__ = ["schedule_of"]


def schedule_of(spec: ScheduleSpec, num_stages: int) -> Schedule:
    """Build the compute actions of one step.

    An asynchronous kind gets a prologue and an epilogue too, so that it begins and ends with an empty pipeline.

    Args:
        num_stages: number of stages over all workers.

    Raises:
        ScheduleError: a number is out of range for so many stages.
    """
    return replace(_compute_actions(spec, num_stages), kind=spec.name)


def _compute_actions(spec: ScheduleSpec, num_stages: int) -> Schedule:
    count, first, replicas = spec.num_microbatches, spec.first_trainable, Replicas(spec.replicas, spec.lanes)
    match spec.kind:
        case "gpipe":
            return gpipe(num_stages, count, first, replicas)
        case "1f1b":
            return one_f_one_b(num_stages, count, first, replicas)
        case "kfkb":
            return k_f_k_b(num_stages, count, spec.group_size, first, replicas)
        case "slack":
            return slack(num_stages, count, spec.slack, first, replicas)
        case "zb-h1":
            return zb_h1(num_stages, count, spec.slack, first, overlap=spec.overlap, replicas=replicas, lag=spec.lag)
        case "zb-v":
            return side_by_side(lambda n: zb_v(num_stages, n, first), count, replicas)
        case "interleaved":
            workers, rest = divmod(num_stages, spec.chunks)
            if rest:
                raise ScheduleError(
                    f"{num_stages} stages cannot be shared out evenly, {spec.chunks} to each worker: make the first a "
                    "multiple of the second."
                )
            return side_by_side(lambda n: interleaved(workers, n, spec.chunks, first), count, replicas)
        case _:
            return continuous(spec, num_stages)

"""Schedules: who does what in which order, as plain data.

A generator writes the compute actions of one optimizer step, one row per worker. ``lower`` adds messages and
the step, ``validate`` refuses what cannot work, ``raypipe.planner.simulate.serial`` tells what it costs, and the
executor carries rows out without thinking.

    generator (sync, zero_bubble, zero_bubble_v, interleaved, or a CSV) -> lower -> validate -> simulate / execute

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
zb-h1        slack with parted backwards, half of each put off   memory of 1 + sum r_h on every stage, smaller bubble
zb-v         two stages per worker, there and back, B parted     memory of 1f1b's first stage, no bubble but the fill

Left out: replicas of a stage (each replica runs the same row), recomputation, and a limit on the messages
that wait at a receiver: a stage without backward is held back by nobody and may run a whole step ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Schedule
from raypipe.planner.schedule.interleaved import interleaved
from raypipe.planner.schedule.sync import gpipe, k_f_k_b, one_f_one_b, slack
from raypipe.planner.schedule.zero_bubble import zb_h1
from raypipe.planner.schedule.zero_bubble_v import zb_v

__all__ = ["KINDS", "make_schedule"]


def make_schedule(
    kind: str,
    num_stages: int,
    num_microbatches: int,
    *,
    group_size: int | None = None,
    slack: Sequence[int] | int | None = None,
    chunks: int | None = None,
    first_trainable: int = 0,
    overlap: bool = False,
) -> Schedule:
    """A schedule by name, compute actions only.

    Args:
        kind: one of ``KINDS``.
        num_stages: S, over all workers.
        num_microbatches: M, per optimizer step.
        group_size: k of kfkb.
        slack: r of slack and zb-h1, by hop or one for all; None is 1 for zb-h1.
        chunks: stages per worker of interleaved.
        first_trainable: lowest stage with a backward.
        overlap: steps of zb-h1 may overlap; those of other kinds never do.

    Raises:
        ScheduleError: unknown kind, an option that it lacks or does not have, or a number out of range.
    """
    if kind not in _MAKERS:
        near = get_close_matches(kind, _MAKERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ScheduleError(f"There is no schedule {kind!r}: choose one of {', '.join(KINDS)}.{hint}")
    option, make = _MAKERS[kind]
    given = {"group_size": group_size, "slack": slack, "chunks": chunks}
    for name, value in given.items():
        if name == option and value is None and kind not in _DEFAULTS:
            raise ScheduleError(f"The schedule {kind!r} needs {name}: say how many.")
        if name != option and value is not None:
            raise ScheduleError(f"The schedule {kind!r} has no {name}: leave out {name}={value}.")
    value = given.get(option)
    make = partial(make, overlap=overlap) if kind == "zb-h1" else make
    return make(num_stages, num_microbatches, _DEFAULTS.get(kind) if value is None else value, first_trainable)


def _interleaved(num_stages: int, num_microbatches: int, chunks: int, first_trainable: int) -> Schedule:
    if chunks < 1 or num_stages % chunks:
        raise ScheduleError(
            f"{num_stages} stages cannot be shared out evenly, {chunks} to each worker: make the first a multiple of "
            "the second."
        )
    return interleaved(num_stages // chunks, num_microbatches, chunks, first_trainable)


# By kind: the option that it needs ("" for none), and stages, micro-batches, option, first_trainable -> Schedule.
_MAKERS: dict[str, tuple[str, Callable[..., Schedule]]] = {
    "gpipe": ("", lambda s, m, _, first: gpipe(s, m, first)),
    "1f1b": ("", lambda s, m, _, first: one_f_one_b(s, m, first)),
    "kfkb": ("group_size", k_f_k_b),
    "slack": ("slack", slack),
    "interleaved": ("chunks", _interleaved),
    "zb-h1": ("slack", zb_h1),
    "zb-v": ("", lambda s, m, _, first: zb_v(s, m, first)),
}
_DEFAULTS = {"zb-h1": 1}

KINDS = tuple(_MAKERS)
"""Names of schedules, for configuration and messages."""

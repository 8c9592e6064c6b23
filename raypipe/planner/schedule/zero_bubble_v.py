"""ZB-V: two stages on every worker, there and back, with split backwards, so that no worker waits once it has begun.

Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 6; "Pipeline Parallelism with Controllable
Memory" (arXiv:2405.15362). The first worker holds the first stage and the last one: backwards begin where forwards
did, and all workers hold equally many activations.

The order comes from a timetable of a pipeline that has been full forever, in slots of one action:

    F of stage s and micro-batch m   6 m + 3 s
    I                                6 m + 3 (2 S - 2 - s) + 1
    W                                the slot after its I

A period of 6 slots has each of a worker's six actions once, in the turn F I W F I W of one stage and the other. Three
slots from a stage to the next leave two for the message, and use up the memory of 2 P activations at any time.

To fill and to drain it sooner than that, a step is played slot by slot: every worker takes what is due first among
what is ready and finds room. Behind a worker's last forward, W waits for whatever others wait for.

A latency of up to two slots per hop is paid once in a step, while the pipeline fills and drains, not per micro-batch.

Left out: what actions really take. All slots are equal, and links are free while the order is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Op, Schedule, Wiring, single_homes
from raypipe.planner.schedule.sync import check_counts
from raypipe.planner.tables import OP_CODE, pack

__all__ = ["zb_v"]

PERIOD, HOP = 6, 3
"""Slots of the timetable from a micro-batch to the next, and from a stage to the next."""

Turn = tuple[bool, int, int, Op]
"""Whether it can wait, the slot in which it is due (no two of a worker's are the same), stage and operation."""


def zb_v(num_stages: int, num_microbatches: int, first_trainable: int = 0) -> Schedule:
    """Worker w of P holds stages w and 2 P - 1 - w; forwards, I and W take turns, in micro-batch order on each stage.

    2 workers (4 stages), M=4, one slot per action:

        0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3   .
        1:   . 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    A worker holds at most 2 P activations between F and W, of both stages together: as many bytes as 1F1B keeps on the
    first of P workers. With free links and t_F = t_I = t_W a step takes max(6 M + P - 1, 3 M + 4 P - 2) slots, where
    1F1B on the same workers takes 6 (M + P - 1). From M = 2 P - 1 on every worker w begins in slot w, which is the
    earliest that it can, and then never stands still.

    Args:
        num_stages: S = 2 P.
        num_microbatches: M, per optimizer step.
        first_trainable: lowest stage with a backward; stages below hold nothing and take no room.

    Raises:
        ScheduleError: a number is out of range, or num_stages is odd.
    """
    check_counts(num_stages, num_microbatches, first_trainable)
    if num_stages % 2:
        fewer = f"{num_stages - 1} or " if num_stages > 1 else ""
        raise ScheduleError(
            f"zb-v puts two stages on every worker, but num_stages={num_stages} is odd: cut the model into {fewer}"
            f"{num_stages + 1} stages."
        )
    way = range(num_stages // 2)
    progress = _Progress.begin(num_stages, num_microbatches, first_trainable)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in way]
    while any(turns := [min(progress.ready(worker), default=None) for worker in way]):
        for row, turn in zip(rows, turns, strict=True):
            if turn is not None:
                *_, stage, op = turn
                row.append((stage, OP_CODE[op], progress.take(stage, op)))
    wiring = Wiring(
        single_homes((*way, *reversed(way))), num_microbatches, split_backward=True, first_trainable=first_trainable
    )
    return Schedule("zb-v", wiring, tuple(pack(*np.array(row).T) for row in rows), stride=num_microbatches)


@dataclass(slots=True)
class _Progress:
    """What has ended on every stage; each of its operations goes by micro-batch order, so numbers say it all.

    Attributes:
        forward, inputs, weights: by stage, micro-batches of which F, I and W have ended.
        num_microbatches, first_trainable: as in ``zb_v``.
    """

    forward: list[int]
    inputs: list[int]
    weights: list[int]
    num_microbatches: int
    first_trainable: int

    @classmethod
    def begin(cls, num_stages: int, num_microbatches: int, first_trainable: int) -> _Progress:
        forward, inputs, weights = ([0] * num_stages for _ in range(3))
        return cls(forward, inputs, weights, num_microbatches, first_trainable)

    def take(self, stage: int, op: Op) -> int:
        """The micro-batch whose turn it is, which counts as done from now on."""
        done = self.forward if op is Op.F else self.inputs if op is Op.I else self.weights
        done[stage] += 1
        return done[stage] - 1

    def ready(self, there: int) -> Iterator[Turn]:
        """What the worker of stage ``there`` on the way there, and of its counterpart on the way back, may do now.

        A forward on the way there may take the last room only if the oldest activation of that stage has been on the
        counterpart too. So there is no deadlock, whatever is chosen. Of the oldest micro-batch that is not done with,
        nothing but a forward on the way back could lack room, where the worker is full of activations of the way
        there. When the last of those was let in, the oldest had been on the counterpart: it was of an even older
        micro-batch, which is done with, and so left room.
        """
        forward, inputs, weights, first = self.forward, self.inputs, self.weights, self.first_trainable
        last = len(forward) - 1
        back = last - there
        room = last + 1 - sum(forward[stage] - weights[stage] for stage in (there, back) if stage >= first)
        end = PERIOD * (self.num_microbatches - 1) + HOP * back + 2
        for stage in (there, back):
            due = PERIOD * forward[stage] + HOP * stage
            if forward[stage] < (forward[stage - 1] if stage else self.num_microbatches):
                needed = 2 if stage == there and forward[back] == weights[there] else 1
                if room >= needed or stage < first:
                    yield False, due, stage, Op.F
            if stage < first:
                continue
            behind = HOP * (2 * last - stage) + 1
            if inputs[stage] < (inputs[stage + 1] if stage < last else forward[stage]):
                due = PERIOD * inputs[stage] + behind
                yield stage == first and due > end, due, stage, Op.I  # nobody waits for this one
            if weights[stage] < inputs[stage]:
                due = PERIOD * weights[stage] + behind + 1
                yield due > end, due, stage, Op.W

"""What a worker exchanges with the replicas of its stages: when it begins, over which links, how long it is waited for.

    row    ... 0F5 0B3 0F7 0B5 | 0B7 | 0SEND_B7 0REDUCE_GRAD7
                                 ^ the update's last backward here: the exchange begins beside it

It begins early where the update will surely be made, which is so in synchronous schedules; elsewhere, and where the
backward is split to be timed, behind the backward. Its bits are the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from raypipe.engine.crossing import Crossing
from raypipe.engine.device import Crosses, Device
from raypipe.engine.messages.channel import Channel
from raypipe.engine.placement import Placement
from raypipe.engine.replicas.all_reduce import AllReduce
from raypipe.engine.replicas.chunks import NOBODY
from raypipe.engine.replicas.slices import shared_out
from raypipe.engine.sharing import share_out, shares_out
from raypipe.engine.stage_work import StageWork
from raypipe.engine.state import Settings
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action, Op

__all__ = ["Exchange", "last_backwards"]

Tensors = Sequence[torch.Tensor | None]


class Exchange:
    """Of one worker.

    Args:
        works: of its stages.
        channels: to the other workers.
        device: that computes.
        settings: how long to wait for each message, the codec of sums of gradients, and whether replicas share out the
            optimizer's state: those of these stages step slices from now on.
    """

    def __init__(
        self,
        placement: Placement,
        works: Mapping[int, StageWork],
        channels: Mapping[int, Channel],
        device: Device,
        settings: Settings,
    ) -> None:
        self._works, self._channels = works, channels
        self._timeout_s = settings.timeout_s
        self._crossings = {stage: Crossing(device) for stage in works}
        """Each of the thread in which a stage exchanges, beside the one that computes."""
        shards = shares_out(placement, settings)
        for work in works.values():
            share_out(work.program, work.state, placement, settings)
        self._all_reduce = {
            stage: AllReduce(
                stage,
                placement,
                work.sink,
                partial(self._hand_over, stage),
                partial(self._wait_for, stage),
                settings.codec_sums,
                device,
                shared_out(work.program, work.state.parameters) if shards else NOBODY,
            )
            for stage, work in works.items()
        }

    def begin(self, stage: int, backward: int, last: int) -> None:
        """The last backward of an update that surely will be made is about to run.

        Args:
            backward: its micro-batch.
            last: micro-batch of the update, as in ``run``.
        """
        if backward != self._works[stage].split_microbatch:
            self._all_reduce[stage].begin(last)

    def run(self, stage: int, last: int) -> None:
        """Close the stage's sink with the totals over all lanes; what this takes is waited for.

        Args:
            last: micro-batch of the update.

        Raises:
            LinkError: a replica did not answer.
        """
        all_reduce, begin_s = self._all_reduce[stage], time.monotonic()
        all_reduce.run(last)
        if all_reduce.exchanges:
            self._works[stage].waited(time.monotonic() - begin_s)

    def gather(self, stage: int, last: int) -> None:
        """Have the parameters that the other replicas have stepped, where they share out the optimizer's state.

        Args:
            last: micro-batch of the update.

        Raises:
            LinkError: a replica did not answer.
        """
        begin_s = time.monotonic()
        self._all_reduce[stage].gather(last)
        self._works[stage].waited(time.monotonic() - begin_s)

    def abandon(self) -> None:
        """What was begun will not end."""
        for all_reduce in self._all_reduce.values():
            all_reduce.abandon()

    def let_go(self) -> None:
        """Nothing is exchanged any more. What exchanges a stage's sums knows this and holds the sums: a cycle."""
        self._all_reduce.clear()

    def _hand_over(self, stage: int, worker: int, action: Action, tensors: Tensors, in_host: int) -> None:
        self._works[stage].tally.exchanged_bytes += sum(x.nbytes for x in tensors if x is not None)
        copied = self._crossings[stage].to_host(tensors[in_host:], Crosses.REDUCED)
        self._channels[worker].send(action, (*tensors[:in_host], *copied), 0)

    def _wait_for(self, stage: int, worker: int, action: Action, in_host: int) -> tuple[torch.Tensor | None, ...]:
        try:
            message = self._channels[worker].recv(action, self._timeout_s)
        except LinkError as error:
            label = Action(stage, Op.REDUCE_GRAD, action.microbatch).label
            raise type(error)(f"Stage {stage} in {label}: {error}") from error
        return (*message[:in_host], *self._crossings[stage].to_device(message[in_host:], Crosses.REDUCED))


def last_backwards(row: Sequence[Action]) -> dict[int, int]:
    """Places in a row of backwards that are the last of their stage's update, with the micro-batch of its end."""
    found: dict[int, int] = {}
    newest: dict[int, int] = {}
    for place, action in enumerate(row):
        if action.op is Op.B:
            newest[action.stage] = place
        elif action.op is Op.REDUCE_GRAD and action.stage in newest:
            found[newest.pop(action.stage)] = action.microbatch
    return found

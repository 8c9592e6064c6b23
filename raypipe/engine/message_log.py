"""What one worker sent lately, for a neighbour that is lost and has to do its steps again alone.

    worker 0     step 20 | 0SEND_F80 0SEND_F81 ... norm, loss | step 21 ...      copy of step 20: kept from here on
    worker 1                                    (lost) --> a new one takes its copy of step 20 and what was sent to it

Messages are kept as they left, in their codecs, with the order that each step carried out and what all stages agreed
on at its end. Those since the copy before the newest one are wanted: the newest may not have reached its holder yet.
Memory is bounded: the oldest steps go first, and what has gone cannot be replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.engine.messages.frame import Frame, gather
from raypipe.engine.reached import Scalar
from raypipe.engine.tally import Totals
from raypipe.ir.action import EVALUATION
from raypipe.ir.schedule import Action, Op
from raypipe.ir.work_order import Order

__all__ = ["LEAST_BYTES", "KeepSent", "LoggedStep", "MessageLog", "Sent"]

LEAST_BYTES = 16 << 20
"""That a log may hold, however small the state of the worker is: too little for plans to count."""
KEPT = (Op.SEND_F, Op.SEND_B, Op.REDUCE_GRAD)
"""Norms are not exchanged again: their totals are known."""

KeepSent = Callable[[Action, Frame], None]


class Sent(NamedTuple):
    """A message as it left: ``payload`` is of uint8, and whoever decodes it does so in a copy."""

    header: bytes
    payload: NDArray[np.uint8]

    @property
    def size_bytes(self) -> int:
        return len(self.header) + self.payload.nbytes


class LoggedStep(NamedTuple):
    """A step that all stages have made.

    Attributes:
        order: that it carried out, without what else was wanted of it.
        totals: gradient norm of the whole model, and loss.
    """

    order: Order
    totals: tuple[Scalar, Scalar]


@dataclass(slots=True)
class _Step:
    order: Order
    totals: tuple[torch.Tensor, torch.Tensor] | None = None
    sent: dict[int, dict[Action, Sent]] = field(default_factory=dict)  # by peer

    def holds(self, microbatch: int) -> bool:
        first = self.order.segment.first_microbatch
        return first <= microbatch < first + len(self.order.segment.microbatch_samples)

    @property
    def size_bytes(self) -> int:
        return sum(self.bytes_to(peer) for peer in self.sent)

    def bytes_to(self, peer: int) -> int:
        return sum(message.size_bytes for message in self.sent.get(peer, {}).values())


class MessageLog:
    """See the module. One thread computes and begins steps, others send; any thread reads.

    Attributes:
        limit_bytes: that it may hold.
    """

    def __init__(self) -> None:
        self.limit_bytes = LEAST_BYTES
        self._lock = threading.Lock()
        self._steps: dict[int, _Step] = {}  # in their order, without a gap
        self._size_bytes = 0
        self._epoch = 0
        self._copied: int | None = None

    @property
    def keeps(self) -> bool:
        """Whether there is a copy of the state, without which nobody could begin with what is kept here."""
        return self._copied is not None

    def writer(self, peer: int) -> KeepSent:
        """For a channel to this peer; it keeps nothing any more once ``reopen`` is called."""
        return partial(self._keep, self._epoch, peer)

    def reopen(self) -> None:
        """What channels of before still send is of no interest, in any thread."""
        with self._lock:
            self._epoch += 1

    def begin(self, order: Order) -> None:
        """A step begins, perhaps anew; only of a synchronous schedule can it be replayed."""
        segment, lean = order.segment, order._replace(keep_spans=False, save_to="", keep_copy=False, memo=None)
        with self._lock:
            self._drop(step for step in self._steps if step >= segment.first_step)
            if not self.keeps or segment.update_interval is not None:
                return
            if self._steps and segment.first_step - 1 not in self._steps:
                self._drop(self._steps)
            self._steps[segment.first_step] = _Step(lean)

    def made(self, step: int, totals: Totals) -> None:
        """The worker has made this step.

        Args:
            totals: gradient norm of the whole model, and loss; None where stages took their norms alone, and know no
                such numbers.
        """
        with self._lock:
            if totals[0] is None or totals[1] is None:  # nor can such a step be replayed, or any before it
                self._drop(self._steps)
            elif step in self._steps:
                self._steps[step].totals = totals[0], totals[1]

    def copied(self, step: int, state_bytes: int) -> None:
        """A copy of the state after ``step`` steps is taken; all stages have the one before, as a rule.

        Args:
            state_bytes: of such a copy, as many as the log may hold too.
        """
        with self._lock:
            self.limit_bytes = max(LEAST_BYTES, state_bytes)
            if self._copied is not None and self._copied < step:
                before = self._copied
                self._drop(at for at in self._steps if at < before)
            self._copied = step
            self._bound()

    def forget_after(self, step: int) -> None:
        """The run has gone back to the state after ``step`` steps."""
        with self._lock:
            self._drop(at for at in self._steps if at >= step)
            self._copied = None if self._copied is None else min(self._copied, step)

    def clear(self) -> None:
        """The stages are others now."""
        with self._lock:
            self._drop(self._steps)
            self._copied = None

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    @property
    def steps(self) -> range:
        """That were made and lie here whole."""
        with self._lock:
            made = [step for step, known in self._steps.items() if known.totals is not None]
        return range(made[0], made[-1] + 1) if made else range(0)

    def bytes_to(self, peer: int) -> int:
        """Of all steps that lie here."""
        with self._lock:
            return sum(step.bytes_to(peer) for step in self._steps.values())

    @property
    def peers(self) -> frozenset[int]:
        """That anything was sent to."""
        with self._lock:
            return frozenset(peer for step in self._steps.values() for peer in step.sent)

    def logged(self, steps: range) -> list[LoggedStep]:
        """What stages did in these steps, which have to be among ``self.steps``."""
        with self._lock:
            found = [(self._steps[step].order, self._steps[step].totals) for step in steps]
        return [LoggedStep(order, (Scalar.of(known[0]), Scalar.of(known[1]))) for order, known in found if known]

    def messages(self, peer: int, step: int) -> Mapping[Action, Sent]:
        """What was sent to a peer in a step; nothing where the step has gone."""
        with self._lock:
            known = self._steps.get(step)
            return {} if known is None else dict(known.sent.get(peer, {}))

    def _keep(self, epoch: int, peer: int, action: Action, message: Frame) -> None:
        """From the thread that sends: copies the message."""
        if action.op not in KEPT or action.microbatch >= EVALUATION:
            return
        with self._lock:
            at = next((step for step in reversed(self._steps.values()) if step.holds(action.microbatch)), None)
        if at is None:  # nothing is kept, or the step had no room
            return
        sent = Sent(bytes(message.header), gather(message).numpy())
        with self._lock:
            if epoch != self._epoch or at is not self._steps.get(at.order.segment.first_step):
                return
            at.sent.setdefault(peer, {})[action] = sent
            self._size_bytes += sent.size_bytes
            self._bound()

    def _bound(self) -> None:
        """Needs the lock, as ``_drop`` does. A step that has no room alone goes too, and what it still sends."""
        while self._size_bytes > self.limit_bytes and self._steps:
            self._drop([next(iter(self._steps))])

    def _drop(self, steps: Iterator[int] | Mapping[int, _Step] | list[int]) -> None:
        for step in list(steps):
            self._size_bytes -= self._steps.pop(step).size_bytes

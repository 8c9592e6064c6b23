"""Copies on their way: a thread finishes those that were begun between two steps, and sends them to another worker.

worker A    begin | steps 21, 22, ...
its thread        | [finish] [hold_copy_part 1 MiB]  [hold_copy_part 2 MiB] ...      paced, see Pace
worker B                      begin, place            place                          CopyHolder
worker A                                                                acknowledged: step 20
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from raypipe.engine.copy import COMMON, CopyHeader, StageCopies
from raypipe.errors import CheckpointError, StageError
from raypipe.ir.report import CopyReport
from raypipe.runtime.workers.pacing import LEAST_BYTES, Pace

__all__ = ["Begun", "CopySender"]

ANSWER_S = 0.05
"""How long to wait for an answer before looking whether it is still wanted."""
PATIENCE_S, MOST_S = 5.0, 30.0
"""Where a step waits for a copy to arrive: how long without a parcel, and how long at all, until it is given up."""
END_S = 30.0
"""How long to wait for the thread to give up."""


class Begun(NamedTuple):
    """A copy of one stage that ``StageCopies.begin`` began, and what finishes it.

    Attributes:
        sends: pieces of it that the holder is to have.
    """

    stage: int
    copies: StageCopies
    finish: Callable[[], None]
    sends: tuple[int, ...] = (COMMON,)


class CopySender:
    """Of one worker.

    Args:
        busy: whether boundary messages wait to leave.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._generation = -1
        self._holder: Any = None
        self._acknowledged: dict[int, CopyReport] = {}  # by stage
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None
        self._stopping, self._hurried = threading.Event(), threading.Event()
        self._sent_bytes = 0  # so far
        self._parcel_bytes = LEAST_BYTES  # that suited the newest parcel
        self._worked_s = 0.0

    def send_to(self, holder: Any, generation: int) -> None:
        """Send the copies of this plan's stages to another worker's actor; None sends them nowhere."""
        self.stop()
        self._holder, self._generation, self._acknowledged = holder, generation, {}
        self._parcel_bytes = LEAST_BYTES

    def ready(self) -> bool:
        """Whether the copy before is done with, so that another one can begin.

        Raises:
            StageError: it failed.
        """
        job = self._job
        if job is None or not job.done():
            return job is None
        self._job = None
        if error := job.exception():
            raise StageError(f"The state could not be copied: {type(error).__name__}: {error}") from error
        return True

    def hurry(self) -> None:
        """Wait for the copy before, which is sent without pauses now; one that does not get on is given up.

        Raises:
            StageError: it failed.
        """
        job, before, deadline_s = self._job, -1, time.monotonic() + MOST_S
        self._hurried.set()
        while job is not None and not job.done() and self._sent_bytes != before and time.monotonic() < deadline_s:
            before = self._sent_bytes
            wait([job], PATIENCE_S)
        self.stop()
        self.ready()

    def begin(self, step: int, begun: Sequence[Begun], *, send: bool = True) -> None:
        """Finish these copies and send them, in the background; only where it is ``ready``.

        Args:
            step: that they are of.
            send: False keeps them here.
        """
        self._stopping.clear()
        self._hurried.clear()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="raypipe-copy")
        self._job = self._pool.submit(self._work, step, begun, send)

    def at_work_since(self, begin_s: float) -> bool:
        """Whether something was copied or sent after this time of the monotonic clock."""
        return (self._job is not None and not self._job.done()) or self._worked_s >= begin_s

    def acknowledged(self, stage: int) -> CopyReport | None:
        """The newest whole copy that the holder has, or this worker where there is no holder."""
        return self._acknowledged.get(stage)

    def give_up(self) -> None:
        """Send no more of what is being sent, from any thread."""
        self._stopping.set()

    def stop(self) -> None:
        """Give up what is being sent, and wait until it is; copies of this worker are finished."""
        self.give_up()
        if self._job is not None:
            wait([self._job], END_S)

    def close(self) -> None:
        """End the thread."""
        self.stop()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _work(self, step: int, begun: Sequence[Begun], send: bool) -> None:
        torch.set_num_threads(1)  # of this thread: the others compute
        begin_s = time.monotonic()
        try:
            with ExitStack() as all_of_them:  # also after one that fails: the next step waits for each
                for one in reversed(begun):
                    all_of_them.callback(one.finish)
            copied_s = time.monotonic() - begin_s
            for stage, copies, _, sends in begun if send else ():
                begin_s = time.monotonic()
                if self._holder is None or all(self._send(*copies.copy(step, piece)) for piece in sends):
                    self._acknowledged[stage] = CopyReport(step, copied_s, time.monotonic() - begin_s)
        finally:
            self._worked_s = time.monotonic()

    def _send(self, header: CopyHeader, block: torch.Tensor) -> bool:
        """Whether all of it has arrived."""
        holder, data = self._holder, block.numpy()
        pace = Pace(self._busy, lambda: self._stopping.is_set() or self._hurried.is_set(), self._parcel_bytes)
        which = self._generation, header.stage, header.step, header.piece
        try:
            whole = self._answer(holder.hold_copy.remote(self._generation, header.to_json()))
            offset = 0
            while whole is False:
                begin_s = time.monotonic()
                parcel = data[offset : offset + pace.parcel_bytes]
                whole = self._answer(holder.hold_copy_part.remote(*which, offset, parcel))
                offset += len(parcel)
                self._sent_bytes += len(parcel)
                took_s = time.monotonic() - begin_s
                pace.sent(len(parcel), took_s)
                self._parcel_bytes = pace.parcel_bytes
                if whole is False:
                    pace.pause(took_s)
        except (RayError, CheckpointError):  # whoever cares for the holder learns of its end elsewhere
            return False
        return whole is True

    def _answer(self, ref: Any) -> bool | None:
        """None where it is not wanted any more."""
        while not self._stopping.is_set():
            try:
                return bool(ray.get(ref, timeout=ANSWER_S))
            except GetTimeoutError:
                continue
        return None

"""Copies on their way: a thread finishes those that were begun between two steps, and sends them to another worker.

worker A    begin | steps 21, 22, ...
its thread        | [finish] [hold_copy_part 1 MiB]  [hold_copy_part 1 MiB] ...      paced, see Pace
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

from raypipe.engine.copy import CopyHeader, StageCopies
from raypipe.errors import CheckpointError
from raypipe.ir.report import CopyReport
from raypipe.runtime.workers.pacing import Pace

__all__ = ["Begun", "CopySender"]

ANSWER_S = 0.25
"""How long to wait for an answer before looking whether it is still wanted."""
JOB_TIMEOUT_S = 600.0
"""How long the next copy waits for the one before to be taken and sent."""


class Begun(NamedTuple):
    """A copy of one stage that ``StageCopies.begin`` began, and what finishes it."""

    stage: int
    copies: StageCopies
    finish: Callable[[], None]


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
        self._stopping = threading.Event()
        self._worked_s = 0.0

    def send_to(self, holder: Any, generation: int) -> None:
        """Send the copies of this plan's stages to another worker's actor; None sends them nowhere."""
        self.stop()
        self._holder, self._generation, self._acknowledged = holder, generation, {}

    def wait(self) -> None:
        """For the copy before, which must be done with before another one begins.

        Raises:
            CheckpointError: it failed, or does not end.
        """
        job, self._job = self._job, None
        if job is None:
            return
        if wait([job], JOB_TIMEOUT_S).not_done:
            raise CheckpointError(f"A copy of the state was not taken and sent within {JOB_TIMEOUT_S:g} s.")
        if error := job.exception():
            raise CheckpointError(f"The state could not be copied: {type(error).__name__}: {error}") from error

    def begin(self, step: int, begun: Sequence[Begun], *, send: bool = True) -> None:
        """Finish these copies and send them, in the background; ``wait`` comes first.

        Args:
            step: that they are of.
            send: False keeps them here.
        """
        self._stopping.clear()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="raypipe-copy")
        self._job = self._pool.submit(self._work, step, begun, send)

    def at_work_since(self, begin_s: float) -> bool:
        """Whether something was copied or sent after this time of the monotonic clock."""
        return (self._job is not None and not self._job.done()) or self._worked_s >= begin_s

    def acknowledged(self, stage: int) -> CopyReport | None:
        """The newest whole copy that the holder has, or this worker where there is no holder."""
        return self._acknowledged.get(stage)

    def stop(self) -> None:
        """Give up what is being sent; copies of this worker are finished."""
        self._stopping.set()
        if self._job is not None:
            wait([self._job], JOB_TIMEOUT_S)

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
            for stage, copies, _ in begun if send else ():
                begin_s = time.monotonic()
                if self._holder is None or self._send(*copies.copy(step)):
                    self._acknowledged[stage] = CopyReport(step, copied_s, time.monotonic() - begin_s)
        finally:
            self._worked_s = time.monotonic()

    def _send(self, header: CopyHeader, block: torch.Tensor) -> bool:
        """Whether all of it has arrived."""
        holder, pace, data = self._holder, Pace(self._busy, self._stopping.is_set), block.numpy()
        which = self._generation, header.stage, header.step
        try:
            whole = self._answer(holder.hold_copy.remote(self._generation, header.to_json()))
            offset = 0
            while whole is False:
                begin_s = time.monotonic()
                parcel = data[offset : offset + pace.parcel_bytes]
                whole = self._answer(holder.hold_copy_part.remote(*which, offset, parcel))
                offset += len(parcel)
                if whole is False:
                    pace.sent(len(parcel), time.monotonic() - begin_s)
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

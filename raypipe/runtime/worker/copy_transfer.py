"""Transfer of in-memory copies between workers: CopySender sends them in the background, RemoteCopy reads them.

worker A    begin | steps 21, 22, ...
its thread        | [finish] [hold_copy_part 1 MiB]  [hold_copy_part 2 MiB] ...      paced, see RateLimiter
worker B                      hold                      place                          WorkerCopies
worker A                                                                acknowledged: step 20

A copy is sent in parcels of some MiB. RateLimiter pauses after each, so that parcels take SHARE of the time, or only
LEAST_SHARE while boundary messages (activations and gradients between stages) wait to be sent:

parcel   [==]              [==]                     [===]
pause        [3 times as long]  [longer: link busy]      [3 times as long]

RemoteCopy(A, stage 1, step 21).opened()  --header-->  CopyPiece  --names-->  only the bytes of these, in parcels

A worker that reads copies must still serve its own copies, so that it must not block Ray's object store:

    ray.get(ref)                 holds Ray's lock on the object store until the object has come, or for a second
    ray.wait([ref]), ray.get     holds it only when the object is here

Example: worker 1 reads from worker 2, which reads from worker 3. While worker 2 waits in ray.get, it cannot put parcels
for worker 1 into the store: 48 MiB in parcels of 4 MiB took 2.2 s instead of 0.2 s
(Ray 2.60; https://github.com/ray-project/ray/pull/16408).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from raypipe.engine.copy import COMMON, CopyHeader, CopyPiece, StageCopies
from raypipe.engine.io.checkpoint import TensorInfo
from raypipe.engine.messages.record import raw_bytes
from raypipe.errors import CheckpointError, StageError, StageLostError
from raypipe.ir.report import CopyReport

SHARE = 0.25
"""Share of the time in which copies are sent if no boundary message waits."""
LEAST_SHARE = 0.02
"""Share of the time in which copies are sent if boundary messages always wait; above 0, so that a copy arrives."""
PARCEL_S = 0.25
"""Target seconds of a parcel. A parcel is short, because boundary messages share the link with it, but not shorter: on
busy nodes a call takes 0.05 to 0.2 s regardless of its size, and a copy of 96 MB in small parcels took 20 s."""
LEAST_BYTES, MOST_BYTES = 1 << 20, 16 << 20
"""Limits of a parcel's size in bytes. An actor call costs 4 or 5 ms of CPU time: 100 MB took 0.1 s of CPU time in
parcels of 4 MiB, 0.5 s in parcels of 1 MiB, 1.6 s in parcels of 256 KiB."""
POLL_S, MOST_SLEEP_S = 0.002, 0.05


class RateLimiter:
    """Limiter of one sender's share of the link: chooses the sizes of parcels, and the pauses between them.

    Args:
        busy: returns True while boundary messages (activations, gradients) wait to be sent.
        stopped: returns True if pauses should end at once.
        parcel_bytes: size of the first parcel.
        clock, sleep: replace the functions of ``time`` in tests.

    Attributes:
        parcel_bytes: size of the next parcel.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        stopped: Callable[[], bool],
        parcel_bytes: int = LEAST_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._busy, self._stopped, self._clock, self._sleep = busy, stopped, clock, sleep
        self.parcel_bytes = parcel_bytes

    def sent(self, nbytes: int, took_s: float) -> None:
        """Adapt ``parcel_bytes`` to a parcel of ``nbytes`` that took ``took_s``; ignore parcels below LEAST_BYTES."""
        if nbytes >= LEAST_BYTES:
            wanted_bytes = PARCEL_S / max(took_s, 1e-6) * nbytes
            changed_bytes = min(2 * self.parcel_bytes, max(self.parcel_bytes / 2, wanted_bytes))
            self.parcel_bytes = int(min(MOST_BYTES, max(LEAST_BYTES, changed_bytes)))

    def pause(self, took_s: float) -> None:
        """Wait until the next parcel may be sent, after a parcel that took ``took_s``."""
        now_s = self._clock()
        least_s, most_s = now_s + took_s * (1 / SHARE - 1), now_s + took_s * (1 / LEAST_SHARE - 1)
        while not self._stopped():
            now_s = self._clock()
            if now_s >= most_s or (now_s >= least_s and not self._busy()):
                return
            self._sleep(min(MOST_SLEEP_S, max(POLL_S, least_s - now_s)))


ANSWER_S = 0.05
"""Interval at which a wait for an answer checks if sending was stopped."""
PATIENCE_S, MOST_S = 5.0, 30.0
"""Seconds after which ``CopySender.hurry`` gives up the copy: since the last parcel that arrived, and in total."""
END_S = 30.0
"""Seconds to wait for the thread to stop sending."""


class Begun(NamedTuple):
    """Copy of one stage that ``StageCopies.begin`` has begun.

    Attributes:
        stage: number of the stage.
        copies: copies of the stage, including this one.
        finish: finishes the copy.
        sends: pieces of the copy that are sent to the holder.
    """

    stage: int
    copies: StageCopies
    finish: Callable[[], None]
    sends: tuple[int, ...] = (COMMON,)


class CopySender:
    """Sender of one worker's copies to their holder, the worker that stores them, in a thread.

    Args:
        busy: returns True while boundary messages (activations and gradients between stages) wait to be sent.
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
        self._parcel_bytes = LEAST_BYTES  # size adapted by the newest parcel
        self._worked_s = 0.0

    def send_to(self, holder: Any, generation: int) -> None:
        """Send copies of the stages of plan ``generation`` to the actor ``holder`` from now on; None sends none."""
        self.stop()
        self._holder, self._generation, self._acknowledged = holder, generation, {}
        self._parcel_bytes = LEAST_BYTES

    def ready(self) -> bool:
        """Return True if the previous copy is finished and sent, so that another one can begin.

        Raises:
            StageError: the previous copy failed.
        """
        job = self._job
        if job is None or not job.done():
            return job is None
        self._job = None
        if error := job.exception():
            raise StageError(f"The state could not be copied: {type(error).__name__}: {error}") from error
        return True

    def hurry(self) -> None:
        """Send the previous copy without pauses, and wait until it is sent.

        The copy is given up if no parcel arrives within PATIENCE_S, or after MOST_S in total.

        Raises:
            StageError: the previous copy failed.
        """
        job, before, deadline_s = self._job, -1, time.monotonic() + MOST_S
        self._hurried.set()
        while job is not None and not job.done() and self._sent_bytes != before and time.monotonic() < deadline_s:
            before = self._sent_bytes
            wait([job], PATIENCE_S)
        self.stop()
        self.ready()

    def begin(self, step: int, begun: Sequence[Begun], *, send: bool = True) -> None:
        """Finish the copies of ``step`` in a thread and send them if ``send``; call only after ``ready()`` was True."""
        self._stopping.clear()
        self._hurried.clear()
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="raypipe-copy")
        self._job = self._pool.submit(self._work, step, begun, send)

    def at_work_since(self, begin_s: float) -> bool:
        """Return True if anything was copied or sent after ``begin_s`` (monotonic clock)."""
        return (self._job is not None and not self._job.done()) or self._worked_s >= begin_s

    def acknowledged(self, stage: int) -> CopyReport | None:
        """Return the report on the stage's newest complete copy; None if no copy is complete yet.

        A copy is complete when the worker that keeps it has received all of it. If no other worker keeps it, it is
        complete when this worker has made it.
        """
        return self._acknowledged.get(stage)

    def give_up(self) -> None:
        """Stop sending the copy that is being sent; callable from any thread."""
        self._stopping.set()

    def stop(self) -> None:
        """Stop sending, and wait up to END_S until the thread has stopped; copies on this worker are still finished."""
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
            with ExitStack() as all_of_them:  # even if one fails: the next step waits for each
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
        """Send one copy in parcels; return True if all of it arrived, False if sending stopped or the holder failed."""
        holder, data = self._holder, block.numpy()
        pace = RateLimiter(self._busy, lambda: self._stopping.is_set() or self._hurried.is_set(), self._parcel_bytes)
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
        except (RayError, CheckpointError):  # a lost holder is reported elsewhere
            return False
        return whole is True

    def _answer(self, ref: Any) -> bool | None:
        """Wait for the holder's answer; return None if sending was stopped before."""
        while not self._stopping.is_set():
            try:
                return bool(ray.get(ref, timeout=ANSWER_S))
            except GetTimeoutError:
                continue
        return None


PARCEL_BYTES = 4 << 20
"""Bytes of one parcel."""
AHEAD = 3
"""Maximum number of requests for parcels that are under way."""
READ_TIMEOUT_S = 120.0
"""Timeout of one parcel; the death of a worker is noticed at once."""


@dataclass(slots=True)
class Tally:
    """Counter of the bytes that were read from other workers' copies."""

    total: int = 0


@dataclass(frozen=True, slots=True)
class RemoteCopy:
    """Reference to the in-memory copy of a stage's state on another worker.

    Attributes:
        actor: stage actor that has the copy.
        key: Ray's id of the actor in hexadecimal digits, by which the actor recognizes its own copies.
        generation, stage, step: number of the plan, number of the stage in it, and optimizer steps done in the copy.
        names: names of all parameters and buffers of the stage.
        piece: part of the stage's copy, see CopyHeader.
    """

    actor: Any
    key: str
    generation: int
    stage: int
    step: int
    names: tuple[str, ...]
    piece: int = COMMON

    @property
    def of(self) -> tuple[int, int, int, int]:
        """Key of the copy on any worker: (generation, stage, step, piece)."""
        return self.generation, self.stage, self.step, self.piece

    def opened(self, moved: Tally) -> CopyPiece:
        """Fetch the header and return the copy, whose tensors are fetched only when they are read.

        Args:
            moved: counter to which the bytes of fetched tensors are added.

        Raises:
            StageLostError: the worker with the copy died, or does not answer. Reading a tensor may raise it too.
        """
        header = self._get(self.actor.copy_header.remote(*self.of))
        return CopyPiece(CopyHeader.from_json(header), partial(self._fetch, moved))

    def _fetch(self, moved: Tally, infos: Sequence[TensorInfo]) -> Iterator[torch.Tensor]:
        """Fetch these tensors in parcels, yield them in this order, and add their bytes to ``moved``."""
        parcels = list(_parcels(infos))
        calls = (
            self.actor.copy_data.remote(*self.of, [(begin, end) for _, begin, end in parcel]) for parcel in parcels
        )
        requests = deque(islice(calls, AHEAD))
        tensor = torch.empty(0)
        for parcel in parcels:
            data, at = memoryview(self._get(requests.popleft())), 0
            moved.total += len(data)
            requests.extend(islice(calls, 1))
            for info, begin, end in parcel:
                if begin == info.begin:
                    tensor = torch.empty(info.shape, dtype=info.dtype)
                if end > begin:
                    target = raw_bytes(tensor, info.size_bytes).cast("B")
                    target[begin - info.begin : end - info.begin] = data[at : at + end - begin]
                    at += end - begin
                if end == info.end:
                    yield tensor

    def _get(self, ref: Any) -> Any:
        try:
            ready, _ = ray.wait([ref], timeout=READ_TIMEOUT_S)  # see the module
            return ray.get(ref, timeout=READ_TIMEOUT_S if ready else 0)
        except RayError as error:
            raise StageLostError(
                f"The copy of stage {self.stage} after step {self.step} cannot be read: {str(error).splitlines()[0]}"
            ) from None


def _parcels(infos: Sequence[TensorInfo]) -> Iterator[list[tuple[TensorInfo, int, int]]]:
    """Divide tensors into parcels of PARCEL_BYTES: lists of (tensor, begin, end) in bytes of the copy's block.

    A large tensor is divided over several parcels.
    """
    parcel: list[tuple[TensorInfo, int, int]] = []
    room_bytes = PARCEL_BYTES
    for info in infos:
        begin = info.begin
        while True:
            end = min(info.end, begin + room_bytes)
            parcel.append((info, begin, end))
            room_bytes -= end - begin
            if room_bytes == 0:
                yield parcel
                parcel, room_bytes = [], PARCEL_BYTES
            if end == info.end:
                break
            begin = end
    if parcel:
        yield parcel

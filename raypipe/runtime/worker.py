"""StageActor: one stage in one process. It runs whole segments in one long call; a control thread stays free.

driver --configure(setup, generation)--> listen, connect, build state
       --run(segment) ----------------->  rows of actions, micro-batches over the links
       <------------- step reports -----
       --abort(reason) ---------------->  (control group: answers while a segment runs)
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import ray
import torch

from raypipe.engine.checkpoint import save_shard
from raypipe.engine.data import Source
from raypipe.engine.executor import Executor
from raypipe.engine.stage import StageProgram, message_capacity, neighbours
from raypipe.engine.state import MakeOptimizer, MakeScheduler, Settings, StageState, owned_tensors
from raypipe.errors import LinkError, RaypipeError, StageError
from raypipe.ir.plan import Segment
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Row
from raypipe.ir.timeline import Span
from raypipe.runtime.packing import PackedTensor, unpack
from raypipe.runtime.sockets import SocketListener, open_channels

__all__ = ["Order", "StageActor", "StageSetup"]

REPORTS_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class StageSetup:
    """What makes an idle actor a stage.

    Attributes:
        programs: of all stages.
        stage: which one this actor plays.
        persistent: names of tensors that belong to a checkpoint.
        run_id: known to the stages of this run only; links check it.
        open_timeout_s: deadline for opening all links.
    """

    programs: Sequence[StageProgram]
    stage: int
    make_optimizer: MakeOptimizer
    make_scheduler: MakeScheduler | None
    sources: Mapping[str, Source]
    settings: Settings
    persistent: frozenset[str]
    run_id: str
    open_timeout_s: float


class Order(NamedTuple):
    """A segment, in which mode, and whether to keep its spans."""

    segment: Segment
    training: bool
    keep_spans: bool


class _StageActor:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._listener: SocketListener | None = None
        self._setup: StageSetup | None = None
        self._state: StageState | None = None
        self._executor: Executor | None = None
        self._rows: dict[tuple[int, bool], Row] = {}
        self._spans: tuple[Span, ...] = ()
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._done: list[list[StepReport]] = []
        self._run = -1
        self._generation = -1
        self._grown = threading.Condition()

    @ray.method(concurrency_group="control")
    def listen(self) -> dict[str, Any]:
        """Open the port for the links; who and where this actor is."""
        if self._listener is None:
            self._listener = SocketListener(ray.util.get_node_ip_address())
        return {
            "address": self._listener.address,
            "host": platform.node(),
            "process": os.getpid(),
            "versions": {"raypipe": _version(), "torch": torch.__version__, "ray": ray.__version__},
        }

    def configure(
        self, setup: StageSetup, addresses: Sequence[tuple[str, int]], generation: int,
        packed: Mapping[str, PackedTensor] | None,
    ) -> None:  # fmt: skip
        """Become a stage, or the same stage with new links; the state stays when ``packed`` is None.

        Args:
            addresses: of the listeners of all stages.
            generation: of the plan; messages of other generations are dropped.
            packed: initial parameters and buffers of this stage.
        """
        assert self._listener is not None, "listen() comes first"
        self._close_links()
        stage, programs = setup.stage, setup.programs
        program = programs[stage]
        if packed is not None:
            self._state = StageState(program, unpack(packed), setup.make_optimizer, setup.make_scheduler)
        if self._state is None:
            raise StageError(f"Stage {stage} has no parameters yet; configure it with its initial state first.")
        peers = {peer: addresses[peer] for peer in neighbours(programs, stage)}
        channels = open_channels(
            self._listener,
            stage,
            peers,
            generation,
            setup.run_id,
            {peer: message_capacity(programs, stage, peer) for peer in peers},
            setup.open_timeout_s,
            {peer: f"stage {stage} <-> stage {peer}" for peer in peers},
        )
        self._setup, self._rows, self._orders, self._generation = setup, {}, SimpleQueue(), generation
        self._executor = Executor(programs, stage, self._state, channels, setup.sources, setup.settings)
        # What exists now lives as long as the run: no collection need look at it again.
        gc.collect()
        gc.freeze()

    @ray.method(concurrency_group="orders")
    def set_row(self, schedule_id: int, training: bool, row: Row) -> None:
        """Learn a row of actions; segments refer to it by number."""
        self._rows[schedule_id, training] = row

    @ray.method(concurrency_group="orders")
    def submit(self, order: Order | None) -> None:
        """Queue a segment for ``work`` and read its data meanwhile; None ends it after those before."""
        if order is not None and self._executor is not None:
            self._executor.feed.prepare(order.segment, training=order.training)
        self._orders.put(order)

    def work(self, run: int) -> None:
        """Carry out orders until None. Spans stay here until ``spans()`` asks for them.

        Args:
            run: number of this call, by which ``reports`` tells it from the one before.
        """
        assert self._executor is not None, "configure() comes first"
        executor = self._executor
        with self._grown:
            self._run, self._done = run, []
        try:
            while (order := self._orders.get()) is not None:
                row = self._rows[order.segment.schedule_id, order.training]
                reports = executor.run(order.segment, row, training=order.training, keep_spans=order.keep_spans)
                if order.keep_spans:
                    self._spans = tuple(span for report in reports for span in report.spans)
                    reports = [replace(report, spans=()) for report in reports]
                with self._grown:
                    self._done.append(reports)
                    self._grown.notify_all()
        except RaypipeError as error:
            # The neighbours must not wait for what will never come, but they may finish the steps before.
            executor.leave(f"stage {executor.stage} failed")
            raise type(error)(_with_traceback(error)) from None

    @ray.method(concurrency_group="control")
    def reports(self, run: int, since: int, wait_s: float = REPORTS_WAIT_S) -> list[list[StepReport]]:
        """Reports of the segments number ``since`` and later of ``work(run)``; waits a while for the first."""
        with self._grown:
            self._grown.wait_for(lambda: self._run == run and len(self._done) > since, timeout=wait_s)
            return self._done[since:] if self._run == run else []

    @ray.method(concurrency_group="control")
    def abort(self, generation: int, reason: str) -> None:
        """End every wait of the running segment, unless this stage belongs to another generation by now."""
        if self._executor is not None and generation == self._generation:
            self._executor.abort(reason)

    @ray.method(concurrency_group="control")
    def spans(self) -> tuple[Span, ...]:
        """Actions of the last segment that was run with keep_spans."""
        return self._spans

    def save(self, folder: str) -> dict[str, Any]:
        """Write the tensors that this stage is the first to hold; the manifest's entry for them."""
        assert self._state is not None
        assert self._setup is not None
        program = self._setup.programs[self._setup.stage]
        return save_shard(Path(folder), program.index, owned_tensors(program, self._state, self._setup.persistent))

    def close(self) -> None:
        """Close links and port."""
        self._close_links()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _close_links(self) -> None:
        if self._executor is None:
            return
        for channel in self._executor.channels.values():
            with contextlib.suppress(LinkError):
                channel.close()
        self._executor = None


def _version() -> str:
    from raypipe import __version__

    return __version__


def _with_traceback(error: RaypipeError) -> str:
    """The sentence, and below it the traceback through the user's code where there is one."""
    if error.__cause__ is None:
        return str(error)
    return f"{error}\n\n{''.join(traceback.format_exception(error.__cause__))}"


StageActor = ray.remote(num_cpus=1, max_restarts=0, concurrency_groups={"control": 4, "orders": 1})(_StageActor)
"""The actor class. It is never restarted by Ray: an empty stage of an unknown generation helps nobody."""

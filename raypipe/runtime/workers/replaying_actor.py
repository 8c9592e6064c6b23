"""What a stage actor inherits to do steps again alone that the others have behind them, and to help another one do so.

driver      --logged()-----------> which steps this worker has kept the messages of, and how many bytes for whom
            --logged_steps(...)--> their orders, and what all stages agreed on
            --replay(todo)-------> does these steps, after ``load`` and before ``configure``
worker that is replayed  --logged_messages(peer, step)--> what was sent to it, in the codec that it was sent in
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError

from raypipe.engine.device import Device
from raypipe.engine.executor import Executor
from raypipe.engine.message_log import LoggedStep, MessageLog, Sent
from raypipe.engine.messages.channel import Channel
from raypipe.engine.reached import Reached
from raypipe.engine.replay_channel import ReplayChannel
from raypipe.engine.setup import GenerationSetup
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import StageState
from raypipe.errors import StageLostError
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Row
from raypipe.ir.segment import RowsKey
from raypipe.ir.work_order import Order
from raypipe.runtime.workers.fetching import fetched
from raypipe.runtime.workers.joining_actor import JoiningActor

__all__ = ["Logged", "ReplayingActor", "Todo"]

AHEAD = 2
"""Steps whose messages are asked for while another one is done."""
READ_TIMEOUT_S = 120.0
"""For the messages of a step; a worker that has died is known at once."""


class Logged(NamedTuple):
    """What a worker has kept.

    Attributes:
        steps: whole ones, from the first on.
        bytes_to: by worker, of all of them.
    """

    steps: range
    bytes_to: Mapping[int, int]


class Todo(NamedTuple):
    """Steps to be done again by one worker.

    Attributes:
        begins: steps that the state has done which ``load`` has made.
        rows: of this worker, by key.
        peers: actors of the workers that it exchanges messages with.
        links: number of the newest links of any worker.
    """

    begins: int
    steps: Sequence[LoggedStep]
    rows: Mapping[RowsKey, Row]
    peers: Mapping[int, Any]
    links: int


class ReplayingActor(JoiningActor):
    """See the module. What another worker calls obeys no driver, and is not fenced."""

    _device: Device
    _next: list[StageState] | None
    _loaded_bytes = 0

    @ray.method(concurrency_group="copies")
    def logged(self) -> Logged | None:
        """What was kept; None where nothing is."""
        log = self._log
        return None if log is None else Logged(log.steps, {peer: log.bytes_to(peer) for peer in log.peers})

    @ray.method(concurrency_group="copies")
    def logged_steps(self, begin: int, end: int) -> list[LoggedStep]:
        """What all stages did in these steps."""
        return self._copies.log.logged(range(begin, end))

    @ray.method(concurrency_group="copies", enable_task_events=False)
    def logged_messages(self, peer: int, step: int) -> list[tuple[bytes, np.ndarray]]:
        """What was sent to a worker in a step: headers and payloads."""
        return [(sent.header, sent.payload) for sent in self._copies.log.messages(peer, step).values()]

    def _takes(self, programs: Sequence[StageProgram]) -> None:
        """``load`` makes the state of these stages: until ``configure`` a worker may have that of any step."""
        self._next, self._programs, self._come = None, programs, Reached()
        if self._executor is not None:
            self._generation = -1  # so that nobody goes on with it, and no driver takes it over where it stands

    def replay(self, term: int, worker: int, setup: GenerationSetup, todo: Todo) -> list[list[list[StepReport]]]:
        """Do steps again on the state that ``load`` has made, with what neighbours have kept.

        Returns:
            Reports by step and stage.

        Raises:
            LinkError, StageLostError: a message is not there, or the worker that has it.
        """
        self._fence.check(term)
        run, states, placement = self._setup, self._next, setup.placement(worker)
        assert run is not None, "join() comes first"
        assert states is not None, "load() comes first"
        self._come, self._log = Reached(flows=True), None  # nobody goes on from the middle of this
        log = self._copies.begin_log(setup.generation, todo.begins, self._loaded_bytes)
        channels = {
            peer: ReplayChannel(
                f"{placement.name_of(worker)} <-> {placement.name_of(peer)}, replayed",
                todo.links,
                placement.message_capacity(setup.programs, peer),
                log.writer(peer),
            )
            for peer in placement.neighbours(setup.programs)
        }
        executor = self._executor = Executor(run, setup, worker, states, channels, self._device, log)
        found = []
        try:
            for step, messages in zip(todo.steps, _fetched(worker, todo), strict=True):
                for peer, channel in channels.items():
                    channel.deliver(messages[peer])
                log.begin(step.order)
                found.append(executor.replay(step, todo.rows[step.order.rows]))
            self._come, self._log = executor.reached, log
        finally:
            self._executor = None
            executor.let_go()
        return found

    def _keep_sent(self, channels: Mapping[int, Channel], setup: GenerationSetup) -> None:
        """From now on what is sent is kept, where a lost neighbour could do its steps again with it."""
        run = self._setup
        assert run is not None, "join() comes first"
        synchronous = setup.weights.interval is None and setup.lanes == 1
        hosts = channels and not any(channel.on_device for channel in channels.values())
        self._log = self._copies.log if run.replays and synchronous and hosts else None
        if self._log is not None:
            for peer, channel in channels.items():
                channel.keep_sent(self._log.writer(peer))

    def _begin_step(self, order: Order) -> None:
        """An order is carried out next."""
        if self._log is not None and order.training:
            self._log.begin(order)

    def _forget_copies(self) -> None:
        super()._forget_copies()
        self._log = None

    _log: MessageLog | None = None


def _fetched(worker: int, todo: Todo) -> Iterator[Mapping[int, list[Sent]]]:
    """By step, what each peer had sent; the next steps' are on their way meanwhile."""
    calls = (
        {
            peer: actor.logged_messages.remote(worker, step.order.segment.first_step)
            for peer, actor in todo.peers.items()
        }
        for step in todo.steps
    )
    asked = deque(islice(calls, 1 + AHEAD))
    while asked:
        found = {}
        for peer, ref in asked.popleft().items():
            try:
                messages = fetched(ref, READ_TIMEOUT_S)
            except RayError as error:
                why = str(error).splitlines()[0]
                raise StageLostError(f"What worker {peer} had sent to worker {worker} cannot be read: {why}") from None
            found[peer] = [Sent(*message) for message in messages]
        yield found
        asked.extend(islice(calls, 1))

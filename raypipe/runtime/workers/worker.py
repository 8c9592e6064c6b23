"""StageActor: the stages of one worker, in one process. It runs whole segments in one long call; a thread stays free.

driver --join(run), load(sources) ----> build state
       --configure(setup) ------------->  listen, connect
       --run(segment) ----------------->  rows of actions, micro-batches over the links
       <------------- step reports -----
       --abort(reason) ---------------->  (control group: answers while a segment runs)
       --pulse(term, lease_s) --------->  (a group of its own: answers whatever the others do)
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch

from raypipe.engine.checkpoint import FreshOptions, StateSource
from raypipe.engine.copy import bring_back
from raypipe.engine.crossing import Crossing
from raypipe.engine.data.stream_source import StreamSource
from raypipe.engine.device import CPU, Device
from raypipe.engine.executor import Executor
from raypipe.engine.placement import Placement
from raypipe.engine.reached import Reached
from raypipe.engine.restoring import restore_stages
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.shard_writer import ShardWriter, writers_of
from raypipe.engine.sharing import share_out
from raypipe.engine.stage import StageProgram
from raypipe.engine.stage_work import StageWork
from raypipe.engine.state import StageState
from raypipe.errors import LinkError, RaypipeError, StageError
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Row
from raypipe.ir.segment import RowsKey
from raypipe.ir.timeline import Span
from raypipe.ir.work_order import Order
from raypipe.runtime.links.endpoint import Endpoint, Opening
from raypipe.runtime.links.object_store import LINK_GROUPS, LinkedActor
from raypipe.runtime.links.opening import make_endpoint
from raypipe.runtime.run.window import Window
from raypipe.runtime.workers.allocator import keep_freed_memory
from raypipe.runtime.workers.copies import joined
from raypipe.runtime.workers.copying_actor import COPY_GROUPS
from raypipe.runtime.workers.granted import DeviceOf
from raypipe.runtime.workers.identity import facts_of
from raypipe.runtime.workers.order_gate import OrderGate
from raypipe.runtime.workers.places import owner_of, release_ended
from raypipe.runtime.workers.pulse import Pulse, Vitals
from raypipe.runtime.workers.remote_copy import RemoteCopy
from raypipe.runtime.workers.replaying_actor import ReplayingActor
from raypipe.runtime.workers.root_cause import with_traceback
from raypipe.runtime.workers.states import names_of, states_from, states_of
from raypipe.runtime.workers.takeover_actor import KEPT_REPORTS, REPORTS_WAIT_S

__all__ = ["StageActor"]


class _StageActor(LinkedActor, ReplayingActor):
    def __init__(self, lease_s: float = math.inf) -> None:
        """Wait for the first ``pulse`` so long."""
        super().__init__()
        torch.set_num_threads(1)
        keep_freed_memory()
        self._endpoint: Endpoint | None = None
        self._listening = threading.Lock()
        self._device: Device = CPU
        self._states: list[StageState] = []
        self._next: list[StageState] | None = None  # from load() to configure()
        self._held: list[tuple[str, ...]] = []  # names of the tensors of each
        self._rows: dict[RowsKey, tuple[Row, bool]] = {}
        self._spans: tuple[Span, ...] = ()
        self._writers: list[ShardWriter] = []
        self._vitals = Vitals(lease_s, self._give_up)

    @ray.method(concurrency_group="control")
    def listen(
        self, transport: str, ports: tuple[int, int] | None, share: float, device_of: DeviceOf
    ) -> dict[str, Any]:
        """Be there for the peers; who and where this actor is.

        Args:
            transport: how its links travel, as long as it lives.
            ports: lowest and highest port that they may use.
            share: of a GPU that it computes on; 0 for the CPU.
            device_of: makes the device of the share.

        Raises:
            ConfigError: it cannot compute on the GPU that it was given.
        """
        with self._listening:  # two who ask at once hear of the same endpoint
            if self._endpoint is None:
                self._device = device_of(share)
                self._endpoint = make_endpoint(transport, ray.util.get_node_ip_address(), ports, self._device)
            return facts_of(self._endpoint.address, self._device)

    @ray.method(concurrency_group="control")
    def facts(self) -> dict[str, Any] | None:
        """What ``listen`` has said; None of an actor that nobody has told yet how to listen."""
        with self._listening:
            return None if self._endpoint is None else facts_of(self._endpoint.address, self._device)

    @ray.method(concurrency_group="pulse")
    def pulse(self, term: int, lease_s: float) -> Pulse | None:
        """Stay for ``lease_s`` more seconds; what this process does. None to a driver that another one has replaced."""
        if not self._fence.admits(term):
            return None
        return self._vitals.pulse(lease_s, self._executor, self._done.end)

    def join(self, term: int, run: RunSetup) -> None:
        """Belong to a run; once for all its plans. ``term`` is the driver's number, here and below; see Fence."""
        self._fence.check(term)
        if self._setup is None or self._setup.run_id != run.run_id:  # it may be told so again while it trains
            self._forget_copies()
            run.torch_settings.take()
        self._setup = run
        self._vitals.belongs("" if run.place is None else run.place.path.rpartition("/")[2])

    def load(
        self, term: int, worker: int, setup: GenerationSetup, sources: Sequence[StateSource | str | RemoteCopy]
    ) -> int:
        """Make the state of the stages that a worker holds; it is this one's once ``configure`` follows.

        Copies of the state that it has can be read until then. Where it holds these stages already and is given
        copies, that state goes back in place, so that there are never two of it.

        Args:
            sources: of the parameters and buffers, each taken from the first that has it; a text names a checkpoint's
                folder below the run's. Where there are copies, the optimizers go on from there.

        Returns:
            Bytes that were read of other workers' copies.
        """
        self._fence.check(term)
        run, placement = self._setup, setup.placement(worker)
        assert run is not None, "join() comes first"
        programs = [setup.programs[stage] for stage in placement.stages]
        shared = partial(share_out, placement=placement, settings=run.settings)
        copies = [source for source in sources if isinstance(source, RemoteCopy)]
        held = [names_of(program) for program in programs]
        self._takes(setup.programs)
        if not copies:
            found = [source for source in sources if not isinstance(source, RemoteCopy)]
            self._next = states_of(run, programs, found, Crossing(self._device), shared)
            self._copies.forget_after(-1)  # they are of steps that are done again, perhaps with other codecs
            return 0
        me = ray.get_runtime_context().get_actor_id()
        source, moved, mark = joined(copies, self._copies, me, [name for names in held for name in names])
        if mark is not None and isinstance(stream := run.sources["train"], StreamSource):
            stream.learn(mark)
        if held == self._held:
            for program, state in zip(programs, self._states, strict=True):
                made = run.make_optimizer, run.make_scheduler
                bring_back(source, program, state, *made, Crossing(self._device), shared)
        else:
            self._next = states_from(run, programs, source, Crossing(self._device), shared)
        self._copies.forget_after(copies[0].step)
        self._loaded_bytes = moved.total
        return moved.total

    def configure(
        self, term: int, worker: int, setup: GenerationSetup, links: int, holder: Any = None,
        holds: Collection[tuple[int, int]] = (), sends: Collection[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Become a worker, or the same one with another plan, with the state of ``load`` or else that it has.

        Args:
            setup: without programs, those that it has stay.
            links: counts the times that links were opened; messages of others are dropped.
            holder: the actor that is sent copies of this one's state.
            holds: (stage, piece) of other workers' copies that are sent here.
            sends: (stage, piece) of its own that the holder is sent.
        """
        self._fence.check(term)
        run, addresses = self._setup, setup.addresses
        assert self._endpoint is not None, "listen() comes first"
        assert run is not None, "join() comes first"
        self._close_links()
        self._ledger.clear()
        self._programs = setup.programs or self._programs
        setup = replace(setup, programs=self._programs)
        placement, programs = setup.placement(worker), setup.programs
        self._take_loaded(placement, programs)
        mine = [programs[stage] for stage in placement.stages]
        self._copies.begin(setup.generation, mine, self._states, holder, holds, self._device, sends)
        channels = self._endpoint.open(Opening.of(run, placement, programs, addresses, links))
        for writer in self._writers:
            writer.close()
        self._writers = []
        self._rows, self._inflow = {}, OrderGate()
        self._generation, self._links, self._worker = setup.generation, links, worker
        self._keep_sent(channels, setup)
        self._executor = Executor(run, setup, worker, self._states, channels, self._device, self._log)
        # What exists now lives as long as the run: no collection need look at it again.
        gc.collect()
        gc.freeze()

    def _take_loaded(self, placement: Placement, programs: Sequence[StageProgram]) -> None:
        """The state of ``load`` is the worker's from now on; without one, that which it has must be of these stages."""
        held = [names_of(programs[stage]) for stage in placement.stages]
        if self._next is not None:
            self._states, self._held, self._next = self._next, held, None
        if held != self._held:
            raise StageError(
                f"Worker {placement.worker} does not hold the parameters of {placement.name_of(placement.worker)} "
                "as they are cut now; load its state first."
            )

    @ray.method(concurrency_group="orders")
    def set_row(self, term: int, key: RowsKey, row: Row, alone: bool) -> None:
        """Learn a row of actions, and whether norms are taken alone there; segments refer to it by key."""
        self._fence.check(term)
        self._rows[key] = row, alone

    @ray.method(concurrency_group="orders")
    def submit(self, term: int, run: int, order: Order | None) -> None:
        """Queue a segment for ``work(run)`` and read its data meanwhile; None ends it after those before."""
        self._fence.check(term)
        if order is not None and self._executor is not None:
            self._executor.prepare(order.segment, training=order.training)
        with self._fence.passing(term):
            if order is not None:
                self._ledger.ordered(run, order)
            self._inflow.put(run, order)

    @ray.method(concurrency_group="control")
    def halt(self, term: int, run: int) -> int:
        """Begin no further segment of ``work(run)`` until ``finish_after``; how many have begun."""
        self._fence.check(term)
        return self._inflow.halt(run)

    @ray.method(concurrency_group="control")
    def finish_after(self, term: int, run: int, count: int) -> None:
        """End ``work(run)`` after so many segments: no fewer than have begun on any stage."""
        self._fence.check(term)
        self._inflow.finish_after(run, count)

    def work(self, term: int, run: int) -> None:
        """Carry out orders until None. Spans stay here until ``spans()`` asks for them.

        Args:
            run: number of this call, by which ``reports`` tells it from the one before.
        """
        self._fence.check(term)
        assert self._executor is not None, "configure() comes first"
        executor = self._executor
        with self._grown:
            self._run, self._done, self._failure = run, Window(KEPT_REPORTS), None
        try:
            while (order := self._inflow.next(run)) is not None:
                reports = self._carry_out(executor, order)
                self._ledger.done(run, reports)
                with self._grown:
                    self._done.append(reports)
                    self._grown.notify_all()
        except RaypipeError as error:
            # The neighbours must not wait for what will never come, but they may finish the steps before.
            executor.leave(f"{executor.placement.name_of(executor.placement.worker)} failed")
            self._failure = type(error)(with_traceback(error))
            self._failure.raised_at_s, self._failure.ran_out = time.time(), error.ran_out
            raise self._failure from None
        finally:
            with self._grown:
                self._over = run
                self._grown.notify_all()

    def _carry_out(self, executor: Executor, order: Order) -> list[list[StepReport]]:
        """A segment, and the copies and files that are to be made behind it."""
        if order.segment.generation != self._generation:
            raise StageError(
                f"A segment of plan {order.segment.generation} came to a worker of plan {self._generation}."
            )
        row, alone = self._rows[order.rows]
        if order.training:
            executor.use_codecs(order.codecs)
        self._begin_step(order)
        begin_s = time.monotonic()
        ways = {"training": order.training, "keep_spans": order.keep_spans, "measure": order.measure}
        reports = executor.run(order.segment, row, alone=alone, **ways)
        if order.keep_spans:
            self._spans = tuple(span for of_stage in reports for report in of_stage for span in report.spans)
            reports = [[replace(report, spans=()) for report in of_stage] for of_stage in reports]
        if order.save_to:
            self._begin_shards(order.save_to)
        reports = self._copies.noted(reports, begin_s)
        if order.keep_copy:
            self._copies.take(order.segment.first_step + order.segment.num_minibatches, mark=self._mark)
        return reports

    @ray.method(concurrency_group="control")
    def abort(self, term: int, links: int, reason: str) -> None:
        """End every wait of the running segment, and for another one, unless this worker has other links by now."""
        self._fence.check(term)
        if self._executor is not None and links == self._links:
            self._copies.give_up()
            self._executor.abort(reason)
            self._inflow.abort(self._run)

    @ray.method(concurrency_group="control")
    def spans(self) -> tuple[Span, ...]:
        """Actions of the last segment that was run with keep_spans."""
        return self._spans

    @ray.method(concurrency_group="control")
    def entries(self, folder: str, wait_s: float = REPORTS_WAIT_S) -> list[dict[str, Any]] | None:
        """What the manifest of checkpoint ``folder`` says of each stage here; None while one is being written."""
        writers = self._shards()
        if not all(writer.wait(folder, wait_s) for writer in writers):
            return None
        return [entry for writer in writers if (entry := writer.entry(folder, 0.0)) is not None]

    def save(self, term: int, folder: str) -> None:
        """Take a snapshot now, between two runs; ``entry`` tells when it is written."""
        self._fence.check(term)
        self._begin_shards(folder)

    def _begin_shards(self, folder: str) -> None:
        for writer in self._shards():
            writer.begin(folder)

    def restore(self, term: int, folder: str, fresh: FreshOptions) -> None:
        """Go back to the state of a checkpoint, written at any number of stages, but for these options."""
        self._fence.check(term)
        run = self._setup
        assert run is not None
        self._ledger.clear()
        self._come = Reached()
        works = self._works()
        assert self._executor is not None
        restore_stages(works, run, folder, fresh, self._executor.crossing)

    def _works(self) -> list[StageWork]:
        assert self._executor is not None, "configure() comes first"
        return list(self._executor.works.values())

    def _shards(self) -> list[ShardWriter]:
        run = self._setup
        assert run is not None
        assert self._executor is not None, "configure() comes first"
        self._writers = self._writers or writers_of(self._executor, run)
        return self._writers

    def rest(self, term: int) -> None:
        """Hold no stage until a plan needs this worker again; the process and its endpoint stay."""
        self._fence.check(term)
        self._close_links()
        for writer in self._writers:
            writer.close()
        self._ledger.clear()
        self._charter, self._initial = b"", {}
        self._states, self._held, self._writers, self._rows, self._worker = [], [], [], {}, None
        self._next, self._programs, self._come = None, (), Reached()
        self._forget_copies()

    def close(self, term: int) -> None:
        """Close links and endpoint."""
        self._fence.check(term)
        self._shut()

    def _give_up(self) -> None:
        """Nobody has taken this stage over: leave nothing, of those either that cannot say so any more."""
        self._shut()
        if owner := owner_of(ray.get_runtime_context().get_actor_name()):
            release_ended(owner)

    def _shut(self) -> None:
        self._close_links()
        self._copies.close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _close_links(self) -> None:
        if self._executor is None:
            return
        for channel in self._executor.channels.values():
            with contextlib.suppress(LinkError):
                channel.close()
        self._executor.let_go()
        self._executor = None


GROUPS = {"control": 4, "orders": 1, "pulse": 1, **COPY_GROUPS, **LINK_GROUPS}

StageActor = ray.remote(num_cpus=1, max_restarts=0, concurrency_groups=GROUPS)(_StageActor)
"""The actor class. It is never restarted by Ray: an empty stage of an unknown generation helps nobody."""

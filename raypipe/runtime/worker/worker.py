"""StageActor: the stages of one worker, in one process.

One call, ``work``, lasts as long as segments come; calls in other concurrency groups are answered meanwhile. Most calls
carry the driver's term, so that a driver that was replaced is refused.

    driver --join, load(sources) ----->  build the state of the stages
           --configure(setup) -------->  open links to the other workers
           --work --------------------->  carry out queued segments until None is queued
           --submit(order) ----------->  queue a segment for ``work``
           --reports(since) ---------->  return step reports
           --abort(reason) ----------->  end every wait of the running segment
           --heartbeat(lease_s) ------>  renew the lease
           --reached, come_to(step) -->  after a failure: bring all workers to one step, see engine/executor.py

    next driver --charter ------------>  return what a driver needs to continue the run
                --fence(term) -------->  obey this driver, and refuse earlier ones
"""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch

from raypipe.data.stream import Mark
from raypipe.data.stream_source import StreamSource
from raypipe.engine.copy import bring_back
from raypipe.engine.device.device import CPU, Device
from raypipe.engine.executor import Executor, WorkerProgress
from raypipe.engine.io.checkpoint import FreshOptions, StateSource
from raypipe.engine.io.checkpoint.snapshot import ShardWriter, entries_of
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import StageState, shard_optimizer
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import LinkError, RaypipeError, StageError
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Row
from raypipe.ir.segment import Order, RowsKey
from raypipe.ir.timeline import Span
from raypipe.runtime.transport import make_endpoint
from raypipe.runtime.transport.endpoint import Endpoint, LinkSetup
from raypipe.runtime.transport.object_store import LINK_GROUPS, LinkedActor
from raypipe.runtime.worker.copies import COPY_GROUPS, CopyServer
from raypipe.runtime.worker.copy_transfer import RemoteCopy
from raypipe.runtime.worker.heartbeat import Heartbeat, Vitals
from raypipe.runtime.worker.loading import joined, names_of, states_from, states_of
from raypipe.runtime.worker.orders import Attached, Fence, OrderGate, WorkReports
from raypipe.runtime.worker.packing import StoredTensors, stored
from raypipe.runtime.worker.places import owner_of, release_ended
from raypipe.runtime.worker.stage_process import DeviceOf, enter, facts_of, keep_freed_memory, refuse_another_folder

REPORTS_WAIT_S = 10.0


class _StageActor(LinkedActor, CopyServer):
    def __init__(self, lease_s: float = math.inf, folder: str = "") -> None:
        """Start the lease, and change to ``folder`` (see ``enter``) before arguments of later calls are unpacked."""
        super().__init__()
        enter(folder)
        torch.set_num_threads(1)
        keep_freed_memory()
        self._fence, self._inflow, self._work = Fence(), OrderGate(), WorkReports()
        self._setup: RunSetup | None = None
        self._charter, self._initial = b"", dict[str, torch.Tensor]()  # with which another driver resumes the run
        self._endpoint: Endpoint | None = None
        self._listening = threading.Lock()
        self._device: Device = CPU
        self._executor: Executor | None = None
        self._worker: int | None = None
        self._generation = self._links = -1  # of the plan, and of its links
        self._programs: Sequence[StageProgram] = ()  # of all stages of the plan
        self._states: list[StageState] = []
        self._next: list[StageState] | None = None  # from load() to configure()
        self._come = WorkerProgress()  # progress before the executor was made
        self._held: list[tuple[str, ...]] = []  # names of each state's tensors
        self._rows: dict[RowsKey, tuple[Row, bool]] = {}
        self._spans: tuple[Span, ...] = ()
        self._writers: list[ShardWriter] = []
        self._vitals = Vitals(lease_s, self._give_up)

    @ray.method(concurrency_group="control")
    def listen(
        self, transport: str, ports: tuple[int, int] | None, share: float, device_of: DeviceOf
    ) -> dict[str, Any]:
        """Open the endpoint for links, unless it is open already; return the facts of this actor, see ``facts_of``.

        Args:
            transport: see PipelineConfig.transport; used for the life of the actor.
            ports: lowest and highest port that links may use; None leaves the choice to the system.
            share: fraction of a GPU to compute on; 0 for the CPU.
            device_of: called with ``share`` to create the device.

        Raises:
            ConfigError: torch cannot compute on the GPU of this actor, or the transport is not possible.
        """
        with self._listening:  # two calls at a time return the same endpoint
            if self._endpoint is None:
                self._device = device_of(share)
                self._endpoint = make_endpoint(transport, ray.util.get_node_ip_address(), ports, self._device)
            return facts_of(self._endpoint.address, self._device)

    @ray.method(concurrency_group="control")
    def facts(self) -> dict[str, Any] | None:
        """Return the facts of this actor; None before ``listen``."""
        with self._listening:
            return None if self._endpoint is None else facts_of(self._endpoint.address, self._device)

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self, term: int, lease_s: float) -> Heartbeat | None:
        """Renew the lease and return a heartbeat; return None if a later driver has taken this actor over."""
        if not self._fence.admits(term):
            return None
        return self._vitals.heartbeat(lease_s, self._executor, self._work.count)

    @ray.method(concurrency_group="control")
    def obeys(self, term: int) -> bool:
        """Return True if no driver of a higher term has ordered anything here."""
        return self._fence.admits(term)

    @ray.method(concurrency_group="control")
    def term(self) -> int:
        """Return the highest term of a driver that has ordered anything here; -1 if none has."""
        return self._fence.term

    @ray.method(concurrency_group="control")
    def fence(self, term: int) -> Attached:
        """Obey this driver from now on, reject drivers of a lower term, and return this worker's numbers."""
        with self._fence.passing(term):
            return Attached(self._worker, self._links, self._work.run)

    def keep_charter(self, term: int, charter: bytes, tensors: StoredTensors, names: Sequence[str]) -> None:
        """Store what another driver needs to resume this run.

        Args:
            charter: the run's charter, pickled by its driver.
            names: names of the tensors to store, which are in no checkpoint.
        """
        self._fence.check(term)
        self._charter, self._initial = charter, dict(tensors.read(names))

    @ray.method(concurrency_group="control")
    def charter(self) -> tuple[bytes, RunSetup | None, StoredTensors]:
        """Return the stored charter, the run's setup, and the stored tensors."""
        return self._charter, self._setup, stored(self._initial)

    def rehearse(self) -> None:
        """Create an optimizer and step it once: its imports take seconds, which a spare saves when it is needed."""
        run = self._setup
        assert run is not None, "join() comes first"
        stand_in = torch.nn.Parameter(torch.zeros(1))
        stand_in.grad = torch.zeros(1)
        with contextlib.suppress(Exception):  # imports are done even if it cannot be made for such a parameter
            run.make_optimizer([("spare", stand_in)]).step()
        # Imported modules live as long as the process; the first collection of all of them takes a while.
        gc.collect()
        gc.freeze()

    def join(self, term: int, run: RunSetup, held_by: str = "") -> None:
        """Receive the setup of a run, once for all its plans.

        Args:
            term: the driver's term, here and in the other methods; see Fence.
            held_by: holder of the lease in the run's folder, as the driver read it; "" if there is no local lease.

        Raises:
            PlanError: this node has another folder at the run's path.
        """
        self._fence.check(term)
        if run.place is not None and held_by:
            refuse_another_folder(run.place, held_by)
        if self._setup is None or self._setup.run_id != run.run_id:  # may be called again while the run trains
            self._forget_copies()
            run.torch_settings.take()
        self._setup = run
        self._vitals.run = "" if run.place is None else run.place.path.rpartition("/")[2]

    def load(
        self, term: int, worker: int, setup: GenerationSetup, sources: Sequence[StateSource | str | RemoteCopy]
    ) -> int:
        """Build new state for the stages of a worker; ``configure`` then replaces the present state by it.

        Copies of the present state can be read until then. If the stages are the present ones and ``sources`` are
        copies, the present state is overwritten in place, so that memory never holds both.

        Args:
            sources: copies, with state of optimizers; or other sources of parameters and buffers, each read from the
                first source that has it. A string is the name of a checkpoint in the run's folder.

        Returns:
            Number of bytes read from other workers' copies.
        """
        self._fence.check(term)
        run, placement = self._setup, setup.placement(worker)
        assert run is not None, "join() comes first"
        programs = [setup.programs[stage] for stage in placement.stages]
        shared = partial(shard_optimizer, placement=placement, settings=run.settings)
        copies = [source for source in sources if isinstance(source, RemoteCopy)]
        held = [names_of(program) for program in programs]
        self._begin_load(setup.programs)
        if not copies:
            others = [source for source in sources if not isinstance(source, RemoteCopy)]
            self._next = states_of(run, programs, others, DeviceTransfer(self._device), shared)
            self._copies.forget_after(-1)  # their steps are replayed, perhaps with other codecs
            return 0
        me = ray.get_runtime_context().get_actor_id()
        source, moved, mark = joined(copies, self._copies, me, [name for names in held for name in names])
        if mark is not None and isinstance(stream := run.sources["train"], StreamSource):
            stream.learn(mark)
        if held == self._held:
            for program, state in zip(programs, self._states, strict=True):
                transfer = DeviceTransfer(self._device)
                bring_back(source, program, state, run.make_optimizer, run.make_scheduler, transfer, shared)
        else:
            self._next = states_from(run, programs, source, DeviceTransfer(self._device), shared)
        self._copies.forget_after(copies[0].step)
        return moved.total

    def _begin_load(self, programs: Sequence[StageProgram]) -> None:
        """Drop state of an earlier ``load``, and mark the worker's progress as unknown until ``configure``."""
        self._next, self._programs, self._come = None, programs, WorkerProgress()
        if self._executor is not None:
            self._generation = -1  # see ``reached``

    def configure(
        self, term: int, worker: int, setup: GenerationSetup, links: int, holder: Any = None,
        holds: Collection[tuple[int, int]] = (), sends: Collection[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Become worker ``worker`` of a plan, with the state of ``load`` or else the present state, and open links.

        Args:
            setup: setup of the plan; if it has no programs, the present programs are kept.
            links: number of times that links were opened before; messages of other numbers are dropped.
            holder: actor to which copies of this worker's stages are sent; None sends none.
            holds: (stage, piece) of the copies that other workers send to this one.
            sends: (stage, piece) of this worker's copies that are sent to ``holder``.
        """
        self._fence.check(term)
        run, addresses = self._setup, setup.addresses
        assert self._endpoint is not None, "listen() comes first"
        assert run is not None, "join() comes first"
        self._close_links()
        self._programs = setup.programs or self._programs
        setup = replace(setup, programs=self._programs)
        placement, programs = setup.placement(worker), setup.programs
        self._take_loaded(placement, programs)
        mine = [programs[stage] for stage in placement.stages]
        self._copies.begin(setup.generation, mine, self._states, holder, holds, self._device, sends)
        channels = self._endpoint.open(LinkSetup.of(run, placement, programs, addresses, links))
        for writer in self._writers:
            writer.close()
        self._writers = []
        self._rows, self._inflow = {}, OrderGate()
        self._generation, self._links, self._worker = setup.generation, links, worker
        self._executor = Executor(run, setup, worker, self._states, channels, self._device)
        # All present objects live as long as the run, so that no collection need examine them again.
        gc.collect()
        gc.freeze()

    def _take_loaded(self, placement: Placement, programs: Sequence[StageProgram]) -> None:
        """Replace the state by that of ``load``, if there is one, and check that the state is of these stages."""
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
        """Store the row of actions to which orders refer by ``key``; ``alone``: see Executor.run."""
        self._fence.check(term)
        self._rows[key] = row, alone

    @ray.method(concurrency_group="orders")
    def submit(self, term: int, run: int, order: Order | None) -> None:
        """Queue an order for ``work(run)`` and begin to read its data; None ends that call after the queued orders."""
        self._fence.check(term)
        if order is not None and self._executor is not None:
            self._executor.prepare(order.segment, training=order.training)
        with self._fence.passing(term):
            self._inflow.put(run, order)

    @ray.method(concurrency_group="control")
    def halt(self, term: int, run: int) -> int:
        """Keep ``work(run)`` from beginning further segments until ``finish_after``; return how many have begun."""
        self._fence.check(term)
        return self._inflow.halt(run)

    @ray.method(concurrency_group="control")
    def finish_after(self, term: int, run: int, count: int) -> None:
        """End ``work(run)`` after ``count`` segments, the largest result of ``halt`` on any worker."""
        self._fence.check(term)
        self._inflow.finish_after(run, count)

    def work(self, term: int, run: int) -> None:
        """Carry out queued orders until None comes, or ``finish_after`` or ``abort`` ends the call.

        Args:
            run: number of this call; the driver's other calls refer to it.
        """
        self._fence.check(term)
        assert self._executor is not None, "configure() comes first"
        executor = self._executor
        self._work.begin(run)
        try:
            while (order := self._inflow.next(run)) is not None:
                self._work.add(self._carry_out(executor, order))
        except RaypipeError as error:
            # The neighbours must not wait for messages that never come, but may finish earlier steps.
            executor.leave(f"{executor.placement.name_of(executor.placement.worker)} failed")
            failure = type(error)(with_traceback(error))
            failure.raised_at_s, failure.ran_out = time.time(), error.ran_out
            raise failure from None
        finally:
            self._work.end(run)

    @ray.method(concurrency_group="control")
    def reports(self, run: int, since: int, wait_s: float = REPORTS_WAIT_S) -> list[list[list[StepReport]]]:
        """Return reports of ``work(run)`` from segment ``since`` on, by segment and stage; wait for the first."""
        return self._work.since(run, since, wait_s)

    def _carry_out(self, executor: Executor, order: Order) -> list[list[StepReport]]:
        """Run a segment, begin the copy and the checkpoint that its order requests, and return its reports."""
        if order.segment.generation != self._generation:
            raise StageError(
                f"A segment of plan {order.segment.generation} came to a worker of plan {self._generation}."
            )
        row, alone = self._rows[order.rows]
        if order.training:
            executor.use_codecs(order.codecs)
        begin_s = time.monotonic()
        reports = executor.run(
            order.segment, row, alone=alone, training=order.training, keep_spans=order.keep_spans, measure=order.measure
        )
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
        """Abort the running segment and end ``work``; do nothing if the worker's links have another number by now."""
        self._fence.check(term)
        if self._executor is not None and links == self._links:
            self._copies.give_up()
            self._executor.abort(reason)
            self._inflow.abort(self._work.run)

    def reached(self, term: int) -> WorkerProgress:
        """Return the progress of this worker; Ray carries this call out after ``work`` has ended."""
        self._fence.check(term)
        if self._executor is not None and self._generation < 0:  # it was loading another state
            return WorkerProgress(overlapping=True)
        here = WorkerProgress() if self._executor is None else self._executor.progress
        return self._come if here.steps is None else here

    def come_to(
        self, term: int, step: int, totals: tuple[torch.Tensor, torch.Tensor] | None
    ) -> list[list[StepReport]] | None:
        """Finish the step in progress if this worker has done fewer than ``step`` steps; undo a later one in progress.

        Args:
            totals: gradient norm and loss of the last of these steps, from a worker that has completed it.

        Returns:
            Reports by stage of the step finished in this call; None if there was no step to finish.
        """
        self._fence.check(term)
        reports, executor = None, self._executor
        if executor is not None:
            newest = executor.progress.steps
            if newest is not None and newest < step:
                assert totals is not None, "a step that another one has made has totals"
                reports = executor.finish(*totals)
            executor.undo()
            self._come = self.reached(term)
        return reports

    def keep_copy(self, term: int, step: int, send: bool) -> None:
        """Copy the state after ``step`` steps to memory, and with ``send`` begin to send the copies to the holder."""
        self._fence.check(term)
        self._copies.take(step, send=send, must=True, mark=self._mark)
        self._copies.wait_until_taken()

    def _mark(self, stage: int) -> Mark | None:
        """Return this stage's position in the stream of train_data, between two steps; None if it reads no stream."""
        return None if self._executor is None else self._executor.works[stage].feed.mark()

    def _sends(self) -> bool:
        executor = self._executor
        return executor is not None and any(channel.busy for channel in executor.channels.values())

    @ray.method(concurrency_group="control")
    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the last segment that was run with keep_spans."""
        return self._spans

    @ray.method(concurrency_group="control")
    def entries(self, folder: str, wait_s: float = REPORTS_WAIT_S) -> list[dict[str, Any]] | None:
        """Return the manifest entries of this worker's stages; None if ``folder`` is not written within ``wait_s``."""
        writers = self._shards()
        if not all(writer.wait(folder, wait_s) for writer in writers):
            return None
        return [entry for entry in entries_of(writers, folder, 0.0) if entry is not None]

    def save(self, term: int, folder: str) -> None:
        """Take a snapshot now, between two runs; ``entries`` waits for its files."""
        self._fence.check(term)
        self._begin_shards(folder)

    def _begin_shards(self, folder: str) -> None:
        for writer in self._shards():
            writer.begin(folder)

    def restore(self, term: int, folder: str, fresh: FreshOptions) -> None:
        """Load a checkpoint of any number of stages; the optimizer options in ``fresh`` keep their present values."""
        self._fence.check(term)
        assert self._executor is not None, "configure() comes first"
        self._come = WorkerProgress()
        self._executor.restore(folder, fresh)

    def _shards(self) -> list[ShardWriter]:
        assert self._executor is not None, "configure() comes first"
        self._writers = self._writers or self._executor.shard_writers()
        return self._writers

    def rest(self, term: int) -> None:
        """Drop all stages until a plan uses this worker again; the process and its endpoint stay."""
        self._fence.check(term)
        self._close_links()
        for writer in self._writers:
            writer.close()
        self._charter, self._initial = b"", {}
        self._states, self._held, self._writers, self._rows, self._worker = [], [], [], {}, None
        self._next, self._programs, self._come = None, (), WorkerProgress()
        self._forget_copies()

    def close(self, term: int) -> None:
        """Close the links and the endpoint."""
        self._fence.check(term)
        self._shut()

    def _give_up(self) -> None:
        """Release all resources when the lease expires; also placement groups of dead stages, if the driver is dead."""
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


GROUPS = {"control": 4, "orders": 1, "heartbeat": 1, **COPY_GROUPS, **LINK_GROUPS}

StageActor = ray.remote(num_cpus=1, max_restarts=0, concurrency_groups=GROUPS)(_StageActor)
"""Ray actor class of a worker. Ray never restarts such an actor, since a restarted one would have no state."""


def with_traceback(error: RaypipeError) -> str:
    """Format an error, followed by the traceback through the user's code if there is one."""
    if error.__cause__ is None:
        return str(error)
    return f"{error}\n\n{''.join(traceback.format_exception(error.__cause__))}"

"""StageActor: the stages of one worker, in one process.

An order is the driver's command to run a segment (one or more mini-batches). One call, ``work``, lasts as long as
orders come; calls in other concurrency groups are answered meanwhile. Most calls carry the driver's term, a number that
grows with each new driver of the run: a driver with a lower term than an earlier caller gets a LeaseError.

    driver --join, load(sources) ----->  build the state of the stages
           --configure(setup) -------->  open links to the other workers
           --work --------------------->  run queued orders until None is queued
           --submit(order) ----------->  queue an order for ``work``
           --reports(since) ---------->  return step reports
           --abort(reason) ----------->  end every wait of the running segment
           --heartbeat(lease_s) ------>  renew the lease
           --reached, come_to(step) -->  after a failure: bring all workers to one step, see worker_progress.py

    next driver --charter ------------>  return what a driver needs to continue the run
                --fence(term) -------->  obey this driver, and refuse earlier ones
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

import numpy as np
import ray
import torch

from raypipe.data.stream import Mark
from raypipe.engine.copy import COMMON, CopyHeader
from raypipe.engine.device.device import CPU, Device
from raypipe.engine.executor import Executor
from raypipe.engine.io.checkpoint import FreshOptions, StateSource
from raypipe.engine.io.checkpoint.snapshot import ShardWriter, entries_of
from raypipe.engine.optim.state import StageState
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.stage import StageProgram
from raypipe.engine.worker_progress import WorkerProgress
from raypipe.errors import LinkError, RaypipeError, StageError
from raypipe.ir.report import Reports, StepReport
from raypipe.ir.schedule import Row
from raypipe.ir.segment import Order, RowsKey
from raypipe.ir.timeline import Span
from raypipe.runtime.transport import make_endpoint
from raypipe.runtime.transport.endpoint import Endpoint, LinkSetup
from raypipe.runtime.transport.handshake import LinkIdentity
from raypipe.runtime.transport.object_store import ControlMessage, ObjectStoreEndpoint
from raypipe.runtime.worker.copies import CopyFacts, StageKey, WorkerCopies
from raypipe.runtime.worker.copy_transfer import RemoteCopy
from raypipe.runtime.worker.heartbeat import Heartbeat, Vitals
from raypipe.runtime.worker.loading import load_states, names_of, rehearse
from raypipe.runtime.worker.orders import Attached, Fence, OrderGate, WorkReports, sendable
from raypipe.runtime.worker.packing import StoredTensors, stored
from raypipe.runtime.worker.stage_process import DeviceOf, enter, facts_of, keep_freed_memory, refuse_another_folder

REPORTS_WAIT_S = 10.0


class _StageActor:
    """Actor of one worker. Ray calls methods of this class only, so most methods forward to an attribute."""

    def __init__(self, lease_s: float = math.inf, folder: str = "") -> None:
        """Start a lease of ``lease_s`` seconds (see LeaseClock), and change to the working directory ``folder``."""
        enter(folder)
        torch.set_num_threads(1)
        keep_freed_memory()
        self._fence, self._inflow, self._work = Fence(), OrderGate(), WorkReports()
        self._setup: RunSetup | None = None
        self._charter, self._initial = b"", dict[str, torch.Tensor]()  # with which another driver resumes the run
        self._copies = WorkerCopies(self._sends)
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
        self._rows: dict[RowsKey, tuple[Row, bool]] = {}
        self._spans: tuple[Span, ...] = ()
        self._writers: list[ShardWriter] = []
        self._vitals = Vitals(lease_s, self._shut)

    @ray.method(concurrency_group="control")
    def listen(
        self, transport: str, ports: tuple[int, int] | None, share: float, device_of: DeviceOf
    ) -> dict[str, Any]:
        """Open the endpoint for links, unless it is open already; return the facts of this actor, see ``facts_of``.

        Args:
            transport, ports: name of the kind of links, and range of their ports; see runtime/transport/.
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
        """Return the facts of this actor, see ``facts_of``; None before ``listen``."""
        with self._listening:
            return None if self._endpoint is None else facts_of(self._endpoint.address, self._device)

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self, term: int, lease_s: float) -> Heartbeat | None:
        """Renew the lease and return a heartbeat; return None if a later driver has taken this actor over."""
        if not self._fence.admits(term):
            return None
        return self._vitals.heartbeat(lease_s, self._executor, self._work.count)

    @ray.method(concurrency_group="control")
    def term(self) -> int:
        """Return the highest term of all drivers that have called this actor; -1 before the first call."""
        return self._fence.term

    @ray.method(concurrency_group="control")
    def fence(self, term: int) -> Attached:
        """Obey the driver of this term, and reject lower terms from now on; return the numbers of its predecessor."""
        with self._fence.passing(term):
            return Attached(self._worker, self._links, self._work.run)

    def keep_charter(self, term: int, charter: bytes, tensors: StoredTensors, names: Sequence[str]) -> None:
        """Store a pickled Charter and the initial tensors of these names, so that another driver can resume the run."""
        self._fence.check(term)
        self._charter, self._initial = charter, dict(tensors.read(names))

    @ray.method(concurrency_group="control")
    def charter(self) -> tuple[bytes, RunSetup | None, StoredTensors]:
        """Return (pickled Charter or b"", the run's setup or None before ``join``, initial tensors)."""
        return self._charter, self._setup, stored(self._initial)

    def rehearse(self) -> None:
        """Import the modules of the run's optimizer, which takes seconds, before a spare has to replace a worker."""
        assert self._setup is not None, "join() comes first"
        rehearse(self._setup.make_optimizer)

    def join(self, term: int, run: RunSetup, held_by: str = "") -> None:
        """Receive the setup of a run, once for all its plans.

        Args:
            term: the driver's term, here and in the other methods; see Fence.
            held_by: lease in the run's folder, as the driver read it (``holder_of``); "" if there is no local lease.

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
        self._vitals.run = "" if run.place is None else run.place.name

    def load(
        self, term: int, worker: int, setup: GenerationSetup, sources: Sequence[StateSource | str | RemoteCopy]
    ) -> int:
        """Build new state for the stages of a worker; ``configure`` then replaces the present state by it.

        Copies of the present state can be read until then. If the stages are the present ones and ``sources`` are
        copies, the present state is overwritten in place, so that memory never holds both.

        Args:
            sources: in-memory copies, with state of optimizers; or sources of parameters and buffers, each of which is
                read from the first source that has it. A string is the name of a checkpoint in the run's folder.

        Returns:
            Number of bytes read from other workers' copies.
        """
        self._fence.check(term)
        assert self._setup is not None, "join() comes first"
        self._begin_load(setup.programs)
        own, present = self._copies, self._states
        self._next, read_bytes = load_states(self._setup, setup, worker, sources, present, own, self._device)
        return read_bytes

    def _begin_load(self, programs: Sequence[StageProgram]) -> None:
        """Drop state of an earlier ``load``, and mark the worker's progress as unknown until ``configure``."""
        self._next, self._programs, self._come = None, programs, WorkerProgress()
        if self._executor is not None:
            self._generation = -1  # see ``reached``

    def configure(
        self, term: int, worker: int, setup: GenerationSetup, links: int, holder: Any = None,
        holds: Collection[tuple[int, int]] = (), sends: Collection[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Become worker ``worker`` of a plan, with the state of ``load`` if it was called, and open links.

        Args:
            setup: setup of the plan; if it has no programs, the present programs are kept.
            links: number of times that links were opened before; messages of earlier openings are dropped.
            holder: actor to which copies of this worker's stages are sent; None sends none.
            holds: (stage, piece) of the copies that other workers send to this worker; for pieces see CopyHeader.
            sends: (stage, piece) of this worker's copies that are sent to ``holder``.

        Raises:
            StageError: the state belongs to other stages than the plan's stages of this worker.
        """
        self._fence.check(term)
        run, addresses = self._setup, setup.addresses
        assert self._endpoint is not None, "listen() comes first"
        assert run is not None, "join() comes first"
        self._close_links()
        self._programs = setup.programs or self._programs
        setup = replace(setup, programs=self._programs)
        placement, programs = setup.placement(worker), setup.programs
        mine = [programs[stage] for stage in placement.stages]
        if self._next is not None:
            self._states, self._next = self._next, None
        if [names_of(program) for program in mine] != [names_of(state) for state in self._states]:
            raise StageError(
                f"Worker {worker} does not hold the parameters of {placement.name_of(worker)} as they are cut now; "
                "load its state first."
            )
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

    @ray.method(concurrency_group="orders")
    def set_row(self, term: int, key: RowsKey, row: Row, alone: bool) -> None:
        """Store the actions (row of a schedule) that orders name by ``key``; for ``alone`` see Executor.run."""
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
        """Let ``work(run)`` begin no more orders until ``finish_after``; return the number of orders begun so far."""
        self._fence.check(term)
        return self._inflow.halt(run)

    @ray.method(concurrency_group="control")
    def finish_after(self, term: int, run: int, count: int) -> None:
        """End ``work(run)`` after ``count`` orders; ``count`` is the largest result of ``halt`` on any worker."""
        self._fence.check(term)
        self._inflow.finish_after(run, count)

    def work(self, term: int, run: int) -> None:
        """Run queued orders until None comes, or ``finish_after`` or ``abort`` ends call number ``run``."""
        self._fence.check(term)
        assert self._executor is not None, "configure() comes first"
        executor = self._executor
        self._work.begin(run)
        try:
            while (order := self._inflow.next(run, self._work.flush)) is not None:
                self._work.follow(partial(self._carry_out, executor, order), late=executor.reports_late(order))
            self._work.flush()
        except RaypipeError as error:
            # The neighbours must not wait for messages that never come, but may finish earlier steps.
            executor.leave(f"{executor.placement.name_of(executor.placement.worker)} failed")
            raise sendable(error) from None
        finally:
            self._work.end(run)

    @ray.method(concurrency_group="control")
    def reports(self, run: int, since: int, wait_s: float = REPORTS_WAIT_S) -> list[list[list[StepReport]]]:
        """Return the reports of ``work(run)`` from segment ``since`` on; see WorkReports.since."""
        return self._work.since(run, since, wait_s)

    def _carry_out(self, executor: Executor, order: Order) -> Reports:
        """Run an order's segment, begin the copy and the checkpoint that it requests; return what reads the reports."""
        if (plan := order.segment.generation) != self._generation:
            raise StageError(f"A segment of plan {plan} came to a worker of plan {self._generation}.")
        row, alone = self._rows[order.rows]
        begin_s = time.monotonic()
        taken = executor.run(order, row, alone=alone)
        if order.keep_spans:
            self._spans = tuple(span for of_stage in taken() for report in of_stage for span in report.spans)
        for writer in self._shards() if order.save_to else ():
            writer.begin(order.save_to)

        def reports() -> list[list[StepReport]]:
            found = [[replace(r, spans=()) if r.spans else r for r in of_stage] for of_stage in taken()]
            return self._copies.noted(found, begin_s)

        if order.keep_copy:
            noted = reports()  # before the copy that begins now, which goes on in the next segment
            self._copies.take(order.segment.first_step + order.segment.num_minibatches, mark=self._mark)
        return (lambda: noted) if order.keep_copy else reports

    @ray.method(concurrency_group="control")
    def abort(self, term: int, links: int, reason: str) -> None:
        """Abort the running segment and end ``work``; no effect if ``links`` is not the number of the present links."""
        self._fence.check(term)
        if self._executor is not None and links == self._links:
            self._copies.give_up()
            self._executor.abort(reason)
            self._inflow.abort(self._work.run)

    def reached(self, term: int) -> WorkerProgress:
        """Return the progress of this worker in training; Ray runs this call after ``work`` has ended."""
        self._fence.check(term)
        if self._executor is not None and self._generation < 0:  # it was loading another state
            return WorkerProgress(overlapping=True)
        here = WorkerProgress() if self._executor is None else self._executor.progress
        return self._come if here.steps is None else here

    def come_to(
        self, term: int, step: int, totals: tuple[torch.Tensor, torch.Tensor] | None
    ) -> list[list[StepReport]] | None:
        """Bring this worker to ``step`` completed optimizer steps, after ``work`` has failed.

        A worker with fewer completed steps finishes the step in progress. Gradients of a later step are dropped.

        Args:
            totals: gradient norm and loss of step number ``step``, from a worker that has completed it; else None.

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
        """Copy the state after ``step`` steps to memory; with ``send``, begin to send the copies to the holder."""
        self._fence.check(term)
        self._copies.take(step, send=send, must=True, mark=self._mark)
        self._copies.wait_until_taken()

    def _mark(self, stage: int) -> Mark | None:
        """Return a stage's position in the stream of train_data; call between two steps. None without a stream."""
        return None if self._executor is None else self._executor.works[stage].feed.mark()

    def _sends(self) -> bool:
        """Return True while activations or gradients wait to be sent to a neighbour; copies are then sent slowly."""
        executor = self._executor
        return executor is not None and any(channel.busy for channel in executor.channels.values())

    # Calls of other workers take no term: any worker may call at any time. Those that come often leave no task events.

    @ray.method(concurrency_group="copies")
    def copies(self) -> list[CopyFacts]:
        """List the facts of all copies on this worker."""
        return self._copies.facts()

    @ray.method(concurrency_group="copies")
    def copy_header(self, generation: int, stage: int, step: int, piece: int = COMMON) -> bytes:
        """Return the header of a copy, for RemoteCopy."""
        return self._copies.copy(generation, stage, step, piece)[0].to_json()

    @ray.method(concurrency_group="copies", enable_task_events=False)
    def copy_data(
        self, generation: int, stage: int, step: int, piece: int, places: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """Return byte ranges (begin, end) of a copy's block, in a new array: a later copy may overwrite the block."""
        block = self._copies.copy(generation, stage, step, piece)[1].numpy()
        return np.concatenate([block[begin:end] for begin, end in places])

    @ray.method(concurrency_group="copies")
    def hold_copy(self, generation: int, header: bytes) -> bool:
        """Begin to receive a copy of another worker's stage; ``header`` is a CopyHeader as JSON.

        See WorkerCopies.hold.
        """
        return self._copies.hold(generation, CopyHeader.from_json(header))

    @ray.method(concurrency_group="copies", enable_task_events=False)
    def hold_copy_part(self, generation: int, stage: int, step: int, piece: int, offset: int, data: np.ndarray) -> bool:
        """Store bytes of a copy of another worker's stage; see WorkerCopies.place."""
        return self._copies.place(StageKey(generation, stage, piece), step, offset, data.data)

    @property
    def _store_links(self) -> ObjectStoreEndpoint:
        """Endpoint for links through Ray's object store; a new one without links if the transport is another one."""
        endpoint = self._endpoint
        return endpoint if isinstance(endpoint, ObjectStoreEndpoint) else ObjectStoreEndpoint()

    @ray.method(concurrency_group="links", enable_task_events=False, num_returns=0)
    def link_message(self, link: bytes, *pieces: object) -> None:
        """Receive a message of a link through the object store; see ObjectStoreEndpoint.message."""
        self._store_links.message(link, *pieces)

    @ray.method(concurrency_group="links", enable_task_events=False)
    def link_message_acked(self, link: bytes, *pieces: object) -> str:
        """Receive a message like ``link_message``; the call's result acknowledges the message to the sender."""
        return self._store_links.message(link, *pieces)

    @ray.method(concurrency_group="notices")
    def link_notify(self, letter: ControlMessage) -> str:
        """Receive a hello, goodbye or abort of a link; see ObjectStoreEndpoint.notify."""
        return self._store_links.notify(letter)

    @ray.method(concurrency_group="watch")
    def link_watch(self, link: LinkIdentity) -> None:
        """Return when this end of a link ends; see ObjectStoreEndpoint.watch."""
        self._store_links.watch(link)

    @ray.method(concurrency_group="control")
    def spans(self) -> tuple[Span, ...]:
        """Return the timed actions (Span) of the last segment that was run with keep_spans=True."""
        return self._spans

    @ray.method(concurrency_group="control")
    def entries(self, folder: str, wait_s: float = REPORTS_WAIT_S) -> list[dict[str, Any]] | None:
        """Return the manifest entries of this worker's stages; None if ``folder`` is not written within ``wait_s``."""
        writers = self._shards()
        if not all(writer.wait(folder, wait_s) for writer in writers):
            return None
        return [entry for entry in entries_of(writers, folder, 0.0) if entry is not None]

    def save(self, term: int, folder: str) -> None:
        """Begin to write this worker's state to checkpoint ``folder``, while no ``work`` runs; see ``entries``."""
        self._fence.check(term)
        for writer in self._shards():
            writer.begin(folder)

    def restore(self, term: int, folder: str, fresh: FreshOptions) -> None:
        """Load a checkpoint of any number of stages; optimizer options in ``fresh`` keep their present values."""
        self._fence.check(term)
        assert self._executor is not None, "configure() comes first"
        self._come = WorkerProgress()
        self._executor.restore(folder, fresh)

    def _shards(self) -> list[ShardWriter]:
        assert self._executor is not None, "configure() comes first"
        self._writers = self._writers or self._executor.shard_writers()
        return self._writers

    def rest(self, term: int) -> None:
        """Become a spare: drop stages, copies and the charter, and close links; the process and its endpoint stay."""
        self._fence.check(term)
        self._close_links()
        for writer in self._writers:
            writer.close()
        self._charter, self._initial = b"", {}
        self._states, self._writers, self._rows, self._worker = [], [], {}, None
        self._next, self._programs, self._come = None, (), WorkerProgress()
        self._forget_copies()

    def close(self, term: int) -> None:
        """Close the links and the endpoint."""
        self._fence.check(term)
        self._shut()

    def _forget_copies(self) -> None:
        self._copies.close()
        self._copies = WorkerCopies(self._sends)

    def _shut(self) -> None:
        self._close_links()
        self._copies.close()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _close_links(self) -> None:
        if self._executor is not None:
            for channel in self._executor.channels.values():
                with contextlib.suppress(LinkError):
                    channel.close()
            self._executor.let_go()
            self._executor = None


GROUPS = {"control": 4, "orders": 1, "heartbeat": 1, "copies": 2, "links": 2, "notices": 1, "watch": 1}
"""Number of threads by concurrency group. One for "watch" suffices: calls of ``link_watch`` that wait for this thread
fail too when the process dies."""

StageActor = ray.remote(num_cpus=1, max_restarts=0, concurrency_groups=GROUPS)(_StageActor)
"""Ray actor class of a worker. Ray never restarts such an actor, since a restarted one would have no state."""

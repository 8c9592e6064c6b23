"""All-reduce of gradients between the replicas of a stage: the sum over all lanes, bitwise equal on all replicas.

Micro-batches are assigned round-robin to lanes, which are partial sums of gradients; a replica computes the
micro-batches of its lanes.

    replica 0   lanes 0 2      scatter: all replicas' lanes of slice r go to replica r, which sums them in lane order
    replica 1   lanes 1 3      gather:  the totals of slice r come back from replica r

Every element is summed once, lane after lane, on one replica, so that the result depends on the number of lanes and not
on the number of replicas. If no micro-batch of a lane reached a use of a parameter, the lane has no sum of it, and is
left out. With as many lanes as replicas R each replica sends 2 (R - 1) / R times the bytes of the gradients, as in a
ring all-reduce.

Gradients are sent chunk by chunk (``slices``), so that little memory is needed besides the sums
(``ir.communication`` counts it). A replica begins a chunk once it has the previous chunk's totals from all replicas, so
no two messages with the same name are in flight. Totals overwrite the first lane's sums, of which copies were sent.

Chunks have a fixed order, the last layers first, and each is sent as soon as its gradients are complete: in a separate
thread, in parallel with the rest of the update's last backward.

    last backward    layer 3   layer 2   layer 1   layer 0
    chunks                     [ 3 ]     [ 2 ]     [ 1 ]     [ 0 ]        after the backward: wait for the rest

On links the messages are named by actions of the stage: the scatter by its REDUCE_GRAD, the gather by its STEP.

With a sharded optimizer (``slices``), each replica keeps the totals of its slice, and the gather is deferred: after the
optimizer's step it sends parameters instead of gradients. Replicas then do not wait for all others between two chunks,
but each is at most one chunk ahead of its peers. So messages alternate between two names: the actions of the last
micro-batch and of the one before it, which exists because an update has at least as many micro-batches as replicas.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from raypipe.engine.codec.host import one_core
from raypipe.engine.device.device import CPU, Device, Mark, StreamName, TransferKind
from raypipe.engine.optim.slices import UNSHARDED, Chunk, chunks_of, once
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.placement import Placement
from raypipe.ir.schedule import Action, Op

Tensors = Sequence[torch.Tensor | None]
LONGEST_BACKWARD_S = 3600.0


class ReplicaLink(Protocol):
    """Exchange of messages between the replicas of a stage."""

    def send(self, worker: int, action: Action, tensors: Tensors, in_host: int) -> None:
        """Send ``worker`` a message named ``action``, in any thread; the first ``in_host`` tensors are on the host."""

    def recv(self, worker: int, action: Action, in_host: int) -> tuple[torch.Tensor | None, ...]:
        """Wait for ``worker``'s message ``action``, in any thread; its first ``in_host`` tensors stay on the host."""

    def waited(self, seconds: float) -> None:
        """Add seconds of waiting for replicas to the counters of the stage."""


class AllReduce:
    """All-reduce of one stage, on one of its replicas.

    Args:
        placement: assignment of stages to workers, with the stage's replicas and the lanes of each replica.
        sink: gradient sums of the stage.
        link: sends and receives messages of the stage's replicas.
        codec: "bf16" rounds the sums of lanes, and then their totals, to send half the bytes of fp32. Sums that are not
            sent are rounded too, so that the result depends on the lanes only. "none" does not round.
        device: device of the sums. An exchange in parallel with a backward has its own stream there.
        sharded: names of the parameters with sharded optimizer state, as in ``chunks_of``.
    """

    def __init__(
        self,
        placement: Placement,
        sink: GradientSink,
        link: ReplicaLink,
        codec: str = "none",
        device: Device = CPU,
        sharded: Mapping[int, str] = UNSHARDED,
    ) -> None:
        self._placement, self._sink = placement, sink
        self._link = link
        self._peers = [worker for worker in placement.replicas if worker != placement.worker]
        self._rounds = codec == "bf16" and placement.lanes > 1
        self._sharded = sharded if self._peers else UNSHARDED
        self._chunks = chunks_of(sink.trained, placement, self._sharded) if self._peers or self._rounds else []
        self._device = device
        self._running: _ThreadedExchange | None = None

    def begin(self, microbatch: int) -> None:
        """Start the exchange in a thread, just before the last backward of the update.

        The messages are named by the REDUCE_GRAD action of ``microbatch``.
        """
        assert self._running is None, "one update at a time"
        if self._peers and self._chunks:
            self._running = _ThreadedExchange(self._chunks, lambda wait: self._exchange(microbatch, wait), self._device)
            self._sink.observe(self._running.completed)
            self._running.start()

    def run(self, microbatch: int) -> None:
        """Compute the totals over all lanes after the last backward of an update, and store them in the sink.

        If ``begin`` has started the exchange, wait until it ends. ``microbatch`` names the messages as in ``begin``.

        Raises:
            LinkError: a replica did not answer.
        """
        if not self._chunks:
            self._sink.close()
            return
        begin_s = time.monotonic()
        if self._running is None:
            totals = self._exchange(microbatch, lambda _: None)
        else:
            running, self._running = self._running, None
            self._sink.observe(None)
            totals = running.finish()
        self._sink.close_with(totals)
        self._link.waited(time.monotonic() - begin_s)

    def gather(self, microbatch: int) -> None:
        """Exchange updated parameters between the replicas after an optimizer step with sharded optimizer state.

        Sends the parameters of this replica's slices, and writes those received from the other replicas. Does nothing
        without sharded optimizer state.

        Args:
            microbatch: micro-batch of the STEP action, which names the messages.

        Raises:
            LinkError: a replica did not answer.
        """
        trained, me, begin_s = self._sink.trained, self._placement.worker, time.monotonic()
        for number, chunk in enumerate(once(self._chunks, self._sharded)):
            action = self._named(Op.STEP, microbatch, number)
            mine = chunk.taken(me, trained)
            for peer in self._peers:
                self._link.send(peer, action, (mine,), 0)
            for peer in self._peers:
                (theirs,) = self._link.recv(peer, action, 0)
                assert theirs is not None
                chunk.put(peer, theirs, trained)
        self._link.waited(time.monotonic() - begin_s)

    def _named(self, op: Op, microbatch: int, number: int) -> Action:
        """Return the action, of operation ``op``, that names the messages of the chunk with index ``number``."""
        return Action(self._sink.program.index, op, microbatch - number % 2 if self._sharded else microbatch)

    def abandon(self) -> None:
        """Abort the exchange of a step that will not end, without waiting for further gradients."""
        if self._running is not None:
            self._running.abandon()
            self._running = None
        self._sink.observe(None)

    def _exchange(self, microbatch: int, wait: Callable[[int], None]) -> Tensors:
        """Exchange all chunks and return the summed gradients, one per use of a parameter, ordered as ``sink.trained``.

        A use without a gradient has None. For sharded parameters only this replica's slices are valid.

        Args:
            microbatch: number in the names of the messages.
            wait: called with the index of each chunk; must return once this replica has all gradients of the chunk.
        """
        sink, me = self._sink, self._placement.worker
        into: list[torch.Tensor | None] = [None] * len(sink.trained)
        known: set[int] = set()
        for number, chunk in enumerate(self._chunks):
            wait(number)
            reached, total = self._summed(chunk, self._named(Op.REDUCE_GRAD, microbatch, number))
            total = self._rounded(total)
            for site, is_reached in zip(chunk.sites, map(any, zip(*reached.values(), strict=True)), strict=True):
                if site not in known:
                    known.add(site)
                    into[site] = sink.total_of(site, reached=is_reached)
            if chunk.sharded:
                chunk.put(me, total, into)
                continue
            gather = self._named(Op.STEP, microbatch, number)
            for peer in self._peers:
                self._link.send(peer, gather, (total,), 0)
            totals = {me: total} | {peer: self._link.recv(peer, gather, 0)[0] for peer in self._peers}
            chunk.write([totals[worker] for worker in self._placement.replicas], into)
        return into

    def _summed(self, chunk: Chunk, scatter: Action) -> tuple[dict[int, list[int]], torch.Tensor]:
        """Exchange the lanes' sums of a chunk, and sum this replica's slice of the chunk over all lanes.

        Args:
            scatter: action that names the messages.

        Returns:
            ({lane: for each parameter use in ``chunk.sites``, 1 if the lane has a sum of it and else 0}, summed slice).
        """
        me = self._placement.worker
        own = {lane: self._sink.sums_of(lane, chunk.sites) for lane in self._placement.lanes_of(me)}
        for lane_sum in (x for sums in own.values() for x in sums if x is not None):
            self._device.record_stream(lane_sum)
        there = torch.tensor([[x is not None for x in sums] for sums in own.values()], dtype=torch.uint8)
        flat = {lane: x if (x := chunk.flattened(sums)) is None else self._rounded(x) for lane, sums in own.items()}
        for peer in self._peers:
            self._link.send(peer, scatter, [there, *(chunk.slice_of(peer, x) for x in flat.values())], 1)
        slices = {lane: chunk.slice_of(me, x) for lane, x in flat.items()}
        reached: dict[int, list[int]] = dict(zip(own, there.tolist(), strict=True))
        for peer in self._peers:
            theirs, *pieces = self._link.recv(peer, scatter, 1)
            assert theirs is not None
            lanes = self._placement.lanes_of(peer)
            reached |= zip(lanes, theirs.tolist(), strict=True)
            slices |= zip(lanes, pieces, strict=True)
        return reached, chunk.summed(me, [(slices[lane], reached[lane]) for lane in sorted(reached)])

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Round a floating-point tensor to the dtype of the codec; return ``x`` unchanged if the codec is "none"."""
        return x.to(torch.bfloat16) if self._rounds and x.dtype in (torch.float32, torch.float64) else x


class _ThreadedExchange:
    """Exchange in a separate thread, which sends each chunk as soon as its gradients are complete.

    compute     gradients of 3 | mark | gradients of 2 | mark ...                wait | step
    exchange              wait: sum and send 3         wait: sum and send 2 ... mark --^

    Args:
        exchange: runs the whole exchange and returns the totals; its argument is a function that waits for a chunk.
    """

    def __init__(
        self, chunks: Sequence[Chunk], exchange: Callable[[Callable[[int], None]], Tensors], device: Device
    ) -> None:
        self._missing = [set(chunk.sites) for chunk in chunks]
        self._of_site: dict[int, list[int]] = {}
        for number, chunk in enumerate(chunks):
            for site in chunk.sites:
                self._of_site.setdefault(site, []).append(number)
        self._complete = [threading.Event() for _ in chunks]
        self._marks: list[Mark] = [None] * len(chunks)
        self._done: Mark = None
        self._exchange, self._device = exchange, device
        self._totals: Future[Tensors] = Future()
        self._abandoned = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="raypipe-sum", daemon=True).start()

    def completed(self, site: int) -> None:
        """Record that all gradients of a parameter's use are added; ``site`` is its index in the sink's ``trained``."""
        for number in self._of_site.get(site, ()):
            self._missing[number].discard(site)
            if not self._missing[number]:
                self._completed(number)

    def _completed(self, number: int) -> None:
        """Let the thread send chunk ``number``, because all its gradients are queued in the computing stream."""
        self._marks[number] = self._device.mark()
        self._complete[number].set()

    def finish(self) -> Tensors:
        """Wait for the exchange after the last backward, and return the summed gradients as ``_exchange`` does.

        Raises:
            LinkError: a replica did not answer.
        """
        for number, event in enumerate(self._complete):
            if not event.is_set():
                self._completed(number)
        totals = self._totals.result()  # every wait in the thread has the deadline of a message
        self._device.wait(self._done, f"{TransferKind.REDUCED}: used once they are exchanged")
        for total in totals:
            if total is not None:
                self._device.record_stream(total)
        return totals

    def abandon(self) -> None:
        """End the thread's wait for gradients; a wait for messages ends when the channel closes."""
        self._abandoned = True
        for event in self._complete:
            event.set()

    def _run(self) -> None:
        try:
            one_core()
            with torch.no_grad(), self._device.prepare_thread(), self._device.stream(StreamName.EXCHANGE):
                totals = self._exchange(self._wait)
                self._done = self._device.mark()
            self._totals.set_result(totals)
        except BaseException as error:  # noqa: BLE001  (raised in finish())
            self._totals.set_exception(error)

    def _wait(self, number: int) -> None:
        # finish() or abandon() sets the event even if the backward fails; the timeout is for one that never ends.
        if not self._complete[number].wait(LONGEST_BACKWARD_S) or self._abandoned:
            raise _AbandonedError
        self._device.wait(self._marks[number], f"{TransferKind.REDUCED}: summed once they are complete")


class _AbandonedError(Exception):
    """Exception that ends the thread of an exchange that was aborted."""

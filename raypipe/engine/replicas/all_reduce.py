"""What replicas of a stage exchange at the end of an update: sums of lanes, to the same bits on all of them.

    replica 0   lanes 0 2      scatter: everybody's lanes of slice r go to replica r, which sums them in their order
    replica 1   lanes 1 3      gather:  the totals of slice r come back from replica r

Every element is summed once, lane after lane, wherever that is done, so that the result depends on the number of lanes
and not on the number of replicas. An element that a lane has nothing for (a use site that no micro-batch of it reached)
is left out of the sum, as it is where one worker has all lanes. With as many lanes as replicas R each of them sends
2 (R - 1) / R times the bytes of the gradients, as in a ring.

The gradients go chunk by chunk (``chunks``), so that little memory is needed beside the sums (``ir.exchange`` counts
it). A replica begins with a chunk once it has the totals of the one before from all others, so that no two messages of
one name are on their way. Totals are written over the sums of a lane, whose elements were copied for the exchange.

Chunks go in a fixed order, the last layers first, and each as soon as its gradients are complete: in a thread of its
own, beside the rest of the update's last backward. Who has nothing more to compute only waits.

    last backward    layer 3   layer 2   layer 1   layer 0
    chunks                     [ 3 ]     [ 2 ]     [ 1 ]     [ 0 ]        what is left behind it is waited for

On links the two messages are known by actions of the stage: the scatter by its REDUCE_GRAD, the gather by its STEP.

Where replicas share out the optimizer's state (``slices``), each keeps the totals of its slice, and the gather is put
off: once they have stepped, it has the parameters in place of the gradients. Nobody then waits for all others between
two chunks, but nobody is more than one ahead of who it hears from, so that chunks take turns with two names: the second
is that of the micro-batch before, of which there is one, for an update has as many as replicas or more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from raypipe.engine.codec.host import one_core
from raypipe.engine.device import CPU, Crosses, Device, Mark, Stream
from raypipe.engine.gradients import GradientSink
from raypipe.engine.placement import Placement
from raypipe.engine.replicas.chunks import NOBODY, Chunk, chunks_of, once
from raypipe.ir.schedule import Action, Op

__all__ = ["AllReduce"]

Tensors = Sequence[torch.Tensor | None]
LONGEST_BACKWARD_S = 3600.0


class AllReduce:
    """Of one stage, on one of its replicas.

    Args:
        placement: who the replicas are, and which lanes each has.
        sink: of the stage.
        send: (worker, action, tensors, how many of these lie in host memory: the first ones) hands a message to another
            worker, from any thread.
        receive: (worker, the sender's action, how many are to lie in host memory) waits for one, in any thread.
        device: where the sums lie. An exchange beside a backward has a stream of its own there.
        codec: "bf16" rounds sums of lanes before they are added up in their own type, and the totals: half the bytes.
            Those that stay here are rounded too, so that the result depends on the lanes alone.
        shared_out: parameters whose optimizer state replicas share out, as ``chunks_of`` takes them.
    """

    def __init__(
        self,
        stage: int,
        placement: Placement,
        sink: GradientSink,
        send: Callable[[int, Action, Tensors, int], None],
        receive: Callable[[int, Action, int], tuple[torch.Tensor | None, ...]],
        codec: str = "none",
        device: Device = CPU,
        shared_out: Mapping[int, str] = NOBODY,
    ) -> None:
        self._stage, self._placement, self._sink = stage, placement, sink
        self._send, self._receive = send, receive
        self._peers = [worker for worker in placement.replicas if worker != placement.worker]
        self._rounds = codec == "bf16" and placement.lanes > 1
        self._shared_out = shared_out if self._peers else NOBODY
        self._chunks = chunks_of(sink.trained, placement, self._shared_out) if self._peers or self._rounds else []
        self._device = device
        self._begun: _Begun | None = None

    @property
    def exchanges(self) -> bool:
        """Whether there is anything to exchange, or to round as if there were."""
        return bool(self._chunks)

    def begin(self, microbatch: int) -> None:
        """The update's last backward is about to run: exchange, beside it, what it completes.

        Args:
            microbatch: last of the update.
        """
        assert self._begun is None, "one update at a time"
        if self._peers and self._chunks:
            self._begun = _Begun(self._chunks, lambda wait: self._exchange(microbatch, wait), self._device)
            self._sink.tell(self._begun.completed)
            self._begun.start()

    def run(self, microbatch: int) -> None:
        """Close the sink with the totals over all lanes.

        Args:
            microbatch: last of the update.

        Raises:
            LinkError: a replica did not answer.
        """
        if not self.exchanges:
            self._sink.close()
            return
        if self._begun is None:
            self._sink.close_with(self._exchange(microbatch, lambda _: None))
            return
        begun, self._begun = self._begun, None
        self._sink.tell(None)
        self._sink.close_with(begun.finish())

    def gather(self, microbatch: int) -> None:
        """All replicas have stepped their slices: exchange the parameters.

        Args:
            microbatch: last of the update.

        Raises:
            LinkError: a replica did not answer.
        """
        trained, me = self._sink.trained, self._placement.worker
        for number, chunk in enumerate(once(self._chunks, self._shared_out)):
            action = self._named(Op.STEP, microbatch, number)
            mine = chunk.taken(me, trained)
            for peer in self._peers:
                self._send(peer, action, (mine,), 0)
            for peer in self._peers:
                (theirs,) = self._receive(peer, action, 0)
                assert theirs is not None
                chunk.put(peer, theirs, trained)

    def _named(self, op: Op, microbatch: int, number: int) -> Action:
        """Of a chunk's message."""
        return Action(self._stage, op, microbatch - number % 2 if self._shared_out else microbatch)

    def abandon(self) -> None:
        """The step will not end: whatever was begun ends by itself, without waiting for more gradients."""
        if self._begun is not None:
            self._begun.abandon()
            self._begun = None
        self._sink.tell(None)

    def _exchange(self, microbatch: int, wait: Callable[[int], None]) -> Tensors:
        """All chunks; the totals, for each of the sink's ``trained``: of what is shared out, in this replica's slices.

        Args:
            wait: (chunk) returns once this replica has all gradients of it.
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
            if chunk.shared_out:
                chunk.put(me, total, into)
                continue
            gather = self._named(Op.STEP, microbatch, number)
            for peer in self._peers:
                self._send(peer, gather, (total,), 0)
            totals = {me: total} | {peer: self._receive(peer, gather, 0)[0] for peer in self._peers}
            chunk.write([totals[worker] for worker in self._placement.replicas], into)
        return into

    def _summed(self, chunk: Chunk, scatter: Action) -> tuple[dict[int, list[int]], torch.Tensor]:
        """Of every lane, for which of the chunk's sites it has anything; this replica's slice of the chunk, summed."""
        me = self._placement.worker
        own = {lane: self._sink.sums_of(lane, chunk.sites) for lane in self._placement.lanes_of(me)}
        for summed in (x for sums in own.values() for x in sums if x is not None):
            self._device.record_stream(summed)
        there = torch.tensor([[x is not None for x in sums] for sums in own.values()], dtype=torch.uint8)
        flat = {lane: x if (x := chunk.flattened(sums)) is None else self._rounded(x) for lane, sums in own.items()}
        for peer in self._peers:
            self._send(peer, scatter, [there, *(chunk.slice_of(peer, x) for x in flat.values())], 1)
        slices = {lane: chunk.slice_of(me, x) for lane, x in flat.items()}
        reached: dict[int, list[int]] = dict(zip(own, there.tolist(), strict=True))
        for peer in self._peers:
            theirs, *pieces = self._receive(peer, scatter, 1)
            assert theirs is not None
            lanes = self._placement.lanes_of(peer)
            reached |= zip(lanes, theirs.tolist(), strict=True)
            slices |= zip(lanes, pieces, strict=True)
        return reached, chunk.summed(me, [(slices[lane], reached[lane]) for lane in sorted(reached)])

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        """As it travels."""
        return x.to(torch.bfloat16) if self._rounds and x.dtype in (torch.float32, torch.float64) else x


class _Begun:
    """An exchange in a thread of its own, which goes from chunk to chunk as these become complete.

    compute     gradients of 3 | mark | gradients of 2 | mark ...                wait | step
    exchange              wait: sum and send 3         wait: sum and send 2 ... mark --^

    Args:
        exchange: all of it, given what waits for a chunk; returns the totals.
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
        self._error: BaseException | None = None
        self._totals: Tensors = ()
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="raypipe-sum", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def completed(self, site: int) -> None:
        """The last gradient of a use site was added."""
        for number in self._of_site.get(site, ()):
            self._missing[number].discard(site)
            if not self._missing[number]:
                self._completed(number)

    def _completed(self, number: int) -> None:
        """All gradients of a chunk are queued, in the stream that computes."""
        self._marks[number] = self._device.mark()
        self._complete[number].set()

    def finish(self) -> Tensors:
        """No gradients come any more: wait for the totals.

        Raises:
            LinkError: a replica did not answer.
        """
        for number, event in enumerate(self._complete):
            if not event.is_set():
                self._completed(number)
        self._thread.join()  # every wait in it has the deadline of a message
        if self._error is not None:
            raise self._error
        self._device.wait(self._done, f"{Crosses.REDUCED}: used once they are exchanged")
        for total in self._totals:
            if total is not None:
                self._device.record_stream(total)
        return self._totals

    def abandon(self) -> None:
        """End it where it waits for gradients; a wait for a message ends with its channel."""
        self._abandoned = True
        for event in self._complete:
            event.set()

    def _run(self) -> None:
        try:
            one_core()
            with torch.no_grad(), self._device.prepare_thread(), self._device.stream(Stream.EXCHANGE):
                self._totals = self._exchange(self._wait)
                self._done = self._device.mark()
        except BaseException as error:  # noqa: BLE001  (told where the stage waits for it)
            self._error = error

    def _wait(self, number: int) -> None:
        # ``finish`` or ``abandon`` comes, whatever becomes of the backward, unless it never ends.
        if not self._complete[number].wait(LONGEST_BACKWARD_S) or self._abandoned:
            raise _AbandonedError
        self._device.wait(self._marks[number], f"{Crosses.REDUCED}: summed once they are complete")


class _AbandonedError(Exception):
    """Nobody waits for this exchange."""

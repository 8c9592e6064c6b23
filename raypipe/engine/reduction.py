"""Reduction at the end of an update: gradients between replicas and between stages, and the gradient norm of the model.

    REDUCE_GRAD   replicas of a stage sum their gradients (``optim.all_reduce``);
                  each stage sends the accumulators of shared parameters to the other workers that hold them; after
                  the worker's last stage, each stage sums all of them in the order of use
    REDUCE_NORM   norms of single tensors are sent down to worker 0, the total is sent back up

    row    ... 0F5 0B3 0F7 0B5 | 0B7 | 0SEND_B7 0REDUCE_GRAD7
                                 ^ the update's last backward here: the exchange begins in parallel with it

The exchange between replicas begins early if the update is certain, as in synchronous schedules; else, and if the
backward is split to be timed, it begins after the backward. The results are bitwise equal.

All messages are sent before any is waited for, so stages of one worker cannot wait for each other. Worker 0 finishes
its backwards last, so all other norms have arrived by the time it has its own.

Replicas of a stage have equal gradients after their all-reduce. Only their leader (the first) exchanges gradients of
shared parameters and norms with other workers, and forwards what it receives to its replicas. The replicas notify the
leader when they have all gradients, on the last stage together with their losses. The leader sends its norms only after
that, so when a worker receives the total norm, every worker has all its gradients. With a sharded optimizer the
replicas also send the norms of their blocks, from which the leader computes the norms of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from raypipe.engine.device.device import Device, TransferKind
from raypipe.engine.messages.channel import Channel
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.all_reduce import AllReduce
from raypipe.engine.optim.norms import total_norm
from raypipe.engine.optim.slices import UNSHARDED, sharded_names
from raypipe.engine.optim.state import Settings, is_sharded, shard_optimizer
from raypipe.engine.optim.update import Update
from raypipe.engine.stage.gradients import Accumulators, GradientSink
from raypipe.engine.stage.losses import LossTerm, summed, term_message
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.stage import StageProgram
from raypipe.engine.stage_runner import StageRunner
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action, Op

Tensors = Sequence[torch.Tensor | None]
READY: Tensors = (None,)
"""Message of a replica to its leader if it has no losses to send."""


class _StageLink:
    """Link between the replicas of one stage (``all_reduce.ReplicaLink``); only one thread at a time may use it.

    Args:
        work: work of the stage, whose counters get the bytes sent and the seconds of waiting.
        channels: channels to the other workers, by worker number.
        device: device of the tensors, which are copied to the host to be sent.
        timeout_s: longest wait for a message.
    """

    def __init__(self, work: StageRunner, channels: Mapping[int, Channel], device: Device, timeout_s: float) -> None:
        self._work, self._channels, self._timeout_s = work, channels, timeout_s
        self._transfer = DeviceTransfer(device)

    def waited(self, seconds: float) -> None:
        self._work.waited(seconds)

    def send(self, worker: int, action: Action, tensors: Tensors, in_host: int) -> None:
        self._work.counters.exchanged_bytes += sum(x.nbytes for x in tensors if x is not None)
        copied = self._transfer.to_host(tensors[in_host:], TransferKind.REDUCED)
        self._channels[worker].send(action, (*tensors[:in_host], *copied), 0)

    def recv(self, worker: int, action: Action, in_host: int) -> tuple[torch.Tensor | None, ...]:
        try:
            message = self._channels[worker].recv(action, self._timeout_s)
        except LinkError as error:
            label = Action(self._work.stage, Op.REDUCE_GRAD, action.microbatch).label
            raise type(error)(f"Stage {self._work.stage} in {label}: {error}") from error
        host: Tensors = message[:in_host]
        if self._channels[worker].on_device:  # which brings all tensors to the device
            host = self._transfer.to_host(host, TransferKind.REDUCED)
        return (*host, *self._transfer.to_device(message[in_host:], TransferKind.REDUCED))


def all_reduces(
    placement: Placement,
    works: Mapping[int, StageRunner],
    channels: Mapping[int, Channel],
    device: Device,
    settings: Settings,
) -> dict[int, AllReduce]:
    """Create the gradient exchange between replicas for each of a worker's stages, by stage.

    With ``settings.shard_optimizer``, the stages' optimizers step only this worker's slices from now on. ``works`` has
    the runners by stage, and ``channels`` those to other workers by worker.
    """
    shards, by_stage = is_sharded(placement, settings), {}
    for stage, work in works.items():
        shard_optimizer(work.program, work.state, placement, settings)
        sharded = sharded_names(work.program, work.state.parameters) if shards else UNSHARDED
        link = _StageLink(work, channels, device, settings.timeout_s)
        by_stage[stage] = AllReduce(placement, work.sink, link, settings.codec_sums, device, sharded)
    return by_stage


def last_backwards(row: Sequence[Action]) -> dict[int, int]:
    """Find the backward after which a stage's gradients are complete, for each REDUCE_GRAD of a worker's actions.

    Returns:
        {index in ``row`` of the stage's last backward before the REDUCE_GRAD: micro-batch of the REDUCE_GRAD}.
    """
    closing: dict[int, int] = {}
    newest: dict[int, int] = {}
    for place, action in enumerate(row):
        if action.op is Op.B:
            newest[action.stage] = place
        elif action.op is Op.REDUCE_GRAD and action.stage in newest:
            closing[newest.pop(action.stage)] = action.microbatch
    return closing


class Reduction:
    """Runner of REDUCE_GRAD and REDUCE_NORM on one worker.

    Args:
        programs: programs of all stages.
        sinks, updates, exchanges: gradient sum, optimizer update and all-reduce of each of this worker's stages.
        send: called with (worker, action that names the message, tensors) to send a message.
        receive: called with (worker, action that names the message) to wait for a message; returns its tensors.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        placement: Placement,
        sinks: Mapping[int, GradientSink],
        updates: Mapping[int, Update],
        exchanges: Mapping[int, AllReduce],
        send: Callable[[int, Action, Tensors], None],
        receive: Callable[[int, Action], tuple[torch.Tensor | None, ...]],
    ) -> None:
        self._programs, self._placement = programs, placement
        self._sinks, self._updates = sinks, updates
        self._send, self._receive = send, receive
        self._own = frozenset(sinks)
        self._exchanges = exchanges
        self._others = [worker for worker in placement.replicas if worker != placement.worker]
        self._done: set[int] = set()
        self._known: tuple[torch.Tensor, torch.Tensor] | None = None
        self._served: set[int] = set()

    def reduce_grad(self, stage: int, microbatch: int) -> None:
        """Sum the gradients of a stage's update, whose last micro-batch is ``microbatch``, over the stage's replicas.

        The call for the last of the worker's stages also sums the gradients of parameters that several stages hold,
        and sets every ``parameter.grad``. A deferred update does nothing.
        """
        if not self._updates[stage].begin():
            return
        self._exchanges[stage].run(microbatch)
        if self._placement.leads:
            for worker, stages in self._placement.sharing_workers(self._programs, stage).items():
                self._send(worker, Action(stage, Op.REDUCE_GRAD, microbatch), self._sinks[stage].exported(stages))
        self._done.add(stage)
        if self._done == self._own:
            self._done.clear()
            self._finish(microbatch)

    def _finish(self, microbatch: int) -> None:
        imported: dict[int, Accumulators] = {}
        for stage in sorted(self._own):
            for peers in self._placement.sharing_workers(self._programs, stage).values():
                for peer in sorted(peers - imported.keys()):
                    tensors = self._recv_shared(self._placement.home_of(peer), Action(peer, Op.REDUCE_GRAD, microbatch))
                    imported[peer] = self._programs[peer].shared_sites(self._own, tensors)
        within = {
            stage: self._programs[stage].shared_sites(self._own, sink.exported(self._own))
            for stage, sink in self._sinks.items()
        }
        for stage, sink in self._sinks.items():
            sink.finish([*imported.values(), *(sites for mate, sites in within.items() if mate != stage)])
            self._updates[stage].average()

    def _recv_shared(self, worker: int, action: Action) -> Tensors:
        """Return the gradients of shared parameters from ``worker``, in the message that ``action`` names.

        ``worker`` sends the message to the first replica of this stage, which forwards it to the other replicas.
        """
        if not self._placement.leads:
            return self._receive(self._placement.replicas[0], action)
        tensors = self._receive(worker, action)
        for other in self._others:
            self._send(other, action, tensors)
        return tensors

    def norm(
        self, stage: int, microbatch: int, losses: Sequence[LossTerm], *, with_frozen: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (gradient norm of the whole model, loss), scalars, equal on every stage.

        The first call exchanges messages; calls for the worker's other stages return the same result. For any partition
        it is the norm of the parameters' norms in the order of the user's named_parameters(), as in torch.

        Args:
            losses: terms of the mini-batch's loss, if this worker holds the last stage; else empty.
            with_frozen: True if workers whose stages have no backward get the result too, as in ``Wiring.normed_with``.
        """
        totals = self._known = self._known or self._norm(microbatch, losses, with_frozen)
        self._served.add(stage)
        if self._served == self._own:
            self._served.clear()
            self._known = None
        return totals

    def _norm(
        self, microbatch: int, losses: Sequence[LossTerm], with_frozen: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        me, placement = self._placement.worker, self._placement
        of_parts = [self._updates[stage].part_norms() for stage in sorted(self._own)]
        mine = [] if all(norms is None for norms in of_parts) else of_parts
        action = Action(placement.first_stage(me), Op.REDUCE_NORM, microbatch)
        ends = len(self._programs) - 1 in self._own
        if not placement.leads:
            leader = placement.replicas[0]
            self._send(leader, action, [*(term_message(losses) if ends else READY), *mine])
            total, loss = self._receive(leader, action)
        else:
            messages = [self._receive(other, action) for other in self._others]
            count = len(term_message(())) if ends else len(READY)
            loss = summed(losses, [message[:count] for message in messages] if ends else ())
            by_stage = list(zip(mine, *(message[count:] for message in messages), strict=True))
            total, loss = self._of_leaders(action, loss, by_stage or [()] * len(self._own), with_frozen)
            for other in self._others:
                self._send(other, action, [total, loss])
        assert total is not None
        assert loss is not None
        return total, loss

    def loss(self, microbatch: int, losses: Sequence[LossTerm]) -> torch.Tensor | None:
        """Return the loss of the mini-batch that ends with ``microbatch``, as ``norm`` does, but compute no norm.

        The first replica of the last stage sums the terms of all its replicas; on other workers the result is None.
        """
        if len(self._programs) - 1 not in self._own or not self._others:
            return summed(losses)
        action = Action(self._placement.first_stage(self._placement.worker), Op.REDUCE_NORM, microbatch)
        if not self._placement.leads:
            self._send(self._placement.replicas[0], action, term_message(losses))
            return None
        return summed(losses, [self._receive(other, action) for other in self._others])

    def _of_leaders(
        self,
        action: Action,
        loss: torch.Tensor | None,
        of_parts: Sequence[Sequence[torch.Tensor | None]],
        with_frozen: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute (gradient norm, loss) of the model together with the other leaders (first replicas).

        Each leader sends the norms of its own and of later stages to the previous leader. The first leader computes the
        total, and sends it back the same way.

        Args:
            action: names the messages.
            loss: loss of the mini-batch; None on all but the last stage.
            of_parts: for each stage of this worker, ``Update.part_norms`` of all replicas; empty without sharding.
            with_frozen: see ``norm``.
        """
        placement = self._placement
        lowest = 0 if with_frozen else self._programs[0].first_trainable
        leaders = [worker for worker in placement.leaders if max(placement.stages_of(worker)) >= lowest]
        at = leaders.index(placement.worker)
        below, above = (leaders[i] if 0 <= i < len(leaders) else None for i in (at - 1, at + 1))
        by_stage = zip(sorted(self._own), of_parts, strict=True)
        parts = [self._updates[stage].own_norms(of_replicas) for stage, of_replicas in by_stage]
        where, norms = torch.cat([where for where, _ in parts]), torch.cat([norms for _, norms in parts])
        if above is not None:
            positions_above, norms_above, loss_above = self._receive(
                above, action._replace(stage=placement.first_stage(above))
            )
            assert positions_above is not None
            assert norms_above is not None
            where, norms = torch.cat([where, positions_above]), torch.cat([norms, norms_above])
            loss = loss_above if loss is None else loss
        total: torch.Tensor | None
        if below is not None:
            self._send(below, action, [where, norms, loss])
            total, loss = self._receive(below, action._replace(stage=placement.first_stage(below)))
        else:
            total = total_norm(where, norms)
        if above is not None:
            self._send(above, action, [total, loss])
        return total, loss

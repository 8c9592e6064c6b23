"""The end of an update on one worker: shared gradients are summed and the norm is taken, over all of its stages.

    REDUCE_GRAD   replicas of a stage sum their gradients (``exchange``);
                  each stage hands the accumulators of what it shares to the workers that hold it too; behind the
                  worker's last one, each stage sums all of them in the order of use
    REDUCE_NORM   norms of single tensors travel down to worker 0, the total travels back up

Nothing is waited for before everything has been sent, so stages of one worker cannot wait for each other. Worker 0
finishes its backwards last, so everybody else's norms have arrived by the time it has its own.

Of replicas the one that leads does this, and hands on what it heard to the others, which have the same gradients. Those
tell it when they have them, and on the last stage their losses, before it tells anybody its norms: whoever knows the
total knows that every worker has all its gradients (``reached``). Where replicas share out the optimizer's state they
tell the norms of their blocks too, of which the one that leads makes those of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from raypipe.engine.exchange import Exchange
from raypipe.engine.gradients import Accumulators, GradientSink
from raypipe.engine.losses import LossTerm, summed, told
from raypipe.engine.norms import total_norm
from raypipe.engine.placement import Placement
from raypipe.engine.stage import StageProgram
from raypipe.engine.update import Update
from raypipe.ir.schedule import Action, Op

__all__ = ["Reduction"]

Tensors = Sequence[torch.Tensor | None]
READY: Tensors = (None,)
"""What a replica tells the one that leads, which has nothing else to tell."""


class Reduction:
    """REDUCE_GRAD and REDUCE_NORM of one worker.

    Args:
        programs: of all stages.
        placement: who holds which stage.
        sinks, updates: of this worker's stages.
        exchange: with the replicas of these.
        send: (worker, action, tensors) hands a message to another worker.
        receive: (worker, the sender's action) waits for one.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        placement: Placement,
        sinks: Mapping[int, GradientSink],
        updates: Mapping[int, Update],
        exchange: Exchange,
        send: Callable[[int, Action, Tensors], None],
        receive: Callable[[int, Action], tuple[torch.Tensor | None, ...]],
    ) -> None:
        self._programs, self._placement = programs, placement
        self._sinks, self._updates = sinks, updates
        self._send, self._receive = send, receive
        self._own = frozenset(sinks)
        self._exchange = exchange
        self._others = [worker for worker in placement.replicas if worker != placement.worker]
        self._done: set[int] = set()
        self._known: tuple[torch.Tensor, torch.Tensor] | None = None
        self._told: set[int] = set()

    def reduce_grad(self, stage: int, microbatch: int) -> None:
        """The stage has all gradients of its update; behind the last stage's, fill every ``parameter.grad``."""
        if not self._updates[stage].begin():
            return
        self._exchange.run(stage, microbatch)
        if self._placement.leads:
            for worker, stages in self._placement.sharing(self._programs, stage).items():
                self._send(worker, Action(stage, Op.REDUCE_GRAD, microbatch), self._sinks[stage].exported(stages))
        self._done.add(stage)
        if self._done == self._own:
            self._done.clear()
            self._finish(microbatch)

    def _finish(self, microbatch: int) -> None:
        found: dict[int, Accumulators] = {}
        for stage in sorted(self._own):
            for peers in self._placement.sharing(self._programs, stage).values():
                for peer in sorted(peers - found.keys()):
                    tensors = self._heard(self._placement.home_of(peer), Action(peer, Op.REDUCE_GRAD, microbatch))
                    found[peer] = self._programs[peer].shared_sites(self._own, tensors)
        within = {
            stage: self._programs[stage].shared_sites(self._own, sink.exported(self._own))
            for stage, sink in self._sinks.items()
        }
        for stage, sink in self._sinks.items():
            sink.finish([*found.values(), *(sites for mate, sites in within.items() if mate != stage)])
            self._updates[stage].average()

    def _heard(self, worker: int, action: Action) -> Tensors:
        """A message of another worker, which the replica that leads hands on to the others."""
        if not self._placement.leads:
            return self._receive(self._placement.replicas[0], action)
        tensors = self._receive(worker, action)
        for other in self._others:
            self._send(other, action, tensors)
        return tensors

    def norm(
        self, stage: int, microbatch: int, losses: Sequence[LossTerm], *, with_frozen: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(gradient norm of the whole model, loss), the same on every stage; taken once for all stages of the worker.

        The total is the norm of the stacked norms in the order of the user's named_parameters(), which is
        what torch computes, so it does not depend on the partition.

        Args:
            losses: of the mini-batch's micro-batches, where this worker holds the last stage.
            with_frozen: workers whose stages have no backward wait for it too, as ``Wiring.normed_with`` says.
        """
        found = self._known = self._known or self._norm(microbatch, losses, with_frozen)
        self._told.add(stage)
        if self._told == self._own:
            self._told.clear()
            self._known = None
        return found

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
            self._send(leader, action, [*(told(losses) if ends else READY), *mine])
            total, loss = self._receive(leader, action)
        else:
            heard = [self._receive(other, action) for other in self._others]
            count = len(told(())) if ends else len(READY)
            loss = summed(losses, [message[:count] for message in heard] if ends else ())
            by_stage = list(zip(mine, *(message[count:] for message in heard), strict=True))
            total, loss = self._of_leaders(action, loss, by_stage or [()] * len(self._own), with_frozen)
            for other in self._others:
                self._send(other, action, [total, loss])
        assert total is not None
        assert loss is not None
        return total, loss

    def loss(self, microbatch: int, losses: Sequence[LossTerm]) -> torch.Tensor | None:
        """Where no norm is exchanged, the loss on the replica of the last stage that leads; None on every other worker.

        Args:
            losses: as in ``norm``.
        """
        if len(self._programs) - 1 not in self._own or not self._others:
            return summed(losses)
        action = Action(self._placement.first_stage(self._placement.worker), Op.REDUCE_NORM, microbatch)
        if not self._placement.leads:
            self._send(self._placement.replicas[0], action, told(losses))
            return None
        return summed(losses, [self._receive(other, action) for other in self._others])

    def _of_leaders(
        self,
        action: Action,
        loss: torch.Tensor | None,
        of_parts: Sequence[Sequence[torch.Tensor | None]],
        with_frozen: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(gradient norm, loss) from what every stage's leading worker has: down to the first, and back up.

        Args:
            of_parts: of every stage here, what all its replicas told of the norms of their slices; empty for nothing.
        """
        placement = self._placement
        lowest = 0 if with_frozen else self._programs[0].first_trainable
        leaders = [worker for worker in placement.leaders if max(placement.stages_of(worker)) >= lowest]
        at = leaders.index(placement.worker)
        below, above = (leaders[i] if 0 <= i < len(leaders) else None for i in (at - 1, at + 1))
        parts = [self._updates[stage].own_norms(told) for stage, told in zip(sorted(self._own), of_parts, strict=True)]
        where, norms = torch.cat([where for where, _ in parts]), torch.cat([norms for _, norms in parts])
        if above is not None:
            further, more, known = self._receive(above, action._replace(stage=placement.first_stage(above)))
            assert further is not None
            assert more is not None
            where, norms = torch.cat([where, further]), torch.cat([norms, more])
            loss = known if loss is None else loss
        total: torch.Tensor | None
        if below is not None:
            self._send(below, action, [where, norms, loss])
            total, loss = self._receive(below, action._replace(stage=placement.first_stage(below)))
        else:
            total = total_norm(where, norms)
        if above is not None:
            self._send(above, action, [total, loss])
        return total, loss

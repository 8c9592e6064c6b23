"""The end of an update on one worker: shared gradients are summed and the norm is taken, over all of its stages.

    REDUCE_GRAD   each stage hands the accumulators of what it shares to the workers that hold it too; behind the
                  worker's last one, each stage sums all of them in the order of use
    REDUCE_NORM   norms of single tensors travel down to worker 0, the total travels back up

Nothing is waited for before everything has been sent, so stages of one worker cannot wait for each other. Worker 0
finishes its backwards last, so everybody else's norms have arrived by the time it has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from raypipe.engine.gradients import Accumulators, GradientSink
from raypipe.engine.norms import total_norm
from raypipe.engine.placement import Placement
from raypipe.engine.stage import StageProgram
from raypipe.engine.update import Update
from raypipe.ir.schedule import Action, Op

__all__ = ["Reduction"]

Tensors = Sequence[torch.Tensor | None]


class Reduction:
    """REDUCE_GRAD and REDUCE_NORM of one worker.

    Args:
        programs: of all stages.
        placement: who holds which stage.
        sinks, updates: of this worker's stages.
        send: (worker, action, tensors) hands a message to another worker.
        receive: (worker, the sender's action) waits for one.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        placement: Placement,
        sinks: Mapping[int, GradientSink],
        updates: Mapping[int, Update],
        send: Callable[[int, Action, Tensors], None],
        receive: Callable[[int, Action], tuple[torch.Tensor | None, ...]],
    ) -> None:
        self._programs, self._placement = programs, placement
        self._sinks, self._updates = sinks, updates
        self._send, self._receive = send, receive
        self._own = frozenset(sinks)
        self._done: set[int] = set()
        self._known: tuple[torch.Tensor, torch.Tensor] | None = None
        self._told: set[int] = set()

    def reduce_grad(self, stage: int, microbatch: int) -> None:
        """The stage has all gradients of its update; behind the last stage's, fill every ``parameter.grad``."""
        if not self._updates[stage].begin():
            return
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
                    tensors = self._receive(self._placement.home_of(peer), Action(peer, Op.REDUCE_GRAD, microbatch))
                    found[peer] = self._programs[peer].shared_sites(self._own, tensors)
        within = {
            stage: self._programs[stage].shared_sites(self._own, sink.exported(self._own))
            for stage, sink in self._sinks.items()
        }
        for stage, sink in self._sinks.items():
            sink.finish([*found.values(), *(sites for mate, sites in within.items() if mate != stage)])
            self._updates[stage].average()

    def norm(self, stage: int, microbatch: int, loss: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(gradient norm of the whole model, loss), the same on every stage; taken once for all stages of the worker.

        The total is the norm of the stacked norms in the order of the user's named_parameters(), which is
        what torch computes, so it does not depend on the partition.

        Args:
            loss: of the mini-batch, where this worker holds the last stage.
        """
        found = self._known = self._known or self._norm(microbatch, loss)
        self._told.add(stage)
        if self._told == self._own:
            self._told.clear()
            self._known = None
        return found

    def _norm(self, microbatch: int, loss: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        me, placement = self._placement.worker, self._placement
        parts = [self._updates[stage].own_norms() for stage in sorted(self._own)]
        where, norms = torch.cat([where for where, _ in parts]), torch.cat([norms for _, norms in parts])
        action = Action(placement.first_stage(me), Op.REDUCE_NORM, microbatch)
        if me + 1 < placement.num_workers:
            above, more, known = self._receive(
                me + 1, Action(placement.first_stage(me + 1), Op.REDUCE_NORM, microbatch)
            )
            assert above is not None
            assert more is not None
            where, norms = torch.cat([where, above]), torch.cat([norms, more])
            loss = known if loss is None else loss
        total: torch.Tensor | None
        if me:
            self._send(me - 1, action, [where, norms, loss])
            total, loss = self._receive(me - 1, Action(placement.first_stage(me - 1), Op.REDUCE_NORM, microbatch))
        else:
            total = total_norm(where, norms)
        if me + 1 < placement.num_workers:
            self._send(me + 1, action, [total, loss])
        assert total is not None
        assert loss is not None
        return total, loss

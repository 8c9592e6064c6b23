"""What a stage actor inherits to come to the same step as the others, and to be ready to become one of them.

driver   --reached()--------> how many steps it has made, and whether it has the gradients of another one
         --come_to(step)----> makes that one, or forgets what it has begun of it; see engine/reached.py
         --rehearse()-------> imports what the first optimizer of a process needs
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence

import torch

from raypipe.engine.reached import Reached, Scalar
from raypipe.engine.stage import StageProgram
from raypipe.ir.report import StepReport
from raypipe.runtime.workers.copying_actor import CopyingActor

__all__ = ["JoiningActor"]


class JoiningActor(CopyingActor):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._programs: Sequence[StageProgram] = ()  # of all stages of the plan
        self._come = Reached()  # before the executor was made

    def reached(self, term: int) -> Reached:
        """How far it has come, once its work has ended."""
        self._fence.check(term)
        if self._executor is not None and self._generation < 0:  # it was being given another state
            return Reached(flows=True)
        here = Reached() if self._executor is None else self._executor.reached
        return self._come if here.made is None else here

    def come_to(self, term: int, step: int, totals: tuple[Scalar, Scalar] | None) -> list[list[StepReport]] | None:
        """Have made so many steps, as all others, and nothing of the next one.

        Args:
            totals: gradient norm and loss of the last one, where it was made by another worker.

        Returns:
            By stage, the report of the last one, where it was made here and now.
        """
        self._fence.check(term)
        found, executor = None, self._executor
        if executor is not None:
            made = executor.reached.made
            if made is not None and made < step:
                assert totals is not None, "a step that another one has made has totals"
                found = executor.finish(*totals)
            executor.undo()
            self._come = self.reached(term)
        return found

    def rehearse(self) -> None:
        """Make an optimizer and step it, so that a spare need not import for seconds when it becomes a worker."""
        run = self._setup
        assert run is not None, "join() comes first"
        stand_in = torch.nn.Parameter(torch.zeros(1))
        stand_in.grad = torch.zeros(1)
        with contextlib.suppress(Exception):  # one that cannot be made for such a parameter has imported by then
            run.make_optimizer([("spare", stand_in)]).step()
        # What was imported lives as long as the process; the first look at all of it takes a while.
        gc.collect()
        gc.freeze()

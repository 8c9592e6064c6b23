"""Who holds which stage, as one worker sees it, and whom it therefore exchanges messages with.

homes (0) (1) (1) (0)      worker 0 holds stages 0 and 3, worker 1 holds 1 and 2, which are co-located
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.engine.stage import StageProgram
from raypipe.ir.schedule import Homes

__all__ = ["Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of a pipeline, from the side of one of them.

    Attributes:
        homes: workers that hold each stage, by stage: ``Wiring.homes``.
        worker: this one.
    """

    homes: Homes
    worker: int

    @property
    def num_workers(self) -> int:
        return 1 + max(worker for workers in self.homes for worker in workers)

    @property
    def stages(self) -> tuple[int, ...]:
        """Of this worker."""
        return self.stages_of(self.worker)

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """In their order."""
        return tuple(stage for stage, workers in enumerate(self.homes) if worker in workers)

    def first_stage(self, worker: int) -> int:
        """By which messages of the worker as a whole are known."""
        return self.stages_of(worker)[0]

    def home_of(self, stage: int) -> int:
        """The worker that messages to a stage go to."""
        (worker,) = self.homes[stage]
        return worker

    def beside(self, stage: int) -> tuple[int, ...]:
        """Stages before and behind it."""
        return tuple(s for s in (stage - 1, stage + 1) if 0 <= s < len(self.homes))

    def co_located(self, stage: int) -> frozenset[int]:
        """Those of ``beside`` that the same worker holds."""
        return frozenset(s for s in self.beside(stage) if self.home_of(s) == self.home_of(stage))

    def sharing(self, programs: Sequence[StageProgram], stage: int) -> dict[int, frozenset[int]]:
        """By other worker, its stages that hold a parameter of this one."""
        home = self.home_of(stage)
        holders = {h for stages in programs[stage].shared_with.values() for h in stages}
        workers = sorted({self.home_of(h) for h in holders} - {home})
        return {worker: frozenset(holders & set(self.stages_of(worker))) for worker in workers}

    def neighbours(self, programs: Sequence[StageProgram]) -> set[int]:
        """Workers that this one exchanges messages with.

        Those with a stage beside one of its own or a parameter in common, and those before and behind it, for norms.
        """
        found = {w for w in (self.worker - 1, self.worker + 1) if 0 <= w < self.num_workers}
        for stage in self.stages:
            found |= {self.home_of(s) for s in self.beside(stage)} | self.sharing(programs, stage).keys()
        return found - {self.worker}

    def message_capacity(self, programs: Sequence[StageProgram], peer: int) -> int:
        """The most tensors that a message between this worker and another can hold (the header has room for so many).

        Args:
            peer: the other worker; it finds the same number.
        """
        most = 3  # REDUCE_NORM: positions, norms, loss
        for mine, other in ((self.worker, peer), (peer, self.worker)):
            theirs = self.stages_of(other)
            for stage in self.stages_of(mine):
                if stage + 1 in theirs:
                    most = max(most, *(mode.num_outputs for mode in programs[stage].modes.values()))
                shared = set(programs[stage].shared_names(theirs))
                most = max(most, sum(1 for site in programs[stage].train.sites if site.parameter in shared))
        return most

    def name_of(self, worker: int) -> str:
        """For people: ``stage 1``, or ``stages 0 and 3``."""
        stages = self.stages_of(worker)
        if len(stages) == 1:
            return f"stage {stages[0]}"
        return f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"

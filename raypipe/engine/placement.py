"""Who holds which stage, as one worker sees it, and whom it therefore exchanges messages with.

homes (0) (1) (1) (0)      worker 0 holds stages 0 and 3, worker 1 holds 1 and 2, which are co-located
homes (0 1) (2)            workers 0 and 1 are replicas of stage 0; the first of a stage's workers leads
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        lanes: into which micro-batches are dealt out: ``Wiring.lanes``.
    """

    homes: Homes
    worker: int
    lanes: int = 1

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

    def home_of(self, stage: int, lane: int = 0) -> int:
        """The worker that messages to a stage go to, about a micro-batch of this lane; that of lane 0 leads."""
        workers = self.homes[stage]
        return workers[lane % len(workers)]

    @property
    def replica(self) -> int:
        """Which of the replicas of its stages this worker is."""
        return self.homes[self.stages[0]].index(self.worker)

    @property
    def leads(self) -> bool:
        """Whether this worker saves, evaluates and speaks for its stages: the first of their replicas."""
        return self.replica == 0

    @property
    def replicas(self) -> tuple[int, ...]:
        """All workers that hold this one's stages, itself included."""
        return self.homes[self.stages[0]]

    def lanes_of(self, worker: int) -> tuple[int, ...]:
        """Lanes whose micro-batches a worker has."""
        workers = self.homes[self.first_stage(worker)]
        return tuple(range(workers.index(worker), self.lanes, len(workers)))

    @property
    def leaders(self) -> tuple[int, ...]:
        """Workers that lead, in their order."""
        return tuple(sorted({workers[0] for workers in self.homes}))

    def beside(self, stage: int) -> tuple[int, ...]:
        """Stages before and behind it."""
        return tuple(s for s in (stage - 1, stage + 1) if 0 <= s < len(self.homes))

    def co_located(self, stage: int) -> frozenset[int]:
        """Those of ``beside`` that the same worker holds."""
        return frozenset(s for s in self.beside(stage) if self.home_of(s) == self.home_of(stage))

    def sharing(self, programs: Sequence[StageProgram], stage: int) -> dict[int, frozenset[int]]:
        """By other worker that leads, its stages that hold a parameter of this one."""
        home = self.home_of(stage)
        holders = {h for stages in programs[stage].shared_with.values() for h in stages}
        workers = sorted({self.home_of(h) for h in holders} - {home})
        return {worker: frozenset(holders & set(self.stages_of(worker))) for worker in workers}

    def neighbours(self, programs: Sequence[StageProgram]) -> set[int]:
        """Workers that this one exchanges messages with.

        Those with a stage beside one of its own and a lane in common, or a parameter in common, its fellow replicas,
        and of workers that lead those that lead before and behind it, for norms.
        """
        found = set(self.replicas)
        if self.leads:
            at, leaders = self.leaders.index(self.worker), self.leaders
            found |= set(leaders[max(0, at - 1) : at + 2])
        for stage in self.stages:
            lanes = self.lanes_of(self.worker)
            found |= {self.home_of(s, lane) for s in self.beside(stage) for lane in lanes}
            if self.leads:
                found |= {self.home_of(s) for s in self.beside(stage)} | self.sharing(programs, stage).keys()
        return found - {self.worker}

    def message_capacity(self, programs: Sequence[StageProgram], peer: int) -> int:
        """The most tensors that a message between this worker and another can hold (the header has room for so many).

        Args:
            peer: the other worker; it finds the same number.
        """
        most = 3  # REDUCE_NORM: positions, norms, loss
        if peer in self.replicas:
            own = self.stages
            others = [program for program in programs if program.index not in own]
            return max(most, 1 + self.lanes, 2 + len(own), *(_shared_sites(other, own) for other in others))
        for mine, other in ((self.worker, peer), (peer, self.worker)):
            theirs = self.stages_of(other)
            for stage in self.stages_of(mine):
                if stage + 1 in theirs:
                    most = max(most, *(mode.num_outputs for mode in programs[stage].modes.values()))
                most = max(most, _shared_sites(programs[stage], theirs))
        return most

    def name_of(self, worker: int) -> str:
        """For people: ``stage 1``, ``stages 0 and 3``, or ``replica 1 of stage 0``."""
        stages = self.stages_of(worker)
        if len(stages) == 1:
            name = f"stage {stages[0]}"
        else:
            name = f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"
        workers = self.homes[stages[0]]
        return name if len(workers) == 1 else f"replica {workers.index(worker)} of {name}"


def _shared_sites(program: StageProgram, stages: Collection[int]) -> int:
    """Uses on this stage of parameters that it shares with any of these."""
    shared = set(program.shared_names(stages))
    return sum(1 for site in program.train.sites if site.parameter in shared)

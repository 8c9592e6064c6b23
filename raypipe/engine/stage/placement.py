"""Assignment of stages to workers, seen from one worker; its neighbours, and the channels to them.

homes (0) (1) (1) (0)      worker 0 holds stages 0 and 3, worker 1 holds 1 and 2, which are co-located
homes (0 1) (2)            workers 0 and 1 are replicas of stage 0; the first of a stage's workers leads

Gradients are summed in lanes (partial sums), to which micro-batches are assigned round-robin. A replica computes the
micro-batches of its lanes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from raypipe.engine.messages.channel import Channel, InMemoryChannel
from raypipe.engine.stage.stage import StageProgram
from raypipe.ir.schedule import Homes


@dataclass(frozen=True, slots=True)
class Placement:
    """Assignment of stages to workers, seen from one worker.

    Attributes:
        homes: for each stage, the workers that hold it, as in ``Wiring.homes``; several workers are replicas.
        worker: index of this worker.
        lanes: number of lanes, as in ``Wiring.lanes``.
    """

    homes: Homes
    worker: int
    lanes: int = 1

    @property
    def num_workers(self) -> int:
        return 1 + max(worker for workers in self.homes for worker in workers)

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages of this worker, in increasing order."""
        return self.stages_of(self.worker)

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """List the stages of a worker, in increasing order."""
        return tuple(stage for stage, workers in enumerate(self.homes) if worker in workers)

    def first_stage(self, worker: int) -> int:
        """Return the lowest stage of a worker, which names the messages for all stages of the worker."""
        return self.stages_of(worker)[0]

    def home_of(self, stage: int, lane: int = 0) -> int:
        """Return the worker that computes a stage's micro-batches of one lane. For lane 0 it is the first replica."""
        workers = self.homes[stage]
        return workers[lane % len(workers)]

    @property
    def replica(self) -> int:
        """Index of this worker among the replicas of its stages."""
        return self.homes[self.stages[0]].index(self.worker)

    @property
    def leads(self) -> bool:
        """True if this worker is the first replica of its stages, which evaluates and saves what all replicas share."""
        return self.replica == 0

    @property
    def replicas(self) -> tuple[int, ...]:
        """Workers that hold the stages of this worker, including itself."""
        return self.homes[self.stages[0]]

    def lanes_of(self, worker: int) -> tuple[int, ...]:
        """List the lanes whose micro-batches a worker computes."""
        workers = self.homes[self.first_stage(worker)]
        return tuple(range(workers.index(worker), self.lanes, len(workers)))

    @property
    def leaders(self) -> tuple[int, ...]:
        """Workers that are the first replica of their stages, in increasing order."""
        return tuple(sorted({workers[0] for workers in self.homes}))

    def neighbour_stages(self, stage: int) -> tuple[int, ...]:
        """List the previous and the next stage, if they exist."""
        return tuple(s for s in (stage - 1, stage + 1) if 0 <= s < len(self.homes))

    def co_located(self, stage: int) -> frozenset[int]:
        """Return the neighbour stages of ``stage`` that are on the same worker as ``stage``."""
        return frozenset(s for s in self.neighbour_stages(stage) if self.home_of(s) == self.home_of(stage))

    def sharing_workers(self, programs: Sequence[StageProgram], stage: int) -> dict[int, frozenset[int]]:
        """Return {worker: its stages that hold a parameter of ``stage``} for all other workers that have such stages.

        Only leaders (first replicas) are included.
        """
        home = self.home_of(stage)
        holders = {h for stages in programs[stage].shared_with.values() for h in stages}
        workers = sorted({self.home_of(h) for h in holders} - {home})
        return {worker: frozenset(holders & set(self.stages_of(worker))) for worker in workers}

    def neighbours(self, programs: Sequence[StageProgram]) -> set[int]:
        """Return the workers with which this worker exchanges messages.

        These are the replicas of its stages, and the workers of neighbour stages with which it has a lane in common. A
        leader (first replica) also exchanges messages with the leaders of neighbour stages, with leaders that hold a
        shared parameter, and, for norms, with the previous and the next leader.
        """
        peers = set(self.replicas)
        if self.leads:
            at, leaders = self.leaders.index(self.worker), self.leaders
            peers |= set(leaders[max(0, at - 1) : at + 2])
        for stage in self.stages:
            lanes = self.lanes_of(self.worker)
            peers |= {self.home_of(s, lane) for s in self.neighbour_stages(stage) for lane in lanes}
            if self.leads:
                peers |= {self.home_of(s) for s in self.neighbour_stages(stage)} | self.sharing_workers(
                    programs, stage
                ).keys()
        return peers - {self.worker}

    def message_capacity(self, programs: Sequence[StageProgram], peer: int) -> int:
        """Return the maximum number of tensors in a message between this worker and ``peer``, to size its header."""
        most = 3  # REDUCE_NORM: positions, norms, loss
        if peer in self.replicas:
            own = self.stages
            others = [program for program in programs if program.index not in own]
            most = max(most, 1 + self.lanes, 2 + len(own), *(_shared_sites(other, own) for other in others))
            # A loss over the whole mini-batch reads all outputs of the last stage.
            return max(most, programs[-1].train.num_outputs if len(programs) - 1 in own else 0)
        for mine, other in ((self.worker, peer), (peer, self.worker)):
            theirs = self.stages_of(other)
            for stage in self.stages_of(mine):
                if stage + 1 in theirs:
                    most = max(most, *(mode.num_outputs for mode in programs[stage].modes.values()))
                most = max(most, _shared_sites(programs[stage], theirs))
        return most

    def name_of(self, worker: int) -> str:
        """Name a worker by its stages: ``stage 1``, ``stages 0 and 3``, or ``replica 1 of stage 0``."""
        stages = self.stages_of(worker)
        if len(stages) == 1:
            name = f"stage {stages[0]}"
        else:
            name = f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"
        workers = self.homes[stages[0]]
        return name if len(workers) == 1 else f"replica {workers.index(worker)} of {name}"


def _shared_sites(program: StageProgram, stages: Collection[int]) -> int:
    """Count the uses, in the stage of ``program``, of parameters that one of ``stages`` holds too."""
    shared = set(program.shared_names(stages))
    return sum(1 for site in program.train.sites if site.parameter in shared)


def channels_by_stage(
    programs: Sequence[StageProgram], placement: Placement, channels: Mapping[int, Channel]
) -> dict[int, dict[int, Sequence[Channel]]]:
    """Return the channels of this worker's stages: {stage: {previous or next stage: one channel per lane}}.

    Neighbour stages on the same worker are joined by in-memory channels, which copy tensors. So a stage that changes
    its input in place leaves the previous stage's output unchanged, and strides are kept.
    """
    lanes = range(placement.lanes)
    own = placement.lanes_of(placement.worker)
    by_stage: dict[int, dict[int, Sequence[Channel]]] = {}
    for stage in placement.stages:
        by_stage[stage] = {}
        for s in placement.neighbour_stages(stage):
            if s not in placement.co_located(stage):
                # Other workers' lanes have no messages here, but evaluations map every micro-batch to lane 0.
                homes = [placement.home_of(s, lane if lane in own else own[0]) for lane in lanes]
                by_stage[stage][s] = [channels[home] for home in homes]
    for stage in placement.stages:
        if stage + 1 in placement.co_located(stage):
            capacity = max(mode.num_outputs for mode in programs[stage].modes.values())
            ahead, back = InMemoryChannel.pair(f"stage {stage} <-> stage {stage + 1}", 0, capacity)
            by_stage[stage][stage + 1], by_stage[stage + 1][stage] = [ahead] * len(lanes), [back] * len(lanes)
    return by_stage


def channels_between(placements: Sequence[Placement], programs: Sequence[StageProgram]) -> list[dict[int, Channel]]:
    """Create in-memory channels between all pairs of neighbours.

    Returns:
        One dictionary per worker: its channel to each of its neighbours, by the neighbour's index.
    """
    by_worker: list[dict[int, Channel]] = [{} for _ in placements]
    for one, placement in enumerate(placements):
        for other in sorted(placement.neighbours(programs)):
            if one < other:
                name = f"{placement.name_of(one)} <-> {placement.name_of(other)}"
                ends = InMemoryChannel.pair(name, 0, placement.message_capacity(programs, other))
                by_worker[one][other], by_worker[other][one] = ends
    return by_worker

"""What the user asked for, and the parts of it that are settled without looking at the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from raypipe.errors import PlanError
from raypipe.ir.codec_cost import NO_CODEC, CodecCost
from raypipe.ir.schedule_spec import KINDS, ScheduleKind, ScheduleSpec, takes

__all__ = ["AUTO_SLACK", "DEFAULT_STAGES", "DEFAULT_WORKERS", "PER_WORKER", "Request", "microbatches"]

DEFAULT_MINIBATCH = 32
DEFAULT_STAGES = 2
DEFAULT_WORKERS = 2
PER_WORKER = 2
"""Stages on each worker where a schedule puts several there and nobody says how many."""
AUTO_SLACK = 2
"""Slack on every hop where nobody says: with free links it takes as long as 1F1B, and it hides a transfer of up to half
a micro-batch's compute time, which 1F1B pays in full. Its price is one micro-batch more in flight per hop."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the planner has to know of the configuration; None is left to it.

    Attributes:
        num_stages: how many, None takes as many of num_workers as are worth it.
        num_workers: places for stages that the user offered, None if nothing was said.
        split_points: module names that begin a stage.
        minibatch_size, num_microbatches: samples per step, and in how many parts.
        num_samples: of the training data.
        schedule: "auto" or one of ir.schedule_spec.KINDS.
        group_size: k of kFkB.
        slack: r of slack, by hop or one for all.
        partitioner: "auto", "parameters", "prefix_sum", "antichain" or "hierarchical"; split_points win over it.
        memory_limit_bytes: per worker, on top of what its device offers; None for none.
        optimizer_factor: bytes of optimizer state per byte of trainable parameters.
        leaf_factor: bytes of the copies of the parameters that forwards use, per byte of parameters; 0 for none.
        state_copies: of each stage's state and, as large, of another one's that every worker keeps in memory.
        reserve_bytes: kept free on every worker.
        least_microbatch: samples that the model needs at once; see ``takes``.
        weight_versions, update_interval, vertical_sync: of asynchronous schedules.
        per_replica: stages update every R_s micro-batches, as in PipeDream.
        clips: gradients are clipped by their norm.
        skips: no stage takes a step that is not finite, and the run goes on.
        recompute: stages whose backward runs the forward again: all, none, or by stage; None leaves it to memory, of
            all stages or of one.
        ties: stages share a parameter and exchange its gradients; known once the model is cut.
        replicas: workers of every stage, one number for all or one for each; None leaves them to the planner.
        lanes: into which gradients are summed; None for the fewest that give every replica of a stage as many.
        replicated_buffers: stages that change buffers may have replicas, each with its own.
        sums_factor: bytes of gradients that replicas exchange, over those of the gradients.
        shards: replicas share out the state of the optimizer, and exchange parameters behind their steps.
        changing: positions of the nodes that change buffers in training; their stages have one worker. Known where
            replicas are left to the planner.
        codecs: of messages forwards and backwards; cuts and steps count them.
    """

    num_stages: int | None
    num_workers: int | None
    split_points: tuple[str, ...]
    minibatch_size: int | None
    num_microbatches: int | None
    num_samples: int
    schedule: str = "auto"
    group_size: int | None = None
    slack: int | tuple[int, ...] | None = None
    partitioner: str = "auto"
    memory_limit_bytes: int | None = None
    optimizer_factor: float = 2.0
    leaf_factor: float = 0.0
    state_copies: int = 0
    reserve_bytes: int = 0
    least_microbatch: int = 1
    weight_versions: int | None = None
    update_interval: int | None = None
    per_replica: bool = False
    vertical_sync: bool = False
    clips: bool = False
    skips: bool = False
    recompute: bool | tuple[bool | None, ...] | None = False
    ties: bool = False
    replicas: int | tuple[int, ...] | None = 1
    lanes: int | None = None
    replicated_buffers: bool = False
    sums_factor: float = 1.0
    shards: bool = False
    changing: tuple[int, ...] = ()
    codecs: tuple[CodecCost, CodecCost] = (NO_CODEC, NO_CODEC)

    @property
    def kind(self) -> ScheduleKind:
        """What is known of the schedule; "auto" is one of the synchronous kinds with a stage per worker."""
        return KINDS.get(self.schedule, ScheduleKind())

    @property
    def asked_stages(self) -> int | None:
        """Stages that were asked for, by number or by where they begin; None leaves it to the planner."""
        return len(self.split_points) + 1 if self.split_points else self.num_stages

    def with_schedule(self, spec: ScheduleSpec) -> Request:
        """The same request with the schedule that a run has, and its numbers."""
        slack = spec.slack if takes(spec.kind, "slack") else None
        group_size = spec.group_size if takes(spec.kind, "group_size") else None
        return replace(self, schedule=spec.kind, slack=slack, group_size=group_size)

    def as_1f1b(self) -> Request:
        """The same request with 1F1B, which holds the fewest micro-batches."""
        return replace(self, schedule="1f1b", slack=None, group_size=None)

    def takes(self, minibatch: int, samples: int) -> bool:
        """Whether the model takes every micro-batch of an epoch whose mini-batches are cut after so many samples each.

        What is left of a mini-batch, and of the epoch's last one, is a smaller micro-batch. A mini-batch that is itself
        too small counts for none of this: no number of micro-batches makes it larger.
        """
        wholes = filter(None, (minibatch, self.num_samples % minibatch))
        return all((whole % samples or samples) >= min(self.least_microbatch, whole) for whole in wholes)

    def smallest_microbatch(self, minibatch: int) -> int:
        """Samples of the smallest micro-batches that the model takes; at most the whole mini-batch."""
        return next(size for size in range(1, minibatch + 1) if self.takes(minibatch, size))

    @property
    def overlaps(self) -> bool:
        """Whether a stage may end its step before the others have theirs: nobody waits for a norm or a gradient."""
        return not (self.clips or self.skips or self.ties)

    @property
    def recomputes(self) -> bool | tuple[bool, ...]:
        """``recompute`` as it stands, without what is still to be decided."""
        if not isinstance(self.recompute, tuple):
            return bool(self.recompute)
        found = tuple(map(bool, self.recompute))
        return found if len(set(found)) > 1 else found[0]

    def recomputed(self, num_stages: int, first_trainable: int = 0) -> tuple[bool, ...]:
        """``recomputes`` by stage; there is nothing to run again below the first stage that trains."""
        found = self.recomputes
        by_stage = found if isinstance(found, tuple) else (found,) * num_stages
        return tuple(again and stage >= first_trainable for stage, again in enumerate(by_stage))

    @property
    def replicated(self) -> bool:
        """Whether any stage has several workers, as far as that is settled."""
        return max(self.replicas if isinstance(self.replicas, tuple) else (self.replicas or 1,)) > 1

    @property
    def in_lanes(self) -> bool:
        """Whether there are replicas, or lanes in which they may come."""
        return self.replicated or (self.lanes or 1) > 1

    def replicas_of(self, num_stages: int) -> tuple[int, ...]:
        """Workers of every stage; one each where that is not settled.

        Raises:
            PlanError: they were given for another number of stages.
        """
        found = self.replicas if isinstance(self.replicas, tuple) else (self.replicas or 1,) * num_stages
        if len(found) != num_stages:
            raise PlanError(
                f"num_replicas={found} speaks of {len(found)} stages, but the plan has {num_stages}: give one number "
                f"per stage, or num_stages={len(found)}."
            )
        return found

    def num_lanes(self, num_stages: int) -> int:
        """Lanes into which gradients are summed."""
        return self.lanes or math.lcm(*self.replicas_of(num_stages))

    def workers(self, num_stages: int) -> int:
        """Workers that hold so many stages: as many, or fewer where the schedule puts several on each.

        Replicas of these are not counted.
        """
        if not self.kind.several_stages:
            return num_stages
        if self.num_workers is None:
            return max(1, num_stages // PER_WORKER)
        return max(1, self.num_workers // self.replicas_of(num_stages)[0])

    def workers_in_all(self, num_stages: int) -> int:
        """The same with all replicas of them."""
        counts = self.replicas_of(num_stages)
        return counts[0] * self.workers(num_stages) if self.kind.several_stages else sum(counts)


def microbatches(request: Request, num_stages: int) -> tuple[int, int, int]:
    """(minibatch_size, microbatch_size, num_microbatches); 4 micro-batches per stage where nothing is said.

    With replicas 4 per worker, and as many for each of them where about so many can be.
    """
    minibatch = request.minibatch_size or min(DEFAULT_MINIBATCH, request.num_samples)
    workers = sum(request.replicas_of(num_stages)) if request.replicated else num_stages
    wanted = request.num_microbatches or min(minibatch, 4 * workers)
    if request.num_microbatches is None and request.in_lanes:
        lanes = request.num_lanes(num_stages)
        least = wanted // 2 if request.kind.synchronous else 0  # asynchronous replicas need equal shares
        even = [n for n in range(wanted // lanes * lanes, least, -lanes) if _parted(minibatch, n) == n]
        taken = (n for n in even if request.takes(minibatch, math.ceil(minibatch / n)))
        wanted = next(taken, next(iter(even), wanted))
    size = math.ceil(minibatch / wanted)
    if request.num_microbatches is None and not request.in_lanes:
        size = next(larger for larger in range(size, minibatch + 1) if request.takes(minibatch, larger))
    return minibatch, size, math.ceil(minibatch / size)


def _parted(minibatch: int, wanted: int) -> int:
    """Micro-batches that so many become, all but the last of one size."""
    return math.ceil(minibatch / math.ceil(minibatch / wanted))

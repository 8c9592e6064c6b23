"""Planning request: the user's settings, and the values that follow from them without a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from raypipe.errors import PlanError
from raypipe.ir.communication import NO_CODEC, CodecCost
from raypipe.ir.schedule_spec import KINDS, ScheduleKind, ScheduleSpec, takes
from raypipe.planner.cost.tolerance import MIN_GAIN

DEFAULT_MINIBATCH = 32
DEFAULT_STAGES = 2
DEFAULT_WORKERS = 2
PER_WORKER = 2
"""Default number of stages per worker, for schedules that put several there."""
AUTO_SLACK = 2
"""Default slack of every hop. It hides a transfer of up to half a micro-batch's compute time, for which 1F1B would
wait; without transfer times a step takes as long as with 1F1B. It costs one more micro-batch in flight per hop.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """Settings of the configuration that the planner reads; None leaves a choice to the planner.

    Attributes:
        num_stages: number of stages; None takes the number with the shortest step, at most num_workers.
        num_workers: workers that the user offered; None if not set.
        split_points: module names that begin a stage.
        minibatch_size, num_microbatches: samples per step, and number of micro-batches that they are divided into.
        num_samples: samples of the training data.
        schedule: "auto" or one of ir.schedule_spec.KINDS.
        group_size: k of kFkB.
        slack: r of the "slack" schedule, one number per hop or one for all.
        lag: most micro-batches by which zb-h1 defers weight gradients, by stage; empty for no bound. Set by the search.
        partitioner: "auto", "parameters", "prefix_sum" or "antichain"; ignored if split_points are given.
        memory_limit_bytes: limit per worker, in addition to that of its device; None for no limit.
        optimizer_factor: bytes of optimizer state per byte of trainable parameters.
        leaf_factor: bytes of the parameter copies that forwards use, per byte of parameters; 0 without copies.
        state_copies: number of state copies in each worker's memory. A worker may keep a copy of its own stage and one
            of another stage; both are counted with the size of its own.
        reserve_bytes: bytes kept free on every worker.
        least_microbatch: fewest samples that the model accepts in a micro-batch; see ``takes``.
        weight_versions, update_interval, vertical_sync: settings of asynchronous schedules.
        per_replica: True if a stage with R replicas updates every R micro-batches, as in PipeDream.
        stale_correction, discount_updates: correction for stale gradients, in asynchronous schedules.
        clips: True if gradients are clipped by their norm.
        skips: True if a step with non-finite gradients is skipped on all stages.
        recompute: stages that recompute activations: True, False, or one value per stage. None, for all stages or for
            one of them, leaves it to the planner.
        ties: True if stages share a parameter and exchange its gradients; set only after the model was cut.
        replicas: workers of every stage, one number for all or one for each; None leaves them to the planner.
        lanes: number of partial sums of gradients; None for the least common multiple of the numbers of replicas.
        replicated_buffers: True if stages that change buffers may have replicas, each with its own buffers.
        sums_factor: bytes that replicas send for each byte of gradients.
        shards: True if replicas shard the optimizer state, and exchange parameters after their steps.
        changing: positions of nodes whose stage must have one worker, because they change buffers in training. Empty
            unless replicas are left to the planner.
        codecs: codecs of messages forwards and backwards; predicted steps include their cost.
        codec_choices: further codecs that the user permits forwards and backwards. A plan for a described cluster takes
            one only if the step becomes shorter by ``min_gain``.
        min_gain: relative gain in step time that is worth a permitted codec.
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
    lag: tuple[int, ...] = ()
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
    stale_correction: str = "none"
    discount_updates: int = 0
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
    codec_choices: tuple[tuple[CodecCost, ...], tuple[CodecCost, ...]] = ((), ())
    min_gain: float = MIN_GAIN

    @property
    def kind(self) -> ScheduleKind:
        """Properties of the schedule; "auto" has those of a synchronous schedule with one stage per worker."""
        return KINDS.get(self.schedule, ScheduleKind())

    @property
    def requested_stages(self) -> int | None:
        """Number of stages that the user set, by number or split points; None leaves it to the planner."""
        return len(self.split_points) + 1 if self.split_points else self.num_stages

    def with_schedule(self, spec: ScheduleSpec) -> Request:
        """Return the request with the kind of schedule, the slack, the lag and the group size of ``spec``."""
        slack = spec.slack if takes(spec.kind, "slack") else None
        group_size = spec.group_size if takes(spec.kind, "group_size") else None
        return replace(self, schedule=spec.kind, slack=slack, lag=spec.lag, group_size=group_size)

    def as_1f1b(self) -> Request:
        """Return the request with the 1F1B schedule, which holds the fewest micro-batches."""
        return replace(self, schedule="1f1b", slack=None, lag=(), group_size=None)

    def thriftiest(self, num_stages: int) -> Request:
        """Return the request with the permitted schedule that holds the fewest micro-batches.

        This is 1F1B if the schedule is open; weight gradients are not deferred.
        """
        if self.schedule == "auto":
            return self.as_1f1b()
        return replace(self, lag=(0,) * num_stages) if takes(self.schedule, "lag") and num_stages > 1 else self

    def takes(self, minibatch: int, samples: int) -> bool:
        """Return True if the model accepts every micro-batch of an epoch, with ``samples`` samples in each.

        The last micro-batch of a mini-batch may be smaller, and so may the last mini-batch of an epoch. A mini-batch
        that is itself too small is accepted: no number of micro-batches makes it larger.
        """
        wholes = filter(None, (minibatch, self.num_samples % minibatch))
        return all((whole % samples or samples) >= min(self.least_microbatch, whole) for whole in wholes)

    def smallest_microbatch(self, minibatch: int) -> int:
        """Find the smallest micro-batch size that the model accepts; at most the whole mini-batch."""
        return next(size for size in range(1, minibatch + 1) if self.takes(minibatch, size))

    @property
    def overlaps(self) -> bool:
        """True if a stage may end its step before the others, because it needs no gradient or norm of theirs."""
        return not (self.clips or self.skips or self.ties)

    @property
    def recomputes(self) -> bool | tuple[bool, ...]:
        """Value of ``recompute`` with False for every stage that is still open."""
        if not isinstance(self.recompute, tuple):
            return bool(self.recompute)
        by_stage = tuple(map(bool, self.recompute))
        return by_stage if len(set(by_stage)) > 1 else by_stage[0]

    def recomputed(self, num_stages: int, first_trainable: int = 0) -> tuple[bool, ...]:
        """Expand ``recomputes`` to one value per stage.

        Stages below ``first_trainable`` have no backward, so they do not recompute.
        """
        settled = self.recomputes
        by_stage = settled if isinstance(settled, tuple) else (settled,) * num_stages
        return tuple(again and stage >= first_trainable for stage, again in enumerate(by_stage))

    @property
    def replicated(self) -> bool:
        """True if any stage has several workers; False while the number of workers is open."""
        return max(self.replicas if isinstance(self.replicas, tuple) else (self.replicas or 1,)) > 1

    @property
    def in_lanes(self) -> bool:
        """True if gradients are summed in lanes (partial sums): with replicas, or if several lanes are requested."""
        return self.replicated or (self.lanes or 1) > 1

    def replicas_of(self, num_stages: int) -> tuple[int, ...]:
        """Return the number of workers of every stage; 1 for each while the number is open.

        Raises:
            PlanError: replicas were given for another number of stages.
        """
        counts = self.replicas if isinstance(self.replicas, tuple) else (self.replicas or 1,) * num_stages
        if len(counts) != num_stages:
            raise PlanError(
                f"num_replicas={counts} speaks of {len(counts)} stages, but the plan has {num_stages}: give one number "
                f"per stage, or num_stages={len(counts)}."
            )
        return counts

    def num_lanes(self, num_stages: int) -> int:
        """Return the number of lanes (partial sums) in which the gradients of a step are accumulated."""
        return self.lanes or math.lcm(*self.replicas_of(num_stages))

    def workers(self, num_stages: int) -> int:
        """Count the workers that hold ``num_stages`` stages, without replicas.

        A schedule with several stages per worker needs fewer workers than stages.
        """
        if not self.kind.several_stages:
            return num_stages
        if self.num_workers is None:
            return max(1, num_stages // PER_WORKER)
        return max(1, self.num_workers // self.replicas_of(num_stages)[0])

    def workers_in_all(self, num_stages: int) -> int:
        """Count the workers that hold ``num_stages`` stages, including all replicas."""
        counts = self.replicas_of(num_stages)
        return counts[0] * self.workers(num_stages) if self.kind.several_stages else sum(counts)


def microbatches(request: Request, num_stages: int) -> tuple[int, int, int]:
    """Compute (minibatch_size, microbatch_size, num_microbatches) of a request, with defaults for open numbers.

    The default number of micro-batches is 4 per stage; with replicas it is 4 per worker, rounded so that each replica
    gets the same number if possible.
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
    """Count the micro-batches of a mini-batch if their size is ceil(minibatch / wanted); at most ``wanted``."""
    return math.ceil(minibatch / math.ceil(minibatch / wanted))

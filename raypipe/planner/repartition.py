"""Re-partition of a running job with the same number of stages, after a worker became slower or ran out of memory.

    every step --> Replanner.on_step: have stage times settled, and workers' speeds changed since the last partition?
                       | yes
                   RepartitionQuery --answer--> cut_anew, pays? --yes--> Offer --> (the run moves) --> Replanner.taken

    present plan, seconds of each stage at normal speed --calibrated--> profile in which they take these seconds
    that profile, present plan, seconds of each stage now --speeds_of--> speed of each worker
    that profile, speeds                                --cut_anew----> another cut, and what its steps gain

When stage times settle for the first time, the profile is scaled to them (``calibrated``). So a worker that was slow
from the beginning looks like a worker with slow layers. Afterwards a slower stage is attributed to its worker: its
layers are expected to be quicker elsewhere, and layers that move to the slow worker to become slower. If in truth the
layers have become slower, the new cut moves too few of them away, and the next measurement moves the rest. This is for
synchronous schedules with one stage on each worker; stages stay on their workers, in their order.

After out-of-memory (``lighter``) the worker that ran out gets a lower limit:

    its limit   nine tenths of the bytes that were planned, or that it held when it ran out, whichever is less
    the plan    the first that fits: permitted schedules, the one that holds least first, each cut within the limit
    else        if recompute="auto": the same schedules, with recomputation on the worker's stage

The limit applies to planned bytes. Held bytes also include the interpreter, libraries and memory that an allocator
caches, so that one failure may not be enough; the next one sets a lower limit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from raypipe.errors import PlanError, RaypipeError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.communication import StageSample
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, Plan
from raypipe.ir.profile import Profile
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.units import human_bytes
from raypipe.planner.controller.change_detection import StageEstimator
from raypipe.planner.elastic import Gain, pays, rest_steps
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import fitting_partition, memory_of
from raypipe.planner.partition.prefix_sum import prefix_sum
from raypipe.planner.search.predict import predicted, seconds_of
from raypipe.planner.search.problem import Decision, graph_at, limits_of, slower
from raypipe.planner.search.recompute import is_open
from raypipe.planner.search.request import Request
from raypipe.planner.search.solver_cuts import placed


def calibrated(profile: Profile, plan: Plan, busy_s: Sequence[float], speeds: Sequence[float]) -> Profile:
    """Rescale the profile to the plan's micro-batch size and to the measured seconds of the plan's stages.

    Args:
        busy_s: measured seconds of forward plus backward of one micro-batch, by stage.
        speeds: assumed speeds of the workers, by stage.
    """
    graph = graph_at(profile, plan.microbatch_size)
    nodes = list(graph.nodes)
    took = zip(plan.partition.stages, planned_seconds(profile, plan), busy_s, speeds, strict=True)
    for stage, planned_s, measured_s, speed in took:
        for at in plan.partition.nodes_of(stage):
            nodes[at] = slower(nodes[at], measured_s * speed / planned_s if planned_s > 0 else 1.0)
    scaled = replace(graph, nodes=tuple(nodes))
    total_s = math.fsum(node.busy_s for node in nodes)
    return replace(
        profile,
        graph=scaled,
        microbatch_size=plan.microbatch_size,
        seconds_by_size=((plan.microbatch_size, total_s),),
        small=None,
    )


def planned_seconds(profile: Profile, plan: Plan) -> tuple[float, ...]:
    """Sum the profiled seconds of forward and backward of one micro-batch by stage, for workers of speed 1."""
    graph = graph_at(profile, plan.microbatch_size)
    again = plan.recompute or (False,) * plan.partition.num_stages
    return tuple(
        math.fsum(
            node.busy_s + again[stage.index] * node.forward_s
            for node in (graph.nodes[at] for at in plan.partition.nodes_of(stage))
        )
        for stage in plan.partition.stages
    )


def speeds_of(planned_s: Sequence[float], busy_s: Sequence[float]) -> tuple[float, ...]:
    """Compute each worker's speed: planned over measured seconds of its stage; 1 if either is 0.

    Args:
        planned_s: seconds from ``planned_seconds``.
        busy_s: measured seconds of forward plus backward of one micro-batch, by stage.
    """
    return tuple(then / now if min(then, now) > 0 else 1.0 for then, now in zip(planned_s, busy_s, strict=True))


def moved(before: Sequence[float], after: Sequence[float]) -> float:
    """Compute how much the ratio of two workers' speeds has changed at most; 0 if all changed by the same factor."""
    ratios = [now / then for then, now in zip(before, after, strict=True)]
    return max(ratios) / min(ratios) - 1.0


def line_of(plan: Plan, cluster: Cluster | None, link: Link) -> Cluster:
    """Return a cluster of the plan's workers, in the order of its stages.

    Args:
        cluster: described cluster; None to assume workers of speed 1.
        link: link between workers, used if ``cluster`` is None.
    """
    if cluster is None:
        return Cluster(tuple(ComputeDevice(f"worker{s.index}") for s in plan.partition.stages), (link,))
    return Cluster(tuple(cluster.devices[s.devices[0]] for s in plan.partition.stages), cluster.links)


def in_force(request: Request, profile: Profile, plan: Plan, line: Cluster) -> Decision:
    """Return the present plan as a Decision (planned configuration) without a prediction, to compare other cuts with.

    Args:
        request: request with a chosen schedule, for the plan's stages and micro-batches.
        line: cluster with one device for each stage, in the order of the stages.
    """
    request = replace(request, recompute=plan.recompute or False)
    graph, limits = _graph_and_limits(request, profile, plan)
    return _decision(request, graph, limits, plan, line, placed(plan.partition, graph, line, limits))


def cut_anew(request: Request, profile: Profile, plan: Plan, line: Cluster) -> Decision:
    """Find the cut whose slowest stage is quickest on these workers, in their order.

    If the request leaves recomputation to the planner, the same stages recompute as in the plan. The arguments are
    those of ``in_force``.

    Raises:
        PlanError: no cut keeps the memory limits.
    """
    if is_open(request):
        request = replace(request, recompute=plan.recompute or False)
    graph, limits = _graph_and_limits(request, profile, plan)
    decision = _decision(request, graph, limits, plan, line, fitting_partition(prefix_sum, graph, line, limits))
    return replace(decision, prediction=predicted(decision, "as in the plan before"))


def _graph_and_limits(request: Request, profile: Profile, plan: Plan) -> tuple[ModelGraph, Limits]:
    stages, count, size = plan.partition.num_stages, plan.num_microbatches, plan.microbatch_size
    limits = limits_of(request, stages, count, size)
    return graph_at(profile, size), replace(limits, in_order=True)


def _decision(
    request: Request, graph: ModelGraph, limits: Limits, plan: Plan, line: Cluster, partition: Partition
) -> Decision:
    sizes = plan.minibatch_size, plan.microbatch_size, plan.num_microbatches
    return Decision(request, graph, line, limits, partition, *sizes)


LESS = 0.9
"""Fraction of the planned or held bytes that a worker may hold after it ran out of memory."""


def lighter(request: Request, profile: Profile, plan: Plan, line: Cluster, worker: int, held_bytes: int) -> Decision:
    """Plan again for the same workers, with a lower memory limit for the worker that ran out of memory.

    Args:
        request: request for the plan's stages and micro-batches.
        plan: plan with which the worker ran out of memory.
        line: cluster with one device for each stage, with the known memory limits.
        worker: number of that worker, equal to the number of its stage.
        held_bytes: bytes that the worker held when it ran out; 0 if unknown.

    Returns:
        the decision; its cluster has the new limit.

    Raises:
        PlanError: no plan holds less on that worker.
    """
    assert plan.spec is not None, "can_be_cut_again"
    now = in_force(request.with_schedule(plan.spec), profile, plan, line)
    need = memory_of(now.graph, now.partition, now.limits.memory)[worker].total_bytes
    limit = max(1, int(LESS * min(need, held_bytes or need)))
    devices = list(line.devices)
    devices[worker] = replace(devices[worker], memory_bytes=limit)
    line, why = Cluster(tuple(devices), line.links), ""
    for settled in [*_thriftiest_first(request, plan), *_again(request, plan, worker)]:
        try:
            decision = cut_anew(settled, profile, plan, line)
        except PlanError as error:
            why = str(error)
        else:
            reason = f"made again, as worker {worker} ran out of memory: it holds {human_bytes(limit)} at most now"
            return replace(decision, reasons=(("memory", reason),))
    raise PlanError(
        f"Worker {worker} was planned to hold {human_bytes(need)}, and no other cut or schedule that may be taken lets "
        f"it hold {human_bytes(limit)} at most. {why}"
    )


def _thriftiest_first(request: Request, plan: Plan) -> list[Request]:
    """List requests for the schedules to try, the one that holds the fewest micro-batches first.

    These are 1F1B, or the schedule that the user set but without deferred weight gradients; then the plan's schedule.
    """
    assert plan.spec is not None
    now = request.with_schedule(plan.spec)
    least = request if request.schedule == "auto" else now
    return list(dict.fromkeys([least.thriftiest(plan.partition.num_stages), now]))


def _again(request: Request, plan: Plan, worker: int) -> list[Request]:
    """List the requests of ``_thriftiest_first``, with recomputation on this worker's stage.

    The list is empty if the stage recomputes already, or the user has fixed its recomputation.
    """
    now = plan.recompute or (False,) * plan.partition.num_stages
    requested = request.recompute if isinstance(request.recompute, tuple) else (request.recompute,) * len(now)
    if now[worker] or requested[worker] is not None:
        return []
    more = (*now[:worker], True, *now[worker + 1 :])
    return [replace(settled, recompute=more) for settled in _thriftiest_first(request, plan)]


FIRST_PAUSE_S = 1.0
"""Assumed pause, in seconds, of the first move; about that of a resize."""
RECENT_STEPS = 8
LOOKED_SHARE = 0.25
"""Share of the drift threshold by which speeds must have changed since the last search before another one starts."""


class RepartitionQuery(NamedTuple):
    """Input of a search for a partition, made because workers' speeds differ from those of the current partition.

    Attributes:
        plan: plan that the stages run now.
        profile: profile that is calibrated to the stages' measured seconds, see ``calibrated``.
        line: workers in the order of the stages.
        speeds: present speeds of the workers.
        spec: current schedule.
        step_s: measured seconds of a step, including the optimizer and all waiting.
        steps_left: remaining steps of the run.
        pause_s: expected pause of a move, in seconds.
        why: reason for messages.
    """

    plan: Plan
    profile: Profile
    line: Cluster
    speeds: tuple[float, ...]
    spec: ScheduleSpec
    step_s: float
    steps_left: int
    pause_s: float
    why: str


class Offer(NamedTuple):
    """Partition that is worth a move.

    Attributes:
        decision: decision with the new cut.
        speeds: speeds of the workers that it was made for.
        generation: number of the plan that it was made for.
        gain: seconds of a step before and after the move, and the seconds that the move itself takes.
        why: reason of the move in words, for messages and events.
    """

    decision: Decision
    speeds: tuple[float, ...]
    generation: int
    gain: Gain
    why: str

    @property
    def numbers(self) -> dict[str, Any]:
        """Gain, speeds and cuts, as fields of the run's event about the move."""
        return {
            "predicted_gain": round(self.gain.share, 4),
            "speeds": [round(speed, 3) for speed in self.speeds],
            "cuts": list(self.decision.partition.cuts),
        }


def can_be_cut_again(plan: Plan) -> bool:
    """Return True if a plan has several stages, each on a worker of its own, and a synchronous schedule."""
    spec, stages = plan.spec, plan.partition.stages
    return len(stages) > 1 and spec is not None and spec.of_kind.turned and all(len(s.devices) == 1 for s in stages)


def answer(request: Request, query: RepartitionQuery, min_gain: float) -> Offer | None:
    """Find the best partition for the speeds of a query; None if a move to it would not pay.

    Args:
        request: request for the same stages and micro-batches.
        min_gain: least relative gain in step time that is worth a move.
    """
    plan, request = query.plan, request.with_schedule(query.spec)
    devices = (replace(device, speed=speed) for device, speed in zip(query.line.devices, query.speeds, strict=True))
    line = Cluster(tuple(devices), query.line.links)
    try:
        now, again = (make(request, query.profile, plan, line) for make in (in_force, cut_anew))
    except RaypipeError:  # no other partition keeps the memory limits
        return None
    before_s = seconds_of(now)
    rest_s = max(0.0, query.step_s - before_s)  # not simulated, and equal for any partition
    gain = Gain(before_s + rest_s, seconds_of(again) + rest_s, query.steps_left, query.pause_s)
    if again.partition.cuts == plan.partition.cuts or not pays(gain, min_gain):
        return None
    decision = replace(again, reasons=(("cut", f"made again, for {query.why}"),))
    return Offer(decision, query.speeds, plan.generation, gain, query.why)


class Replanner:
    """Detector of changed worker speeds in a run, which starts searches for another partition.

    Args:
        profile: profile with which the run was planned.
        num_steps: steps of the whole run.
        drift_threshold: a search starts if the ratio of any two workers' speeds has changed by more than this fraction
            since the last partition.
    """

    def __init__(self, profile: Profile, num_steps: int, drift_threshold: float) -> None:
        self._num_steps, self._drift_threshold = num_steps, drift_threshold
        self._profile, self._calibrated = profile, False
        self._pause_s, self._rest_until = FIRST_PAUSE_S, 0
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._plan: Plan | None = None

    def begin(self, plan: Plan, line: Cluster) -> None:
        """Start over with a plan that the stages run from now on.

        Args:
            line: workers in the order of the stages.
        """
        self._plan, self._line = plan, line
        self._made_for = self._looked = tuple(device.speed for device in line.devices)
        self._planned_s = planned_seconds(self._profile, plan)
        self._pace = StageEstimator(plan.partition.num_stages, self._drift_threshold)
        self._recent_s.clear()

    def taken(self, offer: Offer, plan: Plan, pause_s: float, step: int) -> None:
        """Record that the stages run the offered plan, and start no search for a while, so that pauses stay rare.

        Args:
            pause_s: seconds for which training paused.
            step: step after which the move was made.
        """
        self._pause_s, self._rest_until = pause_s, step + rest_steps(pause_s, offer.gain.after_s)
        self.begin(plan, offer.decision.cluster)

    def on_step(
        self, step: int, seconds: float, samples: Sequence[StageSample], spec: ScheduleSpec | None = None
    ) -> RepartitionQuery | None:
        """Process a completed step.

        Args:
            samples: samples of all stages.
            spec: schedule of the step; None for the plan's own.

        Returns:
            the query of a search that is due; None if no search is.
        """
        assert self._plan is not None, "begin() comes first"
        self._recent_s.append(seconds)
        self._pace.add(samples)
        busy_s = self._pace.settled_s
        if busy_s is None:
            return None
        if not self._calibrated:
            self._profile, self._calibrated = calibrated(self._profile, self._plan, busy_s, self._made_for), True
            self._planned_s = planned_seconds(self._profile, self._plan)
        speeds = speeds_of(self._planned_s, busy_s)
        known = moved(self._looked, speeds) <= LOOKED_SHARE * self._drift_threshold
        if step < self._rest_until or known or moved(self._made_for, speeds) <= self._drift_threshold:
            return None
        why, self._looked = _words(self._made_for, speeds), speeds
        spec = spec or self._plan.spec
        assert spec is not None, "can_be_cut_again"
        left, step_s = self._num_steps - step - 1, median(self._recent_s)
        return RepartitionQuery(self._plan, self._profile, self._line, speeds, spec, step_s, left, self._pause_s, why)


def _words(before: Sequence[float], after: Sequence[float]) -> str:
    """Describe, for messages, the stage whose seconds changed most, compared with the median change of all stages.

    Args:
        before, after: speeds of the workers before and after the change, by stage.
    """
    logs = [math.log(then / now) for then, now in zip(before, after, strict=True)]
    usual = median(logs)
    stage = max(range(len(logs)), key=lambda at: (round(abs(logs[at] - usual), 6), abs(logs[at])))
    own, all_of = math.exp(logs[stage]), math.exp(usual)
    return f"stage {stage} takes {own:.2f} times as long as before, the stages' median {all_of:.2f} times"

"""Plan: the result of the planner, printable, and saved as plan.json in every run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raypipe.errors import PlanError, ScheduleError
from raypipe.ir.from_plain import from_plain
from raypipe.ir.schedule import Homes, Op, Schedule, Wiring, parse_action
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.weights import SYNCHRONOUS, WeightPolicy


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Predicted time and memory of one stage on each of its devices; a worker may be the device of several stages.

    F, B and W are the forward, the backward, and the part of a backward that computes gradients of weights.

    Attributes:
        devices: names of its devices, one per replica.
        forward_s, backward_s: seconds per micro-batch. If replicas are simulated as one worker, they are divided by the
            number of replicas, and include the all-reduce.
        weight_s: the part of backward_s for which no other stage waits (W).
        in_flight: largest number of micro-batches in flight: after their F, before their B (or W, if split).
        fullest_at: the action at peak memory, as ``0F3``.
        memory: bytes on one device at the peak, by purpose.
        recompute: activation recomputation; its second forward is included in backward_s.
        limit_bytes: memory of the device, None if unknown; shared by all stages on the device.
        exchange_s: seconds of a step in which replicas sum their gradients, if they have rows of their own.
        hidden_s: the part of exchange_s that overlaps with the last backward.
    """

    devices: tuple[str, ...]
    forward_s: float
    backward_s: float
    in_flight: int
    fullest_at: str
    memory: tuple[tuple[str, int], ...]
    limit_bytes: int | None = None
    weight_s: float = 0.0
    recompute: bool = False
    exchange_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def memory_bytes(self) -> int:
        return sum(count for _, count in self.memory)


@dataclass(frozen=True, slots=True)
class HopPrediction:
    """Predicted cost of a hop (pair of neighbouring stages): the activation message, and the gradient that returns.

    Attributes:
        message_bytes: size for one micro-batch, before any codec.
        latency_s: seconds until arrival in addition to occupancy_s: latency of the link, and the rest of the codec.
        occupancy_s: seconds for which the link, the encoder or the decoder is busy, whichever is longest.
        back_s: (latency, occupancy) of the gradient; None if they equal those of the activation.
        half_duplex: True if each worker receives from both neighbours over one wire, in turn.
    """

    message_bytes: int
    latency_s: float
    occupancy_s: float
    back_s: tuple[float, float] | None = None
    half_duplex: bool = False

    @property
    def ways_s(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(latency, occupancy) of both directions, forward first."""
        there_s = (self.latency_s, self.occupancy_s)
        return there_s, self.back_s or there_s

    @property
    def busiest_s(self) -> tuple[float, float]:
        """(latency, occupancy) of the busier direction."""
        return max(self.ways_s, key=lambda way: (way[1], way[0]))


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Simulated step for one number of micro-batches.

    Attributes:
        num_microbatches, microbatch_size: number of micro-batches, and samples of each.
        predicted_s: seconds of the step.
        refused: the limit that rejects this number; "" if it is feasible.
    """

    num_microbatches: int
    microbatch_size: int
    predicted_s: float
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of one optimizer step.

    Attributes:
        step_s: simulated seconds including all messages, without the optimizer's own time.
        bubble_fraction: share of worker time without computation.
        samples_per_s: training throughput.
        one_f_one_b_s: seconds of the step with schedule 1f1b, for comparison. None if the schedule is 1f1b, if there is
            one stage, or if workers hold several stages: 1f1b would need another partition or more workers.
        bound: the bottleneck of the step, in words.
        source: origin of the nodes' seconds: "measured", "estimated" or "mixed".
        links: origin of bandwidths and latencies.
        stages, hops: predictions in the order of the pipeline.
        curve: steps of other numbers of micro-batches with the same cut and schedule; empty if the number was given.
        optimum: the number in the curve with the shortest step; 0 if the number was given.
        low, high, epsilon: between ``low`` and ``high`` micro-batches, the step is longer than the shortest by at most
            the share ``epsilon``; 0 if the number was given.
        decided_by: origin of the number of micro-batches: "model", "memory", "simulation", "given" or "rule".
        loss_s: part of ``step_s``: seconds of a loss over the whole mini-batch, between forwards and backwards.
    """

    step_s: float
    bubble_fraction: float
    samples_per_s: float
    one_f_one_b_s: float | None
    bound: str
    source: str
    links: str
    stages: tuple[StagePrediction, ...]
    hops: tuple[HopPrediction, ...]
    curve: tuple[CurvePoint, ...] = ()
    optimum: float = 0.0
    low: float = 0.0
    high: float = 0.0
    epsilon: float = 0.0
    decided_by: str = "given"
    loss_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """Best plan of one shape (number of workers of each stage): a row of the table of compared shapes.

    Attributes:
        workers: number of workers of each stage.
        step_s: predicted seconds of a step; 0 if rejected.
        memory_bytes: peak of the fullest worker; 0 if rejected.
        num_microbatches, microbatch_size: numbers in the fastest plan of the shape; 0 if rejected.
        refused: reason for rejection, "" if feasible.
        chosen: True if this shape became the plan.
    """

    workers: tuple[int, ...]
    step_s: float = 0.0
    memory_bytes: int = 0
    num_microbatches: int = 0
    microbatch_size: int = 0
    refused: str = ""
    chosen: bool = False

    @property
    def kind(self) -> str:
        """Kind of parallelism, by its usual name."""
        if self.workers == (1,):
            return "one worker"
        if len(self.workers) == 1:
            return "data parallelism"
        return "pipeline" if max(self.workers) == 1 else "replicated stages"


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage: a contiguous range of the model's nodes.

    Attributes:
        index: position in the pipeline.
        start, stop: its nodes are graph.nodes[start:stop], in the partition's order if it has one.
        first_node, last_node: names of its first and last node.
        param_bytes: bytes of the parameters of which this stage is the first user.
        input_bytes: bytes per sample that arrive from the stage before.
        devices: positions in the cluster, one per replica; empty if not assigned.
        period_s: predicted seconds per micro-batch, divided by the number of replicas; 0 if unknown.
        memory_bytes: predicted peak bytes on each of its devices; 0 if unknown.
    """

    index: int
    start: int
    stop: int
    first_node: str
    last_node: str
    param_bytes: int
    input_bytes: int
    devices: tuple[int, ...] = ()
    period_s: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Partition:
    """Partition of a model into stages, with the reason for it.

    Attributes:
        stages: stages in the order of the pipeline.
        reason: explanation of the cuts, for reports.
        order: permutation of the nodes in which every stage is contiguous, as positions in execution order; empty for
            execution order.
        bottleneck_s: predicted seconds per micro-batch of the slowest stage or cut; 0 if unknown.
    """

    stages: tuple[Stage, ...]
    reason: str
    order: tuple[int, ...] = ()
    bottleneck_s: float = 0.0

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Position of the first node of each stage, without the first stage."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of workers by stage."""
        return tuple(max(1, len(stage.devices)) for stage in self.stages)

    def nodes_of(self, stage: Stage) -> Sequence[int]:
        """Return the positions of a stage's nodes in the graph, in execution order."""
        return self.order[stage.start : stage.stop] if self.order else range(stage.start, stage.stop)

    def on_workers(self, homes: Homes) -> Partition:
        """Return a copy of the partition in which stage s is on the workers ``homes[s]``."""
        stages = (replace(stage, devices=workers) for stage, workers in zip(self.stages, homes, strict=True))
        return replace(self, stages=tuple(stages))


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a run: stages, schedule, sizes and prediction, with its text and JSON forms.

    Attributes:
        partition: the stages.
        schedule: compute actions only; messages and optimizer steps are added when the schedule is lowered.
        minibatch_size: samples per optimizer step.
        microbatch_size: samples per micro-batch; the last one of a mini-batch may be smaller.
        num_microbatches: ceil(minibatch_size / microbatch_size).
        generation: number of the plan in its run; messages of an older plan are dropped.
        notes: warnings about this plan, one sentence each.
        reasons: pairs such as ("schedule", why it was chosen). Summaries show a reason up to its first semicolon. Facts
            are listed too: ("stage 0", its modules), ("loss", the items that it averages over).
        prediction: seconds and bytes; None if no profile was given.
        weights: rule for weight versions.
        spec: specification of the schedule; None in a plan saved by an earlier release.
        recompute: by stage, True for activation recomputation; empty for no stage.
        candidates: shapes that were compared, fastest first; empty if num_replicas was given.
        explained: True if ``str(plan)`` returns ``explain()``; ignored when plans are compared.
    """

    partition: Partition
    schedule: Schedule
    minibatch_size: int
    microbatch_size: int
    num_microbatches: int
    generation: int = 0
    notes: tuple[str, ...] = field(default=())
    reasons: tuple[tuple[str, str], ...] = ()
    prediction: Prediction | None = None
    weights: WeightPolicy = SYNCHRONOUS
    spec: ScheduleSpec | None = None
    recompute: tuple[bool, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    explained: bool = field(default=False, compare=False, repr=False)

    def to_json(self) -> str:
        """Serialize the plan as in ``plan.json``, with rows of actions as text; ``from_json`` reads it."""
        schedule = self.schedule
        rows = {name: [" ".join(map(str, row)) for row in getattr(schedule, name)] for name in _ROWS}
        body = asdict(replace(self, schedule=Schedule(schedule.kind, schedule.wiring, (), schedule.stride)))
        del body["explained"]
        body["schedule"].update({_ROWS[name]: value for name, value in rows.items()})
        del body["schedule"]["body"]
        return json.dumps(body, indent=2, default=lambda rule: rule.value)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that ``to_json`` wrote; a plan of an earlier release has no spec and does not recompute.

        Raises:
            PlanError: the text is no such plan; the message has what is wrong.
        """
        try:
            body = json.loads(text)
            body.pop("transport", None)  # of an earlier release
            plan: Plan = from_plain(cls, {**body, "schedule": _schedule(body["schedule"])})
            return plan
        except (AttributeError, KeyError, ScheduleError, TypeError, ValueError) as error:
            raise PlanError(
                f"This is not a saved plan ({error!r}): write one with Plan.to_json or `raypipe plan --json`."
            ) from None

    def __str__(self) -> str:
        """Summarize in four lines (stages, step, memory, why) and the notes.

        Return ``explain()`` if ``explained`` is True. If several shapes were compared, their table follows.
        """
        from raypipe.viz.plan_text import candidate_lines, summary

        text = self.explain() if self.explained else summary(self)
        return "\n".join([text, *(candidate_lines(self.candidates) if self.candidates else ())])

    def _repr_html_(self) -> str:
        from raypipe.viz.plan_svg import plan_html

        return plan_html(self, str(self))

    def explain(self) -> str:
        """Return the summary, a table of the stages, the reason for every choice, and the alternatives."""
        from raypipe.viz.plan_text import summary, table

        return f"{summary(self)}\n\n{table(self, peak_in_flight(self.schedule))}"


_ROWS = {"body": "rows", "prologue": "prologue", "epilogue": "epilogue"}
"""Names of the parts of a schedule in plan.json."""


def _schedule(fields: Mapping[str, Any]) -> Schedule:
    wiring = dict(fields["wiring"])
    if "placement" in wiring:  # of an earlier release
        wiring["homes"] = [[worker] for worker in wiring.pop("placement")]
    body, prologue, epilogue = (
        tuple(tuple(parse_action(word) for word in row.split()) for row in fields[name]) for name in _ROWS.values()
    )
    return Schedule(fields["kind"], from_plain(Wiring, wiring), body, fields["stride"], prologue, epilogue)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each stage, the most micro-batches that one of its workers has in flight at once.

    A micro-batch is in flight after its F, until its B (or its W, if backwards are split).
    """
    peaks = [0] * schedule.num_stages
    for row in schedule.rows():
        held = [0] * schedule.num_stages
        for action in row:
            if action.op is Op.F:
                held[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], held[action.stage])
            elif action.op in (Op.B, Op.W):
                held[action.stage] -= 1
    return tuple(peaks)


def smallest_bubble(num_stages: int, num_workers: int, num_microbatches: int) -> float:
    """Return the smallest idle share of worker time, for equal stages, free messages and backwards that are not split.

    Each of the P workers holds v = S / P of the S stages. With at least P micro-batches a worker idles while P - 1
    stages compute, else while the whole pipeline fills (Narayanan et al., arXiv:2104.04473, section 2.2; v = 1 is
    1F1B).
    """
    each = num_stages / num_workers
    slots = max(each * num_microbatches + num_workers - 1, num_microbatches + num_stages - 1)
    return 1 - each * num_microbatches / slots

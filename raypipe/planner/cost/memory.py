"""Memory model of every plan: peak bytes of a stage.

    weights x versions | sums of gradients | optimizer state | module buffers     for the whole run
    copies of weights, optimizer state and buffers                                if a run survives failures
    leaves (copies of parameters) x versions                     if forwards compute in 16 bits or with predictions
    activations x micro-batches in flight | messages in and out | workspace       peak after the warm-up's last forward

The number of micro-batches in flight follows from a stage's *depth*: the micro-batches that the workers from it to
the end can hold, per replica of the stage; without replicas stage s of S has depth S - s.

    gpipe  M        1f1b  d        kfkb  k d        slack  1 + the sum of r over the hops after it
    zb-h1  1 + the sum of r over all hops, wherever the stage is: between F and W

each at most M, the number of micro-batches; k is the group size, r the slack of a hop. Under zb-h1, micro-batches
beyond 1 + the sum of r over the hops after the stage wait only for W; ``ScheduleSpec.lag`` may bound their number. Each
counts as two sets of activations: one for the inputs of its layers, and one for the gradients of their outputs.
With activation recomputation (``recompute``) a stage holds the activations of one micro-batch, during its backward, and
only the inputs of the others, which count as messages. Micro-batches that wait for W count as without recomputation.
With leaves only the leaves have versions; the weights are held once, in fp32.
``pipedream`` is asynchronous 1F1B. With one update every u micro-batches it keeps ceil(w / u) + 1 versions of the
trainable weights, where w is the sum of r over the hops after the stage; ``2bw`` keeps two.

For several stages on a worker (interleaved, zb-v), and for replicas, the numbers are counted in the rows of the
schedule instead (``Resident``). A worker runs its row in order, whatever the costs:

    row of a worker   0F0 0F1 2F0 2F1 0F2 2B0 ...
    stage 0            1   2           3                micro-batches between F and B (or W)
    stage 2                    1   2       1

There a micro-batch between I and W counts twice even if its W is the next action of the row, which gives one more than
the formula of zb-h1; and with recomputation a stage holds activations only from B or I on. The number of waiting
messages depends on costs; it is computed for equal stages and free links, with backwards twice as long as forwards. A
worker's bytes are the sum of its stages' peaks; these need not coincide, so that the sum is an upper bound.

Partition solvers rely on bytes that are sums over nodes, so that a part of a stage never needs more than the stage.
Two parts are no sums: messages depend on the cut, and workspace is a maximum over nodes. ``partition.fit`` computes the
room that the solvers must leave for both.

Replicas of a stage exchange gradients during the last backward, when the activations of all other micro-batches have
been released, or after it in asynchronous schedules. Only the excess of the bytes of this exchange
(``ir.communication.exchange_bytes``) over the released bytes adds to the peak.

A received message is the input of its micro-batch and is kept until the backward; further ones wait in a queue.

The model leaves out: temporaries inside a kernel, and those of the optimizer's step, which runs when the activations
have been released (include them in ``reserve_bytes``); the gradients of small parameters before they are added; a
codec's buffers; fragmentation; and the second copy of a parameter that two stages share.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.communication import exchange_bytes
from raypipe.ir.graph import ModelGraph
from raypipe.ir.schedule import OP_CODE, OPS, Op, Schedule
from raypipe.ir.schedule_spec import KINDS, ScheduleSpec
from raypipe.ir.timeline import Timeline
from raypipe.ir.units import human_bytes
from raypipe.planner.cost.columns import Sums, columns_of
from raypipe.planner.dependency_tables import encode
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulator import Costs, simulate

ONE_F_ONE_B = ScheduleSpec("1f1b")


@dataclass(frozen=True, slots=True)
class Resident:
    """Peak contents of each stage's memory under a schedule, counted in its rows.

    Attributes:
        in_flight: by stage, the most micro-batches whose F has begun and whose B, or W, has not ended.
        activation_sets: peak bytes of activations, in units of those of one micro-batch, by stage.
        message_slots: boundary messages that wait at a stage, per direction, besides those of micro-batches in flight.
        recomputed_sets: ``activation_sets`` of a stage with recomputation.
        versions: weight versions by stage; empty to use the schedule's formula.
    """

    in_flight: tuple[int, ...]
    activation_sets: tuple[int, ...]
    message_slots: int = 1
    recomputed_sets: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Parameters of the memory model, apart from a stage's nodes and depth.

    Attributes:
        spec: schedule; a kind without a memory formula needs ``resident``.
        microbatch_size: samples in a micro-batch.
        weight_versions: number of weight versions; None follows the schedule.
        version_limit: most weight versions that a stage may keep; None for no limit.
        gradient_factor: bytes of gradients per byte of trainable parameters; one number, or one per stage.
        optimizer_factor: bytes of optimizer state per byte of trainable parameters: SGD 0, momentum 1, Adam 2; one
            number, or one per stage if the state is sharded over replicas.
        leaf_factor: bytes of the parameter copies that forwards use (leaves), per byte of parameters; 0 without copies.
        predicts: True if forwards use predicted weights, which are apart from the trainable parameters.
        state_copies: number of in-memory copies of weights, optimizer state and buffers: of the stage itself, and of
            another one, assumed to be as large.
        reserve_bytes: bytes kept free for temporaries and the runtime, per stage.
        resident: numbers counted in the rows of this schedule for one number of stages; None to use the formulas.
        recompute: activation recomputation: on all stages or none, or by stage.

    Raises:
        PlanError: a kind without a formula and without ``resident``, or a number out of range.
    """

    spec: ScheduleSpec = ONE_F_ONE_B
    microbatch_size: int = 1
    weight_versions: int | None = None
    version_limit: int | None = None
    gradient_factor: float | tuple[float, ...] = 1.0
    optimizer_factor: float | tuple[float, ...] = 2.0
    leaf_factor: float = 0.0
    predicts: bool = False
    state_copies: int = 0
    reserve_bytes: int = 0
    resident: Resident | None = None
    recompute: bool | tuple[bool, ...] = False

    def __post_init__(self) -> None:
        if not self.spec.of_kind.memory_formula and self.resident is None:
            known = ", ".join(name for name, kind in KINDS.items() if kind.memory_formula)
            raise PlanError(
                f"No memory model for the schedule {self.spec.kind!r}: choose one of {known}, or count what its rows "
                "hold."
            )
        counts = [self.microbatch_size]
        counts += [count for count in (self.weight_versions, self.version_limit) if count is not None]
        by_stage = [x if isinstance(x, tuple) else (x,) for x in (self.gradient_factor, self.optimizer_factor)]
        factors = (*by_stage[0], *by_stage[1], self.leaf_factor, self.state_copies, self.reserve_bytes)
        if min(counts) < 1 or not min(factors) >= 0:
            raise PlanError(f"{self}: counts must be at least 1, factors, copies and reserve_bytes at least 0.")

    @property
    def version_factor(self) -> float:
        """Return the bytes of a weight version per byte of trainable parameters; 0 if the newest is the parameters."""
        return self.leaf_factor or float(self.predicts)

    def in_flight(self, depth: int) -> int:
        """Return the most micro-batches in flight (after F, before B or W) on a stage of this depth."""
        if self.resident is not None:
            return self.resident.in_flight[-depth]
        spec = self.spec
        match spec.kind:
            case "gpipe":
                wanted = spec.num_microbatches
            case "kfkb":
                wanted = spec.group_size * depth
            case "zb-h1":
                return int(self.deferring(depth, self._lag(depth))[0])
            case "slack" | "pipedream" | "2bw":
                wanted = 1 + self._slack_after(depth - 1)
            case _:
                wanted = depth
        # Asynchronous schedules never flush: the mini-batch does not bound them.
        return min(spec.num_microbatches, wanted) if spec.of_kind.synchronous else wanted

    def activation_sets(self, depth: int) -> int:
        """Return the most activations on a stage of this depth, in units of the activations of one micro-batch."""
        again, in_flight, splits = self.recomputes(depth), self.in_flight(depth), self.spec.of_kind.splits_backward
        if self.resident is not None:
            return (self.resident.recomputed_sets if again else self.resident.activation_sets)[-depth]
        if not splits:
            return 1 if again else in_flight
        return int(self.deferring(depth, self._lag(depth))[1])

    def deferring(self, depth: int, lag: int | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (``in_flight``, ``activation_sets``) of a zb-h1 stage of this depth, for each of the lags.

        Args:
            lag: numbers of micro-batches by which the stage may defer W.
        """
        in_flight = np.minimum(self.spec.num_microbatches, 1 + self._slack_after(depth - 1) + lag)
        # Peak during the I before which ``lag`` micro-batches wait for W; in a short step no forwards are left then.
        waiting = np.maximum(0, np.minimum(in_flight - 1, lag))
        return in_flight, 1 + 2 * waiting if self.recomputes(depth) else in_flight + waiting

    def recomputes(self, depth: int) -> bool:
        """Return True if a stage of this depth recomputes activations."""
        return bool(self.recompute and _of_depth(self.recompute, depth))

    def gradients(self, depth: int) -> float:
        """Return the bytes of gradients per byte of trainable parameters at this depth."""
        return _of_depth(self.gradient_factor, depth)

    def optimizer(self, depth: int) -> float:
        """Return the bytes of optimizer state per byte of trainable parameters at this depth."""
        return _of_depth(self.optimizer_factor, depth)

    def _slack_after(self, hops: int) -> int:
        """Sum the slack over the last ``hops`` hops; if the spec has fewer, its first counts for the others."""
        slack = self.spec.slack
        more = max(0, hops - len(slack)) * (slack[0] if slack else 1)
        return more + sum(slack[max(0, len(slack) - hops) :])

    def _lag(self, depth: int) -> int:
        """Return the number of micro-batches by which zb-h1 defers weight gradients at this depth."""
        full, lag = sum(self.spec.slack) - self._slack_after(depth - 1), self.spec.lag
        return min(full, lag[-depth]) if depth <= len(lag) else full

    def versions(self, depth: int) -> int:
        """Return the number of weight versions on a stage of this depth."""
        if self.weight_versions is not None:
            return self.weight_versions
        if self.resident is not None and self.resident.versions:
            return self.resident.versions[-depth]
        needed = {
            "pipedream": math.ceil(self._slack_after(depth - 1) / (self.spec.update_interval or 1)) + 1,
            "2bw": 2,
        }.get(self.spec.kind, 1)
        return min(needed, self.version_limit or needed)

    @property
    def message_slots(self) -> int:
        """Boundary messages that wait at a stage, per direction, besides those of micro-batches in flight."""
        if self.resident is not None:
            return self.resident.message_slots
        return max(self.spec.group_size, *self.spec.slack, 1)

    def node_parts(self, graph: ModelGraph) -> NDArray[np.int64]:
        """Return four rows of bytes by node, shape (4, nodes), from which ``at_depth`` computes the bytes of a stage.

        The rows are bytes per weight version, bytes held once, bytes per activation set, and bytes of trainable
        parameters, which determine the sizes of gradients and optimizer state.
        """
        columns = columns_of(graph)
        once = columns.param_bytes - columns.trainable_bytes + columns.buffer_bytes
        once = once + self.state_copies * (columns.param_bytes + columns.buffer_bytes)
        # Only trainable parameters have versions.
        versioned = columns.trainable_bytes
        if self.version_factor:
            frozen_bytes = columns.param_bytes - columns.trainable_bytes
            once = once + columns.trainable_bytes + np.ceil(frozen_bytes * self.leaf_factor).astype(np.int64)
            versioned = np.ceil(columns.trainable_bytes * self.version_factor).astype(np.int64)
        return np.stack([versioned, once, columns.activation_bytes * self.microbatch_size, columns.trainable_bytes])

    def at_depth(self, parts: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
        """Return the bytes of nodes on a stage of this depth.

        Args:
            parts: rows of ``node_parts``, by node or summed over nodes; shape (4, ...).
        """
        gradients = np.ceil(parts[3] * self.gradients(depth)).astype(np.int64)
        optimizer = (1 + self.state_copies) * np.ceil(parts[3] * self.optimizer(depth)).astype(np.int64)
        many = self.versions(depth) * parts[0] + self.activation_sets(depth) * parts[2]
        total: NDArray[np.int64] = many + parts[1] + gradients + optimizer
        return total


def _of_depth(value: float | tuple[float, ...], depth: int) -> float:
    """Return ``value``, or its item for the stage at this depth if it has one for each stage."""
    return value[max(0, len(value) - depth)] if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak bytes of a stage on one device, by purpose.

    Attributes:
        action: the forward at which the most micro-batches are in flight, such as ``0F3``.
        activation_sets: number of micro-batches' activations in activation_bytes.
        message_bytes: inputs of the micro-batches in flight, and messages that wait at the stage.
        input_bytes: part of message_bytes that is one micro-batch's input.
        leaf_bytes: all versions of the parameter copies that forwards use (leaves); 0 without copies.
        recompute: True with activation recomputation.
        exchange_bytes: bytes that replicas need to sum their gradients, beyond those that are released before.
    """

    stage: int
    action: str
    in_flight: int
    activation_sets: int
    versions: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    activation_bytes: int
    message_bytes: int
    workspace_bytes: int
    reserve_bytes: int
    copy_bytes: int = 0
    input_bytes: int = 0
    recompute: bool = False
    leaf_bytes: int = 0
    exchange_bytes: int = 0

    @property
    def lasting_bytes(self) -> int:
        """Bytes held through the whole step, regardless of micro-batches in flight."""
        weights = self.weight_bytes + self.leaf_bytes + self.gradient_bytes
        return weights + self.optimizer_bytes + self.buffer_bytes + self.copy_bytes + self.reserve_bytes

    @property
    def total_bytes(self) -> int:
        passing = self.activation_bytes + self.message_bytes + self.workspace_bytes + self.exchange_bytes
        return self.lasting_bytes + passing

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Pairs (purpose, bytes), for the text of plans; rare purposes are left out if they have no bytes."""
        return (
            (f"weights x {1 if self.leaf_bytes else self.versions}", self.weight_bytes),
            *(((f"leaves x {self.versions}", self.leaf_bytes),) if self.leaf_bytes else ()),
            ("gradients", self.gradient_bytes),
            ("optimizer", self.optimizer_bytes),
            ("buffers", self.buffer_bytes),
            (self._activations, self.activation_bytes),
            ("messages", self.message_bytes),
            ("workspace", self.workspace_bytes),
            *((("exchange", self.exchange_bytes),) if self.exchange_bytes else ()),
            ("reserve", self.reserve_bytes),
            *((("copies of the state", self.copy_bytes),) if self.copy_bytes else ()),
        )

    @property
    def _activations(self) -> str:
        sets = self.activation_sets
        if self.recompute:
            return f"activations of {sets} micro-batch{'es' * (sets != 1)}, computed again"
        return f"activations of {self.in_flight} micro-batches"

    def __str__(self) -> str:
        return ", ".join(f"{name} {human_bytes(count)}" for name, count in self.parts if count)


def stage_memory(
    model: MemoryModel,
    resident: Sums,
    stage: int,
    depth: int,
    *,
    receive_bytes: int = 0,
    send_bytes: int = 0,
    workspace_bytes: int = 0,
) -> StageMemory:
    """Compute the peak memory of one stage.

    Args:
        resident: bytes of the stage's nodes.
        stage: number of the stage.
        depth: depth of the stage, as in the module's docstring; ``S - stage`` without replicas.
        receive_bytes, send_bytes: bytes of one sample that cross the cuts before and after the stage.
        workspace_bytes: see ``columns.workspace_bytes``.
    """
    in_flight, sets, versions = model.in_flight(depth), model.activation_sets(depth), model.versions(depth)
    optimizer_bytes = math.ceil(resident.trainable_bytes * model.optimizer(depth))
    activation_bytes = sets * model.microbatch_size * resident.activation_bytes
    message_bytes = model.microbatch_size * (
        receive_bytes * (in_flight + model.message_slots) + send_bytes * model.message_slots
    )
    replicas = dict(enumerate(model.spec.replicas)).get(stage, 1)
    exchanged = exchange_bytes(resident.trainable_bytes, model.spec.lanes, replicas)
    free_bytes = activation_bytes + message_bytes + workspace_bytes
    if model.spec.of_kind.synchronous:
        free_bytes = model.microbatch_size * ((sets - 1) * resident.activation_bytes + (in_flight - 1) * receive_bytes)
    return StageMemory(
        stage=stage,
        action=f"{stage}F{in_flight - 1}",
        in_flight=in_flight,
        activation_sets=sets,
        versions=versions,
        weight_bytes=(0 if model.version_factor else versions - 1) * resident.trainable_bytes + resident.param_bytes,
        leaf_bytes=math.ceil(
            versions * resident.trainable_bytes * model.version_factor
            + (resident.param_bytes - resident.trainable_bytes) * model.leaf_factor
        ),
        gradient_bytes=math.ceil(resident.trainable_bytes * model.gradients(depth)),
        optimizer_bytes=optimizer_bytes,
        buffer_bytes=resident.buffer_bytes,
        copy_bytes=model.state_copies * (resident.param_bytes + optimizer_bytes + resident.buffer_bytes),
        activation_bytes=activation_bytes,
        message_bytes=message_bytes,
        input_bytes=model.microbatch_size * receive_bytes,
        recompute=model.recomputes(depth),
        workspace_bytes=workspace_bytes,
        reserve_bytes=model.reserve_bytes,
        exchange_bytes=max(0, exchanged - free_bytes),
    )


def check_memory(stages: Sequence[StageMemory], limits: Sequence[int | None]) -> None:
    """Raise PlanError if a stage needs more than its limit; the message names the worst stage and its bytes by purpose.

    Args:
        stages: memory of every stage.
        limits: bytes by stage, None for no limit.
    """
    over = [(m.total_bytes - cap, m, cap) for m, cap in zip(stages, limits, strict=True) if cap is not None]
    excess, worst, cap = max(over, key=lambda row: row[0], default=(0, None, 0))
    if worst is None or excess <= 0:
        return
    raise PlanError(
        f"Stage {worst.stage} needs {human_bytes(worst.total_bytes)} at {worst.action}, {human_bytes(excess)} more "
        f"than its limit of {human_bytes(cap)}: {worst}. "
        "Use smaller micro-batches, more stages, or a schedule with fewer micro-batches in flight."
    )


FULL = 2
"""Micro-batches per stage beyond which a step only repeats its steady state, if the rounds of workers are equal."""

_FLIGHT = np.zeros(len(OPS), dtype=np.int64)
_FLIGHT[[OP_CODE[Op.F], OP_CODE[Op.B], OP_CODE[Op.W]]] = 1, -1, -1
_SETS = np.zeros(len(OPS), dtype=np.int64)
_SETS[[OP_CODE[Op.F], OP_CODE[Op.B], OP_CODE[Op.I], OP_CODE[Op.W]]] = 1, -1, 1, -2
"""Change of the micro-batches in flight and of the activation sets of a stage, by operation."""
_AGAIN = np.zeros(len(OPS), dtype=np.int64)
_AGAIN[[OP_CODE[Op.I], OP_CODE[Op.W]]] = 2, -2
"""Change of the activation sets with recomputation, by operation, without the set of a B while it runs."""


def resident_of(schedule: Schedule) -> Resident:
    """Count the most micro-batches, activation sets and messages that a worker of each stage holds at once.

    Args:
        schedule: compute actions only.
    """
    in_flight, sets, again = ([0] * schedule.num_stages for _ in range(3))
    for row in schedule.rows():
        stages, ops, _ = encode(row)
        for stage in np.unique(stages).tolist():
            own = ops[stages == stage]
            in_flight[stage] = max(in_flight[stage], int(np.cumsum(_FLIGHT[own]).max()))
            sets[stage] = max(sets[stage], int(np.cumsum(_SETS[own]).max()))
            again[stage] = max(again[stage], int((np.cumsum(_AGAIN[own]) + (own == OP_CODE[Op.B])).max()))
    timeline = simulate(lower(schedule), Costs.uniform(schedule.num_stages))
    return Resident(tuple(in_flight), tuple(sets), _most_waiting(timeline, schedule), tuple(again))


@functools.lru_cache(maxsize=1024)  # every partition and every search needs the same few numbers
def resident_under(spec: ScheduleSpec, num_stages: int, workers: int) -> Resident:
    """Return ``resident_of`` the schedule with this spec, as if all stages were trainable; cached.

    Args:
        workers: number of workers, for schedules with several stages on each; ignored for others.
    """
    # Further micro-batches only repeat the steady state. The remainder is spread over the rounds: with as many rounds
    # as workers, no round gets longer by more than one.
    count = spec.num_microbatches
    enough = max(FULL * num_stages, -(-(workers**2) // num_stages) * num_stages) + count % num_stages
    if spec.replicas:
        enough = 2 * FULL * spec.lanes * max(spec.slack, default=1) * (1 + sum(spec.replicas)) + count % spec.lanes
    if not spec.of_kind.synchronous:  # the prologue fills the pipeline, for any mini-batch
        enough = spec.update_interval or spec.lanes
    spec = dataclasses.replace(spec.with_microbatches(min(count, enough)), first_trainable=0)
    return resident_of(schedule_of(spec, num_stages))


def _most_waiting(timeline: Timeline, schedule: Schedule) -> int:
    """Return the largest number of messages that wait at once in one direction of one link between neighbouring stages.

    A message waits from its arrival until the action that takes it begins.
    """
    backward = Op.I if schedule.wiring.split_backward else Op.B
    times: dict[tuple[int, Op], list[tuple[float, float]]] = {}
    for _, action, start_s, end_s in timeline.spans:
        if action.op in (Op.F, backward):
            times.setdefault((action.stage, action.op), []).append((start_s, end_s))
    most = 1
    for (stage, op), rows in times.items():
        source = times.get((stage - 1 if op is Op.F else stage + 1, op))
        if source is not None:
            most = max(most, _behind(np.sort([end for _, end in source]), np.sort([start for start, _ in rows])))
    return most


def _behind(arrived_s: NDArray[np.float64], begun_s: NDArray[np.float64]) -> int:
    """Return the largest number of messages that wait at once.

    Args:
        arrived_s: times at which messages arrive, ascending.
        begun_s: times at which the actions that take them begin, ascending.
    """
    waiting = np.searchsorted(arrived_s, begun_s) - np.arange(len(begun_s))
    return int(waiting.max(initial=0))

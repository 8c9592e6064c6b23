"""What a stage holds at its fullest moment: the memory model of every plan.

    weights x versions | sums of gradients | optimizer state | module buffers     for the whole run
    copies of weights, optimizer state and buffers                                where a run survives failures
    16-bit leaves x versions                                                      where forwards compute in 16 bits
    activations x micro-batches in flight | messages that came or go | workspace  most after the warm-up's last forward

How many micro-batches a stage has in flight follows from its *depth*: the micro-batches that the workers from
it to the end can hold, per replica of its own; without replicas stage s of S has depth S - s.

    gpipe  M        1f1b  d        kfkb  k d        slack  1 + the sum of r over the hops after it
    zb-h1  1 + the sum of r over all hops, wherever the stage is: between F and W

each at most M. Of zb-h1 those beyond 1 + the sum of r over the hops after the stage wait for W alone, and each counts
twice: for the operands of its products, which are among its activations, and for the gradients of what those made.
A stage that runs its forwards again (``recompute``) holds the activations of one micro-batch at a time, while its
backward runs, and of the others only what came, which is among the messages. What waits for W counts as ever.
Leaves of their own are what has versions then; the weights are there once, in fp32.
``pipedream`` is the asynchronous 1F1B, which keeps ceil((d - 1) / u) + 1 versions of the weights that learn, u being
the update interval; ``2bw`` keeps two.

Where several stages sit on one worker (interleaved, zb-v) the rows of the schedule are counted instead (``Resident``).
What a worker holds is taken as the sum over its stages, each at its own fullest moment; those need not coincide, so
that the sum is an upper bound.

The numbers per node add up, so a part of a stage never needs more than the stage: the partition solvers rest on that.
Messages and the workspace are exceptions: those depend on the cut, and this is the most that any node needs while it
runs, not their sum. ``partition.fit`` finds how much room the solvers must leave for them.

Replicas of a stage exchange their gradients beside the last backward, when the activations of all other micro-batches
are gone, or behind it in asynchronous schedules. Only what this takes (``ir.exchange``) beyond what is free by then
adds to the fullest moment.

A message that came is the input of its micro-batch, kept until the backward, and others wait behind it.

The model leaves out: what a kernel takes and gives back inside itself and what the optimizer's step needs, which comes
when the activations are gone (put them into ``reserve_bytes``), the gradients of small parameters before they are
added, what a codec works with, fragmentation, and the second copy of a parameter that two stages share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.exchange import exchange_bytes
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan_table import human_bytes
from raypipe.ir.schedule_spec import KINDS, ScheduleSpec
from raypipe.planner.columns import Sums, columns_of

__all__ = ["MemoryModel", "Resident", "StageMemory", "activations_of", "check_memory", "stage_memory"]

ONE_F_ONE_B = ScheduleSpec("1f1b")


@dataclass(frozen=True, slots=True)
class Resident:
    """What a schedule keeps in each stage's memory, counted in its rows.

    Attributes:
        in_flight: most micro-batches between their F and their B, or W, by stage.
        activation_sets: how often each stage holds a micro-batch's activations, or as many bytes.
        message_slots: boundary messages that wait at a stage, per direction, besides those of micro-batches in flight.
        recomputed_sets: ``activation_sets`` of a stage that runs its forwards again.
        versions: of the weights, by stage; empty where the schedule says.
    """

    in_flight: tuple[int, ...]
    activation_sets: tuple[int, ...]
    message_slots: int = 1
    recomputed_sets: tuple[int, ...] = ()
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What decides a stage's memory, besides its nodes and its place.

    Attributes:
        spec: of a kind with a memory formula, or any other with ``resident``.
        microbatch_size: b, samples.
        weight_versions: copies of the weights; None follows the schedule.
        version_limit: most copies that a stage has room for; None for no limit.
        gradient_factor: bytes of gradients per byte of trainable parameters; of all stages, or by stage.
        optimizer_factor: bytes of optimizer state per byte of trainable parameters: SGD 0, momentum 1, Adam 2; of all
            stages, or by stage, where replicas share it out.
        leaf_factor: bytes of the leaves that forwards use, per byte of parameters; 0 where the weights are the leaves.
        state_copies: of weights, optimizer and buffers: its own, and those of another stage, taken to be as large.
        reserve_bytes: kept free on every device, for temporaries and the runtime; of several stages on one device, the
            share of each.
        resident: what the rows say, for schedules without a formula; it is of so many micro-batches and stages.
        recompute: backwards run the forward again: on all stages or none, or by stage.

    Raises:
        PlanError: a kind without a formula, or a number out of range.
    """

    spec: ScheduleSpec = ONE_F_ONE_B
    microbatch_size: int = 1
    weight_versions: int | None = None
    version_limit: int | None = None
    gradient_factor: float | tuple[float, ...] = 1.0
    optimizer_factor: float | tuple[float, ...] = 2.0
    leaf_factor: float = 0.0
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

    def in_flight(self, depth: int) -> int:
        """Most micro-batches between their F and their B, or W, on a stage of this depth."""
        if self.resident is not None:
            return self.resident.in_flight[-depth]
        spec = self.spec
        match spec.kind:
            case "gpipe":
                wanted = spec.num_microbatches
            case "kfkb":
                wanted = spec.group_size * depth
            case "zb-h1":
                wanted = 1 + sum(spec.slack)
            case "slack" | "pipedream" | "2bw":
                wanted = 1 + self._slack_after(depth - 1)
            case _:
                wanted = depth
        # Asynchronous schedules never flush: the mini-batch does not bound them.
        return min(spec.num_microbatches, wanted) if spec.of_kind.synchronous else wanted

    def activation_sets(self, depth: int) -> int:
        """How often a stage of this depth holds a micro-batch's activations, or as many bytes."""
        again, in_flight, splits = self.recomputes(depth), self.in_flight(depth), self.spec.of_kind.splits_backward
        if self.resident is not None:
            return (self.resident.recomputed_sets if again else self.resident.activation_sets)[-depth]
        if not splits:
            return 1 if again else in_flight
        ahead = 1 + self._slack_after(depth - 1)
        if not again:
            return 2 * in_flight - min(in_flight, ahead)
        # The one in I, and those before it that wait for W; most of them while the pipeline runs empty.
        return 2 * min(in_flight, max(1, 2 + sum(self.spec.slack) - ahead)) - 1

    def recomputes(self, depth: int) -> bool:
        """Whether backwards on a stage of this depth run its forward again."""
        if isinstance(self.recompute, bool):
            return self.recompute
        return bool(self.recompute) and self.recompute[max(0, len(self.recompute) - depth)]

    def gradients(self, depth: int) -> float:
        """Bytes of gradients per byte of trainable parameters on a stage of this depth."""
        return _of_depth(self.gradient_factor, depth)

    def optimizer(self, depth: int) -> float:
        """Bytes of optimizer state per byte of trainable parameters on a stage of this depth."""
        return _of_depth(self.optimizer_factor, depth)

    def _slack_after(self, hops: int) -> int:
        """Sum of r over so many hops at the end; the cut may have more hops than the spec, all like its first."""
        slack = self.spec.slack
        more = max(0, hops - len(slack)) * (slack[0] if slack else 1)
        return more + sum(slack[max(0, len(slack) - hops) :])

    def versions(self, depth: int) -> int:
        """Copies of the weights that a stage of this depth holds."""
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
        """What each node adds per version of the weights, once, per micro-batch in flight, of gradients; (4, nodes).

        The last of them says how large the optimizer's state is, too.
        """
        found = columns_of(graph)
        once = found.param_bytes - found.trainable_bytes + found.buffer_bytes
        once = once + self.state_copies * (found.param_bytes + found.buffer_bytes)
        # Only what learns has versions.
        versioned = found.trainable_bytes
        if self.leaf_factor:
            frozen_bytes = found.param_bytes - found.trainable_bytes
            once = once + found.trainable_bytes + np.ceil(frozen_bytes * self.leaf_factor).astype(np.int64)
            versioned = np.ceil(found.trainable_bytes * self.leaf_factor).astype(np.int64)
        return np.stack([versioned, once, found.activation_bytes * self.microbatch_size, found.trainable_bytes])

    def at_depth(self, parts: NDArray[np.int64], depth: int) -> NDArray[np.int64]:
        """Bytes on a stage of this depth, from ``node_parts`` or sums of them."""
        gradients = np.ceil(parts[3] * self.gradients(depth)).astype(np.int64)
        optimizer = (1 + self.state_copies) * np.ceil(parts[3] * self.optimizer(depth)).astype(np.int64)
        many = self.versions(depth) * parts[0] + self.activation_sets(depth) * parts[2]
        total: NDArray[np.int64] = many + parts[1] + gradients + optimizer
        return total


def _of_depth(given: float | tuple[float, ...], depth: int) -> float:
    """Of the stage at this depth, where it was given by stage."""
    return given[max(0, len(given) - depth)] if isinstance(given, tuple) else given


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one device of a stage at its fullest moment, by what they are for.

    Attributes:
        action: the forward at which the most micro-batches are in flight, as ``0F3``.
        activation_sets: how often activation_bytes holds those of one micro-batch.
        message_bytes: of the micro-batches in flight what came, and what waits at the stage.
        input_bytes: of them what came of one micro-batch.
        leaf_bytes: of all versions of the leaves, where they are not the weights.
        recompute: backwards run the forward again.
        exchange_bytes: what replicas need to sum their gradients, beyond what is free by then.
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
        """What is held through the whole step, whatever is in flight."""
        weights = self.weight_bytes + self.leaf_bytes + self.gradient_bytes
        return weights + self.optimizer_bytes + self.buffer_bytes + self.copy_bytes + self.reserve_bytes

    @property
    def total_bytes(self) -> int:
        passing = self.activation_bytes + self.message_bytes + self.workspace_bytes + self.exchange_bytes
        return self.lasting_bytes + passing

    def __str__(self) -> str:
        parts = {
            f"weights x {1 if self.leaf_bytes else self.versions}": self.weight_bytes,
            f"16-bit leaves x {self.versions}": self.leaf_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "buffers": self.buffer_bytes,
            "copies of the state": self.copy_bytes,
            activations_of(self): self.activation_bytes,
            "messages": self.message_bytes,
            "workspace": self.workspace_bytes,
            "exchange": self.exchange_bytes,
            "reserve": self.reserve_bytes,
        }
        return ", ".join(f"{name} {human_bytes(count)}" for name, count in parts.items() if count)


def activations_of(found: StageMemory) -> str:
    """Whose activations a stage holds, in words."""
    sets = found.activation_sets
    if found.recompute:
        return f"activations of {sets} micro-batch{'es' * (sets != 1)}, computed again"
    return f"activations of {found.in_flight} micro-batches"


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
    """The memory of one stage.

    Args:
        resident: bytes of the stage's nodes.
        stage: its position, for the action.
        depth: see the module; ``S - stage`` without replicas.
        receive_bytes, send_bytes: per sample, of the cuts before and after it.
        workspace_bytes: as ``columns.workspace_bytes`` says.
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
        weight_bytes=(0 if model.leaf_factor else versions - 1) * resident.trainable_bytes + resident.param_bytes,
        leaf_bytes=math.ceil(((versions - 1) * resident.trainable_bytes + resident.param_bytes) * model.leaf_factor),
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


def check_memory(found: Sequence[StageMemory], limits: Sequence[int | None]) -> None:
    """Refuse a plan that does not fit.

    Args:
        found: by stage.
        limits: bytes by stage, None for no limit.

    Raises:
        PlanError: names the stage that is over its limit by most, the action, and what its bytes are for.
    """
    over = [(m.total_bytes - cap, m, cap) for m, cap in zip(found, limits, strict=True) if cap is not None]
    excess, worst, cap = max(over, key=lambda row: row[0], default=(0, None, 0))
    if worst is None or excess <= 0:
        return
    raise PlanError(
        f"Stage {worst.stage} needs {human_bytes(worst.total_bytes)} at {worst.action}, {human_bytes(excess)} more "
        f"than its limit of {human_bytes(cap)}: {worst}. "
        "Use smaller micro-batches, more stages, or a schedule with fewer micro-batches in flight."
    )

"""Construction of plans; those of a cut that was made without a profile have no predicted seconds."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, Plan
from raypipe.planner.partition.chain import equal_parameters, split_before
from raypipe.planner.schedule import schedule_of
from raypipe.planner.search.reasons import recompute_reason
from raypipe.planner.search.replica_cuts import (
    check_shares,
    check_workers_of_replicas,
    homes_of,
    share_notes,
)
from raypipe.planner.search.request import DEFAULT_STAGES, Request, microbatches
from raypipe.planner.search.schedule_settings import spec_of, weight_policy, weight_reason
from raypipe.planner.search.workers import idle_notes, settled_workers, single_notes


def make_partition(graph: ModelGraph, request: Request) -> Partition:
    """Cut a graph without a profile: at the user's split points, or into stages of equal parameters.

    Raises:
        PlanError: the stages do not divide over the workers, or there are too few places to cut.
    """
    if request.split_points:
        settled_workers(request, len(request.split_points) + 1)
        return split_before(graph, request.split_points)
    places = len(graph.cut_positions())
    request = settled_workers(request, places + 1)
    num_stages = request.num_stages or request.num_workers or min(DEFAULT_STAGES, places + 1)
    return equal_parameters(graph, num_stages)


def make_plan(request: Request, partition: Partition, first_trainable: int, notes: Sequence[str] = ()) -> Plan:
    """Build the plan of a model that was cut without a profile.

    Args:
        first_trainable: lowest stage with a backward.
        notes: further notes for the plan.

    Raises:
        PlanError: the stages do not fit on the workers offered.
    """
    num_stages = partition.num_stages
    offered = request.num_workers
    if offered is not None and request.workers(num_stages) > offered:
        raise PlanError(
            f"The plan has {num_stages} stages, but scaling_config offers {offered} workers. "
            f"Set num_stages to at most {offered}, or raise num_workers."
        )
    if request.replicated:
        check_workers_of_replicas(request, num_stages, offered)
        partition = partition.on_workers(homes_of(request, num_stages))
    sizes = microbatches(request, num_stages)
    recompute = recompute_reason(request, request.recomputed(num_stages, first_trainable))
    texts = (("recompute", recompute), ("weights", weight_reason(request, num_stages, sizes[2])))
    reasons = tuple((what, why) for what, why in texts if why)
    return build_plan(request, partition, sizes, first_trainable, notes, reasons)


def build_plan(
    request: Request,
    partition: Partition,
    sizes: tuple[int, int, int],
    first_trainable: int,
    notes: Sequence[str],
    reasons: tuple[tuple[str, str], ...],
    *,
    notes_idle: bool = True,
) -> Plan:
    """Build a plan with its schedule, weight versions and notes; without a prediction.

    Args:
        sizes: samples of a mini-batch, samples of a micro-batch, and number of micro-batches.
        first_trainable: lowest stage with a backward.
        notes: further notes for the plan.
        reasons: (choice, reason) pairs.
        notes_idle: True to add a note if too few micro-batches leave workers idle.

    Raises:
        PlanError: some replicas would have no micro-batch.
    """
    num_stages, (minibatch, size, count) = partition.num_stages, sizes
    check_shares(request, num_stages, count)
    idle = idle_notes(request, num_stages, count) if notes_idle and request.kind.synchronous else ()
    spec = spec_of(request, num_stages, count, first_trainable)
    return Plan(
        partition,
        schedule_of(spec, num_stages),
        minibatch,
        size,
        count,
        notes=(*notes, *single_notes(request, num_stages), *idle, *share_notes(request, num_stages, count)),
        reasons=reasons,
        weights=weight_policy(request, num_stages, count),
        spec=spec,
        recompute=request.recomputed(num_stages, first_trainable),
    )

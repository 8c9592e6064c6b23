"""The plan of a model that nobody has profiled: who holds what, and no word about seconds."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.errors import PlanError
from raypipe.ir.plan import Partition, Plan
from raypipe.planner.schedule import schedule_of
from raypipe.planner.tune.explain import recompute_reason
from raypipe.planner.tune.replicas import check_shares, check_workers_of_replicas, homes_of, on_workers, share_notes
from raypipe.planner.tune.request import Request, microbatches
from raypipe.planner.tune.resolve import spec_of
from raypipe.planner.tune.weights import weight_policy, weight_reason
from raypipe.planner.tune.workers import idle_notes, single_notes

__all__ = ["make_plan"]


def make_plan(request: Request, partition: Partition, first_trainable: int, notes: Sequence[str] = ()) -> Plan:
    """The plan of a partitioned model.

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
        partition = on_workers(partition, homes_of(request, num_stages))
    minibatch, size, count = microbatches(request, num_stages)
    check_shares(request, num_stages, count)
    idle = idle_notes(request, num_stages, count) if request.kind.synchronous else ()
    found = (*notes, *single_notes(request, num_stages), *idle, *share_notes(request, num_stages, count))
    spec = spec_of(request, num_stages, count, first_trainable)
    recompute = request.recomputed(num_stages, first_trainable)
    reasons = (
        ("recompute", recompute_reason(request, recompute)),
        ("weights", weight_reason(request, num_stages, count)),
    )
    return Plan(
        partition,
        schedule_of(spec, num_stages),
        minibatch,
        size,
        count,
        notes=found,
        reasons=tuple((what, why) for what, why in reasons if why),
        weights=weight_policy(request, num_stages, count),
        spec=spec,
        recompute=recompute,
    )

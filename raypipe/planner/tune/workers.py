"""How many stages on how many workers, for schedules that put several on each.

    num_stages  num_workers    becomes
    S           P              S / P on each of P
    S           not given      2 on each of S / 2
    not given   P              2 on each of P
    not given   not given      2 on each of 2

A described cluster offers its devices: all of them where the stages share out evenly over all, else as many as have
two stages each or more. Workers that were given in numbers are all used: fewer would leave some idle without a word.

With R replicas of every stage the same holds of P groups of R workers, and R P is the number of workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.plan_table import smallest_bubble
from raypipe.planner.tune.request import DEFAULT_WORKERS, PER_WORKER, Request, microbatches

__all__ = ["idle_notes", "rounds_of", "settled_workers", "single_notes", "used_devices"]


def settled_workers(request: Request, places: int, devices: int | None = None) -> Request:
    """The request with numbers of stages and workers; unchanged where the schedule puts one stage on each worker.

    Args:
        places: stages that the model can be cut into at most.
        devices: of a described cluster.

    Raises:
        PlanError: the stages cannot be shared out, or the model has too few places to cut; names the field.
    """
    if not request.kind.several_stages:
        return request
    asked = request.asked_stages
    copies = _replicas_of_all(request)
    given = request.num_workers
    if given is not None and given % copies:
        raise PlanError(
            f"num_workers={given} with num_replicas={copies} and schedule={request.schedule!r}: workers that hold "
            f"several stages are used {copies} at a time. Set num_workers to a multiple of {copies}."
        )
    if devices is not None:
        groups = devices // copies
        if not groups:
            raise PlanError(f"num_replicas={copies} needs as many devices, but the cluster has {devices}.")
        workers = groups if asked is None else _of_devices(request, asked, groups)
    else:
        workers = given // copies if given else DEFAULT_WORKERS if asked is None else -(-asked // PER_WORKER)
    stages = PER_WORKER * workers if asked is None else asked
    if not _shares_out(request, stages, workers):
        raise _uneven(request, stages, devices, copies)
    if stages > places:
        raise _too_few_places(request, stages, workers, places)
    return dataclasses.replace(request, num_stages=stages, num_workers=copies * workers)


def _replicas_of_all(request: Request) -> int:
    """R, the same for all stages.

    Raises:
        PlanError: it is not; names the field.
    """
    given = request.replicas if isinstance(request.replicas, tuple) else (request.replicas or 1,)
    if len(set(given)) > 1:
        raise PlanError(
            f"num_replicas={given} with schedule={request.schedule!r}: workers that hold several stages have as many "
            f"replicas of each. Set num_replicas={max(given)}, or take a schedule with one stage on each worker."
        )
    return given[0]


def used_devices(request: Request, cluster: Cluster) -> Cluster:
    """The devices that a settled request takes of a described cluster, the first ones."""
    if not request.kind.several_stages:
        return cluster
    return Cluster(cluster.devices[: request.num_workers], cluster.links)


def single_notes(request: Request, num_stages: int) -> tuple[str, ...]:
    """A sentence where a schedule for several stages per worker gets one on each, or one worker for all."""
    workers = request.workers(num_stages)
    if not request.kind.several_stages or num_stages == 1:
        return ()
    if workers == 1:
        return (
            f"All {num_stages} stages are on one worker, so that nothing runs side by side; "
            f"num_stages={2 * num_stages} would take two workers.",
        )
    if workers < num_stages:
        return ()
    return (
        f"With one stage on each worker schedule={request.schedule!r} takes as long as '1f1b' and holds more "
        f"micro-batches; num_stages={PER_WORKER * num_stages} would leave workers less idle.",
    )


def idle_notes(request: Request, num_stages: int, num_microbatches: int) -> tuple[str, ...]:
    """A sentence where fewer micro-batches than workers leave some idle.

    None about zb-v: how far the parts of split backwards fill its bubble depends on their seconds.
    """
    workers = request.workers(num_stages)
    if num_microbatches >= workers or request.schedule == "zb-v":
        return ()
    what = f"{num_stages} stages" + (f" on {workers} workers" if workers < num_stages else "")
    more = min(4 * workers, microbatches(request, num_stages)[0])
    now, then = (smallest_bubble(num_stages, workers, count) for count in (num_microbatches, more))
    one = num_microbatches == 1
    counted = f"{num_microbatches} micro-batch{'es' * (not one)}"
    said = f"{counted} for {what} leave{'s' * one} workers idle {now:.0%} of the time"
    if more <= num_microbatches:
        return (f"{said}; a larger minibatch_size can be cut into more.",)
    allowed = ", where the loss allows several" * one  # nobody has asked it yet
    return (f"{said}; num_microbatches={more} would leave {then:.0%}{allowed}.",)


def rounds_of(request: Request, num_stages: int) -> Callable[[float], float] | None:
    """N -> times that a step takes what a worker needs for one micro-batch, of equal stages on free links.

    None where that is N + S - 1. Fewer micro-batches than workers wait for the whole pipeline to fill.
    """
    workers = request.workers(num_stages)
    each = num_stages / workers
    if request.schedule == "interleaved":  # as in plan_table.smallest_bubble
        return lambda n: max(n + (workers - 1) / each, (n + num_stages - 1) / each)
    if request.schedule == "zb-v":  # of six slots each, see schedule.zero_bubble_v
        return lambda n: max(6 * n + workers - 1, 3 * n + 4 * workers - 2) / 6
    return None


def _shares_out(request: Request, stages: int, workers: int) -> bool:
    return stages == PER_WORKER * workers if request.schedule == "zb-v" else stages % workers == 0


def _of_devices(request: Request, stages: int, devices: int) -> int:
    """As many of the devices as these stages can be shared out over, all where no number above one will do."""
    if _shares_out(request, stages, devices):
        return devices
    fewer = range(min(devices, stages // PER_WORKER), 1, -1)
    return next((workers for workers in fewer if _shares_out(request, stages, workers)), devices)


def _uneven(request: Request, stages: int, devices: int | None, copies: int) -> PlanError:
    which = f"the split points make {stages}" if request.split_points else f"num_stages={stages}"
    offered, several = devices or request.num_workers, "two" if request.schedule == "zb-v" else "as many"
    workers = offered and offered // copies
    text = f"schedule={request.schedule!r} puts {several} stages on every worker, but {which}"
    if workers is None:
        cure = ", or take schedule='interleaved'" if request.schedule == "zb-v" else ""
        cure = cure or ", or say in scaling_config how many workers share them (num_workers)"
        return PlanError(f"{text}, which is no multiple of 2: make it {stages + 1}{cure}.")
    shown = f"{offered} devices" if devices else f"num_workers={offered}"
    shown += f" with num_replicas={copies}" if copies > 1 else ""
    each = PER_WORKER if request.schedule == "zb-v" else max(PER_WORKER, -(-stages // workers))
    cure = f", or num_workers={stages // PER_WORKER * copies}" if stages % PER_WORKER == 0 and not devices else ""
    return PlanError(f"{text} for {shown}: make the stages {each * workers}{cure}.")


def _too_few_places(request: Request, stages: int, workers: int, places: int) -> PlanError:
    each = stages // workers
    fewer = (
        f"Set num_stages={places // each * each} and num_workers={places // each}, or take" if places >= each else ""
    )
    return PlanError(
        f"schedule={request.schedule!r} puts {each} stages on each of {workers} workers, which makes "
        f"num_stages={stages}, but the model can be cut into {places} at most. {fewer or 'Take'} schedule='1f1b', "
        "which needs one stage per worker."
    )

"""Choice of the numbers of stages and workers, for schedules that put several stages on each worker.

    num_stages  num_workers    becomes
    S           P              S / P on each of P
    S           not given      2 on each of S / 2
    not given   P              2 on each of P
    not given   not given      2 on each of 2

A described cluster need not be used in full: if the stages do not divide evenly over its devices, they are put on the
largest number of devices that holds two stages or more each. Workers given by num_workers are all used, because fewer
would silently leave some idle.

With R replicas of every stage, P counts groups of R workers, so that R P workers are used.
"""

from __future__ import annotations

import dataclasses

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import smallest_bubble
from raypipe.planner.search.request import DEFAULT_WORKERS, PER_WORKER, Request, microbatches


def settled_workers(request: Request, places: int, devices: int | None = None) -> Request:
    """Set num_stages and num_workers of a request; return it unchanged if its schedule puts one stage on each worker.

    Args:
        places: largest number of stages that the model can be cut into.
        devices: number of devices of a described cluster; None without one.

    Raises:
        PlanError: the stages do not divide over the workers, or the model has too few places to cut; names the field.
    """
    if not request.kind.several_stages:
        return request
    wanted = request.requested_stages
    copies = _replicas_of_all(request)
    offered = request.num_workers
    if offered is not None and offered % copies:
        raise PlanError(
            f"num_workers={offered} with num_replicas={copies} and schedule={request.schedule!r}: workers that hold "
            f"several stages are used {copies} at a time. Set num_workers to a multiple of {copies}."
        )
    if devices is not None:
        groups = devices // copies
        if not groups:
            raise PlanError(f"num_replicas={copies} needs as many devices, but the cluster has {devices}.")
        workers = groups if wanted is None else _of_devices(request, wanted, groups)
    else:
        workers = offered // copies if offered else DEFAULT_WORKERS if wanted is None else -(-wanted // PER_WORKER)
    stages = PER_WORKER * workers if wanted is None else wanted
    if not _shares_out(request, stages, workers):
        raise _uneven(request, stages, devices, copies)
    if stages > places:
        raise _too_few_places(request, stages, workers, places)
    return dataclasses.replace(request, num_stages=stages, num_workers=copies * workers)


def _replicas_of_all(request: Request) -> int:
    """Return the number of replicas that every stage has; raise PlanError if it differs between stages."""
    counts = request.replicas if isinstance(request.replicas, tuple) else (request.replicas or 1,)
    if len(set(counts)) > 1:
        raise PlanError(
            f"num_replicas={counts} with schedule={request.schedule!r}: workers that hold several stages have as many "
            f"replicas of each. Set num_replicas={max(counts)}, or take a schedule with one stage on each worker."
        )
    return counts[0]


def used_devices(request: Request, cluster: Cluster) -> Cluster:
    """Return the cluster with only its first devices, as many as a request from ``settled_workers`` uses."""
    if not request.kind.several_stages:
        return cluster
    return Cluster(cluster.devices[: request.num_workers], cluster.links)


def single_notes(request: Request, num_stages: int) -> tuple[str, ...]:
    """Return a note if a schedule for several stages per worker gets as many workers as stages, or one; else ()."""
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
    """Return a note if there are fewer micro-batches than workers, so that some workers are idle; else ().

    There is no such note for zb-v, because its idle time depends on the seconds of the parts of its split backwards.
    """
    workers = request.workers(num_stages)
    if num_microbatches >= workers or request.schedule == "zb-v":
        return ()
    what = f"{num_stages} stages" + (f" on {workers} workers" if workers < num_stages else "")
    more = min(4 * workers, microbatches(request, num_stages)[0])
    now, then = (smallest_bubble(num_stages, workers, count) for count in (num_microbatches, more))
    one = num_microbatches == 1
    counted = f"{num_microbatches} micro-batch{'es' * (not one)}"
    text = f"{counted} for {what} leave{'s' * one} workers idle {now:.0%} of the time"
    if more <= num_microbatches:
        return (f"{text}; a larger minibatch_size can be cut into more.",)
    allowed = ", where the loss allows several" * one  # the loss is checked later
    return (f"{text}; num_microbatches={more} would leave {then:.0%}{allowed}.",)


def _shares_out(request: Request, stages: int, workers: int) -> bool:
    return stages == PER_WORKER * workers if request.schedule == "zb-v" else stages % workers == 0


def _of_devices(request: Request, stages: int, devices: int) -> int:
    """Return the largest number of devices over which the stages divide evenly; all devices if that is only one."""
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
        cure = cure or ", or set num_workers in scaling_config"
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

"""Shortage of workers: finds out why the cluster has no room for them, and what holds its resources.

source                     holders of resources that it lists                  served by
placement_group_table()    runs of raypipe, and other placement groups         Ray's control plane, which always runs
ray.util.state             actors and tasks outside of groups, jobs            Ray's dashboard, which may not run

Ray has no public interface that shows if an autoscaler may add nodes. The head node always runs Ray's monitor, whose
report has a type for each node (Ray 2.60): ``node_<id>`` without an autoscaler, a type of its configuration with one.
If there is no report, the cluster counts as one without an autoscaler.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from raypipe.errors import PlanError
from raypipe.runtime.worker.places import AWAY, PLACE_TIMEOUT_S, PREFIX, actor_name, in_words, is_driver, release, room

ANSWER_S = 3
POLL_S = 0.25
MOST_ROWS = 1000
MOST_NAMED = 3


class Shortage(NamedTuple):
    """Reason why there are too few workers.

    Attributes:
        reason: clause for messages: the cluster's resources and their largest holders.
        fits: number of workers for which the cluster would have room if it were empty; None if Ray does not answer.
        scaled: True if an autoscaler may add nodes.
        yields: True if this run should release its placement groups, because another run, whose name sorts before the
            name of this run, has only some of the groups that it needs and waits for the others.
    """

    reason: str
    fits: int | None = None
    scaled: bool = False
    yields: bool = False


NO_ANSWER = Shortage("the cluster does not answer")
"""Result of ``shortage`` while Ray does not answer; compared with ``is``."""


def shortage(needs: Mapping[str, float], count: int, owner: str) -> Shortage:
    """Find out why the cluster has no room for ``count`` workers.

    The queries take a few seconds, or longer if Ray is away.

    Args:
        needs: resources of one worker.
        count: number of all workers that the run needs.
        owner: name of this run's driver.
    """
    try:
        scaled, fits = has_autoscaler(), _fits(needs)
        reason = f"the cluster has {room(needs)}"
        if fits < count:
            joins = "so its autoscaler has to add nodes" if scaled else "so a node has to join"
            much = (
                f"room for {fits} such worker{'s' * (fits > 1)} if it is empty" if fits else "no room for such a worker"
            )
            reason += f" and {much}, {joins}"
        return Shortage(reason + _held(holders(needs, owner)), fits, scaled, _yields(owner))
    except AWAY:
        return NO_ANSWER


def wait_for(
    places: Mapping[int, PlacementGroup],
    needs: Mapping[str, float],
    owner: str,
    patience_s: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until all of these placement groups are created.

    Args:
        places: placement groups, by the number of the member.
        needs, owner: see ``shortage``.
        patience_s: timeout of the whole wait; None for PLACE_TIMEOUT_S.
        stopped: polled during the wait; the wait ends once ``stopped`` returns True.

    Raises:
        PlanError: a group was not created in time; all of them are removed. The message names the cluster's resources
            and their holders.
    """
    patience_s = PLACE_TIMEOUT_S if patience_s is None else patience_s
    deadline_s = time.monotonic() + patience_s
    for got, (number, group) in enumerate(places.items()):
        while not (created := group.wait(min(POLL_S, max(deadline_s - time.monotonic(), 0.01)))):
            if stopped() or time.monotonic() >= deadline_s:
                break
        if created:
            continue
        short = shortage(needs, len(places), owner)
        release(list(places.values()))
        raise PlanError(
            f"Worker {number} found no place within {patience_s:g} s: each of the {len(places)} workers "
            f"needs {in_words(needs)}, {got} got it, and {short.reason}. Add nodes, lower num_stages (and "
            "num_workers with it), or lower ScalingConfig(resources_per_worker=...)."
        )


def holders(needs: Mapping[str, float], owner: str) -> list[str]:
    """Describe the largest holders of scarce resources, except this run, in at most MOST_NAMED + 1 phrases.

    A resource is scarce if less of it is free than one worker needs. If no resource is scarce, all count as scarce.

    Args:
        needs: resources of one worker.
        owner: name of this run's driver.
    """
    free = ray.available_resources()
    scarce = [name for name, amount in needs.items() if free.get(name, 0.0) < amount] or list(needs)
    jobs = _entrypoints()
    amounts: dict[tuple[str, str, str], Counter[str]] = {}
    counts: Counter[tuple[str, str, str]] = Counter()
    for (kind, name, job), resources in [*_groups(owner), *_rows("list_actors"), *_rows("list_tasks")]:
        held = {name: amount for name, amount in resources.items() if name in scarce and amount > 0}
        if held:
            key = kind, name, job and f" of job {job}" + (f" ({jobs[job]})" if job in jobs else "")
            amounts.setdefault(key, Counter()).update(held)
            counts[key] += 1
    most = sorted(amounts, key=lambda key: [-amounts[key][name] for name in scarce])
    named = [
        f"{f'{counts[key]} {key[0]}s' if counts[key] > 1 and key[0] != 'run' else key[0]}{key[1]}{key[2]} with "
        + ", ".join(f"{amounts[key][name]:g} {name}" for name in scarce if amounts[key][name])
        for key in most
    ]
    more = len(named) - MOST_NAMED
    return [*named[:MOST_NAMED], f"{more} more"] if more > 1 else named


def _yields(owner: str) -> bool:
    """Return True if another run, whose driver's name sorts before ``owner``, waits with a part of its groups.

    Such a run has pending placement groups, and created groups without an actor. Two such runs would wait for each
    other for ever, so one of them has to release its groups.
    """
    actors = {row["name"] for row in ray.util.list_named_actors(all_namespaces=True)}
    held, waits = set(), set()
    for group in placement_group_table().values():
        driver, _, number = group["name"].rpartition("/")
        if is_driver(driver) and driver < owner and number.isdigit():
            if group["state"] == "PENDING":
                waits.add(driver)
            elif group["state"] == "CREATED" and actor_name(driver, int(number)) not in actors:
                held.add(driver)
    return bool(held & waits)


def _held(by: Sequence[str]) -> str:
    return f"; held by {', '.join(by[:-1])}{' and ' * (len(by) > 1)}{by[-1]}" if by else ""


def _fits(needs: Mapping[str, float]) -> int:
    """Return the number of workers with these ``needs`` for which the living nodes would have room if empty."""
    totals = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    each = [min(total.get(name, 0.0) / amount for name, amount in needs.items()) for total in totals if needs]
    return sum(math.floor(count + 1e-6) for count in each)


Row = tuple[tuple[str, str, str], Mapping[str, float]]
"""Holder of resources: ((kind, name, job id), amounts by resource)."""


def _groups(owner: str) -> list[Row]:
    """List created placement groups, except this driver's, with the resources that they hold."""
    jobs = {group.placement_group_id: group.creator_job_id for group in _listed("list_placement_groups")}
    rows: list[Row] = []
    for group in placement_group_table().values():
        driver = group["name"].rpartition("/")[0]
        if group["state"] != "CREATED" or (owner and driver == owner):
            continue
        resources: Counter[str] = Counter()
        for bundle in group["bundles"].values():
            resources.update(bundle)
        if driver and is_driver(driver):
            rows.append((("run", f" {driver.removeprefix(PREFIX)!r}", ""), resources))
        else:
            name, job = group["name"], jobs.get(group["placement_group_id"], "")
            rows.append((("placement group", f" {name!r}" if name else "", job), resources))
    return rows


def _rows(listing: str) -> list[Row]:
    """List the living actors or the running tasks of this cluster, with the resources that each requires.

    Calls of actor methods are left out: their actor is listed instead.

    Args:
        listing: name of a function of ``ray.util.state``: "list_actors" or "list_tasks".
    """
    state, kind = ("ALIVE", "actor") if listing == "list_actors" else ("RUNNING", "task")
    nodes = {node["NodeID"] for node in ray.nodes()}
    rows: list[Row] = []
    for one in _listed(listing, ("state", "=", state)):
        # The environment may direct Ray's client to the dashboard of another cluster.
        if one.node_id not in nodes or getattr(one, "type", "") == "ACTOR_TASK":
            continue
        name = f" {one.class_name}" if kind == "actor" else f" {one.name}"
        if kind == "actor" and one.name:
            name += f" {one.name!r}"
        rows.append(((kind, name, one.job_id or ""), one.required_resources or {}))
    return rows


def _entrypoints() -> dict[str, str]:
    """Return the command of each job, by job id: program and script, without arguments, which may contain secrets."""
    scripts = {}
    for job in _listed("list_jobs"):
        words = (job.entrypoint or "").split()
        script = next((at for at, word in enumerate(words[1:], 1) if not word.startswith("-")), 0)
        if job.job_id and words:
            scripts[job.job_id] = " ".join(words[: script + 1])
    return scripts


def _listed(listing: str, *filters: tuple[str, str, str]) -> list[Any]:
    """List rows of Ray's state API, which the dashboard serves; return an empty list if the request fails.

    Args:
        listing: name of a function of ``ray.util.state``.
        filters: conditions on the rows, as (column, operator, value).
    """
    try:
        query: Callable[..., list[Any]] = getattr(importlib.import_module("ray.util.state"), listing)
        return query(
            ray.get_runtime_context().gcs_address, filters=list(filters), limit=MOST_ROWS, timeout=ANSWER_S,
            detail=True, raise_on_missing_output=False,
        )  # fmt: skip
    except Exception:  # noqa: BLE001  (an alpha interface, over HTTP: the message has fewer details then)
        return []


STATUS_TIMEOUT_S = 5
_STATUS = b"__autoscaling_status"
_COUNTS_ONLY = "node_"


def has_autoscaler() -> bool:
    """Return True if an autoscaler may add nodes to the cluster, and False if not, or if this cannot be determined."""
    try:
        address = ray.get_runtime_context().gcs_address
        return any(not name.startswith(_COUNTS_ONLY) for name in _of_monitor(address) | _of_second_version(address))
    except Exception:  # noqa: BLE001  (private parts of Ray, which may differ in the next release)
        return False


def _of_monitor(address: str) -> set[str]:
    """Return the names of the node types in the report of the autoscaler's first version (``ray up``, KubeRay)."""
    client: Any = importlib.import_module("ray._raylet").GcsClient(address=address)
    report = (
        json.loads(client.internal_kv_get(_STATUS, None, timeout=STATUS_TIMEOUT_S) or b"{}").get("autoscaler_report")
        or {}
    )
    return set(report.get("active_nodes") or {})


def _of_second_version(address: str) -> set[str]:
    """Return the names of the node types that the autoscaler's second version reports; empty if it does not run."""
    status: Any = importlib.import_module("ray.autoscaler.v2.sdk").get_cluster_status(address, timeout=STATUS_TIMEOUT_S)
    if status.stats.autoscaler_version in (None, "0"):  # it has reported nothing
        return set()
    nodes = [*status.active_nodes, *status.idle_nodes, *status.pending_nodes]
    return {str(node.ray_node_type_name) for node in nodes}

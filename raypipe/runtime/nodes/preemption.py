"""Preemption: reads clouds' notices and Ray's list of draining nodes, and requests that stages leave such nodes.

    AWS      spot/instance-action: {"action": "terminate", "time": ...}, two minutes before; a recommendation to
             rebalance, perhaps earlier
    GCP      preempted: TRUE, 30 s before; maintenance-event, a minute before and only if it is queried
    Azure    scheduledevents: Preempt, Reboot and the like with NotBefore, 30 s before or earlier

    look = cloud_here()          a function that reads the notices of this machine's cloud; None without a cloud
    watch_notices(look, ...)     calls ``look`` repeatedly, and delivers every notice once
    Announced()                  runs both in a thread of one process on each node (node_watch.py)
    DrainWatch(...)              a thread of the driver, with these reactions:

    Ray's list has a node of this run                  --> event "drain", call ``leave``
    the cloud announces that a machine goes            --> event "drain", drain the node in Ray, call ``leave``
    ... that it pauses, or may be taken later          --> event "notice"
    a node that goes is the driver's                   --> call ``driver_goes`` too, even without stages on the node

``look`` sends one or two small requests to an address that only this machine reaches, and needs no cloud's library.
``RAYPIPE_METADATA_SERVER`` in a node's environment replaces the address; if it is empty, no requests are made.

Ray has no public interface for draining nodes. Ray Train reads the same list, and ``ray drain-node`` writes to it (Ray
2.60). If a Ray release lacks these calls, the list is empty, and ``drain_node`` returns that as the reason. Ray starts
no new actors on a draining node. Existing actors continue, also after the deadline, which is only a hint.

Sources: EC2 user guide "Spot Instance interruption notices"; Compute Engine "Query the metadata server for maintenance
event notices"; Azure "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from datetime import datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from http.client import HTTPException
from typing import Any, NamedTuple

import ray

from raypipe.runtime.worker.places import AWAY

SERVER = "http://169.254.169.254"
ASKED = "RAYPIPE_METADATA_SERVER"
EVERY_S = 5.0
"""Seconds between two reads of the notices, as AWS recommends."""
ANSWER_S = 2.0
MOST_BYTES = 1 << 16
KEPT = 64
"""Number of notices that are kept for one machine."""
GCP_PREEMPTED_S = 30.0
GCP_MAINTENANCE_S = 60.0
AZURE_API = "2020-07-01"


class NoticeKind(StrEnum):
    """Kind of an announced event."""

    GOES = "goes"
    """The machine, or everything that runs on it, ends at the deadline."""
    PAUSES = "pauses"
    """The machine pauses for seconds, and resumes."""
    AT_RISK = "at risk"
    """The machine may be taken soon, at an unknown time."""


class Notice(NamedTuple):
    """Notice of a cloud that something will happen to one machine.

    Attributes:
        kind: what will happen to the machine.
        deadline_s: earliest time of the event, in Unix seconds; None if unknown.
        reason: name of the cloud and its text.
    """

    kind: NoticeKind
    deadline_s: float | None
    reason: str


NoticeReader = Callable[[float], list[Notice] | None]
"""Reader of notices: (seconds) -> current notices, or None if the metadata server does not answer. If the server
supports it, the call waits up to that many seconds for a new notice."""

# No proxy of the environment: from there, the same address reaches another machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _Answer(NamedTuple):
    text: str
    headers: Mapping[str, str]


def aws(server: str = SERVER) -> NoticeReader:
    """Create a reader of the notices for an EC2 spot instance.

    The reader requests a session token (IMDSv2) at every read.
    """
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}

    def look(wait_s: float) -> list[Notice] | None:
        token = _request(f"{server}/latest/api/token", lifetime, method="PUT")
        if token is None:
            return None
        headers = {"X-aws-ec2-metadata-token": token.text}
        notices = []
        if action := _json(_request(f"{server}/latest/meta-data/spot/instance-action", headers)):
            when = str(action.get("time", ""))
            notices.append(
                Notice(NoticeKind.GOES, _iso_s(when), f"AWS: {action.get('action', 'interrupted')} at {when}")
            )
        if advice := _json(_request(f"{server}/latest/meta-data/events/recommendations/rebalance", headers)):
            notices.append(
                Notice(NoticeKind.AT_RISK, None, f"AWS: rebalance recommended at {advice.get('noticeTime', '')}")
            )
        return notices

    return look


def gcp(server: str = SERVER, clock: Callable[[], float] = time.time) -> NoticeReader:
    """Create a reader of the notices for a Compute Engine machine; a preemption ends the reader's wait at once.

    Args:
        clock: returns the time in Unix seconds. Deadlines are estimated from it, because the server does not send them.
    """
    headers = {"Metadata-Flavor": "Google"}
    instance = f"{server}/computeMetadata/v1/instance"
    etag = "0"  # of no answer, so that the server answers the first request at once

    def look(wait_s: float) -> list[Notice] | None:
        nonlocal etag
        waiting = f"wait_for_change=true&timeout_sec={max(1, round(wait_s))}&last_etag={etag}"
        preempted = _request(f"{instance}/preempted?{waiting}", headers, wait_s=wait_s)
        maintenance = _request(f"{instance}/maintenance-event", headers)
        if preempted is None:
            return None
        etag = preempted.headers.get("ETag", "0")
        notices = []
        if preempted.text == "TRUE":
            notices.append(Notice(NoticeKind.GOES, clock() + GCP_PREEMPTED_S, "GCP: preempted"))
        if maintenance is not None and maintenance.text not in ("", "NONE"):
            kind = NoticeKind.GOES if maintenance.text.startswith("TERMINATE") else NoticeKind.PAUSES
            notices.append(Notice(kind, clock() + GCP_MAINTENANCE_S, f"GCP: {maintenance.text}"))
        return notices

    return look


def azure(server: str = SERVER, clock: Callable[[], float] = time.time) -> NoticeReader:
    """Create a reader of the scheduled events for an Azure machine; events of other machines in its group are left out.

    Args:
        clock: returns the time in Unix seconds, which becomes the deadline of an event that has begun.
    """
    headers = {"Metadata": "true"}
    name = ""

    def look(wait_s: float) -> list[Notice] | None:
        nonlocal name
        if not name:
            answer = _request(f"{server}/metadata/instance/compute/name?api-version={AZURE_API}&format=text", headers)
            name = answer.text if answer is not None else ""
        answer = _request(f"{server}/metadata/scheduledevents?api-version={AZURE_API}", headers, wait_s=10.0)
        if answer is None:
            return None
        listed = (_json(answer) or {}).get("Events", [])
        events = [event for event in listed if isinstance(event, dict)] if isinstance(listed, list) else []
        return [_azure_notice(event, clock()) for event in events if name in event.get("Resources", ())]

    return look


def _azure_notice(event: Mapping[str, Any], now_s: float) -> Notice:
    what, not_before = str(event.get("EventType", "")), str(event.get("NotBefore", ""))
    try:
        deadline_s = parsedate_to_datetime(not_before).timestamp() if not_before else now_s  # it has begun
    except ValueError:
        deadline_s = now_s
    words = f"Azure: {what} {event.get('EventId', '')} {event.get('Description', '')}"
    return Notice(NoticeKind.PAUSES if what == "Freeze" else NoticeKind.GOES, deadline_s, " ".join(words.split()))


def cloud_here(server: str = SERVER) -> NoticeReader | None:
    """Return the reader for this machine's cloud; None if no metadata server answers, which takes a few seconds."""
    token = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    if _request(f"{server}/latest/api/token", token, method="PUT") is not None:
        return aws(server)
    preempted = _request(f"{server}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if preempted is not None and preempted.headers.get("Metadata-Flavor") == "Google":
        return gcp(server)
    if _request(f"{server}/metadata/instance/compute/name?api-version={AZURE_API}&format=text", {"Metadata": "true"}):
        return azure(server)
    return None


def watch_notices(
    look: NoticeReader, deliver: Callable[[Notice], None], stop: threading.Event, every_s: float = EVERY_S
) -> None:
    """Read notices every ``every_s`` seconds until ``stop`` is set, and call ``deliver`` once for each new notice.

    A notice that the cloud withdraws and later repeats is delivered again.
    """
    known: set[tuple[NoticeKind, str]] = set()
    while not stop.is_set():
        begin_s = time.monotonic()
        notices = look(every_s)
        for notice in notices or ():
            if (notice.kind, notice.reason) not in known:
                deliver(notice)
        if notices is not None:
            known = {(notice.kind, notice.reason) for notice in notices}
        stop.wait(max(0.0, every_s - (time.monotonic() - begin_s)))


class Announced:
    """Notices of the cloud for this machine since this object was created, collected by a thread.

    Args:
        environment: environment variables; None for os.environ. RAYPIPE_METADATA_SERVER replaces the address of the
            metadata server; if it is empty, nothing is collected.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        server = (os.environ if environment is None else environment).get(ASKED, SERVER)
        self._notices: deque[Notice] = deque(maxlen=KEPT)
        self._stop = threading.Event()
        if server:
            threading.Thread(target=self._run, args=(server,), name="raypipe cloud notices", daemon=True).start()

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Newest notices, at most KEPT, in order of arrival."""
        return tuple(self._notices)

    def close(self) -> None:
        """Stop the thread, without waiting for a request under way."""
        self._stop.set()

    def _run(self, server: str) -> None:
        look = cloud_here(server)
        if look is not None:
            watch_notices(look, self._notices.append, self._stop)


def _request(url: str, headers: Mapping[str, str], *, method: str = "GET", wait_s: float = 0.0) -> _Answer | None:
    """Send a request to a metadata server; return None if there is no server, or if it answers with an error.

    An error such as 404 means that nothing is announced.

    Args:
        wait_s: seconds that the server may take beyond ANSWER_S.
    """
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _OPENER.open(request, timeout=wait_s + ANSWER_S) as answer:
            return _Answer(answer.read(MOST_BYTES).decode("utf-8", "replace").strip(), answer.headers)
    except (OSError, HTTPException):  # URLError and HTTPError are OSErrors
        return None


def _json(answer: _Answer | None) -> dict[str, Any] | None:
    try:
        parsed = json.loads(answer.text) if answer is not None else None
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _iso_s(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def draining_nodes() -> dict[str, float | None]:
    """Return {Ray's id of a draining node: its deadline in Unix seconds, or None if it has no deadline}.

    The deadline was set by the clock of the process that requested the drain.
    """
    state = getattr(_module("ray._private.state"), "state", None)
    ask = getattr(state, "get_draining_nodes", None)
    if ask is None:
        return {}
    return {str(node): deadline_ms / 1e3 if deadline_ms else None for node, deadline_ms in ask().items()}


def drain_node(node: str, reason: str, deadline_s: float | None) -> str:
    """Drain a node in Ray, so that no new actor is placed on it.

    Args:
        node: Ray's id of the node, in hexadecimal digits.
        reason: text that Ray shows.
        deadline_s: Unix seconds at which the node goes; None if unknown.

    Returns:
        "" if Ray has accepted the drain, else the reason why not.
    """
    client: Any = getattr(_module("ray._raylet"), "GcsClient", None)
    reasons: Any = getattr(_module("ray.core.generated.autoscaler_pb2"), "DrainNodeReason", None)
    gcs: Any = None if client is None else client(address=ray.get_runtime_context().gcs_address)
    if not hasattr(gcs, "drain_node") or reasons is None:
        return f"Ray {ray.__version__} has no interface for it that raypipe knows"
    preempted = reasons.Value("DRAIN_NODE_REASON_PREEMPTION")  # a drain that Ray accepts for busy nodes too
    accepted, refusal = gcs.drain_node(node, preempted, reason, int((deadline_s or 0.0) * 1e3))
    return "" if accepted else str(refusal) or "Ray refused without a reason"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


DRAINS_EVERY_S = 1.0


class DrainWatch:
    """Watch for nodes that are about to go, in a thread of the driver, until ``close``.

    Args:
        nodes: returns Ray's ids of the nodes on which the run has workers now.
        announced: returns the notices of clouds so far, by Ray's node id.
        leave: called with the ids of nodes that are about to go and have workers; once for each node.
        event: called with (decision, reason, ...) to record an event of the run.
        here: Ray's id of the driver's node.
        driver_goes: called once, after ``leave``, if the driver's node is about to go, with (deadline, reason). The
            deadline is in Unix seconds, or None. The reason is why Ray would restart the driver on the same node; ""
            if Ray would not.

    Attributes:
        going: {Ray's id of a node that is about to go: its deadline in Unix seconds, or None if unknown}.
    """

    def __init__(
        self,
        nodes: Callable[[], Set[str]],
        announced: Callable[[], Mapping[str, Sequence[Notice]]],
        leave: Callable[[Collection[str]], None],
        event: Callable[..., None],
        here: str = "",
        driver_goes: Callable[[float | None, str], None] = lambda deadline_s, stays: None,
    ) -> None:
        self._nodes, self._announced, self._leave, self._event = nodes, announced, leave, event
        self._here, self._driver_goes, self._looked = here, driver_goes, False
        self.going: Mapping[str, float | None] = {}
        self._handled: set[tuple[str, Notice]] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raypipe drains", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(DRAINS_EVERY_S)

    def _watch(self) -> None:
        complaint: type[Exception] | None = None
        pause_s = 0.0  # the first look finds nodes that were draining before this driver began
        while not self._ended.wait(pause_s):
            pause_s = DRAINS_EVERY_S
            try:
                self._look()
            except Exception as error:  # noqa: BLE001  (whatever it is, the next look may work)
                if type(error) is not complaint:
                    complaint = type(error)
                    self._event(
                        "warning", f"The nodes that are about to go are not known; the next look tries again: {error!r}"
                    )

    def _look(self) -> None:
        for node, notices in self._announced().items():
            for notice in notices:
                self._on_notice(node, notice)
        try:
            draining = draining_nodes()
        except AWAY:
            return  # not a look: nodes that drain already are still unknown
        ours = {*self._nodes(), self._here}
        new = {node for node in draining if node in ours} - set(self.going)
        first, self._looked = not self._looked, True
        if not new:
            return
        self.going = {**self.going, **{node: draining[node] for node in new}}
        deadlines = [s for node in new if (s := draining[node]) is not None]
        self._event("drain", f"Ray drains {', '.join(sorted(new))}", **_numbers(min(deadlines, default=None)))
        self._move_away(new, "Ray has started it on a node that was to go already" if first else "")

    def _on_notice(self, node: str, notice: Notice) -> None:
        """Handle a cloud's notice for a node; do nothing if the notice was handled before.

        A node that is about to go is drained in Ray before stages leave it, so that Ray starts no new worker on it.
        """
        if (node, notice) in self._handled:
            return
        self._handled.add((node, notice))
        numbers = {"node": node, **_numbers(notice.deadline_s)}
        if notice.kind is not NoticeKind.GOES:
            self._event("notice", f"{notice.reason}: the machine {notice.kind}", **numbers)
            return
        known = node in self.going
        self.going = {**self.going, node: notice.deadline_s}
        if refused := _refused(node, notice):
            numbers["ray"] = refused
        self._event("drain", notice.reason, **numbers)
        if not known:
            self._move_away({node}, refused and "Ray does not take the node for one that goes")

    def _move_away(self, nodes: Collection[str], stays: str) -> None:
        """Call ``leave`` with those ``nodes`` that have workers, and ``driver_goes`` if one is the driver's node.

        ``stays`` is the reason that is passed to ``driver_goes``.
        """
        if with_workers := self._nodes() & set(nodes):
            self._leave(with_workers)
        if self._here in nodes:
            self._driver_goes(self.going[self._here], stays)


def _refused(node: str, notice: Notice) -> str:
    try:
        return drain_node(node, notice.reason, notice.deadline_s)
    except AWAY as error:
        return f"Ray did not answer: {error}"


def _numbers(deadline_s: float | None) -> dict[str, Any]:
    """Format a deadline in Unix seconds as fields of events.jsonl."""
    if deadline_s is None:
        return {}
    return {"deadline_s": round(deadline_s, 1), "seconds_left": round(deadline_s - time.time(), 1)}

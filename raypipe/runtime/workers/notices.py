"""What a cloud tells a machine before it takes it away, from the machine's own metadata server.

    AWS      spot/instance-action: {"action": "terminate", "time": ...}, two minutes before; a recommendation to
             rebalance, perhaps earlier
    GCP      preempted: TRUE, 30 s before; maintenance-event, a minute before and only to who asks for it
    Azure    scheduledevents: Preempt, Reboot and the like with NotBefore, 30 s before or earlier

    look = cloud_here()          which of them answers; None elsewhere
    watch(look, tell, stop)      every notice once
    Announced()                  both in a thread of one process on each node (node_watch.py)

A look is one or two small requests to an address that only this machine reaches. It needs no library of a cloud's.
``RAYPIPE_METADATA_SERVER`` in a node's environment names another address than the clouds'; where it is empty, nobody is
asked.
Sources: EC2 user guide "Spot Instance interruption notices"; Compute Engine "Query the metadata server for maintenance
event notices"; Azure "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from http.client import HTTPException
from typing import Any, NamedTuple

__all__ = ["ASKED", "SERVER", "Announced", "Kind", "Look", "Notice", "aws", "azure", "cloud_here", "gcp", "watch"]

SERVER = "http://169.254.169.254"
ASKED = "RAYPIPE_METADATA_SERVER"
EVERY_S = 5.0
"""As AWS recommends."""
ANSWER_S = 2.0
MOST_BYTES = 1 << 16
KEPT = 64
"""Notices that are remembered of one machine."""
GCP_PREEMPTED_S = 30.0
GCP_MAINTENANCE_S = 60.0
AZURE_API = "2020-07-01"


class Kind(StrEnum):
    """What is going to happen to the machine."""

    GOES = "goes"
    """It, or everything that runs on it, ends at the deadline."""
    PAUSES = "pauses"
    """It stands still for seconds, and goes on."""
    AT_RISK = "at risk"
    """It may be taken soon; nobody has said when."""


class Notice(NamedTuple):
    """What a cloud has said.

    Attributes:
        deadline_s: Unix time from which on it may happen; None where nobody said.
        reason: in the cloud's words.
    """

    kind: Kind
    deadline_s: float | None
    reason: str


Look = Callable[[float], list[Notice] | None]
"""(seconds) -> what is announced now; None where the server does not answer. It may wait so long for news, where the
server can tell of them at once."""

# An environment's proxy must not be asked for an address that means another machine there.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _Answer(NamedTuple):
    text: str
    headers: Mapping[str, str]


def aws(server: str = SERVER) -> Look:
    """Looks at the notices of an EC2 spot instance, with a session token (IMDSv2)."""
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}

    def look(wait_s: float) -> list[Notice] | None:
        token = _ask(f"{server}/latest/api/token", lifetime, method="PUT")
        if token is None:
            return None
        headers = {"X-aws-ec2-metadata-token": token.text}
        found = []
        if action := _json(_ask(f"{server}/latest/meta-data/spot/instance-action", headers)):
            when = str(action.get("time", ""))
            found.append(Notice(Kind.GOES, _iso_s(when), f"AWS: {action.get('action', 'interrupted')} at {when}"))
        if advice := _json(_ask(f"{server}/latest/meta-data/events/recommendations/rebalance", headers)):
            found.append(Notice(Kind.AT_RISK, None, f"AWS: rebalance recommended at {advice.get('noticeTime', '')}"))
        return found

    return look


def gcp(server: str = SERVER, clock: Callable[[], float] = time.time) -> Look:
    """Looks at the notices of a Compute Engine machine; of its preemption it is told at once.

    Args:
        clock: Unix seconds, for the deadlines, which the server does not say.
    """
    headers = {"Metadata-Flavor": "Google"}
    instance = f"{server}/computeMetadata/v1/instance"
    etag = "0"  # of no answer, so that the first one comes at once

    def look(wait_s: float) -> list[Notice] | None:
        nonlocal etag
        waiting = f"wait_for_change=true&timeout_sec={max(1, round(wait_s))}&last_etag={etag}"
        preempted = _ask(f"{instance}/preempted?{waiting}", headers, wait_s=wait_s)
        maintenance = _ask(f"{instance}/maintenance-event", headers)
        if preempted is None:
            return None
        etag = preempted.headers.get("ETag", "0")
        found = []
        if preempted.text == "TRUE":
            found.append(Notice(Kind.GOES, clock() + GCP_PREEMPTED_S, "GCP: preempted"))
        if maintenance is not None and maintenance.text not in ("", "NONE"):
            kind = Kind.GOES if maintenance.text.startswith("TERMINATE") else Kind.PAUSES
            found.append(Notice(kind, clock() + GCP_MAINTENANCE_S, f"GCP: {maintenance.text}"))
        return found

    return look


def azure(server: str = SERVER, clock: Callable[[], float] = time.time) -> Look:
    """Looks at the scheduled events of an Azure machine; those of others in its group are left out.

    Args:
        clock: Unix seconds, for the deadline of what has begun.
    """
    headers = {"Metadata": "true"}
    name = ""

    def look(wait_s: float) -> list[Notice] | None:
        nonlocal name
        if not name:
            found = _ask(f"{server}/metadata/instance/compute/name?api-version={AZURE_API}&format=text", headers)
            name = found.text if found is not None else ""
        answer = _ask(f"{server}/metadata/scheduledevents?api-version={AZURE_API}", headers, wait_s=10.0)
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
    return Notice(Kind.PAUSES if what == "Freeze" else Kind.GOES, deadline_s, " ".join(words.split()))


def cloud_here(server: str = SERVER) -> Look | None:
    """The look of the cloud that this machine belongs to; None where no metadata server answers, after some seconds."""
    token = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    if _ask(f"{server}/latest/api/token", token, method="PUT") is not None:
        return aws(server)
    found = _ask(f"{server}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    if found is not None and found.headers.get("Metadata-Flavor") == "Google":
        return gcp(server)
    if _ask(f"{server}/metadata/instance/compute/name?api-version={AZURE_API}&format=text", {"Metadata": "true"}):
        return azure(server)
    return None


def watch(look: Look, tell: Callable[[Notice], None], stop: threading.Event, every_s: float = EVERY_S) -> None:
    """Tell of every notice once, until ``stop`` is set. What a cloud takes back and announces again is told again.

    Args:
        every_s: seconds from one look to the next.
    """
    known: set[tuple[Kind, str]] = set()
    while not stop.is_set():
        begin_s = time.monotonic()
        found = look(every_s)
        for notice in found or ():
            if (notice.kind, notice.reason) not in known:
                tell(notice)
        if found is not None:
            known = {(notice.kind, notice.reason) for notice in found}
        stop.wait(max(0.0, every_s - (time.monotonic() - begin_s)))


class Announced:
    """What the cloud has announced for this machine since this object was made; a thread asks, and nobody waits for it.

    Args:
        environment: instead of os.environ.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        server = (os.environ if environment is None else environment).get(ASKED, SERVER)
        self._found: deque[Notice] = deque(maxlen=KEPT)
        self._stop = threading.Event()
        if server:
            threading.Thread(target=self._run, args=(server,), name="raypipe cloud notices", daemon=True).start()

    @property
    def notices(self) -> tuple[Notice, ...]:
        """In the order in which they came."""
        return tuple(self._found)

    def close(self) -> None:
        """Ask no more; a question that is under way is not waited for."""
        self._stop.set()

    def _run(self, server: str) -> None:
        look = cloud_here(server)
        if look is not None:
            watch(look, self._found.append, self._stop)


def _ask(url: str, headers: Mapping[str, str], *, method: str = "GET", wait_s: float = 0.0) -> _Answer | None:
    """The answer; None where there is none: nothing is announced, or nobody is there.

    Args:
        wait_s: that the server may take beyond what it usually does.
    """
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _OPENER.open(request, timeout=wait_s + ANSWER_S) as answer:
            return _Answer(answer.read(MOST_BYTES).decode("utf-8", "replace").strip(), answer.headers)
    except (OSError, HTTPException):  # URLError and HTTPError are OSErrors
        return None


def _json(answer: _Answer | None) -> dict[str, Any] | None:
    try:
        found = json.loads(answer.text) if answer is not None else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _iso_s(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None

"""Liveness on the driver's side: a thread sends heartbeat requests to all members of a fleet, and kills hung ones.

    every HEARTBEAT_S   send heartbeat(term, lease_s) to every member, which renews the member's lease
    every LOOK_S        read process states from each node's watcher (node_watch.py), and judge every member by them and
                        its heartbeat (the table in planner/liveness.py)
    member hangs        mark it lost with the reason, and kill its process, which ends all calls to it
    heartbeat is None   a later driver has taken the member over: stop watching
    after UNUSED_S      end the watcher of a node without members, which would keep a draining node from ending

A member is an actor of the fleet. Time in which this thread itself was not awake does not count for any limit.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorDiedError, RayError

from raypipe.planner.liveness import Diagnosis, Seen, judge
from raypipe.runtime.fleet.failures import ending, ran_out_bytes
from raypipe.runtime.fleet.roster import Member
from raypipe.runtime.nodes.node_watch import LOOK_S, LocalNodeWatch, RemoteNodeWatch, watcher_of
from raypipe.runtime.nodes.preemption import Notice

HEARTBEAT_S = 0.5
AWAKE_S = 2 * LOOK_S
"""Longest time in seconds that counts for one iteration of the thread; in a longer one, the thread was starved."""
UNUSED_S = 5.0
"""Seconds for which a node keeps its watcher after its last member was lost, to report how the process ended."""

CLOSE_S = 10.0


class MemberEvent(NamedTuple):
    """Loss of a member, or a warning about a slow one.

    Attributes:
        failure: name of a row of the table in planner/liveness.py, or "died".
        reason: sentence that begins with the member's name.
        after_s: seconds from the failure, or the begin of the slow action, until it was noticed; 0 if unknown.
        over: True if the member is lost; False for a warning.
        worker: number of the worker; None for a spare.
        process, host: process id and host of the member; 0 and "" if unknown.
    """

    failure: str
    reason: str
    after_s: float
    over: bool
    worker: int | None
    process: int
    host: str


@dataclass(slots=True)
class _Watched:
    """Watched member.

    Attributes:
        silent_s: seconds since its last heartbeat.
        request: heartbeat request that is not answered yet; None if all are answered.
    """

    member: Member
    silent_s: float = 0.0
    request: Any = None
    reported_slow: str = ""  # the action that was reported as slow


class Watch:
    """Watch of a fleet's members, in a thread, from its creation until ``close``.

    Args:
        roster: returns the present members of the fleet.
        lease_s: duration of a lease in seconds, sent with every heartbeat request. A member that cannot be reached for
            so long is killed and marked lost.
        on_event: called with each event, from the watching thread or from a caller of ``explain``.
        term: number of this driver; stages obey the driver of the highest term only.
    """

    def __init__(
        self,
        roster: Callable[[], Sequence[Member]],
        lease_s: float,
        on_event: Callable[[MemberEvent], None] = lambda event: None,
        term: int = 0,
    ) -> None:
        self._roster, self._lease_s, self._on_event, self._term = roster, lease_s, on_event, term
        self._watched: dict[int, _Watched] = {}  # by id of the member
        here = ray.get_runtime_context().get_node_id()  # is watched even without members
        self._nodes: dict[str, LocalNodeWatch | RemoteNodeWatch] = {here: watcher_of(here)}
        self._used_s: dict[str, float] = {}  # time.monotonic() of the last look at a member, by node, except this node
        self.planned_s = 0.0
        """Predicted seconds of a step's longest action; 0 without a prediction."""
        self._explaining = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raypipe watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; living members then end themselves when their leases expire."""
        self._closed.set()
        self._thread.join(CLOSE_S)
        for node in self._nodes.values():
            node.close()

    @property
    def announced(self) -> dict[str, tuple[Notice, ...]]:
        """Notices of the cloud about the watched machines, by Ray's node id."""
        return {node: watcher.announced for node, watcher in list(self._nodes.items())}

    def explain(self, member: Member, message: str) -> Diagnosis:
        """Find out why a member died, also from Ray's message; the first call marks it lost and calls ``on_event``."""
        with self._explaining:
            if member.finding is not None:
                return member.finding
            facts = member.facts
            node = self._nodes.get(facts.get("node", ""))
            ended = None if node is None else node.ended(facts["process"])
            why = ending(ended, message, facts.get("host", "its node"))
            after_s = 0.0 if ended is None else ended.ago_s
            finding = Diagnosis("died", True, why, after_s, ran_out_bytes(ended, message))
            self._lose(member, finding)
            return finding

    def _run(self) -> None:
        last_s = ask_s = time.monotonic()
        while not self._closed.wait(LOOK_S):
            now_s = time.monotonic()
            awake_s, last_s = min(now_s - last_s, AWAKE_S), now_s
            asks = now_s >= ask_s
            if asks:
                ask_s = now_s + HEARTBEAT_S
            try:
                self._turn(now_s, awake_s, asks=asks)
            except Exception:  # noqa: BLE001  (leases are renewed whatever goes wrong here)
                sys.stderr.write(f"raypipe: a look at the stages failed.\n{traceback.format_exc()}")

    def _turn(self, now_s: float, awake_s: float, *, asks: bool) -> None:
        members = [member for member in self._roster() if not member.lost]
        self._watched = {id(m): self._watched.get(id(m)) or _Watched(m) for m in members}
        if asks:
            for watched in self._watched.values():
                if watched.request is None:  # the last one was answered
                    watched.request = watched.member.actor.heartbeat.remote(self._term, self._lease_s)
        self._take_heartbeats(awake_s)
        if self._closed.is_set():
            return
        self._look(members, now_s, awake_s)
        for watched in self._watched.values():
            self._judge(watched)

    def _take_heartbeats(self, awake_s: float) -> None:
        """Store new heartbeats in their members, and add ``awake_s`` seconds to the silence of all other members.

        If a heartbeat is None, a later driver has taken the member over, and the watch ends.
        """
        requests = {watched.request: watched for watched in self._watched.values() if watched.request is not None}
        done, _ = ray.wait(list(requests), num_returns=len(requests), timeout=0) if requests else ([], [])
        for watched in self._watched.values():
            watched.silent_s += awake_s
        for ref in done:
            watched, requests[ref].request = requests[ref], None
            try:
                if (heartbeat := ray.get(ref)) is None:
                    self._closed.set()
                    return
                watched.member.heartbeat, watched.silent_s = heartbeat, 0.0
            except ActorDiedError as error:
                if not (watched.member.lost or self._closed.is_set()):
                    self.explain(watched.member, str(error))
            except RayError:  # unreachable at the moment: counts as silence
                pass

    def _look(self, members: Sequence[Member], now_s: float, awake_s: float) -> None:
        by_node: dict[str, list[int]] = {}
        for member in members:
            if "node" in member.facts:
                by_node.setdefault(member.facts["node"], []).append(member.facts["process"])
        for node, pids in by_node.items():
            if node not in self._nodes:
                self._nodes[node] = watcher_of(node)
            self._nodes[node].ask(pids, now_s, awake_s)
            if isinstance(self._nodes[node], RemoteNodeWatch):
                self._used_s[node] = now_s
        for node in [node for node, used_s in self._used_s.items() if now_s - used_s > UNUSED_S]:
            del self._used_s[node]
            self._nodes.pop(node).close()

    def _judge(self, watched: _Watched) -> None:
        member, heartbeat = watched.member, watched.member.heartbeat
        if member.lost or heartbeat is None or "node" not in member.facts:
            return
        look = self._nodes[member.facts["node"]].looks.get(heartbeat.process)
        finding = judge(
            Seen(
                watched.silent_s,
                look is not None,
                0.0 if look is None else look.stopped_s,
                0.0 if look is None else look.idle_s,
                heartbeat.action,
                heartbeat.action_s if heartbeat.computes else 0.0,
                max(heartbeat.longest_s, self.planned_s),
            ),
            self._lease_s,
        )
        if finding is None:
            return
        if finding.over:
            with self._explaining:
                self._lose(member, finding)
            self._end(member)
        elif watched.reported_slow != heartbeat.action:
            watched.reported_slow = heartbeat.action
            self._notice(member, finding)

    def _lose(self, member: Member, finding: Diagnosis) -> None:
        member.lost, member.finding = True, finding
        self._notice(member, finding)

    def _end(self, member: Member) -> None:
        """Kill a member's process through its node's watcher, as Ray cannot end a stopped one; then kill its actor."""
        self._nodes[member.facts["node"]].end(member.facts["process"])
        with contextlib.suppress(RayError):
            ray.kill(member.actor, no_restart=True)

    def _notice(self, member: Member, finding: Diagnosis) -> None:
        reason = f"{member.name} {finding.why}"
        process, host = member.facts.get("process", 0), member.facts.get("host", "")
        self._on_event(
            MemberEvent(finding.failure, reason, finding.after_s, finding.over, member.worker, process, host)
        )

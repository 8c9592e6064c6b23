"""The driver's side of liveness: a thread that asks every member of a fleet how it does, and ends those that hang.

    every PULSE_S    pulse(term, lease_s) to every member: its answer is the heartbeat, the question renews its lease
    every LOOK_S     what the watcher of its node says (node_watch.py), and the table (planner/liveness.py)
    over             the member is marked lost with the reason, its process is ended, so that whoever waits for it wakes
    no Pulse         a later driver has taken the member over: this one looks after nobody any more
    UNUSED_S         a node that no member is on any more loses its watcher, which would keep a drained node from ending

Time in which this thread was not awake itself counts for nobody.
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

from raypipe.planner.liveness import Finding, Seen, judge
from raypipe.runtime.workers.endings import ending, ran_out_bytes
from raypipe.runtime.workers.node_watch import Here, There, watcher_of
from raypipe.runtime.workers.notices import Notice as Announcement
from raypipe.runtime.workers.processes import LOOK_S
from raypipe.runtime.workers.roster import Member

__all__ = ["PULSE_S", "Notice", "Watch"]

PULSE_S = 0.5
AWAKE_S = 2 * LOOK_S
"""A turn of the thread that took longer than this was not awake all the time."""
UNUSED_S = 5.0
"""A node keeps its watcher for so long after its last member: it may still say how that ended."""

CLOSE_S = 10.0


class Notice(NamedTuple):
    """Something that happened to a member.

    Attributes:
        means: of planner/liveness.py's rows, or "died".
        reason: a sentence that begins with its name.
        after_s: it took to notice.
        over: the member is lost.
        worker: its number; None for a spare.
        process, host: where it was.
    """

    means: str
    reason: str
    after_s: float
    over: bool
    worker: int | None
    process: int
    host: str


@dataclass(slots=True)
class _Heard:
    """What the thread keeps of a member."""

    member: Member
    silent_s: float = 0.0
    asked: Any = None
    told_slow: str = ""  # the action that was told to be slow


class Watch:
    """Watches from now on until ``close``.

    Args:
        roster: gives the members of the fleet.
        lease_s: that every question gives a worker, and after which one is given up that cannot be reached.
        tell: is called with what happens, from the thread or from ``explain``.
        term: of the driver.
    """

    def __init__(
        self,
        roster: Callable[[], Sequence[Member]],
        lease_s: float,
        tell: Callable[[Notice], None] = lambda notice: None,
        term: int = 0,
    ) -> None:
        self._roster, self._lease_s, self._tell, self._term = roster, lease_s, tell, term
        self._heard: dict[int, _Heard] = {}  # by id of the member
        here = ray.get_runtime_context().get_node_id()  # which is looked at though no member may be there
        self._nodes: dict[str, Here | There] = {here: watcher_of(here)}
        self._used_s: dict[str, float] = {}  # time.monotonic() of the last look at a member, by node; not of this one
        self.planned_s = 0.0
        """The longest action that the plan expects."""
        self._explaining = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raypipe watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more; workers that live on end when their lease does."""
        self._closed.set()
        self._thread.join(CLOSE_S)
        for node in self._nodes.values():
            node.close()

    @property
    def announced(self) -> dict[str, tuple[Announcement, ...]]:
        """What clouds have announced for the nodes that are watched, by Ray's ids of them."""
        return {node: watcher.announced for node, watcher in list(self._nodes.items())}

    def explain(self, member: Member, said: str) -> Finding:
        """Why a member is lost that Ray says is dead; the first time, it is told.

        Args:
            said: Ray's words.
        """
        with self._explaining:
            if member.finding is not None:
                return member.finding
            facts = member.facts
            node = self._nodes.get(facts.get("node", ""))
            ended = None if node is None else node.ended(facts["process"])
            why = ending(ended, said, facts.get("host", "its node"))
            after_s = 0.0 if ended is None else ended.ago_s
            found = Finding("died", True, why, after_s, ran_out_bytes(ended, said))
            self._lose(member, found)
            return found

    def _run(self) -> None:
        last_s = ask_s = time.monotonic()
        while not self._closed.wait(LOOK_S):
            now_s = time.monotonic()
            awake_s, last_s = min(now_s - last_s, AWAKE_S), now_s
            asks = now_s >= ask_s
            if asks:
                ask_s = now_s + PULSE_S
            try:
                self._turn(now_s, awake_s, asks=asks)
            except Exception:  # noqa: BLE001  (leases are renewed whatever goes wrong here)
                sys.stderr.write(f"raypipe: a look at the stages failed.\n{traceback.format_exc()}")

    def _turn(self, now_s: float, awake_s: float, *, asks: bool) -> None:
        members = [member for member in self._roster() if not member.lost]
        self._heard = {id(m): self._heard.get(id(m)) or _Heard(m) for m in members}
        if asks:
            self._ask()
        self._hear(awake_s)
        if self._closed.is_set():
            return
        self._look(members, now_s, awake_s)
        for heard in self._heard.values():
            self._judge(heard)

    def _ask(self) -> None:
        """One question at a time: a worker that is slow is not asked twice."""
        for heard in self._heard.values():
            if heard.asked is None:
                heard.asked = heard.member.actor.pulse.remote(self._term, self._lease_s)

    def _hear(self, awake_s: float) -> None:
        """Take the answers that have come; everybody else is silent for so much longer."""
        asked = {heard.asked: heard for heard in self._heard.values() if heard.asked is not None}
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=0) if asked else ([], [])
        for heard in self._heard.values():
            heard.silent_s += awake_s
        for ref in done:
            heard, asked[ref].asked = asked[ref], None
            try:
                if (pulse := ray.get(ref)) is None:
                    self._closed.set()
                    return
                heard.member.pulse, heard.silent_s = pulse, 0.0
            except ActorDiedError as error:
                if not (heard.member.lost or self._closed.is_set()):
                    self.explain(heard.member, str(error))
            except RayError:  # it cannot be reached at the moment: silence
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
            if isinstance(self._nodes[node], There):
                self._used_s[node] = now_s
        for node in [node for node, used_s in self._used_s.items() if now_s - used_s > UNUSED_S]:
            del self._used_s[node]
            self._nodes.pop(node).close()

    def _judge(self, heard: _Heard) -> None:
        member, pulse = heard.member, heard.member.pulse
        if member.lost or pulse is None or "node" not in member.facts:
            return
        look = self._nodes[member.facts["node"]].looks.get(pulse.process)
        found = judge(
            Seen(
                heard.silent_s,
                look is not None,
                0.0 if look is None else look.stopped_s,
                0.0 if look is None else look.idle_s,
                pulse.action,
                pulse.action_s if pulse.computes else 0.0,
                max(pulse.longest_s, self.planned_s),
            ),
            self._lease_s,
        )
        if found is None:
            return
        if found.over:
            with self._explaining:
                self._lose(member, found)
            self._end(member)
        elif heard.told_slow != pulse.action:
            heard.told_slow = pulse.action
            self._notice(member, found)

    def _lose(self, member: Member, found: Finding) -> None:
        member.lost, member.finding = True, found
        self._notice(member, found)

    def _end(self, member: Member) -> None:
        """Whatever state it is in: a process that is stopped hears nothing of Ray's."""
        self._nodes[member.facts["node"]].end(member.facts["process"])
        with contextlib.suppress(RayError):
            ray.kill(member.actor, no_restart=True)

    def _notice(self, member: Member, found: Finding) -> None:
        reason = f"{member.name} {found.why}"
        process, host = member.facts.get("process", 0), member.facts.get("host", "")
        self._tell(Notice(found.means, reason, found.after_s, found.over, member.worker, process, host))

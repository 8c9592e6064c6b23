"""Plans with replicas, replayed on paper: 1F1B-RR on hosts whose devices share one way in and one way out.

    worker     1F1B: w_s = floor((R_s + ... + R_S - 1) / R_s) forwards ahead, then a backward for each forward
    routing    micro-batch m is on replica m % R_s of stage s
    messages   wait for the way out of their host and the way into the other, in the order in which they are made
    sums       of a stage with replicas and weights: once per round of R_s micro-batches; replicas go on when it is done

A round's sum begins with the first gradients, when the last replica begins its backward, and takes no less than a ring
does (``all_reduce_s``); meanwhile it keeps the ways between hosts busy. Data parallelism is one stage. Both get their
communication overlapped as far as it can be: a comparison of what links allow, not of two programs.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Hosts", "Stage", "all_reduce_s", "period_s", "warm_up"]


class Hosts(NamedTuple):
    """Equal hosts of equal devices, with bytes per second: of each pair inside a host, and of each host's way out."""

    per_host: int
    inside: float
    between: float


class Stage(NamedTuple):
    """One stage of a plan, per micro-batch.

    Attributes:
        devices: one for each replica; device d is in host d // per_host.
        sync_bytes: of its gradients.
        input_bytes: that come from the stage before, and whose gradients go back.
    """

    devices: tuple[int, ...]
    forward_s: float
    backward_s: float
    sync_bytes: float
    input_bytes: float = 0.0


def warm_up(stages: Sequence[Stage], stage: int) -> int:
    """Forwards that a replica of the stage runs ahead of its backwards; NOAM is one more, for the first stage."""
    behind = sum(len(s.devices) for s in stages[stage:])
    return (behind - 1) // len(stages[stage].devices)


def all_reduce_s(nbytes: float, devices: Sequence[int], hosts: Hosts) -> float:
    """Of one ring through all devices, or of rings inside the hosts and one between them: whichever is quicker."""
    count = len(devices)
    if count == 1:
        return 0.0
    of_host = collections.Counter(device // hosts.per_host for device in devices)
    if len(of_host) == 1:
        return 2 * (count - 1) / count * nbytes / hosts.inside
    flat_s = 2 * (count - 1) / count * nbytes / min(hosts.inside, hosts.between)
    most = max(of_host.values())
    inner_s = 2 * (most - 1) / most * nbytes / hosts.inside
    outer_s = 2 * (len(of_host) - 1) / len(of_host) * nbytes / hosts.between
    return min(flat_s, inner_s + outer_s)


def period_s(stages: Sequence[Stage], hosts: Hosts, rounds: int = 24) -> float:
    """Seconds per micro-batch in the steady state.

    Args:
        rounds: that are simulated, of the first stage's replicas each; the first half is left out.
    """
    run = _Run(stages, hosts, rounds * len(stages[0].devices))
    ends_s = run.go()
    half = len(ends_s) // 2
    return (ends_s[-1] - ends_s[half - 1]) / (len(ends_s) - half)


class _Run:
    """Every worker's next action begins as soon as it can; of all of them the earliest goes first."""

    def __init__(self, stages: Sequence[Stage], hosts: Hosts, count: int) -> None:
        self.stages, self.hosts, self.count = stages, hosts, count
        self.free_s: dict[tuple[int, int], float] = collections.defaultdict(float)  # of workers (stage, replica)
        self.way_s: dict[tuple[str, int], float] = collections.defaultdict(float)  # of ("out" or "in", host)
        self.ready_s: dict[tuple[str, int, int], float] = {}  # when (F or B, stage, micro-batch) has what it needs
        for m in range(count):
            self.ready_s["F", 0, m] = 0.0
        self.begun: dict[tuple[int, int], list[float]] = collections.defaultdict(list)  # backwards of a round
        self.ended: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
        self.first_s: list[float] = [math.inf] * count  # ends of the first stage's backwards, sums included
        self.orders = {
            (s, r): collections.deque(self._order(s, r))
            for s, stage in enumerate(stages)
            for r in range(len(stage.devices))
        }

    def _order(self, s: int, replica: int) -> list[tuple[str, int]]:
        mine = range(replica, self.count, len(self.stages[s].devices))
        ahead = min(len(mine), warm_up(self.stages, s))
        row = [("F", m) for m in mine[:ahead]]
        for place, m in enumerate(mine):
            row += [("F", mine[place + ahead])] if place + ahead < len(mine) else []
            row.append(("B", m))
        return row

    def go(self) -> list[float]:
        """When each micro-batch has left the first stage, sorted."""
        while any(self.orders.values()):
            able = [
                (max(self.free_s[worker], self.ready_s[op, worker[0], m]), worker)
                for worker, row in self.orders.items()
                if row
                for op, m in [row[0]]
                if (op, worker[0], m) in self.ready_s and not math.isinf(self.free_s[worker])
            ]
            at_s, worker = min(able)
            op, m = self.orders[worker].popleft()
            self._do(op, m, worker, at_s)
        return sorted(self.first_s)

    def _do(self, op: str, m: int, worker: tuple[int, int], at_s: float) -> None:
        s = worker[0]
        stage = self.stages[s]
        if op == "F":
            end_s = self.free_s[worker] = at_s + stage.forward_s
            if s + 1 == len(self.stages):
                self.ready_s["B", s, m] = end_s
            else:
                self._send("F", s + 1, m, worker, end_s, self.stages[s + 1].input_bytes)
            return
        end_s = self.free_s[worker] = at_s + stage.backward_s
        if s:
            self._send("B", s - 1, m, worker, end_s, stage.input_bytes)
        else:
            self.first_s[m] = end_s
        replicas = len(stage.devices)
        if replicas > 1 and stage.sync_bytes:
            self._sum(s, m // replicas, at_s, end_s)

    def _send(self, op: str, to: int, m: int, worker: tuple[int, int], at_s: float, nbytes: float) -> None:
        devices = self.stages[to].devices
        here = self.stages[worker[0]].devices[worker[1]] // self.hosts.per_host
        there = devices[m % len(devices)] // self.hosts.per_host
        if here == there:
            self.ready_s[op, to, m] = at_s + nbytes / self.hosts.inside
            return
        begin_s = max(at_s, self.way_s["out", here], self.way_s["in", there])
        end_s = begin_s + nbytes / self.hosts.between
        self.way_s["out", here] = self.way_s["in", there] = self.ready_s[op, to, m] = end_s

    def _sum(self, s: int, number: int, begin_s: float, end_s: float) -> None:
        """Note a backward of a round; the last one lets all replicas go on when the sum is done."""
        stage, key = self.stages[s], (s, number)
        self.begun[key].append(begin_s)
        self.ended[key].append(end_s)
        replicas = range(len(stage.devices))
        missing = min(len(replicas), self.count - number * len(replicas)) - len(self.begun[key])
        if missing:
            self._hold(s, number)
            return
        places = {device // self.hosts.per_host for device in stage.devices}
        ways = [(way, host) for host in places for way in ("in", "out")] if len(places) > 1 else []
        start_s = max([*self.begun[key], *(self.way_s[way] for way in ways)])
        done_s = start_s + all_reduce_s(stage.sync_bytes, stage.devices, self.hosts)
        for way in ways:
            self.way_s[way] = done_s
        for replica in replicas:
            self.free_s[s, replica] = max(done_s, *self.ended[key])
        if s == 0:
            for m in range(number * len(replicas), min(self.count, (number + 1) * len(replicas))):
                self.first_s[m] = max(self.first_s[m], done_s)

    def _hold(self, s: int, number: int) -> None:
        """Replicas that have done their backward of a round wait for the others."""
        for replica in range(len(self.stages[s].devices)):
            m = number * len(self.stages[s].devices) + replica
            if m < self.count and ("B", m) not in self.orders[s, replica]:
                self.free_s[s, replica] = math.inf

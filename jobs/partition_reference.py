"""The least bottleneck of a DAG by another way than the planner's: to hold its answers against. Links are free.

A stage ends where the nodes executed so far are a closed set. Whether a period can be kept is asked node by node:

    best[set] = least (stages begun, load of the last one), over all nodes that could have come last

With free links fewer stages are better whatever the load, so one pair per set is enough. The least period in whole
picoseconds is then halved in on. No numpy, no shared code: sets are the bits of Python's integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["closed_sets", "least_bottleneck"]

Pair = tuple[int, int]


def closed_sets(num_nodes: int, pairs: Iterable[Pair], most: int = 10**6) -> list[dict[int, list[int]]] | None:
    """By number of executed nodes: every closed set with the nodes that may come next; None where there are too many.

    Args:
        pairs: (earlier, later) positions.
    """
    needs = [0] * num_nodes
    for earlier, later in pairs:
        needs[later] |= 1 << earlier
    followers: list[list[int]] = [[] for _ in range(num_nodes)]
    for node, need in enumerate(needs):
        for earlier in range(num_nodes):
            if need >> earlier & 1:
                followers[earlier].append(node)
    level = {0: [node for node, need in enumerate(needs) if not need]}
    found, count = [level], 1
    while len(found) <= num_nodes:
        following: dict[int, list[int]] = {}
        for done, ready in level.items():
            for node in ready:
                now = done | 1 << node
                if now not in following:
                    freed = [f for f in followers[node] if needs[f] & now == needs[f]]
                    following[now] = [r for r in ready if r != node] + freed
        level = following
        found.append(level)
        count += len(level)
        if count > most:
            return None
    return found


def least_bottleneck(times_ps: Sequence[int], pairs: Iterable[Pair], num_stages: int) -> int | None:
    """Picoseconds of the slowest of at most ``num_stages`` stages, at its least; None where there are too many sets.

    Args:
        times_ps: by node.
        pairs: (earlier, later) positions.
    """
    sets = closed_sets(len(times_ps), pairs)
    if sets is None:
        return None
    low, high = max(max(times_ps), -(-sum(times_ps) // num_stages)) - 1, sum(times_ps)
    while high - low > 1:
        middle = (low + high) // 2
        if _stages_needed(times_ps, sets, middle) <= num_stages:
            high = middle
        else:
            low = middle
    return high


def _stages_needed(times_ps: Sequence[int], sets: Sequence[dict[int, list[int]]], period_ps: int) -> int:
    best: dict[int, Pair] = {0: (1, 0)}
    for level in sets:
        following: dict[int, Pair] = {}
        for done, ready in level.items():
            stages, load = best[done]
            for node in ready:
                time = times_ps[node]
                grown = (stages, load + time) if load + time <= period_ps else (stages + 1, time)
                now = done | 1 << node
                if now not in following or grown < following[now]:
                    following[now] = grown
        best = following or best
    ((stages, _),) = best.values()
    return stages

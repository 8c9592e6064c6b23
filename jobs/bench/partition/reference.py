"""The least bottleneck of a DAG by another way than the planner's: to hold its answers against. Links are free.

A stage ends where the nodes executed so far are a closed set. Whether a period can be kept is asked node by node:

    best[set] = least (stages begun, load of the last one), over all nodes that could have come last

With free links fewer stages are better whatever the load, so one pair per set is enough. Where a stage must not end,
because it would part two nodes that belong together, that does not hold, and every number of stages keeps its least
load. The least period in whole picoseconds is then halved in on. No numpy, no shared code: sets are the bits of
Python's integers.
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


def least_bottleneck(
    times_ps: Sequence[int],
    pairs: Iterable[Pair],
    num_stages: int,
    together: Iterable[Pair] = (),
    most: int = 10**6,
) -> int | None:
    """Picoseconds of the slowest of at most ``num_stages`` stages, at its least; None where there are too many sets.

    Args:
        times_ps: by node.
        pairs: (earlier, later) positions.
        together: pairs that must be in one stage besides.
        most: closed sets.
    """
    joined = tuple(together)
    sets = closed_sets(len(times_ps), (*pairs, *joined), most)
    if sets is None:
        return None
    barred = frozenset(done for level in sets for done in level if _parts(done, joined))

    def kept(period_ps: int) -> bool:
        return _can_keep(times_ps, sets, barred, period_ps, num_stages)

    low = max(max(times_ps), -(-sum(times_ps) // num_stages)) - 1
    high = low + max(1, low >> 10)
    while not kept(high):
        low, high = high, high + 2 * (high - low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if kept(middle) else (middle, high)
    return high


def _parts(done: int, together: Sequence[Pair]) -> bool:
    """Whether a stage that ends here would part a pair."""
    return any(done >> earlier & 1 and not done >> later & 1 for earlier, later in together)


def _can_keep(
    times_ps: Sequence[int],
    sets: Sequence[dict[int, list[int]]],
    barred: frozenset[int],
    period_ps: int,
    num_stages: int,
) -> bool:
    """Whether so many stages suffice, none of which takes longer."""
    best: dict[int, dict[int, int]] = {0: {1: 0}}  # by set: stages begun -> least load of the last one
    for level in sets[:-1]:
        following: dict[int, dict[int, int]] = {}
        for done, ready in level.items():
            loads, may_end = best[done], done not in barred
            if may_end and loads:
                fewest = min(loads)
                loads = {fewest: loads[fewest]}
            for node in ready:
                time, now = times_ps[node], done | 1 << node
                into = following.setdefault(now, {})
                for stages, load in loads.items():
                    grown = load + time
                    fits = grown <= period_ps
                    if fits and grown < into.get(stages, grown + 1):
                        into[stages] = grown
                    # A new stage helps where this one is full, and where the next set is no place to begin one.
                    begins = may_end and stages < num_stages and time <= period_ps and (not fits or now in barred)
                    if begins and time < into.get(stages + 1, time + 1):
                        into[stages + 1] = time
        best = following
    return any(loads for loads in best.values())

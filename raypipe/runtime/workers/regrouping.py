"""A run with replicas goes on without those that it lost, and takes others in; nobody goes back to an older step.

    complete   who lives comes to the newest step that any of them has made (engine/reached.py)
    regroup    micro-batches are dealt out to those that live, in the lanes they have; only links are opened anew
    join       between two steps, spares take the state of a replica, and micro-batches are dealt out to all

The step that was begun is done again: every worker that lives has the parameters with which it began.

Where replicas share out the state of their optimizer, a lost one takes its slices along, and a step that was stopped in
its middle has moved some slices and not others. So all go back to copies (recovery.py), and whoever joins later has all
replicas cut their slices anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raypipe.engine.reached import newest
from raypipe.errors import CheckpointError, StageLostError
from raypipe.ir.schedule import groups_in
from raypipe.planner.regroup import counts_of, left, with_spares
from raypipe.runtime.run.blueprint import Assembled
from raypipe.runtime.run.plans import Plans
from raypipe.runtime.run.recovery import Recovered, Steps
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.laps import Laps
from raypipe.runtime.workers.remote_copy import RemoteCopy
from raypipe.runtime.workers.states import names_of

__all__ = ["Regrouping"]


class Regrouping:
    """Of one run with replicas; see Regrouper.

    Args:
        keep_charter: has workers keep what a later driver needs to know of this plan.
        refill: has spares start where workers are missing.
        hand_over: gives members a plan, with the state of a step of which all stages have copies.
        shards: replicas share out the state of their optimizer.
    """

    def __init__(
        self,
        fleet: Fleet,
        plans: Plans,
        keep_charter: Callable[[Assembled], None],
        refill: Callable[[], None],
        hand_over: Callable[[Assembled, int, Sequence[int]], None],
        *,
        shards: bool = False,
    ) -> None:
        self._fleet, self._plans, self._shards = fleet, plans, shards
        self._keep_charter, self._refill, self._hand_over = keep_charter, refill, hand_over
        self._laps = Laps()

    def complete(self, step: int) -> Steps | None:
        """See Regrouper."""
        if self._shards:
            return None
        self._laps = Laps()
        fleet = self._fleet
        fleet.settle()
        self._laps.lap("settle")
        made = self._plans.made
        # Without a norm that all wait for, some may have made steps that others have no gradients for.
        alone = made.plan.flow is not None or made.plan.plan.schedule.wiring.norm_per_stage
        if alone or not all(left(made.setup.homes, fleet.lost)):
            return None
        known = newest(fleet.reached(), step)
        if known is None:
            return None
        newer, totals = known
        steps = fleet.unheard(newer - step, fleet.come_to(newer, totals))
        self._laps.lap("complete")
        # Of a step that nobody tells of there would be no record; after a driver was lost, too.
        return steps if len(steps) == newer - step and all(steps) else None

    def regroup(self, step: int) -> Recovered:
        """See Regrouper."""
        fleet = self._fleet
        remaining = left(self._plans.made.setup.homes, fleet.lost)
        if not all(remaining):
            raise StageLostError("Another worker was lost while the run went on without one.")
        staying = [fleet.in_use[worker] for workers in remaining for worker in workers]
        lost = fleet.forget_lost()
        made = self._plans.regrouped(tuple(map(len, remaining)))
        fleet.regroup(made.run, made.setup, fleet.positions(staying))
        self._laps.lap("links")
        return self._regrouped(made, step, lost)

    def join(self, step: int) -> Recovered | None:
        """See Regrouper."""
        self._laps = Laps()
        fleet, homes = self._fleet, self._plans.made.setup.homes
        fleet.go_on()
        spares = fleet.spares
        counts = with_spares(homes, self._plans.replicas, len(spares))
        if counts == counts_of(homes):
            return None
        if self._shards:
            return self._cut_anew(counts, step)
        made = self._plans.regrouped(counts)
        here = groups_in(homes)
        peers = [workers[0] for workers, count in zip(here, counts, strict=True) if count > len(workers)]
        fleet.keep_copy(step, send=False, workers=peers)
        copies: dict[int, Sequence[RemoteCopy]] = {
            peer: [self._copy(made, stage, peer, step) for stage, workers in enumerate(homes) if workers[0] == peer]
            for peer in peers
        }
        self._laps.lap("copy")
        members, joining, new = list[int](), dict[int, Sequence[RemoteCopy]](), iter(spares)
        for old, workers in zip(here, groups_in(made.setup.homes), strict=True):
            before = [fleet.roster.index(fleet.in_use[worker]) for worker in old]
            joining |= dict.fromkeys(workers[len(before) :], copies.get(old[0], ()))
            members += [*before, *(next(new) for _ in workers[len(before) :])]
        try:
            fleet.regroup(made.run, made.setup, members, joining)
        except CheckpointError as error:
            raise StageLostError(f"A replica could not take the state of another one: {error}") from None
        self._laps.lap("links")
        return self._regrouped(made, step)

    def _cut_anew(self, counts: tuple[int, ...], step: int) -> Recovered:
        """So many replicas by group, spares among them, each with its slices of this step's state."""
        fleet, here = self._fleet, groups_in(self._plans.made.setup.homes)
        made, new = self._plans.counted_anew(counts), iter(fleet.spares)
        fleet.keep_copy(step, send=False)
        self._laps.lap("copy")
        members = list[int]()
        for old, workers in zip(here, groups_in(made.setup.homes), strict=True):
            before = [fleet.roster.index(fleet.in_use[worker]) for worker in old]
            members += [*before, *(next(new) for _ in workers[len(before) :])]
        self._hand_over(made, step, members)
        self._laps.lap("links")
        return self._regrouped(made, step)

    def _copy(self, made: Assembled, stage: int, peer: int, step: int) -> RemoteCopy:
        actor = self._fleet.actors[peer]
        names = names_of(made.setup.programs[stage])
        return RemoteCopy(actor, actor._actor_id.hex(), made.setup.generation, stage, step, names)

    def _regrouped(self, made: Assembled, step: int, lost: tuple[str, ...] = ()) -> Recovered:
        self._plans.made = made
        self._keep_charter(made)
        self._refill()
        self._laps.lap("charter")
        fleet = self._fleet
        return Recovered(
            step, "replicas", seconds=self._laps.laps_s, stages=fleet.facts, plan=made.plan,
            moved_bytes=fleet.moved_bytes, lost=lost,
        )  # fmt: skip

"""Of all copies that workers have, those to go back to: all pieces of all stages, of the newest step that has them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from raypipe.planner.recovery import Copy, lacking, newest_common
from raypipe.runtime.run.plans import Plans
from raypipe.runtime.workers.copies import CopyFacts
from raypipe.runtime.workers.remote_copy import RemoteCopy

__all__ = ["newest_copies", "remote", "why_none"]

Held = Sequence[tuple[Any, CopyFacts]]
"""(actor, what it has), those that are to be preferred first."""


def newest_copies(held: Held, plans: Plans, steps: Collection[int]) -> list[RemoteCopy]:
    """Of the newest of these steps that every stage of a plan has a copy of somewhere; none without one."""
    for generation, copies in _by_generation(held):
        found = newest_common(copies, plans.num_stages(generation), steps)
        if found is not None:
            step, by_stage = found
            chosen = [copy.holder for of_stage in by_stage.values() for copy in of_stage]
            return [remote(actor, facts, step) for actor, facts in chosen]
    return []


def why_none(held: Held, plans: Plans) -> str:
    """Why there are none that all could go back to, for people: what of the newest plan nobody has."""
    generation, copies = next(iter(_by_generation(held)), (-1, []))
    missing = lacking(copies, plans.num_stages(generation))
    return missing or ("no step has copies of all stages" if copies else "nobody that is left has copies")


def remote(actor: Any, facts: CopyFacts, step: int) -> RemoteCopy:
    """How workers are told of one of them."""
    return RemoteCopy(actor, actor._actor_id.hex(), facts.generation, facts.stage, step, facts.names, facts.piece)


def _by_generation(held: Held) -> list[tuple[int, list[Copy]]]:
    """The newest plan's first."""
    return [
        (
            generation,
            [
                Copy((actor, facts), facts.stage, facts.steps, facts.piece, facts.pieces)
                for actor, facts in held
                if facts.generation == generation
            ],
        )
        for generation in sorted({facts.generation for _, facts in held}, reverse=True)
    ]

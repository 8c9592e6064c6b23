"""A run's first plan, fitted to the devices that its workers turned out to have."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from raypipe.engine.rundir import RunFolder
from raypipe.runtime.run.blueprint import Blueprint
from raypipe.runtime.run.device_limits import Offered, within
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.workers.fleet import Fleet

__all__ = ["FittedRun", "fit_devices"]


NO_KERNELS = (
    "{where} has no CuPy, so the processor encodes and decodes what stages send, and more bytes are copied: "
    "pip install 'raypipe[cuda13]' (or raypipe[cuda12]) there."
)


class FittedRun(NamedTuple):
    """See ``device_limits.Fitted``."""

    blueprint: Blueprint
    planned: Planned
    members: tuple[int, ...] | None


def fit_devices(fleet: Fleet, blueprint: Blueprint, planned: Planned) -> FittedRun:
    """A plan that these devices can hold; the fleet grows where it wants more of them.

    Raises:
        PlanError: there is none, or no place for another worker.
    """
    note = RunFolder(blueprint.spec.place).event
    if blueprint.pipeline.codec_forward != "none" or blueprint.pipeline.codec_backward != "none":
        for where in sorted({f"{facts['device']} on {facts['host']}" for facts in fleet.members if not facts["codes"]}):
            note("warning", NO_KERNELS.format(where=where))
    offered = [Offered(facts["device"], facts["device_bytes"]) for facts in fleet.members]
    found = within(blueprint.basis, planned, offered)
    if found.basis is not blueprint.basis:
        blueprint = dataclasses.replace(blueprint, basis=found.basis)
    if found.why:
        note("fit the devices", found.why)
        fleet.grow(found.planned.plan.schedule.num_workers)
    return FittedRun(blueprint, found.planned, found.members)

"""Makes the manifests of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from raypipe.engine.checkpoint import Manifest, make_manifest
from raypipe.planner.segments import Position
from raypipe.runtime.run.checkpoints import MakeManifest
from raypipe.runtime.run.lease import Lease
from raypipe.runtime.run.spec import RunSpec

__all__ = ["manifests"]


def manifests(spec: RunSpec, lease: Lease | None) -> MakeManifest:
    """What makes them of where the run stood, what its stages wrote, and the numbers of its last step."""

    def manifest(end: Position, entries: list[dict[str, Any]], metrics: Mapping[str, float]) -> Manifest:
        return make_manifest(
            end.step, entries, position=asdict(end), seed=spec.seed, minibatch_size=spec.minibatch_size,
            microbatch_size=spec.microbatch_size, num_samples=spec.num_samples["train"], aliases=spec.aliases,
            metrics=metrics, **({} if lease is None else lease.signature()),
        )  # fmt: skip

    return manifest

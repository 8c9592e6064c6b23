"""What makes a process a worker: once what no plan changes, and with every plan what that plan says.

RunSetup          optimizer, scheduler, data, settings, folder         once per process
GenerationSetup   stages, who holds them, weight versions, codecs      with every plan; the state stays
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypipe.engine.codec import Codecs
from raypipe.engine.data.source import Source
from raypipe.engine.placement import Placement
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import MakeOptimizer, MakeScheduler, Settings
from raypipe.engine.storage import Place
from raypipe.engine.torch_settings import TorchSettings
from raypipe.ir.schedule import Homes
from raypipe.ir.weights import SYNCHRONOUS, WeightPolicy

__all__ = ["GenerationSetup", "RunSetup"]

OPEN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RunSetup:
    """What a worker knows of its run, whatever the plan is.

    Attributes:
        sources: "train" and, for evaluation, "eval".
        persistent: names of tensors that belong to a checkpoint.
        place: the run's folder, where checkpoints go; None for a run that saves nothing.
        run_id: known to the workers of this run only; links check it.
        secret: known to the workers of this run only; links of "tcp" prove that they know it.
        transport: how boundary tensors travel.
        link_ports: lowest and highest port that links may use.
        link_checksum: "auto", "on" or "off", see PipelineConfig.
        open_timeout_s: deadline for opening all links.
        driver_grace_s: after which a worker ends itself that hears nothing of its driver.
        worker_price_per_hour: for the driver, which counts what the run costs; None counts nothing.
        metrics: of evaluations, by name; the last stage computes them.
        token_column: that holds token ids; None where none does.
        compile_stages: see PipelineConfig.
        replays: workers keep what they send since the last copies of the state.
        torch_settings: that workers take; none where they are threads of the process that has them.
    """

    make_optimizer: MakeOptimizer
    make_scheduler: MakeScheduler | None
    sources: Mapping[str, Source]
    settings: Settings
    persistent: frozenset[str] = frozenset()
    place: Place | None = None
    run_id: str = ""
    secret: bytes = b""
    transport: str = "tcp"
    link_ports: tuple[int, int] | None = None
    link_checksum: str = "auto"
    open_timeout_s: float = OPEN_TIMEOUT_S
    driver_grace_s: float = 60.0
    worker_price_per_hour: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    token_column: Any = None
    compile_stages: str = "off"
    replays: bool = False
    torch_settings: TorchSettings = field(default_factory=TorchSettings)


@dataclass(frozen=True, slots=True)
class GenerationSetup:
    """What a plan makes of the workers.

    Attributes:
        programs: of all stages.
        homes: workers that hold each stage: ``Wiring.homes``.
        weights: versions of the weights, and whose norm is clipped.
        codecs: of the messages between stages, where the controller does not say otherwise.
        generation: of the plan; a segment of another one is refused.
        addresses: of the endpoints of all workers, once they are known.
        recompute: by stage, whether backwards run the forward again; empty for none.
        lanes: into which micro-batches are dealt out and gradients summed: ``Wiring.lanes``.
    """

    programs: Sequence[StageProgram]
    homes: Homes
    weights: WeightPolicy = SYNCHRONOUS
    codecs: Codecs = Codecs()  # noqa: RUF009  (immutable)
    generation: int = 0
    addresses: Sequence[Any] = ()
    recompute: Sequence[bool] = ()
    lanes: int = 1

    @property
    def num_workers(self) -> int:
        return self.placement(0).num_workers

    def placement(self, worker: int) -> Placement:
        """Who holds which stage, from the side of one worker."""
        return Placement(self.homes, worker, self.lanes)

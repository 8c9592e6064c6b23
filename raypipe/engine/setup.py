"""Configuration of a worker: the part that no plan changes, and the part that every plan sets.

RunSetup          optimizer, scheduler, data, settings, folder              once per process
GenerationSetup   stages, their workers, weight versions, codecs            with every plan; the state stays
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypipe.data.open_data import Source
from raypipe.engine.codec import Codecs
from raypipe.engine.io.storage import Place
from raypipe.engine.optim.state import MakeOptimizer, MakeScheduler, Settings
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.stage import StageProgram
from raypipe.engine.torch_settings import TorchSettings
from raypipe.ir.schedule import Homes
from raypipe.ir.weights import SYNCHRONOUS, WeightPolicy

OPEN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RunSetup:
    """Configuration of a worker for a run, independent of the plan.

    Attributes:
        make_optimizer: function that creates an optimizer from [(name, parameter)].
        make_scheduler: function that creates a learning-rate scheduler from an optimizer; None for a constant rate.
        sources: data by mode: "train" and, for evaluation, "eval".
        settings: settings that no re-plan changes.
        persistent: names of the tensors in a checkpoint.
        place: the run's folder, for checkpoints; None for a run that saves nothing.
        run_id: identifies the run; links check it.
        secret: shared by the workers of this run; links of "tcp" authenticate with it.
        transport: transport of boundary tensors; see PipelineConfig.
        link_ports: lowest and highest port that links may use.
        link_checksum: "auto", "on" or "off"; see PipelineConfig.
        open_timeout_s: deadline for opening all links.
        driver_grace_s: seconds without a call of the driver after which a worker ends itself.
        worker_price_per_hour: for the driver's cost meter; None counts nothing.
        metrics: evaluation metrics by name; the last stage computes them.
        token_column: column of token ids; None without one.
        compile_stages: see PipelineConfig.
        torch_settings: global torch settings for worker processes; empty for threads of the process that has them.
        working_folder: working folder of the planning process; "" for threads of that process. See
            runtime/worker/stage_process.py.
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
    torch_settings: TorchSettings = field(default_factory=TorchSettings)
    working_folder: str = ""


@dataclass(frozen=True, slots=True)
class GenerationSetup:
    """Configuration of the workers that one plan sets.

    Attributes:
        programs: programs of all stages, in order.
        homes: workers that hold each stage: ``Wiring.homes``.
        weights: weight versions, and the norm that is clipped.
        codecs: default codecs of the messages between stages; orders may replace them.
        generation: number of the plan; segments of other plans are refused.
        addresses: endpoints of all workers; empty before the links are opened.
        recompute: by stage, True for activation recomputation; empty for no stage.
        lanes: number of gradient-accumulation lanes: ``Wiring.lanes``.
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
        """Return the assignment of stages to workers, seen from one worker."""
        return Placement(self.homes, worker, self.lanes)

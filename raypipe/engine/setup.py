"""Configuration of a worker: the part that is fixed for a run, and the part that each plan sets anew.

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
    """Configuration of a worker that stays the same for a whole run, under every plan.

    Attributes:
        make_optimizer: function that creates an optimizer from [(name, parameter)].
        make_scheduler: function that creates a learning-rate scheduler from an optimizer; None for a constant rate.
        sources: data by mode: "train" and, for evaluation, "eval".
        settings: training settings, which no new plan changes.
        persistent: names of the parameters and buffers that checkpoints contain.
        place: the run's folder, for checkpoints; None for a run that saves nothing.
        run_id: identifier of the run, checked when a link is opened.
        secret: key shared by the workers of this run, with which "tcp" links authenticate.
        transport: transport of boundary tensors; see PipelineConfig.
        link_ports: lowest and highest port that links may use; None for any port.
        link_checksum: "auto", "on" or "off"; see PipelineConfig.
        open_timeout_s: seconds within which all links must be open.
        driver_grace_s: seconds without a call of the driver after which a worker ends itself.
        worker_price_per_hour: price of one worker, for the driver's cost meter; None counts no costs.
        metrics: evaluation metrics by name; the last stage computes them.
        token_column: data column of token ids, for counting tokens; None if there is no such column.
        compile_stages, cuda_graphs: see PipelineConfig.
        torch_settings: global torch settings of the planning process, for worker processes; empty if the workers are
            threads of the planning process.
        working_folder: working folder of the planning process; "" if the workers are its threads. See
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
    cuda_graphs: bool = False
    torch_settings: TorchSettings = field(default_factory=TorchSettings)
    working_folder: str = ""


@dataclass(frozen=True, slots=True)
class GenerationSetup:
    """Configuration of the workers that a plan sets.

    Attributes:
        programs: programs of all stages, in order.
        homes: for each stage, the workers that hold it: ``Wiring.homes``.
        weights: policy for weight versions, update intervals and the norm that is clipped.
        codecs: default codecs of the messages between stages; ``Order.codecs`` may replace them.
        generation: number of the plan; requests that belong to other plans are refused.
        addresses: network addresses of all workers; empty before the links are opened.
        recompute: by stage, True for activation recomputation; empty for no stage.
        lanes: number of lanes (partial sums of gradients), to which micro-batches are assigned round-robin.
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
        """Return the assignment of stages to workers, from the point of view of ``worker``."""
        return Placement(self.homes, worker, self.lanes)

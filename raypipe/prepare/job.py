"""Job: a captured model, its data and its plan, ready to start."""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raypipe.capture.flatten import canonical_names
from raypipe.config.pipeline import PipelineConfig
from raypipe.data.open_data import Source
from raypipe.data.stream_source import ENDLESS
from raypipe.engine.codec import Codecs
from raypipe.engine.io.checkpoint import GivenTensors, StateSource
from raypipe.engine.io.storage import Place
from raypipe.engine.optim.state import Settings
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.feed import token_column
from raypipe.engine.stage.quantized_linear import has_described
from raypipe.engine.stage.stage import StageProgram
from raypipe.engine.torch_settings import torch_settings
from raypipe.errors import ConfigError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.planner.segments import Flow, flow_of, num_steps_of, rows_for
from raypipe.preflight.arguments import Arguments, undisturbed
from raypipe.preflight.dry_run import refuse_failed_checks
from raypipe.preflight.verify import verify
from raypipe.prepare.inputs import Opened, by_name
from raypipe.progress import shown_while
from raypipe.run.plans.blueprint import generation_setup
from raypipe.run.plans.planning import PlanBasis
from raypipe.run.spec import Planned

COPY_EVERY = 3
"""Steps between in-memory copies. Workers get orders up to three steps ahead and keep two copies, so the older copy is
always of a step that all stages have completed."""
DRAIN_EVERY = 20
"""Steps between in-memory copies of an asynchronous schedule, which drains the pipeline before each. Draining costs
(stages - 1) / (20 x micro-batches) of the time."""


@dataclass(frozen=True, slots=True)
class Job:
    """Run that is ready to start.

    Attributes:
        basis: input of this plan and of later ones.
        planned: plan, with memory budgets.
        tensors: the user's parameters and buffers by name, read only. Tensors of ``unfilled`` are on the meta device.
        example: one micro-batch, {column: tensor}.
        sources: source of "train", and of "eval" if there is eval_data.
        codecs: configured codecs; for "auto" the codecs with which a run begins.
        model_labels, model_code: labels of the model, and of its code and options, for settings.json.
        unfilled: sources from which workers load the tensors that this process does not hold.
    """

    arguments: Arguments
    pipeline: PipelineConfig
    opened: Opened
    basis: PlanBasis
    planned: Planned
    programs: tuple[StageProgram, ...]
    tensors: Mapping[str, torch.Tensor]
    example: Mapping[Any, torch.Tensor]
    sources: Mapping[str, Source]
    settings: Settings
    codecs: Codecs
    model_labels: Mapping[str, Any]
    model_code: Mapping[str, Any]
    unfilled: tuple[StateSource, ...] = ()

    @property
    def initial(self) -> tuple[StateSource, ...]:
        """Sources of the stages' initial tensors; each tensor comes from the first source that lists its name."""
        elsewhere = {name for source in self.unfilled for name in source.names}
        held = {name: x for name, x in self.tensors.items() if not x.is_meta and name not in elsewhere}
        return (*self.unfilled, GivenTensors(held))

    @property
    def persistent(self) -> frozenset[str]:
        """Names of tensors that belong to the state_dict."""
        captured = self.opened.captured
        return frozenset(captured.parameters) | captured.persistent

    @property
    def aliases(self) -> dict[str, str]:
        """{further name of a shared tensor in the state_dict: name that raypipe uses}."""
        first, wanted = canonical_names(self.opened.model), self.opened.model.state_dict().keys()
        return {name: first[name] for name in first if first[name] != name and name in wanted}

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def num_stages(self) -> int:
        return len(self.programs)

    @property
    def placement(self) -> tuple[int, ...]:
        """Leading worker of each stage: the first of its replicas."""
        return self.plan.schedule.wiring.placement

    @property
    def num_workers(self) -> int:
        """Number of workers: fewer than stages if workers hold several stages, more if stages have replicas."""
        return self.plan.schedule.wiring.num_workers

    @property
    def flow(self) -> Flow | None:
        """Flow of mini-batches in an asynchronous schedule.

        None for a synchronous one, whose pipeline drains every step.
        """
        return flow_of(self.plan)

    @property
    def copy_interval_steps(self) -> int:
        """Steps between two in-memory copies of the state, for a run that survives failures.

        An asynchronous schedule drains the pipeline before each copy, which changes later weight versions and so the
        results. Therefore the interval does not depend on machines or submissions.
        """
        return COPY_EVERY if self.flow is None else DRAIN_EVERY

    def noting(self, note: str) -> Job:
        """Copy the job with a further note in its plan and in later plans."""
        basis = dataclasses.replace(self.basis, notes=(*self.basis.notes, note))
        plan = dataclasses.replace(self.plan, notes=(*self.plan.notes, note))
        return dataclasses.replace(self, basis=basis, planned=dataclasses.replace(self.planned, plan=plan))

    def schedule(self, num_microbatches: int, *, training: bool = True) -> Schedule:
        """Return the checked schedule of a step, or evaluation, of so many micro-batches: actions for each worker."""
        return self.rows(RowsKey(num_microbatches, training=training, update_interval=self.plan.weights.interval))

    def rows(self, key: RowsKey) -> Schedule:
        """Return the checked schedule for a key: a row of actions for each worker; see planner.segments.rows_for."""
        return rows_for(self.plan, key)

    def run_setup(self, place: Place | None, links: PipelineConfig | None = None) -> RunSetup:
        """Create the workers' configuration for the run, independent of the plan.

        Args:
            place: folder of the run; None for a run without a folder.
            links: configuration of links between processes; None for threads.
        """
        arguments, sources = self.arguments, self.sources
        setup = RunSetup(
            arguments.optimizer, arguments.lr_scheduler, sources, self.settings, self.persistent, place,
            metrics=arguments.metrics or {}, token_column=token_column(sources["train"].columns, self.example),
            compile_stages=self.pipeline.compile_stages, cuda_graphs=self.pipeline.cuda_graphs,
        )  # fmt: skip
        if links is None:
            return setup
        return dataclasses.replace(
            setup,
            run_id=uuid.uuid4().hex,
            secret=secrets.token_bytes(32),
            transport=links.transport,
            link_checksum=links.link_checksum,
            torch_settings=torch_settings(),
            working_folder=str(Path.cwd()),
            link_ports=None if links.link_ports == "auto" else links.link_ports,
            driver_grace_s=float(links.driver_grace_s),
            worker_price_per_hour=links.worker_price_per_hour,
        )

    def generation_setup(self) -> GenerationSetup:
        """Create the part of the workers' configuration that changes with the plan."""
        return generation_setup(self.plan, self.programs, self.codecs)

    def steps(self, num_steps: int | None, num_epochs: int | None) -> int:
        """Return the number of steps of the whole run, from the arguments of ``fit``.

        Raises:
            ConfigError: both or neither were given, or the value is not a number of steps.
        """
        if (num_steps is None) == (num_epochs is None):
            raise ConfigError("fit() takes exactly one of num_steps and num_epochs, as in fit(num_steps=500).")
        name, count = ("num_steps", num_steps) if num_epochs is None else ("num_epochs", num_epochs)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"{name}={count!r} is not possible: give an integer of at least 1.")
        if num_epochs is None:
            return count
        if self.sources["train"].num_samples == ENDLESS:
            raise ConfigError(
                f"num_epochs={count} is not possible: train_data is a stream, whose epoch has no end. Give num_steps, "
                "or train_data=raypipe.data.Stream(data, num_samples=...)."
            )
        return num_steps_of(count, self.sources["train"].num_samples, self.plan.minibatch_size)

    @undisturbed()
    def check(self) -> None:
        """Compare the user's own module with the stages on two micro-batches, unless verify="off".

        If stages leave out checks in forward, these are made on the first mini-batch.

        Raises:
            RaypipeError: results differ, a check fails, or the model has tensors on the meta device and no sources
                of their values.
        """
        opened, captured, source, size = (
            self.opened,
            self.opened.captured,
            self.sources["train"],
            self.plan.microbatch_size,
        )
        opened.memory.restore()
        if has_described(opened.model):
            raise ConfigError(
                "weights_on='workers': the model has 4-bit layers without values, which can be planned, but workers "
                "cannot quantize. Quantize it in this process, as from_pretrained does with a BitsAndBytesConfig, and "
                "leave weights_on out."
            )
        if opened.unfilled:  # without tensors nothing can be compared; a note of the plan states that
            return
        if any(tensor.is_meta for tensor in (*captured.parameters.values(), *captured.buffers.values())):
            raise ConfigError(
                "The model has parameters on the meta device, which hold no numbers. Build it with numbers, give the "
                "file or folder that has them as init_from, or set weights_on='workers', which has workers "
                "initialise them."
            )
        columns = tuple(opened.example)
        if captured.checks:
            count = min(self.plan.minibatch_size, source.num_samples)
            whole = by_name(columns, source.read(0, 0, count, columns))
            batches = [{name: x[at : at + size] for name, x in whole.items()} for at in range(0, count, size)]
            refuse_failed_checks(opened.model, captured, batches)
            opened.memory.restore()
        if self.pipeline.verify == "off":
            return
        sizes, rows = opened.sizes, by_name(columns, source.read(0, 0, min(2 * size, source.num_samples), columns))
        first = {name: column[:size] for name, column in rows.items()}
        # If there are too few rows for a second micro-batch of this size, the first one is used in reverse order.
        full = source.num_samples >= 2 * size
        second = {name: column[size:] if full else column[:size].flip(0) for name, column in rows.items()}
        if sizes.varying:
            ends = (sizes.largest, sizes.smallest)
            first, second = (by_name(columns, sizes.rows(source, columns, size, offset)) for offset in ends)
        with shown_while("comparing the stages with the model"):
            verify(opened.model, captured, self.programs, (first, second), self.pipeline.seed)

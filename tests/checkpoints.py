"""What the tests of checkpoints share: fleets in threads that save, and places that keep files in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.fs
import torch

from raypipe.data.open_data import open_data
from raypipe.engine.io.checkpoint import (
    Manifest,
    SampleOrder,
    checkpoint_name,
    commit,
    make_manifest,
    take_snapshot,
    write_snapshot,
)
from raypipe.engine.io.storage import Place
from raypipe.engine.local import LocalFleet
from raypipe.engine.optim.norms import norm_of
from raypipe.engine.optim.state import MakeOptimizer, MakeScheduler, Settings, StageState
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.stage import StageProgram
from raypipe.ir.report import merge_reports
from raypipe.ir.schedule import single_homes
from raypipe.ir.segment import Order
from raypipe.planner.search import microbatches
from raypipe.planner.segments import Position, train_segments
from tests.exactness import Shape, captured, config_of, programs, request_of, rows_of
from tests.models import case

__all__ = ["Training", "memory_places", "save", "small_checkpoint", "small_stage"]


class Training:
    """A cut model in threads, stepped by hand.

    Attributes:
        losses, norms: of the steps so far.
        at: where it stands.
    """

    def __init__(
        self, name: str, stages: int, shape: Shape, optimizer: MakeOptimizer, scheduler: MakeScheduler | None,
        norm: float,
    ) -> None:  # fmt: skip
        self.config = config_of(shape, stages, max_grad_norm=norm)
        self.made, self.programs, self.shape = captured(name)[1], programs(name, stages), shape
        self.persistent = frozenset(self.made.parameters) | self.made.persistent
        source = open_data(case(name).data(shape.samples), seed=self.config.seed)
        settings = Settings(self.config.seed, self.config.loss_reduction, norm, 30.0)
        tensors = {**self.made.parameters, **self.made.buffers}
        self.fleet = LocalFleet(
            RunSetup(optimizer, scheduler, {"train": source}, settings),
            GenerationSetup(self.programs, single_homes(range(len(self.programs)))),
            tensors,
        )
        self.at = Position()
        self.losses: list[float | None] = []
        self.norms: list[float | None] = []

    @property
    def states(self) -> list[StageState]:
        return self.fleet.states

    def run_to(self, step: int) -> None:
        """Train until so many steps are done."""
        request = request_of(self.config, self.shape.samples)
        minibatch, size, _ = microbatches(request, len(self.programs))
        rows = rows_of(request, self.programs)
        for segment, after in train_segments(self.shape.samples, minibatch, size, step, self.at):
            for reports in self.fleet.run(iter([Order(segment)]), rows):
                record = merge_reports([of_stage[0] for of_stage in reports], None, norm_of)
                self.losses.append(record.loss)
                self.norms.append(record.grad_norm)
            self.at = after

    def save(self, run: Place) -> Manifest:
        """A checkpoint of where it stands."""
        return save(run, self.programs, self.states, self.persistent, self.at, self.shape)


def save(
    run: Place, stages: Sequence[StageProgram], states: Sequence[StageState], persistent: frozenset[str],
    at: Position, shape: Shape, metrics: dict[str, float] | None = None,
) -> Manifest:  # fmt: skip
    """All of a checkpoint."""
    folder = checkpoint_name(at.step)
    entries = [
        write_snapshot(run, folder, take_snapshot(program, state, persistent))
        for program, state in zip(stages, states, strict=True)
    ]
    order = SampleOrder(0, shape.minibatch, 2, shape.samples)
    manifest = make_manifest(entries[::-1], asdict(at), order, {}, metrics)
    commit(run, folder, manifest)
    return manifest


def small_stage(stages: int = 2, scale: float = 1.0) -> tuple[tuple[StageProgram, ...], list[StageState]]:
    """A few linear layers after one step of AdamW on made-up gradients."""
    cut = programs("mlp", stages)
    made = captured("mlp")[1]
    states = []
    for program in cut:
        own = {name: made.parameters[name].detach().clone() for name in program.parameters}
        state = StageState(program, own, lambda named: torch.optim.AdamW(named, lr=1e-2), None)
        for parameter in state.parameters.values():
            parameter.grad = torch.full_like(parameter, scale)
        assert state.optimizer is not None
        state.optimizer.step()
        for parameter in state.parameters.values():
            parameter.data.mul_(scale)
        states.append(state)
    return cut, states


def small_checkpoint(run: Place, step: int, *, scale: float = 1.0, **metrics: float) -> Place:
    """A checkpoint of ``small_stage``; the parameters depend on the scale."""
    cut, states = small_stage(scale=scale)
    names = frozenset(captured("mlp")[1].parameters)
    save(run, cut, states, names, Position(step=step), Shape(40, 8, 4), metrics)
    return run / checkpoint_name(step)


@contextmanager
def _fsspec_memory(folder: Path) -> Iterator[Place]:
    import fsspec

    filesystem = fsspec.filesystem("memory", skip_instance_cache=True)
    filesystem.store = {}  # the class shares one between all instances
    filesystem.pseudo_dirs = [""]
    yield Place.of("/run", pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(filesystem)))


@contextmanager
def _local(folder: Path) -> Iterator[Place]:
    yield Place.of(folder / "run")


@contextmanager
def _uri(folder: Path) -> Iterator[Place]:
    yield Place.of((folder / "run").as_uri())


@contextmanager
def _subtree(folder: Path) -> Iterator[Place]:
    yield Place.of("run", pyarrow.fs.SubTreeFileSystem(str(folder), pyarrow.fs.LocalFileSystem()))


@contextmanager
def _mock(folder: Path) -> Iterator[Place]:
    yield Place.of("run", pyarrow.fs._MockFileSystem())


@contextmanager
def _mock_subtree(folder: Path) -> Iterator[Place]:
    mock = pyarrow.fs._MockFileSystem()
    mock.create_dir("base")
    yield Place.of("run", pyarrow.fs.SubTreeFileSystem("base", mock))


def memory_places() -> dict[str, Callable[[Path], Any]]:
    """Kinds of places by name: folder -> context manager of a run's place."""
    return {
        "local": _local, "uri": _uri, "subtree": _subtree, "mock": _mock, "mock-subtree": _mock_subtree,
        "fsspec-memory": _fsspec_memory,
    }  # fmt: skip

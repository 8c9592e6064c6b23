"""Beside fit: the loss of a checkpoint on some data, and the model's outputs, by the stages that train it.

    trainer.evaluate(checkpoint, data)     the loss that fit reports as eval_loss
    trainer.predict(data, checkpoint)      the output of every row

Both run the stages of the plan forward only, in evaluation mode, over mini-batches cut as in training.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raypipe.api.init_from import matched, read_weights
from raypipe.api.launch import generation_setup, local_fleet
from raypipe.api.worker_weights import files_for, stored_weights
from raypipe.engine.checkpoint import find_checkpoint, load_state_dict, newest_step
from raypipe.engine.codec import Codecs
from raypipe.engine.data.source import Source, open_data
from raypipe.engine.initial.files import weights_in
from raypipe.engine.setup import RunSetup
from raypipe.engine.storage import Place
from raypipe.errors import ConfigError, DataError, StageError
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.prepare.inputs import check_columns
from raypipe.prepare.job import Job
from raypipe.runtime.run.evaluations import numbers_of, remark_on
from raypipe.runtime.run.forwards import ListOutputs, Outputs, evaluation_orders, forwards, with_outputs
from raypipe.runtime.run.spec import AnyFleet

__all__ = [
    "Stages", "actors", "evaluating", "evaluation", "predicting", "predictions", "threads", "with_checkpoint",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stages:
    """How a job's stages are had, and what takes their outputs.

    Attributes:
        open: (job) -> its stages, with its parameters, until the context ends.
    """

    open: Callable[[Job], AbstractContextManager[AnyFleet]]
    outputs: Callable[[], Outputs]


@contextmanager
def threads(resources: Mapping[str, float]) -> Iterator[Stages]:
    """Stages in threads of this process.

    Args:
        resources: of one worker.
    """
    yield Stages(lambda job: _in_threads(job, resources), ListOutputs)


@contextmanager
def actors(num_workers: int, resources: Mapping[str, float], run: Callable[[Job], RunSetup]) -> Iterator[Stages]:
    """Stages as Ray actors that this process owns, on the cluster that ``fit`` would take.

    Args:
        resources: of one worker.
        run: (job) -> what its workers know of the run.
    """
    from raypipe.runtime.driver.client import connected
    from raypipe.runtime.driver.reading import refuse_without_cpus
    from raypipe.runtime.workers.actor_outputs import ActorOutputs

    def started(job: Job) -> AbstractContextManager[AnyFleet]:
        refuse_without_cpus(job.sources, (num_workers, num_workers), resources)
        return _as_actors(job, run(job), resources)

    with connected(num_workers, resources):
        yield Stages(started, ActorOutputs)


@contextmanager
def _in_threads(job: Job, resources: Mapping[str, float]) -> Iterator[AnyFleet]:
    fleet = local_fleet(dataclasses.replace(job, make_scheduler=None), None, resources)
    try:
        yield fleet
    finally:
        fleet.stop()


@contextmanager
def _as_actors(job: Job, run: RunSetup, resources: Mapping[str, float]) -> Iterator[AnyFleet]:
    from raypipe.runtime.workers.fleet import Fleet
    from raypipe.runtime.workers.packing import stored

    setup = generation_setup(job)
    fleet = Fleet(setup.num_workers, resources, run.transport, run.link_ports)
    try:
        fleet.configure(run, setup, [stored(job.initial)])
        yield fleet
    finally:
        fleet.stop()


def with_checkpoint(
    job: Job, checkpoint: str | os.PathLike[str] | None, run: Place | None, storage: Place
) -> tuple[Job, str]:
    """The job with the weights of a checkpoint, and where that is; as it is, and "", where there is none.

    Args:
        checkpoint: what init_from takes; None for the newest one of ``run``.
        storage: where runs lie that are named by their name alone.

    Raises:
        ConfigError: names or shapes are not those of the model.
    """
    if job.unfilled:
        return _with_files(job, checkpoint, run, storage)
    if checkpoint is not None:
        source = os.fspath(checkpoint)
        found = read_weights(source, storage, "checkpoint")
    elif run is not None and newest_step(run) is not None:
        newest, _ = find_checkpoint(run)
        place = run if newest is None else newest.place
        source = str(place)
        found = load_state_dict(place.path, storage_filesystem=place.filesystem)
    else:
        return job, ""
    own = {name: job.tensors[name].detach() for name in job.tensors if name in job.persistent}
    own |= {alias: own[name] for alias, name in job.aliases.items() if name in own}
    values = matched(own, found, f"checkpoint={source!r}", "of this trainer")
    # In the layout of the model's own, on which the bits of some operations depend.
    filled = {name: torch.empty_like(own[name]).copy_(value) for name, value in values.items()}
    tensors = {
        name: filled[name].requires_grad_(tensor.requires_grad) if name in filled else tensor
        for name, tensor in job.tensors.items()
    }
    return dataclasses.replace(job, tensors=tensors), source


def _with_files(
    job: Job, checkpoint: str | os.PathLike[str] | None, run: Place | None, storage: Place
) -> tuple[Job, str]:
    """Of a model that this process does not hold, the same: each stage reads what it holds."""
    if checkpoint is not None:
        source = os.fspath(checkpoint)
        found = stored_weights(source, storage, "checkpoint")
    elif run is not None and newest_step(run) is not None:
        source = str(run)
        found = weights_in(run, "checkpoint")
    else:
        return job, ""
    own = {name: job.tensors[name] for name in job.tensors if name in job.persistent}
    own |= {alias: own[name] for alias, name in job.aliases.items() if name in own}
    files = files_for(own, job.aliases, found, f"checkpoint={source!r}", "of this trainer")
    return dataclasses.replace(job, unfilled=(files,)), source


def evaluation(job: Job, stages: Stages) -> dict[str, float]:
    """eval_loss over job.sources["eval"], each mini-batch's weighed by its items, as in ``fit``, and the metrics."""
    with _compared(job), stages.open(job) as fleet:
        found = list(forwards(fleet, _orders(job), _rows(job)))
    if remark := remark_on(found):
        warnings.warn(f"The loss of the evaluation is no number. {remark}", stacklevel=3)
    return dict(numbers_of(found, sums=job.settings.loss_reduction == "sum"))


def evaluating(job: Job, data: Any) -> Job:
    """The job with these rows to evaluate.

    Raises:
        DataError: the data lacks a column of train_data.
    """
    source = open_data(data, seed=job.settings.seed, shuffle=False, collate=job.collate)
    check_columns(tuple(job.example), source, job.sources["train"], "data")
    return dataclasses.replace(job, sources={**job.sources, "eval": source})


def predicting(job: Job, data: Any) -> Job:
    """The job with these rows to predict.

    Raises:
        ConfigError: the stages compute nothing but a loss.
        DataError: the data lacks a column that the model reads.
    """
    if job.programs[-1].eval is None or not job.programs[-1].targets:
        raise ConfigError(
            "predict() gives what the model hands to its loss_fn, but this one returns its own loss, and its stages "
            "compute nothing else. Give the trainer a loss_fn and a model that returns its output, or load the "
            "checkpoint into the model: model.load_state_dict(raypipe.load_state_dict(checkpoint))."
        )
    source = open_data(data, seed=job.settings.seed, shuffle=False, collate=job.collate)
    wanted: list[Any] = [column for program in job.programs if program.eval for column in program.eval.columns]
    count = 1 + max(wanted, default=-1)  # with a loss_fn columns are numbers
    if len(source.columns) < count:
        raise DataError(
            f"predict() was given data of {len(source.columns)} columns, but the model reads {count}. Give the columns "
            "of train_data in the same order; the target may be left out."
        )
    check_columns(sorted(set(wanted)), source, job.sources["train"], "data")
    settings = dataclasses.replace(job.settings, loss_reduction="mean")
    sources = {**job.sources, "eval": source}
    return dataclasses.replace(job, sources=sources, settings=settings, codecs=Codecs(), metrics={})


def predictions(job: Job, stages: Stages) -> Any:
    """What the model returns for job.sources["eval"], its tensors put one behind the other."""
    outputs = stages.outputs()
    try:
        job = dataclasses.replace(job, programs=with_outputs(job.programs, outputs))
        with _compared(job), stages.open(job) as fleet:
            for _ in forwards(fleet, _orders(job), _rows(job)):
                pass
        found = outputs.take()
    finally:
        outputs.close()
    return _together(found, [size for order in _orders(job) for size in order.segment.microbatch_samples])


@contextmanager
def _compared(job: Job) -> Iterator[None]:
    """Says of a failure where the data is unlike train_data, which the stages were made for.

    Raises:
        DataError: in place of the StageError.
    """
    try:
        yield
    except StageError as error:
        # What a trace is made for names the column itself; the user's own modules fail in words of torch's.
        if " failed in " in str(error) and (unlike := _unlike(job)):
            raise DataError(f"The data is unlike train_data: {unlike}. {error}") from error
        raise


def _unlike(job: Job) -> str:
    """The first column whose samples have another shape or type than those of train_data; empty where there is none."""
    source: Source = job.sources["eval"]
    numbered = all(isinstance(name, int) for name in job.example)
    names = [name for name in job.example if not numbered or name < len(source.columns)]
    try:
        read = source.read(0, 0, 1, names)
    except DataError:
        return ""
    found = read if isinstance(read, Mapping) else dict(zip(names, read, strict=True))
    for name in names:
        mine, other = (f"shape {tuple(x.shape[1:])} and type {x.dtype}" for x in (job.example[name], found[name]))
        if mine != other:
            return f"samples of column {name!r} have {other.replace('torch.', '')}, not {mine.replace('torch.', '')}"
    return ""


def _orders(job: Job) -> list[Any]:
    source: Source = job.sources["eval"]
    return evaluation_orders(source.num_samples, job.plan.minibatch_size, job.plan.microbatch_size)


def _rows(job: Job) -> Callable[[RowsKey], Schedule]:
    known: dict[RowsKey, Schedule] = {}

    def rows(key: RowsKey) -> Schedule:
        if key not in known:
            known[key] = job.rows(key)
        return known[key]

    return rows


def _together(found: Sequence[Any], sizes: Sequence[int]) -> Any:
    """One output of the structure that each has.

    Raises:
        ConfigError: something in it is not by row and not the same in all micro-batches.
    """
    flat = [pytree.tree_flatten(output) for output in found]
    spec = flat[0][1]
    leaves = []
    for number, parts in enumerate(zip(*(values for values, _ in flat), strict=True)):
        if all(isinstance(x, torch.Tensor) and x.dim() and len(x) == n for x, n in zip(parts, sizes, strict=True)):
            leaves.append(torch.cat(parts))
        elif not isinstance(parts[0], torch.Tensor) and all(part == parts[0] for part in parts):
            leaves.append(parts[0])
        else:
            what = f"shape {tuple(parts[0].shape)}" if isinstance(parts[0], torch.Tensor) else repr(parts[0])
            raise ConfigError(
                f"predict() puts the outputs of micro-batches one behind the other, but value {number} of the model's "
                f"output has {what} for {sizes[0]} rows, so it has no row for each of them. Leave it out of what the "
                "model returns in evaluation mode."
            )
    return pytree.tree_unflatten(leaves, spec)

"""Evaluation and prediction outside of ``fit``: the loss of a checkpoint over data, and the outputs of the model.

    trainer.evaluate(checkpoint, data)     the loss that fit reports as eval_loss
    trainer.predict(data, checkpoint)      the output of every row

Both run the stages of the plan forward only, in evaluation mode. Data are split into mini-batches as in training.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raypipe.api.devices import in_threads
from raypipe.api.initial_weights import files_for, matched, read_weights, stored_weights
from raypipe.data.open_data import Source, open_data
from raypipe.engine.codec import Codecs
from raypipe.engine.initial.weight_files import weights_in
from raypipe.engine.io.checkpoint import find_checkpoint, load_state_dict, newest_step
from raypipe.engine.io.storage import Place
from raypipe.engine.local import LocalFleet
from raypipe.engine.setup import RunSetup
from raypipe.errors import ConfigError, DataError, StageError
from raypipe.prepare.inputs import check_columns, refuse_stateful_data
from raypipe.prepare.job import Job
from raypipe.run.evaluations import ListOutputs, Outputs, evaluation_orders, numbers_of, remark_on, with_outputs
from raypipe.run.spec import AnyFleet


@dataclass(frozen=True, slots=True)
class Stages:
    """Factory of running stages, and of receivers for their outputs.

    Attributes:
        open: (job) -> context manager that yields the job's running stages as a fleet, and stops them at its end.
        outputs: creates an object that collects the last stage's outputs.
    """

    open: Callable[[Job], AbstractContextManager[AnyFleet]]
    outputs: Callable[[], Outputs]


@contextmanager
def threads(resources: Mapping[str, float]) -> Iterator[Stages]:
    """Yield a factory of stages in threads of this process.

    Args:
        resources: resources of one worker.
    """
    yield Stages(lambda job: _in_threads(job, resources), ListOutputs)


@contextmanager
def actors(num_workers: int, resources: Mapping[str, float], run: Callable[[Job], RunSetup]) -> Iterator[Stages]:
    """Yield a factory of stages in Ray actors of this process, on the cluster that ``fit`` would use.

    Args:
        resources: resources of one worker.
        run: (job) -> the part of the workers' configuration that does not depend on the plan.
    """
    from raypipe.runtime.driver.ray_cluster import connected, refuse_without_cpus
    from raypipe.runtime.worker.packing import ActorOutputs

    def started(job: Job) -> AbstractContextManager[AnyFleet]:
        refuse_without_cpus(job.sources, (num_workers, num_workers), resources)
        return _as_actors(job, run(job), resources)

    with connected(num_workers, resources):
        yield Stages(started, ActorOutputs)


@contextmanager
def _in_threads(job: Job, resources: Mapping[str, float]) -> Iterator[AnyFleet]:
    job = dataclasses.replace(job, arguments=job.arguments._replace(lr_scheduler=None))
    fleet = LocalFleet(job.run_setup(None), job.generation_setup(), job.initial, in_threads(resources))
    try:
        yield fleet
    finally:
        fleet.stop()


@contextmanager
def _as_actors(job: Job, run: RunSetup, resources: Mapping[str, float]) -> Iterator[AnyFleet]:
    from raypipe.runtime.fleet.fleet import Fleet
    from raypipe.runtime.fleet.roster import Terms
    from raypipe.runtime.worker.packing import stored

    setup = job.generation_setup()
    fleet = Fleet(setup.num_workers, Terms(resources, run.transport, run.link_ports, folder=run.working_folder))
    try:
        fleet.configure(run, setup, [stored(job.initial)])
        yield fleet
    finally:
        fleet.stop()


def with_checkpoint(
    job: Job, checkpoint: str | os.PathLike[str] | None, run: Place | None, storage: Place
) -> tuple[Job, str]:
    """Return (the job with the weights of a checkpoint, path of the checkpoint).

    If ``checkpoint`` is None and ``run`` has no checkpoint, the result is (unchanged job, "").

    Args:
        checkpoint: a value as for init_from; None for the newest checkpoint of ``run``.
        run: folder of the run whose newest checkpoint is used if ``checkpoint`` is None; None without such a run.
        storage: folder of the runs, in which ``checkpoint`` is looked up if it is the name of a run.

    Raises:
        ConfigError: names or shapes are not those of the model.
    """
    place: Place | None = None
    if checkpoint is not None:
        source = os.fspath(checkpoint)
    elif run is None or newest_step(run) is None:
        return job, ""
    else:
        newest, _ = find_checkpoint(run)
        place = run if newest is None else newest.place
        source = str(place)
    own = {name: job.tensors[name].detach() for name in job.tensors if name in job.persistent}
    own |= {alias: own[name] for alias, name in job.aliases.items() if name in own}
    title, model = f"checkpoint={source!r}", "of this trainer"
    if job.unfilled:  # each stage will read its own tensors
        files = stored_weights(source, storage, "checkpoint") if place is None else weights_in(place, title)
        return dataclasses.replace(job, unfilled=(files_for(own, job.aliases, files, title, model),)), source
    if place is None:
        weights = read_weights(source, storage, "checkpoint")
    else:
        weights = load_state_dict(place.path, storage_filesystem=place.filesystem)
    values = matched(own, weights, title, model)
    # In the layout of the model's own, on which the bits of some operations depend.
    filled = {name: torch.empty_like(own[name]).copy_(value) for name, value in values.items()}
    tensors = {
        name: filled[name].requires_grad_(tensor.requires_grad) if name in filled else tensor
        for name, tensor in job.tensors.items()
    }
    return dataclasses.replace(job, tensors=tensors), source


def evaluation(job: Job, stages: Stages) -> dict[str, float]:
    """Return eval_loss over the job's evaluation data, weighted as in ``fit``, and eval_<name> of each metric."""
    with _compared(job), stages.open(job) as fleet:
        reports = list(fleet.run(iter(_orders(job)), functools.cache(job.rows)))
    if remark := remark_on(reports):
        warnings.warn(f"The loss of the evaluation is no number. {remark}", stacklevel=3)
    return dict(numbers_of(reports, sums=job.settings.loss_reduction == "sum"))


def evaluating(job: Job, data: Any) -> Job:
    """Return the job with ``data`` as its evaluation data.

    Raises:
        DataError: the data lacks a column of train_data.
    """
    source = open_data(data, seed=job.settings.seed, shuffle=False, collate=job.arguments.collate_fn)
    refuse_stateful_data(source)
    check_columns(tuple(job.example), source, job.sources["train"], "data")
    return dataclasses.replace(job, sources={**job.sources, "eval": source})


def predicting(job: Job, data: Any) -> Job:
    """Return a copy of the job for predictions: with ``data`` as evaluation data, and without codecs and metrics.

    Raises:
        ConfigError: the model returns its own loss, so that the stages compute no output.
        DataError: the data lacks a column that the model reads.
    """
    if job.programs[-1].eval is None or not job.programs[-1].targets:
        raise ConfigError(
            "predict() gives what the model hands to its loss_fn, but this one returns its own loss, and its stages "
            "compute nothing else. Give the trainer a loss_fn and a model that returns its output, or load the "
            "checkpoint into the model: model.load_state_dict(raypipe.load_state_dict(checkpoint))."
        )
    source = open_data(data, seed=job.settings.seed, shuffle=False, collate=job.arguments.collate_fn)
    refuse_stateful_data(source)
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
    arguments = job.arguments._replace(metrics=None)
    return dataclasses.replace(job, sources=sources, settings=settings, codecs=Codecs(), arguments=arguments)


def predictions(job: Job, stages: Stages) -> Any:
    """Compute the outputs of the model for the job's evaluation data, concatenated over micro-batches."""
    outputs = stages.outputs()
    try:
        job = dataclasses.replace(job, programs=with_outputs(job.programs, outputs))
        with _compared(job), stages.open(job) as fleet:
            for _ in fleet.run(iter(_orders(job)), functools.cache(job.rows)):
                pass
        collected = outputs.take()
    finally:
        outputs.close()
    return _together(collected, [size for order in _orders(job) for size in order.segment.microbatch_samples])


@contextmanager
def _compared(job: Job) -> Iterator[None]:
    """Turn a StageError inside the context into a DataError if the data has other shapes or dtypes than train_data."""
    try:
        yield
    except StageError as error:
        # What a trace is made for names the column itself; the user's own modules fail in words of torch's.
        if " failed in " in str(error) and (unlike := _unlike(job)):
            raise DataError(f"The data is unlike train_data: {unlike}. {error}") from error
        raise


def _unlike(job: Job) -> str:
    """Describe the first column whose samples have another shape or dtype than in train_data; "" if all agree."""
    source: Source = job.sources["eval"]
    numbered = all(isinstance(name, int) for name in job.example)
    names = [name for name in job.example if not numbered or name < len(source.columns)]
    try:
        read = source.read(0, 0, 1, names)
    except DataError:
        return ""
    columns = read if isinstance(read, Mapping) else dict(zip(names, read, strict=True))
    for name in names:
        mine, other = (f"shape {tuple(x.shape[1:])} and type {x.dtype}" for x in (job.example[name], columns[name]))
        if mine != other:
            return f"samples of column {name!r} have {other.replace('torch.', '')}, not {mine.replace('torch.', '')}"
    return ""


def _orders(job: Job) -> list[Any]:
    source: Source = job.sources["eval"]
    return evaluation_orders(source.num_samples, job.plan.minibatch_size, job.plan.microbatch_size)


def _together(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate the outputs of micro-batches into one output of the same structure.

    Tensors with one row per sample are concatenated. A value that is not a tensor is kept if all micro-batches agree.

    Args:
        sizes: number of samples of each micro-batch.

    Raises:
        ConfigError: the output has any other value, such as a tensor without one row per sample.
    """
    flat = [pytree.tree_flatten(output) for output in outputs]
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

"""Parts of Trainer that stages get: optimizer, scheduler, and samples in Trainer's order."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import IterableDataset, SequentialSampler
from transformers import get_scheduler
from transformers.trainer_pt_utils import LengthGroupedSampler

from raypipe.data import Stream
from raypipe.data.item_randomness import own_generators
from raypipe.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class StageOptimizer:
    """Function (named parameters) -> optimizer of a stage, with the groups of an optimizer of the whole model.

    Attributes:
        kind: class of the optimizer.
        defaults: keyword arguments of its constructor.
        groups: options of each group.
        group_of: number of the group of each parameter, by the parameter's name.
    """

    kind: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    groups: tuple[Mapping[str, Any], ...]
    group_of: Mapping[str, int]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> StageOptimizer:
        """Read class, options and groups of an optimizer; its state, and what a scheduler has changed, are left out."""
        group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        accepted = inspect.signature(type(optimizer)).parameters.keys() - {"params"}
        return cls(
            type(optimizer),
            {name: value for name, value in optimizer.defaults.items() if name in accepted},
            tuple(
                {name: group.get(f"initial_{name}", group[name]) for name in group.keys() & accepted}
                for group in optimizer.param_groups
            ),
            {n: group_of[id(p)] for n, p in model.named_parameters(remove_duplicate=False) if id(p) in group_of},
        )

    def __call__(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        parts: list[list[torch.nn.Parameter]] = [[] for _ in self.groups]
        for name, parameter in named:
            parts[self.group_of[name]].append(parameter)
        kind: Any = self.kind
        made: torch.optim.Optimizer = kind(
            [{**group, "params": part} for group, part in zip(self.groups, parts, strict=True) if part],
            **self.defaults,
        )
        return made


def stage_scheduler(name: str, warmup: int, steps: int, options: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Make the scheduler of a stage, as ``Trainer.create_scheduler`` does."""
    return get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=steps, scheduler_specific_kwargs=options
    )


class TrainersOrder:
    """Stream of a dataset's items in the order of a sampler of Trainer, which each epoch has anew.

    Args:
        sampler: sampler whose order follows from the epoch, or from the global generator.
        size: number of items in an epoch.
        state: state of the global generator when the training begins. Each epoch draws from it what Trainer draws: the
            seed of a data loader, and the order.
    """

    def __init__(self, dataset: Any, sampler: Any, size: int, state: torch.Tensor) -> None:
        self._dataset, self._sampler, self._size, self._state = dataset, sampler, size, state
        self._epoch = self._next = 0

    def __deepcopy__(self, memo: Any) -> TrainersOrder:
        return copy.copy(self)  # readers share the dataset

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._next = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next = state["next"]

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        for position in range(self._next, self._size):
            self._next = position + 1
            yield self._dataset[order[position]]

    def _order(self) -> list[int]:
        sampler = copy.copy(self._sampler)
        with own_generators():  # the copy shares its generator with other readers'
            if isinstance(sampler, SeedableRandomSampler):
                sampler.set_epoch(self._epoch)
            if not isinstance(sampler, LengthGroupedSampler):
                return list(sampler)
            torch.set_rng_state(self._state)
            for _ in range(self._epoch):
                torch.empty((), dtype=torch.int64).random_()
                list(sampler)
            torch.empty((), dtype=torch.int64).random_()
            return list(sampler)


class WholeMinibatches:
    """Stream of which each pass ends with a whole mini-batch. Trainer begins each pass with a new mini-batch.

    Args:
        dataset: iterable, with or without ``set_epoch``.
        size: samples of a mini-batch.
    """

    def __init__(self, dataset: Any, size: int) -> None:
        self._dataset, self._size = dataset, size

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for item in self._dataset:
            yield item
            count += 1
        if count % self._size:
            raise ConfigError(
                f"train_dataset ends after {count} items, in the middle of a mini-batch of {self._size}. Set max_steps "
                f"to {count // self._size} or less, or give a stream with a multiple of {self._size} items."
            )


def stream_of(loader: Any, args: Any, state: torch.Tensor) -> Stream:
    """Make a stream of the samples that a data loader of Trainer reads.

    Args:
        state: state of the global generator when the training begins.

    Raises:
        ConfigError: the order depends on the sampler's own state.
    """
    if isinstance(loader.dataset, IterableDataset):
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return Stream(WholeMinibatches(loader.dataset, size))
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if not isinstance(sampler, SeedableRandomSampler | SequentialSampler | LengthGroupedSampler):
        kind = type(sampler or loader.batch_sampler).__name__
        raise ConfigError(
            f"The training data has a {kind}, whose order depends on its own state, so that a run could not resume in "
            "it. Set train_sampling_strategy to 'random', 'sequential' or 'group_by_length', or give a dataset whose "
            "items are in that order."
        )
    size = len(sampler)
    if args.dataloader_drop_last:
        size -= size % args.per_device_train_batch_size
    return Stream(TrainersOrder(loader.dataset, sampler, size, state), num_samples=size)

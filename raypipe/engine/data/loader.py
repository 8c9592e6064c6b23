"""A torch DataLoader as train_data: its dataset, batch size, collate function and shuffling are taken over.

    DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=pad)
               |        |              |             called with the samples of a mini-batch, or of a part of one
               |        |              every epoch in raypipe's own order, of its seed
               |        minibatch_size
               every stage reads the items that it needs by their numbers

A run that goes on continues in the middle of an epoch, at any number of stages: an order that only a sampler knows
cannot be continued so, and what would be dropped is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import default_collate as torchs_own

from raypipe.errors import ConfigError, DataError

__all__ = ["Taken", "batch_size_of", "notes_on", "taken_over"]


class Taken(NamedTuple):
    """What a DataLoader is made of.

    Attributes:
        dataset: map-style.
        collate: (list of items) -> batch; None stacks them.
        shuffles: the order of every epoch is drawn anew.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] | None
    shuffles: bool


def taken_over(data: Any) -> Taken | None:
    """What a DataLoader is made of; None for any other data.

    Raises:
        DataError: it does something that a pipeline would not do; names the argument.
    """
    if not isinstance(data, DataLoader):
        return None
    for name, found, cure in _faults(data):
        raise DataError(f"The DataLoader has {name}={found}, which raypipe would not follow: {cure}")
    collate = None if data.collate_fn is torchs_own else data.collate_fn
    return Taken(data.dataset, collate, isinstance(data.sampler, RandomSampler))


def batch_size_of(data: Any, minibatch_size: Any) -> Any:
    """minibatch_size of a run on this data: that of its DataLoader, where nothing else was said.

    Raises:
        ConfigError: both say something, and not the same.
    """
    if not isinstance(data, DataLoader) or data.batch_size is None:
        return minibatch_size
    if minibatch_size not in ("auto", data.batch_size):
        raise ConfigError(
            f"train_data is a DataLoader with batch_size={data.batch_size}, but minibatch_size={minibatch_size}. Say "
            "it in one place: leave minibatch_size out, or give the DataLoader's dataset and collate_fn instead."
        )
    return data.batch_size


def notes_on(data: Any) -> Iterator[str]:
    """What a reader of the plan should know of how a DataLoader was taken over."""
    if not isinstance(data, DataLoader):
        return
    if isinstance(data.sampler, RandomSampler):
        yield (
            "train_data is a DataLoader with shuffle=True: epochs are shuffled in raypipe's own order, keyed by "
            "PipelineConfig(seed=...), not in that of the sampler's generator, so that a run can go on anywhere."
        )
    if data.num_workers:
        yield (
            f"train_data is a DataLoader with num_workers={data.num_workers}: stages read their data ahead in a thread "
            "of their own, and start no processes for it."
        )


def _faults(data: DataLoader[Any]) -> Iterator[tuple[str, str, str]]:
    """(argument, what was given, what to do) of all that would be dropped."""
    sampler: Any = data.sampler
    if isinstance(data.dataset, IterableDataset):
        yield "dataset", type(data.dataset).__name__, (
            "a stream is read by every stage for itself, one item after the other. Give the dataset itself as the "
            "data, and its batch size and collate function as minibatch_size and collate_fn."
        )  # fmt: skip
    elif type(data).__iter__ is not DataLoader.__iter__:
        yield "__iter__", f"{type(data).__name__}.__iter__", (
            "stages read the dataset's items by their numbers and never iterate over the loader. Do in __getitem__ or "
            "in collate_fn what it does, and give a plain DataLoader."
        )  # fmt: skip
    elif type(data.batch_sampler) is not BatchSampler:
        yield "batch_sampler", type(data.batch_sampler).__name__, (
            "mini-batches are cut from an epoch's order by minibatch_size. Give batch_size and shuffle instead."
        )  # fmt: skip
    elif data.batch_size is None:
        yield "batch_sampler", type(data.batch_sampler).__name__, (
            "its batch size, order and drop_last would be left out. Give batch_size and shuffle instead."
        )  # fmt: skip
    elif type(sampler) not in (RandomSampler, SequentialSampler):
        yield "sampler", type(sampler).__name__, (
            "its order is known to nobody else: a run could not go on in it. Give shuffle=True or False, or "
            "a dataset whose items already stand in that order (torch.utils.data.Subset(dataset, order))."
        )  # fmt: skip
    elif isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(sampler.data_source)
    ):
        yield "sampler", "RandomSampler with replacement or num_samples", (
            "an epoch has every item once. Give shuffle=True."
        )  # fmt: skip
    elif sampler.data_source is not data.dataset:
        yield "sampler", f"{type(sampler).__name__}({type(sampler.data_source).__name__})", (
            "it numbers the items of something else than the DataLoader's dataset. Give shuffle=True or False, or "
            "of a part of a dataset torch.utils.data.Subset(dataset, numbers)."
        )  # fmt: skip
    elif data.drop_last:
        yield "drop_last", "True", (
            "the mini-batch at the end of an epoch has the rest of the samples, and its loss is weighed by them. Leave "
            "drop_last out, or give a dataset whose length is a multiple of batch_size."
        )  # fmt: skip
    elif data.worker_init_fn is not None:
        yield "worker_init_fn", getattr(data.worker_init_fn, "__name__", "a function"), (
            "there are no worker processes. Do in __getitem__ or in the dataset's __init__ what it does."
        )  # fmt: skip

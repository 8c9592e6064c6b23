"""Random numbers of a dataset's ``__getitem__``, keyed by (seed, epoch, row) in every process.

Several stages read the same rows, each in its own process and only its own columns: the first the input, the last the
target. A dataset that crops or masks at random must draw the same numbers for both, and again after a resume. So
torch's, numpy's and Python's global generators are seeded before each item and restored afterwards. They belong to the
whole process, hence one lock for all sources.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from raypipe.splitmix import mixed

_IN_USE = threading.RLock()


class GeneratorStates(NamedTuple):
    """States of torch's CPU generator, numpy's legacy generator and Python's."""

    torch: torch.Tensor
    numpy: Any
    python: Any

    def same_as(self, other: GeneratorStates) -> bool:
        """Return True if no random number was drawn between the two reads of the states."""
        (a, b), keys = (self.numpy, other.numpy), ("has_gauss", "gauss")
        return (
            torch.equal(self.torch, other.torch)
            and self.python == other.python
            and a["state"]["pos"] == b["state"]["pos"]
            and np.array_equal(a["state"]["key"], b["state"]["key"])
            and all(a[key] == b[key] for key in keys)
        )


def generator_states() -> GeneratorStates:
    """Read the states of the three global generators."""
    return GeneratorStates(
        torch=torch.default_generator.get_state(), numpy=np.random.get_state(legacy=False), python=random.getstate()
    )


@contextmanager
def own_generators() -> Iterator[None]:
    """Lock torch's CPU, numpy's and Python's global generators for this thread; restore their states afterwards."""
    with _IN_USE:
        before = generator_states()
        try:
            yield
        finally:
            torch.default_generator.set_state(before.torch)
            np.random.set_state(before.numpy)
            random.setstate(before.python)


def seed_generators(seed: int, epoch: int, row: int) -> None:
    """Seed torch's CPU generator and the global generators of numpy and Python by a hash of (seed, epoch, row)."""
    key = mixed(seed, epoch, row)
    torch.default_generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)

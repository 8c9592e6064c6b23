"""Randomness of a dataset's own ``__getitem__``: keyed by (seed, epoch, row), whoever reads the row and when.

Several stages read the same rows, each in its own process and only its own columns: the first the input, the last the
target. A dataset that crops or masks at random must draw the same numbers for both, and draw them again when a run goes
on. So torch's, numpy's and Python's global generators are seeded by (seed, epoch, row) before each item, and are put
back afterwards. They belong to the whole process, hence one lock for all sources of it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from raypipe.engine.randomness import mixed

__all__ = ["GeneratorStates", "generator_states", "own_generators", "seed_generators"]

_IN_USE = threading.RLock()


class GeneratorStates(NamedTuple):
    """Where the three global generators stand."""

    torch: torch.Tensor
    numpy: Any
    python: Any

    def same_as(self, other: GeneratorStates) -> bool:
        """Whether nothing was drawn in between."""
        (a, b), keys = (self.numpy, other.numpy), ("has_gauss", "gauss")
        return (
            torch.equal(self.torch, other.torch)
            and self.python == other.python
            and a["state"]["pos"] == b["state"]["pos"]
            and np.array_equal(a["state"]["key"], b["state"]["key"])
            and all(a[key] == b[key] for key in keys)
        )


def generator_states() -> GeneratorStates:
    """Of torch's CPU generator, numpy's legacy one and Python's."""
    return GeneratorStates(
        torch.default_generator.get_state(), np.random.get_state(legacy=False), random.getstate()
    )  # fmt: skip


@contextmanager
def own_generators() -> Iterator[None]:
    """Nobody else that reads data uses the generators inside, and they are put back at the end."""
    with _IN_USE:
        before = generator_states()
        try:
            yield
        finally:
            torch.default_generator.set_state(before.torch)
            np.random.set_state(before.numpy)
            random.setstate(before.python)


def seed_generators(seed: int, epoch: int, row: int) -> None:
    """Begin the draws of one item."""
    key = mixed(seed, epoch, row)
    torch.default_generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)

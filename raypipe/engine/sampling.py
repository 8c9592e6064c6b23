"""Choice of the next token from logits: the largest, or one that is drawn with a random number keyed by its place.

The key is (seed, number of the sequence, number of the token), so that tokens depend neither on the number of stages
nor on which sequences are decoded together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raypipe.errors import ConfigError
from raypipe.splitmix import mixed


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of the choice, with the meaning that they have in transformers' ``generate``.

    Attributes:
        do_sample: False takes the token with the largest logit.
        temperature: divisor of the logits.
        top_k: number of most probable tokens to draw from; None for all.
        top_p: probability of the smallest set of most probable tokens to draw from; None for all.
        seed: seed of the random numbers.

    Raises:
        ConfigError: a value is out of range.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(
                f"temperature={self.temperature!r} is not possible: logits are divided by it. Give a number above 0, "
                "or do_sample=False for the most probable token."
            )
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k > 0):
            raise ConfigError(f"top_k={self.top_k!r} is not possible: give an integer of at least 1, or None for all.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p!r} is not possible: give a probability above 0, or None for all.")

    def choose(self, logits: torch.Tensor, sequences: Sequence[int], number: int) -> torch.Tensor:
        """Choose a token for each sequence.

        Args:
            logits: shape (b, vocabulary).
            sequences: number of each of the b sequences.
            number: number of tokens that each sequence has been given before.

        Returns:
            Token ids, shape (b,).
        """
        logits = logits.float()
        if not self.do_sample:
            return logits.argmax(-1)
        probabilities = self.scores(logits).double().softmax(-1)
        cumulated = probabilities.cumsum(-1)
        drawn = torch.tensor([[mixed(self.seed, at, number) >> 11] for at in sequences], dtype=torch.float64) / 2**53
        tokens = torch.searchsorted(cumulated, drawn * cumulated[:, -1:], right=True).squeeze(-1)
        # A number just below 1 may be rounded up to the whole sum.
        last = (probabilities > 0).long().mul(torch.arange(1, logits.shape[-1] + 1)).argmax(-1)
        return torch.minimum(tokens, last)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits by temperature, with -inf for tokens that are not drawn; shape (b, vocabulary)."""
        scores = logits / self.temperature
        if self.top_k is not None:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ascending, order = scores.sort(-1)
            without = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            without[:, -1] = False
            scores = scores.masked_fill(without.scatter(1, order, without), -torch.inf)
        return scores

"""Generation loop: groups of sequences go around through the stages, and the caller chooses each next token.

The logits of the last position are all that leaves the last stage. A group's next call is sent as soon as its logits
came, so that no stage waits as long as there are as many groups as stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from raypipe.capture.decode_recipe import DecodeRecipe
from raypipe.engine.decoding import DecodeCall, DecodePipeline, DecodeProgram
from raypipe.engine.sampling import Sampling
from raypipe.engine.stage.stage import StageProgram

FEW_GROUPS = 4
"""Least number of groups, and so the same groups in pipelines of up to this many stages: sums over another number of
rows may round differently. More groups would read the weights more often than needed to keep stages busy."""


Decoding = Callable[[Sequence[DecodeProgram], Sequence[int]], AbstractContextManager[DecodePipeline]]
"""(program of each stage, worker of each stage) -> running stages that decode."""


class HaltedError(Exception):
    """Error of a generation that was ended before its sequences."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Sequences to continue.

    Attributes:
        tokens: token ids, shape (b, n); padded on the left for models without an encoder.
        mask: 1 for tokens and 0 for padding, shape (b, n).
        positions: True if the model takes position_ids.
        start: first token of the decoder of a model with an encoder; None for other models.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    positions: bool = False
    start: int | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """End of the sequences.

    Attributes:
        max_new_tokens: number of tokens after which all sequences end.
        eos: tokens after which a sequence ends.
        pad: token that follows the end of a sequence.
    """

    max_new_tokens: int
    eos: tuple[int, ...] = ()
    pad: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """Generation of text, for any number of stages.

    Attributes:
        recipe: traced forwards of the model.
        group_size: number of sequences that a stage decodes at once; None for that of ``group_size_of``.
    """

    recipe: DecodeRecipe
    prompt: Prompt
    sampling: Sampling
    ending: Ending
    group_size: int | None = None

    def on(
        self,
        decoding: Decoding,
        programs: Sequence[StageProgram],
        placement: Sequence[int],
        halted: Callable[[], bool] = lambda: False,
    ) -> torch.Tensor:
        """Continue every sequence on running stages, with their present weights; see ``continued``.

        Args:
            decoding: method of the stages' fleet, see ``AnyFleet``.
            programs: programs of training of all stages.
            placement: worker of each stage.
            halted: returns True to end the generation with a HaltedError.
        """
        size = self.group_size or group_size_of(len(self.prompt.tokens), len(programs))
        with decoding(self.recipe.programs(programs), placement) as pipeline:
            return continued(pipeline, self.prompt, self.sampling, self.ending, size, halted)


def group_size_of(num_sequences: int, num_stages: int) -> int:
    """Return the largest number of sequences per group that makes FEW_GROUPS and keeps all stages busy; at least 1."""
    return max(1, num_sequences // max(FEW_GROUPS, num_stages))


def continued(
    pipeline: DecodePipeline,
    prompt: Prompt,
    sampling: Sampling,
    ending: Ending,
    group_size: int,
    halted: Callable[[], bool] = lambda: False,
) -> torch.Tensor:
    """Generate a continuation of every sequence.

    Args:
        group_size: number of sequences that a stage decodes at once.
        halted: see ``Generation.on``.

    Returns:
        Token ids, shape (b, n + new): the prompt, or the start token of a decoder, and the new tokens. ``new`` is the
        number of tokens of the longest continuation.

    Raises:
        HaltedError: ``halted`` returned True.
    """
    count = len(prompt.tokens)
    groups = [_Group(prompt, range(at, min(at + group_size, count))) for at in range(0, count, group_size)]
    for number, group in enumerate(groups):
        pipeline.submit(DecodeCall(number, group.first(), prefill=True))
    going, done = len(groups), list[int]()
    while going:
        if halted():
            raise HaltedError
        number, logits = pipeline.take()
        group = groups[number]
        group.add(sampling.choose(logits, group.sequences, len(group.tokens)), ending)
        if group.ended(ending):
            going -= 1
            done.append(number)
        else:
            pipeline.submit(DecodeCall(number, group.next(), prefill=False, done=tuple(done)))
            done.clear()
    length = max(len(group.tokens) for group in groups)
    padded = [[*group.tokens, *[torch.full_like(group.tokens[0], ending.pad)] * length][:length] for group in groups]
    new = torch.cat([torch.stack(tokens, 1) for tokens in padded])
    begun = prompt.tokens if prompt.start is None else torch.full_like(prompt.tokens[:, :1], prompt.start)
    return torch.cat([begun, new], 1)


class _Group:
    """Sequences that are decoded together, and the tokens that they were given so far."""

    def __init__(self, prompt: Prompt, sequences: range) -> None:
        self._prompt, self.sequences = prompt, sequences
        rows = slice(sequences.start, sequences.stop)
        self._begun, self._mask = prompt.tokens[rows], prompt.mask[rows]
        self._going = torch.ones(len(sequences), dtype=torch.bool)
        self.tokens: list[torch.Tensor] = []

    def first(self) -> Mapping[str, torch.Tensor]:
        """Return the columns of the prompt."""
        columns = {"input_ids": self._begun, "attention_mask": self._mask}
        if self._prompt.start is not None:
            columns["decoder_input_ids"] = torch.full_like(self._begun[:, :1], self._prompt.start)
        elif self._prompt.positions:
            columns["position_ids"] = (self._mask.cumsum(1) - 1).masked_fill(self._mask == 0, 0)
        return columns

    def add(self, tokens: torch.Tensor, ending: Ending) -> None:
        """Append the next token of each sequence, or padding after its end."""
        tokens = torch.where(self._going, tokens, torch.full_like(tokens, ending.pad))
        self.tokens.append(tokens)
        for token in ending.eos:
            self._going &= tokens != token

    def ended(self, ending: Ending) -> bool:
        return len(self.tokens) == ending.max_new_tokens or not self._going.any()

    def next(self) -> Mapping[str, torch.Tensor]:
        """Return the columns of the newest token."""
        token = self.tokens[-1][:, None]
        if self._prompt.start is not None:
            return {"decoder_input_ids": token, "attention_mask": self._mask}
        columns = {"input_ids": token, "past_mask": self._mask}
        self._mask = torch.cat([self._mask, torch.ones_like(token)], 1)
        if self._prompt.positions:
            columns["position_ids"] = self._mask.sum(1, keepdim=True) - 1
        return columns

"""Callback and the arguments of its methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from raypipe.config.paths import absolute_path
from raypipe.ir.report import StepRecord


class RunStart(NamedTuple):
    """Beginning of a run, or of its continuation.

    Attributes:
        name, path: name of the run, and its folder.
        step: optimizer steps done before: by earlier submissions, or by a driver that this one replaces.
        num_steps: optimizer steps of the whole run.
        settings: learning rate, seed, schedule and so on, by the labels of settings.json.
        config: config.yaml of the run's folder, as text.
    """

    name: str
    path: str
    step: int
    num_steps: int
    settings: Mapping[str, str | int | float | bool | None]
    config: str


class Event(NamedTuple):
    """Line of events.jsonl.

    Attributes:
        step: optimizer steps done.
        decision: kind of the event: "recovery", "resize", "switch" and so on.
        reason: a sentence.
        numbers: other fields of the line.
    """

    step: int
    decision: str
    reason: str
    numbers: Mapping[str, Any]


class RunEnd(NamedTuple):
    """End of a run.

    Attributes:
        step: optimizer steps done.
        checkpoint: path of the newest checkpoint; "" without one.
        stopped: reason of an end before the last step; else "".
        error: one line with the reason of a failure; else "".
    """

    step: int
    checkpoint: str
    stopped: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """Token ids to continue, and how: the arguments of ``PipelineTrainer.generate`` that describe a generation.

    Attributes:
        input_ids, attention_mask: shape (sequences, length); padded on the left if the model has no encoder.
        max_new_tokens: maximum number of tokens that a sequence is continued by.
        do_sample: draw each token; False takes the most probable one.
        temperature, top_k, top_p: as in transformers; None for top_k and top_p draws from all tokens.
        seed: with which tokens are drawn; with equal group_size they do not depend on the number of stages.
        eos_token_id, pad_token_id: end of a sequence and what follows it; None for those of generation_config.
        num_beams: must be 1.
        group_size: number of sequences that a stage decodes at once; None for a quarter of them, or fewer if the
            pipeline has more than 4 stages.
    """

    input_ids: Any
    attention_mask: Any = None
    max_new_tokens: int = 20
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    num_beams: int = 1
    group_size: int | None = None


class Callback:
    """Methods that a run calls; override those that you need.

        class Watch(raypipe.Callback):
            def on_step(self, record):
                if record.loss > 10:
                    print("step", record.step, "has a loss of", record.loss)

        PipelineTrainer(..., callbacks=[Watch()])

    All methods are called in one thread, one after the other, in the process that runs the loop. With ``local=True``
    that is this process. On Ray it is the driver actor, which gets a copy of the object as it was at the start of the
    run. Training does not wait for them. An exception in a method becomes an alert, see ``Result.alerts``.

    Attributes:
        prompts: token ids that the stages continue at every evaluation, for ``on_text``; None for none.
    """

    prompts: Prompts | None = None

    def on_start(self, run: RunStart) -> None:
        """Called before the first step of this submission, and again if a new driver takes the run over."""

    def on_step(self, record: StepRecord) -> None:
        """Called after every step. Steps that a recovery repeats are reported again, with the same loss.

        A new driver also reports steps again that its predecessor had not written to the run's folder.
        """

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called when ``eval_data`` was evaluated after ``step`` steps; again after a rollback to an earlier step."""

    def on_text(self, step: int, tokens: Any) -> None:
        """Called after ``on_eval`` if the callback has ``prompts``.

        Args:
            tokens: what ``generate`` returns for the prompts, with the weights after ``step`` steps.
        """

    def on_checkpoint(self, step: int, path: str) -> None:
        """Called when the checkpoint of ``step`` steps is complete; ``raypipe.load_state_dict(path)`` reads it."""

    def on_recovery(self, event: Event) -> None:
        """Called after a failure. ``event.decision`` is "failure", and then "recovery" (by a rollback), "regroup"
        (without the lost replicas) or "give up" (the run ends, and ``on_end`` follows).
        """

    def on_decision(self, event: Event) -> None:
        """Called at any other event: a switch of the schedule, a resize, a re-partition, a skipped step."""

    def on_end(self, end: RunEnd) -> None:
        """Called after the last step, a stop or a failure, with about a minute to run; not if the driver was killed."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by name, without unknown, infinite and NaN values."""
    numbers = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "step"}
    numbers |= {"samples_per_s": record.samples_per_s, "tokens_per_s": record.tokens_per_s}
    return {
        name: float(value)
        for name, value in numbers.items()
        if name not in record.unknown and isinstance(value, int | float) and math.isfinite(value)
    }


_STAYS = ("drift", "keep", "wait", "paid", "open", "delete checkpoint")
"""Decisions that leave a run unchanged; a controller makes many of them."""


def changes_the_run(event: Event) -> bool:
    """Return True for an event that is worth logging, such as a switch, a resize or an end; False for ``_STAYS``."""
    return event.decision not in _STAYS


def absolute(folder: str | None) -> str | None:
    """Make a local path absolute, for a process with another working directory; return a URI or None unchanged."""
    return folder and absolute_path(folder, written=True)

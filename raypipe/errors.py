"""The errors a person can meet: each says what happened, where, and what to change."""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "LESS_MEMORY",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LeaseError",
    "LinkAbortedError",
    "LinkError",
    "PlanError",
    "RanOut",
    "RaypipeError",
    "ScheduleError",
    "StageError",
    "StageLostError",
]

LESS_MEMORY = (
    "Give the stages less to hold (more stages, a smaller minibatch_size, more num_microbatches, memory_limit_bytes), "
    "or that node more memory."
)


class RanOut(NamedTuple):
    """A worker had no memory left.

    Attributes:
        worker: its number in the pipeline.
        held_bytes: by its process at that time, or by its device; 0 where nobody knows.
    """

    worker: int
    held_bytes: int


class RaypipeError(Exception):
    """Base of every error raised on purpose. The message is one paragraph that ends with the remedy.

    Attributes:
        raised_at_s: seconds since 1970 when something went wrong on a stage, by its host's clock; None where nobody
            knows.
        ran_out: whose memory was not enough, where that is why.

    Both travel with the error.
    """

    raised_at_s: float | None = None
    ran_out: RanOut | None = None


class ConfigError(RaypipeError):
    """A field of the configuration is unknown, ill-typed or out of range; names the field."""


class CaptureError(RaypipeError):
    """The model could not be turned into a graph of stages; names the place in the user's code."""


class DataError(RaypipeError):
    """The training data is missing or does not have the promised columns; names file and column."""


class PlanError(RaypipeError):
    """No plan fits the model, the cluster and the limits; names the stage and the numbers."""


class ScheduleError(RaypipeError):
    """A schedule breaks a rule; names the action."""


class LinkError(RaypipeError):
    """A link between two stages failed or missed its deadline; names link, action and micro-batch."""


class LinkAbortedError(LinkError):
    """A link was ended on purpose because something failed elsewhere; never the root cause."""


class StageError(RaypipeError):
    """A stage raised or died; names the stage and carries its own traceback."""


class StageLostError(StageError):
    """The process of a stage died or no longer answers, so that another one can only take its place."""


class CheckpointError(RaypipeError):
    """A checkpoint is incomplete, damaged or of another model; names the file."""


class LeaseError(RaypipeError):
    """Another process trains this run, or has taken it over; names it, and since when."""

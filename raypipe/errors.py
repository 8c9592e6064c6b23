"""Errors of raypipe: each names the fact, the place and the fix."""

from __future__ import annotations

from typing import NamedTuple

LESS_MEMORY = (
    "Give the stages less to hold (more stages, a smaller minibatch_size, more num_microbatches, memory_limit_bytes), "
    "or that node more memory."
)


class RanOut(NamedTuple):
    """Worker that ran out of memory.

    Attributes:
        worker: number of the worker in the pipeline.
        held_bytes: bytes that its process or its device held at that time; 0 if unknown.
    """

    worker: int
    held_bytes: int


class RaypipeError(Exception):
    """Base class of every error that raypipe raises on purpose. The message is one paragraph that ends with the remedy.

    Attributes:
        raised_at_s: time of the failure on a stage, in Unix seconds by the clock of the stage's host; None if unknown.
        ran_out: worker that ran out of memory, if that caused the error; else None.

    Both attributes are kept when the error is sent to another process.
    """

    raised_at_s: float | None = None
    ran_out: RanOut | None = None


class ConfigError(RaypipeError):
    """A field of the configuration is unknown, ill-typed or out of range; the message names the field."""


class CaptureError(RaypipeError):
    """The model could not be captured as a graph or cut into stages; the message has the place in the user's code."""


class DataError(RaypipeError):
    """The training data is missing or does not have the expected columns; the message names file and column."""


class PlanError(RaypipeError):
    """No plan fits the model, the cluster and the limits; the message names the stage and the numbers."""


class ScheduleError(RaypipeError):
    """A schedule violates a dependency or another constraint; the message names the action."""


class LinkError(RaypipeError):
    """A link between two stages failed or missed its deadline; the message names link, action and micro-batch."""


class LinkAbortedError(LinkError):
    """A link was ended on purpose because something failed elsewhere; this error is never the root cause."""


class StageError(RaypipeError):
    """A stage raised an exception or died; the message names the stage and has the stage's traceback."""


class StageLostError(StageError):
    """The process of a stage died or no longer answers, so it has to be replaced by another process."""


class CheckpointError(RaypipeError):
    """A checkpoint is incomplete, damaged or of another model; the message names the file."""


class LeaseError(RaypipeError):
    """The run is trained, or was taken over, by another process; the message names the process and the time."""

"""What the controller of a run may turn: from the configuration and the plan to its Setup."""

from __future__ import annotations

from raypipe.config.checks import TURNED
from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.codec.cost import codec_cost
from raypipe.ir.plan import Plan
from raypipe.planner.control import Choice, Codec, Setup
from raypipe.planner.tune import CHUNKED, Request, settled_schedule
from raypipe.runtime.run.planned import Planned

__all__ = ["retune_setup"]

FORWARD_CODECS = ("bf16", "int8")
BACKWARD_CODECS = ("bf16",)
"""What "auto" may take, the mildest first: gradients are treated more mildly than activations."""


def retune_setup(pipeline: PipelineConfig, request: Request, planned: Planned, first_trainable: int) -> Setup | None:
    """None where nothing is to be turned.

    That is with one stage, an asynchronous schedule, several stages on a worker, everything given, or forbidden.
    """
    kinds = pipeline.schedule in TURNED and pipeline.group_size == "auto" == pipeline.slack
    wanted = [
        FORWARD_CODECS if pipeline.codec_forward == "auto" else (),
        BACKWARD_CODECS if pipeline.codec_backward == "auto" else (),
    ]
    never = pipeline.retune_interval_steps == 0 or not (kinds or any(wanted) or planned.microbatch_seconds)
    num_stages, flows = planned.plan.partition.num_stages, planned.plan.weights.interval is not None
    if never or num_stages < 2 or flows or pipeline.schedule in CHUNKED:
        return None
    forward, backward = (tuple(Codec(name, *codec_cost(name)) for name in names) for names in wanted)
    given = {
        "retune_interval_steps": pipeline.retune_interval_steps,
        "link_drift_threshold": pipeline.link_drift_threshold,
        "min_gain": pipeline.min_gain,
    }
    return Setup(
        pipeline.schedule if kinds else "fixed",
        _choice(request, planned.plan),
        planned.rooms,
        first_trainable,
        forward,
        backward,
        planned.microbatch_seconds,
        overlap=request.overlaps,
        **{name: value for name, value in given.items() if value != "auto"},  # type: ignore[arg-type]
    )


def _choice(request: Request, plan: Plan) -> Choice:
    """What the plan runs."""
    count, num_stages = plan.num_microbatches, plan.partition.num_stages
    kind, group_size, slack = settled_schedule(request, num_stages, count)
    by_hop = (slack,) * (num_stages - 1) if isinstance(slack, int) else slack
    return Choice(kind, count, group_size or 1, by_hop or ())

"""From the configuration and the plan to what the controller of the run may change."""

from __future__ import annotations

from raypipe.config.checks import turns_schedule
from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.codec.cost import codec_cost
from raypipe.planner.control import Choice, CodecCost, ControllerConfig
from raypipe.runtime.run.planned import Planned

__all__ = ["controller_config"]

FORWARD_CODECS = ("bf16", "int8")
BACKWARD_CODECS = ("bf16",)
"""What "auto" may take, the mildest first: gradients get milder codecs than activations."""


def controller_config(pipeline: PipelineConfig, planned: Planned) -> ControllerConfig | None:
    """What the controller of a run may change; None where it has nothing to do.

    That is with one stage, an asynchronous schedule, several stages on a worker, or where everything was given or
    retuning was switched off.
    """
    kinds = turns_schedule(pipeline)
    wanted = [
        FORWARD_CODECS if pipeline.codec_forward == "auto" else (),
        BACKWARD_CODECS if pipeline.codec_backward == "auto" else (),
    ]
    never = pipeline.retune_interval_steps == 0 or not (kinds or any(wanted) or planned.microbatch_seconds)
    spec = planned.plan.spec
    if never or planned.plan.partition.num_stages < 2 or spec is None or not spec.of_kind.turned:
        return None
    forward, backward = (tuple(CodecCost(name, *codec_cost(name)) for name in names) for names in wanted)
    given = {
        "retune_interval_steps": pipeline.retune_interval_steps,
        "link_drift_threshold": pipeline.link_drift_threshold,
        "min_gain": pipeline.min_gain,
    }
    return ControllerConfig(
        pipeline.schedule if kinds else "fixed",
        Choice(spec),
        planned.budgets,
        forward,
        backward,
        planned.microbatch_seconds,
        **{name: value for name, value in given.items() if value != "auto"},  # type: ignore[arg-type]
    )

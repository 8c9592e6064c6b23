"""Where a run stands, in numbers that a person reads at a glance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from raypipe.ir.cost import human_price
from raypipe.ir.report import StepRecord

__all__ = ["RunStatus", "State"]

State = Literal["starting", "running", "stopping", "stopped", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Where a run stands.

    Attributes:
        name, path: of the run and its folder.
        step, num_steps: optimizer steps done, and wanted.
        first_step: steps that earlier submissions of this run had done.
        source: what it went on from then, in words.
        loss, samples_per_s, tokens_per_s, bubble_fraction, lr, goodput: of the last step, as StepRecord has them;
            tokens_per_s and goodput are 0 where they are not known.
        step_s, seconds_left: smoothed over the last steps.
        checkpoint: the newest one that is complete.
        checkpoint_error: why the last one that was tried is not; "" where it is.
        schedule: that the last step ran with, where the controller may turn it.
        retunes: times that it turned something in this submission.
        recovery: how it went on after its last failure: "roll back" of all, "replay" of who was lost, or "regroup",
            without that one; "" before one.
        message: what it waits for while it starts, why it stopped or failed, or what it cannot write at the moment.
        cost: so far, in the currency of PipelineConfig(worker_price_per_hour); None where that is not given.
        stages: host, process id and versions of each worker, which holds one stage or several.
    """

    name: str
    path: str
    state: State
    step: int = 0
    num_steps: int = 0
    first_step: int = 0
    source: str = ""
    loss: float | None = None
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    bubble_fraction: float = 0.0
    lr: float = 0.0
    goodput: float = 0.0
    step_s: float = 0.0
    checkpoint: str = ""
    checkpoint_error: str = ""
    schedule: str = ""
    retunes: int = 0
    recovery: str = ""
    message: str = ""
    cost: float | None = None
    stages: tuple[dict[str, Any], ...] = ()

    @property
    def seconds_left(self) -> float:
        return max(self.num_steps - self.step, 0) * self.step_s

    def after(self, record: StepRecord) -> RunStatus:
        """The status after one more step."""
        step_s = 0.9 * self.step_s + 0.1 * record.seconds if self.step_s else record.seconds
        return replace(
            self,
            step=record.step + 1,
            loss=record.loss,
            samples_per_s=record.samples / step_s if step_s else 0.0,
            tokens_per_s=record.tokens / step_s if step_s else 0.0,
            bubble_fraction=record.bubble_fraction,
            lr=record.lr,
            goodput=record.goodput,
            step_s=step_s,
            schedule=record.schedule,
        )

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.state}, step {self.step}/{self.num_steps}"]
        if self.loss is not None:
            tokens = f"{self.tokens_per_s:.0f} tokens/s, " if self.tokens_per_s else ""
            goodput = f", goodput {self.goodput:.0%}" if self.goodput else ""
            idle = f"idle {self.bubble_fraction:.0%}"
            parts.append(f"loss {self.loss:.4f}, {self.samples_per_s:.0f} samples/s, {tokens}{idle}{goodput}")
        if self.state == "running" and self.step_s:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"left {minutes}:{seconds:02d}")
        if self.schedule:
            parts.append(f"{self.schedule}, retuned {self.retunes} times")
        if self.cost is not None:
            parts.append(f"cost {human_price(self.cost)}")
        if self.checkpoint:
            parts.append(f"checkpoint {self.checkpoint}")
        if self.message:
            parts.append(self.message.splitlines()[0])
        return "; ".join(parts)

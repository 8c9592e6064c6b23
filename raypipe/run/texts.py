"""Texts that the stages of a run generate between two steps: requested by clients, and for prompts of callbacks.

The stages generate with their present weights, and nothing of their state changes. A generation that is not possible is
an error of its client, or an alert, and the run trains on. If stages are lost, the run recovers, and the
generation is not repeated at that step: a prompt that needs too much memory must not end the stages again and again.
"""

from __future__ import annotations

import time

import torch

from raypipe.errors import LeaseError, LinkError, RaypipeError, StageError, StageLostError
from raypipe.run.generate_loop import Generation, HaltedError
from raypipe.run.reporting import Reporter
from raypipe.run.requests import TEXT_OVER, Requests
from raypipe.run.spec import AnyFleet, PlanInForce, RunSpec

_ENDING = (StageLostError, LinkError, LeaseError)
"""Errors of a generation after which the stages cannot train on."""

LOST_BEFORE = (
    "No text was generated after {step} steps: a worker or a link was lost while this text was generated. Give the "
    "callback's prompts fewer sequences or tokens if the workers lack memory."
)


class Texts:
    """Generations of a run, made while the pipeline is empty."""

    def __init__(self, spec: RunSpec, fleet: AnyFleet, requests: Requests, reporter: Reporter) -> None:
        self._of_callbacks = spec.generations if spec.callbacks else ()
        self._fleet, self._requests, self._reporter = fleet, requests, reporter
        self._lost = set[tuple[int, int]]()  # (callback, step) of generations in which a stage or a link was lost

    def of_callbacks(self, plan: PlanInForce, step: int) -> list[tuple[int, torch.Tensor]] | None:
        """Generate for the ``prompts`` of callbacks.

        Args:
            step: number of optimizer steps done.

        Returns:
            (number of the callback, tokens) for each generation that was possible; None if the run is to stop.

        Raises:
            RaypipeError: the stages, or this driver, can no longer train.
        """
        texts = list[tuple[int, torch.Tensor]]()
        for number, generation in self._of_callbacks:
            if (number, step) in self._lost:
                self._reporter.complain("text", LOST_BEFORE.format(step=step), step)
                continue
            try:
                texts.append((number, self._generate(generation, plan, step)))
            except HaltedError:
                return None
            except _ENDING:
                self._lost.add((number, step))
                raise
            except Exception as error:  # noqa: BLE001  (an alert)
                self._reporter.complain("text", f"No text was generated after {step} steps: {error}", step)
        return texts

    def answer(self, plan: PlanInForce, step: int) -> None:
        """Make the generations that clients have requested so far; they get the errors too.

        Later requests wait for the next step, and all wait while a stop or a change of the stages is requested.

        Raises:
            RaypipeError: the stages, or this driver, can no longer train.
        """
        requests = self._requests
        for _ in range(requests.num_texts):
            if requests.stop_reason or requests.wants_change or (request := requests.take_text()) is None:
                return
            try:
                request.answer(self._generate(request.generation(), plan, step))
            except HaltedError:
                request.answer(error=StageError(TEXT_OVER))
            except BaseException as error:
                reason = str(error).rstrip(". ") or type(error).__name__
                if isinstance(error, _ENDING):
                    request.answer(error=StageError(f"The text was not generated: {reason}. Request it again."))
                elif isinstance(error, RaypipeError):
                    request.answer(error=error)
                else:
                    request.answer(error=StageError(f"The text was not generated: {reason}."))
                if isinstance(error, _ENDING) or not isinstance(error, Exception):
                    raise

    def _generate(self, generation: Generation, plan: PlanInForce, step: int) -> torch.Tensor:
        begin_s = time.monotonic()
        tokens = generation.on(
            self._fleet.decoding, plan.setup.programs, plan.plan.schedule.wiring.placement,
            halted=lambda: bool(self._requests.stop_reason),
        )  # fmt: skip
        seconds = round(time.monotonic() - begin_s, 3)
        self._reporter.log("generate", f"{len(tokens)} sequences", step=step, seconds=seconds)
        return tokens

"""Texts that the stages of a run generate between two steps: requested by clients, and for prompts of callbacks.

The stages generate with their present weights, and nothing of their state changes. A generation that is not possible is
an error of its client, or an alert, and the run trains on. If stages are lost, the run recovers, and what its clients
have requested is not repeated: a prompt that needs too much memory must not end the stages again and again.
"""

from __future__ import annotations

import time

import torch

from raypipe.errors import LeaseError, LinkError, RaypipeError, StageError, StageLostError
from raypipe.run.generate_loop import Generation
from raypipe.run.reporting import Reporter
from raypipe.run.requests import Requests
from raypipe.run.spec import AnyFleet, PlanInForce, RunSpec

_ENDING = (StageLostError, LinkError, LeaseError)
"""Errors of a generation after which the stages cannot train on."""


class Texts:
    """Generations of a run, made while the pipeline is empty."""

    def __init__(self, spec: RunSpec, fleet: AnyFleet, requests: Requests, reporter: Reporter) -> None:
        self._of_callbacks = spec.generations if spec.callbacks else ()
        self._fleet, self._requests, self._reporter = fleet, requests, reporter

    def of_callbacks(self, plan: PlanInForce, step: int) -> list[tuple[int, torch.Tensor]]:
        """Generate for the ``prompts`` of callbacks.

        Args:
            step: number of optimizer steps done.

        Returns:
            (number of the callback, tokens) for each generation that was possible.

        Raises:
            RaypipeError: the stages, or this driver, can no longer train.
        """
        texts = list[tuple[int, torch.Tensor]]()
        for number, generation in self._of_callbacks:
            try:
                texts.append((number, self._generate(generation, plan, step)))
            except _ENDING:
                raise
            except Exception as error:  # noqa: BLE001  (an alert)
                self._reporter.complain("text", f"No text was generated after {step} steps: {error}", step)
        return texts

    def answer(self, plan: PlanInForce, step: int) -> None:
        """Make the generations that clients have requested; they get the errors too.

        Raises:
            RaypipeError: the stages, or this driver, can no longer train.
        """
        while (request := self._requests.take_text()) is not None:
            try:
                request.answer(self._generate(request.generation(), plan, step))
            except BaseException as error:
                ending = isinstance(error, _ENDING) or not isinstance(error, Exception)
                if isinstance(error, RaypipeError) and not ending:
                    request.answer(error=error)
                else:
                    request.answer(error=StageError(f"The text was not generated: {error} Request it again."))
                if ending:
                    raise

    def _generate(self, generation: Generation, plan: PlanInForce, step: int) -> torch.Tensor:
        begin_s = time.monotonic()
        tokens = generation.on(self._fleet.decoding, plan.setup.programs, plan.plan.schedule.wiring.placement)
        seconds = round(time.monotonic() - begin_s, 3)
        self._reporter.log("generate", f"{len(tokens)} sequences", step=step, seconds=seconds)
        return tokens

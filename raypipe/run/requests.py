"""Requests to a running loop from other threads: begin, stop, checkpoint, text, resize, move, re-partition,
hand over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Protocol

import torch

from raypipe.errors import PlanError, RaypipeError, StageError
from raypipe.planner.repartition import Offer
from raypipe.run.generate_loop import Generation
from raypipe.run.spec import Planned

TEXT_OVER = (
    "The run is over, so that its stages generate nothing. PipelineTrainer.generate starts stages from its newest "
    "checkpoint."
)


class _Haltable(Protocol):
    def halt(self) -> None: ...


class Resize:
    """Request to change the number of stages or replicas, and its answer.

    Attributes:
        num_stages: requested number of stages.
        planned: plan with this number of stages; None if the driver has to make it.
        reason: reason of the request, for events.
        num_replicas: replicas per stage, one number for all stages or one for each; None for the configured number.
        done: event that is set once the request was answered.
        error: reason why the resize was refused or failed; None if it was done, and before the answer.
        withdrawn: reason why the request was withdrawn; the loop then changes nothing. "" if the request is valid.
    """

    def __init__(
        self,
        num_stages: int,
        planned: Planned | None = None,
        reason: str = "requested",
        num_replicas: int | tuple[int, ...] | None = None,
    ) -> None:
        self.num_stages, self.planned, self.reason = num_stages, planned, reason
        self.num_replicas = num_replicas
        self.done = threading.Event()
        self.error: RaypipeError | None = None
        self.withdrawn = ""

    def answer(self, error: RaypipeError | None = None) -> None:
        self.error = error
        self.done.set()


class TextRequest:
    """Request to generate text between two steps, and its answer.

    Attributes:
        generation: returns prompts and options; called while the stages wait.
        done: event that is set once the request was answered.
        tokens: answer; None before it, and after an error.
        error: reason why nothing was generated; None if something was, and before the answer.
    """

    def __init__(self, generation: Callable[[], Generation]) -> None:
        self.generation = generation
        self.done = threading.Event()
        self.tokens: torch.Tensor | None = None
        self.error: RaypipeError | None = None

    def answer(self, tokens: torch.Tensor | None = None, error: RaypipeError | None = None) -> None:
        self.tokens, self.error = tokens, error
        self.done.set()


class Requests:
    """Queue of requests to the thread that runs the loop, from threads that serve clients.

    Attributes:
        stop_reason: reason to end the run after the current order (one step or a few); "" without a request.
    """

    def __init__(self) -> None:
        self.stop_reason = ""
        self._fleet: _Haltable | None = None
        self._resize: Resize | None = None
        self._texts: list[TextRequest] = []
        self._leaving: set[str] = set()
        self._offer: Offer | None = None
        self._joining = False
        self._hand_over: Callable[[], None] | None = None
        self._patience_s = 0.0
        self._over = False
        self._lock = threading.Lock()
        self._halting = threading.Lock()  # held during a halt, and before ``_lock`` where a request is taken
        self._checkpoint = threading.Event()
        self._go_on = threading.Event()

    def serve(self, fleet: _Haltable, patience_s: float = 0.0) -> None:
        """Set the fleet of stages, and halt it now if a stop or a move was requested before.

        Args:
            fleet: stages, which later requests halt, so that the loop can take a request.
            patience_s: seconds that a request to leave nodes waits for a step at which the pipeline drains anyway,
                before it halts the fleet.
        """
        with self._lock:
            self._fleet, self._patience_s = fleet, patience_s
            stopping, leaving = bool(self.stop_reason), bool(self._leaving)
        if stopping:
            fleet.halt()
        elif leaving:
            self._halt_to_leave()

    def checked(self) -> None:
        """Allow the loop to begin: the client has verified that the stages compute the same as the whole model."""
        self._go_on.set()

    def wait_checked(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for ``checked``; return True if it was called, or if a stop was requested."""
        return self._go_on.wait(timeout_s) or bool(self.stop_reason)

    def stop(self, reason: str) -> None:
        """Request the end of the run after the current order, with a checkpoint; later reasons are ignored."""
        with self._lock:
            self.stop_reason = self.stop_reason or reason or "stop requested"
            fleet = self._fleet
        if fleet is not None:
            fleet.halt()

    def resize(
        self,
        num_stages: int,
        timeout_s: float,
        planned: Planned | None = None,
        reason: str = "requested",
        num_replicas: int | tuple[int, ...] | None = None,
    ) -> None:
        """Request a resize, and wait until it is done.

        Args:
            timeout_s: maximum seconds to wait. If the resize has not begun by then, it is withdrawn.
            num_stages, planned, reason, num_replicas: as in ``Resize``.

        Raises:
            PlanError: no such plan exists, no workers are available for it, the run cannot be resized now, or
                ``timeout_s`` have passed.
        """
        resize = Resize(num_stages, planned, reason, num_replicas)
        with self._lock:
            if self._over:
                raise PlanError("The run is over, so it cannot be resized.")
            waiting = self._resize is not None and not self._resize.withdrawn
            if waiting or self._fleet is None or self.stop_reason:
                why = self.stop_reason or ("it is being resized" if waiting else "it has not begun")
                raise PlanError(f"The run cannot be resized now: {why}. Try again later.")
            self._resize, fleet = resize, self._fleet
        self._halt_for(fleet, lambda: self._resize is resize)
        if not resize.done.wait(timeout_s) and not self._withdraw(resize, timeout_s):
            raise PlanError(
                f"The run was not resized within {timeout_s:g} s: the change has begun, and takes longer. Its status "
                "shows the new stages once it is done."
            )
        if resize.error is not None:
            raise resize.error

    def generate(self, generation: Callable[[], Generation], timeout_s: float) -> torch.Tensor:
        """Request a generation after the orders that were issued already, and wait for its tokens.

        Args:
            generation: as in ``TextRequest``.
            timeout_s: maximum seconds to wait. If the generation has not begun by then, it is withdrawn.

        Raises:
            StageError: the run is over, a stage failed, or ``timeout_s`` have passed.
            RaypipeError: the generation is not possible.
        """
        request = TextRequest(generation)
        with self._lock:
            if self._over:
                request.answer(error=StageError(TEXT_OVER))
            else:
                self._texts.append(request)
        if not request.done.wait(timeout_s):
            with self._lock:
                withdrawn = request in self._texts
                if withdrawn:
                    self._texts.remove(request)
            if withdrawn:
                raise StageError(
                    f"No text was generated within {timeout_s:g} s, because the run did not come to the end of a step, "
                    "or made other generations first; the request was withdrawn. Look at its status for the reason, or "
                    "give generate a longer timeout_s."
                )
            if not request.done.is_set():
                raise StageError(
                    f"No text was generated within {timeout_s:g} s: the generation has begun, and takes longer. Give "
                    "generate fewer sequences or a longer timeout_s."
                )
        if request.error is not None:
            raise request.error
        assert request.tokens is not None, "it was answered"
        return request.tokens

    @property
    def wants_text(self) -> bool:
        """True if a generation is requested."""
        return self.num_texts > 0

    @property
    def num_texts(self) -> int:
        """Number of generations that are requested and have not begun."""
        return len(self._texts)

    def take_text(self) -> TextRequest | None:
        """Return the oldest requested generation and remove the request; None without one. The caller must answer."""
        with self._lock:
            return self._texts.pop(0) if self._texts else None

    def _withdraw(self, resize: Resize, timeout_s: float) -> bool:
        """Withdraw a resize and answer it with a PlanError; return False if the loop is already making the resize.

        A withdrawn resize stays in the queue: its request has halted the fleet, which continues when the loop takes it.
        """
        with self._lock:
            if self._resize is not resize:
                return resize.done.is_set()
            resize.withdrawn = (
                f"The run was not resized, because it did not come to the end of a step within {timeout_s:g} s; the "
                "request was withdrawn. Look at its status for the reason, or give resize a longer timeout_s."
            )
            resize.answer(PlanError(resize.withdrawn))
        return True

    def _halt_for(self, fleet: _Haltable, wanted: Callable[[], bool]) -> None:
        """Halt the fleet for a request, unless the loop has taken the request already.

        The loop lets a halted fleet continue once the request is done. If the fleet were halted after the loop had
        taken the request, the halt would never end.

        Args:
            wanted: returns True while the loop has not taken the request.
        """
        with self._halting:
            if wanted():
                fleet.halt()

    def leave(self, nodes: Collection[str]) -> None:
        """Request that stages move away from these nodes (Ray's ids), which are about to be removed."""
        with self._lock:
            self._leaving.update(nodes)
            served = self._fleet is not None
        if served:
            self._halt_to_leave()

    def _halt_to_leave(self) -> None:
        if self._patience_s:
            timer = threading.Timer(self._patience_s, self._halt_if_leaving)
            timer.daemon = True
            timer.start()
        else:
            self._halt_if_leaving()

    def _halt_if_leaving(self) -> None:
        if (fleet := self._fleet) is not None:
            self._halt_for(fleet, lambda: bool(self._leaving))

    def offer(self, offer: Offer) -> None:
        """Request a change to the offered partition of the model, after the orders that were issued already."""
        with self._lock:
            self._offer = offer

    def join(self) -> None:
        """Request that spare workers join stages that lack replicas, after the orders issued so far."""
        with self._lock:
            self._joining = True

    def hand_over(self, go: Callable[[], None]) -> None:
        """Request that the loop calls ``go`` after a step.

        ``go`` ends this driver, so that another driver can take over the stages.
        """
        with self._lock:
            self._hand_over = go

    def take_hand_over(self) -> Callable[[], None] | None:
        """Return the argument of ``hand_over`` and remove the request; None without a request.

        While a stop, a checkpoint, a generation, a move or a resize is requested, the result is None and the request
        stays: those requests would be lost with this driver.
        """
        with self._lock:
            if self._leaving or self._resize is not None or self.stop_reason or self.wants_drain:
                return None
            go, self._hand_over = self._hand_over, None
        return go

    def take_joining(self) -> bool:
        """Remove the request that spare workers join; return True if there was one."""
        with self._lock:
            joining, self._joining = self._joining, False
        return joining

    @property
    def has_offer(self) -> bool:
        """True if another partition is offered."""
        return self._offer is not None

    def take_offer(self) -> Offer | None:
        """Return the offered partition and remove the offer; None without an offer."""
        with self._lock:
            offer, self._offer = self._offer, None
        return offer

    @property
    def wants_change(self) -> bool:
        """True if a resize, a move, another partition or a join is requested."""
        with self._lock:
            return self._resize is not None or bool(self._leaving) or self._offer is not None or self._joining

    def take_leaving(self) -> frozenset[str]:
        """Return the nodes that are about to be removed, and clear the request; empty without a request."""
        with self._halting, self._lock:
            nodes, self._leaving = frozenset(self._leaving), set()
        return nodes

    def take_resize(self) -> Resize | None:
        """Return the resize and remove the request; None without a request. The caller must answer the resize."""
        with self._halting, self._lock:
            resize, self._resize = self._resize, None
        return resize

    def end(self) -> None:
        """Mark the run as over: later resizes and generations are refused, and those that wait get an error."""
        with self._lock:
            self._over, self._fleet = True, None
            resize, self._resize = self._resize, None
        while (request := self.take_text()) is not None:
            request.answer(error=StageError(TEXT_OVER))
        if resize is not None and not resize.withdrawn:
            resize.answer(PlanError("The run ended before it could be resized."))

    def checkpoint(self) -> None:
        """Request a checkpoint after one of the next steps."""
        self._checkpoint.set()

    @property
    def wants_drain(self) -> bool:
        """True if a checkpoint or a generation is requested, which an asynchronous pipeline drains for."""
        return self._checkpoint.is_set() or self.wants_text

    def take_checkpoint(self) -> bool:
        """Remove the request for a checkpoint; return True if there was one."""
        requested = self._checkpoint.is_set()
        self._checkpoint.clear()
        return requested

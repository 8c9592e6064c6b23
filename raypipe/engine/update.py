"""The update of one stage: whether there is room for it, its norms, and the optimizer's step.

Schedules may let every stage take its own norm: it then waits for nobody. Where the ring of weight versions has no room
for another one, nothing is done and the gradients join those of the next update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from raypipe.engine.crossing import Crossing
from raypipe.engine.device import Crosses
from raypipe.engine.gradients import GradientSink
from raypipe.engine.loss_scale import LossScale
from raypipe.engine.norms import block_norms, each_norm, norm_of_blocks, total_norm
from raypipe.engine.randomness import KeyedRandomness, RandomKey
from raypipe.engine.replicas.chunks import flat
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import Settings, StageState
from raypipe.engine.trial.scheduler_length import why_not_further
from raypipe.engine.weight_ring import WeightRing
from raypipe.errors import StageError
from raypipe.ir.segment import Segment
from raypipe.ir.weights import WeightPolicy

__all__ = ["MOST_SKIPPED", "Update"]

MOST_SKIPPED = 10
"""So many steps in a row that are not finite end a run that skips them: its parameters no longer move."""


class Update:
    """What ends an update on one stage; ``reduction`` has what stages do together.

    Args:
        settings: the norm to clip to, and whether a step that is not finite is left out.
        weights: whose norm that is.
        crossing: to the device that computes and back.
        lanes: into which gradients are summed; with several, norms are taken block by block (``norms``).
        of_numbers: (step) -> what in its data is no number, as a sentence; empty where all is well.
    """

    def __init__(
        self, program: StageProgram, state: StageState, sink: GradientSink, ring: WeightRing, settings: Settings,
        weights: WeightPolicy, crossing: Crossing, lanes: int = 1,
        of_numbers: Callable[[int], str] = lambda step: "",
    ) -> None:  # fmt: skip
        self._program = program
        self._state = state
        self._sink = sink
        self._ring = ring
        self._crossing = crossing
        self._of_numbers = of_numbers
        self._limit = settings.max_grad_norm
        self._in_blocks = lanes > 1
        shares = weights.shares
        self._share = shares[program.index] if shares else 1.0
        self._weights, self._unscaled, self._rate, self._counts = weights, 1.0, 1.0, True
        self._put_off = 0  # updates since the last one that was made
        self._waits = False  # whether this one is put off
        self._sums = settings.loss_reduction == "sum"
        self._seed = settings.seed if settings.optimizer_draws else None
        self._skips = settings.on_nonfinite == "skip"
        self._skipped = 0  # steps since the last one that was taken
        self._where: tuple[list[int], torch.Tensor] | None = None  # positions, as ``own_norms`` tells them
        self._scale_of_loss = LossScale(state) if program.precision.scaled else None
        self.lr: float | None = None
        """Learning rate of the first group in the last step."""

    def of(self, segment: Segment, microbatch: int) -> None:
        """The update that comes ends with this micro-batch.

        Gradients are those of the mean over ``segment.interval`` micro-batches. A stage that updates more often takes
        the mean over its own, has a learning rate for that, and its schedule goes on when all stages have updated.
        """
        intervals = self._weights.intervals if segment.update_interval is not None else ()
        if not intervals:
            self._unscaled, self._rate, self._counts = 1.0, 1.0, True
            return
        index, own = self._program.index, intervals[self._program.index]
        at, sizes = microbatch - segment.first_microbatch, segment.microbatch_samples
        end = at % len(sizes) + 1
        of_all = (end - 1) // segment.interval * segment.interval
        samples = sum(sizes[of_all : of_all + segment.interval])
        self._unscaled = 1.0 if self._sums else samples / sum(sizes[end - own : end])
        self._rate, self._counts = self._weights.rate(index), end % segment.interval == 0

    def begin(self) -> bool:
        """Whether it can be made now; if not, it is put off."""
        self._waits = not self._ring.has_room()
        self._put_off += self._waits
        return not self._waits

    def average(self) -> None:
        """Every ``parameter.grad`` is a sum over this update and those put off before it: make it their mean.

        A scaled loss is none from here on.
        """
        if self._state.slices is not None:
            self._state.slices.take_gradients()
        if self._scale_of_loss is not None and self._state.optimizer is not None:
            self._scale(1.0 / self._scale_of_loss.value)
        if self._unscaled != 1.0:
            self._scale(self._unscaled)
        if self._put_off:
            self._scale(1.0 / (1 + self._put_off))
            self._put_off = 0

    def own_norm(self) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None:
        """Gradient norm of this stage alone, and ``own_norms``; None where the update is put off."""
        if self._waits:
            return None
        parts = self.own_norms()
        return total_norm(*parts), parts

    def part_norms(self) -> torch.Tensor | None:
        """Of every block of the slices that this replica steps; None where it steps whole parameters."""
        if self._state.slices is None:
            return None
        found = [block_norms(gradient) for gradient in self._state.slices.gradients()]
        return torch.cat(found) if found else torch.empty(0, device=self._crossing.device.place)

    def own_norms(self, parts: Sequence[torch.Tensor | None] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in named_parameters() and norms of the gradients that this stage is the first to hold.

        Args:
            parts: ``part_norms`` of all replicas, in their order, where they step slices.
        """
        index, positions, norms = self._program.index, [], list[torch.Tensor | None]()
        whole = []
        blocks = {} if self._state.slices is None else self._state.slices.blocks(parts)
        for name, parameter in self._state.parameters.items():
            owner = self._program.shared_with.get(name, (index,))[0]
            if owner == index and parameter.grad is not None:
                positions.append(self._program.order[name])
                if name in blocks:
                    norms.append(norm_of_blocks(blocks[name]))
                elif self._in_blocks:
                    norms.append(norm_of_blocks(block_norms(flat(parameter.grad))))
                else:
                    whole.append(parameter.grad)
                    norms.append(None)
        at_once = iter(each_norm(whole))
        found = [next(at_once) if norm is None else norm for norm in norms]
        place = self._crossing.device.place
        if self._where is None or self._where[0] != positions:
            # Mostly the same in every step. To make it anew on a device would wait for all that is queued there.
            self._where = positions, torch.tensor(positions, dtype=torch.int64, device=place)
        return self._where[1], torch.stack(found) if found else torch.empty(0, device=place)

    def step(
        self, step: int, total: torch.Tensor | None, loss: torch.Tensor | None, *, alone: bool,
        gather: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """Clip and step, skip or refuse. Where all stages see the same norm, none steps when one does not.

        Args:
            total: norm to clip by; None where the update is put off.
            loss: of the mini-batch so far, where this stage knows it.
            alone: the norm is that of this stage.
            gather: has the parameters that other replicas have stepped.

        Returns:
            Whether the step was skipped: all is as before it, but for the buffers.

        Raises:
            StageError: loss or norm is not finite.
        """
        if self._state.optimizer is not None and "lr" in self._state.optimizer.param_groups[0]:
            self.lr = float(self._state.optimizer.param_groups[0]["lr"])
        if total is None:
            self._advance_scheduler()
            return False
        known = self._crossing.read((total, loss), Crosses.NORMS)
        finite = [value is None or math.isfinite(value) for value in known]
        if self._overflowed(finite=finite[0]):
            self._sink.reset()
            return True
        if not all(finite):
            self._skipped += self._skips
            if not 0 < self._skipped < MOST_SKIPPED:
                advice = self._of_numbers(step) or _ADVICE
                raise StageError(_not_finite(step, self._program.index, known, alone, self._skipped, advice))
            self._sink.reset()
            return True
        self._skipped = 0
        if self._limit is not None:
            limit = self._limit * (math.sqrt(self._share) if alone else 1.0)
            self._scale(torch.clamp(limit / (total + 1e-6), max=1.0))
        self._state.wait_until_read()
        self._ring.advance()
        if self._state.optimizer is not None:
            with at_rate(self._state.optimizer, self._rate), self._draws():
                self._state.optimizer.step()
            if self._state.slices is not None:
                self._state.slices.follow()
                gather()
            self._ring.follow()
        self._advance_scheduler()
        self._sink.reset()
        return False

    def _draws(self) -> AbstractContextManager[object]:
        """What keys the draws of a step, where there are any: the same ones in a run that goes on, on this stage."""
        if self._seed is None:
            return nullcontext()
        return KeyedRandomness(RandomKey(self._seed, self._state.updates, -1 - self._program.index))

    def _overflowed(self, *, finite: bool) -> bool:
        """Move the loss scale; whether it was too large for this step. At 1 it is to blame for nothing."""
        if self._scale_of_loss is None:
            return False
        to_blame = not finite and (self._state.optimizer is None or self._scale_of_loss.value > 1.0)
        self._scale_of_loss.move(overflowed=not finite)
        return to_blame

    def _advance_scheduler(self) -> None:
        """Put-off updates count too, so that the learning rate is the same on every stage."""
        if not self._counts:
            return
        self._state.updates += 1
        if self._state.scheduler is not None:
            self._step_scheduler(self._state.scheduler)

    def _step_scheduler(self, scheduler: Any) -> None:
        try:
            scheduler.step()
        except Exception as error:  # (whatever the user's code raises)
            raise StageError(why_not_further(scheduler, self._state.updates, error)) from error

    def _scale(self, factor: torch.Tensor | float) -> None:
        slices = self._state.slices
        for name, parameter in self._state.parameters.items():
            if parameter.grad is not None and (slices is None or name not in slices.names):
                parameter.grad.mul_(factor)
        for gradient in slices.gradients() if slices is not None else ():
            gradient.mul_(factor)


@contextmanager
def at_rate(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """So many times its learning rates inside; afterwards they are what they were, for schedulers and checkpoints."""
    if factor == 1.0:
        yield
        return
    if any("lr" not in group for group in optimizer.param_groups):
        raise StageError(
            f"update_interval='per_replica' multiplies learning rates, and {type(optimizer).__name__} has groups "
            "without an option 'lr'. Give update_interval a number, or name the optimizer's rate 'lr'."
        )
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


_ADVICE = "Lower the learning rate, set max_grad_norm, or look at the data of this mini-batch."


def _not_finite(step: int, stage: int, known: Sequence[float | None], alone: bool, skipped: int, advice: str) -> str:
    total, loss = known
    assert total is not None
    if not alone:
        assert loss is not None
        if skipped:
            return (
                f"Step {step}: the loss is {loss:g} and the gradient norm {total:g}. It is the "
                f"{skipped}th step in a row that is not finite, and on_nonfinite='skip' leaves out no more than that: "
                f"the parameters are those before step {step - skipped + 1}. {advice}"
            )
        return (
            f"Step {step}: the loss is {loss:g} and the gradient norm {total:g}, so no stage took "
            f"this step and the parameters are those after {step} steps. {advice} on_nonfinite='skip' leaves such "
            "steps out."
        )
    heard = "" if loss is None else f"the loss is {loss:g} and "
    return (
        f"Step {step}: {heard}the gradient norm of stage {stage} is {total:g}, so it refused the update. Other "
        f"stages may have gone on, for this schedule waits for no norm; the newest checkpoint is whole. {advice}"
    )

"""Update of one stage: gradient mean, norms, clipping, and the optimizer's step.

Schedules may let every stage clip by its own norm, without waiting for other stages. If micro-batches in flight use all
weight versions that the stage may keep, the update is deferred: its gradients are added to those of the next update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.norms import block_norms, each_norm, norm_of_blocks, total_norm
from raypipe.engine.optim.slices import flat
from raypipe.engine.optim.state import LossScale, Settings, StageState, rate_of
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey
from raypipe.engine.stage.weight_ring import WeightRing
from raypipe.errors import StageError
from raypipe.ir.segment import Segment
from raypipe.ir.weights import WeightPolicy, discount
from raypipe.user_lines import quoted, short

MOST_SKIPPED = 10
"""Number of consecutive non-finite steps after which a run with on_nonfinite="skip" ends: its parameters do not change.
"""


class Update:
    """Optimizer update of one stage: averages and clips the gradients, and steps the optimizer and the scheduler.

    Gradients and norms of other stages come from ``reduction``.

    Args:
        state: parameters, buffers, optimizer and scheduler of the stage.
        sink: gradient sums of the stage.
        ring: weight versions that the stage keeps.
        settings: max_grad_norm, on_nonfinite, loss_reduction, seed and optimizer_draws are used.
        weights: policy for weight versions, with the update intervals and each stage's share of the parameters. A stage
            that clips by its own norm has a limit proportional to the square root of its share.
        transfer: copies tensors between the device and host memory.
        nonfinite_data: (segment, step) -> sentence on the first NaN or infinite value in the step's data, or "".
    """

    def __init__(
        self,
        state: StageState,
        sink: GradientSink,
        ring: WeightRing,
        settings: Settings,
        weights: WeightPolicy,
        transfer: DeviceTransfer,
        nonfinite_data: Callable[[Segment, int], str],
    ) -> None:
        program = self._program = sink.program
        self._state, self._sink, self._ring = state, sink, ring
        first = {name: stages[0] for name, stages in program.shared_with.items()}
        self._owned = [
            (name, program.order[name], parameter)
            for name, parameter in state.parameters.items()
            if first.get(name, program.index) == program.index
        ]
        self._transfer, self._nonfinite_data = transfer, nonfinite_data
        self._limit = settings.max_grad_norm
        self._in_blocks = sink.lanes > 1  # norms are computed by blocks, see ``norms``
        shares = weights.shares
        self._share = shares[program.index] if shares else 1.0
        self._weights, self._unscaled, self._rate, self._counts = weights, 1.0, 1.0, True
        self._discount = 1.0  # factor on the learning rate of stale gradients
        self._deferred = 0  # deferred updates since the last one
        self._is_deferred = False  # True if this update is deferred
        self._sums = settings.loss_reduction == "sum"
        self._seed = settings.seed if settings.optimizer_draws else None
        self._skips = settings.on_nonfinite == "skip"
        self._skipped = 0  # skipped steps since the last one
        self._positions: tuple[list[int], torch.Tensor] | None = None  # positions, as a list and as on the device
        self._loss_scale = LossScale(state) if program.precision.scaled else None
        self.check: Callable[[], object] = _nothing
        """Raises the StageError of the last step if that step is checked late (see ``step``) and was refused."""
        self.lr: float | None = None
        """Learning rate of the optimizer's first group in the last step; None without one."""
        self.changed = False
        """True if the step in progress has changed parameters, scheduler or loss scale; the executor resets it."""

    def of(self, segment: Segment, microbatch: int) -> None:
        """Prepare the update that ends with this micro-batch: set the factors of gradients and learning rate.

        Losses are weighted for a mean over ``segment.interval`` micro-batches. A stage that updates more often takes
        the mean over its own interval and scales its learning rate. Its scheduler steps only when all stages update.
        """
        weights, synchronous = self._weights, segment.update_interval is None
        self._discount = 1.0
        if weights.correction == "discount" and not synchronous:
            delay = weights.delay(self._program.index, self._program.first_trainable)
            self._discount = discount(delay, self._state.updates, weights.discount_updates)
        intervals = () if synchronous else weights.intervals
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
        """Return True if the weight ring has room for the new weights; else defer the update and return False."""
        self._is_deferred = not self._ring.has_room()
        self._deferred += self._is_deferred
        return not self._is_deferred

    def average(self) -> None:
        """Convert every ``parameter.grad``, in place, from a sum to the mean of this update.

        Each is divided by the loss scale and by the number of deferred updates plus 1, and multiplied by the factor for
        the stage's own update interval (see ``of``).
        """
        if self._state.slices is not None:
            self._state.slices.take_gradients()
        if self._loss_scale is not None and self._state.optimizer is not None:
            self._scale(1.0 / self._loss_scale.value)
        if self._unscaled != 1.0:
            self._scale(self._unscaled)
        if self._deferred:
            self._scale(1.0 / (1 + self._deferred))
            self._deferred = 0

    def own_norm(self) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None:
        """Return (gradient norm of this stage, result of ``own_norms``); None if the update is deferred."""
        if self._is_deferred:
            return None
        parts = self.own_norms()
        return total_norm(*parts), parts

    def part_norms(self) -> torch.Tensor | None:
        """Return the norms of the blocks of this replica's slices, shape (blocks,); None if no state is sharded."""
        if self._state.slices is None:
            return None
        of_slices = [block_norms(gradient) for gradient in self._state.slices.gradients()]
        return torch.cat(of_slices) if of_slices else torch.empty(0, device=self._transfer.device.place)

    def own_norms(self, parts: Sequence[torch.Tensor | None] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (positions in named_parameters(), gradient norms) of this stage's parameters, both of shape (n,).

        Parameters without a gradient, and those that an earlier stage holds too, are left out.

        Args:
            parts: ``part_norms`` of all replicas, in order; empty without sharded optimizer state.
        """
        blocks = {} if self._state.slices is None else self._state.slices.blocks(parts)
        held = [(name, at, grad) for name, at, parameter in self._owned if (grad := parameter.grad) is not None]
        positions = [at for _, at, _ in held]
        in_blocks = {
            name: blocks[name] if name in blocks else block_norms(flat(grad))
            for name, _, grad in held
            if self._in_blocks or name in blocks
        }
        at_once = iter(each_norm([grad for name, _, grad in held if name not in in_blocks]))
        in_order = [norm_of_blocks(in_blocks[name]) if name in in_blocks else next(at_once) for name, _, _ in held]
        place = self._transfer.device.place
        if self._positions is None or self._positions[0] != positions:
            # Mostly equal in every step. Creating it on a device again would wait for all that is queued there.
            self._positions = positions, torch.tensor(positions, dtype=torch.int64, device=place)
        return self._positions[1], torch.stack(in_order) if in_order else torch.empty(0, device=place)

    def step(
        self, segment: Segment, step: int, total: torch.Tensor | None, loss: torch.Tensor | None,
        values: Callable[[], list[float | None]], *, alone: bool, gather: Callable[[], None] = lambda: None,
    ) -> bool:  # fmt: skip
        """Clip the gradients and step the optimizer, or skip the step if loss or norm is not finite.

        Stages that train and get the same ``total`` and ``loss`` all step, all skip or all raise. To read the two would
        leave a device without work. If its optimizer can leave out a step by itself (``_masks``), they are read by
        ``check`` instead, which the next step calls first: no later step changes the parameters of a refused one.

        Args:
            total: gradient norm; None if the update is deferred.
            loss: loss of the mini-batch so far; None if this stage does not have it.
            values: reads (total, loss).
            alone: True if ``total`` is the norm of this stage, False if it is that of the whole model.
            gather: called after the step of a sharded optimizer, to receive the other replicas' slices.

        Returns:
            True if the step was skipped; then parameters are unchanged, but buffers and loss scale may have changed.

        Raises:
            StageError: loss or norm is not finite, and the step may not be skipped.
        """
        self.settle()
        optimizer = self._state.optimizer
        if optimizer is not None:
            self.lr = rate_of(optimizer.param_groups[0])
        if total is None:
            self._advance_scheduler()
            return False
        masks = not alone and self._masks()
        check = partial(self._leaves_out, segment, step, values, alone=alone, late=masks)
        if masks:
            self.check = check
        elif check():
            self._sink.reset()
            return True
        if self._limit is not None:
            limit = self._limit * (math.sqrt(self._share) if alone else 1.0)
            self._scale(torch.clamp(limit / (total + 1e-6), max=1.0))
        self._state.wait_until_read()
        self.changed = True
        self._ring.advance()
        if optimizer is not None:
            with (
                at_rate(optimizer, self._rate * self._discount),
                self._draws(),
                masked(optimizer, (total, loss) if masks else ()),
            ):
                optimizer.step()
            if self._state.slices is not None:
                self._state.slices.follow()
                gather()
            self._ring.follow()
        self._advance_scheduler()
        self._sink.reset()
        return False

    def settle(self) -> None:
        """Run ``check`` of the last step, once."""
        check, self.check = self.check, _nothing
        check()

    def _masks(self) -> bool:
        """Return True if the step may be checked late: on a device, with an optimizer that reads ``found_inf`` there.

        Fused optimizers of torch do. Policies that count refused steps, and the loss scale, need the values at once.
        """
        if self._transfer.device.immediate or self._skips or self._loss_scale is not None:
            return False
        optimizer = self._state.optimizer
        return optimizer is None or (
            getattr(optimizer, "_step_supports_amp_scaling", False)
            and all(group.get("fused") for group in optimizer.param_groups)
        )

    def _leaves_out(
        self, segment: Segment, step: int, values: Callable[[], list[float | None]], *, alone: bool, late: bool
    ) -> bool:
        """Return True if the step is skipped, because loss or norm is not finite; raise StageError if it may not be."""
        found = values()
        finite = [value is None or math.isfinite(value) for value in found]
        if self._overflowed(finite=finite[0]):
            return True
        if not all(finite):
            self._skipped += self._skips
            if not 0 < self._skipped < MOST_SKIPPED:
                self.changed |= late  # the scheduler has stepped
                advice = self._nonfinite_data(segment, step) or _ADVICE
                raise StageError(_not_finite(step, self._program.index, found, alone, self._skipped, advice))
            return True
        self._skipped = 0
        return False

    def _draws(self) -> AbstractContextManager[object]:
        """Return a context in which the optimizer's random numbers depend on seed, update and stage only.

        Without ``Settings.optimizer_draws`` the context has no effect.
        """
        if self._seed is None:
            return nullcontext()
        return KeyedRandomness(RandomKey(self._seed, self._state.updates, -1 - self._program.index))

    def _overflowed(self, *, finite: bool) -> bool:
        """Update the loss scale; return True if the step is skipped because the loss scale may have been too large.

        Returns True for a norm that is not finite, if the scale is above 1 or if the stage has no optimizer (and so no
        scale). At a scale of 1 it returns False, and the caller follows ``on_nonfinite``. Without fp16 it returns
        False.

        Args:
            finite: True if the gradient norm of the model is finite.
        """
        if self._loss_scale is None:
            return False
        to_blame = not finite and (self._state.optimizer is None or self._loss_scale.value > 1.0)
        self.changed = True
        self._loss_scale.update(overflowed=not finite)
        return to_blame

    def _advance_scheduler(self) -> None:
        """Step the scheduler. Deferred updates count too, so that the learning rate is equal on every stage."""
        self.changed = True
        if not self._counts:
            return
        self._state.updates += 1
        scheduler = self._state.scheduler
        try:
            if scheduler is not None:
                scheduler.step()
        except Exception as error:  # (whatever the user's code raises)
            raise StageError(
                f"lr_scheduler: step {self._state.updates} of {type(scheduler).__name__} fails{quoted(error)}: "
                f"{short(error)} It is called once for every update of the run, so it must have a rate for each, as "
                "OneCycleLR with total_steps of at least the number of updates. A run of the same name resumes from "
                "its newest checkpoint."
            ) from error

    def _scale(self, factor: torch.Tensor | float) -> None:
        slices = self._state.slices
        gradients = [
            parameter.grad
            for name, parameter in self._state.parameters.items()
            if parameter.grad is not None and (slices is None or name not in slices.names)
        ]
        gradients += slices.gradients() if slices is not None else ()
        if gradients:
            torch._foreach_mul_(gradients, factor)


def _nothing() -> None:
    """Check no step."""


@contextmanager
def masked(optimizer: torch.optim.Optimizer, scalars: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Let steps of a fused optimizer change nothing if one of ``scalars``, on its device, is not finite.

    torch.amp.GradScaler uses the same attributes of optimizers.
    """
    if not scalars:
        yield
        return
    finite = torch.stack([torch.isfinite(x) for x in scalars if x is not None])
    optimizer.found_inf = finite.all().logical_not().to(torch.float32)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


@contextmanager
def at_rate(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply the optimizer's learning rates by ``factor`` inside the context; restore them afterwards.

    Raises:
        StageError: a parameter group has no learning rate that is a number.
    """
    if factor == 1.0:
        yield
        return
    if any(rate_of(group) is None for group in optimizer.param_groups):
        raise StageError(
            "update_interval='per_replica' and stale_correction='discount' multiply learning rates, and "
            f"{type(optimizer).__name__} has groups whose 'lr' is missing or not a number. Leave these fields out, or "
            "name the optimizer's rate 'lr'."
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


def _not_finite(step: int, stage: int, values: Sequence[float | None], alone: bool, skipped: int, advice: str) -> str:
    total, loss = values
    assert total is not None
    if not alone:
        assert loss is not None
        if skipped:
            return (
                f"Step {step}: the loss is {loss:g} and the gradient norm {total:g}. It is the "
                f"{skipped}th non-finite step in a row, the most that on_nonfinite='skip' leaves out: the parameters "
                f"are those before step {step - skipped + 1}. {advice}"
            )
        return (
            f"Step {step}: the loss is {loss:g} and the gradient norm {total:g}, so no stage took "
            f"this step and the parameters are those after {step} steps. {advice} on_nonfinite='skip' leaves such "
            "steps out."
        )
    of_loss = "" if loss is None else f"the loss is {loss:g} and "
    return (
        f"Step {step}: {of_loss}the gradient norm of stage {stage} is {total:g}, so it refused the update. Other "
        f"stages may have stepped, because this schedule exchanges no norms; the newest checkpoint is consistent. "
        f"{advice}"
    )

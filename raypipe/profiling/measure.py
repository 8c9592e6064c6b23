"""Measurement of a model's profile on this machine's CPU, within a budget of processor time.

    smallest size    every distinct operation alone (operations.py)
    largest size     every distinct operation alone, at the largest number of samples that the budget allows
    whole model      in one piece, as stages run it, at as many sizes as the budget allows; the operations' seconds are
                     scaled so that they add up to it, and the factor is reported
    bytes            counted on the meta device, which computes nothing; by a run on the CPU if that is impossible

A pass times every distinct operation once; a round times the whole model once. Results are medians over passes and
rounds. A pass that has begun is not cut short, so a model of few and very large operations exceeds the budget. Not
measured are the effects of caches and memory that stages share, and the optimizer's step.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raypipe.capture import Capture
from raypipe.engine.stage.backward import gradients
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.stage import StageProgram
from raypipe.engine.stage.weight_ring import WeightRing
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import StageError
from raypipe.ir.graph import Lines
from raypipe.ir.profile import DOUBTFUL, Profile
from raypipe.profiling.estimate import bytes_unrun
from raypipe.profiling.operations import Budget, Moment, OperationTimer, OperationTimes, seconds_between
from raypipe.profiling.steps import KEY, Columns, Steps, first_of, samples_of, steps_of
from raypipe.profiling.workspace import Passes, kept_bytes, workspaces

PROFILE_BUDGET_S = 10.0
REPEATS = 5
"""Number of passes over the operations, and of timed runs of the whole model, after a first one that warms up."""
OPERATIONS_SHARE = 0.5
"""Share of the remaining budget for passes over the operations; the rest is for the whole model."""
FEWEST_ROUNDS = 2
LONG_SHARE, ENOUGH = 0.1, 3
"""ENOUGH passes over the operations, or runs of the model, suffice once they took LONG_SHARE of the budget."""
CHEAP_S = 0.25
"""Limit in seconds of optional measurements: runs above the example's size, warm-up runs, and additional runs."""
MOST_ROUNDS = 25
BYTES_PASSES = 5
"""Number of forwards and backwards that take as long as counting bytes by a run."""

LARGEST_TURN_BYTES = (32 << 20) - (64 << 10)
"""Bytes of an allocation just below the largest mmap threshold of glibc's malloc; see ``settle_allocator``."""

Progress = Callable[[int, int], object]
Wholes = dict[int, list[tuple[float, float]]]
"""Number of samples -> (forward, backward) seconds of the whole model in each round."""


def profile_graph(
    captured: Capture,
    columns: Columns,
    larger: Columns | None = None,
    *,
    sizes: Sequence[int] | None = None,
    budget_s: float = PROFILE_BUDGET_S,
    progress: Progress | None = None,
) -> Profile:
    """Measure the profile of a model, with one intra-op thread as in stages. Its parameters are not changed.

    Args:
        columns: one micro-batch by column, targets included.
        larger: more samples by column; micro-batches larger than ``columns`` are taken from them while that is cheap.
        sizes: micro-batch sizes to measure; None for the powers of two up to the size of ``columns``.
        budget_s: seconds of processor time.
        progress: called with (operations done, all operations).

    Raises:
        StageError: the model cannot run on these columns; ``estimate_graph`` needs no run.
    """
    samples = samples_of(columns)
    wanted = sorted({*(powers_of_two(samples) if sizes is None else sizes), samples} - {0}) or [samples]
    settle_allocator()
    try:
        with one_thread():
            run = _Run(captured, columns, larger or {}, wanted, Budget(budget_s), progress)
            small = run.smallest()
            large = run.largest(small)
            run.operations(small, large)
            wholes = run.wholes(large)
            counts = run.bytes(small, large)
    except (RuntimeError, ValueError, IndexError) as error:
        raise StageError(
            f"The model could not be profiled on a micro-batch of {samples} samples: {type(error).__name__}: {error} "
            "Check that the example has the shapes of the training data."
        ) from error
    run.report(1.0)
    return _profile(run, small, large, wholes, counts)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Memory of every operation of the model, in bytes; ``kept`` and ``spaces`` are by operation.

    Attributes:
        samples: number of samples for which ``kept`` was counted.
        kept: bytes that are kept for backwards, see ``KeptBytes``.
        spaces: workspace as lines over the number of samples, (fixed bytes, bytes per sample); the largest counts.
    """

    samples: int
    kept: Sequence[int]
    spaces: Sequence[Lines]


class _Run:
    """Measurement of one profile, step by step; ``notes`` name the sizes that could not be measured."""

    def __init__(
        self, captured: Capture, columns: Columns, larger: Columns, sizes: list[int], budget: Budget,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self.captured, self.columns, self.larger, self.sizes = captured, columns, larger, sizes
        self.budget, self.notes = budget, list[str]()
        self.bench, self.samples = Bench.of(captured), samples_of(columns)
        self._progress = progress

    def report(self, share: float) -> None:
        """Report to ``progress`` that this fraction of the work is done."""
        if self._progress is not None:
            total = len(self.captured.graph.nodes)
            self._progress(round(share * total), total)

    def smallest(self) -> OperationTimer:
        """Time every distinct operation once, at the smallest micro-batch that the model accepts; return the timer."""
        tried = self.sizes if len(self.sizes) > 1 else [min(2, self.samples), self.samples]
        for size in tried:
            timer = self._timer(size)
            try:
                timer.run()
            except (RuntimeError, ValueError) as error:  # batch statistics of a single value, for one
                if size == tried[-1]:
                    raise
                self._note(size, error)
                continue
            self.report(0.1)
            return timer
        raise AssertionError("unreachable: the last size either runs or raises")

    def largest(self, small: OperationTimer) -> OperationTimer:
        """Return the timer of the largest size at which the budget allows two passes; ``small`` without such a size."""
        left_s = OPERATIONS_SHARE * self.budget.left_s
        fitting = [n for n in self.sizes if n > small.size and 2 * small.unique_s * n / small.size <= left_s]
        return self._timer(fitting[-1]) if fitting else small

    def operations(self, small: OperationTimer, large: OperationTimer) -> None:
        """Time all distinct operations repeatedly, by both timers in turns: a machine that slows down slows both."""
        until_s = (1 - OPERATIONS_SHARE) * self.budget.left_s
        timers = [small] if small is large else [small, large]
        long_s = LONG_SHARE * self.budget.total_s + self.budget.spent_s
        for number in range(REPEATS + 1):
            if number >= ENOUGH and self.budget.spent_s > long_s:
                break
            for timer in timers:
                first = not timer.samples
                if first or self.budget.left_s - timer.unique_s > until_s:
                    timer.run()
            self.report(0.1 + 0.4 * (number + 1) / (REPEATS + 1))

    def wholes(self, large: OperationTimer) -> Wholes:
        """Time the whole model at the size of ``large``, and at as many other sizes as the budget allows."""
        per_sample_s = sum(p.total_s for p in large.parts()) / large.size
        rounds = min(REPEATS + 1, int(self.budget.left_s / (per_sample_s * large.size)))
        if rounds < FEWEST_ROUNDS:
            return {}
        order = [large.size, *self.sizes]  # small sizes first: they are cheap, and determine the line through all
        chosen = {large.size: first_of(self.columns, large.size)}
        for size in dict.fromkeys(order[1:]):
            if rounds * per_sample_s * (sum(chosen) + (size not in chosen) * size) <= self.budget.left_s:
                chosen[size] = first_of(self.columns, size)
        wholes = self._rounds(dict(sorted(chosen.items())), rounds)
        if wholes.get(self.samples):
            wholes |= self._beyond(_median_s(wholes[self.samples]), rounds - 1)
        return wholes

    def _rounds(self, parts: dict[int, Columns], rounds: int) -> Wholes:
        """Time the whole model ``rounds`` times at all sizes in turns; a size that fails is deleted from ``parts``."""
        wholes: Wholes = {}
        begin_s = time.perf_counter()
        for size, part in list(parts.items()):
            try:
                self.bench.whole(part)
                wholes[size] = []
            except (RuntimeError, ValueError) as error:
                self._note(size, error)
                del parts[size]
        cheap = time.perf_counter() - begin_s < CHEAP_S
        begin_s, done = time.perf_counter(), 0
        long_s = LONG_SHARE * self.budget.total_s + self.budget.spent_s
        while done < rounds - 1 or (done < MOST_ROUNDS and time.perf_counter() - begin_s < CHEAP_S):
            for size, part in parts.items():
                if cheap:  # warm up: the previous size has filled the caches differently
                    self.bench.whole(part)
                wholes[size].append(self.bench.whole(part))
            done += 1
            if done >= ENOUGH - 1 and self.budget.spent_s > long_s:
                break
            self.report(0.5 + 0.4 * min(1.0, done / (rounds - 1)))
        return wholes

    def _beyond(self, seconds: float, rounds: int) -> Wholes:
        """Time the whole model at sizes above the example's, while that is cheap.

        Args:
            seconds: seconds of a run at the example's size.
            rounds: number of timed runs at each size.
        """
        wholes: Wholes = {}
        for size in larger_sizes(self.samples, self.larger):
            if (rounds + 1) * 2 * seconds > CHEAP_S:  # twice the samples take at most about twice as long
                break
            part = first_of(self.larger, size)
            try:
                wholes[size] = [self.bench.whole(part) for _ in range(rounds + 1)][1:]
            except Exception as error:  # noqa: BLE001  (user code, at a size that was not configured)
                wholes.pop(size, None)
                self._note(size, error)
                break
            seconds = _median_s(wholes[size])
        return wholes

    def bytes(self, small: OperationTimer, large: OperationTimer) -> _Bytes:
        """Count the kept bytes and workspace of every operation, on the meta device if possible."""
        unrun = bytes_unrun(self.captured, self.samples, self.bench.loss)
        if unrun is not None:
            return _Bytes(self.samples, *unrun)
        bench, samples = self.bench, self.samples
        total_s = sum(p.total_s for p in large.parts()) * samples / large.size
        if samples == small.size or BYTES_PASSES * total_s <= self.budget.left_s:
            spaces = workspaces(
                bench.passes(), self.columns, first_of(self.columns, samples // 2) if samples > 1 else None
            )
            return _Bytes(samples, bench.kept(self.columns), spaces)
        # A line through two sizes: not all of it grows with the samples.
        size, twice = small.size, min(2 * small.size, samples)
        low, high = (bench.kept(first_of(self.columns, n)) for n in (size, twice))
        grown = (samples - size) / (twice - size)
        kept = [round(a + (b - a) * grown) for a, b in zip(low, high, strict=True)]
        return _Bytes(samples, kept, workspaces(bench.passes(), first_of(self.columns, size)))

    def _timer(self, size: int) -> OperationTimer:
        return OperationTimer(self.bench.passes(), first_of(self.columns, size), self.budget)

    def _note(self, size: int, error: Exception) -> None:
        note = f"Micro-batches of {size} could not be measured: {type(error).__name__}: {error}."
        if note not in self.notes:
            self.notes.append(note)


def powers_of_two(most: int) -> tuple[int, ...]:
    """List 1, 2, 4, ... up to ``most``, and ``most`` itself."""
    return tuple(sorted({*(1 << i for i in range(most.bit_length())), most}))


def larger_sizes(samples: int, larger: Columns) -> tuple[int, ...]:
    """List 2, 4, ... times ``samples``, up to the number of samples in ``larger``."""
    most = samples_of(larger)
    return tuple(samples << i for i in range(1, most.bit_length()) if samples << i <= most)


def settle_allocator() -> None:
    """Bring glibc's malloc to the state that it reaches in the first steps of training.

    malloc returns the free top of its heap to the system once that exceeds twice the largest mapped block that was ever
    freed; the pages then have to be touched again. Without this, rounds of a new size free more than that and take up
    to 1.4 times as long as later ones. Allocating and freeing one large block here raises the limit.
    """
    torch.empty(LARGEST_TURN_BYTES, dtype=torch.uint8)


def device_name() -> str:
    """Describe the CPU of this machine."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"cpu, {names[0] if names else platform.processor() or platform.machine()}, 1 thread"


@dataclass(slots=True)
class Bench:
    """A model as a single stage, whose parameters share the memory of the user's, and whose buffers are copies.

    Attributes:
        sink: sums of the gradients.
        leaves: the parameter of each use of a parameter by an operation.
    """

    program: StageProgram
    steps: Steps
    sink: GradientSink
    leaves: list[torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    buffers: list[torch.Tensor]

    @classmethod
    def of(cls, captured: Capture) -> Bench:
        (program,) = captured.programs(())
        # Parameters of its own over the same memory, so that the user's get no gradient; nothing here steps them.
        parameters = {
            name: torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad)
            for name, p in captured.parameters.items()
        }
        buffers = [captured.buffers[name].detach().clone() for name in program.train.buffers]
        leaves = list(WeightRing(program, parameters).newest_leaves())
        sink = GradientSink(program, parameters)
        return cls(program, steps_of(captured, program), sink, leaves, parameters, buffers)

    def whole(self, columns: Columns) -> tuple[float, float]:
        """Run the whole model once as the executor does; return the seconds of its (forward, backward)."""
        function, sink = self.program.train, self.sink
        trained = [leaf for leaf in self.leaves if leaf.requires_grad]
        begin = Moment.now()
        outputs = function(self.leaves, self.buffers, (), [columns[name] for name in function.columns], KEY)
        loss = self.loss(outputs, columns)
        middle = Moment.now()
        sink.add(gradients([loss], [torch.ones_like(loss)], trained))
        return seconds_between(begin, middle), seconds_between(middle, Moment.now())

    def passes(self) -> Passes:
        """Return the model in the form that runs one operation after the other."""
        return Passes(self.steps, self.leaves, self.buffers, self.loss)

    def kept(self, columns: Columns) -> list[int]:
        """Count the kept bytes of every operation; see ``kept_bytes``."""
        return kept_bytes(self.passes(), columns, (*self.leaves, *self.buffers))

    def loss(self, outputs: Any, columns: Columns) -> torch.Tensor:
        """Compute the user's loss of the model's outputs."""
        return self.program.whole_loss(outputs, [columns[name] for name in self.program.targets])


def _median_s(rounds: Sequence[tuple[float, float]]) -> float:
    return sum(_medians(rounds))


def _medians(rounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    forward, backward = zip(*rounds, strict=True)
    return statistics.median(forward), statistics.median(backward)


def _ratio(parts: Sequence[OperationTimes], rounds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Compute (forward, backward) ratios: sum of the operations' seconds over the whole model's seconds."""
    forward_s, backward_s = _medians(rounds)
    sums = math.fsum(p.forward_s for p in parts), math.fsum(p.backward_s for p in parts)
    return sums[0] / forward_s, (sums[1] / backward_s if backward_s and sums[1] else 1.0)


def _scaled(parts: Sequence[OperationTimes], ratio: tuple[float, float]) -> list[OperationTimes]:
    forward, backward = 1 / ratio[0], 1 / ratio[1]
    return [
        OperationTimes(
            p.forward_s * forward, p.input_s * backward, p.weight_s * backward, p.sums_s * backward, p.measured
        )
        for p in parts
    ]


def _profile(run: _Run, small: OperationTimer, large: OperationTimer, wholes: Wholes, counts: _Bytes) -> Profile:
    raw = {timer.size: timer.parts() for timer in (small, large)}
    ratios = {size: _ratio(raw[size], wholes[size]) for size in raw if wholes.get(size)}
    ratio = ratios.get(large.size, (1.0, 1.0))
    by_size = {size: _scaled(parts, ratios.get(size, ratio)) for size, parts in raw.items()}
    nodes = tuple(
        dataclasses.replace(
            node,
            forward_s=parts.forward_s,
            backward_input_s=parts.input_s,
            backward_weight_s=parts.weight_s + parts.sums_s,
            activation_bytes=-(-counts.kept[i] // counts.samples),
            workspace=counts.spaces[i],
            source="measured" if parts.measured else "estimated",
        )
        for i, (node, parts) in enumerate(zip(run.captured.graph.nodes, by_size[large.size], strict=True))
    )
    seconds = {size: math.fsum(p.total_s for p in parts) for size, parts in by_size.items()}
    seconds |= {size: _median_s(rounds) for size, rounds in wholes.items()}
    doubts = [
        f"Timed one by one, the operations' {way}s take {factor:.2f} times as long as the model's {way} in one piece; "
        "their shares of it are used, and stages may turn out less even than planned."
        for way, factor in zip(("forward", "backward"), ratio, strict=True)
        if abs(factor - 1) > DOUBTFUL
    ]
    return Profile(
        graph=dataclasses.replace(run.captured.graph, nodes=nodes),
        microbatch_size=large.size,
        seconds_by_size=tuple(sorted(seconds.items())),
        raw_ratio=ratio,
        device=device_name(),
        notes=(*run.notes, *doubts, _coverage(run, small, large, wholes)),
        small=None if large is small else (small.size, tuple(p.total_s for p in by_size[small.size])),
    )


def _coverage(run: _Run, small: OperationTimer, large: OperationTimer, wholes: Wholes) -> str:
    """Build the profile's note on which operations and sizes were measured and which are estimated."""
    operations, (measured, kinds) = len(run.captured.graph.nodes), large.num_measured
    if measured == kinds and large.size == run.samples and wholes:
        return f"All {operations} operations were measured."
    sizes = str(small.size) if small is large else f"{small.size} and {large.size}"
    equal = "were measured and stand for the equal others" if measured else "were measured"
    rest = f" Backwards of {kinds - measured} kinds are estimated from operations of the same function."
    return (
        f"Of {operations} operations {measured} {equal}, at micro-batches of {sizes}, in {run.budget.spent_s:.1f} s of "
        f"processor time (profile_budget_s={run.budget.total_s:g}); other sizes are estimated."
        f"{rest if kinds > measured else ''}"
    )

"""Time each distinct operation of a model alone: forward, backward for its inputs, backward for its parameters.

    op 0  linear (8, 768) -> 3072     timed
    op 1  gelu   (8, 3072)            timed
    op 2  linear (8, 768) -> 3072     equal to op 0: not run, op 0's output is used
    op 3  linear (8, 768) -> 50257    the budget is spent: forward only, its backward is estimated

Equal operations are of one kind, which is timed once in each pass, so that a stack of equal blocks costs no more time
than one. Operations are equal if they call the same function on tensors of equal shapes, strides, dtypes and
requires_grad, with equal other arguments. Children of an nn.Sequential are equal if their fingerprints are. Each
operation has an autograd graph of its own. The other operations of a pass make the caches as cold as in training.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from raypipe.engine.stage.backward import gradients
from raypipe.engine.stage.randomness import RandomKey, dropout, keyed_call
from raypipe.profiling.steps import Columns, child_of, samples_of
from raypipe.profiling.workspace import Call, Passes, engine_seconds, tensors_in

_THREAD = getattr(resource, "RUSAGE_THREAD", None)
_LOSS = ("loss",)


class Moment(NamedTuple):
    """Readings of this thread's clocks.

    Attributes:
        wall_s: wall clock.
        cpu_s: processor time of this thread.
        waits: number of times that this thread has waited (voluntary context switches); -1 if unknown.
    """

    wall_s: float
    cpu_s: float
    waits: int

    @classmethod
    def now(cls) -> Moment:
        waits = -1 if _THREAD is None else resource.getrusage(_THREAD).ru_nvcsw
        return cls(time.perf_counter(), time.thread_time(), waits)


def seconds_between(begin: Moment, end: Moment) -> float:
    """Estimate the seconds that the work between two clock readings would take on an otherwise idle processor.

    If the thread has not waited in between, this is its CPU time or the wall time, whichever is less: the rest of the
    wall time belongs to other processes. If it has slept or waited, or if that is unknown, this is the wall time.

    Args:
        begin, end: clock readings of this thread.
    """
    wall_s, cpu_s = end.wall_s - begin.wall_s, end.cpu_s - begin.cpu_s
    return wall_s if begin.waits < 0 or end.waits > begin.waits else min(wall_s, cpu_s)


class Budget:
    """Budget of this thread's processor time for measuring, which begins when the object is created.

    Args:
        total_s: seconds of processor time.
    """

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s
        self._begin_s = time.thread_time()

    @property
    def spent_s(self) -> float:
        return time.thread_time() - self._begin_s

    @property
    def left_s(self) -> float:
        return self.total_s - self.spent_s


@dataclass(frozen=True, slots=True)
class OperationTimes:
    """Seconds of one operation: forward, backward for inputs and for parameters, and adding gradients to their sums.

    ``measured`` is False if the backward is estimated.
    """

    forward_s: float
    input_s: float = 0.0
    weight_s: float = 0.0
    sums_s: float = 0.0
    measured: bool = True

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s + self.sums_s

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


class OperationTimer:
    """Times the operations of a model at one number of samples, in one or more passes over the model.

    A kind is a class of operations that do equal work, of which only one is run and timed in each pass.

    Args:
        passes: model to run; its loss counts as part of the last operation.
        columns: one micro-batch by column.
        budget: budget of processor time; once it is spent, only forwards are timed.

    Attributes:
        size: number of samples.
        kinds: kind of every operation, by position.
        samples: times of every kind, one for each pass.
    """

    def __init__(self, passes: Passes, columns: Columns, budget: Budget) -> None:
        self.size, self._passes, self._columns, self._budget = samples_of(columns), passes, columns, budget
        self._leaves = [[passes.leaves[site] for site in sites] for sites in passes.steps.sites]
        self._own = {id(leaf) for leaves in self._leaves for leaf in leaves}
        self.kinds: list[Hashable] = []
        self.samples: dict[Hashable, list[OperationTimes]] = {}
        self._sums: dict[Hashable, float] = {}
        self._changing: set[Hashable] = set()  # kinds that write to their inputs
        self._outputs: dict[Hashable, Any] = {}
        self._weights: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        """Run the model once, and time one of each set of operations that do equal work."""
        passes = self._passes
        self.kinds.clear()
        self._weights.update({id(leaf): leaf for leaves in self._leaves for leaf in leaves})
        outputs = passes.steps.run(passes.leaves, passes.buffers, self._columns, self._observe)
        parts, _ = self._timed(_LOSS, passes.loss, (outputs, self._columns), {}, (), False)
        self.samples.setdefault(_LOSS, []).append(parts)
        self._outputs.clear()
        self._weights.clear()

    @property
    def unique_s(self) -> float:
        """Seconds of all distinct operations together: the timed part of one run of the model."""
        return sum(parts.total_s for parts in self._by_kind().values())

    @property
    def num_measured(self) -> tuple[int, int]:
        """(Number of distinct operations with a measured backward, number of all distinct operations)."""
        known = [parts for kind, parts in self._by_kind().items() if kind != _LOSS]
        return sum(parts.measured for parts in known), len(known)

    def parts(self) -> list[OperationTimes]:
        """Return the seconds of every operation by position; those of the loss are added to the last operation.

        A backward that was not measured is estimated from the forward, by their ratio in other calls of the function.
        """
        known = self._by_kind()
        ratios = _ratios(known)
        filled = {kind: p if p.measured else _estimated(p, _name(kind), ratios) for kind, p in known.items()}
        *before, last = (filled[kind] for kind in self.kinds)
        loss = filled[_LOSS]
        measured = last.measured and loss.measured
        sums = last.forward_s + loss.forward_s, last.input_s + loss.input_s
        return [*before, OperationTimes(*sums, last.weight_s, last.sums_s, measured)]

    def _by_kind(self) -> dict[Hashable, OperationTimes]:
        """Compute the median times of every distinct operation over all passes, if possible without the first."""
        return {kind: _median(samples[1:] or samples) for kind, samples in self.samples.items()}

    def _observe(self, position: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = self._kind(call, args, kwargs, self._leaves[position])
        self.kinds.append(kind)
        if kind not in self._outputs:
            parameters = [leaf for leaf in self._leaves[position] if leaf.requires_grad]
            weight_like = position in self._passes.steps.weight_like
            parts, outputs = self._timed(kind, call, args, kwargs, parameters, weight_like)
            self.samples.setdefault(kind, []).append(parts)
            self._outputs[kind] = outputs
            if weight_like:
                self._weights.update({id(t): t for t in tensors_in(outputs)})
        elif isinstance(self._outputs[kind], torch.Tensor) and not self._outputs[kind].is_floating_point():
            return call(*args, **kwargs)  # a later operation may need the value, as of a length
        return self._outputs[kind]

    def _kind(self, call: Call, args: Any, kwargs: Any, leaves: Sequence[torch.Tensor]) -> Hashable:
        def key(value: Any) -> Hashable:
            if isinstance(value, torch.Tensor):
                derived = id(value) in self._weights
                return tuple(value.shape), value.stride(), value.dtype, value.requires_grad, derived
            return "key" if isinstance(value, RandomKey) else (type(value), repr(value))

        if call is dropout or call is keyed_call:  # the number of the draw does not change the time
            at = 3 if call is dropout else 2
            args = (*args[:at], *args[at + 1 :])
        values, spec = pytree.tree_flatten((args, kwargs))
        child = child_of(call)
        return call if child is None else child, str(spec), tuple(map(key, (*values, *leaves)))

    def _timed(
        self, kind: Hashable, call: Call, args: Any, kwargs: Any, parameters: Sequence[torch.Tensor], weight_like: bool
    ) -> tuple[OperationTimes, Any]:
        """Run and time one operation on leaf copies of its inputs.

        Args:
            parameters: trainable parameters that the operation reads.
            weight_like: True if the operation depends on parameters only, so that its whole backward counts as backward
                for parameters.

        Returns:
            (seconds, outputs without history).
        """
        while True:
            cloned = kind in self._changing
            copies: dict[bool, list[torch.Tensor]] = {True: [], False: []}
            own = pytree.tree_map(lambda x, c=copies, cloned=cloned: self._as_leaf(x, c, cloned), (args, kwargs))
            begin = Moment.now()
            try:
                outputs = call(*own[0], **own[1])
                break
            except RuntimeError:
                if cloned:
                    raise
                self._changing.add(kind)  # autograd refuses to write to a leaf
        forward_s = seconds_between(begin, Moment.now())
        result = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), outputs)
        roots = [t for t in tensors_in(outputs) if t.requires_grad]
        if self._budget.left_s <= 0:
            return OperationTimes(forward_s, measured=not roots), result
        seeds = [torch.ones_like(t) for t in roots]
        wanted = [*parameters, *copies[True]]
        if weight_like:
            wanted, copies[False] = [*wanted, *copies[False]], []
        weight_s = _backward(roots, seeds, wanted, keep=bool(copies[False]))
        input_s = _backward(roots, seeds, copies[False], keep=False)
        if kind not in self._sums:
            self._sums[kind] = _sums(parameters)
        return OperationTimes(forward_s, input_s, weight_s, self._sums[kind]), result

    def _as_leaf(self, value: Any, copies: Mapping[bool, list[torch.Tensor]], cloned: bool) -> Any:
        """Return an input of an operation as a leaf of autograd; other values are returned unchanged.

        Args:
            copies: receives a new leaf under the key True if the input depends on parameters only, else False.
            cloned: True for an operation that writes to its inputs: a clone is returned, since a leaf is refused.
        """
        if not isinstance(value, torch.Tensor):
            return value
        if not value.requires_grad:
            return value.clone() if cloned else value
        derived = id(value) in self._weights
        if derived and value.is_leaf and id(value) in self._own:
            return value  # a parameter of the operation's site
        copy = value.detach().requires_grad_()
        copies[derived].append(copy)
        return copy.clone() if cloned else copy


def _backward(roots: Sequence[Any], seeds: Sequence[Any], wanted: Sequence[Any], *, keep: bool) -> float:
    """Measure the seconds of a backward, less autograd's overhead; 0 if none is ``wanted``; ``keep`` keeps graphs."""
    if not roots or not wanted:
        return 0.0
    begin = Moment.now()
    if keep:
        torch.autograd.grad(list(roots), list(wanted), list(seeds), allow_unused=True, retain_graph=True)
    else:
        gradients(roots, seeds, wanted)
    return max(0.0, seconds_between(begin, Moment.now()) - engine_seconds())


def _sums(parameters: Sequence[torch.Tensor]) -> float:
    """Measure the seconds to add the gradients of these parameters to their sums."""
    if not parameters:
        return 0.0
    totals = [torch.zeros_like(p).add_(0.0) for p in parameters]  # the first touch of memory takes longer
    values = [torch.zeros_like(p) for p in parameters]
    seconds = []
    for _ in range(3):
        begin = Moment.now()
        torch._foreach_add_(totals, values)
        seconds.append(seconds_between(begin, Moment.now()))
    return min(seconds)


def _median(samples: Sequence[OperationTimes]) -> OperationTimes:
    measured = [p for p in samples if p.measured]
    columns = zip(*((p.forward_s, p.input_s, p.weight_s, p.sums_s) for p in measured or samples), strict=True)
    forward_s, input_s, weight_s, sums_s = map(statistics.median, columns)
    return OperationTimes(forward_s, input_s, weight_s, sums_s, bool(measured))


def _name(kind: Any) -> str:
    """Return the name of the function that all operations of a kind call, without their arguments."""
    return str(kind[0])


def _ratios(known: Mapping[Hashable, OperationTimes]) -> dict[str, tuple[float, float, float]]:
    """Compute (input_s, weight_s, sums_s) / forward_s by name of the function; "" has the ratios of all functions."""
    by_name: dict[str, list[OperationTimes]] = {"": []}
    for kind, parts in known.items():
        if parts.measured:
            for name in ("", _name(kind)):
                by_name.setdefault(name, []).append(parts)
    result: dict[str, tuple[float, float, float]] = {"": (1.0, 1.0, 0.0)}
    for name, several in by_name.items():
        forward_s = sum(p.forward_s for p in several)
        if forward_s:
            sums = [sum(getattr(p, part) for p in several) for part in ("input_s", "weight_s", "sums_s")]
            result[name] = sums[0] / forward_s, sums[1] / forward_s, sums[2] / forward_s
    return result


def _estimated(parts: OperationTimes, name: str, ratios: Mapping[str, tuple[float, float, float]]) -> OperationTimes:
    inward, weight, sums = ratios.get(name, ratios[""])
    f = parts.forward_s
    return OperationTimes(f, f * inward, f * weight, f * sums, measured=False)

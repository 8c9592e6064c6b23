"""Seconds and kept bytes of every operation of a model, which add up to the whole model's.

    round:  the whole model in one piece, as a stage runs it     F, B and the sums of gradients
            the same, operation by operation                     each operation's share

Both in every round, so that a machine that slows down slows both. Medians are taken over rounds after the first;
the operations are then scaled to the whole, and the factor is reported. The user's loss counts as part of the last
operation, for both are always in the last stage. At the smallest size the operations are measured too, for they do
not all grow alike. Sizes beyond the example's are measured as long as that takes next to nothing: where small sizes
differ by less than their noise, a line through them says nothing of large ones. Seconds by size are those of the whole
alone, again and again, for operation by operation leaves other caches behind. What the model leaves out: caches and
memory that stages share, and the optimizer's step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from raypipe.engine.backward import gradients
from raypipe.engine.capture import Capture
from raypipe.engine.gradients import GradientSink
from raypipe.engine.one_thread import one_thread
from raypipe.engine.profiling.observe import BackwardClock, ForwardClock, Shares
from raypipe.engine.profiling.rounds import Moment, Round, seconds_between, seconds_of
from raypipe.engine.profiling.steps import KEY, Columns, Steps, first_of, samples_of, steps_of
from raypipe.engine.profiling.workspace import Passes, kept_bytes, workspaces
from raypipe.engine.stage import StageProgram
from raypipe.engine.weight_ring import WeightRing
from raypipe.errors import StageError
from raypipe.ir.lines import Lines
from raypipe.ir.profile import DOUBTFUL, Profile

__all__ = [
    "Bench",
    "Progress",
    "advancing",
    "device_name",
    "larger_sizes",
    "powers_of_two",
    "profile_graph",
    "settle_allocator",
    "unprofiled",
]

CHEAP_S = 0.25
"""Seconds that all rounds of one larger size, one turn of the others, or further turns of those may take."""
MOST_ROUNDS = 25

LARGEST_TURN_BYTES = (32 << 20) - (64 << 10)
"""Just below what glibc's malloc lets its thresholds grow to."""

Progress = Callable[[int, int], None]


def profile_graph(
    captured: Capture,
    columns: Columns,
    larger: Columns | None = None,
    *,
    sizes: Sequence[int] | None = None,
    larger_s: float = CHEAP_S,
    repeats: int = 5,
    progress: Progress | None = None,
) -> Profile:
    """Measure a model on this machine's CPU with one intra-op thread, as the stages use.

    Parameters are read, never changed; buffers are copies.

    Args:
        columns: one micro-batch by column, targets included; its size is that of the profile.
        larger: the same with more samples, of which as many are tried as is cheap.
        sizes: of micro-batches at which the whole model is measured too; None for powers of two up to this one.
        larger_s: seconds that all rounds of one larger size may take.
        repeats: rounds whose medians are taken, after one to warm up.
        progress: called with (done, total) rounds.

    Raises:
        StageError: the model cannot run on these columns; ``estimate_graph`` needs no run.
    """
    samples = samples_of(columns)
    wanted = {*(powers_of_two(samples) if sizes is None else sizes), samples}
    total = repeats + 1 + repeats * len(wanted) + 3
    advance = advancing(lambda done: progress(done, total) if progress is not None else None)
    with unprofiled(samples):
        settle_allocator()
        with one_thread():
            bench = Bench.of(captured)
            operations = _operations(bench, columns, samples, repeats, advance)
            found = _by_size(bench, columns, wanted, repeats, advance)
            more, doubts = _beyond(bench, larger or {}, samples, _median_s(found.alone[samples]), larger_s, repeats)
            found.alone.update(more)
            found.notes.extend(doubts)
    return _profile(captured, samples, operations, found)


@contextlib.contextmanager
def unprofiled(samples: int) -> Iterator[None]:
    """What fails inside becomes the refusal of a model that does not run on its example."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        raise StageError(
            f"The model could not be profiled on a micro-batch of {samples} samples: {type(error).__name__}: {error} "
            "Check that the example has the shapes of the training data."
        ) from error


def advancing(told: Callable[[int], object]) -> Callable[[], None]:
    """A function to call after each part of the work; ``told`` hears how many are done."""
    done = itertools.count(1)

    def advance() -> None:
        told(next(done))

    return advance


class _Operations(NamedTuple):
    """By operation, as ``kept``, ``workspaces`` and ``shares`` count them; and rounds of them all."""

    kept: list[int]
    spaces: list[Lines]
    shares: list[float]
    rounds: list[Round]


def _operations(bench: Bench, columns: Columns, samples: int, repeats: int, advance: Callable[[], None]) -> _Operations:
    kept = bench.kept(columns)
    advance()
    spaces = workspaces(bench.passes(), columns, first_of(columns, samples // 2) if samples > 1 else None)
    advance()
    shares = bench.shares(columns)
    advance()
    rounds = []
    for _ in range(repeats + 1):
        rounds.append(bench.round(columns))
        advance()
    return _Operations(kept, spaces, shares, rounds[1:])  # the first warmed up


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and ``most`` itself."""
    return tuple(sorted({*(1 << i for i in range(most.bit_length())), most}))


def larger_sizes(samples: int, larger: Columns) -> tuple[int, ...]:
    """Twice, four times, ... so many samples, as far as there are some."""
    most = samples_of(larger)
    return tuple(samples << i for i in range(1, most.bit_length()) if samples << i <= most)


def settle_allocator() -> None:
    """Bring malloc where training brings it in its first steps.

    glibc gives the top of its heap back to the system, whose pages then have to be touched anew, whenever more than
    twice the largest piece is free that was ever given back by itself. What a micro-batch frees at its end is more than
    that in the rounds of a size that is new: they took up to 1.4 times the time of later ones.
    """
    torch.empty(LARGEST_TURN_BYTES, dtype=torch.uint8)


def device_name() -> str:
    """The CPU of this machine, in words."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return f"cpu, {names[0] if names else platform.processor() or platform.machine()}, 1 thread"


@dataclass(slots=True)
class Bench:
    """A model as one stage, with parameters and buffers to run it."""

    program: StageProgram
    steps: Steps
    sink: GradientSink
    leaves: list[torch.Tensor]
    parameters: Mapping[str, torch.Tensor]
    buffers: list[torch.Tensor]

    @classmethod
    def of(cls, captured: Capture) -> Bench:
        (program,) = captured.programs(())
        # Copies, because the user's may be used elsewhere meanwhile; the sink adds gradients to sums of its own.
        parameters = {
            name: torch.nn.Parameter(p.detach(), requires_grad=p.requires_grad)
            for name, p in captured.parameters.items()
        }
        buffers = [captured.buffers[name].detach().clone() for name in program.train.buffers]
        leaves = list(WeightRing(program, parameters).newest_leaves())
        sink = GradientSink(program, parameters)
        return cls(program, steps_of(captured, program), sink, leaves, parameters, buffers)

    @property
    def trained(self) -> list[torch.Tensor]:
        """The leaves that require a gradient."""
        return [leaf for leaf in self.leaves if leaf.requires_grad]

    def whole(self, columns: Columns) -> tuple[float, float]:
        """Seconds of forward and backward, as the executor runs them."""
        function, sink = self.program.train, self.sink
        begin = Moment.now()
        outputs = function(self.leaves, self.buffers, (), [columns[name] for name in function.columns], KEY)
        loss = self.loss(outputs, columns)
        middle = Moment.now()
        sink.add(gradients([loss], [torch.ones_like(loss)], self.trained))
        return seconds_between(begin, middle), seconds_between(middle, Moment.now())

    def round(self, columns: Columns) -> Round:
        """The whole, then its operations."""
        whole = self.whole(columns)
        count = len(self.steps.sites)
        backward = BackwardClock(count)
        forward = ForwardClock([0.0] * count, backward)
        outputs = self.steps.run(self.leaves, self.buffers, columns, forward)
        begin_s = time.perf_counter()
        loss = self.loss(outputs, columns)
        forward.seconds[-1] += time.perf_counter() - begin_s
        backward.claim(count - 1, loss)
        seed = torch.ones_like(loss)
        del outputs
        begin_s = time.perf_counter()
        found = gradients([loss], [seed], self.trained)
        seconds = backward.seconds(begin_s, time.perf_counter())
        return Round(whole, forward.seconds, seconds, self._sums(found))

    def _sums(self, found: Sequence[torch.Tensor | None]) -> list[float]:
        """By operation, seconds to add the gradients of its parameters to their sums."""
        by_leaf = dict(zip(map(id, self.trained), found, strict=True))
        seconds = []
        for sites in self.steps.sites:
            grads = [by_leaf.get(id(self.leaves[site])) for site in sites]
            known = [g for g in grads if g is not None]
            totals = [torch.empty_like(g) for g in known]
            for total in totals:
                total.zero_()  # memory that nobody has touched takes longer
            begin_s = time.perf_counter()
            if known:
                torch._foreach_add_(totals, known)
            seconds.append(time.perf_counter() - begin_s if known else 0.0)
        return seconds

    def passes(self) -> Passes:
        """For what counts bytes."""
        return Passes(self.steps, self.leaves, self.buffers, self.loss)

    def kept(self, columns: Columns) -> list[int]:
        """By operation, bytes that its backward keeps."""
        return kept_bytes(self.passes(), columns, (*self.leaves, *self.buffers))

    def shares(self, columns: Columns) -> list[float]:
        """By operation, the part of its backward that is for parameters."""
        leaves = [[self.leaves[site] for site in sites] for sites in self.steps.sites]
        observer = Shares(leaves, self.steps.weight_like)
        self.steps.run(self.leaves, self.buffers, columns, observer)
        return observer.weight_share

    def loss(self, outputs: Any, columns: Columns) -> torch.Tensor:
        """Of the model's outputs."""
        return self.program.whole_loss(outputs, [columns[name] for name in self.program.targets])


class _BySize(NamedTuple):
    """Of several sizes of micro-batches.

    Attributes:
        alone: (forward, backward) seconds of the whole model by size, each behind a pass of the same size where that
            is cheap.
        small: the smallest size that can be run, and its rounds; None where all are larger.
        notes: what could not be measured, one sentence each.
    """

    alone: dict[int, list[tuple[float, float]]]
    small: tuple[int, list[Round]] | None
    notes: list[str]


def _by_size(
    bench: Bench, columns: Columns, sizes: Collection[int], repeats: int, advance: Callable[[], None]
) -> _BySize:
    parts = {size: first_of(columns, size) for size in sorted(sizes)}
    found = _BySize({}, None, [])
    warm_up_s = 0.0
    for size, part in list(parts.items()):
        try:
            rounds = [bench.round(part)] if found.small is None and size < max(sizes) else []
            warm_up_s += sum(bench.whole(part))
            found.alone[size] = []
        except (RuntimeError, ValueError) as error:  # batch statistics of a single value, for one
            found.notes.append(f"Micro-batches of {size} could not be measured: {type(error).__name__}: {error}.")
            del parts[size]
            continue
        if rounds:
            found = found._replace(small=(size, rounds))
    begin_s = time.perf_counter()
    done = 0
    # Where that costs next to nothing more often, since small models vary most.
    while done < repeats or (done < MOST_ROUNDS and time.perf_counter() - begin_s < CHEAP_S):
        # In turns: a machine that is slow for a while is so at every size.
        for size, part in parts.items():
            if found.small is not None and size == found.small[0]:
                found.small[1].append(bench.round(part))
            if warm_up_s < CHEAP_S:  # what another size left in caches is not what training finds there
                bench.whole(part)
            found.alone[size].append(bench.whole(part))
            if done < repeats:
                advance()
        done += 1
    if found.small is not None:
        del found.small[1][0]  # it was to warm up
    return found


def _median_s(alone: Sequence[tuple[float, float]]) -> float:
    """Of forward and backward together, as ``seconds_of`` takes them."""
    return statistics.median(f for f, _ in alone) + statistics.median(b for _, b in alone)


def _beyond(
    bench: Bench, larger: Columns, samples: int, seconds: float, cheap_s: float, repeats: int
) -> tuple[dict[int, list[tuple[float, float]]], list[str]]:
    """Seconds of the whole model at larger sizes, while that is cheap.

    Args:
        seconds: of ``samples`` samples.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for size in larger_sizes(samples, larger):
        if (repeats + 1) * 2 * seconds > cheap_s:  # twice the samples take at most about twice as long
            break
        part = first_of(larger, size)
        try:
            found[size] = [bench.whole(part) for _ in range(repeats + 1)][1:]
        except Exception as error:  # noqa: BLE001  (the user's code, at a size that nobody asked for)
            return found, [f"Micro-batches of {size} could not be measured: {type(error).__name__}: {error}."]
        seconds = _median_s(found[size])
    return found, []


def _profile(captured: Capture, samples: int, operations: _Operations, by_size: _BySize) -> Profile:
    kept, spaces, shares, rounds = operations
    found = seconds_of(rounds, by_size.alone[samples])
    nodes = tuple(
        dataclasses.replace(
            node,
            forward_s=found.forward[i],
            backward_input_s=found.backward[i] * (1 - shares[i]),
            backward_weight_s=found.backward[i] * shares[i] + found.sums[i],
            activation_bytes=-(-kept[i] // samples),
            workspace=spaces[i],
            source="measured",
        )
        for i, node in enumerate(captured.graph.nodes)
    )
    doubts = [
        f"Timed one by one, the operations' {way}s take {ratio:.2f} times as long as the model's {way} in one piece; "
        "their shares of it are used, and stages may turn out less even than planned."
        for way, ratio in zip(("forward", "backward"), found.raw_ratio, strict=True)
        if abs(ratio - 1) > DOUBTFUL
    ]
    small = None
    if by_size.small is not None:
        size, of_size = by_size.small
        small = size, tuple(seconds_of(of_size, by_size.alone.get(size, ())).by_operation())
    return Profile(
        graph=dataclasses.replace(captured.graph, nodes=nodes),
        microbatch_size=samples,
        seconds_by_size=tuple((size, _median_s(alone)) for size, alone in sorted(by_size.alone.items())),
        raw_ratio=found.raw_ratio,
        device=device_name(),
        notes=(*by_size.notes, *doubts),
        small=small,
    )

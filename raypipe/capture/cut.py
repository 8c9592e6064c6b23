"""Partition of a traced model: the stage of every operation, the values sent between stages, and each stage's source.

    stage s     boundary s -> s + 1: every value made in stages 0..s that some stage after s reads
    [f g h] ==> [x, skip] ==> [k l m]

A value that skips a stage is both an input and an output of that stage. Its gradient from later stages then enters the
backward as a root, before the stage's own uses add their gradients. Plain autograd adds them in this order too, so the
sums are bitwise equal. A *site* is one use of a parameter by one operation; it gets an argument of its own.

    lines of a stage + inputs, outputs  -->  def forward(self, *sites, *buffers, *constants, *inputs, *columns, key)
"""

from __future__ import annotations

import bisect
import builtins
import keyword
import operator
from collections.abc import Iterable, Mapping, Sequence

from raypipe.capture.source_lines import Lines, ValueKind
from raypipe.engine.stage.generated_source import TORCH_NAMES
from raypipe.engine.stage.stage import GraphFunction, Site
from raypipe.errors import CaptureError
from raypipe.ir.graph import ModelGraph

NO_COLUMNS: Mapping[int, str] = {}
_TAKEN = {*keyword.kwlist, *vars(builtins), *TORCH_NAMES, "self"}


def stage_function(
    lines: Lines,
    operations: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    title: str,
    *,
    first: bool = False,
) -> GraphFunction:
    """Build the function of one stage. Values are given by their indices in ``lines.values``.

    Args:
        operations: the stage's operations, in execution order.
        inputs: values that the previous stage sends.
        outputs: values that the stage returns.
        title: name of the function in tracebacks.
        first: True for the first stage, which reads the columns whose sizes have to meet conditions.
    """
    values = lines.values
    leaves = _leaves(lines, operations, inputs, outputs) | (lines.checked_columns if first else set())
    sites = [(number, used, index) for number in operations for used, index in values[number].sites]
    buffers, constants, columns = (
        [number for number in lines.of_kind(kind) if number in leaves]
        for kind in (ValueKind.BUFFER, ValueKind.CONSTANT, ValueKind.COLUMN)
    )
    source = _Source(lines, inputs)
    source.take_all(sites, (*buffers, *constants), columns)
    for number in operations:
        source.add(number)
    text = source.text(outputs)
    return GraphFunction(
        source=text,
        names={name: thing for name, thing in lines.names.items() if name in text},
        constants=tuple(lines.constants[number] for number in constants),
        sites=tuple(Site(values[used].of, index) for _, used, index in sites),
        buffers=tuple(values[number].of for number in buffers),
        columns=tuple(values[number].of for number in columns),
        num_inputs=len(inputs),
        num_outputs=len(outputs),
        title=title,
        sizes=lines.column_sizes,
        changing_buffers=tuple(values[number].of for number in buffers if number in lines.changing_buffers),
    )


def _leaves(lines: Lines, operations: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> set[int]:
    """Collect the placeholders that a stage reads: parameters, buffers, constants and data columns.

    The stage reads them in its operations, in values that it computes again, or for a symbolic size. All values are
    given by their indices in ``lines.values``.
    """
    values = lines.values
    leaves: set[int] = set()
    sizes: dict[str, None] = {}
    seen = set(inputs)
    stack = [used for number in operations for used in values[number].inputs] + list(outputs)
    while stack:
        number = stack.pop()
        if number in seen:
            continue
        seen.add(number)
        match values[number].kind:
            case ValueKind.OPERATION:
                pass
            case ValueKind.REBUILT:
                stack += values[number].inputs
            case ValueKind.SIZE:
                sizes[values[number].size] = None
            case _:
                leaves.add(number)
    for size in sizes:
        if not any(size in values[number].shape for number in (*inputs, *leaves)):
            leaves.add(lines.column_with(size))
    return leaves


class _Source:
    """Source of one stage's function, built line by line. A number is the index of a value in ``lines.values``."""

    def __init__(self, lines: Lines, inputs: Sequence[int]) -> None:
        self._lines, self._inputs = lines, inputs
        self._taken = {*_TAKEN, *lines.names}
        self._arguments: list[str] = []
        self._names: dict[int, str] = {}
        self._sites: dict[tuple[int, int], str] = {}  # (operation, parameter) -> name
        self._body: list[tuple[str, str, list[str]]] = []  # name, source, names of what it reads

    def take_all(self, sites: Iterable[tuple[int, int, int]], held: Iterable[int], columns: Iterable[int]) -> None:
        """Add all arguments of the function, in the order of its signature.

        Args:
            sites: (operation, parameter, index of this use of the parameter) for every use in the stage.
            held: buffers and constants.
            columns: data columns.
        """
        values = self._lines.values
        for number, used, index in sites:
            self.take(f"{values[used].name}__{index}", used, by=number)
        for number in held:
            self.take(values[number].name, number)
        for number in self._inputs:
            self.take(f"in_{values[number].name}", number)
        for number in columns:
            self.take(f"column_{values[number].name}", number)
        (key,) = self._lines.of_kind(ValueKind.KEY)
        self.take("key", key)

    def take(self, wanted: str, number: int, by: int | None = None) -> None:
        """Add an argument of the function for the value ``number``.

        Args:
            wanted: name of the argument; a similar name is used if this is taken.
            by: operation that uses the value, if it is a parameter: each use has an argument of its own; else None.
        """
        name = self._unique(wanted)
        self._arguments.append(name)
        if by is None:
            self._names[number] = name
        else:
            self._sites[by, number] = name

    def add(self, number: int) -> str:
        """Append the line that computes the operation ``number``, and return the name of its result."""
        value = self._lines.values[number]
        read = [self._sites.get((number, used)) or self._name(used) for used in value.reads]
        source = value.text[0] + "".join(name + text for name, text in zip(read, value.text[1:], strict=True))
        return self._append(number, value.name, source, read)

    def text(self, outputs: Sequence[int]) -> str:
        """Return the source of the function that returns ``outputs``; values are dropped after their last use."""
        returned = [self._name(number) for number in outputs]
        last_use = {name: at for at, (_, _, read) in enumerate(self._body) for name in read}
        last_use.update(dict.fromkeys(returned, len(self._body)))
        lines = []
        for at, (name, source, read) in enumerate(self._body):
            dead = [used for used in dict.fromkeys(read) if last_use[used] == at]
            if name not in last_use:
                dead.append(name)
            end = f";  {' = '.join([*dead, 'None'])}" if dead else ""
            lines.append(f"    {name} = {source}{end}\n")
        tail = f"({returned[0]},)" if len(returned) == 1 else f"({', '.join(returned)})"
        head = f"\n\n\ndef forward({', '.join(['self', *self._arguments])}):\n"
        return f"{head}{''.join(lines)}    return {tail}\n    "

    def _name(self, number: int) -> str:
        """Return the name of a value in this stage; if it has no name yet, append the lines that compute it first."""
        if number in self._names:
            return self._names[number]
        value = self._lines.values[number]
        if value.kind is ValueKind.SIZE:
            return self._size(number, value.size)
        if value.kind is ValueKind.REBUILT:
            return self.add(number)
        raise CaptureError(f"{value.name} is read in a stage that does not have it; please report this model.")

    def _size(self, number: int, size: str) -> str:
        """Append a line that reads the symbolic size ``size`` as the value ``number``; return its name in the stage."""
        for source in (*self._inputs, *self._lines.of_kind(ValueKind.COLUMN)):
            dim = self._lines.values[source].dim_of(size)
            if dim is not None and source in self._names:
                held = self._names[source]
                return self._append(number, "sym_size_int", f"torch.ops.aten.sym_size.int({held}, {dim})", [held])
        raise CaptureError(f"No tensor of the stage has the size {size}; please report this model.")

    def _append(self, number: int, wanted: str, source: str, read: Iterable[str]) -> str:
        name = self._names[number] = self._unique(wanted)
        self._body.append((name, source, list(read)))
        return name

    def _unique(self, wanted: str) -> str:
        name, count = wanted, 0
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name


def assign_by_position(lines: Lines, cuts: Sequence[int], order: Sequence[int] = ()) -> dict[int, int]:
    """Return the stage of every operation, by the operation's index in ``lines.values``.

    Args:
        cuts: ascending positions in ``order``; a new stage begins at each.
        order: permutation of the indices of ``lines.operations``; empty for the order of execution.
    """
    places = order or range(len(lines.operations))
    return {lines.operations[at]: bisect.bisect_right(cuts, place) for place, at in enumerate(places)}


def check_order(graph: ModelGraph, cuts: Sequence[int], order: Sequence[int]) -> None:
    """Raise an error if stages cut from this sequence of operations would not compute bitwise what the model computes.

    Args:
        cuts: ascending positions in ``order``; a new stage begins at each.
        order: sequence of the graph's nodes, as positions in ``graph.nodes``.

    Raises:
        CaptureError: the sequence is no permutation of the graph's nodes, or two nodes are in stages that ``edges``,
            ``together`` or ``before`` of the graph forbid; names both.
    """
    if sorted(order) != list(range(len(graph.nodes))):
        raise CaptureError(
            f"The order of a partition names {len(order)} positions, but the model has {len(graph.nodes)} operations, "
            "each of which must come exactly once. Make the plan anew from this model."
        )
    stage = {at: bisect.bisect_right(cuts, place) for place, at in enumerate(order)}
    rules = (
        (graph.edges or (), "reads what is made there", operator.gt),
        (graph.before, "must not run before it", operator.gt),
        (graph.together, "must share its stage", operator.ne),
    )
    for pairs, why, wrong in rules:
        for earlier, later in pairs:
            if wrong(stage[earlier], stage[later]):
                a, b = graph.nodes[earlier].name, graph.nodes[later].name
                raise CaptureError(
                    f"The order of the partition puts {a!r} in stage {stage[earlier]} and {b!r}, which {why}, in stage "
                    f"{stage[later]}. Plan with a solver that keeps edges, together and before of the graph."
                )


def assign_by_anchors(
    lines: Lines, holders: Mapping[str, tuple[int, ...]], cut_bytes: Sequence[int | None], num_stages: int
) -> dict[int, int] | None:
    """Map the operations of evaluation mode to contiguous stages, given the stages that hold each tensor in training.

    An operation that reads a parameter or a changing buffer is an anchor: it must be in a stage that holds the tensor.
    Between two anchors in different stages, the cut is made where the fewest bytes cross.

    Args:
        lines: the model in evaluation mode.
        holders: stages that hold each parameter or changing buffer in training, by name.
        cut_bytes: bytes that cross a cut after each operation; None if no cut is possible there.

    Returns:
        Stage by operation; None if no such stages exist, as when evaluation uses the tensors in another order.
    """
    names = lines.held_names()
    cuts: list[int] = []
    begin = 1  # first position at which the next cut may be

    def cut(stage: int, stop: int) -> bool:
        places = [(size, p) for p in range(begin, stop) if (size := cut_bytes[p - 1]) is not None]
        missing = stage - len(cuts)
        cuts.extend([min(places)[1]] * missing if places else [])
        return len(cuts) == stage

    for position, number in enumerate(lines.operations):
        read = lines.values[number].inputs
        held = [set(holders[names[used]]) for used in read if names.get(used, "") in holders]
        if not held:
            continue
        possible = [stage for stage in set.intersection(*held) if stage >= len(cuts)]
        if not possible or not cut(min(possible), position + 1):
            return None
        begin = position + 1
    return assign_by_position(lines, cuts) if cut(num_stages - 1, len(lines.operations)) else None


def assign_by_owner(
    lines: Lines,
    holders: Mapping[str, tuple[int, ...]],
    together: Sequence[tuple[int, int]] = (),
    columns: Mapping[int, str] = NO_COLUMNS,
) -> dict[int, int]:
    """Map the operations of evaluation mode to stages, given the stages that hold each tensor in training.

    An operation goes to the earliest stage that has its inputs and holds its parameters and changing buffers.

    Args:
        lines: the model in evaluation mode.
        holders: stages that hold each parameter or changing buffer in training, by name.
        together: pairs of operations that must share a stage, as positions in execution order.
        columns: {index in ``lines.values``: name in ``holders``} of data columns that only some stages have.

    Raises:
        CaptureError: evaluation reads a tensor later than in the last stage that holds it.
    """
    names, users, joined = {**lines.held_names(), **columns}, lines.users(), _joined(lines, together)
    stages = dict.fromkeys(lines.operations, 0)
    waiting = dict.fromkeys(lines.operations)
    while waiting:  # ends, since an operation only moves to later stages
        number = next(iter(waiting))
        del waiting[number]
        read, partners = lines.values[number].inputs, joined.get(number, [])
        earliest = max((stages[i] for i in (*read, *partners) if i in stages), default=0)
        earliest = max(earliest, stages[number])
        for used in read:
            if (name := names.get(used, "")) in holders:
                earliest = _holder_from(earliest, holders[name], name)
        if earliest > stages[number]:
            stages[number] = earliest
            waiting.update(dict.fromkeys(n for n in (*users.get(number, ()), *partners) if n in stages))
    return stages


def _joined(lines: Lines, together: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Convert pairs of positions in ``together`` to {operation: operations that must share its stage}, as indices."""
    partners: dict[int, list[int]] = {}
    for one, other in together:
        a, b = lines.operations[one], lines.operations[other]
        partners.setdefault(a, []).append(b)
        partners.setdefault(b, []).append(a)
    return partners


def _holder_from(earliest: int, holders: Sequence[int], name: str) -> int:
    """Return the first stage in ``holders`` from ``earliest`` on, or raise CaptureError with the tensor's ``name``."""
    holder = next((stage for stage in holders if stage >= earliest), None)
    if holder is None:
        raise CaptureError(
            f"Evaluation reads {name!r} in stage {earliest} or later, but training holds it in stage {holders[-1]}: "
            "the model runs its parts in another order in eval mode. Move the cut with "
            "PipelineConfig(partitioner=[...])."
        )
    return holder


def slice_stages(
    lines: Lines, stages: Mapping[int, int], num_stages: int, title: str, kept: Sequence[int] = ()
) -> list[GraphFunction]:
    """Build one function per stage.

    Args:
        stages: stage of each operation, at least as late as the stages of its inputs.
        title: beginning of the functions' names in tracebacks.
        kept: outputs of the model that are not sent to the last stage: the stage that computes them returns them, after
            its other outputs.

    Raises:
        CaptureError: a buffer that changes would be in two stages.
    """
    _check_buffers(lines, stages)
    last_use = dict(stages)
    for number in lines.operations:
        for used in lines.values[number].inputs:
            if used in last_use:
                last_use[used] = max(last_use[used], stages[number])
    outputs = [number for number in lines.outputs if number not in kept]
    for number in outputs:
        if number in last_use:
            last_use[number] = num_stages - 1
    boundaries = [
        [number for number in lines.operations if stages[number] <= stage < last_use[number]]
        for stage in range(num_stages - 1)
    ]
    return [
        stage_function(
            lines,
            [number for number in lines.operations if stages[number] == stage],
            boundaries[stage - 1] if stage else [],
            (outputs if stage == num_stages - 1 else boundaries[stage]) + [n for n in kept if stages[n] == stage],
            f"{title} stage {stage}",
            first=stage == 0 and not kept,
        )
        for stage in range(num_stages)
    ]


def _check_buffers(lines: Lines, stages: Mapping[int, int]) -> None:
    users = lines.users()
    for buffer in lines.changing_buffers:
        using = sorted({stages[user] for user in users.get(buffer, ())})
        if len(using) > 1:
            raise CaptureError(
                f"The buffer {lines.values[buffer].of!r} is updated during forward and used in stages {using}; "
                "a changing buffer must stay within one stage. Move the cut with PipelineConfig(partitioner=[...])."
            )

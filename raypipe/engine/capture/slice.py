"""Stages of a traced model as source: each line as it was captured, with the names that its values have in the stage.

lines of a stage + inputs, outputs  -->  def forward(self, *sites, *buffers, *constants, *inputs, *columns, key)
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable, Sequence

from raypipe.engine.capture.lines import Kind, Lines
from raypipe.engine.region import TORCH_NAMES
from raypipe.engine.stage import GraphFunction, Site
from raypipe.errors import CaptureError

__all__ = ["stage_function"]

_TAKEN = {*keyword.kwlist, *vars(builtins), *TORCH_NAMES, "self"}


def stage_function(
    lines: Lines, operations: Sequence[int], inputs: Sequence[int], outputs: Sequence[int], title: str
) -> GraphFunction:
    """One stage.

    Args:
        operations: that it runs, in execution order.
        inputs: values that come from the stage before.
        outputs: values that it returns.
        title: names the function in tracebacks.
    """
    values = lines.values
    leaves = _leaves(lines, operations, inputs, outputs)
    sites = [(number, used, index) for number in operations for used, index in values[number].sites]
    buffers, constants, columns = (
        [number for number in lines.of_kind(kind) if number in leaves]
        for kind in (Kind.BUFFER, Kind.CONSTANT, Kind.COLUMN)
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
        column_shapes=tuple(values[number].static_shape for number in columns),
        changing_buffers=tuple(values[number].of for number in buffers if number in lines.changing_buffers),
    )


def _leaves(lines: Lines, operations: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> set[int]:
    """Placeholders of the model that the stage reads, through rebuilt values too."""
    values = lines.values
    found: set[int] = set()
    sizes: dict[str, None] = {}
    seen = set(inputs)
    stack = [used for number in operations for used in values[number].inputs] + list(outputs)
    while stack:
        number = stack.pop()
        if number in seen:
            continue
        seen.add(number)
        match values[number].kind:
            case Kind.OPERATION:
                pass
            case Kind.REBUILT:
                stack += values[number].inputs
            case Kind.SIZE:
                sizes[values[number].size] = None
            case _:
                found.add(number)
    for size in sizes:
        if not any(size in values[number].shape for number in (*inputs, *found)):
            found.add(lines.column_with(size))
    return found


class _Source:
    """The source of one stage, line by line."""

    def __init__(self, lines: Lines, inputs: Sequence[int]) -> None:
        self._lines, self._inputs = lines, inputs
        self._taken = {*_TAKEN, *lines.names}
        self._arguments: list[str] = []
        self._names: dict[int, str] = {}
        self._sites: dict[tuple[int, int], str] = {}  # (operation, parameter) -> name
        self._body: list[tuple[str, str, list[str]]] = []  # name, source, names of what it reads

    def take_all(self, sites: Iterable[tuple[int, int, int]], held: Iterable[int], columns: Iterable[int]) -> None:
        """The arguments, in the order of the signature.

        Args:
            sites: (operation, parameter, which use of it).
            held: buffers and constants.
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
        (key,) = self._lines.of_kind(Kind.KEY)
        self.take("key", key)

    def take(self, wanted: str, number: int, by: int | None = None) -> None:
        """An argument: a value, or a use of a parameter ``by`` one operation."""
        name = self._unique(wanted)
        self._arguments.append(name)
        if by is None:
            self._names[number] = name
        else:
            self._sites[by, number] = name

    def add(self, number: int) -> str:
        """The line of an operation; its name."""
        value = self._lines.values[number]
        read = [self._sites.get((number, used)) or self._name(used) for used in value.reads]
        source = value.text[0] + "".join(name + text for name, text in zip(read, value.text[1:], strict=True))
        return self._append(number, value.name, source, read)

    def text(self, outputs: Sequence[int]) -> str:
        """All of it. A value is let go after the line that reads it last, as fx writes it."""
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
        """Of a value of this stage, rebuilt where that is what it is for."""
        if number in self._names:
            return self._names[number]
        value = self._lines.values[number]
        if value.kind is Kind.SIZE:
            return self._size(number, value.size)
        if value.kind is Kind.REBUILT:
            return self.add(number)
        raise CaptureError(f"{value.name} is read in a stage that does not have it; please report this model.")

    def _size(self, number: int, size: str) -> str:
        """A symbolic size, read off any tensor of this stage that has it."""
        for source in (*self._inputs, *self._lines.of_kind(Kind.COLUMN)):
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

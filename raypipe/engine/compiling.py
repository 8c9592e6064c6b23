"""A stage's generated forward under torch.compile: one graph, whose backward is one node of autograd.

    eager      addmm <- gelu <- addmm <- ...      a node for each operation: a backward can be split, and the gradient
                                                  of a large weight is added as soon as it is known
    compiled   one node                           all gradients of a micro-batch come at once

So schedules that split backwards refuse it, and a stage that draws keyed random numbers, which are Python's business,
is left as it is, with a word in the plan. Every shape is compiled for itself (``dynamic=False``): which kernel computes
a micro-batch, and so its bits, never depends on what was seen before. Evaluation runs as it is.
"""

from __future__ import annotations

import ast
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from raypipe.engine.crossing import Crossing
from raypipe.engine.placing import placed
from raypipe.engine.region import Region, compiled
from raypipe.engine.stage import GraphFunction, StageFunction, StageProgram
from raypipe.errors import StageError

__all__ = ["BACKENDS", "compiled_stage", "modes_of", "notes_of", "why_not_compiled"]

BACKENDS = ("inductor", "aot_eager")
"""Of torch.compile: generated kernels, or torch's own in the traced order, to the bits of plain PyTorch."""

_TRACING = threading.Lock()
"""torch traces one function at a time in a process; stages of a local run are threads of one."""


def modes_of(program: StageProgram, crossing: Crossing, backend: str) -> Mapping[str, StageFunction]:
    """The functions of a stage where it computes, that of training compiled unless ``backend`` is "off"."""
    found = {mode: placed(function, crossing) for mode, function in program.modes.items()}
    if backend != "off":
        found["train"] = compiled_stage(found["train"], backend)
    return found


def compiled_stage(function: StageFunction, backend: str) -> StageFunction:
    """The function under torch.compile; itself where that is not possible, see ``why_not_compiled``."""
    if why_not_compiled(function) or not isinstance(function, GraphFunction):
        return function
    made = torch.compile(
        compiled(function.source, function.names, function.title, function.place),
        backend=backend, fullgraph=True, dynamic=False,
    )  # fmt: skip
    return replace(function, _function=functools.partial(_run, made, backend))


def why_not_compiled(function: StageFunction) -> str:
    """Why a stage's function is run as it is, for people; "" where it can be compiled."""
    if not isinstance(function, GraphFunction):
        return "it consists of children of an nn.Sequential, which are not traced"
    used = _names_used(function.source)
    if "key" in used:
        return "it draws random numbers (dropout)"
    if regions := [one.kind for name, one in function.names.items() if name in used and isinstance(one, Region)]:
        return f"it has a {regions[0]} (vmap, torch.cond)"
    return ""


def notes_of(programs: Sequence[StageProgram]) -> list[str]:
    """For the plan: which stages are not compiled."""
    why = {program.index: why_not_compiled(program.train) for program in programs}
    return [f"Stage {stage} is not compiled: {reason}." for stage, reason in why.items() if reason]


def _run(made: Callable[..., Any], backend: str, *arguments: Any) -> Any:
    try:
        with _TRACING:
            return made(*arguments[:-1], None)  # the key, which nothing reads
    except Exception as error:
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")):
            said = " ".join(str(error).split())[:300]
            raise StageError(
                f"compile_stages={backend!r}: torch.compile fails: {type(error).__name__}: {said} Set "
                "compile_stages='off', or 'aot_eager' where no compiler is at hand; more than 8 shapes of "
                "micro-batches are too many for it."
            ) from error
        raise


def _names_used(source: str) -> set[str]:
    """Names that the body of a generated function reads."""
    (function,) = ast.parse(source).body
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}

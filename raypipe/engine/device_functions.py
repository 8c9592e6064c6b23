"""Functions of a stage on its device: constants moved there, and optionally compiled by torch.compile.

    captured    arange(8, device=device(type='cpu')), a constant of the model, a loss with class weights
    placed      the same source, which creates its CPU tensors on the device; copies of the constant and of the weights

Modules of an nn.Sequential run unchanged: tensors that they create in host memory stay there, as in plain PyTorch.

    eager       addmm <- gelu <- addmm <- ...     one autograd node per operation: a backward can be split, and the
                                                  gradient of a large weight is added as soon as it is computed
    compiled    one node                          all gradients of a micro-batch are computed at once

So schedules with split backwards refuse compile_stages. A stage that draws random numbers, by Python code, is not
compiled; the plan has a note. Every shape is compiled separately (``dynamic=False``), so that the kernels of a
micro-batch, and so its results, never depend on earlier shapes. Evaluation is not compiled.
"""

from __future__ import annotations

import ast
import copy
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch

from raypipe.engine.device.device import TransferKind
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.stage.generated_source import Region, compiled, foreign_operations
from raypipe.engine.stage.minibatch_loss import LossTail
from raypipe.engine.stage.stage import GraphFunction, StageFunction, StageProgram
from raypipe.errors import StageError

Loss = Callable[..., Any]


def placed(function: StageFunction, transfer: DeviceTransfer) -> StageFunction:
    """Return a copy of a traced stage function whose constants and new tensors are on the device.

    Other functions, and all functions on the CPU, are returned unchanged.
    """
    if transfer.device.immediate or not isinstance(function, GraphFunction):
        return function
    constants = transfer.named(dict(enumerate(function.constants)), TransferKind.CONSTANTS)
    return replace(function, constants=tuple(constants.values()), place=transfer.device.place, _function=None)


def placed_loss(loss: Loss | None, transfer: DeviceTransfer) -> Loss | None:
    """Return a copy of the loss whose tensors, such as class weights, are on the device; unchanged if on the CPU."""
    if isinstance(loss, LossTail):
        return loss.changed(lambda function: placed(function, transfer))
    loss_fn = getattr(loss, "loss_fn", None)
    if transfer.device.immediate or not is_dataclass(loss) or not isinstance(loss_fn, torch.nn.Module):
        return loss
    return replace(loss, loss_fn=_module_on(loss_fn, transfer))  # type: ignore[type-var]


def _module_on(module: torch.nn.Module, transfer: DeviceTransfer) -> torch.nn.Module:
    """Return a copy of a module whose parameters and buffers are on the device."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        held = {name: tensor for name, tensor in part._parameters.items() if tensor is not None}
        for name, tensor in transfer.named(held, TransferKind.CONSTANTS).items():
            part._parameters[name] = torch.nn.Parameter(tensor.detach(), held[name].requires_grad)
        buffers = {name: tensor for name, tensor in part._buffers.items() if tensor is not None}
        part._buffers.update(transfer.named(buffers, TransferKind.CONSTANTS))
    return copied


_TRACING = threading.Lock()
"""Lock of calls that may trace: torch traces one function at a time in a process, and LocalFleet has many threads."""


def modes_of(program: StageProgram, transfer: DeviceTransfer, backend: str) -> dict[str, StageFunction]:
    """Return a stage's functions by mode ("train", "eval") on its device; "train" is compiled unless backend="off"."""
    by_mode = {mode: placed(function, transfer) for mode, function in program.modes.items()}
    if backend != "off":
        by_mode["train"] = compiled_stage(by_mode["train"], backend)
    return by_mode


def compiled_stage(function: StageFunction, backend: str) -> StageFunction:
    """Compile a stage function with torch.compile, or return it unchanged if ``why_not_compiled`` has a reason."""
    if why_not_compiled(function) or not isinstance(function, GraphFunction):
        return function
    forward = torch.compile(
        compiled(function.source, function.names, function.title, function.place),
        backend=backend, fullgraph=True, dynamic=False,
    )  # fmt: skip
    return replace(function, _function=functools.partial(_run, forward, backend))


def why_not_compiled(function: StageFunction) -> str:
    """Explain why torch.compile does not compile a stage's function; "" if it does."""
    if isinstance(function, GraphFunction) and "key" in _names_used(function.source):
        return "it draws random numbers (dropout)"
    return _why_opaque(function)


def _why_opaque(function: StageFunction) -> str:
    """Explain which Python code runs in a stage's forward besides operations; "" if none does."""
    if not isinstance(function, GraphFunction):
        return "it consists of children of an nn.Sequential, which are not traced"
    used = _names_used(function.source)
    if regions := [one.kind for name, one in function.names.items() if name in used and isinstance(one, Region)]:
        return f"it has a {regions[0]} (vmap, torch.cond, torch.autograd.Function)"
    return ""


def why_no_graphs(function: StageFunction) -> str:
    """Explain why a stage's forward cannot be recorded as a graph of the device; "" if it may be."""
    if reason := _why_opaque(function):
        return reason
    assert isinstance(function, GraphFunction)
    if operations := foreign_operations(function.source):
        return f"it calls {next(iter(operations))}, which may read values on the host"
    return ""


def notes_of(programs: Sequence[StageProgram]) -> list[str]:
    """List one sentence, with the reason, for each stage that torch.compile does not compile; for the plan's notes."""
    why = {program.index: why_not_compiled(program.train) for program in programs}
    return [f"Stage {stage} is not compiled: {reason}." for stage, reason in why.items() if reason]


def _run(forward: Callable[..., Any], backend: str, *arguments: Any) -> Any:
    try:
        with _TRACING:
            return forward(*arguments[:-1], None)  # the key, which nothing reads
    except Exception as error:
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")):
            message = " ".join(str(error).split())[:300]
            raise StageError(
                f"compile_stages={backend!r}: torch.compile failed: {type(error).__name__}: {message} Set "
                "compile_stages='off', or 'aot_eager' if no C++ compiler is installed. torch.compile accepts at most 8 "
                "shapes of micro-batches."
            ) from error
        raise


def _names_used(source: str) -> set[str]:
    """Return the names that the body of a generated function reads."""
    (function,) = ast.parse(source).body
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}

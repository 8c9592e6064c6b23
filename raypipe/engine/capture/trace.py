"""torch.export in, one flat graph out: parameters, buffers, constants and data columns as placeholders.

The exported program is only ever read. Its graph is copied into a plain fx graph in which nested regions
are inlined, assertions are gone, every random operation carries its number, and activation operations that
work in place are made out of place wherever that is safe (buffer updates stay in place).
"""

from __future__ import annotations

import contextvars
import inspect
import operator
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from raypipe.engine.capture.guards import loss_only, nothing_lost
from raypipe.engine.capture.hidden_state import watched_forward
from raypipe.engine.capture.inplace import functional_twin, mutated_args, storage_roots, work_out_of_place
from raypipe.engine.capture.lengths import asks_for_length, is_tokens
from raypipe.engine.capture.surroundings import surroundings_kept
from raypipe.engine.cumulative import cumulative_norms
from raypipe.engine.randomness import dropout, keyed_call, num_draws
from raypipe.engine.recompute import traced_checkpoints
from raypipe.errors import CaptureError

__all__ = ["Traced", "trace"]

aten = torch.ops.aten

_DROPPED = ("aten._assert", "aten.sym_constrain_range", "aten._assert_tensor_metadata")


@dataclass(slots=True)
class Traced:
    """A whole model in one mode.

    Attributes:
        graph: flat fx graph; its output is the flat list of the model's outputs.
        parameters, buffers: placeholder -> name in the user's model (canonical for shared parameters).
        constants: placeholder -> tensor that the model closed over.
        columns: placeholder -> name of the data column.
        key: placeholder of the random key.
        num_draws: random operations in the graph.
        out_spec: structure of the model's output.
        pinned: nodes that change in place something with another live alias: no cut may part the nodes of
            one such group (first and last node of it).
    """

    graph: fx.Graph
    parameters: dict[fx.Node, str]
    buffers: dict[fx.Node, str]
    constants: dict[fx.Node, torch.Tensor]
    columns: dict[fx.Node, str]
    key: fx.Node
    num_draws: int
    out_spec: pytree.TreeSpec
    pinned: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)

    @property
    def one_length(self) -> bool:
        """Whether a column of token ids must be as long as the example's."""
        shapes = [value.shape for value in (node.meta["val"] for node in self.columns) if is_tokens(value)]
        return any(isinstance(shape[1], int) for shape in shapes)


def trace(
    model: torch.nn.Module,
    args: Sequence[torch.Tensor],
    kwargs: Mapping[str, torch.Tensor],
    columns: Sequence[str],
    *,
    returns_loss: bool,
    training: bool,
    one_length: bool = False,
) -> Traced:
    """Export the model in one mode with a dynamic batch dimension (dimension 0 of every input).

    Columns of token ids, shape (b, length), get a dynamic length too, unless the code asks what it is: then the
    graph is right for one length only, and is traced for that one.

    Args:
        args, kwargs: one example micro-batch of at least two samples.
        columns: names of the data columns behind args, then kwargs.
        returns_loss: the model computes its own loss; only that output is kept.
        training: which mode.
        one_length: the other mode was traced for one length, so that this one need not try.

    Raises:
        CaptureError: torch.export cannot trace the model; quotes the place in the user's code.
    """
    values = (*args, *kwargs.values())
    program: torch.export.ExportedProgram | None = None
    whose = f"{type(model).__name__}.forward"
    was_training = {name: module.training for name, module in model.named_modules()}
    model.train(training)
    try:
        loss = loss_only(model) if returns_loss else nullcontext()
        loss = loss_only(model) if returns_loss else nullcontext()
        with nothing_lost(), surroundings_kept(whose), traced_checkpoints(), cumulative_norms(), loss:
            with watched_forward(model) as changed:
                if not one_length and any(is_tokens(value) for value in values):
                    with suppress(Exception):  # whatever it was, the second attempt says it better
                        program = _export(model, args, kwargs, free_length=True)
                if program is None or asks_for_length(program):
                    program = _export(model, args, kwargs, free_length=False)
            if changed:
                with watched_forward(model, twice=True):
                    _export(model, args, kwargs, free_length=False)
    except CaptureError:
        raise
    except Exception as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, CaptureError):
            raise cause from None
        raise CaptureError(_explain(model, error)) from error
    finally:
        for name, module in model.named_modules():
            module.training = was_training[name]
    return _flatten(model, program, columns)


def _export(
    model: torch.nn.Module, args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor], *, free_length: bool
) -> torch.export.ExportedProgram:
    def dims(value: torch.Tensor) -> dict[int, Any] | None:
        length = {1: torch.export.Dim.AUTO} if free_length and is_tokens(value) else {}
        return {0: torch.export.Dim.DYNAMIC, **length} if value.dim() else None

    shapes = _dynamic_shapes(model, [dims(a) for a in args], {k: dims(v) for k, v in kwargs.items()})
    # In a context of its own, so that no stand-in for a tensor stays in a variable of the user's.
    run = contextvars.copy_context().run
    return run(torch.export.export, model, tuple(args), dict(kwargs), dynamic_shapes=shapes, strict=False)


def _dynamic_shapes(model: torch.nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Dynamic shapes keyed by the parameters of forward, as torch.export wants them."""
    parameters = inspect.signature(model.forward).parameters
    shapes: dict[str, Any] = {}
    rest = list(args)
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL and rest:
            shapes[name] = tuple(rest)
            rest = []
        elif rest and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            shapes[name] = rest.pop(0)
    unknown = {}
    for name, shape in kwargs.items():
        if name in parameters:
            shapes[name] = shape
        else:
            unknown[name] = shape
    for name, parameter in parameters.items():
        if unknown and parameter.kind is parameter.VAR_KEYWORD:
            shapes[name] = unknown
            unknown = {}
    if rest or unknown:
        extra = f"{len(args)} positional inputs" if rest else f"columns {sorted(unknown)}"
        raise CaptureError(
            f"{type(model).__name__}.forward{inspect.signature(model.forward)} does not take the {extra} that the "
            "data brings. Drop the columns it does not know, or name them as its arguments."
        )
    return shapes


def _explain(model: torch.nn.Module, error: Exception) -> str:
    """One paragraph with the innermost line of the user's code in it."""
    frames = traceback.extract_tb(error.__traceback__)
    library = ("/torch/", "/raypipe/engine/", "<string>", "<eval_with_key>")
    own = [f for f in frames if not any(part in f.filename for part in library)]
    where = f' at {own[-1].filename}:{own[-1].lineno}, in {own[-1].name}: "{own[-1].line}"' if own else ""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"{type(model).__name__} could not be traced{where}. torch.export said: {type(error).__name__}: {first[:300]} "
        "Replace the data-dependent branch (torch.where, torch.cond) or move it out of forward; or build the model as "
        "an nn.Sequential of blocks, which raypipe cuts between blocks without tracing them."
    )


def _flatten(model: torch.nn.Module, program: torch.export.ExportedProgram, columns: Sequence[str]) -> Traced:
    canonical = _canonical_names(model)
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    traced = Traced(graph, {}, {}, {}, {}, None, 0, program.call_spec.out_spec)  # type: ignore[arg-type]
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    known: dict[str, fx.Node] = {}
    user_inputs = iter(columns)
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        spec = specs[node.name]
        name = canonical.get(spec.target or "", spec.target)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and name in known:
            env[node] = known[name]  # another name of a shared tensor
            continue
        copy = env[node] = graph.placeholder(node.name)
        copy.meta = dict(node.meta)
        match spec.kind:
            case InputKind.PARAMETER:
                known[name] = copy
                traced.parameters[copy] = name
            case InputKind.BUFFER:
                known[name] = copy
                traced.buffers[copy] = name
            case InputKind.CONSTANT_TENSOR:
                traced.constants[copy] = program.constants[spec.target].detach()
            case InputKind.USER_INPUT:
                traced.columns[copy] = next(user_inputs)
            case _:
                raise CaptureError(
                    f"The model uses {spec.kind.name} {spec.target!r} as an input; raypipe handles tensors only."
                )
    traced.key = graph.placeholder("key")
    _copy_nodes(program.graph_module, program.graph, env, traced, detached=False)
    outputs = next(n for n in program.graph.nodes if n.op == "output").args[0]
    graph.output(tuple(fx.map_arg(list(outputs), lambda n: env[n])))
    work_out_of_place(traced)
    graph.lint()
    return traced


def _canonical_names(model: torch.nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first one in named_parameters() or named_buffers()."""
    first = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    all_names = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: first[tensor] for name, tensor in all_names}


def _copy_nodes(
    owner: torch.nn.Module, source: fx.Graph, env: dict[fx.Node, Any], traced: Traced, *, detached: bool
) -> None:
    """Copy call nodes into traced.graph; ``detached`` inside a no-grad region, whose results carry no gradient."""
    graph = traced.graph
    for node in source.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr":
            value = operator.attrgetter(node.target)(owner)
            if isinstance(value, fx.GraphModule):
                env[node] = value  # the body of a region, which _inline copies
                continue
            raise CaptureError(f"The graph reads the attribute {node.target!r}, which raypipe cannot ship.")
        if str(node.target).startswith(_DROPPED):
            continue
        if detached:
            _refuse_outside_update(node, source, env, traced)
        mapped: Any = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        args, kwargs = mapped
        if "wrap_with_" in str(node.target):
            env[node] = _inline(node, args, traced, detached)
            continue
        env[node] = copy = _copy_call(graph, traced, node, args, dict(kwargs))
        copy.meta = {k: node.meta[k] for k in ("val", "nn_module_stack", "stack_trace") if k in node.meta}
        if detached and isinstance(copy.meta.get("val"), torch.Tensor):
            env[node] = graph.call_function(aten.detach.default, (copy,))
            env[node].meta = dict(copy.meta)


def _refuse_outside_update(node: fx.Node, source: fx.Graph, env: dict[fx.Node, Any], traced: Traced) -> None:
    """Under no_grad autograd does not see an in-place change; out of place it would be differentiated."""
    roots = storage_roots(source)
    for changed in mutated_args(node):
        root = roots[changed]
        value = root.meta.get("val")
        # A parameter has an error of its own, a buffer is meant to change.
        outside = root.op == "placeholder" and env[root] not in traced.buffers and env[root] not in traced.parameters
        if outside and isinstance(value, torch.Tensor) and value.is_floating_point():
            raise CaptureError(
                f"forward changes an activation in place under torch.no_grad ({node.target}), which plain PyTorch "
                "hides from the backward. Write x = x + (new - x).detach() or the like."
            )


def _inline(node: fx.Node, args: Sequence[Any], traced: Traced, detached: bool) -> Any:
    """A no-grad or autocast region becomes part of the flat graph."""
    if "set_grad_enabled" in str(node.target):
        enabled, body, *inputs = args
        detached = not enabled
    elif "autocast" in str(node.target):
        _device, _dtype, enabled, _cache, body, *inputs = args
        if enabled:
            raise CaptureError(
                "The model switches autocast on inside forward; use PipelineConfig(precision=...) instead, so that "
                "every stage computes in one known precision."
            )
    else:
        raise CaptureError(f"The traced graph contains {node.target}, which raypipe cannot cut.")
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    env = dict(zip(placeholders, inputs, strict=True))
    _copy_nodes(body, body.graph, env, traced, detached=detached)
    output = next(n for n in body.graph.nodes if n.op == "output").args[0]
    return fx.map_arg(output, lambda n: env[n])


def _copy_call(graph: fx.Graph, traced: Traced, node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
    if target is operator.getitem and isinstance(args[0], list | tuple):
        return args[0][args[1]]  # an output of an inlined region
    if target is aten.detach_.default:
        target = aten.detach.default
    draws = num_draws(target, args, kwargs)
    if not draws:
        return graph.call_function(target, args, kwargs)
    index = traced.num_draws
    traced.num_draws += draws
    if target in (aten.dropout.default, aten.dropout_.default):
        return graph.call_function(dropout, (args[0], args[1], traced.key, index))
    functional = functional_twin(target)
    if draws > 1:
        kwargs["draws"] = draws
    return graph.call_function(keyed_call, (functional or target, traced.key, index, *args), kwargs)

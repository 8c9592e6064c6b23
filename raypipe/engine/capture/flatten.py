"""The exported graph as one flat graph: nested regions inlined, assertions gone, random operations numbered.

The exported program is only ever read.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec

from raypipe.engine.capture.buffer_writes import write_buffers_early
from raypipe.engine.capture.explain import draws_from
from raypipe.engine.capture.inplace import functional_twin, mutated_args, storage_roots, work_out_of_place
from raypipe.engine.capture.regions import body_of, fold, in_levels, line_of, refuse_draws
from raypipe.engine.capture.traced import UNCAST, Traced
from raypipe.engine.randomness import dropout, keyed_call, num_draws
from raypipe.engine.region import Body, Choice
from raypipe.errors import CaptureError

__all__ = ["copy_nodes", "flatten"]

aten = torch.ops.aten

_DROPPED = ("aten._assert", "aten.sym_constrain_range", "aten._assert_tensor_metadata")

_AUTOCAST_ENDS = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
"""That torch.export leaves as they are where it makes no region of what is between them."""


def flatten(model: torch.nn.Module, program: torch.export.ExportedProgram, columns: Sequence[str]) -> Traced:
    """The training or evaluation graph of a model.

    Args:
        columns: names of the data columns, in the order of the program's inputs.

    Raises:
        CaptureError: an input that is no tensor.
    """
    graph = fx.Graph()
    traced = Traced(graph, {}, {}, {}, {}, None, 0, program.call_spec.out_spec)  # type: ignore[arg-type]
    env = _placeholders(model, program, columns, traced)
    traced.key = graph.placeholder("key")
    copy_nodes(program.graph_module, program.graph, env, traced, detached=False)
    outputs = next(n for n in program.graph.nodes if n.op == "output").args[0]
    graph.output(tuple(fx.map_arg(list(outputs), lambda n: _used(graph, env[n], traced))))
    write_buffers_early(graph, traced.buffers)
    work_out_of_place(traced)
    graph.lint()
    return traced


def _used(graph: fx.Graph, node: Any, traced: Traced) -> Any:
    """An output; of one that is a parameter, an operation that uses it: each use has a gradient of its own."""
    if node not in traced.parameters:
        return node
    copy = graph.call_function(aten.alias.default, (node,))
    copy.meta = dict(node.meta)
    return copy


def _placeholders(
    model: torch.nn.Module, program: torch.export.ExportedProgram, columns: Sequence[str], traced: Traced
) -> dict[fx.Node, Any]:
    """The program's inputs in ``traced``, each with what it stands for; by the program's own nodes."""
    env: dict[fx.Node, Any] = {}
    canonical = _canonical_names(model)
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
        copy = env[node] = traced.graph.placeholder(node.name)
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
                raise _no_tensor(model, program, spec)
    return env


def _no_tensor(model: torch.nn.Module, program: torch.export.ExportedProgram, spec: InputSpec) -> CaptureError:
    held = program.constants.get(str(spec.target)) if spec.kind is InputKind.CUSTOM_OBJ else None
    if isinstance(held, torch.Generator):
        return draws_from(model, held)
    return CaptureError(f"The model uses {spec.kind.name} {spec.target!r} as an input; raypipe handles tensors only.")


def _canonical_names(model: torch.nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first one in named_parameters() or named_buffers()."""
    first = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    all_names = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: first[tensor] for name, tensor in all_names}


def copy_nodes(
    owner: torch.nn.Module, source: fx.Graph, env: dict[fx.Node, Any], traced: Traced, *, detached: bool,
    uncast: str = "",
) -> None:  # fmt: skip
    """Copy call nodes into traced.graph.

    Args:
        detached: inside a no-grad region, whose results carry no gradient.
        uncast: type of the device for which a region switches autocast off; see lines.py.
    """
    graph = traced.graph
    for node in in_levels(source.nodes):
        if isinstance(node, list):
            found = fold(node, env, graph)
            if uncast:
                for new in found.values():  # an output of the operation that the levels of vmap have become
                    new.all_input_nodes[0].meta[UNCAST] = uncast
            env.update({old: _detached(graph, new) if detached else new for old, new in found.items()})
            continue
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(owner)
            if isinstance(value, fx.GraphModule):
                env[node] = value  # the body of a region, which _inline copies
                continue
            raise CaptureError(f"The graph reads the attribute {node.target!r}, which raypipe cannot ship.")
        if str(node.target).startswith(_DROPPED):
            continue
        if node.target in _AUTOCAST_ENDS:
            raise CaptureError(
                f"The model calls torch.cond in a region of torch.autocast{line_of(node)}, of which torch.export loses "
                "the region. Call it outside of the region, or cast its operands by hand (x.float()) in place of one."
            )
        if detached:
            _refuse_outside_update(node, source, env, traced)
        mapped: Any = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        args, kwargs = mapped
        if "wrap_with_" in str(node.target):
            env[node] = _inline(node, args, traced, detached, uncast)
            continue
        if node.target is torch.ops.higher_order.cond:
            predicate, *bodies, operands = args
            choice = Choice(*(_body(body, traced, detached) for body in bodies))
            env[node] = copy = graph.create_node("call_function", choice, (predicate, *operands), {}, node.name)
        elif node.target is operator.getitem and isinstance(args[0], list | tuple):
            env[node] = args[0][args[1]]  # an output of a region, whose operations have their marks already
            continue
        else:
            env[node] = copy = _copy_call(graph, traced, node, args, dict(kwargs))
        copy.meta = {k: node.meta[k] for k in ("val", "nn_module_stack", "stack_trace") if k in node.meta}
        if uncast:
            copy.meta[UNCAST] = uncast
        if detached:
            env[node] = _detached(graph, copy)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A tensor without its history; anything else as it is."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return node
    copy = graph.call_function(aten.detach.default, (node,))
    copy.meta = dict(node.meta)
    return copy


def _body(body: fx.GraphModule, traced: Traced, detached: bool) -> Body:
    """One of the two ways of a torch.cond, as a function of the operands."""
    inner = Traced(fx.Graph(), {}, {}, {}, {}, traced.key, 0, traced.out_spec)
    env: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        refuse_draws(node, "torch.cond")
        if node.op == "placeholder":
            env[node] = inner.graph.placeholder(node.name)
    copy_nodes(body, body.graph, env, inner, detached=detached)
    if any(UNCAST in node.meta for node in inner.graph.nodes):
        raise CaptureError(
            "The model switches autocast off inside torch.cond, which raypipe cannot cut. Switch it off around the "
            "whole torch.cond, or take precision='bf16'."
        )
    output = next(n for n in body.graph.nodes if n.op == "output").args[0]
    inner.graph.output(fx.map_arg(output, env.__getitem__))
    return body_of(inner.graph)


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


def _inline(node: fx.Node, args: Sequence[Any], traced: Traced, detached: bool, uncast: str) -> Any:
    """A no-grad or autocast region becomes part of the flat graph."""
    if "set_grad_enabled" in str(node.target):
        enabled, body, *inputs = args
        detached = not enabled
    elif "autocast" in str(node.target):
        device, dtype, enabled, _cache, body, *inputs = args
        computing = torch.is_autocast_enabled("cpu")  # the precision's, which a capture is made in
        if enabled and not (computing and dtype in (None, torch.get_autocast_dtype("cpu"))):
            raise CaptureError(
                "The model switches autocast on inside forward; use PipelineConfig(precision=...) instead, so that "
                "every stage computes in one known precision."
            )
        if computing:
            uncast = "" if enabled else device
    else:
        raise CaptureError(f"The traced graph contains {node.target}, which raypipe cannot cut.")
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    env = dict(zip(placeholders, inputs, strict=True))
    copy_nodes(body, body.graph, env, traced, detached=detached, uncast=uncast)
    output = next(n for n in body.graph.nodes if n.op == "output").args[0]
    return fx.map_arg(output, lambda n: env[n])


def _copy_call(graph: fx.Graph, traced: Traced, node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
    target: Any = node.target
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

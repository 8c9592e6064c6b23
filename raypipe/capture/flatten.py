"""Conversion of an exported graph to one flat graph: regions inlined, assertions dropped, random operations numbered.

torch.cond and torch.func.vmap become one operation each (engine/stage/generated_source.py). torch.export represents
vmap by a call that opens a level, the operations inside, and a call that closes it. All of these must stay in one
stage, and the two calls have no users, so that dead-code elimination would remove them. The exported program is only
read.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind

from raypipe.capture.analyse import (
    UNCAST,
    Traced,
    functional_twin,
    line_of,
    mutated_args,
    storage_roots,
    work_out_of_place,
    write_buffers_early,
)
from raypipe.engine.stage.autograd_functions import OPERATION, traced_call
from raypipe.engine.stage.generated_source import Body, Conditional, Region, names_of
from raypipe.engine.stage.quantized_linear import plain_name
from raypipe.engine.stage.randomness import draws_randomness, dropout, keyed_call, num_draws
from raypipe.errors import CaptureError

aten = torch.ops.aten

_DROPPED = ("aten._assert", "aten.sym_constrain_range", "aten._assert_tensor_metadata")

_SLICE = re.compile(r"slice\((None|-?\d+), (None|-?\d+), (None|-?\d+)\)")

_AUTOCAST_ENDS = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
"""Calls that torch.export leaves in the graph where it could not make a region of the operations between them."""


def flatten(model: torch.nn.Module, program: torch.export.ExportedProgram, columns: Sequence[str]) -> Traced:
    """Build the flat graph of a model from an exported program, in training or evaluation mode.

    Args:
        columns: names of the data columns, in the order of the program's inputs.

    Raises:
        CaptureError: an input of the graph is not a tensor, or the graph contains an operation that cannot be cut.
    """
    graph = fx.Graph()
    traced = Traced(graph, {}, {}, {}, {}, None, 0, program.call_spec.out_spec)  # type: ignore[arg-type]
    env = _placeholders(model, program, columns, traced)
    traced.key = graph.placeholder("key")
    _copy_nodes(program.graph_module, program.graph, env, traced, detached=False)
    outputs = next(n for n in program.graph.nodes if n.op == "output").args[0]
    graph.output(tuple(fx.map_arg(list(outputs), lambda n: as_output(graph, env[n], traced))))
    write_buffers_early(graph, traced.buffers)
    work_out_of_place(traced)
    for node in graph.nodes:
        if stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {key: (_unsliced(model, name), of) for key, (name, of) in stack.items()}
    graph.lint()
    return traced


def _unsliced(model: torch.nn.Module, path: str) -> str:
    """Return the path of a module as in named_modules(): ``layers.slice(2, None, None).0`` becomes ``layers.2``.

    torch.export writes slices into the paths of a model that holds a module under two names.
    """
    if "slice(" not in path:
        return path
    module: Any = model
    keys: list[str] = []
    real: list[str] = []
    for part in path.split("."):
        if ends := _SLICE.fullmatch(part):
            keys = (keys or list(module._modules))[slice(*(None if x == "None" else int(x) for x in ends.groups()))]
            continue
        if keys and isinstance(module, torch.nn.ModuleList):  # renumbers its slices from 0; Sequential does not
            part = keys[int(part)]
        keys, module = [], getattr(module, part)
        real.append(part)
    return ".".join(real)


def as_output(graph: fx.Graph, node: Any, traced: Traced) -> Any:
    """Return the node to put into the graph's outputs: ``node`` itself, or a new alias of it if it is a parameter.

    Every use of a parameter needs an operation of its own.
    """
    if node not in traced.parameters:
        return node
    copy = graph.call_function(aten.alias.default, (node,))
    copy.meta = dict(node.meta)
    return copy


def _placeholders(
    model: torch.nn.Module, program: torch.export.ExportedProgram, columns: Sequence[str], traced: Traced
) -> dict[fx.Node, Any]:
    """Add a placeholder to ``traced`` for each input of the program; return {node of the program: placeholder}."""
    env: dict[fx.Node, Any] = {}
    canonical = canonical_names(model)
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
                raise CaptureError(
                    f"forward reads {spec.target!r} ({spec.kind.name}), which is not a tensor, and stages are given "
                    "tensors only. If it is a torch.Generator, draw without generator=: every draw is keyed by seed, "
                    "step and micro-batch."
                )
    return env


def canonical_names(model: torch.nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to the first name of the same tensor, its canonical name."""
    first = {tensor: name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    all_names = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: plain_name(first[tensor]) for name, tensor in all_names}


def _copy_nodes(
    owner: torch.nn.Module, source: fx.Graph, env: dict[fx.Node, Any], traced: Traced, *, detached: bool,
    uncast: str = "",
) -> None:  # fmt: skip
    """Copy the operations of a graph or region into ``traced.graph``, and add their copies to ``env``.

    Args:
        owner: module that holds the bodies of the regions in ``source``.
        env: node of ``source`` -> its copy; holds the placeholders when called.
        detached: True inside a no-grad region, whose results carry no gradient.
        uncast: device type for which the enclosing region switches autocast off, or ""; stored in each node's meta.
    """
    graph = traced.graph
    for node in in_levels(source.nodes):
        if isinstance(node, list):
            folded = _fold(node, env, graph)
            if uncast:
                for new in folded.values():  # an output of the operation that the levels of vmap have become
                    new.all_input_nodes[0].meta[UNCAST] = uncast
            env.update({old: _detached(graph, new) if detached else new for old, new in folded.items()})
            continue
        if node.op in ("placeholder", "output") or str(node.target).startswith(_DROPPED):
            continue
        if node.op == "get_attr":
            env[node] = operator.attrgetter(str(node.target))(owner)
            if not isinstance(env[node], fx.GraphModule):
                raise CaptureError(
                    f"The graph reads the attribute {node.target!r}, which raypipe cannot send to workers."
                )
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
            choice = Conditional(*(_body(body, traced, detached) for body in bodies))
            env[node] = copy = graph.create_node("call_function", choice, (predicate, *operands), {}, node.name)
        elif node.target is OPERATION:
            tensors, name = args
            env[node] = copy = graph.create_node("call_function", traced_call(name), (tensors,), {}, node.name)
        elif node.target is operator.getitem and isinstance(args[0], list | tuple):
            env[node] = args[0][args[1]]  # an output of a region that is inlined already
            continue
        else:
            env[node] = copy = _copy_call(graph, traced, node, args, dict(kwargs))
        copy.meta = {k: node.meta[k] for k in ("val", "nn_module_stack", "stack_trace") if k in node.meta}
        if uncast:
            copy.meta[UNCAST] = uncast
        if detached:
            env[node] = _detached(graph, copy)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Add a detach of a tensor node and return it; return other nodes unchanged."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return node
    copy = graph.call_function(aten.detach.default, (node,))
    copy.meta = dict(node.meta)
    return copy


def _body(body: fx.GraphModule, traced: Traced, detached: bool) -> Body:
    """Convert one branch of a torch.cond in ``traced`` to a function of its operands; ``detached``: see _copy_nodes."""
    inner = Traced(fx.Graph(), {}, {}, {}, {}, traced.key, 0, traced.out_spec)
    env: dict[fx.Node, Any] = {}
    for node in body.graph.nodes:
        _refuse_draws(node, "torch.cond")
        if node.op == "placeholder":
            env[node] = inner.graph.placeholder(node.name)
    _copy_nodes(body, body.graph, env, inner, detached=detached)
    if any(UNCAST in node.meta for node in inner.graph.nodes):
        raise CaptureError(
            "The model switches autocast off inside torch.cond, which raypipe cannot cut. Switch it off around the "
            "whole torch.cond, or take precision='bf16'."
        )
    output = next(n for n in body.graph.nodes if n.op == "output").args[0]
    inner.graph.output(fx.map_arg(output, env.__getitem__))
    return _body_of(inner.graph)


def _refuse_outside_update(node: fx.Node, source: fx.Graph, env: dict[fx.Node, Any], traced: Traced) -> None:
    """Raise CaptureError if ``node``, in a no-grad region, changes an activation of the surrounding graph in place.

    Autograd ignores such a change, but would differentiate the out-of-place operation that would replace it.

    Args:
        source: graph of the region.
        env: node of ``source`` -> its copy in ``traced.graph``.
    """
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
    """Copy the operations of a no-grad or autocast region into the flat graph; return the copies of its outputs.

    Args:
        node: call of the region.
        args: arguments of the call, with nodes replaced by their copies.
        detached, uncast: state outside of the region, see ``_copy_nodes``.

    Raises:
        CaptureError: the region switches autocast on in another way than the run's precision, or is of another kind.
    """
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
    _copy_nodes(body, body.graph, env, traced, detached=detached, uncast=uncast)
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


_FUNCTORCH = "torch._functorch.predispatch"


def in_levels(nodes: Iterable[fx.Node]) -> Iterator[fx.Node | list[fx.Node]]:
    """Yield the nodes in order, with all nodes of a torch.func.vmap as one list.

    Raises:
        CaptureError: forward uses another transform of torch.func, such as grad.
    """
    inside: list[fx.Node] = []
    depth = 0
    for node in nodes:
        called = getattr(node.target, "__name__", "") if getattr(node.target, "__module__", "") == _FUNCTORCH else ""
        if called == "lazy_load_decompositions":
            continue
        depth += called == "_vmap_increment_nesting"
        if called and not depth:
            raise CaptureError(
                f"forward differentiates within itself{line_of(node)} ({called}), which raypipe cannot cut. Build the "
                "model as an nn.Sequential of blocks, which are run as they are; of torch.func only vmap is traced."
            )
        if depth:
            inside.append(node)
        else:
            yield node
        if called == "_vmap_decrement_nesting":
            depth -= 1
            if not depth:
                yield inside
                inside = []


def _fold(nodes: list[fx.Node], env: dict[fx.Node, Any], graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Add one operation to ``graph`` that computes ``nodes``: all nodes of a torch.func.vmap in another graph.

    Args:
        env: node of the other graph -> its counterpart in ``graph``.

    Returns:
        Node that has users outside of the vmap -> its counterpart in ``graph``.
    """
    inner, known, arguments = fx.Graph(), dict[fx.Node, Any](), list[fx.Node]()

    def inside(used: fx.Node) -> Any:
        if used not in known:
            known[used] = env[used]
            if isinstance(env[used], fx.Node):
                known[used] = inner.placeholder(used.name)
                arguments.append(env[used])
        return known[used]

    roots = storage_roots(nodes[0].graph)
    for node in nodes:
        _refuse_draws(node, "torch.func.vmap")
        if any(roots[changed] not in nodes for changed in mutated_args(node)):
            raise CaptureError(
                f"Inside torch.func.vmap forward changes in place what was made outside{line_of(node)}; write it out "
                "of place."
            )
        if node.op != "call_function" or node.target is OPERATION:
            raise CaptureError(
                f"torch.func.vmap reads {node.target!r}{line_of(node)}, which raypipe cannot send to workers."
            )
        args, kwargs = fx.map_arg((node.args, node.kwargs), inside)
        known[node] = inner.create_node("call_function", node.target, args, kwargs, node.name)
    read = [node for node in nodes if any(user not in nodes for user in node.users)]
    inner.output(tuple(known[node] for node in read))
    call = graph.create_node("call_function", Region(_body_of(inner)), tuple(arguments), {}, f"vmap_{nodes[0].name}")
    call.meta = {"val": tuple(node.meta.get("val") for node in read), **_origin(read[-1])}
    parts = {node: graph.call_function(operator.getitem, (call, at)) for at, node in enumerate(read)}
    for node, part in parts.items():
        part.meta = {"val": node.meta.get("val"), **_origin(node)}
    return parts


def _body_of(graph: fx.Graph) -> Body:
    """Compile a finished graph to a function."""
    code = graph.python_code("self")
    return Body(code.src, names_of(code))


def _refuse_draws(node: fx.Node, where: str) -> None:
    """Raise CaptureError if a node inside ``where`` (torch.cond or torch.func.vmap) is a random operation.

    Random operations there cannot be numbered, so their results would depend on the partition.
    """
    if node.op == "call_function" and draws_randomness(node.target, node.args, node.kwargs):
        raise CaptureError(
            f"forward draws random numbers inside {where} ({node.target}{line_of(node)}), where raypipe cannot make "
            "them the same in every partition. Draw them outside and pass them in."
        )


def _origin(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}

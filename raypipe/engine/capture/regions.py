"""What torch.func.vmap and torch.cond leave in an exported graph becomes one operation each; see engine/region.py.

vmap leaves a call that opens a level, operations on tensors of that level, and a call that closes it. No cut may part
these, and the first and the last of them feed nothing, so that they would be taken for dead.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import fx

from raypipe.engine.capture.inplace import mutated_args, storage_roots
from raypipe.engine.randomness import draws_randomness
from raypipe.engine.region import Body, Region, names_of
from raypipe.errors import CaptureError

__all__ = ["body_of", "fold", "in_levels", "line_of", "lost_body", "refuse_draws"]

_OURS = str(Path(__file__).parents[2])
_FUNCTORCH = "torch._functorch.predispatch"
_FILE = re.compile(r'File "([^"]+)", line (\d+)')


def line_of(node: fx.Node) -> str:
    """Where the user's code asked for an operation, " at file:line"; empty where that is not known."""
    found = _FILE.findall(node.meta.get("stack_trace") or "")
    own = [place for place in found if "/torch/" not in place[0] and not place[0].startswith(("<", _OURS))]
    return f" at {own[-1][0]}:{own[-1][1]}" if own else ""


def in_levels(nodes: Iterable[fx.Node]) -> Iterator[fx.Node | list[fx.Node]]:
    """The nodes in their order; those from the opening of a level of vmap to its close as one list."""
    inside: list[fx.Node] = []
    depth = 0
    for node in nodes:
        called = getattr(node.target, "__name__", "") if _is_functorch(node) else ""
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


def _is_functorch(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") == _FUNCTORCH


def fold(nodes: list[fx.Node], env: dict[fx.Node, Any], graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Add one operation that does what these nodes of another graph do.

    Args:
        env: node outside of these -> what stands for it in ``graph``.

    Returns:
        what stands for those of the nodes that others read.
    """
    inner, known, given = fx.Graph(), dict[fx.Node, Any](), list[fx.Node]()

    def inside(used: fx.Node) -> Any:
        if used not in known:
            known[used] = env[used]
            if isinstance(env[used], fx.Node):
                known[used] = inner.placeholder(used.name)
                given.append(env[used])
        return known[used]

    roots = storage_roots(nodes[0].graph)
    for node in nodes:
        refuse_draws(node, "torch.func.vmap")
        if any(roots[changed] not in nodes for changed in mutated_args(node)):
            raise CaptureError(
                f"Inside torch.func.vmap forward changes in place what was made outside{line_of(node)}; write it out "
                "of place."
            )
        if node.op != "call_function":
            raise CaptureError(f"torch.func.vmap reads {node.target!r}{line_of(node)}, which raypipe cannot ship.")
        args, kwargs = fx.map_arg((node.args, node.kwargs), inside)
        known[node] = inner.create_node("call_function", node.target, args, kwargs, node.name)
    read = [node for node in nodes if any(user not in nodes for user in node.users)]
    inner.output(tuple(known[node] for node in read))
    call = graph.create_node("call_function", Region(body_of(inner)), tuple(given), {}, f"vmap_{nodes[0].name}")
    call.meta = {"val": tuple(node.meta.get("val") for node in read), **_origin(read[-1])}
    parts = {node: graph.call_function(operator.getitem, (call, at)) for at, node in enumerate(read)}
    for node, part in parts.items():
        part.meta = {"val": node.meta.get("val"), **_origin(node)}
    return parts


def lost_body(model: str, error: Exception) -> CaptureError | None:
    """The error for a model whose bodies torch.export lost; None for any other failure."""
    if not (isinstance(error, AttributeError) and re.search(r"(true|false)_graph_\d+'$", str(error))):
        return None
    return CaptureError(
        f"{model} calls torch.cond within a way of torch.cond, and has a torch.no_grad region too, which torch.export "
        "cannot hold both. Write the inner one as torch.where(condition, one, other)."
    )


def body_of(graph: fx.Graph) -> Body:
    """The function that a finished graph is."""
    code = graph.python_code("self")
    return Body(code.src, names_of(code))


def refuse_draws(node: fx.Node, where: str) -> None:
    """Refuse a random operation where its number would depend on values, or its draws on a level."""
    if node.op == "call_function" and draws_randomness(node.target, node.args, node.kwargs):
        raise CaptureError(
            f"forward draws random numbers inside {where} ({node.target}{line_of(node)}), where raypipe cannot make "
            "them the same in every partition. Draw them outside and pass them in."
        )


def _origin(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}

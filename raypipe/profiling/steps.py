"""Execution of a captured model one operation at a time, with an observer that makes each call.

    columns, leaves, buffers --> op 0 --> op 1 --> ... --> outputs
                                  ^        ^
                                 observe(position, call, args, kwargs) -> output of the call

Operations, their values and their order are those of a stage, and each value is dropped after its last use, as in a
stage. On the meta device random operations only compute shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from raypipe.capture import Capture, TracedModel
from raypipe.capture.analyse import SYM_SIZE, UNCAST, Analysis, column_with
from raypipe.capture.python_state import CACHE, read_memory_of
from raypipe.capture.sequential import SequentialFunction
from raypipe.engine.stage.activation_checkpointing import untraced_checkpoints
from raypipe.engine.stage.mixed_precision import computing, converted, uncast
from raypipe.engine.stage.randomness import RandomKey, dropout, keyed_call
from raypipe.engine.stage.stage import StageProgram

Columns = Mapping[Any, torch.Tensor]

Observe = Callable[[int, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
KEY = RandomKey(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Steps:
    """Captured model that runs operation by operation.

    Attributes:
        sites: for each operation, indices in ``program.train.sites`` of the parameters that it reads.
        weight_like: positions of operations that depend on parameters only, such as the transpose of a weight.
        run: function (a leaf for each of ``sites``, buffers, columns by name, observe) -> the model's outputs.
    """

    sites: tuple[tuple[int, ...], ...]
    weight_like: frozenset[int]
    run: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Mapping[Any, torch.Tensor], Observe], Any]


def samples_of(columns: Columns) -> int:
    """Return the number of samples in data columns; columns without a batch dimension do not count."""
    return min((len(t) for t in columns.values() if t.dim()), default=0)


def first_of(columns: Columns, samples: int) -> Columns:
    """Return the first ``samples`` samples of every column; columns without a batch dimension are kept whole."""
    return {name: t[:samples] if t.dim() else t for name, t in columns.items()}


def steps_of(captured: Capture, program: StageProgram) -> Steps:
    """Build the Steps of a capture's training forward from its program for a single stage."""
    place = {site: i for i, site in enumerate(program.train.sites)}
    if isinstance(captured.model, TracedModel):
        return _traced_steps(captured.model.train, program, place)
    column = captured.model.column
    function = program.train
    assert isinstance(function, SequentialFunction)
    sites = tuple(tuple(place[site] for site in child.sites.values()) for child in function.children)
    prints = functools.cache(lambda position: fingerprint(function.children[position].module))

    def run(
        leaves: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        columns: Mapping[Any, torch.Tensor],
        observe: Observe,
    ) -> tuple[torch.Tensor, ...]:
        # A fresh copy each time: a child may count its calls.
        own = dataclasses.replace(function, _modules=None)
        bind = functools.partial(own.bind, leaves, converted(buffers, own.precision))
        bind()
        (x,) = (arrived,) = converted([columns[column]], own.precision)
        for position, child in enumerate(own.children):
            if child.changes_input and x.untyped_storage().data_ptr() == arrived.untyped_storage().data_ptr():
                x = x.clone()
            call = _Child(own, position, prints)
            with untraced_checkpoints(bind), computing(own.precision):
                x = observe(position, call, (x,), {})
        return (x,)

    return Steps(sites, frozenset(), run)


@dataclass(frozen=True, slots=True)
class _Child:
    """Callable that runs one child of an nn.Sequential; ``prints`` maps a child's position to its fingerprint."""

    function: SequentialFunction
    position: int
    prints: Callable[[int], str]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.run_child(self.position, x, KEY)


def child_of(call: Callable[..., Any]) -> str | None:
    """Return a text that identifies the work of a child of an nn.Sequential; None if ``call`` is no such child.

    The texts of two children that do equal work are equal.
    """
    if not isinstance(call, _Child):
        return None
    child = call.function.children[call.position]
    return f"{call.prints(call.position)}; draws {child.num_draws}, changes input {child.changes_input}"


def _traced_steps(analysis: Analysis, program: StageProgram, place: Mapping[Any, int]) -> Steps:
    traced = analysis.traced
    by_use = {
        (node, used): place[type(program.train.sites[0])(traced.parameters[used], index)]
        for (node, used), index in analysis.sites.items()
    }
    sites = tuple(
        tuple(by_use[node, used] for used in node.all_input_nodes if (node, used) in by_use) for node in analysis.nodes
    )
    ours = {node: i for i, node in enumerate(analysis.nodes)}
    weight_like: set[int] = set()
    for node, at in ours.items():
        inputs = node.all_input_nodes
        if inputs and all(n in traced.parameters or ours.get(n) in weight_like for n in inputs):
            weight_like.add(at)
    last_use: dict[fx.Node, int] = {}
    for node, at in ours.items():
        for used in node.all_input_nodes:
            last_use[used] = at
    dying: list[list[fx.Node]] = [[] for _ in analysis.nodes]
    for used, at in last_use.items():
        if used in ours and used not in analysis.outputs:
            dying[at].append(used)

    def run(
        leaves: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        columns: Mapping[Any, torch.Tensor],
        observe: Observe,
    ) -> tuple[torch.Tensor, ...]:
        held = dict(zip(program.train.buffers, converted(buffers, program.precision), strict=True))
        read = dict(zip(columns, converted(list(columns.values()), program.precision), strict=True))
        with computing(program.precision):
            return _Run(analysis, by_use, dying, leaves, held, read)(observe)

    return Steps(sites, frozenset(weight_like), run)


@dataclass(slots=True)
class _Run:
    """One forward of a traced model.

    Attributes:
        by_use: (operation, parameter placeholder) -> index in ``leaves``.
        dying: by position, the nodes whose values no later operation reads.
        env: node -> its value.
        meta: True if the tensors are on the meta device.
    """

    analysis: Analysis
    by_use: dict[tuple[fx.Node, fx.Node], int]
    dying: list[list[fx.Node]]
    leaves: Sequence[torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    columns: Mapping[Any, torch.Tensor]
    env: dict[fx.Node, Any] = field(default_factory=dict)

    def __call__(self, observe: Observe) -> tuple[torch.Tensor, ...]:
        traced, env = self.analysis.traced, self.env
        self.meta = any(t.is_meta for t in (*self.leaves, *self.columns.values()))
        env.update({b: self.buffers[name] for b, name in traced.buffers.items() if name in self.buffers})
        env.update({c: tensor.to("meta") if self.meta else tensor for c, tensor in traced.constants.items()})
        env.update({c: self.columns[name] for c, name in traced.columns.items()})
        env[traced.key] = KEY
        for position, node in enumerate(self.analysis.nodes):
            args, kwargs = self._arguments(node)
            env[node] = observe(position, self._call(node), args, kwargs)
            for dead in self.dying[position]:
                del env[dead]
        return tuple(self._value(node, node) for node in self.analysis.outputs)

    meta: bool = False

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mapped: Any = fx.map_arg((node.args, node.kwargs), lambda used: self._value(used, node))
        args, kwargs = mapped
        if self.meta:
            args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
        return args, kwargs

    def _value(self, used: fx.Node, node: fx.Node) -> Any:
        if (node, used) in self.by_use:
            return self.leaves[self.by_use[node, used]]
        if used not in self.env:  # to be rebuilt
            if used.target is SYM_SIZE:
                column, dim = column_with(self.analysis.traced, used.meta["val"])  # type: ignore[misc]
                self.env[used] = self.env[column].shape[dim]
            else:
                args, kwargs = self._arguments(used)
                self.env[used] = self._call(used)(*args, **kwargs)
        return self.env[used]

    def _call(self, node: fx.Node) -> Callable[..., Any]:
        target: Any = node.target
        if self.meta and target is dropout:
            return _meta_dropout
        if self.meta and target is keyed_call:
            return _meta_draw
        if self.meta and target is torch.ops.aten.scaled_dot_product_attention.default:
            return _meta_attention
        if UNCAST in node.meta and target not in (dropout, keyed_call):
            return _without_autocast(node.meta[UNCAST], target)
        return target


@functools.cache
def _without_autocast(kind: str, target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``target`` without autocast for device type ``kind``, always the same for both."""
    return functools.partial(uncast, kind, target)


def _meta_dropout(x: torch.Tensor, p: float, key: Any, index: int) -> torch.Tensor:
    return x * torch.empty_like(x)


def _meta_draw(op: Any, key: Any, index: int, *args: Any, draws: int = 1, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _meta_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **scaling: Any,
) -> torch.Tensor:
    """Compute attention on the meta device by the fused kernel, which keeps no tokens x tokens matrix."""
    learns = mask is not None and mask.requires_grad  # T5's position bias, for which that kernel has no gradient
    alike = q.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[3] == v.shape[3]
    if dropout_p == 0.0 and alike and not learns:
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.empty_like(mask, dtype=q.dtype)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return fused(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scaling.get("scale"))[0]
    plain = torch.ops.aten.scaled_dot_product_attention.default
    return plain(q, k, v, mask, dropout_p, is_causal, **scaling)


def fingerprint(thing: Any) -> str:
    """Compute the fingerprint of a module, a function or an object that contains such, as hexadecimal digits.

    Equal fingerprints mean equal work on equal shapes. A fingerprint covers the Python state and code that
    capture/python_state.py reads, classes and modes of modules, and shapes, dtypes and requires_grad of parameters and
    buffers, but not their contents. It does not depend on the process, so profiles can be cached by it.
    """
    values = read_memory_of(thing, "it").values
    parts = [f"{path} {value!r}" for path, value in values.items() if not path.startswith(CACHE)]
    if isinstance(thing, nn.Module):
        modules = thing.named_modules(remove_duplicate=False)
        parts += [f"{path} {type(x).__module__}.{type(x).__qualname__} {x.training}" for path, x in modules]
        tensors = (*thing.named_parameters(), *thing.named_buffers())
        parts += [f"{name} {list(x.shape)} {x.dtype} {x.requires_grad}" for name, x in tensors]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()

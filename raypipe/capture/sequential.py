"""Capture of an nn.Sequential without tracing: each child is a node of the graph, and stages call it as a module.

Children need not be traceable: they may contain custom autograd functions and data-dependent branches. Only Python
state that a child keeps between calls outside of its buffers is refused (python_state.py). An example micro-batch runs
through a copy of the model in each mode, to measure the bytes of each child's output, count its random draws, and find
the buffers that it changes and whether it changes its input in place.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from raypipe.capture.guards import cuda_autocast_refused, generators_kept
from raypipe.capture.python_state import read_memory, refuse_change
from raypipe.engine.stage.activation_checkpointing import untraced_checkpoints
from raypipe.engine.stage.mixed_precision import computing, converted
from raypipe.engine.stage.module_copy import copy_of, portable, skeleton_of, unpacked
from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey
from raypipe.engine.stage.stage import Site, StageFunction, same_bits
from raypipe.errors import CaptureError, StageError
from raypipe.ir.graph import ModelGraph, Node, link_nodes
from raypipe.ir.precision import FP32, Precision


def is_plain_sequential(model: nn.Module) -> bool:
    """Return True for an nn.Sequential that only calls its children in order.

    False if it has hooks, or overrides forward() or train(), which its children alone would not run.
    """
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    kind = type(model)
    plain = kind.forward is nn.Sequential.forward and kind.train is nn.Module.train
    return isinstance(model, nn.Sequential) and plain and not any(hooks)


@dataclass(slots=True)
class Child:
    """A child of an nn.Sequential in one mode, with facts from a run on the example.

    Attributes:
        name: dotted name in the model.
        module: copy without storage, on the meta device.
        sites: parameter's name in the child -> (canonical name in the model, index among all uses of the parameter).
        buffers: buffer's name in the child -> canonical name in the model.
        changes: canonical names of the buffers that the child's forward changed.
        first_draw: number of random operations in the children before this one.
        num_draws: number of random operations in this child.
        changes_input: True if the child changes its input in place.
        output_bytes: bytes of the child's output for one sample.
    """

    name: str
    module: nn.Module
    sites: dict[str, Site]
    buffers: dict[str, str]
    changes: frozenset[str]
    first_draw: int
    num_draws: int
    changes_input: bool
    output_bytes: int

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(portable(self.module) if name == "module" else getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            setattr(self, name, unpacked(value) if name == "module" else value)


@dataclass(slots=True)
class SequentialFunction:
    """Stage function (engine/stage/stage.py) that calls consecutive children of an nn.Sequential."""

    children: tuple[Child, ...]
    sites: tuple[Site, ...]
    buffers: tuple[str, ...]
    columns: tuple[str, ...]
    num_inputs: int
    num_outputs: int = 1
    precision: Precision = FP32
    _modules: list[nn.Module] | None = field(default=None, repr=False, compare=False)
    _some_change_input: bool = field(default=True, repr=False, compare=False)
    _parameters: list[Slot] = field(default_factory=list, repr=False, compare=False)
    _buffers: list[Slot] = field(default_factory=list, repr=False, compare=False)
    _owners: list[nn.Module] = field(default_factory=list, repr=False, compare=False)

    @property
    def changing_buffers(self) -> tuple[str, ...]:
        """Names of all buffers: a child may later change a buffer that it did not change when it was captured."""
        return self.buffers

    @property
    def tried_constant(self) -> tuple[str, ...]:
        """Names of the buffers that no child changed when it was captured."""
        changes = frozenset(name for child in self.children for name in child.changes)
        return tuple(name for name in self.buffers if name not in changes)

    def __call__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        columns: Sequence[torch.Tensor],
        key: RandomKey,
    ) -> tuple[torch.Tensor, ...]:
        unconverted, buffers = buffers, converted(buffers, self.precision)
        bind = functools.partial(self.bind, converted(parameters, self.precision), buffers)
        bind()
        (x,) = (*inputs, *converted(columns, self.precision))
        arrived = x.untyped_storage().data_ptr() if self._some_change_input else None
        with untraced_checkpoints(bind), computing(self.precision, (x,)):
            for position, child in enumerate(self.children):
                if child.changes_input and x.untyped_storage().data_ptr() == arrived:
                    x = x.clone()  # the input is a leaf or the user's data: neither it nor a view may be changed
                x = self.run_child(position, x, key)
        for (holder, name), buffer in zip(self._buffers, buffers, strict=True):
            if holder[name] is not buffer:  # assigned instead of updated in place
                buffer.copy_(holder[name])
        if self.precision.leaves:
            self._refuse_rounded(unconverted, buffers)
        return (x,)

    def bind(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Put these tensors into the modules of the children, as their parameters and buffers.

        The tensors stay in the modules: torch.func.functional_call, which takes them out, costs 65 us per child.
        """
        if self._modules is None:
            self._prepare()
        for slots, tensors in ((self._parameters, parameters), (self._buffers, buffers)):
            for (holder, name), tensor in zip(slots, tensors, strict=True):
                holder[name] = tensor

    def run_child(self, position: int, x: torch.Tensor, key: RandomKey) -> torch.Tensor:
        """Run the child at ``position`` of this stage on ``x``; ``bind`` must have been called before."""
        assert self._modules is not None
        child, module = self.children[position], self._modules[position]
        if child.num_draws:
            with KeyedRandomness(key, child.first_draw):
                return module(x)
        return module(x)

    def _refuse_rounded(self, unconverted: Sequence[torch.Tensor], used: Sequence[torch.Tensor]) -> None:
        """Raise StageError if forward has changed the 16-bit copy of a buffer, because the change would be lost.

        On the CPU, values are compared. On a GPU a comparison would make the host wait, so only version counters are
        read there, and norms in training mode always count as changing their statistics.

        Args:
            unconverted: buffers as they were passed to the stage.
            used: buffers after the conversion to 16 bits, on which the children ran.
        """
        for name, kept, buffer, owner in zip(self.buffers, unconverted, used, self._owners, strict=True):
            if buffer is kept:
                continue
            trains = isinstance(owner, _NormBase) and owner.training
            other = buffer.device.type == "cpu" and not same_bits(buffer, kept.to(buffer.dtype))
            if buffer._version or trains or other:
                raise StageError(
                    f"A forward changed the buffer {name!r}, which it did not change when the model was tried. "
                    f"precision={self.precision.name!r} would lose that: its buffers are copies in "
                    f"{self.precision.leaves}. Take precision='bf16-autocast'."
                )

    def _prepare(self) -> None:
        """Copy the modules without storage, and find the slots that hold their parameters and buffers."""
        self._modules = [copy.deepcopy(child.module) for child in self.children]
        pairs = list(zip(self._modules, self.children, strict=True))
        self._parameters = [_slot(module, name, "_parameters") for module, child in pairs for name in child.sites]
        held = [(module, name) for module, child in pairs for name in child.buffers]
        self._buffers = [_slot(module, name, "_buffers") for module, name in held]
        self._owners = [module.get_submodule(name.rpartition(".")[0]) for module, name in held]
        self._some_change_input = any(child.changes_input for child in self.children)

    def __getstate__(self) -> tuple[Any, ...]:
        """Return the fields to pickle: the children as captured, without the modules that hold tensors."""
        return tuple(getattr(self, name) for name in _SHIPPED)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(_SHIPPED, state, strict=True):
            setattr(self, name, value)
        self._modules = None


_SHIPPED = ("children", "sites", "buffers", "columns", "num_inputs", "num_outputs", "precision")

Slot = tuple[dict[str, Any], str]
"""Location of a tensor in a module: the module's dict ``_parameters`` or ``_buffers``, and the key in it."""


def _slot(module: nn.Module, name: str, kind: str) -> Slot:
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), kind), leaf


def _flat_children(model: nn.Sequential, prefix: str = "") -> list[tuple[str, nn.Module]]:
    children = []
    for name, child in model._modules.items():  # named_children() would leave out a child that comes again
        assert child is not None
        if is_plain_sequential(child):
            children += _flat_children(child, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            children.append((prefix + name, child))
    return children


def sequential_children(model: nn.Sequential, example: torch.Tensor) -> tuple[list[Child], list[Child]]:
    """Capture the children in training and in evaluation mode, as (training, evaluation). Nothing is changed.

    Raises:
        CaptureError: a child does not return one tensor, changes a parameter, keeps Python state between calls, or
            cannot run on the meta device, if the model's weights are on it.
    """
    example = example.to("meta") if without_weights(model) else example
    return _children(model, example.clone(), training=True), _children(model, example.clone(), training=False)


def _children(model: nn.Sequential, example: torch.Tensor, *, training: bool) -> list[Child]:
    trial = (skeleton_of if without_weights(model) else copy_of)(model).train(training)
    before, whose = read_memory(trial), "A child of the nn.Sequential"
    try:
        with generators_kept(whose), cuda_autocast_refused():
            tried = partial(_tried_children, model, trial, example, training=training)
            children = contextvars.copy_context().run(tried)
            after = read_memory(trial)
            if any(before.changes(after)):
                with torch.no_grad(), KeyedRandomness(RandomKey(0, 0, 0)):
                    trial(example.clone())
                refuse_change(after, read_memory(trial), whose)
    finally:
        before.restore()
    return children


def _tried_children(
    model: nn.Sequential, trial: nn.Sequential, example: torch.Tensor, *, training: bool
) -> list[Child]:
    """Run the children one by one on the example, and return the facts about each.

    Args:
        trial: copy of ``model``, already in the mode of ``training``, whose children run.
    """
    first = {parameter: name for name, parameter in model.named_parameters()}
    first_buffer = {buffer: name for name, buffer in model.named_buffers()}
    skeleton = skeleton_of(model)
    uses = Counter[str]()
    children: list[Child] = []
    x, draws = example, 0
    modules = zip(_flat_children(model), _flat_children(trial), _flat_children(skeleton), strict=True)
    for (name, own), (_, run), (_, bare) in modules:
        sites = {}
        for local, parameter in own.named_parameters(remove_duplicate=False):
            sites[local] = Site(first[parameter], uses[first[parameter]])
            uses[first[parameter]] += 1
        buffers = {local: first_buffer[held] for local, held in own.named_buffers(remove_duplicate=False)}
        version, before = x._version, BuffersBefore(run)
        with torch.no_grad(), KeyedRandomness(RandomKey(0, 0, 0)) as mode:
            y = _of_child(name, run, x)
        _refuse_child(f"Child {name!r} ({type(own).__name__})", own, run, y)
        size = y.numel() * y.element_size() // max(1, len(y))
        changed = x._version != version
        changes = frozenset(buffers[local] for local in before.changed())
        module = copy.deepcopy(bare).train(training)
        children.append(Child(name, module, sites, buffers, changes, draws, mode.index, changed, size))
        draws += mode.index
        x = y
    return children


def _of_child(name: str, run: nn.Module, x: torch.Tensor) -> Any:
    if not x.is_meta:
        return run(x)
    try:
        return run(x)
    except (NotImplementedError, RuntimeError) as error:
        first = " ".join(str(error).split(". ")[0].split())
        raise CaptureError(
            f"Child {name!r} ({type(run).__name__}) of the nn.Sequential cannot run without weights ({first}), as "
            "weights_on='workers' requires. Set weights_on='client'."
        ) from None


def _refuse_child(whose: str, own: nn.Module, run: nn.Module, output: Any) -> None:
    """Raise CaptureError if a child has changed one of its parameters, or does not return a tensor.

    Args:
        whose: name of the child, for the message.
        own: the user's child.
        run: copy of the child, which has run and returned ``output``.
    """
    for local, parameter in own.named_parameters():
        if not parameter.is_meta and not torch.equal(parameter, run.get_parameter(local)):
            raise CaptureError(
                f"{whose} changes its parameter {local!r} while it computes forward. "
                "Let only the optimizer change parameters; write a constraint as a function of the parameter."
            )
    if not isinstance(output, torch.Tensor):
        raise CaptureError(
            f"{whose} of the nn.Sequential returns {type(output).__name__}, but the children of a pipeline pass one "
            "tensor to each other. Let it return a tensor, or wrap the model in an nn.Module that torch.export can "
            "trace."
        )


def sequential_graph(
    children: Sequence[Child], tensor_bytes: Mapping[str, int], frozen: frozenset[str] = frozenset()
) -> ModelGraph:
    """Build the planner's graph, a chain with one Node per child. A shared parameter counts at its first user.

    Args:
        tensor_bytes: bytes of every parameter and buffer, by name, in the dtype in which a stage stores it.
        frozen: names of the parameters that are not trained.
    """
    together = []  # pairs of children that use one changing buffer
    for name in sorted({name for child in children for name in child.changes}):
        uses = [i for i, child in enumerate(children) if name in child.buffers.values()]
        together += list(itertools.pairwise(uses))
    held: set[str] = set()
    nodes = []
    for child in children:
        own = tuple(dict.fromkeys(site.parameter for site in child.sites.values() if site.index == 0))
        buffers = set(child.buffers.values()) - held
        held |= buffers
        nodes.append(
            Node(
                name=child.name,
                module=child.name,
                param_names=own,
                param_bytes=sum(tensor_bytes[name] for name in own),
                cut_bytes=None,
                output_bytes=child.output_bytes,
                frozen_bytes=sum(tensor_bytes[name] for name in own if name in frozen),
                buffer_bytes=sum(tensor_bytes[name] for name in buffers),
            )
        )
    return link_nodes(nodes, itertools.pairwise(range(len(nodes))), together)


@dataclass(frozen=True, slots=True)
class SequentialModel:
    """Children of an nn.Sequential in training mode and in evaluation mode (None if nothing is evaluated).

    Attributes:
        column: name of the data column that the first child reads.
    """

    train: tuple[Child, ...]
    eval: tuple[Child, ...] | None
    column: Any

    def functions(
        self, cuts: Sequence[int], order: Sequence[int]
    ) -> tuple[Sequence[StageFunction], Sequence[StageFunction] | None]:
        """Build the stage functions of both modes: (training, evaluation); the latter is None if nothing is evaluated.

        A new stage begins at the index of each child in ``cuts``. ``order`` is ignored: a chain has only one order.
        """
        evals = None if self.eval is None else _sequential_stages(self.eval, cuts, self.column)
        return _sequential_stages(self.train, cuts, self.column), evals


def _sequential_stages(children: Sequence[Child], cuts: Sequence[int], column: str) -> list[StageFunction]:
    """Build one function per stage, from the children between ``cuts``; the first stage reads the data column."""
    bounds = [0, *cuts, len(children)]
    parts = [children[start:stop] for start, stop in itertools.pairwise(bounds)]
    for name in sorted({name for child in children for name in child.changes}):
        using = [stage for stage, part in enumerate(parts) if any(name in c.buffers.values() for c in part)]
        if len(using) > 1:
            raise CaptureError(
                f"The buffer {name!r} is updated during forward and used in stages {using}; a changing buffer must "
                "stay within one stage. Move the cut with PipelineConfig(partitioner=[...])."
            )
    return [_sequential_function(part, column, first=stage == 0) for stage, part in enumerate(parts)]


def _sequential_function(children: Sequence[Child], column: str, *, first: bool) -> SequentialFunction:
    return SequentialFunction(
        children=tuple(children),
        sites=tuple(site for child in children for site in child.sites.values()),
        buffers=tuple(name for child in children for name in child.buffers.values()),
        columns=(column,) if first else (),
        num_inputs=0 if first else 1,
    )


class BuffersBefore:
    """Snapshot of a module's buffers, taken before its forward to list the buffers that the forward changed.

    Version counters of torch miss writes through ``.data``, and updates of statistics by a batch norm. Therefore values
    are compared too, bitwise. Statistics of norms in training mode always count as changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {
            name: (id(held), held._version, None if held.is_meta else held.clone())
            for name, held in module.named_buffers()
        }

    def changed(self) -> Iterator[str]:
        """Yield the name in the module of each buffer that was replaced or written to, or whose values have changed."""
        norms = [(path, x) for path, x in self._module.named_modules() if isinstance(x, _NormBase) and x.training]
        statistics = {f"{path}.{name}".lstrip(".") for path, norm in norms for name, _ in norm.named_buffers()}
        for name, held in self._module.named_buffers():
            known, version, value = self._before[name]
            written = (id(held), held._version) != (known, version) or name in statistics
            if written or (value is not None and not same_bits(held, value)):
                yield name


def without_weights(model: nn.Module) -> bool:
    """Return True if a model has parameters on the meta device, on which only shapes can be computed."""
    return any(parameter.is_meta for parameter in model.parameters())

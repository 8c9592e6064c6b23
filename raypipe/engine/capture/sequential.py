"""nn.Sequential without tracing: the children are the nodes, whatever happens inside them.

Nothing in a child needs to be traceable: custom autograd functions and data-dependent branches run as they are. Only
what a child remembers from call to call outside of its buffers is refused (hidden_state.py). The example batch goes
through once, to learn the boundary's bytes, how many random draws each child makes and which children change their
input in place.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from raypipe.engine.capture.absent_autocast import no_absent_autocast
from raypipe.engine.capture.changed_buffers import BuffersBefore, without_weights
from raypipe.engine.capture.hidden_state import refuse_change
from raypipe.engine.capture.surroundings import surroundings_kept
from raypipe.engine.copies import copy_of, portable, skeleton_of, unpacked
from raypipe.engine.precision import computing, converted
from raypipe.engine.randomness import KeyedRandomness, RandomKey
from raypipe.engine.recompute import untraced_checkpoints
from raypipe.engine.remembered import read_memory
from raypipe.engine.stage import Site, StageFunction
from raypipe.engine.stage_buffers import same_bits
from raypipe.errors import CaptureError, StageError
from raypipe.ir.graph import ModelGraph, Node, link_nodes
from raypipe.ir.precision import FP32, Precision

__all__ = [
    "Child",
    "SequentialModel",
    "is_plain_sequential",
    "sequential_children",
    "sequential_graph",
]


def is_plain_sequential(model: nn.Module) -> bool:
    """Whether the model is an nn.Sequential that does nothing but call its children in order.

    One with a train() of its own, which may keep a norm in evaluation, is traced, for its children know nothing of it.
    """
    hooks = (model._forward_hooks, model._forward_pre_hooks, model._backward_hooks, model._backward_pre_hooks)
    kind = type(model)
    plain = kind.forward is nn.Sequential.forward and kind.train is nn.Module.train
    return isinstance(model, nn.Sequential) and plain and not any(hooks)


@dataclass(slots=True)
class Child:
    """One node of an nn.Sequential.

    Attributes:
        name: dotted name in the model.
        module: skeleton without storage (meta device), in one mode.
        sites: local parameter name -> the use of the canonical parameter.
        buffers: local buffer name -> name in the model.
        changes: names in the model of the buffers that its forward changed when it was tried.
        first_draw, num_draws: its random draws among those of the whole model.
        changes_input: it works in place on its input.
        output_bytes: of one sample.
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
    """Some consecutive children as a stage function (engine/stage.py)."""

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
        """All of them: what a child did not change when it was tried it may change later, and no graph tells."""
        return self.buffers

    @property
    def tried_constant(self) -> tuple[str, ...]:
        """Those that no child changed when it was tried."""
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
        given, buffers = buffers, converted(buffers, self.precision)
        bind = functools.partial(self.bind, converted(parameters, self.precision), buffers)
        bind()
        (x,) = (*inputs, *converted(columns, self.precision))
        arrived = x.untyped_storage().data_ptr() if self._some_change_input else None
        with untraced_checkpoints(bind), computing(self.precision, (x,)):
            for position, child in enumerate(self.children):
                if child.changes_input and x.untyped_storage().data_ptr() == arrived:
                    x = x.clone()  # what came is a leaf or somebody's data: not ours to change, nor a view of it
                x = self.run_child(position, x, key)
        for (holder, name), buffer in zip(self._buffers, buffers, strict=True):
            if holder[name] is not buffer:  # assigned instead of updated in place
                buffer.copy_(holder[name])
        if self.precision.leaves:
            self._refuse_rounded(given, buffers)
        return (x,)

    def bind(self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        """Let the children use these tensors.

        Written straight into the modules: torch.func.functional_call puts tensors in and takes them out again for
        65 us per child.
        """
        if self._modules is None:
            self._prepare()
        for slots, tensors in ((self._parameters, parameters), (self._buffers, buffers)):
            for (holder, name), tensor in zip(slots, tensors, strict=True):
                holder[name] = tensor

    def run_child(self, position: int, x: torch.Tensor, key: RandomKey) -> torch.Tensor:
        """One child of a function that has been bound."""
        assert self._modules is not None
        child, module = self.children[position], self._modules[position]
        if child.num_draws:
            with KeyedRandomness(key, child.first_draw):
                return module(x)
        return module(x)

    def _refuse_rounded(self, given: Sequence[torch.Tensor], used: Sequence[torch.Tensor]) -> None:
        """After a forward in 16 bits: what it changed of a converted buffer would be gone with the copy.

        Raises:
            StageError: a child that changed none when it was tried did so. A GPU is not asked for values, which would
                make it wait: there torch's counts tell, and whether a norm trains.
        """
        for name, kept, buffer, owner in zip(self.buffers, given, used, self._owners, strict=True):
            if buffer is kept:
                continue
            trains = isinstance(owner, nn.modules.batchnorm._NormBase) and owner.training
            other = buffer.device.type == "cpu" and not same_bits(buffer, kept.to(buffer.dtype))
            if buffer._version or trains or other:
                raise StageError(
                    f"A forward changed the buffer {name!r}, and changed none when the model was tried. precision="
                    f"{self.precision.name!r} would lose that: its buffers are copies in {self.precision.leaves}. Take "
                    "precision='bf16-autocast'."
                )

    def _prepare(self) -> None:
        """Skeletons of this function's own, and the places in them that parameters and buffers go to."""
        self._modules = [copy.deepcopy(child.module) for child in self.children]
        pairs = list(zip(self._modules, self.children, strict=True))
        self._parameters = [_slot(module, name, "_parameters") for module, child in pairs for name in child.sites]
        held = [(module, name) for module, child in pairs for name in child.buffers]
        self._buffers = [_slot(module, name, "_buffers") for module, name in held]
        self._owners = [module.get_submodule(name.rpartition(".")[0]) for module, name in held]
        self._some_change_input = any(child.changes_input for child in self.children)

    def __getstate__(self) -> tuple[Any, ...]:
        """What travels is the skeletons as they were captured, without tensors."""
        return tuple(getattr(self, name) for name in _SHIPPED)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(_SHIPPED, state, strict=True):
            setattr(self, name, value)
        self._modules = None


_SHIPPED = ("children", "sites", "buffers", "columns", "num_inputs", "num_outputs", "precision")

Slot = tuple[dict[str, Any], str]
"""Where a module keeps a tensor: its ``_parameters`` or ``_buffers``, and the key."""


def _slot(module: nn.Module, name: str, kind: str) -> Slot:
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), kind), leaf


def _flat_children(model: nn.Sequential, prefix: str = "") -> list[tuple[str, nn.Module]]:
    found = []
    for name, child in model._modules.items():  # named_children() would leave out a child that comes again
        assert child is not None
        if is_plain_sequential(child):
            found += _flat_children(child, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            found.append((prefix + name, child))
    return found


def sequential_children(model: nn.Sequential, example: torch.Tensor) -> tuple[list[Child], list[Child]]:
    """The children in training and in evaluation mode.

    Args:
        example: one micro-batch; neither it nor the model is changed.

    Raises:
        CaptureError: a child returns something other than one tensor, or looks at values that are not here.
    """
    example = example.to("meta") if without_weights(model) else example
    return _children(model, example.clone(), training=True), _children(model, example.clone(), training=False)


def _children(model: nn.Sequential, example: torch.Tensor, *, training: bool) -> list[Child]:
    trial = (skeleton_of if without_weights(model) else copy_of)(model).train(training)
    before, whose = read_memory(trial), "A child of the nn.Sequential"
    try:
        with surroundings_kept(whose), no_absent_autocast():
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
    """What a forward of the trial copy tells of each child."""
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
            "weights_on='workers' asks for. Set weights_on='client'."
        ) from None


def _refuse_child(whose: str, own: nn.Module, run: nn.Module, output: Any) -> None:
    """A child that changed a parameter, or returns no tensor.

    Args:
        own, run: as the user has it, and the copy that computed the output.
    """
    for local, parameter in own.named_parameters():
        if not parameter.is_meta and not torch.equal(parameter, run.get_parameter(local)):
            raise CaptureError(
                f"{whose} changes its parameter {local!r} while it computes forward. "
                "Let only the optimizer change parameters; write a constraint as a function of the parameter."
            )
    if not isinstance(output, torch.Tensor):
        raise CaptureError(
            f"{whose} of the nn.Sequential returns {type(output).__name__}; between the "
            "children of a pipeline one tensor travels. Let it return a tensor, or wrap the model in an nn.Module "
            "that torch.export can trace."
        )


def sequential_graph(
    children: Sequence[Child], tensor_bytes: Mapping[str, int], frozen: frozenset[str] = frozenset()
) -> ModelGraph:
    """The planner's view: a chain with one Node per child; a shared parameter counts where it is used first.

    Args:
        tensor_bytes: of parameters and buffers, by name in the model.
        frozen: names of the parameters that are not trained.
    """
    together = []  # children that use a buffer that changes
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
    """The children of an nn.Sequential in both modes, and the data column that the first one reads."""

    train: tuple[Child, ...]
    eval: tuple[Child, ...] | None
    column: Any

    def functions(
        self, cuts: Sequence[int], order: Sequence[int]
    ) -> tuple[Sequence[StageFunction], Sequence[StageFunction] | None]:
        """The stages of both modes; a chain has one order only."""
        evals = None if self.eval is None else _sequential_stages(self.eval, cuts, self.column)
        return _sequential_stages(self.train, cuts, self.column), evals


def _sequential_stages(children: Sequence[Child], cuts: Sequence[int], column: str) -> list[StageFunction]:
    """One function per stage; the first reads the data column.

    Raises:
        CaptureError: a buffer that changes would be in two stages.
    """
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

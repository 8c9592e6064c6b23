"""Models whose parameters are built without memory, and initialised module by module on the workers of their stages.

torch's registration hook replaces every new parameter by one on the meta device, in place, so that tied parameters stay
tied. All else in the constructor runs as it is, so that buffers (rotary frequencies, masks, statistics) are right. The
init_empty_weights of Hugging Face accelerate works likewise. A worker then calls, with the seed of the run:

    Linear             reset_parameters()                      sets its own parameters
    Transformer        _reset_parameters(), init_weights()     may change those of the modules in it
    PreTrainedModel    _init_weights(module)                   of transformers: called with each module

For a module with parameters, the methods of the module and of all that contain it are called from the inside out, with
only its own parameters on the CPU and all others on the meta device. Random numbers are seeded by the number of the
module, so that they depend on neither the stages nor the worker.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter as Argument
from inspect import signature
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import init
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from raypipe.data.item_randomness import own_generators, seed_generators
from raypipe.engine.io.checkpoint.tensor_file import TensorInfo
from raypipe.engine.stage.module_copy import skeleton_of
from raypipe.errors import ConfigError
from raypipe.user_lines import line_outside_torch

OWN_INITIALISERS = ("reset_parameters", "_reset_parameters", "init_weights", "_init_weights")
"""Methods that initialise the module itself, if they need no argument."""
_CURE = "Set weights_on='client', which builds the model as it is, or keep this out of the constructor."
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__


class Writes(TorchFunctionMode):
    """Recorder of in-place writes to parameters on the meta device: for each, the source line of the last write.

    The line is None if an initialiser made the write. torch.nn.init reads is_meta and then skips some fills, so a read
    of is_meta counts as a write. Parameters report the CPU as their device, so that constructors use it for other
    tensors.

    Attributes:
        first: for each parameter, by its id, the module and the name under which it was registered first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[int, tuple[nn.Module, str]] = {}
        self._last: dict[int, tuple[torch.Tensor, str | None]] = {}  # the tensor keeps the storage's id unique
        self._sources: dict[int, list[StorageWeakRef]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and _IS_META(args[0]):
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **(kwargs or {}))
            if device is not None and device.type == "cpu":  # where the tensor reports to be, as peft reads
                args, kwargs = (args[0], args[0].dtype if dtype is None else dtype), {}
        result = func(*args, **(kwargs or {}))
        if func == _DEVICE:
            return torch.device("cpu") if result.type == "meta" else result
        target = args[0] if args else (kwargs or {}).get("tensor")
        if isinstance(target, torch.Tensor) and target.is_meta:
            frame = sys._getframe(1)
            name = getattr(func, "__name__", "")
            in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__setitem"))
            if (in_place and name != "requires_grad_") or (
                func == _IS_META and frame.f_code.co_filename == init.__file__
            ):
                self.note(target, None if _in_initialiser(frame) else line_outside_torch(frame))
            elif name in ("clone", "__deepcopy__") and _storage(target) in self._last:
                self._last[_storage(result)] = result, self._last[_storage(target)][1]
        return result

    def note(self, tensor: torch.Tensor, line: str | None) -> None:
        """Record a write to a tensor's storage; ``line`` is the line of a constructor, None for an initialiser."""
        self._last[_storage(tensor)] = tensor, line

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Return True if anything was written to the storage of this tensor."""
        return _storage(tensor) in self._last

    def constructor_line(self, tensor: torch.Tensor) -> str | None:
        """Return `` at FILE:LINE``, the line of the last write; None if an initialiser wrote last, or nothing did."""
        return self._last.get(_storage(tensor), (None, None))[1]

    def take_memory(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Move the parameter that ``module`` registers as ``name`` to the meta device; the object stays the same.

        Raises:
            ConfigError: the parameter shares memory with another parameter, or cannot be swapped.
        """
        self.first.setdefault(id(parameter), (module, name))
        if parameter.is_meta:
            return
        if self.shares_memory(parameter):
            raise _shared(parameter, "another parameter")
        storage = parameter.untyped_storage()
        self._sources.setdefault(storage._cdata, []).append(StorageWeakRef(storage))
        bare = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        try:
            torch.utils.swap_tensors(parameter, nn.Parameter(bare, requires_grad=parameter.requires_grad))
        except RuntimeError as error:
            raise ConfigError(
                f"weights_on='workers': the parameter {name!r} of {type(module).__name__} cannot be built without "
                f"values, because other objects refer to it ({error}). {_CURE}"
            ) from None
        if module._parameters.get(name) is not None:  # e.g. self.head.weight = nn.Parameter(torch.zeros(...))
            self.note(parameter, line_outside_torch(sys._getframe(2)))

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Return True if this tensor uses memory that a parameter had before ``take_memory``."""
        sources = self._sources.get(tensor.untyped_storage()._cdata, ())
        return any(not source.expired() for source in sources)


def build_on_meta(make: Callable[[], Any], seed: int) -> tuple[Any, Writes]:
    """Build a model with all parameters on the meta device.

    Args:
        make: function without arguments that builds the model.
        seed: seed of the run, by which buffers with random values are computed.

    Returns:
        The model, and the writes of its constructor.

    Raises:
        ConfigError: the constructor reads values of parameters, or computes a buffer from them.
    """
    writes, thread = Writes(), threading.get_ident()

    def parameter(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and threading.get_ident() == thread and not is_lazy(value):
            with torch._C.DisableTorchFunction():
                writes.take_memory(module, name, value)

    hook = register_module_parameter_registration_hook(parameter)
    try:
        with own_generators(), without_values("its constructor"), writes:
            seed_generators(seed, 0, 0)
            model = make()
    finally:
        hook.remove()
    if isinstance(model, nn.Module):
        _check_other_tensors(model, writes)
    return model, writes


@contextmanager
def without_values(what: str) -> Iterator[None]:
    """Convert torch's errors about tensors without values to a ConfigError; ``what`` names the code in the context."""
    try:
        yield
    except (NotImplementedError, RuntimeError, TypeError) as error:
        # p.data = values, and p.tolist()
        words = ("meta", "incompatible tensor type", "unallocated storage")
        if not isinstance(error, NotImplementedError) and not any(word in str(error) for word in words):
            raise
        first = " ".join(str(error).split(". ")[0].split())
        raise ConfigError(
            f"weights_on='workers': the model cannot be built without weights, because {what} reads or replaces the "
            f"values of a parameter ({first}). {_CURE}"
        ) from None


def takes_module(module: nn.Module) -> bool:
    """Return True if the module has ``_init_weights(module)``, as models of transformers do."""
    return _required(getattr(module, "_init_weights", None)) == 1


def _required(method: Any) -> int | None:
    """Count the arguments without a default; return None if ``method`` is not callable."""
    if not callable(method):
        return None
    kinds = (Argument.POSITIONAL_ONLY, Argument.POSITIONAL_OR_KEYWORD, Argument.KEYWORD_ONLY)
    return sum(x.default is Argument.empty and x.kind in kinds for x in signature(method).parameters.values())


def initialises_itself(module: nn.Module) -> list[Callable[[], object]]:
    """List the methods of ``OWN_INITIALISERS`` that this module has and that need no argument.

    init_weights of a transformers model is left out, because it would initialise all modules in the model.
    """
    per_module = takes_module(module)
    names = [name for name in OWN_INITIALISERS if not (per_module and name == "init_weights")]
    return [getattr(module, name) for name in names if _required(getattr(module, name, None)) == 0]


def _in_initialiser(frame: FrameType | None) -> bool:
    """Return True if an initialiser, which workers call too, is running in this frame or in one that called it."""
    while frame is not None:
        name = frame.f_code.co_name
        module = frame.f_locals.get("self") if name in OWN_INITIALISERS else None
        per_module = name == "_init_weights" and module is not None and takes_module(module)
        if isinstance(module, nn.Module) and (per_module or _required(getattr(module, name, None)) == 0):
            return True
        frame = frame.f_back
    return False


def _check_other_tensors(model: nn.Module, writes: Writes) -> None:
    """Raise ConfigError if a tensor that is no parameter has no values, or shares the memory of a parameter."""
    for path, module in model.named_modules():
        others = {name: value for name, value in vars(module).items() if name not in ("_buffers", "_parameters")}
        for name, value in {**module._buffers, **others}.items():
            for tensor in pytree.tree_leaves(value):
                if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter):
                    continue
                if not tensor.is_meta and writes.shares_memory(tensor):
                    raise _shared(tensor, "a parameter")
                if tensor.is_meta:
                    raise ConfigError(
                        f"weights_on='workers': the tensor {f'{path}.{name}'.lstrip('.')!r} has no values: it is "
                        f"computed from a parameter, or built under torch.device('meta'). {_CURE}"
                    )


def _shared(tensor: torch.Tensor, other: str) -> ConfigError:
    return ConfigError(
        f"weights_on='workers': a tensor of shape {list(tensor.shape)} shares its memory with {other}, and stages "
        "would hold two copies that drift apart. Use one parameter, or give each its own memory with clone()."
    )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def empty_like_on_host(like: torch.Tensor) -> torch.Tensor:
    """Allocate a CPU tensor of this shape, type and strides that takes no memory until it is written to."""
    if not like.numel():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    memory = mmap.mmap(-1, count * like.dtype.itemsize, flags=_FLAGS)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Replace parameters on the meta device by CPU tensors without memory while the model is traced.

    A trace on the meta device would contain that device: every stage would run `torch.arange(n, device=h.device)`
    there. Tied parameters stay tied.
    """
    held: dict[int, nn.Parameter] = {}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for _, _, parameter in places:
        if id(parameter) not in held:
            held[id(parameter)] = nn.Parameter(empty_like_on_host(parameter), requires_grad=parameter.requires_grad)
    try:
        for module, name, parameter in places:
            put_parameter(module, name, held[id(parameter)])
        yield
    finally:
        for module, name, parameter in places:
            put_parameter(module, name, parameter)


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set a parameter without torch's registration hooks, also in the list of weights that recurrent modules keep."""
    if isinstance(module, nn.RNNBase):
        setattr(module, name, parameter)
    else:
        module._parameters[name] = parameter


OF_CONSTRUCTION = -1
"""Step in the key of the random numbers that initialisers use; the steps of training count from 0."""


@dataclass(frozen=True)
class ModuleInit:
    """StateSource of parameters, computed by the initialisers of their modules. It can be sent to workers.

    Attributes:
        model: model on the meta device.
        owners: for each parameter, the path of the module that initialises it and its name there.
        seed: seed of the run.
    """

    model: nn.Module
    owners: Mapping[str, tuple[str, str]]
    seed: int
    title: str = "The initialisers of the model"
    updates: int = 0

    @classmethod
    def of(cls, model: nn.Module, writes: Writes, seed: int) -> ModuleInit:
        """Create the source of a model that ``build_on_meta`` built, and check that initialisers set every parameter.

        Raises:
            ConfigError: names a parameter that has no initialiser, or that the constructor sets outside of one.
        """
        paths = {id(module): path for path, module in model.named_modules()}
        owners = {}
        for name, parameter in model.named_parameters():
            module, local = writes.first.get(id(parameter), (None, ""))
            if id(module) in paths and module is not None and module._parameters.get(local) is parameter:
                owners[name] = paths[id(module)], local
            else:  # of a copied module, or moved by torch.nn.utils.parametrize
                path, _, local = name.rpartition(".")
                owners[name] = path, local
        source = cls(skeleton_of(model), owners, seed)
        source._check({name: writes.constructor_line(p) for name, p in model.named_parameters()})
        return source

    @property
    def names(self) -> Collection[str]:
        return self.owners.keys()

    def info(self, name: str) -> TensorInfo:
        bare = self._bare(name)
        return TensorInfo(bare.dtype, tuple(bare.shape), 0, math.prod(bare.shape) * bare.dtype.itemsize)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Compute parameters by name, as StateSource; only the parameters of one module are in memory at a time."""
        by_module: dict[str, dict[str, str]] = {}
        for name in names:
            path, local = self.owners[name]
            by_module.setdefault(path, {})[name] = local
        for path, wanted in by_module.items():
            tensors = self._initialised(path)
            for name, local in wanted.items():
                if tensors[local].is_floating_point() and bool(tensors[local].isnan().any()):
                    raise self._unset(name)
                yield name, tensors[local]

    def _bare(self, name: str) -> nn.Parameter:
        path, local = self.owners[name]
        parameter = self.model.get_submodule(path)._parameters[local]
        assert parameter is not None
        return parameter

    def _initialised(self, path: str) -> dict[str, torch.Tensor]:
        """Compute the parameters of the module at ``path``; values that no initialiser sets are NaN, or integers 0."""
        module = self.model.get_submodule(path)
        bare = {name: p for name, p in module._parameters.items() if p is not None}
        real = {id(p): nn.Parameter(_unset_like(p), requires_grad=p.requires_grad) for p in bare.values()}
        with own_generators():  # also keeps other threads from this model
            seed_generators(self.seed, OF_CONSTRUCTION, self._number(path))
            try:
                for name, p in bare.items():
                    put_parameter(module, name, real[id(p)])
                self._call(path)
                return {name: module.get_parameter(name).detach() for name in bare}
            finally:
                for name, p in bare.items():
                    put_parameter(module, name, p)

    def _call(self, path: str) -> None:
        with without_values(f"the initialiser of {path or type(self.model).__name__!r}"), torch.no_grad():
            for call in self._initialisers(path):
                call()

    def _initialisers(self, path: str) -> list[Callable[[], object]]:
        """List the initialisers of the module at ``path``, then of all modules around it, then every _init_weights."""
        parts = path.split(".") if path else []
        chain = [self.model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
        per_module = []
        for depth, module in enumerate(chain):
            owner = next(filter(takes_module, chain[depth:]), None)
            if owner is not None:
                per_module.append(partial(getattr(owner, "_init_weights"), module))  # noqa: B009
        return [call for module in chain for call in initialises_itself(module)] + per_module

    def _number(self, path: str) -> int:
        return next(number for number, (name, _) in enumerate(self.model.named_modules()) if name == path)

    def _check(self, lines: Mapping[str, str | None]) -> None:
        """Run all initialisers on the meta device; raise ConfigError if one of the parameters is not written by them.

        A parameter that the constructor wrote last is refused too, because workers do not run the constructor.

        Args:
            lines: by parameter, the line of the constructor that wrote the parameter last; None for an initialiser.
        """
        writes = Writes()
        with own_generators(), writes:
            for path in dict.fromkeys(path for path, _ in self.owners.values()):
                self._call(path)
        for name in self.owners:
            if not writes.wrote(self._bare(name)):
                raise self._unset(name)
            if (line := lines[name]) is not None:
                raise ConfigError(
                    f"weights_on='workers': the constructor sets {name!r}{line}, and workers do not run constructors. "
                    "Do it in reset_parameters() of the module, or in init_weights() or _init_weights(module) of the "
                    "model, give the weights as files (init_from=...), or set weights_on='client'."
                )

    def _unset(self, name: str) -> ConfigError:
        kind = type(self.model.get_submodule(self.owners[name][0])).__name__
        return ConfigError(
            f"weights_on='workers': no initialiser sets all of {name!r}, a parameter of {kind}. Give {kind} a method "
            "reset_parameters() that does, give the weights as files (init_from=...), or set weights_on='client'."
        )


def _unset_like(bare: torch.Tensor) -> torch.Tensor:
    value = float("nan") if bare.is_floating_point() else 0
    return torch.full_like(bare, value, device="cpu", requires_grad=False)

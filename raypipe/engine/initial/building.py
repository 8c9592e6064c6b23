"""A model built from a function, with parameters that have shapes and no memory, and buffers that have values.

torch's own hook sees every parameter when it is registered: it is exchanged for one on the meta device, in place, so
that tied weights stay tied. Buffers that were computed on the meta device are made for real once the model is built.
Constructors run as they are; what they do to parameters later is recorded, see tape.py.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from raypipe.engine.initial.tape import InitTape
from raypipe.engine.item_randomness import own_generators, seed_generators
from raypipe.errors import ConfigError

__all__ = ["built_without_weights"]

_CURE = "Set weights_on='client', which builds the model as it is, or keep such things out of its constructor."


def built_without_weights(make: Callable[[], Any], seed: int) -> tuple[Any, InitTape]:
    """What a function builds, with all parameters on the meta device, and what it did to them.

    Draws that make other things than parameters (a buffer, a number) follow from the seed too.

    Args:
        make: without arguments.
        seed: of the run.

    Raises:
        ConfigError: the function looks at the values of a parameter.
    """
    tape = InitTape(seed)
    with own_generators(), _registering(tape):
        seed_generators(seed, 0, 0)
        try:
            with _AsOnHost(), tape:
                built = make()
        except NotImplementedError as error:
            raise _looks_at_values(error) from None
        except (RuntimeError, TypeError) as error:
            # p.data = values, and p.tolist()
            if not any(word in str(error) for word in ("meta", "incompatible tensor type", "unallocated storage")):
                raise
            raise _looks_at_values(error) from None
    if isinstance(built, nn.Module):
        _make_others(built, tape, seed)
        _check_buffers(built)
    return built, tape


class _AsOnHost(TorchFunctionMode):
    """Tensors without memory say that they are on the CPU, as they would be: torch's own initialisers skip others.

    ``w[3] = 1.0`` is seen here too: torch makes a tensor of the number where ``w`` is, and there it would be lost.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META:
            return False
        found = func(*_numbers_kept(func, args), **(kwargs or {}))
        return torch.device("cpu") if func == _DEVICE and found.type == "meta" else found


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE = torch.Tensor.device.__get__


def _numbers_kept(func: Any, args: Any) -> Any:
    if func is torch.Tensor.__setitem__ and args[0].is_meta and isinstance(args[2], bool | int | float | complex):
        return (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))
    return args


@contextmanager
def _registering(tape: InitTape) -> Iterator[None]:
    """Modules that this thread builds inside get parameters of the tape."""
    thread = threading.get_ident()

    def parameter(module: nn.Module, name: str, given: nn.Parameter | None) -> None:
        if given is None or threading.get_ident() != thread or is_lazy(given):
            return
        with torch._C.DisableTorchFunction():
            if given.device.type == "cpu":
                _exchange(module, name, given, tape.defer(given))

    plain = init._no_grad_trunc_normal_

    def truncated(tensor: torch.Tensor, *numbers: float, generator: Any = None) -> torch.Tensor:
        if threading.get_ident() != thread or not tape.knows(tensor):
            return plain(tensor, numbers[0], numbers[1], numbers[2], numbers[3], generator)
        tape.fill(tensor, *numbers)
        return tensor

    hook = register_module_parameter_registration_hook(parameter)
    try:
        # It draws until all numbers lie inside, which nobody can tell of a tensor without numbers.
        init._no_grad_trunc_normal_ = truncated  # type: ignore[assignment]
        yield
    finally:
        init._no_grad_trunc_normal_ = plain
        hook.remove()


def _exchange(module: nn.Module, name: str, given: nn.Parameter, bare: torch.Tensor) -> None:
    """The parameter stays the object that it is, and loses its memory."""
    try:
        torch.utils.swap_tensors(given, nn.Parameter(bare, requires_grad=given.requires_grad))
    except RuntimeError as error:
        raise ConfigError(
            f"weights_on='workers': the parameter {name!r} of {type(module).__name__} is referred to elsewhere when it "
            f"becomes a parameter ({error}), so it cannot be built without its values. {_CURE}"
        ) from None


def _make_others(model: nn.Module, tape: InitTape, seed: int) -> None:
    """Buffers, and tensors that modules keep beside them, get their values; those that share memory still do."""
    held: dict[int, torch.Tensor] = {}
    learning = {p.untyped_storage()._cdata: name for name, p in model.named_parameters() if p.requires_grad}

    def made(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, nn.Parameter):
                return value
            if tape.gave_away(value):
                raise _follows(value, "a parameter that was made of it")
            if not tape.knows(value):
                return value
            if (name := learning.get(value.untyped_storage()._cdata)) is not None:
                raise _follows(value, repr(name))
            return tape.made(value, seed, held)
        if type(value) in (dict, OrderedDict, list):  # of which others may hold the same object
            for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (found := made(item)) is not item:
                    value[key] = found
        if type(value) is tuple:
            items = tuple(map(made, value))
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        return value

    for module in model.modules():
        for name, value in list(vars(module).items()):
            if (found := made(value)) is not value:
                object.__setattr__(module, name, found)


def _follows(tensor: torch.Tensor, parameter: str) -> ConfigError:
    return ConfigError(
        f"weights_on='workers': a tensor of shape {list(tensor.shape)} beside the parameters has the memory of "
        f"{parameter}. Stages would keep it as it begins, while it follows the parameter in plain PyTorch. Use the "
        "parameter itself in forward, with detach() there if it shall not learn by it, or clone() what shall stay as "
        "it is."
    )


def _check_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                f"weights_on='workers': the buffer {name!r} follows from parameters, which have no values while the "
                f"model is built. {_CURE}"
            )


def _looks_at_values(error: Exception) -> ConfigError:
    first = " ".join(str(error).split(". ")[0].split())
    return ConfigError(
        f"weights_on='workers': the model cannot be built without weights, because its constructor looks at, or "
        f"sets from elsewhere, the values of a parameter or of a large tensor ({first}). {_CURE}"
    )

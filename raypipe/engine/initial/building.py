"""A model built from a function, with parameters that have shapes and no memory, and buffers that have values.

torch's own hooks see every parameter and buffer when it is registered: a parameter is exchanged for one on the meta
device, in place, so that tied weights stay tied; a buffer that was computed on the meta device is made for real.
Constructors run as they are; what they do to parameters later is recorded, see tape.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
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
    tape = InitTape()
    with own_generators(), _registering(tape, seed):
        seed_generators(seed, 0, 0)
        try:
            with _AsOnHost(), tape:
                built = make()
        except NotImplementedError as error:
            raise _looks_at_values(error) from None
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise _looks_at_values(error) from None
    if isinstance(built, nn.Module):
        _make_attributes(built, tape, seed)
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
def _registering(tape: InitTape, seed: int) -> Iterator[None]:
    """Modules that this thread builds inside get parameters of the tape."""
    thread = threading.get_ident()

    def parameter(module: nn.Module, name: str, given: nn.Parameter | None) -> None:
        if given is None or threading.get_ident() != thread or is_lazy(given):
            return
        with torch._C.DisableTorchFunction():
            if given.device.type == "cpu":
                _exchange(module, name, given, tape.defer(given))

    # torch types the hook as returning nothing, and takes what it returns
    def buffer(module: nn.Module, name: str, given: torch.Tensor | None) -> Any:
        if given is None or threading.get_ident() != thread or not tape.knows(given):
            return None
        return tape.made(given, seed)

    plain = init._no_grad_trunc_normal_

    def truncated(tensor: torch.Tensor, *numbers: float, generator: Any = None) -> torch.Tensor:
        if threading.get_ident() != thread or not tape.knows(tensor):
            return plain(tensor, numbers[0], numbers[1], numbers[2], numbers[3], generator)
        tape.fill(tensor, *numbers)
        return tensor

    hooks = [
        register_module_parameter_registration_hook(parameter),
        register_module_buffer_registration_hook(buffer),
    ]
    try:
        # It draws until all numbers lie inside, which nobody can tell of a tensor without numbers.
        init._no_grad_trunc_normal_ = truncated  # type: ignore[assignment]
        yield
    finally:
        init._no_grad_trunc_normal_ = plain
        for hook in hooks:
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


def _make_attributes(model: nn.Module, tape: InitTape, seed: int) -> None:
    """Large tensors that a module keeps beside its parameters and buffers get their values."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and tape.knows(value):
                setattr(module, name, tape.made(value, seed))


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
        f"weights_on='workers': the model cannot be built without weights, because its constructor looks at the values "
        f"of a parameter or of a large tensor ({first}). {_CURE}"
    )

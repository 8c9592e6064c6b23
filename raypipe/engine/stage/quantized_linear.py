"""Frozen layers of bitsandbytes in 4 and 8 bits as operations of a model's graph.

    bitsandbytes   Linear4bit.weight           a parameter of uint8 with a quant_state, Python state of this process
    trace          weight                      a frozen parameter of uint8
                   weight.absmax, ...          buffers, under the names that the layer's state_dict has
    stage          torch.ops.raypipe.linear_4bit(x, weight, bias, [weight.absmax, ...], ...)

An operation builds the quant_state from its arguments, which are tensors of the stage like any other, and calls what
the layer calls. Results have the bits of the layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional

from raypipe.errors import CaptureError, StageError
from raypipe.ir.precision import FP32, Precision

_INFO_BYTES, _NESTED_BLOCK = 167, 256
"""Bytes of the numbers of a quant_state as bitsandbytes saves them, about, and values that share an outer scale."""
_DOT = "\N{ONE DOT LEADER}"
"""Stands for the dot in the names of buffers such as ``weight.absmax``, which torch refuses to register."""


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model by name; inside of ``traceable`` also those of quantized layers."""
    return {plain_name(name): buffer for name, buffer in model.named_buffers()}


def plain_name(name: str) -> str:
    """Return the name that a buffer has in the model's state_dict, for one that ``traceable`` has registered."""
    return name.replace(_DOT, ".")


def is_quantized(operation: Any) -> bool:
    """Return True for the operations of bitsandbytes, and for those that call them."""
    return str(operation).startswith(("bitsandbytes.", "raypipe.linear_"))


def settle(model: nn.Module) -> dict[str, Any]:
    """Bring quantized layers into a state that no forward changes; return them by path.

    The first forward of an 8-bit layer moves its scales. A forward of a 4-bit layer in evaluation mode on a CPU with
    AVX512-BF16 rounds its scales to bf16, packs the weight anew, and from then on computes in bf16, in training too,
    without gradients. That is switched off.

    Raises:
        CaptureError: a layer is packed already; names it and the fix.
    """
    bnb = sys.modules.get("bitsandbytes")
    layers = {} if bnb is None else {path: one for path, one in model.named_modules() if _kind(bnb, one)}
    for path, layer in layers.items():
        if _kind(bnb, layer) == 8:
            if layer.weight.CB is not None:
                layer.init_8bit_state()
            continue
        layer.support_avx512bf16_for_cpu = False
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise CaptureError(
                f"{path}.weight has been packed for inference on this CPU by a forward in evaluation mode, which "
                "rounds its scales and takes its gradients. Load the model anew, and train before you evaluate: then "
                "evaluations keep the weight as it is."
            )
    return layers


def without_frozen_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out of a state_dict what quantized layers of ``model`` would refuse to load: their scales, which are fixed.

    A layer of bitsandbytes refuses the state_dict that it has made itself.
    """
    scales = tuple(name for path in settle(model) for name in (f"{path}.weight.", f"{path}.SCB"))
    return {name: tensor for name, tensor in state.items() if not (scales and name.startswith(scales))}


@contextmanager
def traceable(model: nn.Module, precision: Precision = FP32) -> Iterator[None]:
    """Make the frozen state of quantized layers visible as parameters and buffers, and their calls as operations.

    Inside the context the weight of each layer is a plain parameter with the same memory. Restored afterwards.

    Raises:
        CaptureError: a layer is not quantized yet, its weight is not frozen, or ``precision`` would round its scales;
            names it and the fix.
    """
    bnb: Any = sys.modules.get("bitsandbytes")
    layers = settle(model)
    if not layers:
        yield
        return
    if precision.leaves:
        raise CaptureError(
            f"precision={precision.name!r} would round the scales of {next(iter(layers))!r}, which is quantized, to "
            f"{precision.leaves}. Take precision='bf16-autocast', which computes in bf16 and converts no weights."
        )
    calls: dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]] = {}
    weights = {layer: layer._parameters["weight"] for layer in layers.values()}
    kinds: dict[Any, Any] = {bnb.nn.Linear4bit: None, bnb.nn.Linear8bitLt: None}
    try:
        for path, layer in layers.items():
            state = (_state_4bit if _kind(bnb, layer) == 4 else _state_8bit)(path, layer)
            weight = weights[layer]
            assert weight is not None
            values = weight.detach().as_subclass(torch.Tensor)
            if is_described(layer):
                values = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device="meta")
            layer._parameters["weight"] = nn.Parameter(values, requires_grad=False)
            for name, tensor in state.items():
                layer._buffers[name.replace(".", _DOT)] = tensor.detach().as_subclass(torch.Tensor)
                layer._non_persistent_buffers_set.add(name.replace(".", _DOT))
            calls[layer] = (_call_4bit if _kind(bnb, layer) == 4 else _call_8bit)(layer, weight, tuple(state))
        for kind in kinds:
            kinds[kind] = kind.forward
            kind.forward = lambda self, x: calls[self](x)
        yield
    finally:
        for kind, forward in kinds.items():
            if forward is not None:
                kind.forward = forward
        for layer, weight in weights.items():
            layer._parameters["weight"] = weight
            for name in [name for name in layer._buffers if _added(name)]:
                del layer._buffers[name]
                layer._non_persistent_buffers_set.discard(name)


def _added(name: str) -> bool:
    return _DOT in name or name == "SCB"


def _kind(bnb: Any, module: nn.Module) -> int:
    """Return 4 or 8, the number of bits of a quantized layer; 0 for other modules."""
    if isinstance(module, bnb.nn.Linear4bit):
        return 4
    return 8 if isinstance(module, bnb.nn.Linear8bitLt) else 0


def _state_4bit(path: str, layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer's quant_state, with the names of its state_dict, and the offset."""
    if layer.weight.requires_grad:
        raise CaptureError(
            f"{path}.weight is quantized to 4 bits and has requires_grad=True, but a rounded weight has no gradient. "
            "Freeze it (requires_grad_(False)) and train adapters, as peft's LoraConfig adds them."
        )
    quant_state = _quant_state(layer)
    if is_described(layer):
        blocks = -(-layer.weight.numel() // quant_state.blocksize)
        first = torch.uint8 if quant_state.nested else torch.float32
        state = {"absmax": _unset(blocks, first), "quant_map": _unset(16), "info": _unset(_INFO_BYTES, torch.uint8)}
        if quant_state.nested:
            outer = _unset(-(-blocks // quant_state.state2.blocksize))
            state |= {"nested_absmax": outer, "nested_quant_map": _unset(256), "nested_offset": torch.zeros(())}
        return {f"weight.{name}": x for name, x in state.items()}
    if quant_state is None:
        raise CaptureError(
            f"{path} is a {type(layer).__name__} that is not quantized yet: its weight still is "
            f"{layer.weight.dtype}. Move it to a device, which quantizes it: model.to('cpu')."
        )
    state = {f"weight.{name}": x for name, x in quant_state.as_dict(packed=True).items()}
    return state | ({"weight.nested_offset": quant_state.offset} if quant_state.nested else {})


def _unset(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of shape (count,) that takes no memory."""
    return torch.zeros((), dtype=dtype).expand(count)


def is_described(layer: Any) -> bool:
    """Return True for a 4-bit layer on the meta device, which has the shape of its weight before quantization."""
    weight = layer.weight
    return bool(weight.is_meta and hasattr(weight, "quant_type") and weight.quant_state is None)


def has_described(model: nn.Module) -> bool:
    """Return True if some 4-bit layer of the model is only described, so that it can be planned, but not trained."""
    return any(map(is_described, settle(model).values()))


def _quant_state(layer: Any, weight: Any = None) -> Any:
    """Return the quant_state of a layer: bitsandbytes' own, or one without tensors if the layer is only described."""
    weight = layer.weight if weight is None else weight
    if not (weight.is_meta and weight.quant_state is None):
        return getattr(weight, "quant_state", None) or layer.quant_state
    make = _bitsandbytes().functional.QuantState
    outer = make(None, blocksize=_NESTED_BLOCK, dtype=torch.float32) if weight.compress_statistics else None
    return make(None, weight.shape, None, weight.blocksize, weight.quant_type, weight.dtype, None, outer)


def _call_4bit(layer: Any, weight: Any, names: Sequence[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    quant_state = _quant_state(layer, weight)
    nested = quant_state.state2.blocksize if quant_state.nested else 0
    parts = ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map", "nested_offset") if nested else ()))
    order = [f"weight{_DOT}{part}" for part in parts]
    rest = [name.replace(".", _DOT) for name in names]
    order += [name for name in rest if name not in order]  # numbers of the quant_state, which checkpoints need

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.raypipe.linear_4bit(
            x, layer.weight, layer.bias, [layer._buffers[name] for name in order], quant_state.quant_type,
            list(quant_state.shape), quant_state.blocksize, nested, quant_state.dtype, layer.compute_dtype or x.dtype,
        )  # fmt: skip

    return call


def _state_8bit(path: str, layer: Any) -> dict[str, torch.Tensor]:
    """Return the scale of each row of the weight."""
    if layer.state.has_fp16_weights or layer.weight.requires_grad:
        raise CaptureError(
            f"{path} is a Linear8bitLt with has_fp16_weights=True, whose weight is trained and quantized in every "
            "forward. Build it with has_fp16_weights=False and train adapters, as peft's LoraConfig adds them."
        )
    scales = layer.state.SCB
    if scales is None:
        raise CaptureError(
            f"{path} is a Linear8bitLt that is not quantized yet: its weight still is {layer.weight.dtype}. Move it to "
            "a device, which quantizes it: model.to('cpu')."
        )
    return {"SCB": scales}


def _call_8bit(layer: Any, _weight: Any, names: Sequence[str]) -> Callable[[torch.Tensor], torch.Tensor]:
    (scales,) = names
    return lambda x: torch.ops.raypipe.linear_8bit(
        x, layer.weight, layer.bias, layer._buffers[scales], layer.state.threshold, layer.training
    )


_library = torch.library.Library("raypipe", "FRAGMENT")
_library.define(
    "linear_4bit(Tensor input, Tensor weight, Tensor? bias, Tensor[] state, str quant_type, int[] shape, "
    "int blocksize, int nested_blocksize, ScalarType dtype, ScalarType compute_dtype) -> Tensor"
)
_library.define(
    "linear_8bit(Tensor input, Tensor weight, Tensor? bias, Tensor scales, float threshold, bool training) -> Tensor"
)


def _linear_4bit(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: list[torch.Tensor], quant_type: str,
    shape: list[int], blocksize: int, nested_blocksize: int, dtype: torch.dtype, compute_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    bnb = _bitsandbytes()
    quant_state, (absmax, code) = bnb.functional.QuantState, state[:2]
    offset = outer = None
    if nested_blocksize:
        outer_absmax, outer_code, offset = state[2:5]
        outer = quant_state(outer_absmax, code=outer_code, blocksize=nested_blocksize, dtype=torch.float32)
    inner = quant_state(absmax, torch.Size(shape), code, blocksize, quant_type, dtype, offset, outer)
    given, x = x.dtype, x.to(compute_dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if is_fake(x):  # autograd functions cannot be traced; this computes the same
        return functional.linear(x, bnb.functional.dequantize_4bit(weight, inner).to(x.dtype), bias).to(given)
    if x.is_meta:
        return _Counted.apply(x, weight, bias, inner).to(given)
    return bnb.matmul_4bit(x, weight, bias=bias, quant_state=inner).to(given)


class _Counted(torch.autograd.Function):
    """Frozen linear layer in operations whose FLOPs and bytes can be counted; bitsandbytes has one kernel for them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: Any) -> torch.Tensor:
        ctx.weight, ctx.state, ctx.has_bias = weight, state, bias is not None
        return functional.linear(x, _bitsandbytes().functional.dequantize_4bit(weight, state).to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = _bitsandbytes().functional.dequantize_4bit(ctx.weight, ctx.state).to(grad.dtype)
        of_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return (torch.matmul(grad, whole) if ctx.needs_input_grad[0] else None), None, of_bias, None


def _linear_8bit(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor, threshold: float,
    training: bool,
) -> torch.Tensor:  # fmt: skip
    bias = None if bias is None else bias.to(x.dtype)
    if is_fake(x):
        return functional.linear(x, weight.to(x.dtype) * (scales / 127.0).unsqueeze(1).to(x.dtype), bias)
    bnb = _bitsandbytes()
    state = bnb.MatmulLtState()
    state.CB, state.SCB, state.threshold = weight, scales, threshold
    state.has_fp16_weights, state.is_training, state.use_pool = False, training, threshold > 0.0
    return bnb.matmul(x, weight, bias=bias, state=state)


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise StageError(
            f"The model has quantized layers of bitsandbytes, which this worker cannot import ({error}). Install it on "
            "all nodes: pip install bitsandbytes."
        ) from None
    return bitsandbytes


_library.impl("linear_4bit", _linear_4bit, "CompositeImplicitAutograd")
_library.impl("linear_8bit", _linear_8bit, "CompositeImplicitAutograd")

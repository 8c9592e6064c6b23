"""Codecs on hostile numbers, and their bytes as the host computes them: the reference of the kernels."""

from __future__ import annotations

import numpy as np
import torch

from raypipe.engine.codec import cuda, host
from raypipe.engine.codec.codec import BLOCK, wire_bytes
from raypipe.engine.codec.tah import CHUNK, FORMS

__all__ = ["CASES", "KEY", "SIZES", "decoded", "expected_wire", "hostile", "same_numbers"]

KEY = 0x8000_0001_FFFF_FFFE
"""Of random rounding; every one of its halves has its highest bit."""

SIZES = (
    0, 1, 2, 3, 4, 5, 6, 7, 31, 126, 127, 128, 129, 130, 131, 255, 256, 384, 1021, 1152, 4 * cuda.THREADS + 1,
    CHUNK + 300,
)  # fmt: skip

CASES = [(name, dtype) for name, dtypes in cuda.KERNELS.items() for dtype in dtypes]
"""Codecs, and the types that they take."""


def hostile(size: int, seed: int) -> torch.Tensor:
    """float32: noise of another scale in every block, with numbers of any bits, special ones or denormals in most."""
    rng = np.random.default_rng(seed)
    scales = np.repeat(np.exp2(rng.integers(-149, 126, -(-size // BLOCK) + 1)), BLOCK)[:size]
    x = (rng.standard_normal(size) * scales).astype(np.float32)
    bits = rng.integers(0, 1 << 32, size, dtype=np.uint32)
    kind = np.repeat(rng.integers(0, 4, -(-size // BLOCK) + 1), BLOCK)[:size]
    anything = (kind == 1) & (rng.random(size) < 0.02)
    x.view(np.uint32)[anything] = bits[anything]
    special = np.array(
        [0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 2.0**-14, 65519.0, 65520.0, -3.39e38, host.INT8.least, 1.0, -1.0],
        np.float32,
    )
    places = (kind == 2) & (rng.random(size) < 0.1)
    x[places] = rng.choice(special, size)[places]
    x.view(np.uint32)[(kind == 3) & (rng.random(size) < 0.3)] &= 0x807FFFFF  # denormal
    return torch.from_numpy(x)


def expected_wire(name: str, x: torch.Tensor, key: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(bytes on the wire by the host, True for those that are defined: no codes of NaN and of blocks with one)."""
    wire = torch.empty(wire_bytes(name, x.dtype, x.numel()), dtype=torch.uint8)
    host.encode(name, x, wire, key)
    if name in FORMS:
        return wire.numpy(), np.ones(wire.numel(), bool)
    if name in ("bf16", "fp16"):
        return wire.numpy(), np.repeat(~x.isnan().numpy(), 2)
    split = 4 * -(-x.numel() // BLOCK)
    finite = wire[:split].view(torch.float32).isfinite().repeat_interleave(BLOCK)[: x.numel()].numpy()
    return wire.numpy(), np.concatenate([np.ones(split, bool), finite[0::2] if name == "int4" else finite])


def decoded(name: str, dtype: torch.dtype, wire: np.ndarray, size: int) -> torch.Tensor:
    """What the host makes of bytes."""
    found = torch.empty(size, dtype=dtype)
    host.decode(name, torch.from_numpy(wire.copy()), found)
    return found


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal to the bit, but for what a NaN says."""
    assert torch.equal(a.isnan(), b.isnan())
    known, whole = ~a.isnan(), {4: torch.int32, 2: torch.int16}[a.dtype.itemsize]
    assert torch.equal(a.view(whole)[known], b.view(whole)[known])

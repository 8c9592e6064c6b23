"""Codecs: boundary tensors in fewer bytes, at a stated loss.

    stage s                       link                       stage s + 1
    activation x --encode--> 1 or 2 bytes an element --decode--> x' = x + e, a leaf that requires a gradient
    gradient   g' <-decode-- 1 or 2 bytes an element <--encode-- gradient of x'

Each end treats what it has as exact: the receiver's tensor is a new leaf, so nothing differentiates through the
rounding, and the backward of a codec is the identity (the straight-through estimator).

| codec | bytes an element | error of an element x                    | not finite        | too large         |
|-------|------------------|------------------------------------------|-------------------|-------------------|
| none  | as it is         | 0                                        | as it is          |                   |
| bf16  | 2                | 2^-8 |x| + 2^-126                        | stays so, NaN NaN | 3.397e38 up: inf  |
| fp16  | 2                | 2^-11 |x| + 2^-25                        | stays so, NaN NaN | 65520 up: inf     |
| int8  | 1 + 4/128        | a/254, or a/127 where rounded at random; | its block is NaN  | fits              |
|       |                  | a: largest |x| of 128, 0 if below 2^-119 |                   |                   |
| fp8   | 1 + 4/128        | 2^-4 |x| + 2^-18 a; 0 if a below 2^-117  | its block is NaN  | fits              |
| int4  | 1/2 + 4/128      | a/14, or a/7 where rounded at random;    | its block is NaN  | fits              |
|       |                  | 0 if a below 2^-123                      |                   |                   |
| tah4  | 1/2 + 14/128     | |error| of a tile of 128: 0.05 |tile|,   | its tile is NaN   | may be NaN from   |
|       |                  | 0.18 at worst; may be 0 if a below 2^-61 |                   | 2^103 up          |
| tah3  | 1/4 + 26/128     | as tah4, with 0.12 and 0.36              | its tile is NaN   | as tah4           |

So NaN stays NaN at the other end, and a check of the loss or of the norm finds it.

``codec`` decides which tensors are encoded: 32-bit floats (by blocks: 16-bit ones too) of SEND_F that require a
gradient, and of SEND_B. Integers, masks, 64-bit floats, losses and sums of gradients stay exact, and so do
evaluations, in which nothing requires a gradient. ``host`` (with ``tah``) encodes torch tensors in host memory,
``cuda`` those of an NVIDIA device, bitwise equal, with the kernels of kernels.cu. Threads of a link use ``host``; a
stage on a GPU uses ``cuda`` before its outputs are copied to host memory and after they were copied from there, so that
a link has bytes only (``CodedTensor``); without CuPy it uses ``host``.
Left out: error feedback (algorithms that keep state per sample), and whatever makes the bytes depend on the values.
"""

from __future__ import annotations

from raypipe.engine.codec.codec import NONE, Codec, Codecs

__all__ = ["NONE", "Codec", "Codecs"]

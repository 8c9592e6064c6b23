"""What a codec costs on this machine: seconds per byte on one core, as a link's own thread pays them."""

from __future__ import annotations

import time

import torch

from raypipe.engine.codec import host
from raypipe.engine.codec.choice import wire_bytes
from raypipe.engine.one_thread import one_thread

__all__ = ["codec_cost"]

SAMPLE_ELEMENTS = 1 << 18
ROUNDS = 5


def codec_cost(name: str) -> tuple[float, float, float]:
    """(bytes before over bytes on the wire, seconds to encode a byte, seconds to decode one), of float32.

    Bytes are those before the codec. The quickest of a few rounds over 1 MiB, with one thread, in some milliseconds.
    """
    plain = torch.linspace(-3.0, 3.0, SAMPLE_ELEMENTS)
    wire = torch.empty(wire_bytes(name, plain.dtype, plain.numel()), dtype=torch.uint8)
    encode_s, decode_s = [], []
    with one_thread():
        for _ in range(ROUNDS):
            begin_s = time.perf_counter()
            host.encode(name, plain, wire, None)
            middle_s = time.perf_counter()
            host.decode(name, wire, plain)
            encode_s.append(middle_s - begin_s)
            decode_s.append(time.perf_counter() - middle_s)
    return plain.nbytes / wire.nbytes, min(encode_s) / plain.nbytes, min(decode_s) / plain.nbytes

"""The kernels of the codecs on a GPU, by CuPy: what the host does, in torch's current stream, whichever that is."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from raypipe.engine.codec import cuda
from raypipe.engine.codec.codec import wire_bytes
from tests.contract.codec import CASES, KEY, SIZES, decoded, expected_wire, hostile, same_numbers


@pytest.fixture(autouse=True, scope="module")
def _cupy() -> None:
    """Where there is a GPU, these tests run or fail; that there is none, the first test of the folder says."""
    if find_spec("cupy") is None:
        pytest.fail("there is a GPU and no CuPy: pip install raypipe[cuda13] (or raypipe[cuda12])")


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).rpartition(".")[2])
def test_they_do_what_the_host_does(name: str, dtype: torch.dtype) -> None:
    keys = (None, KEY) if name in ("int8", "int4") else (None,)
    for place, size in enumerate((*SIZES, 100_003)):
        x = hostile(size, seed=place).to(dtype)
        for key in keys:
            for offset in (0, 1):
                there = torch.cat([x[:offset], x]).cuda()[min(offset, size) :]
                wire = torch.zeros(wire_bytes(name, dtype, size), dtype=torch.uint8, device="cuda")
                cuda.encode(name, there, wire, key)
                back = torch.empty_like(there)
                cuda.decode(name, wire, back)
                if size:
                    on_wire = wire.cpu().numpy()
                    expected, defined = expected_wire(name, x, key)
                    assert np.array_equal(on_wire[defined], expected[defined])
                    same_numbers(back.cpu(), decoded(name, dtype, on_wire, size))


def test_they_are_queued_in_the_current_stream() -> None:
    """Behind work of that stream, which is still being done when they are called."""
    x, wire = torch.zeros(1 << 20, device="cuda"), torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
    back, ones = torch.empty_like(x), torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(8):
            ones = ones @ ones * 2.0**-12
        x += ones[0, 0]
        cuda.encode("bf16", x, wire)
        cuda.decode("bf16", wire, back)
    stream.synchronize()
    assert torch.equal(back, torch.ones_like(back))

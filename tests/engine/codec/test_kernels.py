"""The kernels of the codecs without a GPU: they compile for two, and on this processor they do what the host does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from raypipe.engine.codec import cuda
from raypipe.engine.codec.codec import BLOCK, wire_bytes
from raypipe.engine.codec.tah import CHUNK, FORMS
from tests.contract.codec import CASES, KEY, SIZES, decoded, expected_wire, hostile, same_numbers
from tests.emulators.cuda import Compiler, Emulated, emulated

GUARD = 64


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return emulated(cuda.SOURCE, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_they_compile(architecture: str) -> None:
    code = Compiler()(cuda.SOURCE.read_text(), architecture, *cuda.OPTIONS)
    assert code[:4] == b"\x7fELF"
    for name, dtype in CASES:
        for way in ("encode", "decode"):
            assert cuda.kernel_name(way, name, dtype).encode() in code


def test_products_keep_what_is_below_the_normal_numbers() -> None:
    """CuPy has NVRTC flush it to 0; those products that have a code for it say in PTX that they do not."""
    ptx = Compiler()(cuda.SOURCE.read_text(), "compute_80", *cuda.OPTIONS, "-ftz=true").decode()
    for name, dtype in CASES:
        if name in ("int8", "fp8", "int4"):
            for way in ("encode", "decode"):
                _, _, kernel = ptx.partition(f".entry {cuda.kernel_name(way, name, dtype)}(")
                kernel = kernel.partition(".entry ")[0]
                assert len(re.findall(r"\bmul\.rn\.f32\b", kernel)) >= 16, "one for each element of a thread"
                assert way == "decode" or ".ftz" in kernel, "the option did nothing"


def guarded(nbytes: int, offset: int = 0) -> Iterator[np.ndarray]:
    """Memory, ``offset`` bytes after a multiple of 64; checks at the end that nothing around it was written."""
    memory = np.full(nbytes + 3 * GUARD, 0xA5, np.uint8)
    start = -memory.ctypes.data % GUARD + GUARD + offset
    yield memory[start : start + nbytes]
    around = np.concatenate([memory[:start], memory[start + nbytes :]])
    assert bool((around == 0xA5).all()), "written beside its memory"


def grid_of(kernel: str, elements: int) -> int:
    return max(cuda.grid_of(kernel, elements), 1)


def check_both_ways(
    launch: Emulated, name: str, x: torch.Tensor, key: int | None, *, backwards: bool, offset: int = 0
) -> None:
    """Compare the kernels with the host; ``offset`` of the memory from an aligned address, in elements."""
    size, dtype = x.numel(), x.dtype
    nbytes, at = wire_bytes(name, dtype, size), offset * dtype.itemsize
    for source in guarded(x.nbytes, at):
        source[:] = x.view(torch.uint8).numpy() if size else 0
        for wire in guarded(nbytes, 4 * offset):
            encode, decode = (cuda.kernel_name(way, name, dtype) for way in ("encode", "decode"))
            launch(encode, grid_of(encode, size), cuda.THREADS, source, wire, size, key, backwards=backwards)
            if not size:
                return
            expected, defined = expected_wire(name, x, key)
            assert np.array_equal(wire[defined], expected[defined])
            for back in guarded(x.nbytes, at):
                launch(decode, grid_of(decode, size), cuda.THREADS, wire, back, size, backwards=backwards)
                got = torch.from_numpy(back.copy()).view(dtype)
            same_numbers(got, decoded(name, dtype, wire, size))


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).rpartition(".")[2])
def test_they_do_what_the_host_does(
    launch: Emulated, name: str, dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = (None, KEY) if name in ("int8", "int4") else (None,)
    for place, size in enumerate(SIZES):
        x = hostile(size, seed=place).to(dtype)
        for key in keys:
            check_both_ways(launch, name, x, key, backwards=place % 2 == 1)
        check_both_ways(launch, name, x, keys[-1], backwards=False, offset=1)
    assert capfd.readouterr().err == "", "undefined in C++"


@pytest.mark.parametrize("name", cuda.KERNELS)
def test_they_do_what_the_host_does_with_many_elements(launch: Emulated, name: str) -> None:
    key = KEY if name in ("int8", "int4") else None
    check_both_ways(launch, name, hostile(100_003, seed=1), key, backwards=True)


@pytest.mark.parametrize("name", cuda.KERNELS)
def test_every_16_bit_number_is_converted(launch: Emulated, name: str) -> None:
    """As codes of bf16 and fp16; of the others as what is encoded and decoded."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in cuda.KERNELS[name]:
        if dtype is not torch.float32:
            check_both_ways(launch, name, numbers.view(dtype), None, backwards=False)
            continue
        wire = numbers.numpy().view(np.uint8)
        size = wire.size // 2
        if name not in (
            "bf16",
            "fp16",
        ):  # every code, negative ones and those that nothing encodes to too, by a scale of 1
            codes = np.arange(256, dtype=np.uint8)
            size = codes.size * (2 if name == "int4" else 1)
            wire = np.concatenate([np.ones(size // BLOCK, np.float32).view(np.uint8), codes])
        if name in FORMS:  # whatever comes in
            size = CHUNK + 1000
            wire = np.random.default_rng(1).integers(0, 256, wire_bytes(name, dtype, size), dtype=np.uint8)
        back = np.empty(4 * size, np.uint8)
        decode = cuda.kernel_name("decode", name, dtype)
        launch(decode, grid_of(decode, size), cuda.THREADS, wire, back, size)
        same_numbers(torch.from_numpy(back).view(dtype), decoded(name, dtype, wire, size))

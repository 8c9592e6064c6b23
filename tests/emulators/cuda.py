"""Kernels without a GPU: compiled by NVRTC for a GPU that is not here, or by g++ for this processor, and run there."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

__all__ = ["Compiler", "Emulated", "emulated"]

SHIM = Path(__file__).with_name("cuda_shim.h")
# Of what is undefined in C++, also where memory is read at an address that its type must not have.
CHECKED = ("-fsanitize=undefined", "-ffp-contract=off", "-fno-strict-aliasing")


class Emulated:
    """Kernels on this processor.

    Args:
        library: made by ``emulated``.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __call__(
        self, kernel: str, blocks: int, threads: int, source: np.ndarray, into: np.ndarray, elements: int,
        key: int | None = None, *, backwards: bool = False,
    ) -> None:  # fmt: skip
        """Launch a kernel and wait for it.

        Args:
            source, into: what it reads and writes.
            backwards: lanes of a warp take their turns from the last to the first.
        """
        low, high = (0, 0) if key is None else (key & 0xFFFFFFFF, key >> 32)
        failed = self._library.launch(
            ctypes.cast(self._library[kernel], ctypes.c_void_p), ctypes.c_uint(blocks), ctypes.c_uint(threads),
            int(backwards), ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(into.ctypes.data),
            ctypes.c_longlong(elements), ctypes.c_uint(low), ctypes.c_uint(high), int(key is not None),
        )  # fmt: skip
        assert not failed, "a lane took no part in a shuffle"


def emulated(source: Path, folder: Path) -> Emulated:
    """Compile a file of kernels with g++; the test is skipped where there is none.

    Args:
        folder: for the library.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: kernels cannot be run on its processor")
    library = folder / f"{source.stem}.so"
    command = [compiler, "-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", *CHECKED, "-include", str(SHIM)]
    done = subprocess.run([*command, str(source), "-o", str(library)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Emulated(ctypes.CDLL(str(library)))


class Compiler:
    """NVRTC, as its package for Python brings it; the test is skipped where there is none."""

    def __init__(self) -> None:
        library = _library()
        if library is None:
            pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc compiles kernels without a GPU")
        self._nvrtc = ctypes.CDLL(str(library))

    def __call__(self, source: str, architecture: str, *options: str) -> bytes:
        """The machine code of an architecture such as "sm_80", or the PTX of one such as "compute_80".

        Raises:
            ValueError: it does not compile; with what NVRTC says.
        """
        nvrtc, program = self._nvrtc, ctypes.c_void_p()
        text = ctypes.c_char_p(source.encode())
        _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, ctypes.c_char_p(b"kernels.cu"), 0, None, None))
        try:
            given = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in options)]
            failed = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
            if failed:
                raise ValueError(self._text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode())
            if architecture.startswith("compute_"):
                return self._text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
            return self._text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    @staticmethod
    def _text(size_of: Callable[..., int], copy: Callable[..., int], program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        _check(size_of(program, ctypes.byref(size)))
        found = ctypes.create_string_buffer(size.value)
        _check(copy(program, found))
        return found.raw


def _library() -> Path | None:
    """Where the package of CUDA 12 or 13 has put it."""
    spec = find_spec("nvidia")
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = [
        path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*") if path.suffix.lstrip(".").isdigit()
    ]
    return max(found, default=None)


def _check(status: int) -> None:
    assert status == 0, f"NVRTC's status {status}"

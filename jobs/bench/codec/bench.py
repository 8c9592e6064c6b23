"""What the codecs cost and lose: encoding and decoding one tensor, one thread, as a link's thread does it.

    gbytes_per_second   bytes read and written by encoding and by decoding / seconds of both
    ratio               bytes of the tensor / bytes on the wire
    relative_error      |x' - x| / |x|, Euclidean, for normally distributed x
    fraction_of_copy    on a GPU: gbytes_per_second / that of a copy there; of 64 MiB, elsewhere 4 MiB

Seconds on the host are processor seconds of the one thread, so that other work on the machine counts little; on a GPU
they are of the wall. A codec shortens a message when its seconds are fewer than those of the bytes that it saves: the
break-even rate says above which Mbit/s of the link it does not pay, where nothing hides either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from jobs.lib import common

SIZES = (1 << 16, 1 << 20, 1 << 24)
"""Elements of float32: 256 KiB, 4 MiB and 64 MiB."""
OF_FIGURES = {"host": 1 << 20, "gpu": 1 << 24}
TRIAL_S = 0.02
"""Least length of a trial: small tensors are encoded several times in it."""

CANDIDATES = {
    "copy": "none", "bf16": "bf16", "fp16": "fp16", "int8": "int8", "int8_at_random": "int8", "fp8": "fp8",
    "int4": "int4", "int4_at_random": "int4",
}  # fmt: skip
KEYS = {"int8_at_random": 7, "int4_at_random": 7}
"""Of random rounding."""
LAYOUT: dict[str, str] = {
    "GB/s": r"gbytes_per_second_(\w+)",
    "ratio": r"ratio_(\w+)",
    "relative error": r"relative_error_(\w+)",
    "of a copy": r"fraction_of_copy_(\w+)",
}
TARGETS: dict[str, str] = {r"fraction_of_copy_\w+": ">= 0.8"}


class Work(NamedTuple):
    """Both ways of one candidate on one tensor, and what they move.

    Attributes:
        encode, decode: do it once.
        clock: seconds, when all that was begun is done.
        moved_bytes: read and written by both.
        wire_bytes: of the encoded tensor.
        error: relative.
    """

    encode: Callable[[], object]
    decode: Callable[[], object]
    clock: Callable[[], float]
    moved_bytes: int
    wire_bytes: int
    error: float


def on_host(label: str, elements: int) -> Work:
    """A candidate as links use it."""
    import torch

    from raypipe.engine.codec import host
    from raypipe.engine.codec.choice import wire_bytes

    torch.set_num_threads(1)
    name = CANDIDATES[label]
    x = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    back = torch.empty_like(x)
    wire = torch.empty(wire_bytes(name, x.dtype, elements), dtype=torch.uint8)
    key = KEYS.get(label)
    moved_bytes = 2 * (x.nbytes + wire.nbytes)
    if name == "none":
        return Work(lambda: wire.view(x.dtype).copy_(x), lambda: back.copy_(wire.view(x.dtype)), time.thread_time,
                    moved_bytes, wire.nbytes, 0.0)  # fmt: skip
    host.encode(name, x, wire, key)
    host.decode(name, wire, back)
    error = float((back - x).norm() / x.norm())
    return Work(lambda: host.encode(name, x, wire, key), lambda: host.decode(name, wire, back), time.thread_time,
                moved_bytes, wire.nbytes, error)  # fmt: skip


def on_gpu(label: str, elements: int) -> Work:
    """A candidate with the kernels of an NVIDIA device."""
    import torch

    from raypipe.engine.codec import cuda
    from raypipe.engine.codec.choice import wire_bytes

    name, key = CANDIDATES[label], KEYS.get(label)
    x = torch.randn(elements, generator=torch.Generator().manual_seed(1)).cuda()
    back = torch.empty_like(x)
    wire = torch.empty(wire_bytes(name, x.dtype, elements), dtype=torch.uint8, device=x.device)
    moved_bytes = 2 * (x.nbytes + wire.nbytes)

    def clock() -> float:
        torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    if name == "none":
        return Work(lambda: wire.view(x.dtype).copy_(x), lambda: back.copy_(wire.view(x.dtype)), clock,
                    moved_bytes, wire.nbytes, 0.0)  # fmt: skip
    cuda.encode(name, x, wire, key)
    cuda.decode(name, wire, back)
    error = float((back - x).norm() / x.norm())
    return Work(lambda: cuda.encode(name, x, wire, key), lambda: cuda.decode(name, wire, back), clock,
                moved_bytes, wire.nbytes, error)  # fmt: skip


def has_gpu() -> bool:
    """Whether CuPy is here, and torch finds a device."""
    import torch

    return torch.cuda.is_available() and find_spec("cupy") is not None


def seconds_of(call: Callable[[], object], clock: Callable[[], float], times: int) -> float:
    """Of one of ``times`` calls."""
    begin_s = clock()
    for _ in range(times):
        call()
    return (clock() - begin_s) / times


def measure(make: Callable[[str, int], Work], elements: int, rounds: int) -> dict[str, dict[str, Any]]:
    """By candidate: medians over rounds in which candidates take turns, and every trial."""
    works = {label: make(label, elements) for label in CANDIDATES}
    trials: dict[str, list[tuple[float, float]]] = {label: [] for label in works}
    times = {}
    for label, work in works.items():  # warm, and how many calls make a trial
        once_s = seconds_of(work.encode, work.clock, 3) + seconds_of(work.decode, work.clock, 3)
        times[label] = max(1, round(TRIAL_S / once_s))
    for _ in range(rounds):
        for label, work in works.items():
            trials[label].append(
                (seconds_of(work.encode, work.clock, times[label]), seconds_of(work.decode, work.clock, times[label]))
            )
    found = {}
    for label, work in works.items():
        encode_s, decode_s = (common.median(column) for column in zip(*trials[label], strict=True))
        raw_bytes = 4 * elements
        found[label] = {
            "encode_s": encode_s,
            "decode_s": decode_s,
            "gbytes_per_second": work.moved_bytes / (encode_s + decode_s) / 1e9,
            "ratio": raw_bytes / work.wire_bytes,
            "relative_error": work.error,
            "break_even_mbit": (raw_bytes - work.wire_bytes) * 8e-6 / (encode_s + decode_s),
            "trials_s": trials[label],
        }
    return found


def shown(title: str, found: dict[str, dict[str, Any]]) -> str:
    """A table for people."""
    columns = ("codec", "encode ms", "decode ms", "GB/s", "of copy", "ratio", "error", "break-even Mbit/s")
    copy = found["copy"]["gbytes_per_second"]
    rows = [
        [label, row["encode_s"] * 1e3, row["decode_s"] * 1e3, row["gbytes_per_second"],
         row["gbytes_per_second"] / copy, row["ratio"], row["relative_error"], row["break_even_mbit"]]
        for label, row in found.items()
    ]  # fmt: skip
    return common.table(title, columns, rows)


def figures_of(found: dict[str, dict[str, Any]], suffix: str = "") -> dict[str, float]:
    """Of every candidate but the copy; ``suffix`` is "_gpu" for figures of a GPU."""
    figures = {}
    for label, row in found.items():
        if label == "copy":
            continue
        for key in ("gbytes_per_second", "ratio", "relative_error"):
            figures[f"{key}_{label}{suffix}"] = row[key]
        if suffix:
            figures[f"fraction_of_copy_{label}"] = row["gbytes_per_second"] / found["copy"]["gbytes_per_second"]
    return figures


def main() -> None:
    asked = common.arguments(__doc__)
    rounds = 5 if asked.quick else 25
    places = {"host": on_host} | ({"gpu": on_gpu} if has_gpu() else {})
    if "gpu" not in places:
        print("no GPU, or no CuPy: figures of host memory only")
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    for place, make in places.items():
        for elements in SIZES[:2] if asked.quick and place == "host" else SIZES:
            found = measure(make, elements, rounds)
            raw[f"{place} {elements}"] = found
            print(shown(f"{place}, {4 * elements >> 10} KiB of float32; {common.machine_line()}", found))
            if elements == OF_FIGURES[place]:
                figures |= figures_of(found, "_gpu" if place == "gpu" else "")
    common.finish("codec", figures, raw, asked)

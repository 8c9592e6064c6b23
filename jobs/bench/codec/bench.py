"""Cost and error of the codecs: encoding and decoding one tensor, one thread, as a link's thread does it.

    gbytes_per_second   bytes read and written by encoding and by decoding / seconds of both
    ratio               bytes of the tensor / bytes on the wire
    relative_error      |x' - x| / |x|, Euclidean, for normally distributed x
    fraction_of_copy    on a GPU: gbytes_per_second / that of a copy on the device

Figures are of 64 MiB on a GPU, else of 4 MiB. Seconds on the host are processor seconds of one thread, so that other
work counts little; on a GPU they are wall time. A codec shortens a message if it takes less time than sending the bytes
that it saves: the break-even rate is the bandwidth in Mbit/s above which it takes more, if computation hides neither.
What codecs cost in loss is in bench/codec_loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from jobs.lib import common
from jobs.lib.common import Bench

SIZES = (1 << 16, 1 << 20, 1 << 24)
"""Elements of float32: 256 KiB, 4 MiB and 64 MiB."""
OF_FIGURES = {"host": 1 << 20, "gpu": 1 << 24}
TRIAL_S = 0.02
"""Least length of a trial: small tensors are encoded several times in it."""

CANDIDATES = {
    "copy": "none", "bf16": "bf16", "fp16": "fp16", "int8": "int8", "int8_at_random": "int8", "fp8": "fp8",
    "int4": "int4", "int4_at_random": "int4", "tah4": "tah4", "tah3": "tah3",
}  # fmt: skip
KEYS = {"int8_at_random": 7, "int4_at_random": 7}
"""Keys of random rounding."""


@dataclass(frozen=True)
class Settings:
    """Elements of tensors on the host, and rounds in which candidates take turns."""

    host_sizes: tuple[int, ...] = SIZES
    rounds: int = 25


BENCH = Bench(
    "codec",
    __doc__,
    settings=Settings(),
    quick=Settings(SIZES[:2], 5),
    layout={
        "GB/s": r"gbytes_per_second_(\w+)",
        "ratio": r"ratio_(\w+)",
        "relative error": r"relative_error_(\w+)",
        "of a copy": r"fraction_of_copy_(\w+)",
    },
    targets={r"fraction_of_copy_\w+": ">= 0.8"},
)


class Work(NamedTuple):
    """Encoding and decoding of one tensor by one candidate.

    Attributes:
        encode, decode: functions that do it once.
        clock: function that waits until all started work is done, and returns the time in seconds.
        moved_bytes: bytes that one encoding and one decoding read and write.
        wire_bytes: bytes of the encoded tensor.
        error: relative error of the decoded tensor.
    """

    encode: Callable[[], object]
    decode: Callable[[], object]
    clock: Callable[[], float]
    moved_bytes: int
    wire_bytes: int
    error: float


def on_host(label: str, elements: int) -> Work:
    """Prepare a candidate as links use it."""
    import torch

    from raypipe.engine.codec import host
    from raypipe.engine.codec.codec import wire_bytes

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
    """Prepare a candidate with the kernels of an NVIDIA device."""
    import torch

    from raypipe.engine.codec import cuda
    from raypipe.engine.codec.codec import wire_bytes

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
    """Return True if CuPy is installed and torch has a device."""
    import torch

    return torch.cuda.is_available() and find_spec("cupy") is not None


def seconds_of(call: Callable[[], object], clock: Callable[[], float], times: int) -> float:
    """Measure the mean seconds of ``times`` calls."""
    begin_s = clock()
    for _ in range(times):
        call()
    return (clock() - begin_s) / times


def measure(make: Callable[[str, int], Work], elements: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Measure all candidates: medians over rounds in which candidates take turns, and every trial."""
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
    """Format the table of a measurement."""
    columns = ("codec", "encode ms", "decode ms", "GB/s", "of copy", "ratio", "error", "break-even Mbit/s")
    copy = found["copy"]["gbytes_per_second"]
    rows = [
        [label, row["encode_s"] * 1e3, row["decode_s"] * 1e3, row["gbytes_per_second"],
         row["gbytes_per_second"] / copy, row["ratio"], row["relative_error"], row["break_even_mbit"]]
        for label, row in found.items()
    ]  # fmt: skip
    return common.table(title, columns, rows)


def figures_of(found: dict[str, dict[str, Any]], suffix: str = "") -> dict[str, float]:
    """Compute the figures of every candidate but the copy; ``suffix`` is "_gpu" for figures of a GPU."""
    figures = {}
    for label, row in found.items():
        if label == "copy":
            continue
        for key in ("gbytes_per_second", "ratio", "relative_error"):
            figures[f"{key}_{label}{suffix}"] = row[key]
        if suffix:
            figures[f"fraction_of_copy_{label}"] = row["gbytes_per_second"] / found["copy"]["gbytes_per_second"]
    return figures


def main() -> int:
    run = BENCH.begin()
    places = {"host": on_host} | ({"gpu": on_gpu} if has_gpu() else {})
    if "gpu" not in places:
        print("no GPU, or no CuPy: figures of host memory only")
    for place, make in places.items():
        for elements in run.settings.host_sizes if place == "host" else SIZES:
            row = measure(make, elements, run.settings.rounds)
            run.raw[f"{place} {elements}"] = row
            print(shown(f"{place}, {4 * elements >> 10} KiB of float32; {common.machine_line()}", row))
            if elements == OF_FIGURES[place]:
                run.figures |= figures_of(row, "_gpu" if place == "gpu" else "")
    run.end()
    return 0

"""What the benchmarks share: arguments, the machine's state, medians, tables, and the last line.

A benchmark ends with one line of JSON, ``{"bench": NAME, "figures": {...}}``; ``--json FILE`` keeps what the
figures were computed from. This module loads neither torch nor Ray.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "StageGaps", "arguments", "end_with_parent", "final_line", "finish", "gap_table", "handicap_seen",
    "ideal_seconds", "lone_sleeps_s", "machine", "machine_line", "median", "quantile", "run_processes",
    "stage_gaps", "table",
]  # fmt: skip

HANDICAP_TOLERANCE = 0.03
_PACKAGES = ("raypipe", "torch", "ray", "numpy", "pyarrow")
_COMPUTE = ("F", "B", "I", "W")
_ACTION = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d+)")


def arguments(
    description: str | None,
    given: Sequence[str] | None = None,
    folders: Mapping[str, str] | None = None,
    switches: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """``--quick``, ``--json FILE`` and ``--handicap SECONDS``, which every benchmark takes.

    Args:
        folders: further options that name a folder, with their help.
        switches: further options that take no value, with their help.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer configurations, fewer steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw seconds of every trial there")
    parser.add_argument(
        "--handicap", type=float, default=0.0, metavar="SECONDS", help="slow each of our actions down by that much"
    )
    for name, text in (folders or {}).items():
        parser.add_argument(name, type=Path, metavar="FOLDER", help=text)
    for name, text in (switches or {}).items():
        parser.add_argument(name, action="store_true", help=text)
    if given is None:  # a program of its own: what asks it to end shall not leave its processes and namespaces behind
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    asked = parser.parse_args(given)
    if asked.handicap < 0:
        parser.error(f"--handicap {asked.handicap:g}: seconds must be a number from 0 up")
    return asked


def run_processes(processes: Sequence[Any], limit_s: float) -> None:
    """Start processes of multiprocessing and wait until all have ended; none is left, whatever happens.

    Raises:
        RuntimeError: one failed, or took longer than ``limit_s``.
    """
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(limit_s)
        if any(process.exitcode != 0 for process in processes):
            raise RuntimeError(f"the processes ended with {[process.exitcode for process in processes]}")
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(10)


# The machine.


def machine() -> dict[str, Any]:
    """Processors, load averages over 1, 5 and 15 minutes, and versions, now."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    load = [round(value, 2) for value in os.getloadavg()]
    return {"cpus": os.cpu_count(), "load": load, "system": platform.platform(), "versions": versions}


def machine_line() -> str:
    """One line for people, to stand beside every table."""
    found = machine()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"load {' '.join(f'{value:.2f}' for value in found['load'])} on {found['cpus']} CPUs; {versions}"


def end_with_parent() -> None:
    """For the initializer of a pool's processes: without it they wait for ever when their parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def wait() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# Numbers.


def median(values: Iterable[float]) -> float:
    """The middle value; of an even number, the mean of the two in the middle."""
    return statistics.median(values)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed, so always one of them."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


def ideal_seconds(num_stages: int, num_microbatches: int, forward_s: float, backward_s: float) -> float:
    """A step of equal stages with nothing in between: (M + S - 1) * (f + b), for 1F1B, GPipe and slack alike."""
    return (num_microbatches + num_stages - 1) * (forward_s + backward_s)


_LONE = """
import json, sys, time
names, rounds = json.loads(sys.argv[1]), int(sys.argv[2])
took = [[] for _ in names]
for _ in range(rounds):
    for place, seconds in enumerate(names):
        begin_s = time.perf_counter()
        time.sleep(seconds)
        took[place].append(time.perf_counter() - begin_s)
print(json.dumps(took))
"""


def lone_sleeps_s(seconds: Sequence[float], rounds: int) -> list[list[float]]:
    """What ``time.sleep`` takes in a process of its own that does nothing else, for each of ``seconds`` in turn.

    Call it while nothing else of the benchmark runs: the overshoot of a sleep is the machine's, not ours.
    """
    command = [sys.executable, "-c", _LONE, json.dumps(list(seconds)), str(rounds)]
    limit_s = 30 + 10 * rounds * sum(seconds)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=limit_s)
    return json.loads(done.stdout)


class StageGaps(NamedTuple):
    """Where one stage's time went in one traced step; lists of seconds.

    Attributes:
        forwards, backwards: how long each took.
        gaps: from the end of a compute action to the start of the next, bubbles included.
        sends: how long the calling thread was busy handing a message over.
        latencies: from the start of a SEND to the end of its RECV, where the receiver was already waiting.
        num_receives: all of them; those not among the latencies came early and cost nothing.
        tail_s: from the end of the last compute action to the end of the optimizer step.
    """

    forwards: list[float]
    backwards: list[float]
    gaps: list[float]
    sends: list[float]
    latencies: list[float]
    num_receives: int
    tail_s: float


def stage_gaps(rows: Iterable[Mapping[str, Any]]) -> dict[int, StageGaps]:
    """By stage, from the measured rows of a run folder's ``timeline/spans.parquet``, which share one clock.

    Args:
        rows: with ``action`` (as in 1RECV_F0), ``start_s`` and ``end_s``; simulated rows left out.
    """
    spans: dict[int, list[tuple[float, float, str, int]]] = {}
    sent_s: dict[tuple[int, str, int], float] = {}
    for row in rows:
        match = _ACTION.fullmatch(row["action"])
        if match is None:
            raise ValueError(f"{row['action']!r} is no action")
        stage, op, microbatch = int(match[1]), match[2], int(match[3])
        spans.setdefault(stage, []).append((row["start_s"], row["end_s"], op, microbatch))
        if op in ("SEND_F", "SEND_B"):
            sent_s[stage, op, microbatch] = row["start_s"]
    found = {}
    for stage, own in sorted(spans.items()):
        own.sort()
        compute = [span for span in own if span[2] in _COMPUTE]
        receives = [span for span in own if span[2] in ("RECV_F", "RECV_B")]
        latencies = []
        for start_s, end_s, op, microbatch in receives:
            begin_s = sent_s.get((stage - 1 if op == "RECV_F" else stage + 1, op.replace("RECV", "SEND"), microbatch))
            if begin_s is not None and start_s < begin_s:
                latencies.append(end_s - begin_s)
        found[stage] = StageGaps(
            forwards=[end - start for start, end, op, _ in compute if op == "F"],
            backwards=[end - start for start, end, op, _ in compute if op == "B"],
            gaps=[after[0] - before[1] for before, after in itertools.pairwise(compute)],
            sends=[end - start for start, end, op, _ in own if op.startswith("SEND")],
            latencies=latencies,
            num_receives=len(receives),
            tail_s=own[-1][1] - compute[-1][1] if compute else 0.0,
        )
    return found


def handicap_seen(label: str, handicap_s: float, plain: float, slowed: float, moves_by: float) -> bool:
    """Print how a ratio moved under ``--handicap`` and how it should have; whether both agree within 3 points.

    Args:
        plain, slowed: the ratio without and with it.
        moves_by: what arithmetic says about the difference.
    """
    agree = abs(slowed - plain - moves_by) <= HANDICAP_TOLERANCE
    print(
        f"handicap of {handicap_s * 1e3:g} ms per action, {label}: ratio {plain:.4f} without, {plain + moves_by:.4f} "
        f"predicted, {slowed:.4f} measured: {'seen' if agree else 'NOT AS PREDICTED'}"
    )
    return agree


# What is printed.


def gap_table(traced: Mapping[str, Sequence[Mapping[int, StageGaps]]], forward_s: float, backward_s: float) -> str:
    """Microseconds by candidate and stage, over all of a candidate's traced steps; forwards and backwards less f and b.

    Args:
        traced: by candidate, what ``stage_gaps`` found in each of its runs.
    """

    def both(values: Sequence[float], less_s: float = 0.0) -> str:
        low, high = (f"{(v - less_s) * 1e6:.0f}" for v in (median(values), quantile(values, 0.9))) if values else "--"
        return f"{low} / {high}"

    rows = []
    for candidate, runs in traced.items():
        for stage in runs[0] if runs else ():
            parts = [run[stage] for run in runs]
            forwards, backwards, gaps, sends, latencies = (
                list(itertools.chain(*lists)) for lists in zip(*(part[:5] for part in parts), strict=True)
            )
            rows.append(
                [f"{candidate} {stage}", both(forwards, forward_s), both(backwards, backward_s), both(gaps),
                 both(sends), both(latencies), f"{len(latencies)} of {sum(part.num_receives for part in parts)}",
                 both([part.tail_s for part in parts])]
            )  # fmt: skip
    columns = ("stage", "F - f", "B - b", "gap", "send", "message", "waited", "tail")
    return table("traced steps, microseconds, median / p90", columns, rows)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Plain text: the first column to the left, all others to the right; floats with four digits."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    lines = [title]
    for line in (columns, ["-" * width for width in widths], *cells):
        first, *others = (
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def final_line(bench: str, figures: Mapping[str, float]) -> str:
    """The line that machines read. A figure that is no finite number is a mistake of the benchmark."""
    rounded = {name: float(f"{value:.5g}") for name, value in figures.items()}
    return json.dumps({"bench": bench, "figures": rounded}, allow_nan=False)


def finish(bench: str, figures: Mapping[str, float], raw: Mapping[str, Any], file: Path | None) -> None:
    """Write the raw numbers where asked for, then print the last line."""
    line = final_line(bench, figures)
    if file is not None:
        whole = {**json.loads(line), "time": round(time.time(), 1), "machine": machine(), "raw": raw}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(whole, indent=1, allow_nan=False))
        print(f"raw numbers in {file}")
    print(line, flush=True)

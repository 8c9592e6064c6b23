"""Check of a machine with one GPU in 15 minutes: tests and benchmarks, the cheapest first, each with a time limit.

    make gpu-lease                          both halves, with python3: it needs torch, pytest and raypipe's dependencies
    make gpu-lease PART=1                   the first half: tests of streams, codecs, NCCL, runs; a small benchmark
    make gpu-lease PART=2                   the second half: CUDA IPC, the large benchmark, torch.compile, codecs
    make gpu-lease DEVICE=cpu               the same commands on a machine without a GPU, to see that they work
    python3 jobs/check/gpu_machine.py --only nccl tests

Needs neither Ray nor a virtual environment. The output of all parts, a line for each test as it ends, goes into one
text; that text, summaries, junit reports and figures go into the folder of --out: $OUT, by default build/gpu. At the
end it prints which parts passed, failed or timed out, and which tests failed or were skipped. The part "machine" is
always first: if torch cannot use the GPU, no other part is run.

Exit status 0 if all parts passed, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
SLOWER = 20
"""Factor of all limits on a processor."""
GRACE_S = 5.0
"""Seconds between the request that a part ends and its end by force."""
KNOWN = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True)
class Part:
    """One command of the check.

    Attributes:
        half: 1 or 2.
        command: arguments of Python; OUT in them stands for the folder of the results.
        limit_s: seconds after which it is ended.
        on_cpu: arguments of Python with --device cpu; the same if empty.
    """

    name: str
    half: int
    limit_s: float
    command: tuple[str, ...]
    on_cpu: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """Outcome of a part: "passed", "FAILED", "TIMED OUT" or "not run"."""

    part: str
    word: str
    seconds: float
    limit_s: float
    status: int | None


def pytest_of(name: str, *files: str, workers: int = 1, seconds: float = 60) -> tuple[str, ...]:
    """Return arguments of pytest: a line for each test, reasons at the end, and a junit report."""
    options = ["-v", "-rfEs", "--tb=short", "-p", "no:cacheprovider"]
    options += [f"--junitxml=OUT/{name}.xml", f"--timeout={seconds:g}"]
    if find_spec("xdist"):
        options += ["-n", str(workers)] if workers > 1 else ["-n", "0"]
    return "-m", "pytest", *options, *files


BENCH = ("jobs/bench/gpu", "--no-record")
CPU = ("--device", "cpu", "--no-record")
FACTS = ("jobs/check/gpu_machine.py", "--facts")
PARTS = (
    Part("machine", 1, 40, FACTS, (*FACTS, *CPU[:2])),
    Part("device", 1, 40, pytest_of("device", "tests/gpu/test_device.py", "tests/gpu/test_codecs.py")),
    Part(
        "nccl", 1, 90, pytest_of("nccl", "tests/gpu/test_nccl.py"),
        pytest_of("nccl", "tests/runtime/transport/test_two_processes.py", "-k", "steps", seconds=600),
    ),
    Part(
        "quick", 1, 90, (*BENCH, "--quick", "--json", "OUT/quick.json"),
        (BENCH[0], *CPU, "--json", "OUT/quick.json"),
    ),
    Part("where", 1, 40, (*BENCH, "--quick", "--where"), (BENCH[0], *CPU, "--where")),
    Part(
        "tests", 1, 140,
        pytest_of("tests", *(f"tests/gpu/test_{name}.py" for name in ("exactness", "precision", "run")), workers=8),
    ),
    Part(
        "ipc", 2, 60, pytest_of("ipc", "tests/gpu/test_ipc.py"),
        pytest_of("ipc", "tests/runtime/transport/test_device_memory.py", "-k", "steps or measured", seconds=600),
    ),
    Part(
        "full", 2, 160, (*BENCH, "--rounds", "1", "--steps", "6", "--json", "OUT/full.json"),
        (BENCH[0], *CPU, "--steps", "1", "--json", "OUT/full.json"),
    ),
    Part("compiled", 2, 50, pytest_of("compiled", "tests/gpu/test_compiled.py")),
    Part("graphs", 2, 50, pytest_of("graphs", "tests/gpu/test_graphs.py")),
    Part("codec", 2, 50, ("jobs/bench/codec", "--quick", "--no-record", "--json", "OUT/codec.json")),
)  # fmt: skip


def carry_out(part: Part, out: Path, log: IO[str], *, cpu: bool = False) -> Outcome:
    """Run a part; its output goes to standard output and into the log, line by line.

    Args:
        out: folder of the results.
    """
    limit_s = part.limit_s * (SLOWER if cpu else 1)
    given = part.on_cpu if cpu and part.on_cpu else part.command
    command = [sys.executable, *(word.replace("OUT/", f"{out}/") for word in given)]
    said(log, f"== {part.name}, at most {limit_s:g} s: {' '.join(given)}")
    begin_s, word = time.monotonic(), "TIMED OUT"
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **KNOWN, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    reader = threading.Thread(target=lambda: copied(process.stdout, log), daemon=True)
    reader.start()
    try:
        word = "FAILED" if process.wait(limit_s) else "passed"
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:  # ends also what an ended part left behind, and a part that this program does not outlive
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    reader.join(GRACE_S)  # a process that left the group may hold the pipe for longer
    return Outcome(part.name, word, round(time.monotonic() - begin_s, 1), limit_s, process.returncode)


def copied(lines: Iterable[str] | None, log: IO[str]) -> None:
    for line in lines or ():
        said(log, line.rstrip("\n"))


def said(log: IO[str], line: str) -> None:
    """Print a line, and write it into the log at once."""
    print(line, flush=True)
    log.write(line + "\n")
    log.flush()


def named_in(lines: Iterable[str], words: str = "FAILED|ERROR") -> list[str]:
    """List the tests whose outcome is one of ``words`` in lines of ``pytest -v``, each once."""
    found = (re.match(rf"^(?:\[gw\d+\].*?(?:{words}) (tests/\S+)|(tests/\S+) (?:{words})\b)", line) for line in lines)
    return list(dict.fromkeys(one[1] or one[2] for one in found if one))


def carry_all_out(parts: Sequence[Part], out: Path, stem: str, *, cpu: bool = False) -> list[Outcome]:
    """Run parts one after the other, and write the log and the summary, which is made anew after each part.

    If the first part fails, which looks at the machine, the others are not run; if it is only slow, they are.
    """
    out.mkdir(parents=True, exist_ok=True)
    done: list[Outcome] = []
    with (out / f"{stem}.txt").open("w+", encoding="utf-8") as log:
        for part in parts:
            if done and done[0].part == "machine" and done[0].word == "FAILED":
                done.append(Outcome(part.name, "not run", 0.0, part.limit_s, None))
            else:
                done.append(carry_out(part, out, log, cpu=cpu))
            (out / f"{stem}.json").write_text(json.dumps([asdict(one) for one in done], indent=1))
        log.seek(0)
        lines = log.read().splitlines()
        said(log, "")
        for one in done:
            said(log, f"{one.part:<10}{one.word:<10}{one.seconds:7.1f} s of {one.limit_s:g}")
        for test in named_in(lines, "SKIPPED"):
            said(log, f"skipped: {test}")
        for test in named_in(lines):
            said(log, f"failed: {test}")
    return done


def facts(*, cpu: bool) -> int:
    """Print the machine and its packages; return 1 if torch cannot use a GPU that it should."""
    for command in (["nvidia-smi"], ["sh", "-c", "ls /dev/nvidia*; nproc; free -g"]):
        try:
            print(subprocess.run(command, capture_output=True, text=True, timeout=10).stdout)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{command[0]}: {error}")
    for name in ("torch", "numpy", "cupy", "pyarrow", "pytest", "xdist", "pytest_timeout", "hypothesis"):
        try:
            module: Any = importlib.import_module(name)
            print(name, getattr(module, "__version__", "is there"))
        except ImportError as error:
            print(f"{name}: {error}")
    sys.path.insert(0, str(ROOT))
    from raypipe.engine.device.cuda_device import why_not
    from raypipe.runtime.transport.process_group import why_no_nccl

    reason = why_not()
    print(f"GPU: {reason or 'torch computes on it'}\nNCCL: {why_no_nccl() or 'torch has it'}")
    return int(bool(reason) and not cpu)


def main(given: Sequence[str] | None = None) -> int:
    """Run the chosen parts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2), help="half of the check; both without it")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="these parts")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build" / "gpu"))
    parser.add_argument("--facts", action="store_true", help="print the machine, and run nothing")
    options = parser.parse_args(given)
    cpu = options.device == "cpu"
    if options.facts:
        return facts(cpu=cpu)
    parts = [part for part in PARTS if part.name in (options.only or [part.name])]
    parts = [part for part in parts if options.part in (None, part.half)]
    if parts and parts[0] is not PARTS[0]:
        parts.insert(0, PARTS[0])  # without a GPU tests are skipped and benchmarks measure nothing, so both pass
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    done = carry_all_out(parts, options.out.resolve(), f"check-{options.part or 'all'}", cpu=cpu)
    print(f"in {options.out}")
    return int(any(one.word != "passed" for one in done))


if __name__ == "__main__":
    sys.exit(main())

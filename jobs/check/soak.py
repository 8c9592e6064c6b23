"""Growth of a long run after its first steps: memory, descriptors and threads of every process.

    python jobs/check/soak.py                        100,000 steps in threads, and as many on Ray
    python jobs/check/soak.py --steps 10000 --where ray
    python jobs/check/soak.py --folder FOLDER        each of the two is kept there when it has ended
    python jobs/check/soak.py --where threads --trace      and which lines allocated what is left

A tiny model is trained in two stages with checkpoints, and prints its progress; on two processors 100,000 steps take
half an hour in threads, and on Ray as long again. Processes are sampled after 1,000 steps, and nineteen times after
that. The exit status is 1 if one of these samples is more than 5 MiB above the first, or if the last ones have more
descriptors or threads than the first ones (jobs/lib/growth.py). The last line is JSON: true if all stayed flat, MiB per
10,000 steps by process (the median slope), and every sample.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import tempfile
import time
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import raypipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib import common
from jobs.lib.common import machine_line
from jobs.lib.growth import Growth, Look, growth_of
from jobs.lib.kept_cells import OPTION, KeptCells
from jobs.lib.machine import load

FIRST = 1000
LOOKS = 20
SLOPE_STEPS = 10_000
EVERY_STEPS = 250
"""Steps between two checkpoints: the first are written before the first look."""
WAIT_S = 3600.0


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=1e-3)


def trainer(folder: str) -> raypipe.PipelineTrainer:
    """Make a trainer of two stages with a few hundred parameters."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 2))
    rows = [(torch.randn(8), torch.tensor(i % 2)) for i in range(64)]
    return raypipe.PipelineTrainer(
        net,
        loss_fn=torch.nn.functional.cross_entropy,
        optimizer=adam,
        train_data=rows,
        pipeline=raypipe.PipelineConfig(
            num_stages=2, minibatch_size=8, num_microbatches=2, checkpoint_interval_steps=EVERY_STEPS
        ),
        run_config=SimpleNamespace(name="soak", storage_path=folder, checkpoint_config=SimpleNamespace(num_to_keep=2)),
    )


def processes_of(handle: raypipe.RunHandle, local: bool) -> dict[str, int]:
    """Process ids by what they are."""
    if local:
        return {"the run in threads": os.getpid()}
    stages = {f"stage {i}": int(member["process"]) for i, member in enumerate(handle.status().stages)}
    siblings = _children(_parent(stages["stage 0"]))
    driver = next(p for p in siblings if b"DriverActor" in Path(f"/proc/{p}/cmdline").read_bytes())
    return {"client": os.getpid(), "driver": driver, **stages}


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def _children(process: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if entry.name.isdigit() and _parent(int(entry.name)) == process:
                found.append(int(entry.name))
    return found


def soak(steps: int, *, local: bool, trace: bool) -> list[tuple[int, dict[str, Look]]]:
    """Train ``steps`` steps and a few more; return (step, samples of the processes) at each moment."""
    found: list[tuple[int, dict[str, Look]]] = []
    with tempfile.TemporaryDirectory() as folder:
        handle = trainer(folder).start(num_steps=100 * steps, local=local)
        try:
            begin_s = time.monotonic()
            before = None
            for i in range(LOOKS):
                wanted = FIRST + (steps - FIRST) * i // (LOOKS - 1)
                step = wait_for(handle, wanted)
                if trace and i == 0:
                    gc.collect()
                    tracemalloc.start()
                    before = tracemalloc.take_snapshot()
                looks = {name: Look.at(process) for name, process in processes_of(handle, local).items()}
                found.append((step, looks))
                said = ", ".join(f"{name} {look.resident_bytes / 2**20:.1f}" for name, look in looks.items())
                print(
                    f"step {step} after {time.monotonic() - begin_s:.0f} s: {said} MiB; load {load()[0]:.1f}",
                    flush=True,
                )
            if before is not None:
                gc.collect()
                after = tracemalloc.take_snapshot()
                for line in after.compare_to(before, "lineno")[:25]:
                    print(
                        f"{line.size_diff / 1024:.0f} KiB, {line.count_diff} blocks",
                        *line.traceback.format(),
                        sep="\n",
                    )
                tracemalloc.stop()
        finally:
            handle.stop()
            result = handle.wait(timeout_s=120.0)
        assert [result.records[0].step, result.records[-1].step] == [0, len(result.records) - 1]
    return found


def wait_for(handle: raypipe.RunHandle, step: int) -> int:
    """Wait as a notebook does that shows the status; the step that it is at."""
    deadline_s = time.monotonic() + WAIT_S
    while (status := handle.status()).step < step:
        if status.state == "failed" or time.monotonic() > deadline_s:
            raise SystemExit(f"{status}")
        time.sleep(0.2)
    return status.step


def grown(found: list[tuple[int, dict[str, Look]]]) -> dict[str, Growth]:
    """Compute growth by process, over all looks."""
    return {name: growth_of([(step, looks[name]) for step, looks in found]) for name in found[0][1]}


def per_10000_steps(growth: Growth) -> float:
    """Convert the slope of a growth to MiB per 10,000 steps."""
    return growth.slope_bytes * SLOPE_STEPS / 2**20


def show(where: str, found: list[tuple[int, dict[str, Look]]], growths: dict[str, Growth]) -> None:
    """Print a table of all processes."""
    (first_step, first), (last_step, last) = found[0], found[-1]
    rows = [
        [
            name, first[name].resident_bytes / 2**20, last[name].resident_bytes / 2**20, growth.most_bytes / 2**20,
            f"{per_10000_steps(growth):+.2f}", f"{first[name].descriptors} -> {last[name].descriptors}",
            f"{first[name].threads} -> {last[name].threads}", "" if growth.flat else "GREW",
        ]
        for name, growth in growths.items()
    ]  # fmt: skip
    columns = (
        where, f"MiB at step {first_step}", f"MiB at step {last_step}", "most above", "MiB per 10,000 steps",
        "descriptors", "threads", "",
    )  # fmt: skip
    print(common.table(f"a run of {last_step} steps, {machine_line()}", columns, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--where", choices=["threads", "ray", "both"], default="both")
    parser.add_argument("--trace", action="store_true", help="print what was allocated and is left, of this process")
    for name, known in OPTION.items():
        parser.add_argument(name, **known)
    options = parser.parse_args()
    if options.trace and options.folder is not None:
        parser.error(
            "--trace shows what it finds while it trains, and nothing of a part that is kept: leave --folder out"
        )
    if options.steps < FIRST + LOOKS:
        parser.error(f"--steps {options.steps}: the first look is at step {FIRST}, and {LOOKS - 1} follow")
    kinds = {"threads": [True], "ray": [False], "both": [True, False]}[options.where]
    kept = KeptCells(options.folder)
    figures: dict[str, Any] = {"flat": True, "mib_per_10000_steps": {}, "most_mib": {}, "looks": {}}
    for local in kinds:
        where = "threads" if local else "Ray"
        told = kept.measured(
            where, {"steps": options.steps}, partial(soak, options.steps, local=local, trace=options.trace)
        )
        found = [(step, {name: Look(*look) for name, look in looks.items()}) for step, looks in told]
        growths = grown(found)
        show(where, found, growths)
        figures["flat"] = figures["flat"] and all(growth.flat for growth in growths.values())
        figures["mib_per_10000_steps"][where] = {name: round(per_10000_steps(g), 3) for name, g in growths.items()}
        figures["most_mib"][where] = {name: round(g.most_bytes / 2**20, 2) for name, g in growths.items()}
        figures["looks"][where] = [
            {"step": step, **{name: look._asdict() for name, look in looks.items()}} for step, looks in found
        ]
    print(json.dumps({"check": "soak", "figures": figures}))
    return int(not figures["flat"])


if __name__ == "__main__":
    sys.exit(main())

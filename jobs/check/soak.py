"""Whether a long run stays as small as it is after its first steps: memory, descriptors and threads of every process.

    python jobs/check/soak.py                        100,000 steps in threads, and as many on Ray
    python jobs/check/soak.py --steps 10000 --where ray
    python jobs/check/soak.py --where threads --trace      and which lines allocated what is left

A tiny model is trained in two stages with checkpoints on the way. Resident memory is looked at after 1,000 steps,
and at nine moments after that. The exit status is 1 where it grew by more than 5 MiB from the first to the last, or a
process had more descriptors or threads at the end. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import tracemalloc
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import raypipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib import common
from jobs.lib.common import machine_line

FIRST = 1000
LOOKS = 10
MOST_GROWTH_BYTES = 5 << 20
EVERY_STEPS = 250
"""Steps between two checkpoints: the first are written before the first look."""
SAMPLES = 5
"""Looks at a process at each moment, a tenth of a second apart; the least counts. A step has memory and threads too."""
WAIT_S = 3600.0


@dataclass(frozen=True)
class Look:
    """One process at one moment."""

    resident_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def at(cls, process: int) -> Look:
        """The least of some samples."""
        found = []
        for _ in range(SAMPLES):
            found.append(cls.now(process))
            time.sleep(0.1)
        return cls(*(min(getattr(look, f.name) for look in found) for f in fields(cls)))

    @classmethod
    def now(cls, process: int) -> Look:
        """Read from /proc."""
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines if ":" in line)
        resident = int(found["VmRSS"].split()[0]) << 10
        return cls(resident, len(list(Path(f"/proc/{process}/fd").iterdir())), int(found["Threads"]))


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=1e-3)


def trainer(folder: str) -> raypipe.PipelineTrainer:
    """Two stages of a few hundred parameters."""
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
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [one for one in found if Path(f"/proc/{one}/stat").exists() and _parent(one) == process]


def soak(steps: int, *, local: bool, trace: bool) -> list[tuple[int, dict[str, Look]]]:
    """Train so many steps and a few more; (step, what the processes were) at each moment."""
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
                print(f"step {step} after {time.monotonic() - begin_s:.0f} s: {said} MiB; {machine_line()}", flush=True)
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


def judged(where: str, found: list[tuple[int, dict[str, Look]]]) -> bool:
    """Print a table of the first and the last look; whether everything stayed as it was."""
    (first_step, first), (last_step, last) = found[0], found[-1]
    rows, good = [], True
    for name, then in last.items():
        grown = then.resident_bytes - first[name].resident_bytes
        fits = (
            abs(grown) <= MOST_GROWTH_BYTES
            and then.descriptors <= first[name].descriptors
            and then.threads <= first[name].threads
        )
        good = good and fits
        rows.append(
            [name, first[name].resident_bytes / 2**20, then.resident_bytes / 2**20,
             f"{grown / (last_step - first_step):+.0f}",
             f"{first[name].descriptors} -> {then.descriptors}", f"{first[name].threads} -> {then.threads}",
             "" if fits else "GREW"]
        )  # fmt: skip
    columns = (
        where, f"MiB at step {first_step}", f"MiB at step {last_step}", "bytes a step", "descriptors", "threads", "",
    )  # fmt: skip
    print(common.table(f"a run of {last_step} steps, {machine_line()}", columns, rows))
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--where", choices=["threads", "ray", "both"], default="both")
    parser.add_argument("--trace", action="store_true", help="print what was allocated and is left, of this process")
    asked = parser.parse_args()
    kinds = {"threads": [True], "ray": [False], "both": [True, False]}[asked.where]
    good = True
    figures: dict[str, Any] = {}
    for local in kinds:
        found = soak(asked.steps, local=local, trace=asked.trace)
        where = "threads" if local else "Ray"
        good = judged(where, found) and good
        figures[where] = [
            {"step": step, **{name: asdict(look) for name, look in looks.items()}} for step, looks in found
        ]
    print(json.dumps({"check": "soak", "figures": {"flat": good, "looks": figures}}))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

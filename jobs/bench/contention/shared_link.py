"""kFkB and 1F1B under one memory limit, on a wire that another flow takes in bursts: network namespaces, real compute.

    host 0, stage 0 ====== a wire of 200 Mbit/s, both ways ====== host 1, stage 1
    a rival         ====== TCP, as fast as it may, in bursts ==== its sink, and the same back

The GPT of bench/links, 16 samples per step. The limit is what 1F1B needs with M = 4. Under it 1F1B runs with M = 4, 8
and 16; kFkB begins with k = 2 and M = 8, and its controller chooses k and M together (``retune_microbatches``): twice
the k fits with micro-batches of half the size. The loads below, the rate, the limit and the steps were fixed before
the first run. Candidates take turns, there and back; the steps in which the controller makes up its mind are left out
of all of them. Gains are mean steps, 1F1B's over kFkB's, and printed whatever they are:

    lab_gain_<load>          against 1F1B with the M that was the best under that load
    lab_gain_m8_<load>       against 1F1B with the M that kFkB begins with
    lab_k_<load>, lab_microbatches_<load>    what kFkB ran in most of the counted steps
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

from jobs.bench.links import gpt
from jobs.lib import common
from jobs.lib.common import machine_line
from jobs.lib.shaped import Rig, rig
from tests.lab.network import SINK, Network

__all__ = ["QUICK", "Settings", "chosen", "figures_of", "measure", "table_of"]

RATE_MBIT = 200
PERIOD_S = 2.0
LOADS = {"light": 0.25, "moderate": 0.5, "heavy": 0.75}
"""Share of every period in which the rival sends."""
SAMPLES = gpt.MICROBATCHES * gpt.MICROBATCH_SIZE
LIMITED_AT = 4
MARGIN = 1.05
"""Of the limit over the plan's bytes: kFkB with M = 4 would need far more."""
LIMIT_S = 400.0
KFKB = {"schedule": "kfkb", "num_microbatches": gpt.MICROBATCHES, "retune_microbatches": True}
CANDIDATES: dict[str, dict[str, Any]] = {
    "1f1b M=4": {"schedule": "1f1b", "num_microbatches": 4},
    "1f1b M=8": {"schedule": "1f1b", "num_microbatches": 8},
    "1f1b M=16": {"schedule": "1f1b", "num_microbatches": 16},
    "kfkb": KFKB,
}

# Arguments: address, port, seconds of a period, and of the burst in it. Zeros: nobody reads them.
_RIVAL = """
import socket, sys, time
period_s, burst_s = float(sys.argv[3]), float(sys.argv[4])
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as sock:
    sock.settimeout(None)
    print("flowing", flush=True)
    begin_s = time.monotonic()
    while True:
        into_s = (time.monotonic() - begin_s) % period_s
        if into_s < burst_s:
            sock.sendall(bytes(1 << 14))
        else:
            time.sleep(period_s - into_s)
"""


class Settings(NamedTuple):
    """How much is measured; the last ``counted`` steps of a run count."""

    loads: tuple[str, ...] = tuple(LOADS)
    candidates: tuple[str, ...] = tuple(CANDIDATES)
    steps: int = 56
    counted: int = 32
    rounds: int = 2


QUICK = Settings(("heavy",), ("1f1b M=8", "kfkb"), 8, 4, 1)


@contextlib.contextmanager
def rival(lab: Network, share: float) -> Iterator[None]:
    """Other TCP flows between both hosts, each way, in bursts of this share of the time."""
    with contextlib.ExitStack() as ends:
        for a, b in ((0, 1), (1, 0)):
            sink = ends.enter_context(lab.piped(b, SINK, lab.addresses[b]))
            port = _line(sink)
            sender = lab.piped(a, _RIVAL, lab.addresses[b], port, str(PERIOD_S), str(share * PERIOD_S))
            _line(ends.enter_context(sender))
        yield


def _line(process: Any) -> str:
    line: str = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"{process.args!r} ended")
    return line


def limit_bytes(folder: str) -> int:
    """The memory limit of every stage, from the plan of 1F1B with few and large micro-batches."""
    import raypipe

    plan = raypipe.PipelineTrainer(
        gpt.chain(),
        loss_fn=gpt.loss_fn,
        optimizer=gpt.optimizer_of,
        train_data=gpt.samples(2),
        pipeline=raypipe.PipelineConfig(
            num_stages=2,
            minibatch_size=SAMPLES,
            num_microbatches=LIMITED_AT,
            partitioner=("5",),
            schedule="1f1b",
            memory_limit_bytes=1 << 40,  # asking for memory has the model profiled
        ),
        scaling_config=SimpleNamespace(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=SimpleNamespace(name="limit", storage_path=folder),
    ).plan()
    assert plan.prediction is not None
    return round(MARGIN * max(stage.memory_bytes for stage in plan.prediction.stages))


def measure(settings: Settings) -> dict[str, Any]:
    """The limit, and by load and candidate what bench/links/ours.py tells of every run."""
    found: dict[str, Any] = {"settings": settings._asdict(), "loads": {load: {} for load in settings.loads}}
    with tempfile.TemporaryDirectory(prefix="bench-contention-") as folder, rig() as lab:
        os.environ["RAYPIPE_CACHE_DIR"] = str(Path(folder) / "profiles")  # one profile for the limit and all runs
        found["limit_bytes"] = limit_bytes(folder)
        lab.rate(RATE_MBIT)
        for load, runs in found["loads"].items():
            for turn in range(settings.rounds):
                for name in settings.candidates[:: -1 if turn % 2 else 1]:
                    run = run_one(lab, name, load, settings.steps, found["limit_bytes"])
                    runs.setdefault(name, []).append(run)
                    mean_ms = fmean(run["seconds"][-settings.counted :]) * 1e3
                    last = run["schedules"][-1] or name
                    print(f"shared wire, {load}, {name}: {mean_ms:.0f} ms, {last}; {machine_line()}", flush=True)
    return found


def run_one(lab: Rig, name: str, load: str, steps: int, limit: int) -> dict[str, Any]:
    """One run under one load."""
    asked = json.dumps({"steps": steps, "pipeline": {**CANDIDATES[name], "memory_limit_bytes": limit}})
    before = lab.lab.carried_bytes(0, 1)
    with rival(lab.lab, LOADS[load]):
        found: dict[str, Any] = lab.answer(lab.start(0, "bench/links/ours.py", asked), LIMIT_S)
    return {**found, "carried_bytes": lab.lab.carried_bytes(0, 1) - before}


def chosen(schedules: list[str]) -> tuple[int, int]:
    """(k, M) of most of these steps, as their records name them: "kfkb k=2 M=16", "1f1b", ..."""
    most = Counter(schedules).most_common(1)[0][0]
    k, m = re.search(r"k=(\d+)", most), re.search(r"M=(\d+)", most)
    return int(k[1]) if k else 1, int(m[1]) if m else gpt.MICROBATCHES


def _mean_s(runs: list[dict[str, Any]], counted: int) -> float:
    return fmean(seconds for run in runs for seconds in run["seconds"][-counted:])


def figures_of(found: dict[str, Any]) -> dict[str, float]:
    """Gains and choices by load."""
    counted = found["settings"]["counted"]
    figures: dict[str, float] = {}
    for load, runs in found["loads"].items():
        mean_s = {name: _mean_s(of_name, counted) for name, of_name in runs.items()}
        own_s = mean_s.pop("kfkb")
        figures[f"lab_gain_{load}"] = min(mean_s.values()) / own_s
        figures[f"lab_gain_m8_{load}"] = mean_s["1f1b M=8"] / own_s
        steps = [schedule for run in runs["kfkb"] for schedule in run["schedules"][-counted:]]
        figures[f"lab_k_{load}"], figures[f"lab_microbatches_{load}"] = chosen(steps)
    return figures


def table_of(found: dict[str, Any]) -> str:
    """A row for each load and candidate."""
    counted = found["settings"]["counted"]
    rows: list[list[Any]] = []
    for load, runs in found["loads"].items():
        own_s = _mean_s(runs["kfkb"], counted)
        for name, of_name in runs.items():
            mean_s = _mean_s(of_name, counted)
            last = of_name[-1]["schedules"][-1] or name
            peak = max(max(run["peak_bytes"], default=0) for run in of_name) / 2**20
            carried = sum(run["carried_bytes"] for run in of_name) / 1e6
            rows.append([load, name, mean_s * 1e3, mean_s / own_s, round(peak), round(carried), last])
    columns = ("load", "candidate", "mean ms", "over kFkB", "peak MiB", "wire MB", "at the end")
    title = f"a shared wire of {RATE_MBIT} Mbit/s, at most {found['limit_bytes'] / 2**20:.0f} MiB per stage"
    return common.table(f"{title}; {machine_line()}", columns, rows)

"""Plans against real runs: what a plan promises of every stage, and what Ray actors then measure.

    python jobs/check/plans.py                     seconds and bytes of four nets on 2 and 3 stages
    python jobs/check/plans.py --what bits         gradients and parameters of two steps against plain PyTorch
    python jobs/check/plans.py --what compete      one copy of the model alone, then two and three at once
    python jobs/check/plans.py --nets gpt2 --stages 2 --rounds 3
    python jobs/check/plans.py --profile           ten vision nets: the profile's total against an eager step

Every run is a process of its own with num_stages="auto". Rounds go over all runs in turn and medians are compared, for
the machine is never the same twice. What is measured, from within the user's optimizer, which every stage calls:

    seconds   processor time of the stage's thread from one optimizer step to the next, less the gradient norm, which is
              no part of F and B; another process on the core does not count, caches and memory that it takes do.
              "the machine itself" is what work that never changes took after the plan over before it
    bytes     what lives from step to step (parameters, gradients, the optimizer's state, buffers), and on top the
              resident set's high-water mark of a step over what was resident before it; in a run of its own, whose
              allocator hands freed memory back at once (slower, so never timed). The process's own growth, code and
              caches, is not part of it
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib import common
from jobs.lib.common import machine_line, table

NETS = ("vgg16", "resnet50", "densenet121", "gpt2")
STAGES = (2, 3)
STEPS = 8
UNITS = {"seconds": "busy_s", "bytes": "bytes"}
WAYS = ("predicted", "measured")
WARM = 2
"""Steps that are not counted: the first makes the optimizer's state."""
LIMIT_S = 600.0
OPTIONS: dict[str, dict[str, Any]] = {
    "--what": {"choices": ("all", "bits", "compete"), "default": "all"},
    "--nets": {"nargs": "+", "choices": (*NETS, "gpt2_untied"), "default": list(NETS)},
    "--stages": {"nargs": "+", "type": int, "default": list(STAGES), "metavar": "WORKERS"},
    "--rounds": {"type": int, "default": 3},
    "--profile": {"action": "store_true", "help": "ten vision nets, profiled; needs torchvision"},
}
TIMED = {"OMP_NUM_THREADS": "1"}
TIGHT = {**TIMED, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
LAYOUT: dict[str, str] = {"seconds / plan": r"seconds_of_plan_(\w+)", "bytes / plan": r"bytes_of_plan_(\w+)"}
TARGETS: dict[str, str] = {r"(seconds|bytes)_of_plan_\w+": "0.9 to 1.1"}


def run_one(what: str, net: str, stages: int) -> dict[str, Any]:
    """One run in a process of its own; what ``plan_runs.py`` prints on its last line."""
    command = [sys.executable, str(Path(__file__).with_name("plan_runs.py")), what, net, str(stages), str(STEPS)]
    environment = {**os.environ, **(TIGHT if what == "bytes" else TIMED)}
    with tempfile.TemporaryFile() as complaints:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=complaints, timeout=LIMIT_S, check=False
        )
        complaints.seek(0)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{complaints.read().decode()[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return found


def compare(nets: list[str], stages: list[int], rounds: int) -> dict[str, Any]:
    """Seconds and bytes by stage: medians over rounds of the medians over steps."""
    found: dict[str, dict[str, list[Any]]] = {
        f"{net}_{s}": {"seconds": [], "bytes": []} for net in nets for s in stages
    }
    for number in range(rounds):
        for net in nets:
            for count in stages:
                for what in ("seconds", "bytes") if number == 0 else ("seconds",):
                    run = run_one(what, net, count)
                    found[f"{net}_{count}"][what].append(run)
                    ratios = " ".join(f"{ratio:.3f}" for ratio in kept_of(run, UNITS[what]))
                    print(f"round {number + 1}: {net}, {count} workers, {what} {ratios}; {told_by(run)}", flush=True)
    rows = [row for key, runs in found.items() for row in rows_of(key, runs["seconds"], runs["bytes"][0])]
    columns = ("net", "stage", "M x b", "runs", "ms plan", "ms", "ratio", "MB plan", "MB", "ratio ")
    print(table("a step of every stage: processor seconds and peak bytes, promised and measured", columns, rows))
    return {"runs": found, "rows": rows}


def told_by(run: dict[str, Any]) -> str:
    """What stood around a run: its micro-batches, and how the machine itself changed."""
    return f"{run['microbatches']}, the machine itself {run['machine']:.3f}; {machine_line()}"


def kept_of(run: dict[str, Any], unit: str) -> list[float]:
    """By stage, what was measured over what was promised."""
    pairs = zip(run["measured"], run["predicted"], strict=True)
    return [measured[unit] / promised[unit] for measured, promised in pairs]


def rows_of(key: str, runs: list[dict[str, Any]], held: dict[str, Any]) -> list[list[Any]]:
    """By stage; every run has a profile of its own, and so perhaps other stages: the usual number of them counts."""
    usual = statistics.mode(len(run["predicted"]) for run in runs)
    same = [run for run in runs if len(run["predicted"]) == usual]
    rows: list[list[Any]] = []
    for stage in range(usual):
        planned_s, measured_s = (statistics.median(run[w][stage]["busy_s"] for run in same) for w in WAYS)
        ratio = statistics.median(kept_of(run, "busy_s")[stage] for run in same)
        row = [key, stage, same[0]["microbatches"], len(same), planned_s * 1e3, measured_s * 1e3, ratio]
        if stage < len(held["predicted"]):
            nbytes = [held[way][stage]["bytes"] for way in WAYS]
            row += [*(count / 1e6 for count in nbytes), nbytes[1] / nbytes[0]]
        rows.append(row + [""] * (10 - len(row)))
    return rows


def figures_of(rows: list[list[Any]]) -> dict[str, float]:
    """Measured over promised, by net, workers and stage."""
    figures = {}
    for key, stage, _, _, _, _, seconds, _, _, held in rows:
        figures[f"seconds_of_plan_{key}_stage{stage}"] = seconds
        if held:
            figures[f"bytes_of_plan_{key}_stage{stage}"] = held
    return figures


def main() -> None:
    """Run, print, keep."""
    asked = common.arguments(__doc__, options=OPTIONS)
    if asked.quick:
        asked.nets, asked.stages, asked.rounds = ["gpt2"], [2], 1
    if asked.profile:
        from jobs.check.profile_totals import profile_totals

        profile_totals(asked.rounds)
    elif asked.what == "all":
        kept = compare(asked.nets, asked.stages, asked.rounds)
        asked.no_record |= (asked.nets, asked.stages) != (list(NETS), list(STAGES))
        common.finish("check_plans", figures_of(kept["rows"]), kept["runs"], asked)
    else:
        for net in asked.nets:
            for count in asked.stages if asked.what == "bits" else (1,):
                print(f"{net}, {count}: {run_one(asked.what, net, count)['text']}; {machine_line()}", flush=True)


if __name__ == "__main__":
    main()

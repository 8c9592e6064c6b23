"""Plans against real runs: what a plan promises of every stage, and what Ray actors then measure.

    python jobs/check/plans.py                     seconds and bytes of four nets on 2 and 3 stages
    python jobs/check/plans.py --nets gpt2 --stages 2 --rounds 3

Every run is a process of its own with num_stages="auto". Rounds go over all runs in turn and medians are compared, for
the machine is never the same twice. The user's optimizer, which every stage calls, measures from within:

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
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

import torch

import raypipe
from jobs.lib.common import Bench, BenchRun, machine_line
from jobs.lib.pipeline_nets import densenet121, gpt2, images, resnet50, sentences, vgg16

BUILD: dict[str, Callable[..., torch.nn.Module]] = {
    "vgg16": vgg16, "resnet50": resnet50, "densenet121": densenet121, "gpt2": gpt2,
}  # fmt: skip
NETS = tuple(BUILD)
STEPS = 8
WARM = 2
"""Steps that are not counted: the first makes the optimizer's state."""
MINIBATCH, SAMPLES, SIDE, LENGTH = 32, 10_000, 64, 128
FIXED_ROUNDS = 25
LIMIT_S = 600.0
UNITS = {"seconds": "busy_s", "bytes": "bytes"}
WAYS = ("predicted", "measured")
TIMED = {"OMP_NUM_THREADS": "1"}
TIGHT = {**TIMED, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Settings:
    """Nets, numbers of workers, and rounds over all of them."""

    nets: tuple[str, ...] = NETS
    stages: tuple[int, ...] = (2, 3)
    rounds: int = 3


BENCH = Bench(
    "check_plans",
    __doc__,
    settings=Settings(),
    quick=Settings(("gpt2",), (2,), 1),
    layout={"seconds / plan": r"seconds_of_plan_(\w+)", "bytes / plan": r"bytes_of_plan_(\w+)"},
    targets={r"(seconds|bytes)_of_plan_\w+": "0.9 to 1.1"},
    options={
        "--nets": {"nargs": "+", "choices": NETS},
        "--stages": {"nargs": "+", "type": int, "metavar": "WORKERS"},
        "--rounds": {"type": int},
    },
)


# Comparison.


def compare(run: BenchRun) -> None:
    """Measure seconds and bytes by stage: medians over rounds of the medians over steps."""
    settings = run.settings
    runs: dict[str, dict[str, list[Any]]] = {
        f"{net}_{stages}": {"seconds": [], "bytes": []} for net in settings.nets for stages in settings.stages
    }
    for turn in range(settings.rounds):
        for net in settings.nets:
            for stages in settings.stages:
                for what in ("seconds", "bytes") if turn == 0 else ("seconds",):
                    one = in_process(what, net, stages)
                    runs[f"{net}_{stages}"][what].append(one)
                    ratios = " ".join(f"{ratio:.3f}" for ratio in ratios_of(one, UNITS[what]))
                    run.note(f"round {turn + 1}: {net}, {stages} workers, {what} {ratios}; {one['microbatches']}, "
                             f"the machine itself {one['machine']:.3f}")  # fmt: skip
    rows = [row for key, of_key in runs.items() for row in rows_of(key, of_key["seconds"], of_key["bytes"][0])]
    columns = ("net", "stage", "M x b", "runs", "ms plan", "ms", "ratio", "MB plan", "MB", "ratio ")
    run.table("a step of every stage: processor seconds and peak bytes, promised and measured", columns, rows)
    run.figures |= figures_of(rows)
    run.raw |= {"runs": runs, "rows": rows}


def in_process(what: str, net: str, stages: int) -> dict[str, Any]:
    """Run one measurement in a process of its own; see ``measured_run``."""
    command = [sys.executable, __file__, "--one", what, net, str(stages)]
    environment = {**os.environ, **(TIGHT if what == "bytes" else TIMED)}
    with tempfile.TemporaryFile() as errors:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, timeout=LIMIT_S, check=False
        )
        errors.seek(0)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read().decode()[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return answer


def ratios_of(run: dict[str, Any], unit: str) -> list[float]:
    """Compute measured over predicted values, by stage."""
    pairs = zip(run["measured"], run["predicted"], strict=True)
    return [measured[unit] / promised[unit] for measured, promised in pairs]


def rows_of(key: str, runs: list[dict[str, Any]], of_bytes: dict[str, Any]) -> list[list[Any]]:
    """Build rows by stage; runs may have different numbers of stages: those with the usual number count."""
    usual = statistics.mode(len(run["predicted"]) for run in runs)
    same = [run for run in runs if len(run["predicted"]) == usual]
    rows: list[list[Any]] = []
    for stage in range(usual):
        planned_s, measured_s = (statistics.median(run[w][stage]["busy_s"] for run in same) for w in WAYS)
        ratio = statistics.median(ratios_of(run, "busy_s")[stage] for run in same)
        row = [key, stage, same[0]["microbatches"], len(same), planned_s * 1e3, measured_s * 1e3, ratio]
        if stage < len(of_bytes["predicted"]):
            nbytes = [of_bytes[way][stage]["bytes"] for way in WAYS]
            row += [*(count / 1e6 for count in nbytes), nbytes[1] / nbytes[0]]
        rows.append(row + [""] * (10 - len(row)))
    return rows


def figures_of(rows: list[list[Any]]) -> dict[str, float]:
    """Compute measured over predicted values, by net, workers and stage."""
    figures = {}
    for key, stage, _, _, _, _, seconds, _, _, nbytes in rows:
        figures[f"seconds_of_plan_{key}_stage{stage}"] = seconds
        if nbytes:
            figures[f"bytes_of_plan_{key}_stage{stage}"] = nbytes
    return figures


# One run.


def trainer_of(net: str, workers: int, folder: Path, what: str) -> raypipe.PipelineTrainer:
    """Make a trainer with num_stages="auto"; all but the mini-batch is left to the planner."""
    from ray.train import RunConfig, ScalingConfig

    words = net == "gpt2"
    torch.manual_seed(0)
    return raypipe.PipelineTrainer(
        BUILD[net](),
        loss_fn=None if words else torch.nn.functional.cross_entropy,
        optimizer=Watch(torch.optim.AdamW, {"lr": 1e-4}, folder, what)
        if words
        else Watch(torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}, folder, what),
        train_data=sentences(LENGTH, SAMPLES) if words else images(SIDE, SAMPLES),
        pipeline=raypipe.PipelineConfig(num_stages="auto", minibatch_size=MINIBATCH),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=f"{net}-{workers}-{os.getpid()}", storage_path=str(folder / "runs")),
    )


def measured_run(what: str, net: str, workers: int, folder: Path) -> dict[str, Any]:
    """Run a plan; return predicted and measured values, by stage."""
    trainer = trainer_of(net, workers, folder, what)
    at_s = [fixed_work_s()]
    plan = trainer.plan()
    assert plan.prediction is not None
    at_s.append(fixed_work_s())
    trainer.fit(num_steps=STEPS, progress=False)
    at_s.append(fixed_work_s())
    lines = read_lines(folder)
    job = trainer._prepared()
    predicted, measured = [], []
    for program, promised in zip(job.programs, plan.prediction.stages, strict=True):
        own = lines[stage_key(name for name in program.parameters if name in program.trainable)]
        other = (*program.buffers, *(name for name in program.parameters if name not in program.trainable))
        other_bytes = sum(job.tensors[name].nbytes for name in other)
        counted = own[WARM:]
        busy_s = promised.busy_s * plan.num_microbatches
        predicted.append({"busy_s": busy_s, "bytes": promised.memory_bytes, "parts": promised.memory})
        peaks = [
            line["held_bytes"] + other_bytes + int(line["end"]["VmHWM"] - before["end"]["VmRSS"])
            for before, line in pairwise(own[WARM - 1 :])
        ]
        measured.append(
            {
                "busy_s": statistics.median(line["busy_s"] for line in counted),
                "all_busy_s": [line["busy_s"] for line in counted],
                "norm_s": statistics.median(line["norm_s"] for line in counted),
                "step_s": statistics.median(line["step_s"] for line in counted),
                "bytes": statistics.median(peaks),
                "held_bytes": counted[-1]["held_bytes"] + other_bytes,
                "anonymous_bytes": counted[-1]["end"]["RssAnon"],
            }
        )
    return {
        "cuts": plan.partition.cuts,
        "microbatches": f"{plan.num_microbatches} x {plan.microbatch_size}",
        "schedule": plan.schedule.kind,
        "machine": (at_s[1] + at_s[2]) / (at_s[0] + at_s[1]),
        "predicted": predicted,
        "measured": measured,
    }


def fixed_work_s() -> float:
    """Measure processor seconds of fixed work, to detect changes of the machine between a plan and its run."""
    torch.set_num_threads(1)
    matrix, stream = torch.full((512, 512), 1e-3), torch.zeros(1 << 20)
    seconds = []
    for _ in range(FIXED_ROUNDS):
        begin_s = time.thread_time()
        for _ in range(10):
            _ = matrix @ matrix
            stream.add_(1.0)
        seconds.append(time.thread_time() - begin_s)
    return statistics.median(seconds)


# Inside a stage.


class Watch:
    """Optimizer factory that measures its stage, except in the process that made the Watch.

    Every stage calls it in its own process. One line of JSON per step goes to ``<folder>/<process>.jsonl``.

    Args:
        base, options: the optimizer.
        what: "seconds" or "bytes".
    """

    def __init__(self, base: type[torch.optim.Optimizer], options: dict[str, Any], folder: Path, what: str) -> None:
        self.base, self.options, self.folder, self.what = base, options, folder, what
        self.home = os.getpid()

    def __call__(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        made = self.base(named, **self.options)
        if os.getpid() != self.home:
            _Stage(made, named, self.folder / f"{os.getpid()}.jsonl", self.what)
        return made


class _Stage:
    """Measurements around one optimizer's step."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.nn.Parameter]], file: Path, what: str
    ) -> None:
        self.named, self.file, self.what, self.optimizer = named, file, what, optimizer
        self.ended_s = 0.0
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    def before(self, *given: Any) -> None:
        reached_s = time.thread_time()
        for parameter in dict(self.named).values():
            if parameter.grad is not None:
                torch.linalg.vector_norm(parameter.grad)
        norm_s = time.thread_time() - reached_s
        self.line: dict[str, Any] = {
            "stage": stage_key(name for name, _ in self.named), "busy_s": reached_s - self.ended_s - norm_s,
            "norm_s": norm_s, "at": _memory(),
        }  # fmt: skip
        self.began_s = time.thread_time()

    def after(self, *given: Any) -> None:
        self.line |= {"step_s": time.thread_time() - self.began_s, "end": _memory(), "held_bytes": self.held_bytes()}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.line) + "\n")
        if self.what == "bytes":
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark begins anew
        self.ended_s = time.thread_time()

    def held_bytes(self) -> int:
        """Count bytes that persist between steps: parameters, gradients, the optimizer's state."""
        tensors = [p for _, p in self.named] + [p.grad for _, p in self.named if p.grad is not None]
        kept = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
        return sum(tensor.nbytes for tensor in (*tensors, *kept))


def stage_key(names: Iterable[str]) -> str:
    """Build the key of a stage from the names that it trains; a tied parameter may be the first of several."""
    return " ".join(sorted(names))


def _memory() -> dict[str, int]:
    """Read resident bytes of this process, their parts, and the high-water mark."""
    sizes = {}
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem"):
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes


def read_lines(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Read the lines of every stage, by ``stage_key``."""
    by_stage = {}
    for path in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        by_stage[lines[0]["stage"]] = lines
    return by_stage


def main() -> int:
    """Run, print, record."""
    if len(sys.argv) > 2 and sys.argv[1] == "--one":
        with tempfile.TemporaryDirectory(prefix="check-plans-") as name:
            os.environ["RAYPIPE_CACHE_DIR"] = str(Path(name) / "profiles")  # measured anew by every run
            print(json.dumps(measured_run(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(name))))
        return 0
    run = BENCH.begin()
    print(machine_line(), flush=True)
    compare(run)
    full = (tuple(run.settings.nets), tuple(run.settings.stages)) == (Settings.nets, Settings.stages)
    run.options.no_record = run.options.no_record or not full
    run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Faults at random moments of one run: it must end with the parameters of an undisturbed one, and leave nothing behind.

    python jobs/check/chaos.py --faults 50 --seed 7
    python jobs/check/chaos.py --faults 12 --schedule 2bw
    python jobs/check/chaos.py --faults 12 --codec bf16
    python jobs/check/chaos.py --faults 20 --schedule 2bw --optimizer muon --codec tah4
    python jobs/check/chaos.py --faults 12 --set precision=fp16 recompute=always max_grad_norm=0.5
    python jobs/check/chaos.py --faults 5 --kinds sigkill driver        without root: on this machine's Ray alone
    python jobs/check/chaos.py --faults 50 --replicas 2 1               a replica of a stage at a time, without root
    python jobs/check/chaos.py --faults 12 --replicas 2 1 --shard-optimizer --kinds replica sigkill again pair driver

Kinds are defined in jobs/lib/faults.py. The run is on network namespaces with a raylet each, one more than it has
stages, and a head that stays. Every fault is printed with its step and moment; a seed repeats the choices, but not the
moments. After the last fault the run is stopped, and the same number of steps is trained again without any fault. The
last line is JSON:

    faults, recoveries          by kind; and by source of the state
    redone_steps, seconds       replayed steps; seconds of recovery, and until the run trained again, p50 and max
    lost_steps                  steps that are not in the final metrics exactly once
    same_losses                 losses and gradient norms of all steps equal the twin's, so each sample was used once
    regroups, joins             of replicas: number of times that the run continued without one, and added one
    replica_pause_seconds       from the kill until the remaining replicas begin the step again, p50 and max
    rollbacks                   recoveries in which all roll back to an older step; 0 is expected with replicas,
                                unless they shard the state of their optimizer
    survivors_lost              stages that no fault hit and that had another process or actor afterwards
    left_behind                 actors, placement groups, CPUs in use, processes, files of shared memory
    equal                       torch.equal of all parameters

Exit status 0 if all is well, 1 if not, 2 if the time limit ended it before the last fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from tests.runtime.raylets import PATIENCE, TOKEN, private_cluster

os.environ |= TOKEN  # before Ray is imported, which looks once

import pyarrow.parquet as pq
import ray
import torch
import yaml  # type: ignore[import-untyped]
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.nn import functional
from torch.utils.data import TensorDataset

import raypipe
from jobs.lib.faults import ANYWHERE, KINDS, Faults, LimitReachedError, events
from jobs.lib.hosts import Hosts, hosts, missing
from jobs.lib.machine import machine_line
from raypipe.errors import RaypipeError
from tests.processes import survivors
from tests.runtime.left_over import ours

STEP_S = 0.02
MOST_STEPS = 1_000_000
FIRST_STEPS = 15
CHECKPOINT_STEPS = 100
END_S = 120.0
GONE_S = 20.0
OURS = ("StageActor", "DriverActor", "NodeWatch")


class Pause(torch.nn.Module):
    """Sleeps in every forward, so that a step takes long enough to be hit."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def model(pause_s: float, options: argparse.Namespace) -> torch.nn.Module:
    """Make a model with randomness and changing buffers; replicas and 16 bits have LayerNorm in place of BatchNorm."""
    coarse = dict(options.set).get("precision") in ("bf16", "fp16")
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        norm = torch.nn.LayerNorm(32) if options.replicas or coarse else torch.nn.BatchNorm1d(32)
        rest = (norm, torch.nn.Dropout(0.1), Pause(pause_s), torch.nn.Tanh())
        layers += [torch.nn.Linear(32, 32), *rest]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(512, 32, generator=made), torch.randint(0, 4, (512,), generator=made))


def adamw(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3)


class MuonAndAdamW:
    """Two optimizers in one object: Muon steps the matrices, AdamW all other parameters."""

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]]) -> None:
        matrices, others = ([p for _, p in named if (p.ndim == 2) is wanted] for wanted in (True, False))
        self.both: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, lr=1e-3)] if others else []
        if matrices:
            self.both.append(torch.optim.Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw"))

    def step(self) -> None:
        for one in self.both:
            one.step()


OPTIMIZERS: dict[str, Callable[[list[tuple[str, torch.nn.Parameter]]], Any]] = {"adamw": adamw, "muon": MuonAndAdamW}


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)


def field(text: str) -> tuple[str, Any]:
    """Parse name=value, as in a run file."""
    name, _, value = text.partition("=")
    return name, yaml.safe_load(value)


def trainer(folder: Path, name: str, options: argparse.Namespace, pause_s: float) -> raypipe.PipelineTrainer:
    """Make the trainer of the run; its undisturbed twin has another name, no pauses and no replicas."""
    fields: dict[str, Any] = {
        "num_stages": options.stages, "minibatch_size": 32, "num_microbatches": 4, "partitioner": "parameters",
        "schedule": options.schedule, "codec_forward": options.codec, "codec_backward": options.codec,
        "checkpoint_interval_steps": CHECKPOINT_STEPS, "retune_interval_steps": 0,
    }  # fmt: skip
    if options.replicas:
        fields["num_lanes"] = math.lcm(*options.replicas)
        if name == TWINS[0]:
            fields |= {"num_replicas": list(options.replicas), "shard_optimizer": options.shard_optimizer}
    workers = sum(options.replicas) or options.stages
    return raypipe.PipelineTrainer(
        model(pause_s, options),
        loss_fn=functional.cross_entropy,
        optimizer=OPTIMIZERS[options.optimizer],
        lr_scheduler=decay,
        train_data=data(),
        pipeline=raypipe.PipelineConfig(**fields | dict(options.set)),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    )  # fmt: skip


def disturbed(folder: Path, lab: Hosts | None, options: argparse.Namespace, kinds: list[str]) -> dict[str, Any]:
    """Train, disturb, stop; return figures of the run, and its last checkpoint in "checkpoint"."""
    dice = random.Random(options.seed)
    deadline_s = time.monotonic() + options.limit
    before, shm = ours(), shared_memory()
    handle = trainer(folder, "disturbed", options, STEP_S / 4).start(MOST_STEPS)
    chaos = Faults(handle, folder / "disturbed", lab, dice, deadline_s, options.replicas)
    found: dict[str, Any] = {"ended": "after the last fault"}
    try:
        while handle.status().step < FIRST_STEPS:
            time.sleep(0.05)
        for kind in kinds:
            chaos.strike(kind)
    except (LimitReachedError, RaypipeError, RuntimeError) as error:
        found["ended"] = f"{type(error).__name__}: {error}"
    try:
        handle.stop()
        result = handle.wait(timeout_s=END_S)
        found |= {"checkpoint": result.checkpoint, "steps": handle.status().step}
    except (RaypipeError, TimeoutError) as error:
        found["ended"] += f"; and then {type(error).__name__}: {error}"
    finally:
        handle.close()
    return found | figures_of(chaos, folder / "disturbed") | {"left_behind": left_behind(before, shm, lab)}


def figures_of(chaos: Faults, folder: Path) -> dict[str, Any]:
    """Compute figures from the faults and the run's events."""
    done = [fault for fault in chaos.done if fault.seconds]
    recoveries = events(folder, "recovery")
    seconds = [event["seconds"] for event in recoveries]
    pauses = [fault.seconds for fault in done]
    lost = [fault.pause_s for fault in done if fault.pause_s]
    back = [event for event in recoveries if event["kind"] == "roll back"]
    sources = Counter("memory" if "memory" in event["reason"] else "checkpoint" for event in back)
    return {
        "faults": dict(Counter(fault.kind for fault in done)),
        "failures": len(events(folder, "failure")),
        "recoveries": len(recoveries),
        "from_memory": sources["memory"],
        "from_checkpoint": sources["checkpoint"],
        "takeovers": sum("step" in event for event in events(folder, "take over")),
        "began_anew": len(events(folder, "not taken over")),
        "moves": len(events(folder, "move")),
        "redone_steps": sum(event["redone_steps"] for event in recoveries),
        "recovery_seconds_p50": median(seconds) if seconds else 0.0,
        "recovery_seconds_max": max(seconds, default=0.0),
        "pause_seconds_p50": round(median(pauses), 2) if pauses else 0.0,
        "pause_seconds_max": round(max(pauses, default=0.0), 2),
        "regroups": len(events(folder, "regroup")),
        "joins": len(events(folder, "join")),
        "rollbacks": len(back),
        "replica_pause_seconds_p50": round(median(lost), 3) if lost else 0.0,
        "replica_pause_seconds_max": round(max(lost, default=0.0), 3),
        "survivors_kept": sum(fault.kept for fault in done),
        "survivors_lost": sum(fault.lost for fault in done),
    }


def left_behind(before: Any, shm: set[str], lab: Hosts | None) -> dict[str, Any]:
    """Find remains of the run on the cluster and on this machine, after a grace time."""
    deadline_s = time.monotonic() + GONE_S
    while (ours() != before or processes_of_runs(lab)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    after = ours()
    found = {
        "actors": sorted(after.drivers - before.drivers),
        "placement_groups": sorted(after.groups - before.groups),
        "cpus": max(0.0, after.cpus - before.cpus),
        "processes": processes_of_runs(lab),
        "shared_memory": sorted(shared_memory() - shm),
    }
    return {what: left for what, left in found.items() if left}


def processes_of_runs(lab: Hosts | None) -> list[str]:
    """List commands of our processes that still run; Ray lists an actor as dead before its process has ended."""
    known: set[int] = set()
    running = [c for c in survivors(os.getpid(), known, 0.0).values() if any(name in c for name in OURS)]
    if lab is not None:
        running += [name for host in lab.workers for name in OURS for _ in lab.processes(host, name.encode())]
    return running


def shared_memory() -> set[str]:
    """Find shared memory files that no process has mapped."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return {path.name for path in Path("/dev/shm").glob("*") if not path.name.startswith("sem.")} - used


def compared(folder: Path, found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Compare the run with its undisturbed twin."""
    twin = trainer(folder, "undisturbed", options, 0.0).fit(found["steps"], local=True, progress=False)
    rows = [pq.read_table(folder / name / "metrics.parquet").sort_by("step").to_pydict() for name in TWINS]
    first, second = raypipe.load_state_dict(found.pop("checkpoint")), raypipe.load_state_dict(twin.checkpoint)
    steps = Counter(rows[0]["step"])
    return {
        "lost_steps": sum(steps[step] != 1 for step in range(found["steps"])),
        # As text, because the norm of a step that fp16 skips is NaN, which does not equal itself.
        "same_losses": all(
            str(rows[0][name]) == str(rows[1][name]) for name in ("step", "loss", "grad_norm", "samples")
        ),
        "equal": first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first),
    }


TWINS = ("disturbed", "undisturbed")
NOTHING = {"equal": False, "same_losses": False, "lost_steps": 0}
"""Outcome of a run that has no step to compare."""


@contextlib.contextmanager
def cluster(options: argparse.Namespace) -> Iterator[Hosts | None]:
    """Start Ray, on hosts of its own if the kinds need them."""
    quiet: dict[str, Any] = {"namespace": "raypipe", "log_to_driver": False, "logging_level": "ERROR"}
    with contextlib.ExitStack() as ends:
        workers = sum(options.replicas) or options.stages
        if set(options.kinds) <= {*ANYWHERE, "replica"}:
            home = ends.enter_context(private_cluster())  # tries again if Ray gives up, as on a busy machine
            home.start(cpus=workers + 1, environment=PATIENCE)
            ends.callback(ray.shutdown)
            ray.init(address=home.address, **quiet)
            yield None
            return
        lab = ends.enter_context(hosts(workers + 1))
        ends.callback(ray.shutdown)
        ray.init(address=lab.address, _node_ip_address=lab.address.split(":")[0], **quiet)
        yield lab


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 32), help="of the choices; random if left out"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="all that can be done here if left out")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--replicas", type=int, nargs="+", default=[], help="of each stage; of these one is killed")
    parser.add_argument("--shard-optimizer", action="store_true", help="replicas share out the state of theirs")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--codec", default="none", help="of messages both ways")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="muon: of matrices, the rest by adamw")
    parser.add_argument("--set", nargs="+", type=field, default=[], metavar="FIELD=VALUE", help="of PipelineConfig")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no fault is waited for")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which stay there")
    options = parser.parse_args()
    if options.replicas:
        options.stages, options.kinds = len(options.replicas), options.kinds or ["replica"]
    if options.kinds is None:
        why_not = missing()
        options.kinds = list(ANYWHERE if why_not else KINDS[:-1])
        print(f"no hosts can be lost here: {why_not}" if why_not else "all kinds of faults", flush=True)
    return options


def main() -> int:
    """Run, disturb, compare."""
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # networks and raylets end with this process
    kinds = (options.kinds * (1 + options.faults // len(options.kinds)))[: options.faults]
    random.Random(options.seed).shuffle(kinds)
    print(
        f"seed {options.seed}, {options.faults} faults, {options.schedule}, {options.optimizer}, "
        f"codec {options.codec}, {dict(options.set)}; {machine_line()}",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = options.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        with cluster(options) as lab:
            found = disturbed(folder, lab, options, kinds)
        figures = {**found, **(compared(folder, found, options) if found.get("steps") else NOTHING)}
    figures.pop("checkpoint", None)
    print(json.dumps({"check": "chaos", "seed": options.seed, "load": os.getloadavg()[0], "figures": figures}))
    good = figures["equal"] and figures["same_losses"] and not figures["lost_steps"] and not figures["left_behind"]
    if not good or (options.kinds == ["replica"] and figures["rollbacks"] and not options.shard_optimizer):
        return 1
    return 0 if sum(figures["faults"].values()) == options.faults else 2


if __name__ == "__main__":
    sys.exit(main())

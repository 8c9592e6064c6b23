"""Faults at random moments of one run: it must end with the parameters of an undisturbed one, and leave nothing behind.

    python jobs/check/chaos.py --faults 50 --seed 7

    sigkill     a stage's process is killed
    sigstop     a stage's process is stopped, and never goes on
    again       a second stage is killed while the run recovers from the first

Every fault is printed with its step and moment, and the seed makes the same choices again. The last line is JSON:
recoveries, steps done again, seconds of recovery (median and largest), and whether parameters were equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.nn import functional
from torch.utils.data import TensorDataset

import raypipe
from jobs.lib.machine import machine_line

KINDS = ("sigkill", "sigstop", "again")
STEP_S = 0.02
STEPS_PER_FAULT = 60
WAIT_S = 180.0


class Pause(torch.nn.Module):
    """Sleeps in every forward, so that a step takes long enough to be hit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_S / 4)
        return x


def model() -> torch.nn.Module:
    """Dropout and BatchNorm: randomness and buffers that a forward changes."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.1), Pause(), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(512, 32, generator=made), torch.randint(0, 4, (512,), generator=made))


def adamw(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3)


def trainer(folder: Path, name: str, asked: argparse.Namespace) -> raypipe.PipelineTrainer:
    """The run; its undisturbed twin has another name."""
    return raypipe.PipelineTrainer(
        model(),
        loss_fn=functional.cross_entropy,
        optimizer=adamw,
        train_data=data(),
        pipeline=raypipe.PipelineConfig(
            num_stages=asked.stages,
            minibatch_size=32,
            num_microbatches=4,
            partitioner="parameters",
            schedule=asked.schedule,
            checkpoint_interval_steps=200,
        ),
        scaling_config=ScalingConfig(num_workers=asked.stages),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    )


class Chaos:
    """Faults one after the other, on a run that is started."""

    def __init__(self, handle: raypipe.RunHandle, folder: Path, kinds: Sequence[str], dice: random.Random) -> None:
        self._handle, self._events, self._kinds, self._dice = handle, folder / "events.jsonl", kinds, dice
        self._begin_s = time.monotonic()

    def events(self, decision: str) -> list[dict[str, Any]]:
        lines = self._events.read_text().splitlines() if self._events.exists() else []
        return [event for event in map(json.loads, lines) if event["decision"] == decision]

    def strike(self) -> None:
        """One fault, and wait until the run trains again."""
        kind = self._dice.choice(self._kinds)
        time.sleep(self._dice.uniform(0.2, 1.0))
        before = len(self.events("recovery"))
        victim = self._hit(signal.SIGSTOP if kind == "sigstop" else signal.SIGKILL)
        if kind == "again":
            self._until(lambda: len(self.events("failure")) > before, "the failure was noticed")
            time.sleep(self._dice.uniform(0.0, 2.0))
            self._hit(signal.SIGKILL, besides=victim)
        self._until(lambda: len(self.events("recovery")) > before, "the run had recovered")

    def _hit(self, number: signal.Signals, besides: int = 0) -> int:
        status = self._handle.status()
        victims = [stage["process"] for stage in status.stages if stage["process"] != besides]
        process = self._dice.choice(victims)
        print(f"{time.monotonic() - self._begin_s:7.2f} s, step {status.step}: {number.name} to {process}", flush=True)
        os.kill(process, number)
        return int(process)

    def _until(self, done: Any, what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not done():
            status = self._handle.status()
            assert status.state in ("running", "starting"), status
            assert time.monotonic() < deadline_s, f"{WAIT_S:g} s passed before {what}: {status}"
            time.sleep(0.05)


def equal(one: str, other: str) -> bool:
    first, second = raypipe.load_state_dict(one), raypipe.load_state_dict(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def main() -> int:
    """Run, disturb, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=None, help="of the choices; random where it is not given")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--schedule", default="1f1b")
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.randrange(1 << 32)
    num_steps = STEPS_PER_FAULT * (asked.faults + 1)
    print(f"seed {seed}, {num_steps} steps, {asked.faults} faults of {', '.join(asked.kinds)}; {machine_line()}")
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        handle = trainer(folder, "disturbed", asked).start(num_steps)
        try:
            chaos = Chaos(handle, folder / "disturbed", asked.kinds, random.Random(seed))
            while handle.status().step < STEPS_PER_FAULT // 4:
                time.sleep(0.05)
            for _ in range(asked.faults):
                chaos.strike()
            result = handle.wait()
        finally:
            handle.close()
        twin = trainer(folder, "undisturbed", asked).fit(num_steps, local=True, progress=False)
        recoveries = chaos.events("recovery")
        seconds = [event["seconds"] for event in recoveries]
        figures = {
            "faults": asked.faults,
            "failures": len(chaos.events("failure")),
            "recoveries": len(recoveries),
            "from_memory": sum("memory" in event["reason"] for event in recoveries),
            "recovery_seconds_p50": statistics.median(seconds) if seconds else 0.0,
            "recovery_seconds_max": max(seconds, default=0.0),
            "redone_steps": sum(event["redone_steps"] for event in recoveries),
            "equal": equal(result.checkpoint, twin.checkpoint),
        }
    print(json.dumps({"check": "chaos", "seed": seed, "figures": figures}))
    return 0 if figures["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())

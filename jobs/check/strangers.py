"""Strangers at the link ports of a training run: no step may be lost, and its stages may not grow.

    python jobs/check/strangers.py --strangers 10000 --kills 1 --seed 7

Garbage, silence, wrong secrets and replayed handshakes. A stage accepts connections only while links are opened, so
that most strangers find a full queue; therefore a stage is killed now and then, and the links are opened anew in the
middle of the crowd. The last line is JSON: connections by kind, how many of them found room, steps that were lost, how
much the stages grew while nobody came and between two kills (resident memory, descriptors, threads), seconds of the
recoveries, and whether parameters were equal to an undisturbed run's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.nn import functional

import raypipe
from jobs.lib.machine import machine_line
from jobs.lib.strangers import Strangers
from raypipe.engine.setup import RunSetup
from raypipe.runtime.links.handshake import Hello, run_digest

STAGES = 2
WAIT_S = 300.0
PAUSE_S = 0.005


class Overheard(raypipe.PipelineTrainer):
    """A trainer whose run's secret is known, for handshakes to replay."""

    setup: RunSetup

    def _blueprint(self, *arguments: Any, **more: Any) -> Any:
        made = super()._blueprint(*arguments, **more)
        self.setup = made.setup
        return made


class Pause(torch.nn.Module):
    """Sleeps in every forward, so that the run lasts until all strangers were there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return x


def trainer(folder: Path, name: str, ports: tuple[int, int]) -> Overheard:
    """The run; its undisturbed twin has another name."""
    torch.manual_seed(0)
    made = torch.Generator().manual_seed(1)
    layers = [torch.nn.Linear(32, 32), Pause(), torch.nn.Dropout(0.1), torch.nn.Tanh()]
    return Overheard(
        torch.nn.Sequential(*layers, torch.nn.Linear(32, 32), Pause(), torch.nn.Linear(32, 4)),
        loss_fn=functional.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        train_data=torch.utils.data.TensorDataset(
            torch.randn(256, 32, generator=made), torch.randint(0, 4, (256,), generator=made)
        ),
        pipeline=raypipe.PipelineConfig(
            num_stages=STAGES, minibatch_size=16, num_microbatches=4, partitioner="parameters", link_ports=ports
        ),
        scaling_config=ScalingConfig(num_workers=STAGES),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    )


def footprint(process: int) -> dict[str, int]:
    """Resident bytes, descriptors and threads of a process."""
    folder = Path("/proc") / str(process)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "resident_bytes": int(status["VmRSS"].split()[0]) << 10,
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
    }


class Crowd:
    """All strangers, one after the other, and the kills between them."""

    def __init__(
        self, handle: raypipe.RunHandle, strangers: Strangers, asked: argparse.Namespace, folder: Path
    ) -> None:
        self._handle, self._strangers, self._asked, self._folder = handle, strangers, asked, folder
        self._dice = random.Random(asked.seed)
        self._begin_s = time.monotonic()
        self.growth: dict[str, dict[str, int]] = {}

    def come(self) -> None:
        """As often as there are kills and once more; at first, for as long, nobody comes."""
        part = self._asked.strangers // (self._asked.kills + 1)
        self._grow("alone", part, 0)
        for turn in range(self._asked.kills + 1):
            self._grow(f"part {turn + 1}", part, 20)
            if turn < self._asked.kills:
                self._kill(self._dice.choice([stage["process"] for stage in self._handle.status().stages]))

    def _grow(self, name: str, part: int, at_once: int) -> None:
        """Note the most that a stage grows while a part of the strangers comes."""
        processes = [stage["process"] for stage in self._handle.status().stages]
        before = [footprint(process) for process in processes]
        for _ in range(part // 20):
            self._strangers.visit(at_once)
            time.sleep(self._asked.pause_s)
        after = [footprint(process) for process in processes]
        self.growth[name] = {key: max(b[key] - a[key] for a, b in zip(before, after, strict=True)) for key in before[0]}

    def recoveries(self) -> list[dict[str, Any]]:
        path = self._folder / "events.jsonl"
        events = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [event for event in events if event["decision"] == "recovery"]

    def _kill(self, victim: int) -> None:
        """Kill a stage, and go on coming until the run has recovered."""
        step, recovered = self._handle.status().step, len(self.recoveries())
        print(f"{time.monotonic() - self._begin_s:7.2f} s, step {step}: SIGKILL to {victim}", flush=True)
        os.kill(victim, signal.SIGKILL)
        deadline_s = time.monotonic() + WAIT_S
        while len(self.recoveries()) == recovered:
            assert time.monotonic() < deadline_s, f"not recovered after {WAIT_S:g} s: {self._handle.status()}"
            self._strangers.visit(5)
            time.sleep(self._asked.pause_s)


def main() -> int:
    """Train, let the strangers come, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strangers", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--pause-s", type=float, default=0.05, help="between two groups of 20 strangers")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--low-port", type=int, default=27_000, help="the first of ten ports for the links")
    asked = parser.parse_args()
    ports = (asked.low_port, asked.low_port + 9)
    print(f"seed {asked.seed}, {asked.strangers} strangers, {asked.kills} kills; {machine_line()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="strangers-") as name:
        folder = Path(name)
        made = trainer(folder, "disturbed", ports)
        handle = made.start(asked.steps)
        try:
            while handle.status().step < 50:
                time.sleep(0.05)
            run, host = run_digest(made.setup.run_id), ray.util.get_node_ip_address()
            hellos = [Hello(run, links, me, 1 - me, 4) for links in range(2 * asked.kills + 2) for me in (0, 1)]
            places = [(host, port) for port in range(ports[0], ports[0] + STAGES + asked.kills)]
            strangers = Strangers(places, hellos, made.setup.secret, asked.seed)
            crowd = Crowd(handle, strangers, asked, folder / "disturbed")
            crowd.come()
            step = handle.status().step
            strangers.leave()
            result = handle.wait()
        finally:
            handle.close()
        twin = trainer(folder, "undisturbed", ports).fit(asked.steps, local=True, progress=False)
        one, other = raypipe.load_state_dict(result.checkpoint), raypipe.load_state_dict(twin.checkpoint)
        figures = {
            "tried": dict(strangers.tried),
            "connected": strangers.connected,
            "last_stranger_at_step": step,
            "steps": asked.steps,
            "lost_steps": asked.steps - len({record.step for record in result.records}),
            "recovery_seconds": [event["seconds"] for event in crowd.recoveries()],
            "growth": crowd.growth,
            "equal": one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one),
        }
    print(json.dumps({"check": "strangers", "seed": asked.seed, "figures": figures}))
    return 0 if figures["equal"] and not figures["lost_steps"] else 1


if __name__ == "__main__":
    sys.exit(main())

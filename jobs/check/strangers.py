"""Strangers at the link ports of a training run: no step may be lost, and its stages may not grow.

    python jobs/check/strangers.py                                  10,000 of them, and two kills
    python jobs/check/strangers.py --strangers 600 --kills 1        a quick one

Garbage, silence, wrong secrets and replayed handshakes. A stage accepts connections only while links are opened; else
up to 129 wait in the system's queue, and later ones find it full. So only accepted connections count, and links are
opened again and again among the strangers until the requested number of them has connected:

    alone     the run is resized to its present number of stages, repeatedly, without strangers
    crowd     the same among strangers, until enough have connected; the processes stay the same
    kills     stages are killed among them, each when the run has done some steps after the last recovery

The exit status is 0 if enough connected, no step was lost, parameters equal those of an undisturbed run, and no stage
grew by the crowd: no sample is more than 5 MiB above the first, apart from the growth of as many resizes alone, and the
last ones have no more descriptors or threads than the first (jobs/lib/growth.py). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.nn import functional

import raypipe
from jobs.lib.growth import Growth, Look, growth_of
from jobs.lib.machine import machine_line
from jobs.lib.strangers import Strangers
from raypipe.engine.setup import RunSetup
from raypipe.runtime.transport.handshake import LinkIdentity, run_digest

STAGES = 2
FIRST_STEPS = 50
MOST_STEPS = 1_000_000
WAIT_S = 300.0
PAUSE_S = 0.005
WARM = 3
"""Resizes before the first look: copies of the state under several plans, and what is imported for the first one."""
ALONE = 10
TOLD_EVERY = 5
"""Looks between two printed lines."""
STEPS_BETWEEN = 50
"""Steps after a kill. The loss of a worker together with the holder of its copy is tested by chaos.py."""
AT_ONCE = 20


class Overheard(raypipe.PipelineTrainer):
    """A trainer whose run's secret is known, for handshakes to replay."""

    setup: RunSetup

    def _blueprint(self, *arguments: Any, **more: Any) -> Any:
        made = super()._blueprint(*arguments, **more)
        self.setup = made.setup
        return made


class Pause(torch.nn.Module):
    """Sleeps in every forward, so that steps do not come faster than a person's."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def trainer(folder: Path, name: str, ports: tuple[int, int], pause_s: float) -> Overheard:
    """Make the trainer of the run; its undisturbed twin has another name, and no pauses."""
    torch.manual_seed(0)
    made = torch.Generator().manual_seed(1)
    layers = [torch.nn.Linear(32, 32), Pause(pause_s), torch.nn.Dropout(0.1), torch.nn.Tanh()]
    return Overheard(
        torch.nn.Sequential(*layers, torch.nn.Linear(32, 32), Pause(pause_s), torch.nn.Linear(32, 4)),
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


class Crowd:
    """Strangers that connect without end, in a thread, while links are opened again and again."""

    def __init__(
        self, handle: raypipe.RunHandle, strangers: Strangers, options: argparse.Namespace, folder: Path
    ) -> None:
        self._handle, self._strangers, self._asked, self._folder = handle, strangers, options, folder
        self._dice = random.Random(options.seed)
        self._over = threading.Event()
        self.resizes = self.step = 0

    def alone(self) -> dict[str, Growth]:
        """Measure growth of the stages without strangers; the first resizes are not counted."""
        for _ in range(WARM):
            self._open_links_anew()
        return self._grown(lambda count: count < ALONE)

    def crowd(self) -> dict[str, Growth]:
        """Measure growth until enough strangers have connected, or the time is over."""
        deadline_s = time.monotonic() + self._asked.limit_s
        return self._grown(
            lambda count: (
                count < 3 or (self._strangers.connected < self._asked.strangers and time.monotonic() < deadline_s)
            )
        )

    def __enter__(self) -> Crowd:
        self._thread = threading.Thread(target=self._come, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join(WAIT_S)
        self._strangers.leave()

    def _come(self) -> None:
        while not self._over.wait(self._asked.pause_s):
            self._strangers.visit(AT_ONCE)

    def _grown(self, goes_on: Callable[[int], bool]) -> dict[str, Growth]:
        """Compute growth by stage, over looks between resizes."""
        processes = {f"stage {at}": one["process"] for at, one in enumerate(self._handle.status().stages)}
        looks = [{name: Look.at(process) for name, process in processes.items()}]
        while goes_on(len(looks) - 1):
            self._open_links_anew()
            looks.append({name: Look.at(process) for name, process in processes.items()})
            if len(looks) % TOLD_EVERY == 0:
                said = ", ".join(f"{name} {look.resident_bytes / 2**20:.1f} MiB" for name, look in looks[-1].items())
                print(f"{self.resizes} resizes, {self._strangers.connected} connected: {said}", flush=True)
        return {name: growth_of([(at, look[name]) for at, look in enumerate(looks)]) for name in processes}

    def _open_links_anew(self) -> None:
        self._handle.resize(STAGES)
        self.resizes += 1

    def recoveries(self) -> list[dict[str, Any]]:
        path = self._folder / "events.jsonl"
        events = map(json.loads, path.read_text().splitlines() if path.exists() else [])
        return [event for event in events if event["decision"] == "recovery"]

    def kill(self) -> None:
        """Kill a stage, and wait until the run has recovered and done steps enough for new copies of its state."""
        status, recovered = self._handle.status(), len(self.recoveries())
        victim = self._dice.choice([stage["process"] for stage in status.stages])
        print(f"step {status.step}: SIGKILL to {victim}", flush=True)
        os.kill(victim, signal.SIGKILL)
        self._wait(lambda: len(self.recoveries()) > recovered, "it had recovered")
        self._wait(lambda: self._handle.status().step >= status.step + STEPS_BETWEEN, f"{STEPS_BETWEEN} steps more")
        self.step = self._handle.status().step

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not done():
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{WAIT_S:g} s passed before {what}: {self._handle.status()}")
            time.sleep(0.1)


def flat(alone: Growth, crowd: Growth, resizes: int) -> bool:
    """Return True if a stage did not grow by the crowd; growth by resizes alone is subtracted.

    Args:
        alone, crowd: by resizes.
    """
    by_resizes = round(max(0.0, alone.slope_bytes) * resizes)
    return crowd._replace(most_bytes=crowd.most_bytes - by_resizes).flat


def main() -> int:
    """Train, let the strangers come, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strangers", type=int, default=10_000, help="that have to be connected")
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--pause-s", type=float, default=0.02, help=f"between two groups of {AT_ONCE} strangers")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for so many of them to come")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--low-port", type=int, default=27_000, help="the first of ten ports for the links")
    options = parser.parse_args()
    ports = (options.low_port, options.low_port + 9)
    print(f"seed {options.seed}, {options.strangers} strangers, {options.kills} kills; {machine_line()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="strangers-") as name:
        folder = Path(name)
        made = trainer(folder, "disturbed", ports, PAUSE_S)
        handle = made.start(MOST_STEPS)
        try:
            deadline_s = time.monotonic() + WAIT_S
            while handle.status().step < FIRST_STEPS:
                if time.monotonic() > deadline_s:
                    raise SystemExit(f"not at step {FIRST_STEPS} after {WAIT_S:g} s: {handle.status()}")
                time.sleep(0.05)
            run, host = run_digest(made.setup.run_id), ray.util.get_node_ip_address()
            hellos = [LinkIdentity(run, links, me, 1 - me, 4) for links in range(100) for me in (0, 1)]
            places = [(host, port) for port in range(ports[0], ports[0] + STAGES)]
            strangers = Strangers(places, hellos, made.setup.secret, options.seed)
            crowd = Crowd(handle, strangers, options, folder / "disturbed")
            growth = {"alone": crowd.alone()}
            print(f"alone: {growth['alone']}", flush=True)
            with crowd:
                before = crowd.resizes
                growth["crowd"] = crowd.crowd()
                in_crowd = crowd.resizes - before
                print(f"{strangers.connected} connected, {crowd.resizes} resizes: {growth['crowd']}", flush=True)
                for _ in range(options.kills):
                    crowd.kill()
            handle.stop()
            result = handle.wait(timeout_s=WAIT_S)
            steps = handle.status().step
        finally:
            handle.close()
        twin = trainer(folder, "undisturbed", ports, 0.0).fit(steps, local=True, progress=False)
        one, other = raypipe.load_state_dict(result.checkpoint), raypipe.load_state_dict(twin.checkpoint)
        figures = {
            "tried": dict(strangers.tried),
            "connected": strangers.connected,
            "enough": strangers.connected >= options.strangers,
            "resizes": crowd.resizes,
            "steps": steps,
            "lost_steps": max(steps, crowd.step) - len(set(result.metrics_dataframe["step"])),
            "recoveries": [[event["kind"], event["reason"], event["seconds"]] for event in crowd.recoveries()],
            "growth": {part: {name: grown._asdict() for name, grown in of.items()} for part, of in growth.items()},
            "flat": all(flat(growth["alone"][name], grown, in_crowd) for name, grown in growth["crowd"].items()),
            "equal": one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one),
        }
    print(json.dumps({"check": "strangers", "seed": options.seed, "figures": figures}))
    good = figures["enough"] and figures["flat"] and figures["equal"] and not figures["lost_steps"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

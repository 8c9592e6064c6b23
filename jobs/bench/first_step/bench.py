"""Seconds of a whole process that trains one step on two workers: ours and Ray Train's TorchTrainer, in turns.

    cold    ours with an empty profile cache       warm    ours with what the run before it has kept

``cold_*`` and ``warm_*`` are the median over rounds of our seconds over TorchTrainer's in the same round. In ours the
planner chooses the cut and the micro-batches; TorchTrainer gives each worker half of the mini-batch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.lib.common import Bench, median

NETS = ("readme", "resnet50", "gpt2")
LIMIT_S = 900.0
Round = dict[str, float]


@dataclass(frozen=True)
class Settings:
    """Nets, and rounds over all of them."""

    nets: tuple[str, ...] = NETS
    rounds: int = 3


BENCH = Bench("first_step", __doc__, settings=Settings(), quick=Settings(NETS[:1], 1))


def process_s(script: str, net: str, folder: Path, cache: Path) -> float:
    """Measure the seconds from start to end of one process.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, str(Path(__file__).with_name(script)), net, str(folder)]
    environment = {**os.environ, "RAYPIPE_CACHE_DIR": str(cache)}
    begin_s = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(command, env=environment, stdout=said, stderr=said, timeout=LIMIT_S, check=False)
        if done.returncode:
            said.seek(0)
            sys.stderr.write(said.read().decode()[-3000:])
            raise subprocess.CalledProcessError(done.returncode, command)
    return time.perf_counter() - begin_s


def one_round(net: str) -> Round:
    """Run cold, TorchTrainer, warm: TorchTrainer runs between our two, within the same minutes."""
    with tempfile.TemporaryDirectory(prefix="first-step-") as name:
        folder = Path(name)
        cache = folder / "cache"
        return {
            "cold": process_s("ours.py", net, folder / "cold", cache),
            "torch_trainer": process_s("ray_train.py", net, folder / "peer", cache),
            "warm": process_s("ours.py", net, folder / "warm", cache),
        }


def figures_of(net: str, rounds: Sequence[Round]) -> dict[str, float]:
    """Compute ratios of each round, then medians; and the median seconds."""
    ratios = {way: median(one[way] / one["torch_trainer"] for one in rounds) for way in ("cold", "warm")}
    seconds = {way: median(one[way] for one in rounds) for way in ("cold", "warm", "torch_trainer")}
    return {f"{way}_{net}": ratio for way, ratio in ratios.items()} | {
        f"{way}_seconds_{net}": took_s for way, took_s in seconds.items()
    }


def main() -> int:
    """Measure round after round over all nets."""
    run = BENCH.begin()
    rounds: dict[str, list[Round]] = {net: [] for net in run.settings.nets}
    for _, net in run.turns(rounds, run.settings.rounds):
        rounds[net].append(one_round(net))
        run.note(f"{net}: {rounds[net][-1]}")
    for net, of_net in rounds.items():
        run.figures |= figures_of(net, of_net)
    run.raw["seconds"] = rounds
    run.end()
    return 0

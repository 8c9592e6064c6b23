"""Peers that recover from a lost process, measured in the same way: Ray Train v2 and torchft, both with whole replicas.

A worker is killed; seconds are from then to the end of the next step, less an undisturbed one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from jobs.bench.recovery.nets import until
from jobs.bench.recovery.peer_net import Said, steps_said
from tests import processes

__all__ = ["TIMEOUTS", "PeerTrial", "ray_train", "torchft"]

HERE = Path(__file__).parent
START_S = 240.0
HEALTH_CHECK_S = 0.5
TIMEOUTS = (
    f"Ray Train looks every {HEALTH_CHECK_S:g} s (RAY_TRAIN_HEALTH_CHECK_INTERVAL_S, 2 by default); torchft's process "
    "group waits 5 s and its manager 10 s, as in its example, its lighthouse 5 s for a heartbeat and 2 s for who joins"
)
STEPS_BETWEEN, STEPS_BEHIND = 25, 12


class PeerTrial(NamedTuple):
    """One killed worker; ``redone`` are steps that were done again."""

    seconds: float
    step_s: float
    redone: int


def ray_train(size_mb: float, count: int) -> list[PeerTrial]:
    """Kill the second worker of an elastic TorchTrainer on two processors, again and again."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        environment = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(HEALTH_CHECK_S), "RAY_TRAIN_V2_ENABLED": "1"}
        with started(folder, environment, "ray_train.py", str(size_mb), name):
            gone = set[int]()
            return [killed(folder / "steps", gone) for _ in range(count)]


def torchft(size_mb: float, count: int) -> list[PeerTrial] | str:
    """Kill one of two torchft replicas and start it again, ``count`` times.

    Returns:
        Trials; or the reason why they cannot be made, if torchft is not installed.
    """
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed here: pip install torchft==0.2.0"
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000)
    found = []
    try:
        with tempfile.TemporaryDirectory(prefix="recovery-") as name, contextlib.ExitStack() as ends:
            address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2].rstrip('/')}"

            def replica(number: int) -> None:
                ends.enter_context(
                    started(Path(name), {}, "torchft_replica.py", str(number), address, str(size_mb), name)
                )

            gone = set[int]()
            replica(0)
            replica(1)
            for _ in range(count):
                found.append(killed(Path(name) / "steps", gone))
                replica(1)
    finally:
        lighthouse.shutdown()
    return found


@contextlib.contextmanager
def started(folder: Path, environment: dict[str, str], script: str, *arguments: str) -> Iterator[None]:
    """Start one of our scripts as a process; end it with all its children."""
    with (folder / "said").open("ab") as said:
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            env={**os.environ, **environment}, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    except BaseException:
        sys.stderr.write((folder / "said").read_text(errors="replace")[-3000:])
        raise
    finally:
        below = processes.descendants(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        processes.end({pid: command for pid, command in below.items() if processes.alive(pid)})


def killed(file: Path, gone: set[int]) -> PeerTrial:
    """Wait until two workers train, kill the second, and wait for the next step.

    A survivor may end the step that it is in before it notices: what counts is the end of the longest pause.

    Args:
        gone: processes that were killed so far; one more afterwards.
    """
    until(lambda: step_of_both(file, gone) is not None, "two workers trained", START_S)
    step_s = step_of_both(file, gone)
    assert step_s is not None
    before = steps_said(file)
    victim = next(line.process for line in reversed(before) if line.rank == 1)
    begin_s = time.time()
    os.kill(victim, signal.SIGKILL)
    gone.add(victim)

    def after() -> list[Said]:
        return [line for line in steps_said(file) if line.at_s > begin_s and line.process != victim]

    until(lambda: len(after()) >= STEPS_BEHIND, "a worker trained on", START_S)
    ends_s = [begin_s, *(line.at_s for line in after()[:STEPS_BEHIND])]
    gaps = [later - earlier for earlier, later in itertools.pairwise(ends_s)]
    at = gaps.index(max(gaps))
    first = after()[at]
    reached = max(line.step for line in steps_said(file) if line.at_s < first.at_s)
    trial = PeerTrial(first.at_s - begin_s - step_s, step_s, max(0, reached - first.step + 1))
    print(f"  {trial.seconds:.2f} s, {trial.redone} steps of {step_s:.3f} s again", flush=True)
    return trial


def step_of_both(file: Path, gone: Collection[int] = ()) -> float | None:
    """Compute seconds of a step of two workers that train together; None if they do not, or not for long enough.

    Args:
        gone: processes that have ended, and may still have lines.
    """
    last = steps_said(file)[-3 * STEPS_BETWEEN :]
    ends_s = {rank: [line.at_s for line in last if line.rank == rank] for rank in (0, 1)}
    there = {line.process for line in last}
    if min(map(len, ends_s.values())) < STEPS_BETWEEN or len(there) != 2 or not there.isdisjoint(gone):
        return None
    return median(later - earlier for earlier, later in itertools.pairwise(ends_s[0]))

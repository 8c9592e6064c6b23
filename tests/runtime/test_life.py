"""The life of a run on Ray: start, watch, stop, detach, attach, resume, and what is left when somebody dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import ray

import raypipe
from raypipe.engine.checkpoint import find_checkpoint
from raypipe.engine.storage import Place
from raypipe.errors import ConfigError, StageError
from tests import processes
from tests.engine.test_resume import SAVED, STEPS, outcome, trainer
from tests.exactness import same_bits

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        namespace="raypipe",
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition not reached"
        time.sleep(0.05)


def nothing_is_left() -> bool:
    """No actor of ours and no placement group, by the cluster's own account."""
    actors = [a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith("raypipe/")]
    groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    return not actors and not groups and ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]


def test_a_run_goes_on_at_another_number_of_stages(cluster: None, tmp_path: Path) -> None:
    """Every other pair of numbers: tests/engine/test_resume.py."""
    trainer("cnn", tmp_path, "whole", 2).fit(num_steps=STEPS, local=True, progress=False)
    trainer("cnn", tmp_path, "run", 2).fit(num_steps=SAVED, progress=False)
    trainer("cnn", tmp_path, "run", 3).fit(num_steps=STEPS, progress=False)
    (rows, state), (expected_rows, expected) = outcome(tmp_path / "run"), outcome(tmp_path / "whole")
    assert rows == expected_rows
    assert [n for n in state if not same_bits(state[n], expected[n])] == []
    wait_until(nothing_is_left)


def test_start_watch_stop_and_go_on(cluster: None, tmp_path: Path) -> None:
    trainer("mlp", tmp_path, "whole", 2).fit(num_steps=300, local=True, progress=False)
    handle = trainer("mlp", tmp_path, "run", 2).start(num_steps=300)
    seen = raypipe.attach("run")
    wait_until(lambda: seen.status().step >= 5)
    status = seen.status()
    assert status.state == "running"
    assert len(status.stages) == 2
    assert "step" in str(status)
    with pytest.raises(ConfigError, match="run named 'run' is on this cluster"):
        trainer("mlp", tmp_path, "run", 2).start(num_steps=300)
    saved = seen.checkpoint(timeout_s=60)
    assert raypipe.load_state_dict(saved)
    seen.stop("seen enough")
    result = handle.wait(timeout_s=60)
    assert result.stopped == "seen enough"
    assert len(result.records) < 300
    wait_until(nothing_is_left)
    with pytest.raises(ConfigError, match="No run named 'run'"):
        raypipe.attach("run")
    trainer("mlp", tmp_path, "run", 3).fit(num_steps=300, local=True, progress=False)
    (rows, state), (expected_rows, expected) = outcome(tmp_path / "run"), outcome(tmp_path / "whole")
    assert rows == expected_rows
    assert [n for n in state if not same_bits(state[n], expected[n])] == []


def test_the_drivers_death_ends_the_stages(cluster: None, tmp_path: Path) -> None:
    handle = trainer("mlp", tmp_path, "run", 2).start(num_steps=100_000)
    wait_until(lambda: handle.status().step >= 1)
    stages = [member["process"] for member in handle.status().stages]
    ray.kill(ray.get_actor("raypipe/run", namespace="raypipe"))
    with pytest.raises(StageError, match="driver of run 'run' is gone"):
        handle.wait(timeout_s=30)
    wait_until(lambda: not any(processes.alive(pid) for pid in stages), 20.0)
    wait_until(nothing_is_left)


PROGRAM = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, all_threads=True)
from pathlib import Path
from tests.engine.test_resume import trainer
made = trainer("sequential", Path(sys.argv[1]), "run", 2)
print("made", flush=True)
made.fit(num_steps=int(sys.argv[2]), local=sys.argv[3] == "local", progress=False)
"""


def _hear_ctrl_c() -> None:
    """A shell starts what it runs in the background deaf to SIGINT, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def begin(folder: Path, steps: int, where: str) -> subprocess.Popen[str]:
    """A process of its own that trains, once it has said that it begins to."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(steps), where],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=_hear_ctrl_c,
    )  # fmt: skip
    assert program.stdout is not None
    assert program.stdout.readline().strip() == "made"
    return program


def interrupted(folder: Path, steps: int, where: str, number: signal.Signals, wait: Callable[[], object]) -> int:
    """Run it until ``wait`` returns, send the signal; its exit code."""
    program = begin(folder, steps, where)
    try:
        wait()
        program.send_signal(number)
        try:
            _, errors = program.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            program.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            program.kill()
            raise AssertionError(program.communicate()[1]) from None
    finally:
        program.kill()
        program.wait()
    assert "Traceback" not in errors or "KeyboardInterrupt" in errors or "SystemExit" in errors, errors
    return program.returncode


@pytest.fixture
def leftovers() -> Iterator[None]:
    known = set(processes.descendants(os.getpid()))
    yield
    # Ray's agents look for their raylet every 2 s, five times, and then try for a while to tell who is gone too.
    assert processes.survivors(os.getpid(), known, 90.0) == {}


SIGNALS = int(os.environ.get("RAYPIPE_TEST_SIGNALS", "2"))
"""How often a run is interrupted here; the figures in jobs/README.md come from 20."""


@pytest.mark.timeout(300 + 90 * SIGNALS)
@pytest.mark.parametrize("where", ["local", "ray"])
def test_signals_at_any_moment(tmp_path: Path, leftovers: None, where: str) -> None:
    """Interrupted again and again, a run loses no checkpoint and does every step once, like one without a break."""
    steps, chance = 20_000, random.Random(where)
    done, begun_s = 0, 0.0
    events = tmp_path / "run" / "events.jsonl"

    def once_it_trains() -> None:
        nonlocal begun_s
        start_s = time.monotonic()
        wait_until(events.exists)
        begun_s = time.monotonic() - start_s
        time.sleep(0.5)

    for turn in range(SIGNALS):
        number = signal.SIGINT if turn % 3 == 2 else signal.SIGTERM
        # The first one tells how long a run takes to begin here; the others come before that, at it or after it.
        wait = partial(time.sleep, chance.uniform(0.0, 2 * begun_s)) if turn else once_it_trains
        code = interrupted(tmp_path, steps, where, number, wait)
        # 15 is how Ray ends a process that is still connecting to it; the run has not begun then.
        assert code in ((143, 15, -15) if number is signal.SIGTERM else (130, 1, -2))
        found, refused = find_checkpoint(Place.of(tmp_path / "run"))
        assert refused == ()
        now = found.manifest.step if found else 0
        print(f"{number.name}: exit code {code}, steps {done} -> {now}")
        assert now >= max(done, 1)
        done = now
    steps = done + 5
    trainer("sequential", tmp_path, "whole", 2).fit(num_steps=steps, local=True, progress=False)
    trainer("sequential", tmp_path, "run", 1).fit(num_steps=steps, local=True, progress=False)
    (rows, state), (expected_rows, expected) = outcome(tmp_path / "run"), outcome(tmp_path / "whole")
    assert rows == expected_rows
    assert [n for n in state if not same_bits(state[n], expected[n])] == []

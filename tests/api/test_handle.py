"""The life of a run on Ray: start, watch, stop, detach, attach, resume, and what is left when somebody dies."""

from __future__ import annotations

import os
import pty
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray

import raypipe
from raypipe.engine.io.checkpoint import find_checkpoint
from raypipe.engine.io.run_files import read_events
from raypipe.engine.io.storage import Place
from raypipe.errors import ConfigError, StageError
from tests import processes
from tests.exactness import SHAPES, config_of, same_bits
from tests.prepare.test_resume import outcome, trainer, unhurried
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_captures")]

ROOT = Path(__file__).parents[2]


def newest_step(folder: Path) -> int:
    """Of the newest checkpoint that is whole; 0 where there is none."""
    found, _ = find_checkpoint(Place.of(folder))
    return found.manifest.step if found else 0


def test_a_run_is_watched_stopped_and_goes_on_at_another_number_of_stages(cluster: None, tmp_path: Path) -> None:
    """Other pairs of numbers: tests/prepare/test_resume.py. Its second driver is killed, its third a thread."""
    begun = trainer("cnn", tmp_path, "run", 2, optimizer=unhurried).start(num_steps=3000)
    seen = raypipe.attach("run")
    wait_until(lambda: seen.status().step >= 5)
    status = seen.status()
    assert status.state == "running"
    assert len(status.stages) == 2
    assert "step" in str(status)
    with pytest.raises(ConfigError, match="run named 'run' is on this cluster"):
        trainer("cnn", tmp_path, "run", 2).start(num_steps=3000)
    saved = seen.checkpoint(timeout_s=180)
    assert raypipe.load_state_dict(saved)
    seen.stop("seen enough")
    result = begun.wait(timeout_s=180)
    assert result.stopped == "seen enough"
    done = len(result.records)
    assert done < 3000
    with pytest.raises(ConfigError, match="No run named 'run'"):
        raypipe.attach("run")

    often = config_of(SHAPES["ragged-epoch"], 3, "slack", max_grad_norm=0.5, checkpoint_interval_steps=2)
    handle = trainer("cnn", tmp_path, "run", 3, pipeline=often, optimizer=unhurried).start(num_steps=3000)
    wait_until(lambda: newest_step(tmp_path / "run") > done)
    stages = [member["process"] for member in handle.status().stages]
    assert len(stages) == 3
    ray.kill(ray.get_actor("raypipe/run", namespace="raypipe"))
    with pytest.raises(StageError, match="driver of run 'run' is gone"):
        handle.wait(timeout_s=30)
    wait_until(lambda: not any(processes.alive(pid) for pid in stages), 20.0)

    steps = newest_step(tmp_path / "run") + 5
    trainer("cnn", tmp_path, "run", 1).fit(num_steps=steps, local=True, progress=False)
    trainer("cnn", tmp_path, "whole", 2).fit(num_steps=steps, local=True, progress=False)
    (rows, state), (expected_rows, expected) = outcome(tmp_path / "run"), outcome(tmp_path / "whole")
    assert rows == expected_rows
    assert [n for n in state if not same_bits(state[n], expected[n])] == []


PROGRAM = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, all_threads=True)
from pathlib import Path
from tests.prepare.test_resume import trainer, unhurried
made = trainer("sequential", Path(sys.argv[1]), "run", 2, optimizer=unhurried)
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
        try:
            wait()
            program.send_signal(number)
            _, errors = program.communicate(timeout=240)
        except (subprocess.TimeoutExpired, AssertionError) as error:  # say where it hangs
            program.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            program.kill()
            raise AssertionError(f"{error}\n{program.communicate()[1]}") from None
    finally:
        program.kill()
        program.wait()
    assert "Traceback" not in errors or "KeyboardInterrupt" in errors or "SystemExit" in errors, errors
    return program.returncode


@pytest.fixture(scope="session")
def looking() -> Iterator[Callable[[dict[int, str]], None]]:
    """Looks, while other tests run, that these processes are gone within 90 s."""
    looks = []
    with ThreadPoolExecutor(4) as pool:
        yield lambda found: looks.append(pool.submit(processes.outlive, found, 90.0))
    for look in looks:
        assert look.result() == {}


@pytest.fixture
def leftovers(looking: Callable[[dict[int, str]], None]) -> Iterator[None]:
    """Ray's agents look for their raylet every 2 s, five times, and then try for a while to tell who is gone too."""
    known = set(processes.descendants(os.getpid()))
    yield
    looking(processes.survivors(os.getpid(), known, 0.0))


SIGNALS = int(os.environ.get("RAYPIPE_TEST_SIGNALS", "2"))
"""How often a run is interrupted here; 20 for a long look."""


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
        wait_until(events.exists, 150.0)
        begun_s = time.monotonic() - start_s
        time.sleep(0.5)

    for turn in range(SIGNALS):
        number = signal.SIGINT if turn % 3 == 2 else signal.SIGTERM
        # The first one tells how long a run takes to begin here; the others come before that, at it or after it.
        wait = partial(time.sleep, chance.uniform(0.0, 2 * begun_s)) if turn else once_it_trains
        code = interrupted(tmp_path, steps, where, number, wait)
        # 15 is how Ray ends a process that is still connecting to it; the run has not begun then.
        assert code in ((143, 15, -15) if number is signal.SIGTERM else (130, 1, -2))
        now = newest_step(tmp_path / "run")
        assert find_checkpoint(Place.of(tmp_path / "run"))[1] == (), "each is whole"
        print(f"{number.name}: exit code {code}, steps {done} -> {now}")
        assert now >= max(done, 1)
        done = now
    steps = done + 5
    trainer("sequential", tmp_path, "whole", 2).fit(num_steps=steps, local=True, progress=False)
    trainer("sequential", tmp_path, "run", 1).fit(num_steps=steps, local=True, progress=False)
    (rows, state), (expected_rows, expected) = outcome(tmp_path / "run"), outcome(tmp_path / "whole")
    assert rows == expected_rows
    assert [n for n in state if not same_bits(state[n], expected[n])] == []


@pytest.mark.parametrize("where", ["local", "ray"])
def test_a_terminal_that_goes_costs_no_step(tmp_path: Path, leftovers: None, where: str) -> None:
    """A dropped ssh connection: the kernel sends SIGHUP to the shell, then to its foreground, with Ray's own in it."""
    run, steps = tmp_path / "run", 20_000
    program = shlex.join([sys.executable, "-c", PROGRAM, str(tmp_path), str(steps), where])
    shell, terminal = pty.fork()
    if not shell:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execvpe("sh", ["sh", "-c", f"{program}; true"], {**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_until((run / "events.jsonl").exists, 150.0)
        time.sleep(0.5)
    finally:
        os.close(terminal)
        os.waitpid(shell, 0)
    wait_until(lambda: any(event["decision"] == "stop" for event in events(run)), 60.0)
    assert [event["reason"] for event in events(run) if event["decision"] == "stop"] == ["SIGHUP"]
    done = newest_step(run)
    assert done == pq.read_table(run / "metrics.parquet").num_rows >= 1
    trainer("sequential", tmp_path, "run", 1).fit(num_steps=done + 5, local=True, progress=False)
    assert next(event for event in events(run) if event["decision"] == "resume")["step"] == done
    assert outcome(run)[0][-1][0] == done + 4


def events(run: Path) -> list[dict[str, Any]]:
    """Of the run in this folder, as far as it has written them."""
    return read_events(Place.of(run))

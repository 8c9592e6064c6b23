"""Two real processes and one name: the second is refused, or goes on at once where the first is dead."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.engine.io.checkpoint import find_checkpoint
from raypipe.engine.io.storage import Place
from raypipe.errors import LeaseError
from raypipe.run import lease
from tests.exactness import same_bits
from tests.prepare.test_resume import outcome, trainer
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_captures")]

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from pathlib import Path
import raypipe.run.lease as lease
from tests.prepare.test_resume import trainer, unhurried
from tests.exactness import SHAPES, config_of
lease.RENEW_S, lease.OBSERVE_S = map(float, sys.argv[2:4])
pipeline = config_of(SHAPES["ragged-epoch"], 2, "slack", max_grad_norm=0.5, checkpoint_interval_steps=20)
made = trainer("mlp", Path(sys.argv[1]), "run", 2, pipeline=pipeline, optimizer=unhurried)
made.fit(num_steps=1_000_000, local=True, progress=False)
"""


def begin(folder: Path, observe_s: float = 3600.0) -> subprocess.Popen[str]:
    """Start a process that trains in threads until it is ended."""
    arguments = [str(folder), "0.2", str(observe_s)]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def end(*programs: subprocess.Popen[str]) -> None:
    for program in programs:
        program.kill()
        program.communicate()  # closes its pipes too


def suspend(program: subprocess.Popen[str], run: Path) -> None:
    """Stop a process while it does not hold the lease's lock: with it, it would keep everybody out of its folder."""
    with (run / lease.LOCK).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        program.send_signal(signal.SIGSTOP)
        os.waitpid(program.pid, os.WUNTRACED)  # every thread of it stands still


def saved(folder: Path) -> int:
    found, _ = find_checkpoint(Place.of(folder / "run"))
    return found.manifest.step if found else 0


def generation(folder: Path) -> int:
    return int(json.loads((folder / "run/lease.json").read_text())["generation"])


def ended(program: subprocess.Popen[str]) -> bool:
    return program.poll() is not None


def same_as_without_a_break(folder: Path, steps: int) -> None:
    trainer("mlp", folder, "whole", 2).fit(num_steps=steps, local=True, progress=False)
    (rows, state), (expected_rows, expected) = outcome(folder / "run"), outcome(folder / "whole")
    assert rows == expected_rows
    assert [n for n in state if not same_bits(state[n], expected[n])] == []


@pytest.mark.ray
def test_killed_and_begun_again(cluster: None, tmp_path: Path) -> None:
    """A cluster is refused, and goes on at once where the holder, a process of this machine, is known to be dead."""
    first = begin(tmp_path)
    try:
        wait_until(lambda: saved(tmp_path) >= 40, 240.0)
        with pytest.raises(LeaseError, match=f"The run 'run' is being trained by process {first.pid} on "):
            trainer("mlp", tmp_path, "run", 1).fit(num_steps=1_000_000, progress=False)
        assert "fail" not in (tmp_path / "run/events.jsonl").read_text(), "who was refused wrote nothing"
        first.send_signal(signal.SIGKILL)
        first.wait()
    finally:
        end(first)
    steps = saved(tmp_path) + 25
    trainer("mlp", tmp_path, "run", 1).fit(num_steps=steps, progress=False)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [e["reason"].split(" on ")[0] for e in events if e["decision"] == "take over"] == [f"process {first.pid}"]
    assert [e["generation"] for e in events if e["decision"] == "start"] == [1, 2]
    same_as_without_a_break(tmp_path, steps)


def test_stopped_for_a_while_taken_over_and_back_again(tmp_path: Path) -> None:
    """A process that was suspended wakes up in a run that another one trains, and completes nothing of its own."""
    first = begin(tmp_path)
    second = None
    try:
        wait_until(lambda: saved(tmp_path) >= 40, 240.0)
        suspend(first, tmp_path / "run")
        second = begin(tmp_path, observe_s=1.0)
        wait_until(lambda: ended(second) or generation(tmp_path) == 2, 240.0)
        assert not ended(second), second.communicate()
        before = saved(tmp_path)
        first.send_signal(signal.SIGCONT)
        _, errors = first.communicate(timeout=240)
        assert first.returncode == 1
        assert f"was taken over by process {second.pid} on " in errors
        wait_until(lambda: saved(tmp_path) >= before + 40, 240.0)
        second.send_signal(signal.SIGTERM)
        second.communicate(timeout=240)
    finally:
        end(first, *([second] if second else []))
    steps = saved(tmp_path) + 5
    found, refused = find_checkpoint(Place.of(tmp_path / "run"))
    assert found is not None
    assert (found.manifest.generation, [r for r in refused if "changed" in r.reason]) == (2, [])
    trainer("mlp", tmp_path, "run", 1).fit(num_steps=steps, local=True, progress=False)
    same_as_without_a_break(tmp_path, steps)

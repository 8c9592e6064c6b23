"""Runs that take turns: a stage gets no sample of a step that its run may not begin."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import SequentialSampler

from jobs.lib.shaped import Rig
from jobs.lib.turns import gated, in_turns, open_gate

WAIT_S = 10.0


def test_samples_come_as_far_as_the_gate_says(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    open_gate(gate, 1)
    data = gated(list("abcd"), gate, per_step=2, steps=3)
    assert (data.batch_size, isinstance(data.sampler, SequentialSampler)) == (2, True)
    assert data.dataset[5] == "b", "who starts a run may look at all of them"
    here = pickle.loads(pickle.dumps(data.dataset))
    assert (len(here), here[1], here[0], here[1]) == (6, "b", "a", "b")
    came = threading.Event()
    read = threading.Thread(target=lambda: (here[2], came.set()), daemon=True)
    read.start()
    assert not came.wait(0.1), "the second step has not been allowed"
    open_gate(gate, 2)
    assert came.wait(WAIT_S)
    read.join(WAIT_S)
    open_gate(gate, 3)
    assert [here[3], here[4], here[5]] == ["d", "a", "b"], "they begin again"


# Does what links_ours.py does with its gate, in no time; one whose pipeline says "dies" ends after ten steps.
RUN = """
import json, sys, time
from pathlib import Path
asked = json.loads(sys.argv[1])
for step in range(asked["steps"]):
    while int(Path(asked["gate"]).read_text()) <= step:
        time.sleep(0.01)
    if step == 10 and asked["pipeline"].get("dies"):
        break
    print("step", step + 1, flush=True)
print(json.dumps({"seconds": list(range(asked["steps"])), "cpu": asked["cpu"]}), flush=True)
"""


SCRIPT = "bench/any/train.py"


class Lab:
    """Starts them where it stands; ``close`` ends them."""

    answer = Rig.answer

    def __init__(self) -> None:
        self._started = ExitStack()

    def start(self, host: int, script: str, asked: str) -> subprocess.Popen[str]:
        assert script == SCRIPT
        process = subprocess.Popen([sys.executable, "-c", RUN, asked], stdout=subprocess.PIPE, text=True)
        self._started.enter_context(process)  # which waits for it
        self._started.callback(process.kill)
        return process

    def close(self) -> None:
        self._started.close()


def test_runs_take_turns_and_the_middle_of_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.lib.turns.HANDOVER_S", 0.0)
    with closing(Lab()) as lab:
        found = in_turns(lab, SCRIPT, {"a": {}, "b": {}}, turns=3, steps=4)
    assert {name: run["turns"] for name, run in found.items()} == {name: [[1, 2], [5, 6], [9, 10]] for name in "ab"}
    shares = [run["cpu"] for run in found.values()]
    assert 0.5 < shares[0] < 1
    assert (1 - shares[0]) / 2 < shares[1] < 1 - shares[0], "two of a host find no room on it, one does"


def test_a_run_that_ends_too_soon_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.lib.turns.HANDOVER_S", 0.0)
    pipelines: dict[str, dict[str, Any]] = {"a": {}, "b": {"dies": True}}
    with closing(Lab()) as lab, pytest.raises(RuntimeError, match="run1 stands at step 10 of 12"):
        in_turns(lab, SCRIPT, pipelines, turns=4, steps=4)

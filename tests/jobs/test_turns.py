"""Runs that take turns: a stage gets no sample of a step that its run may not begin."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

from turns import Gated, open_gate

WAIT_S = 10.0


def test_samples_come_as_far_as_the_gate_says(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    open_gate(gate, 1)
    here = Gated(list("abcdef"), str(gate), per_step=2)
    assert [here[5], here[0], here[5]] == ["f", "a", "f"], "whoever makes it looks at what it likes"
    there = pickle.loads(pickle.dumps(here))
    assert [there[3], there[1]] == ["d", "b"]
    came = threading.Event()
    read = threading.Thread(target=lambda: (there[0], came.set()), daemon=True)
    read.start()
    assert not came.wait(0.1), "the second step has not been allowed"
    open_gate(gate, 2)
    assert came.wait(WAIT_S)
    read.join(WAIT_S)
    assert there[4] == "e"

"""Signals that come while a run trains: which stop it, how often, and which are left alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypipe import Callback
from raypipe.ir.report import StepRecord
from tests.prepare.test_resume import trainer, unhurried

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

HUP, TERM = signal.SIGHUP, signal.SIGTERM


class Sends(Callback):
    """Sends this process signals after its second step."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.numbers = numbers

    def on_step(self, record: StepRecord) -> None:
        for number in self.numbers if record.step == 1 else ():
            os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    """The process that runs the tests may have been started by nohup."""
    before = signal.signal(HUP, signal.SIG_DFL)
    yield
    signal.signal(HUP, before)


@pytest.mark.parametrize(
    ("numbers", "codes"),
    [
        ((HUP,), {129}),
        ((HUP, HUP, HUP), {129}),  # of the shell and of the kernel
        ((TERM, HUP), {129, 143}),  # systemd, which sends both at once: Python may see either of them first
    ],
)
def test_a_hang_up_stops_a_run_and_never_ends_it_at_once(
    tmp_path: Path, numbers: tuple[signal.Signals, ...], codes: set[int]
) -> None:
    made = trainer("mlp", tmp_path, "run", 2, optimizer=unhurried, callbacks=[Sends(*numbers)])
    with pytest.raises(SystemExit) as end:
        made.fit(num_steps=2000, local=True, progress=False)
    assert end.value.code in codes
    (saved,) = (tmp_path / "run/checkpoints").glob("step_*/manifest.json")
    assert int(saved.parent.name.removeprefix("step_")) >= 2
    assert signal.getsignal(HUP) is signal.SIG_DFL


def test_a_hang_up_that_is_ignored_or_handled_is_left_alone(tmp_path: Path) -> None:
    heard: list[int] = []
    for name, handler in (("ignored", signal.SIG_IGN), ("own", lambda number, frame: heard.append(number))):
        signal.signal(HUP, handler)
        result = trainer("mlp", tmp_path, name, 2, callbacks=[Sends(HUP)]).fit(5, local=True, progress=False)
        assert (len(result.records), result.stopped) == (5, "")
        assert signal.getsignal(HUP) is handler
    assert heard == [HUP]

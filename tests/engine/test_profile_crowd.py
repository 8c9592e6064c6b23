"""What neighbours on the same machine cost is measured with real ones, and none of them stays."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.engine.capture import Capture, capture
from raypipe.engine.profile_cache import cached_crowd
from raypipe.engine.profiling import matters, measure_crowd, profile_graph
from raypipe.engine.profiling.crowd import neighbours
from raypipe.ir.profile import Profile
from raypipe.profiling import crowd_of
from tests.models import CASES

ENOUGH_S = 10.0


class Asleep(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return super().forward(x)


def profiled(model: nn.Module, width: int) -> tuple[Capture, Profile, dict[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, width, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    made = capture(model, (x, y), (0, 1), functional.cross_entropy)
    return made, profile_graph(made, {0: x, 1: y}, sizes=(), repeats=1), {0: x, 1: y}


def seconds_of(pid: int) -> float:
    """Of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_neighbours_compute_when_told_to_and_end() -> None:
    before = children()
    with neighbours(2) as others:
        own = children() - before
        assert len(own) == 2

        others.compute(True)
        at_s, until_s = {pid: seconds_of(pid) for pid in own}, time.monotonic() + ENOUGH_S
        while any(seconds_of(pid) < at_s[pid] + 0.05 for pid in own):
            assert time.monotonic() < until_s, "they do not compute"
            time.sleep(0.01)

        others.compute(False)
        time.sleep(0.2)  # for the products that were under way
        at_s = {pid: seconds_of(pid) for pid in own}
        time.sleep(0.3)
        assert all(seconds_of(pid) < at_s[pid] + 0.05 for pid in own)
    assert children() == before


def test_one_that_nobody_ends_ends_with_its_pipe(tmp_path: Path) -> None:
    """As when the process that plans is killed."""
    script = "import os, subprocess, sys; from raypipe.engine.profiling.crowd import *\n"
    script += "import raypipe.engine.profiling.crowd as c\n"
    script += "with c.neighbours(1) as others:\n"
    script += "    others.compute(True); print(others._processes[0].pid, flush=True); os._exit(0)\n"
    pid = int(_run(script))
    until_s = time.monotonic() + ENOUGH_S
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in _status(pid):
        assert time.monotonic() < until_s, "a neighbour is left behind"
        time.sleep(0.02)


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "State:\tZ"


def _run(script: str) -> str:
    import subprocess

    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60, check=True)
    return done.stdout.decode()


def test_the_factor_is_kept_by_number_of_workers() -> None:
    made, profile, columns = profiled(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 3)), 512)
    seen: list[tuple[int, int]] = []
    found = measure_crowd(made, profile, columns, 2, progress=lambda done, total: seen.append((done, total)))
    ((processes, factor),) = found.crowd
    assert processes == 2
    assert factor >= 1.0
    assert seen == [(i, 5) for i in range(1, 6)]
    assert Profile.from_json(found.to_json()) == found
    both = measure_crowd(made, found, columns, 3)
    assert [count for count, _ in both.crowd] == [2, 3]


def test_who_sleeps_has_nothing_to_share() -> None:
    made, profile, columns = profiled(nn.Sequential(Asleep(6, 6), nn.Linear(6, 3)), 6)
    assert measure_crowd(made, profile, columns, 2).crowd == ((2, 1.0),)


def test_without_processes_there_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    made, profile, columns = profiled(nn.Linear(6, 3), 6)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    found = measure_crowd(made, profile, columns, 2)
    assert found.crowd == ()
    assert "2 workers on this machine cost each other could not be measured" in found.notes[-1]


def test_it_is_measured_once(tmp_path: Path) -> None:
    made, profile, columns = profiled(nn.Linear(6, 3), 6)
    called: list[int] = []
    first = cached_crowd(made, profile, columns, 2, folder=tmp_path, progress=lambda done, total: called.append(done))
    assert called
    called.clear()
    again = cached_crowd(made, profile, columns, 2, folder=tmp_path, progress=lambda done, total: called.append(done))
    assert (again, called) == (first, [])


def test_small_models_and_plans_for_elsewhere_are_not_asked() -> None:
    x, y = CASES["mlp"].data(8)[:8]
    made = capture(CASES["mlp"].build(), (x, y), (0, 1), functional.cross_entropy)
    profile = profile_graph(made, {0: x, 1: y}, sizes=(), repeats=1)
    assert not matters(profile, 2)
    assert crowd_of(made, profile, {0: x, 1: y}, 2) is profile
    made, slow, columns = profiled(nn.Sequential(Asleep(6, 6), nn.Linear(6, 3)), 6)
    assert matters(slow, 2)
    assert not matters(slow, 1)
    assert crowd_of(made, slow, columns, 10_000) is slow

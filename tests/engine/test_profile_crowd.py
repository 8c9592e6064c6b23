"""What neighbours on the same machine cost is measured with real ones, and none of them stays."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import raypipe
from raypipe.engine.capture import Capture, capture
from raypipe.engine.profile_cache import cached_crowd, load_profile, save_profile
from raypipe.engine.profiling import matters, measure_crowd, num_processors, profile_graph
from raypipe.engine.profiling.crowd import _factor, _size, neighbours
from raypipe.ir.profile import Profile
from raypipe.planner.tune import Request
from raypipe.prepare.planning import _workers
from raypipe.prepare.profile import crowd_of, crowded_notes
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
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=60, check=True)
    return done.stdout.decode()


def test_the_factor_is_kept_by_number_of_workers() -> None:
    made, profile, columns = profiled(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 3)), 512)
    seen: list[tuple[int, int]] = []
    found = measure_crowd(made, profile, columns, 2, progress=lambda done, total: seen.append((done, total)))
    assert [count for count, _ in found.crowd] == [2]
    assert seen == [(i, 4) for i in range(1, 5)]
    assert Profile.from_json(found.to_json()) == found
    both = measure_crowd(made, found, columns, 3)
    assert [count for count, _ in both.crowd] == [2, 3]


def test_blocks_count_against_those_around_them() -> None:
    """On a machine that slows down by a fifth from one block to the next, neighbours cost a quarter."""
    speed = [1.2**i for i in range(7)]
    assert _factor(speed[::2], [1.25 * seconds for seconds in speed[1::2]]) == pytest.approx(1.25, rel=0.02)
    assert _factor([1.0, 1.0, 1.0], [0.9, 0.95]) == 1.0, "they make nobody quicker"


def test_a_size_that_does_not_take_long_will_do() -> None:
    _, profile, _ = profiled(nn.Linear(6, 3), 6)
    sizes = ((1, 0.1), (2, 0.2), (4, 0.4), (8, 0.8), (64, 0.1))
    assert _size(dataclasses.replace(profile, seconds_by_size=sizes)) == (2, 0.2)
    assert _size(dataclasses.replace(profile, seconds_by_size=sizes[2:])) == (4, 0.4)
    assert _size(dataclasses.replace(profile, seconds_by_size=()))[0] == 8


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


def test_a_plan_counts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the cache says of two workers, half as much again, is in the seconds of a plan for two."""
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def busy_s() -> float:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(32, 6, generator=generator), torch.randint(0, 3, (32,), generator=generator)
        plan = raypipe.PipelineTrainer(
            nn.Sequential(Asleep(6, 6), nn.Linear(6, 3)),
            loss_fn=functional.cross_entropy,
            optimizer=torch.optim.SGD,
            train_data=TensorDataset(x, y),
            pipeline=raypipe.PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=1),
        ).plan()
        assert plan.prediction is not None
        return sum(stage.busy_s for stage in plan.prediction.stages)

    before_s = busy_s()
    folder = tmp_path / "profiles"
    (key, kept), *others = [
        (path.stem, found)
        for path in folder.glob("*.json")
        if (found := load_profile(folder, path.stem)) and found.crowd
    ]
    assert not others
    assert kept.crowd == ((2, 1.0),)
    save_profile(folder, key, dataclasses.replace(kept, crowd=((2, 1.5),)))
    assert busy_s() == pytest.approx(1.5 * before_s)


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({}, 2),
        ({"num_workers": 5}, 5),
        ({"num_workers": 5, "num_stages": 3}, 3),
        ({"num_stages": 1}, 1),
        ({"split_points": ("a", "b")}, 3),
        ({"num_stages": 8, "num_workers": 4, "schedule": "zb-v"}, 4),
        ({"schedule": "zb-v"}, 2),
        ({"num_workers": 6, "num_stages": 2, "partitioner": "hierarchical"}, 6),
    ],
)
def test_how_many_are_asked_for(changes: dict[str, Any], workers: int) -> None:
    assert _workers(dataclasses.replace(Request(None, None, (), None, None, num_samples=9), **changes)) == workers


def test_more_workers_than_processors_are_told_that_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    here = num_processors()
    assert crowded_notes(here) == []
    assert f"{here + 1} workers share this machine's {here} processors" in crowded_notes(here + 1)[0]
    assert crowded_notes(10_000) == [], "which must be meant for elsewhere"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert crowded_notes(here + 1) == []

"""The parts of bench_gpu that decide what a figure means, on the CPU; and one stage beside two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jobs.bench.gpu import bench
from jobs.check import two_processes
from raypipe.engine.device.device import CPU
from tests.runs.test_cuda_graphs import Devices

pytestmark = pytest.mark.ray


def test_a_stage_does_the_operations_of_plain_pytorch() -> None:
    """No cast, view or copy more, but for the accumulators and the norm."""
    found = []
    for label in ("plain", "stage"):
        with bench.running(label, replace(bench.TINY, warm_up=5, steps=5), CPU, lambda: CPU) as run:
            found.append(bench.where.profiled(run, CPU.place))
    plain, ours = found
    for name in ("aten::linear", "aten::mm", "aten::addmm", "aten::_to_copy", "aten::native_layer_norm", "aten::gelu"):
        assert 0 < ours[name][0] <= plain[name][0], name
    rows = bench.where.compared(plain, ours).splitlines()
    assert rows[-1].startswith("all ")


def test_one_stage_and_two_in_threads_have_the_same_bits() -> None:
    one, two = (two_processes.in_threads(stages, lambda: CPU, "bf16-autocast") for stages in (1, 2))
    assert two_processes.apart(one, two) == []
    assert len(one.losses) == two_processes.SMALL.steps
    assert two_processes.apart(one, one._replace(losses=one.losses[:-1])) == ["losses"]


def test_a_stage_with_graphs_replays_them() -> None:
    with Devices() as devices:
        with bench.ours(bench.TINY, lambda: devices(0), 1, "bf16-autocast", graphs=True) as run:
            bench.measured(run, bench.TINY)
        assert devices.made[0].replayed > 0

"""The parts of bench_memory that decide what a figure means; its runs are the benchmark itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from jobs.bench.memory import bench, runs
from jobs.bench.memory.runs import MICROBATCHES, STAGES, Sizes, Watched

SMALL = Sizes(width=16, depth=3, microbatch=4)


@pytest.mark.parametrize("settings", [bench.Settings(), bench.QUICK])
def test_activations_stay_below_half_of_the_weights(settings: bench.Settings) -> None:
    assert 0.1 <= runs.activation_share(settings.sizes) <= 0.5


def test_shares_are_what_torch_keeps(tmp_path: Path) -> None:
    stages = runs.layers(SMALL, str(tmp_path))
    assert len(stages) == STAGES
    assert sum(p.numel() * 4 for layer in stages[0] for p in layer.parameters()) == runs.weight_bytes(SMALL)
    kept: dict[int, int] = {}
    weights = {p.data_ptr() for p in nn.Sequential(*stages[0]).parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = nn.Sequential(*stages[0])(torch.ones(SMALL.microbatch, SMALL.width))
    assert output.requires_grad
    in_flight = STAGES * sum(kept.values())
    assert in_flight / runs.weight_bytes(SMALL) == pytest.approx(runs.activation_share(SMALL))


def test_a_mark_is_one_byte_and_changes_nothing(tmp_path: Path) -> None:
    x = torch.randn(3, 2, requires_grad=True)
    mark = runs.Mark(str(tmp_path))
    y = mark(mark(x))
    y.sum().backward()
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones(3, 2))
    assert (tmp_path / f"0-{os.getpid()}").read_bytes() == b".."


def test_the_peak_leaves_out_the_warm_up() -> None:
    looks = [Watched(MICROBATCHES * i, peak, 0) for i, peak in enumerate([90, 80, 10, 30, 20], start=1)]
    assert runs.peak_of(looks, num_steps=5) == 30
    assert runs.peak_of(looks, num_steps=6) == 80


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")
def test_a_look_sees_memory_that_is_gone_again_and_forgets_it() -> None:
    code = (
        "import sys\nfor line in sys.stdin:\n    x = bytearray(int(line)); x[::4096] = b'x' * len(x[::4096]); del x\n"
    )
    code += "    print('done', flush=True)\n"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        peaks = []
        for size in (0, 64_000_000, 0, 0):
            child.stdin.write(f"{size}\n")
            child.stdin.flush()
            assert child.stdout.readline() == "done\n"
            found = runs._look(child.pid, 0)
            assert found is not None
            peaks.append(found.peak_bytes)
        child.stdin.close()
        child.wait(120)
    assert peaks[1] - peaks[0] == pytest.approx(64_000_000, rel=0.02)
    assert peaks[3] == pytest.approx(peaks[0], rel=0.1)


def test_figures() -> None:
    peaks = {("stash", "sgd"): 600, ("ring", "sgd"): 400, ("torch_1f1b", "sgd"): 300}
    told = {"stash_sgd": {"weights": 500, "gradients": 130}, "ring_sgd": {"weights": 380}}
    figures = bench.figures_of(peaks, told, {"stash": 0.10, "ring": 0.11})
    assert figures["ring_vs_stash_sgd"] == pytest.approx(2 / 3)
    assert figures["torch_1f1b_vs_stash_sgd"] == pytest.approx(0.5)
    assert figures["predicted_vs_measured_stash_sgd"] == pytest.approx(1.05)
    assert figures["predicted_vs_measured"] == pytest.approx(1.05)
    assert figures["ring_vs_stash_step"] == pytest.approx(1.1)

"""Seconds of GPUs that are not here: by data sheet, from counted operations, or divided."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.capture import Capture, capture
from raypipe.ir.graph import Node
from raypipe.ir.precision import FP32, PRECISIONS
from raypipe.ir.profile import Profile
from raypipe.profiling import Rates, estimate_graph, in_seconds_of, profile_graph
from raypipe.profiling.rates import GPUS, LAUNCH_S, MEMORY, PRODUCTS, kind_of, rates_of_kind, share_of_rates
from tests.exactness import captured
from tests.profiling.test_measure import columns_of

pytestmark = pytest.mark.xdist_group("tracing")

SLOW, FAST = Rates(1e9, 1e9, 0.0, "slow"), Rates(1e15, 1e15, 0.0, "fast")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_the_name_that_cuda_gives_a_gpu(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_rates_follow_the_type_that_tensor_cores_know() -> None:
    rate = {
        (kind, name): rates_of_kind(kind, precision).flops_per_s / PRODUCTS / 1e12
        for kind in ("A100", "V100")
        for name, precision in PRECISIONS.items()
    }
    assert [rate["A100", name] for name in ("fp32", "bf16", "bf16-autocast", "fp16")] == [19.5, 312, 312, 312]
    assert [rate["V100", name] for name in ("fp32", "bf16", "bf16-autocast", "fp16")] == [15.7, 15.7, 15.7, 125]
    assert rates_of_kind("A100", FP32).bytes_per_s == MEMORY * 1555e9
    assert "A100 by its data sheet, 0.6 of 312 TFLOP/s (bfloat16)" in rates_of_kind("A100", PRECISIONS["bf16"]).device
    assert all(gpu.half_tflops >= gpu.fp32_tflops > 0 and gpu.gbyte_s > 100 for gpu in GPUS.values())


def test_a_share_of_a_gpu_is_slower_and_its_launches_are_not() -> None:
    whole = rates_of_kind("T4", FP32)
    half = share_of_rates(whole, 0.5)
    assert (half.flops_per_s, half.bytes_per_s) == (whole.flops_per_s / 2, whole.bytes_per_s / 2)
    assert half.overhead_s == whole.overhead_s == LAUNCH_S
    assert share_of_rates(whole, 1.0) is whole


@pytest.mark.parametrize("name", ["mlp", "cnn", "tied-lm"])
def test_bytes_stay_and_seconds_are_those_of_an_estimate(name: str) -> None:
    made, columns = captured(name)[1], columns_of(name)
    here = profile_graph(made, columns)
    there = in_seconds_of(SLOW, made, here)
    estimated = estimate_graph(made, here.microbatch_size, SLOW, sizes=[size for size, _ in here.seconds_by_size])
    assert _seconds(there) == _seconds(estimated)
    assert there.seconds_by_size == estimated.seconds_by_size
    assert _without_seconds(there) == _without_seconds(here)
    assert (there.source, there.device) == ("estimated", "slow")
    assert (
        "estimated for slow: they follow from counted operations and bytes. Nothing was timed there." in there.notes[0]
    )
    assert (here.small is None) == (there.small is None)
    assert Profile.from_json(there.to_json()) == there


def _without_seconds(profile: Profile) -> list[Node]:
    return [
        dataclasses.replace(node, forward_s=0.0, backward_input_s=0.0, backward_weight_s=0.0, source="")
        for node in profile.graph.nodes
    ]


def _seconds(profile: Profile) -> list[tuple[float, float, float]]:
    return [(n.forward_s, n.backward_input_s, n.backward_weight_s) for n in profile.graph.nodes]


def test_children_are_counted_where_they_run_without_numbers() -> None:
    made, x, y = _sequential(nn.ReLU())
    here = profile_graph(made, {0: x, 1: y})
    first, _, last = in_seconds_of(Rates(1e9, 1e15, 0.0), made, here).graph.nodes
    assert first.forward_s == pytest.approx(2 * 4 * 6 * 50 / 1e9)
    assert last.forward_s == pytest.approx(2 * 4 * 50 * 3 / 1e9)
    assert (first.backward_input_s, first.backward_weight_s) == (0.0, first.forward_s)
    assert (last.backward_input_s, last.backward_weight_s) == (last.forward_s, last.forward_s)


class Looks(nn.Module):
    """At values, which the meta device does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_counted_is_divided() -> None:
    made, x, y = _sequential(Looks())
    here = profile_graph(made, {0: x, 1: y})
    there = in_seconds_of(FAST, made, here)
    ratio = there.graph.busy_s / here.graph.busy_s
    assert 0 < ratio < 0.1
    for one, other in zip(_seconds(here), _seconds(there), strict=True):
        assert other == pytest.approx([ratio * seconds for seconds in one])
    assert [s for _, s in there.seconds_by_size] == pytest.approx([ratio * s for _, s in here.seconds_by_size])
    assert "those of this machine's CPU divided by" in there.notes[0]


def _sequential(middle: nn.Module) -> tuple[Capture, torch.Tensor, torch.Tensor]:
    model = nn.Sequential(nn.Linear(6, 50), middle, nn.Linear(50, 3))
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    return capture(model, (x, y), (0, 1), functional.cross_entropy), x, y

"""Every node has its seconds and bytes, they add up to the whole model, and nothing of the user's changes."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.capture import capture
from raypipe.data.open_data import open_data
from raypipe.errors import ConfigError, PlanError, StageError
from raypipe.ir.profile import Profile
from raypipe.profiling import Rates, estimate_graph, measure, profile_graph
from raypipe.profiling.measure import larger_sizes
from tests import nets
from tests.exactness import captured, same_bits
from tests.models import CASES, case

pytestmark = pytest.mark.xdist_group("tracing")

ZOO = (*CASES, "gpt2", "llama")
TRACED = tuple(name for name in ZOO if "sequential" not in name and name not in ("frozen-middle", "custom-function"))
SAMPLES = 4


def columns_of(name: str, samples: int = SAMPLES) -> dict[Any, torch.Tensor]:
    source = open_data(case(name).data(8), seed=0)
    names: Any = (0, 1) if case(name).loss_fn is not None else source.columns
    batch: Any = source.read(0, 0, samples, names)
    return batch if isinstance(batch, dict) else dict(enumerate(batch))


@cache
def profiled(name: str) -> Profile:
    return profile_graph(captured(name)[1], columns_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_nodes_add_up_to_the_whole(name: str) -> None:
    profile, graph = profiled(name), captured(name)[1].graph
    nodes = profile.graph.nodes
    assert profile.source == "measured"
    assert sum(n.forward_s for n in nodes) == pytest.approx(profile.forward_s)
    assert sum(n.backward_s for n in nodes) == pytest.approx(profile.backward_s)
    assert dict(profile.seconds_by_size)[SAMPLES] == pytest.approx(profile.forward_s + profile.backward_s)
    assert all(n.forward_s > 0 for n in nodes)
    assert all(n.backward_input_s >= 0 and n.backward_weight_s >= 0 for n in nodes)
    assert profile.microbatch_size == SAMPLES
    # What capture knew is untouched.
    assert [(n.name, n.cut_bytes, n.output_bytes) for n in nodes] == [
        (n.name, n.cut_bytes, n.output_bytes) for n in graph.nodes
    ]
    assert (profile.graph.edges, profile.graph.together) == (graph.edges, graph.together)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "dropout-sequential", "tied-lm", "noisy"])
def test_nothing_of_the_users_changes(name: str) -> None:
    profiled(name)
    model, fresh = captured(name)[0], case(name).model()
    assert all(map(same_bits, model.state_dict().values(), fresh.state_dict().values()))
    assert all(p.grad is None for p in model.parameters())


def test_kept_bytes_are_those_that_torch_saves() -> None:
    """By hand, in floats per sample: data and outputs, each kept by the next linear, gelu or loss; log_softmax's."""
    kept = [node.activation_bytes for node in profiled("mlp").graph.nodes]
    target, total_weight = 8, 4 / SAMPLES
    loss = 3 * 4 + target + total_weight
    assert kept == [6 * 4 + 9 * 4, 9 * 4, 8 * 4, 8 * 4, 7 * 4, 7 * 4, loss]


def test_a_storage_is_kept_once() -> None:
    """tanh and the linear after it keep the same tensor, which is the tanh's."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    x, y = CASES["mlp"].data(4)[:4]
    made = capture(Twice(), (x, y), (0, 1), functional.cross_entropy)
    kept = [n.activation_bytes for n in profile_graph(made, {0: x, 1: y}, sizes=()).graph.nodes]
    assert kept == [6 * 4, 5 * 4, 3 * 4 + 8 + 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_an_estimate_keeps_the_same_bytes(name: str) -> None:
    """All but the user's loss, which only a run knows."""
    estimate = estimate_graph(captured(name)[1], SAMPLES, Rates(1e10, 1e10))
    assert estimate.source == "estimated"
    ours = [n.activation_bytes for n in estimate.graph.nodes]
    theirs = [n.activation_bytes for n in profiled(name).graph.nodes]
    assert ours[:-1] == theirs[:-1]
    assert ours[-1] <= theirs[-1]
    spaces, found = ([n.workspace for n in p.graph.nodes] for p in (estimate, profiled(name)))
    assert spaces[:-1] == found[:-1]
    assert all(n.source == "estimated" and n.forward_s > 0 for n in estimate.graph.nodes)


class Around(nn.Module):
    """Traced, as a Sequential is not."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("traced", [True, False])
def test_parts_of_a_backward(traced: bool) -> None:
    """The data needs no gradient; a layer without parameters has none for them."""
    layers = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    columns: dict[Any, torch.Tensor] = {
        0: torch.randn(64, 256),
        1: torch.randint(0, 256, (64,)),
    }  # large, as each part is a difference of times
    model = Around(layers) if traced else layers
    found = capture(model, tuple(columns.values()), tuple(columns), functional.cross_entropy)
    first, *rest = profile_graph(found, columns).graph.nodes
    assert first.backward_input_s == 0
    assert first.backward_weight_s > 0
    for node in rest:
        assert (node.backward_weight_s > 0) == bool(node.param_names)
        assert node.backward_input_s > 0


def test_what_is_frozen_has_no_backward() -> None:
    nodes = profiled("frozen-below").graph.nodes
    frozen = [n for n in nodes if n.module in ("layers.0", "layers.1")]
    assert len(frozen) == 2
    assert all(n.backward_s == 0 and n.frozen_bytes == n.param_bytes for n in frozen)
    assert [n.backward_weight_s > 0 for n in profiled("frozen-top").graph.nodes] == [True, False] * 2 + [False] * 3


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04)
        return gradient


class Sleep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Slow.apply(x)


def test_the_slow_one_is_found() -> None:
    x, y = CASES["mlp"].data(4)[:4]
    model = nn.Sequential(nn.Linear(6, 6), Sleep(), nn.Linear(6, 3))
    made = capture(model, (x, y), (0, 1), functional.cross_entropy)
    nodes = profile_graph(made, {0: x, 1: y}, sizes=()).graph.nodes
    assert max(nodes, key=lambda n: n.forward_s).name == "1"
    assert max(nodes, key=lambda n: n.backward_input_s).name == "1"
    assert nodes[1].backward_weight_s == 0


def test_sizes_and_progress() -> None:
    seen: list[tuple[int, int]] = []
    made = captured("mlp")[1]
    profile = profile_graph(made, columns_of("mlp", 6), progress=lambda d, t: seen.append((d, t)))
    assert [b for b, _ in profile.seconds_by_size] == [1, 2, 4, 6]
    assert seen == sorted(seen)
    assert seen[-1] == (len(made.graph.nodes),) * 2


def test_larger_sizes_are_measured_where_that_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CHEAP_S", 10.0)
    monkeypatch.setattr(measure, "MOST_ROUNDS", 1)
    made = captured("mlp")[1]
    larger = dict(enumerate(CASES["mlp"].data(40)[:40]))
    profile = profile_graph(made, columns_of("mlp", 3), larger)
    assert [b for b, _ in profile.seconds_by_size] == [1, 2, 3, 6, 12, 24]
    assert profile.microbatch_size == 3
    assert all(seconds > 0 for _, seconds in profile.seconds_by_size)
    assert larger_sizes(3, {}) == larger_sizes(30, larger) == ()


def test_larger_sizes_that_take_long_are_left_out() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02 * len(x))
            return super().forward(x)

    x, y = CASES["mlp"].data(32)[:32]
    made = capture(nn.Sequential(Slow(6, 3)), (x[:2], y[:2]), (0, 1), functional.cross_entropy)
    profile = profile_graph(made, {0: x[:2], 1: y[:2]}, {0: x, 1: y})
    assert 8 not in dict(profile.seconds_by_size), "eight would take 0.32 s"


def test_a_larger_size_that_fails_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CHEAP_S", 10.0)
    monkeypatch.setattr(measure, "MOST_ROUNDS", 1)

    class Few(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert len(x) <= 8, "eight at most"
            return super().forward(x)

    x, y = CASES["mlp"].data(32)[:32]
    made = capture(nn.Sequential(Few(6, 3)), (x[:4], y[:4]), (0, 1), functional.cross_entropy)
    profile = profile_graph(made, {0: x[:4], 1: y[:4]}, {0: x, 1: y})
    assert [b for b, _ in profile.seconds_by_size] == [1, 2, 4, 8]
    assert any("Micro-batches of 16 could not be measured: AssertionError: eight at most" in n for n in profile.notes)


def test_a_size_that_cannot_be_run_is_noted() -> None:
    """Batch statistics of one value."""
    x, y = CASES["mlp"].data(4)[:4]
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    made = capture(model, (x, y), (0, 1), functional.cross_entropy)
    profile = profile_graph(made, {0: x, 1: y})
    assert [b for b, _ in profile.seconds_by_size] == [2, 4]
    assert "Micro-batches of 1 could not be measured" in profile.notes[0]


def test_columns_that_do_not_fit_are_refused() -> None:
    columns = columns_of("mlp")
    with pytest.raises(StageError, match="could not be profiled on a micro-batch of 4 samples"):
        profile_graph(captured("mlp")[1], {**columns, 0: columns[0][:, :3]})


def test_an_estimate_follows_the_rates() -> None:
    made = captured("cnn")[1]
    slow, fast = (estimate_graph(made, 2, Rates(rate, rate, 0.0), sizes=(1, 4)) for rate in (1e9, 4e9))
    assert slow.graph.busy_s == pytest.approx(4 * fast.graph.busy_s)
    assert [b for b, _ in slow.seconds_by_size] == [1, 2, 4]
    times = [t for _, t in slow.seconds_by_size]
    assert times == sorted(times)
    with pytest.raises(ConfigError, match="flops_per_s=0"):
        Rates(0, 1.0)
    with pytest.raises(ConfigError, match="measured but not estimated"):
        estimate_graph(captured("sequential")[1], 2, Rates(1e9, 1e9))


def test_a_model_without_memory_is_estimated() -> None:
    """Captured and estimated on the meta device: no tensor of it is ever made."""
    with torch.device("meta"):
        model = nets.Mlp((1 << 15, 1 << 17, 1 << 15))  # 32 GiB
        example = (torch.empty(2, 1 << 15), torch.empty(2, 1 << 15))
    made = capture(model, example, (0, 1), functional.mse_loss)
    profile = estimate_graph(made, 2, Rates(1e14, 1e12))
    assert profile.graph.param_bytes > 32 << 30
    flops = 3 * 2 * 2 * (2 << 32) - 2 * 2 * (1 << 32)  # three products per layer, but none for the data's gradient
    assert profile.graph.busy_s >= flops / 1e14


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 9}', '{"format": 1}', "null"])
def test_text_that_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="measure anew"):
        Profile.from_json(text)

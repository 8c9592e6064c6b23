"""The loop of bench_convergence trains as the emulators of asynchronous pipelines do, to the bit."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from jobs.bench.convergence import bench
from jobs.bench.convergence.bench import Kind
from jobs.bench.convergence.delayed import train
from jobs.bench.convergence.muon import BatchedMuon
from tests.emulators.nets import NETS
from tests.emulators.training import Fill, emulate, one_thread
from tests.emulators.versions import stashing, two_buffered

UPDATES, FADES = 12, 7
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01, betas=(0.99, 0.999)),
}


@pytest.mark.parametrize("correction", ["none", "predict", "discount"])
@pytest.mark.parametrize("policy", ["2bw", "pipedream"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_as_the_emulator(optimizer: str, policy: str, correction: str) -> None:
    net, stages = NETS["mlp"], 4
    inputs, targets = net.data(UPDATES * 4).tensors
    batches = list(zip(inputs.split(4), targets.split(4), strict=True))
    mode = two_buffered(1) if policy == "2bw" else stashing(stages)
    wanted = emulate(
        net.model(), net.cuts[stages], [Fill(batches)], mode, loss_fn=net.loss_fn, make_optimizer=OPTIMIZERS[optimizer],
        correction=correction, discount_updates=FADES,
    )  # fmt: skip
    model = copy.deepcopy(net.model()).train()
    parts = [model[a:b] for a, b in itertools.pairwise([0, *net.cuts[stages], len(model)])]
    groups = [{"params": list(part.parameters()), "stage": stage} for stage, part in enumerate(parts)]
    with one_thread():
        losses = train(
            model, [[part] for part in parts], [mode.delay(stage) for stage in range(stages)], batches,
            loss_fn=net.loss_fn, steppers=[OPTIMIZERS[optimizer](groups)], rate=lambda update: 1.0,
            correction=correction, fades_after=FADES,
        )  # fmt: skip
    assert losses == wanted.losses
    assert [name for name, p in model.named_parameters() if not torch.equal(p, wanted.parameters[name])] == []


def test_gaps_are_of_equal_seeds_and_best_choices_of_optimizers_as_good_as_adamw() -> None:
    def kind(policy: str, optimizer: str, correction: str = "none") -> Kind:
        return Kind("text", policy, optimizer, correction)

    runs = {
        kind("flush", "adamw"): {0: 2.0, 1: 2.2},
        kind("2bw", "adamw"): {0: 2.5, 1: 2.5},
        kind("2bw", "adamw", "predict"): {1: 2.1},
        kind("flush", "sgd"): {0: 3.0},
        kind("2bw", "sgd"): {0: 3.0},
        kind("pipedream", "sgd"): {1: 9.0},
        kind("flush", "nadam"): {0: 1.9, 1: 2.0},
        kind("2bw", "nadam"): {0: 1.9, 1: 2.0},
    }
    choosing = {
        kind("flush", "adamw"): {100: 2.0},
        kind("flush", "sgd"): {100: 3.0},
        kind("2bw", "adamw"): {100: 2.3},
        kind("2bw", "adamw", "predict"): {100: 2.4},
        kind("2bw", "sgd"): {100: 3.0},
        kind("flush", "nadam"): {100: 2.05},
        kind("2bw", "nadam"): {100: 2.05},
    }
    figures = bench.figures_of(runs, choosing)
    assert figures["loss_text_flush_adamw"] == pytest.approx(2.1)
    assert figures["own_rate_loss_gap_text_2bw_adamw"] == pytest.approx(0.4)
    assert figures["own_rate_loss_gap_error_text_2bw_adamw"] == pytest.approx(0.1)
    assert figures["own_rate_loss_gap_text_2bw_adamw_predict"] == pytest.approx(-0.1)
    assert "own_rate_loss_gap_error_text_2bw_adamw_predict" not in figures
    assert "own_rate_loss_gap_text_pipedream_sgd" not in figures
    assert figures["worst_of_best_gap_2bw"] == pytest.approx(0.4), (
        "chosen by other seeds, of optimizers as good as AdamW"
    )


def test_neighbouring_rates_are_a_factor_of_two_or_two_and_a_half_apart() -> None:
    rates = [0.001]
    while rates[-1] < 1:
        rates.append(bench.neighbour(rates[-1], 1))
    assert rates == [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    assert [bench.neighbour(rate, -1) for rate in rates[1:]] == rates[:-1]


def test_muon_for_several_matrices_at_once_is_torchs_up_to_bfloat16() -> None:
    torch.manual_seed(0)
    shapes = [(16, 48), (48, 16), (16, 16), (16, 16)]
    both = [[nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2)]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw"}
    ours, theirs = BatchedMuon(both[0], options["lr"]), torch.optim.Muon(both[1], **options)
    for _ in range(5):
        for p, q in zip(*both, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(*both, strict=True):
        assert (p - q).norm() < 0.03 * (p - 1).norm()


def test_rates_warm_up_and_fall() -> None:
    factors = [bench.rate_factor(update, 100) for update in range(100)]
    assert factors[:5] == sorted(factors[:5])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert min(factors) > 0
    assert max(factors) <= 1

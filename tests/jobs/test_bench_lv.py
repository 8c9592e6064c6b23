"""The parts of bench_lv that decide what a figure means; its runs are the benchmark itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.bench.convergence.bench import Found
from jobs.bench.lv import accuracy, bench, chain, memory, paper
from jobs.bench.lv.chain import Chain
from jobs.bench.lv.policy import LV, POLICIES
from jobs.bench.lv.torch_gpipe import HeldLinks
from jobs.bench.memory import runs
from jobs.bench.memory.runs import Told
from jobs.lib.held_links import LEARNING_RATE
from raypipe import PipelineConfig
from raypipe.engine.codec.choice import wire_bytes

SMALL = Chain(num_stages=2, num_microbatches=2, stage_s=0.001, load=0.1)


# Time.


def test_a_message_takes_its_load_on_a_link() -> None:
    ours = Chain()
    assert ours.message_s == pytest.approx(ours.load * ours.stage_s)
    assert 4 * ours.width / chain.RATE_BYTES_S == ours.message_s
    assert sum(map(sum, ours.layer_seconds())) == pytest.approx(ours.num_stages * ours.stage_s)


def test_equal_numbers_of_layers_are_the_worse_cut() -> None:
    ours = Chain()
    cut = chain.equal_cut(ours)
    assert [b - a for a, b in zip((0, *cut), (*cut, 24), strict=True)] == [3] * 8
    assert paper.slowest_s(ours, cut) > 1.4 * paper.slowest_s(ours, (4, 8, 10, 12, 14, 16, 20))


@pytest.mark.parametrize("name", ["gpipe", "lv"])
def test_every_layer_does_every_micro_batch(name: str) -> None:
    seconds = chain.run_ours(SMALL, (10,), POLICIES[name], 3, local=True)
    assert len(seconds) == 3


def test_layers_that_were_left_out_are_found() -> None:
    done = {str(layer): -6 * LEARNING_RATE for layer in range(len(chain.SHAPE))}
    chain.check_weights(done, 6)
    with pytest.raises(RuntimeError, match="not every micro-batch"):
        chain.check_weights({**done, "3": -5 * LEARNING_RATE}, 6)
    with pytest.raises(RuntimeError, match="of 23 layers"):
        chain.check_weights(dict(list(done.items())[:-1]), 6)


def test_on_paper_gpipe_flushes_and_lv_is_bound_by_its_slowest_link() -> None:
    """Two stages on free links: GPipe takes up to (M + 1) (f + b), and 1F1B without a flush M (f + b)."""
    free = Chain(num_stages=2, num_microbatches=4, stage_s=0.3, load=1e-9)
    cut = (12,)
    f_s, b_s = (sum(part) / 2 for part in zip(*chain.stages_of(free, cut), strict=True))
    slow_s = paper.slowest_s(free, cut)
    assert 5 * (f_s + b_s) <= paper.paper_s(free, cut, POLICIES["gpipe"]) <= 5 * slow_s
    assert paper.paper_s(free, cut, POLICIES["pipedream"]) == pytest.approx(4 * slow_s, rel=0.01)
    # On links that take all of the time, codecs are worth what they save on the slower of both ways.
    crowded = free._replace(load=1e6)
    ratio = paper.paper_s(crowded, cut, POLICIES["pipedream"]) / paper.paper_s(crowded, cut, LV)
    assert ratio == pytest.approx(paper.SHRINKS["bf16"], rel=0.01)


def test_codecs_shrink_messages_as_the_paper_steps_have_it() -> None:
    for name in ("bf16", "int8"):
        assert 4 * 128_000 / wire_bytes(name, torch.float32, 128_000) == pytest.approx(paper.SHRINKS[name], rel=1e-3)


class _Op:
    """What torch hands over, as far as it is looked at."""

    def __init__(self, op: Any, tensor: torch.Tensor, peer: int) -> None:
        self.op, self.tensor, self.peer, self.group_peer, self.group, self.tag = op, tensor, peer, peer, None, 0


def test_torchs_messages_leave_in_order_and_each_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    sent: list[float] = []
    monkeypatch.setattr(dist, "send", lambda tensor, **to: sent.append(tensor.item()))
    links = HeldLinks(rate_bytes_s=4 / 0.01)
    works = [links.post([_Op(dist.isend, torch.tensor([float(i)]), 1)])[0] for i in range(3)]
    assert sent == []
    works[2].wait()
    links.close()
    assert sent == [0.0, 1.0, 2.0]


def test_ratios_are_of_runs_at_the_same_load() -> None:
    settings = bench.Settings(loads=(4.0, 0.25))
    names = bench.candidates_of(settings)
    assert {name for name, (policy, *_) in names.items() if policy == "lv"} == {
        "lv", "lv_load0_25", "layers_load0_25",
    }  # fmt: skip
    steps = {name: [1.0] for name in names} | {"lv": [0.5], "lv_load0_25": [0.25], "layers_load0_25": [0.375]}
    told = dict.fromkeys(names, 1.0) | {"lv": 0.4}
    figures = bench.time_figures(steps, told, settings)
    assert figures["time_vs_pipedream"] == 2.0
    assert figures["paper_vs_torch_gpipe"] == 2.5
    assert figures["time_vs_gpipe_load0_25"] == 4.0
    assert figures["time_vs_layers_load0_25"] == 1.5
    assert figures["measured_vs_paper"] == 1.25
    assert not {"time_vs_lv", "time_vs_lv_load0_25"} & set(figures)


# Memory.


def test_sums_over_stages_and_versions() -> None:
    models = {"weights": memory.MODELS["weights"]}
    told = {
        "weights": {
            "lv_sgd": Told([{"weights x 2": 20, "activations": 5}, {"weights x 1": 10, "activations": 5}], [2, 1]),
            "stash_sgd": Told([{"weights x 4": 40, "activations": 5}, {"weights x 1": 10, "activations": 5}], [4, 1]),
        }
    }
    peaks = {("weights", "lv", "sgd"): [30, 15], ("weights", "stash", "sgd"): [45, 15]}
    figures = memory.figures_of(models, peaks, told)
    assert figures == {
        "peak_vs_pipedream_sgd": 0.75,
        "predicted_peak_vs_pipedream_sgd": pytest.approx(40 / 60),
        "predicted_vs_measured_weights_lv_sgd": pytest.approx(40 / 45),
        "predicted_vs_measured_weights_stash_sgd": 1.0,
        "versions_lv": 3,
        "versions_pipedream": 5,
    }
    said = memory.reason_of(models, told, "peak_vs_pipedream_sgd")
    assert "lv 75% weights, 25% activations; stash 83% weights, 17% activations" in said


@pytest.mark.parametrize("name", memory.MODELS)
def test_plans_keep_the_targets(name: str, tmp_path: Path) -> None:
    """By the memory model alone, of layers an eighth as wide; what is measured is the benchmark's."""
    model = memory.MODELS[name]
    sizes = model.sizes._replace(width=model.sizes.width // 8, microbatch=model.sizes.microbatch // 8)
    runs._predict(sizes, ("lv", model.against), str(tmp_path), str(tmp_path / "told.json"))
    told = {key: Told(*found) for key, found in json.loads((tmp_path / "told.json").read_text()).items()}
    figures = memory.figures_of({name: model}, {}, {name: told})
    for optimizer in ("sgd", "adamw"):
        assert figures[f"predicted_peak_vs_{model.named}_{optimizer}"] <= 0.70
    assert figures["versions_lv"] == 15
    assert figures[f"versions_{model.named}"] == {"pipedream": 36, "gpipe": 8}[model.named]


# Accuracy.


def cells() -> accuracy.Cells:
    def runs(*accuracies: float) -> list[Found]:
        return [Found(1.0, found, True, 1.0) for found in accuracies]

    exact = {("digits", "sgd"): runs(0.96, 0.98), ("text", "adamw"): runs(0.4, 0.4)}
    lv = {("digits", "sgd"): runs(0.95, 0.98), ("text", "adamw"): runs(0.38, 0.4)}
    rates = {f"{name} {' '.join(cell)}": 0.1 for name in ("exact", "lv") for cell in exact}
    return accuracy.Cells(exact, lv, rates)


def test_drops_are_differences_seed_by_seed_and_the_worst_is_named() -> None:
    figures = accuracy.figures_of(cells())
    assert figures == {
        "accuracy_drop_digits_sgd": pytest.approx(0.5),
        "accuracy_drop_error_digits_sgd": pytest.approx(0.5),
        "accuracy_exact_digits_sgd": pytest.approx(0.97),
        "accuracy_drop_text_adamw": pytest.approx(1.0),
        "accuracy_drop_error_text_adamw": pytest.approx(1.0),
        "accuracy_exact_text_adamw": pytest.approx(0.4),
    }
    assert accuracy.worst_of(figures, cells()) == "worst cell: text with adamw, +1.00 points"
    assert [row[0] for row in accuracy.rows_of(figures, cells())] == ["digits sgd", "text adamw"]


def test_no_cell_is_left_out_of_a_full_run() -> None:
    settings = bench.Settings()
    assert set(settings.tasks) == {"digits", "text"}
    assert set(settings.optimizers) == {"sgd", "adamw"}


# What is said.


def test_every_target_gets_a_line_and_a_miss_its_reason() -> None:
    figures = {"time_vs_pipedream": 1.5, "peak_vs_gpipe_sgd": 0.6, "accuracy_drop_text_sgd": 0.7}
    lines = bench.verdicts(figures, dict.fromkeys(figures, "because"))
    assert lines == [
        "time_vs_pipedream 1.500, wanted >= 1.8: MISSED; because",
        "peak_vs_gpipe_sgd 0.600, wanted <= 0.70: met",
        "accuracy_drop_text_sgd 0.700, wanted <= 0.5: MISSED; because",
    ]
    assert all("not measured" in line for line in bench.verdicts({}, {}))


def test_reasons_are_there_for_whatever_may_miss() -> None:
    settings = bench.Settings(loads=(4.0,), models={})
    steps = {name: [1.0] for name in bench.candidates_of(settings)}
    figures = bench.time_figures(steps, dict.fromkeys(steps, 0.8), settings) | accuracy.figures_of(cells())
    reasons = bench.reasons_of(figures, steps, dict.fromkeys(steps, 0.8), {}, cells(), settings)
    assert set(reasons) == {
        name for name in figures for pattern in bench.TARGETS if re.fullmatch(pattern, name)
    }  # fmt: skip
    assert "steps took 1.25 (lv) and 1.25 (pipedream)" in reasons["time_vs_pipedream"]
    assert "one standard error is 0.50; worst cell: text with adamw" in reasons["accuracy_drop_digits_sgd"]


@pytest.mark.parametrize("fields", POLICIES.values(), ids=list(POLICIES))
def test_policies_are_configurations(fields: dict[str, Any]) -> None:
    assert PipelineConfig(num_stages=8, **fields).schedule == fields["schedule"]

"""The parts of bench_convergence that decide what a figure means; its runs are the benchmark itself."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from jobs.bench.convergence import bench, tasks
from jobs.bench.convergence.bench import Found
from jobs.bench.convergence.tasks import TASKS


def runs(*accuracies: float, loss: float = 1.0) -> list[Found]:
    return [Found(loss, accuracy, True, 1.0) for accuracy in accuracies]


def test_figures_are_differences_seed_by_seed() -> None:
    figures = bench.figures_of(
        {
            ("digits", "sgd", "flush"): runs(0.96, 0.98, loss=0.5),
            ("digits", "sgd", "2bw"): runs(0.95, 0.98, loss=0.75),
            ("digits", "adamw", "flush"): runs(0.9, 0.9),
        }
    )
    assert figures == {
        "accuracy_digits_flush_sgd": pytest.approx(0.97),
        "loss_digits_flush_sgd": pytest.approx(0.5),
        "accuracy_drop_digits_2bw_sgd": pytest.approx(0.5),
        "loss_gap_digits_2bw_sgd": pytest.approx(0.25),
        "loss_gap_error_digits_2bw_sgd": 0.0,
        "accuracy_digits_flush_adamw": pytest.approx(0.9),
        "loss_digits_flush_adamw": pytest.approx(1.0),
    }


def test_every_policy_of_old_weights_may_choose_its_own_rate(tmp_path: Path) -> None:
    """From runs that are known, so that none is run."""
    settings = bench.Settings(2, ("digits",), ("flush", "2bw", "bf16"), ("sgd",))
    best = {"flush": 0.1, "2bw": 0.025, "bf16": 0.1}
    kept = tmp_path / "runs.jsonl"
    with kept.open("w") as file:
        for policy, rate, seed in itertools.product(
            best, TASKS["digits"].learning_rates["sgd"], (*range(2), *bench.CHOOSING_SEEDS)
        ):
            if policy == "bf16" and (rate != 0.1 or seed > 1):
                continue  # it computes with the newest weights: exact training chooses for it
            found = Found(abs(rate - best[policy]), rate, True, 1.0)
            file.write(json.dumps([[("digits", "sgd", policy), seed, rate, 1.0], found]) + "\n")
    lines = kept.read_text()
    measured = bench.measure(settings, kept)
    assert kept.read_text() == lines
    accuracies = {name: {key[2]: [run.accuracy for run in found] for key, found in runs.items()}
                  for name, runs in (("same", measured.runs), ("own", measured.own))}  # fmt: skip
    assert accuracies["same"] == {"flush": [0.1] * 2, "2bw": [0.1] * 2, "bf16": [0.1] * 2}
    assert accuracies["own"] == {"flush": [0.1] * 2, "2bw": [0.025] * 2}


def test_exact_training_must_arrive() -> None:
    found = {("digits", "sgd", "flush"): runs(0.94, 0.95), ("digits", "sgd", "pipedream"): runs(0.1)}
    assert bench.shortfalls(found) == ["digits with sgd: accuracy 0.945, wanted 0.95"]
    assert bench.shortfalls({("digits", "sgd", "flush"): runs(0.95, 0.96)}) == []


@pytest.mark.parametrize("name", TASKS)
def test_models_are_cut_into_as_many_stages_as_there_are(name: str) -> None:
    task = TASKS[name]
    model = task.build()
    children = [child for child, _ in model.named_children()]
    positions = [0, *(children.index(cut) for cut in task.cuts), len(children)]
    assert len(task.cuts) == bench.STAGES - 1
    for start, stop in itertools.pairwise(positions):
        assert list(model[start:stop].parameters()), "a stage without weights has no versions"


def test_text_is_judged_between_knowing_nothing_and_bigrams() -> None:
    task = TASKS["text"]
    loss, accuracy = task.evaluate(task.build())
    assert loss == pytest.approx(math.log(256), abs=0.7)
    assert 0 <= accuracy < 0.2
    assert task.arrived(math.log(256), 0.0) == 0.0
    assert task.arrived(tasks._text()[2], 0.0) == pytest.approx(1.0)
    tokens, targets = task.train().tensors
    assert tokens.shape[1] == tasks.CONTEXT
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_no_digit_is_trained_on_and_held_out() -> None:
    task = TASKS["digits"]
    train, held = task.train().tensors, task.heldout().tensors
    assert (len(train[0]), len(held[0])) == (1152, 599)
    images = {tuple(image.tolist()) for image in held[0]}
    assert not images & {tuple(image.tolist()) for image in train[0]}
    assert task.evaluate(task.build())[0] == pytest.approx(math.log(10), abs=0.2)


@pytest.mark.parametrize("policy", bench.POLICIES.values(), ids=list(bench.POLICIES))
def test_an_epoch_has_the_same_updates_for_every_policy(policy: bench.Policy) -> None:
    samples = bench.UPDATE_SAMPLES * bench.MICROBATCHES // policy.every
    assert tasks.EPOCH_MULTIPLE % samples == 0
    assert len(TASKS["text"].train()) % samples == 0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", bench.OPTIMIZERS)
def test_exact_training_of_a_few_updates_learns(optimizer: str) -> None:
    """The whole path: trainer, checkpoint, evaluation."""
    task = TASKS["text"]
    rate = task.learning_rates[optimizer][1]
    found = bench.train(task, bench.POLICIES["flush"], optimizer, 0, rate, share=0.05)
    assert found.ended
    assert found.loss < math.log(256)

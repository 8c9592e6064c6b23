"""What a loss over the whole mini-batch costs: planned bytes against counted ones, and seconds once per mini-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raypipe import PipelineTrainer
from raypipe.engine.device.device import Mark
from raypipe.engine.stage_runner import StageRunner
from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.schedule import Action, Op
from raypipe.ir.units import human_s
from raypipe.preflight.joined_loss import loss_seconds
from raypipe.profiling.workspace import LiveBytes
from raypipe.run.plans.blueprint import predicted_step
from tests.runs.test_whole_minibatch_losses import Own
from tests.trainers import trainer_of
from tests.zoo.cases.losses import contrastive, dice

pytestmark = [pytest.mark.engine, pytest.mark.slow]

COUNT, PASSING = 4, ("activations", "messages", "workspace", "gradients")
"""Number of micro-batches; memory that comes and goes within a run."""


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))


def segmenter() -> nn.Module:
    layers = (nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 2, 1))
    return nn.Sequential(*layers)


def vectors(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 64), torch.randn(count, 64))


def masks(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 2, 16, 16), torch.randint(0, 2, (count, 16, 16)))


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[int], TensorDataset], int]] = {
    "InfoNCE": (perceptron, contrastive, vectors, 256),
    "InfoNCE of its own": (lambda: Own(perceptron(), contrastive), None, vectors, 256),
    "Dice": (segmenter, dice, masks, 32),
}


def trainer(folder: Path, name: str, **config: Any) -> PipelineTrainer:
    make, loss_fn, data, samples = CASES[name]
    fields = {"partitioner": "auto", "num_microbatches": COUNT, "loss_over": "minibatch", "verify": "off"} | config
    return trainer_of(
        make(), folder, loss_fn=loss_fn, train_data=data(2 * samples), minibatch_size=samples, **fields
    )  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_are_those_that_live(
    name: str, replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both stages within a tenth (a fifth with replicas), and on the last one not less.

    Received messages were allocated by the sender. Replicas of the last stage allocate as many outputs for each other
    as they receive.
    """
    live: dict[tuple[int, int], LiveBytes] = {}
    run_of = StageRunner.run_of

    def counted(self: StageRunner, op: Op) -> Callable[[Action, Mark], None]:
        run = run_of(self, op)

        def counting(action: Action, since: Mark) -> None:
            with live.setdefault((self.stage, self.worker), LiveBytes()):
                run(action, since)

        return run if op in (Op.SEND_F, Op.SEND_B) else counting

    made = trainer(tmp_path, name, num_replicas=[1, replicas])
    plan = made.plan()
    monkeypatch.setattr(StageRunner, "run_of", counted)
    made.fit(num_steps=2, local=True, progress=False)
    assert plan.prediction is not None
    for (stage, worker), counted_bytes in live.items():
        if stage == 0 and replicas > 1:
            continue
        memory, own = dict(plan.prediction.stages[stage].memory), COUNT // (replicas if stage else 1)
        planned = sum(nbytes for what, nbytes in memory.items() if what.startswith(PASSING))
        received = memory["messages"] * own // (own + 1) if stage else 0
        least = 1.0 if stage else 0.95
        # How many outputs of other replicas wait when the most is allocated depends on the threads.
        most = 1.1 if replicas == 1 else 1.2
        assert least <= planned / (max(counted_bytes.log) + received) <= most, worker


def test_seconds_of_the_loss_count_once_per_mini_batch(tmp_path: Path) -> None:
    for count in (2, 8):
        plan = trainer(tmp_path / str(count), "Dice", num_microbatches=count).plan()
        prediction, alone = plan.prediction, predicted_step(plan)
        assert prediction is not None
        assert alone is not None
        assert prediction.loss_s > 0
        assert prediction.step_s == pytest.approx(alone.makespan_s + prediction.loss_s)
        assert prediction.samples_per_s == pytest.approx(plan.minibatch_size / prediction.step_s)
        assert f"it takes {human_s(prediction.loss_s)} of each step" in dict(plan.reasons)["loss"]


def test_replicas_of_the_last_stage_wait_for_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the planner weighs: with the choice, no plan is slower than on one worker, however slow the links."""
    monkeypatch.setattr("raypipe.prepare.prepare.loss_seconds", lambda *_: 1e-4)
    profiled, waits, chosen = trainer(tmp_path, "Dice").profile(), [], []
    for bandwidth in (1e12, 4e6):
        cluster, folder = Cluster.uniform(3, bandwidth_bytes_s=bandwidth), tmp_path / f"{bandwidth:g}"
        auto, alone, two = (
            trainer(folder / str(replicas), "Dice", num_replicas=replicas, num_stages=1).plan(
                cluster=cluster, profiled=profiled
            )
            for replicas in ("auto", 1, 2)
        )
        assert auto.prediction is not None
        assert alone.prediction is not None
        assert two.prediction is not None
        assert alone.prediction.loss_s == 1e-4
        assert auto.prediction.step_s <= alone.prediction.step_s * 1.001
        waits.append(two.prediction.loss_s - 1e-4)
        chosen.append(auto.partition.replicas[-1])
    assert 0 < waits[0] < waits[1]
    assert chosen[0] > 1 == chosen[1]


def test_a_loss_is_timed_on_the_whole_mini_batch(tmp_path: Path) -> None:
    sizes = []

    def noted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not output.is_meta:
            sizes.append((len(output), len(target)))
        return contrastive(output, target)

    job = trainer_of(
        perceptron(), tmp_path, loss_fn=noted, train_data=vectors(64), minibatch_size=32, loss_over="minibatch"
    )._prepared()
    rule: Any = job.settings.loss_reduction
    sizes.clear()
    rows = dict(zip((0, 1), vectors(5).tensors, strict=True))
    assert loss_seconds(job.opened.captured, rule, 32, rows) > 0
    assert set(sizes) == {(32, 32)}


def test_a_profile_without_the_loss_is_not_one_of_its_micro_batches(tmp_path: Path) -> None:
    without = trainer(tmp_path / "a", "Dice").profile()
    assert without.whole_loss
    assert trainer(tmp_path / "b", "Dice").plan(profiled=without).prediction is not None
    other = trainer(tmp_path / "c", "Dice", loss_over="auto", loss_reduction="per_microbatch")
    with pytest.raises(PlanError, match="The profile is without the loss"):
        other.plan(profiled=without)
    # Its bytes then count twice, which is safe.
    before = dataclasses.replace(other.profile(), whole_loss=False)
    planned = trainer(tmp_path / "d", "Dice").plan(profiled=before).prediction
    assert planned is not None
    assert planned.loss_s == 0

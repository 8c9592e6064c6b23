"""A loss over the whole mini-batch: the gradients are those of plain PyTorch's loss of all rows at once.

The zoo has more losses (tests/zoo/cases/losses.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.data.open_data import open_data
from raypipe.errors import ConfigError, StageError
from raypipe.preflight.joined_loss import loss_bytes
from raypipe.run.plans.later import another, later_plan
from raypipe.testing import reference
from tests.exactness import Recorder, same_bits
from tests.trainers import adamw, trainer_of
from tests.zoo.cases.losses import Towers, clip, described

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]

SAMPLES, MINIBATCH, STEPS = 20, 8, 4
"""An epoch is mini-batches of 8, 8 and 4 samples."""


class Contrastive(Towers):
    """Returns its own loss."""

    def forward(self, image: torch.Tensor, text: torch.Tensor, target: torch.Tensor) -> Any:  # type: ignore[override]
        return {"loss": clip(super().forward(image, text), target)}


def towers(kind: type[Towers] = Towers) -> nn.Module:
    torch.manual_seed(1)
    return kind()


KINDS = pytest.mark.parametrize("kind", [Towers, Contrastive])


def trainer(
    folder: Path, name: str = "run", recorder: Any = None, loss_fn: Any = clip, kind: type[Towers] = Towers,
    **config: Any,
) -> PipelineTrainer:  # fmt: skip
    fields = {"minibatch_size": MINIBATCH, "eval_interval_steps": 2, "verify": "off"} | config
    return trainer_of(
        towers(kind), folder, name, loss_fn=loss_fn if kind is Towers else None, optimizer=recorder or adamw,
        train_data=described(SAMPLES), eval_data=described(SAMPLES), **fields,
    )  # fmt: skip


def trained(folder: Path, name: str = "run", steps: int = STEPS, **config: Any) -> tuple[list[Any], dict[str, Any]]:
    """(loss, norm and eval_loss of every step, state) of a run in threads."""
    trainer(folder, name, **config).fit(num_steps=steps, local=True, progress=False)
    return outcome(folder / name)


def outcome(run: Path) -> tuple[list[Any], dict[str, Any]]:
    rows = pq.read_table(run / "metrics.parquet").to_pylist()
    return [repr((row["loss"], row["grad_norm"], row["eval_loss"])) for row in rows], load_state_dict(run)


def assert_same(one: tuple[list[Any], dict[str, Any]], other: tuple[list[Any], dict[str, Any]]) -> None:
    assert one[0] == other[0]
    assert all(same_bits(tensor, other[1][name]) for name, tensor in one[1].items())


def of_rows(model: nn.Module, *rows: torch.Tensor) -> torch.Tensor:
    """Loss of some rows, in plain PyTorch."""
    return model(*rows)["loss"] if isinstance(model, Contrastive) else clip(model(*rows[:-1]), rows[-1])


def at_once() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of the first mini-batch of training, by nothing but PyTorch."""
    model = towers()
    image, text, target = open_data(described(SAMPLES), seed=0).read(0, 0, MINIBATCH, (0, 1, 2))
    loss = clip(model(image, text), target)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@KINDS
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_any_number_of_micro_batches_and_stages(kind: type[Towers], count: int, stages: int, tmp_path: Path) -> None:
    """To the bits of a plain loop over micro-batches, and to rounding of the whole mini-batch at once.

    Plain PyTorch cannot compute a model's own loss from micro-batches: the reference is the whole mini-batch.
    """
    fields = {"num_stages": stages, "num_microbatches": count, "loss_over": "minibatch", "max_grad_norm": 0.5}
    recorder, steps = Recorder(torch.optim.AdamW, lr=1e-2), Recorder(torch.optim.AdamW, lr=1e-2)
    made = trainer(tmp_path, recorder=recorder, kind=kind, **fields)
    made.plan()
    recorder.steps.clear()
    result = made.fit(num_steps=STEPS, local=True, progress=False)
    config = PipelineConfig(minibatch_size=MINIBATCH, partitioner="parameters", **fields)
    theirs = reference(
        towers(kind), loss_fn=clip if kind is Towers else None, optimizer=steps, train_data=described(SAMPLES),
        num_steps=STEPS, pipeline=config,
    )  # fmt: skip
    off = 0.0 if kind is Towers else 1e-5
    assert [record.loss for record in result.records] == pytest.approx(list(theirs.losses), rel=off, abs=0.0)
    assert [record.grad_norm for record in result.records] == pytest.approx(list(theirs.grad_norms), rel=off, abs=0.0)
    state = load_state_dict(result.checkpoint)
    for name, parameter in theirs.parameters.items():
        torch.testing.assert_close(state[name], parameter, rtol=off, atol=off, msg=name)
    loss, gradients = at_once()
    norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
    assert result.records[0].loss == pytest.approx(float(loss), rel=1e-6)
    for name, gradient in gradients.items():
        seen = recorder.steps[0][name]
        assert seen is not None
        clipped = gradient * min(1.0, 0.5 / (norm + 1e-6))
        assert float((seen - clipped).norm()) <= 1e-6 * float(clipped.norm()), name


@KINDS
def test_an_evaluation_is_the_mean_over_its_mini_batches(kind: type[Towers], tmp_path: Path) -> None:
    result = trainer(tmp_path, kind=kind).fit(num_steps=STEPS, local=True, progress=False)
    model = towers(kind)
    model.load_state_dict(load_state_dict(result.checkpoint))
    columns = described(SAMPLES).tensors
    with torch.no_grad():
        parts = [(len(x), of_rows(model, x, y, t)) for x, y, t in zip(*(c.split(8) for c in columns), strict=True)]
    wanted = sum(count * float(loss) for count, loss in parts) / SAMPLES
    assert result.metrics["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    again = trainer(tmp_path, "again", kind=kind).evaluate(result.checkpoint, data=described(SAMPLES), local=True)
    assert again["eval_loss"] == pytest.approx(wanted, rel=1e-6)


class Shown(Contrastive):
    """Returns what a metric reads, too."""

    def forward(self, image: torch.Tensor, text: torch.Tensor, target: torch.Tensor) -> Any:  # type: ignore[override]
        output = Towers.forward(self, image, text)
        return {"loss": clip(output, target), "image": output["image"], "alike": output["image"] @ output["text"].T}


def shown(folder: Path, key: str) -> PipelineTrainer:
    return PipelineTrainer(
        towers(Shown), optimizer=adamw, train_data=described(SAMPLES), eval_data=described(SAMPLES),
        metrics={"most": lambda output, _: float(output[key].max())},
        pipeline=PipelineConfig(num_stages=2, minibatch_size=MINIBATCH, num_microbatches=4, partitioner="parameters"),
        run_config=SimpleNamespace(name="run", storage_path=str(folder)),
    )  # fmt: skip


def test_metrics_read_outputs_beside_the_models_own_loss(tmp_path: Path) -> None:
    result = shown(tmp_path, "image").fit(num_steps=STEPS, local=True, progress=False)
    model = towers(Shown)
    model.load_state_dict(load_state_dict(result.checkpoint))
    with torch.no_grad():
        parts = [model(*rows)["image"].max() for rows in zip(*(x.split(2) for x in described(SAMPLES).tensors))]  # noqa: B905
    assert result.metrics["eval_most"] == pytest.approx(float(torch.stack(parts).mean()), rel=1e-5)
    with pytest.raises(ConfigError, match="a metric reads an output that several samples of a batch share"):
        shown(tmp_path / "other", "alike").plan()


def test_a_profile_is_of_the_model_that_is_planned(tmp_path: Path) -> None:
    measured = trainer(tmp_path, kind=Contrastive).profile()
    assert trainer(tmp_path, kind=Contrastive, partitioner="auto").plan(profiled=measured).schedule.kind == "gpipe"


@KINDS
@pytest.mark.parametrize(
    ("fields", "other"),
    [
        ({"num_lanes": 2}, {"num_replicas": [2, 1]}),
        ({"num_lanes": 2}, {"num_replicas": [1, 2]}),
        ({"num_lanes": 2}, {"num_replicas": 2, "recompute": "always"}),
        ({"num_lanes": 4}, {"num_replicas": [1, 4]}),
        ({"num_lanes": 2, "num_stages": 3}, {"num_replicas": [1, 2, 1], "num_stages": 3}),
        ({}, {"recompute": "always"}),
        ({}, {"recompute": [True, False], "num_stages": 2}),
        ({}, {"partitioner": "auto", "num_stages": 3}),
        ({"precision": "bf16-autocast"}, {"precision": "bf16-autocast", "num_stages": 3, "recompute": "always"}),
        ({"precision": "fp16"}, {"precision": "fp16", "num_stages": 3}),
        ({"precision": "bf16"}, {"precision": "bf16", "num_stages": 3}),
    ],
    ids=lambda fields: ", ".join(map(str, fields.values())),
)
def test_what_changes_no_bit(kind: type[Towers], fields: Any, other: Any, tmp_path: Path) -> None:
    assert_same(trained(tmp_path, "one", kind=kind, **fields), trained(tmp_path, "other", kind=kind, **other))


@KINDS
def test_16_bits_are_those_of_the_loss_at_once(kind: type[Towers], tmp_path: Path) -> None:
    loss, _ = at_once()
    for precision in ("fp16", "bf16", "bf16-autocast"):
        first = trainer(tmp_path, precision, kind=kind, precision=precision).fit(
            num_steps=1, local=True, progress=False
        )
        assert first.records[0].loss == pytest.approx(float(loss), rel=2e-2)


@KINDS
def test_a_run_goes_on_from_its_checkpoint(kind: type[Towers], tmp_path: Path) -> None:
    whole = trained(tmp_path, "whole", kind=kind)
    trained(tmp_path, "parts", steps=2, kind=kind)
    assert_same(whole, trained(tmp_path, "parts", num_stages=3, kind=kind))
    with pytest.raises(ConfigError, match="loss_reduction"):
        trained(tmp_path, "parts", steps=STEPS + 1, kind=kind, loss_reduction="per_microbatch")


def failing(output: Any, target: torch.Tensor) -> torch.Tensor:
    if len(output["image"]) == MINIBATCH:
        raise ValueError("all of them")
    return clip(output, target)


def test_a_loss_that_fails_names_the_stage(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"Stage 1 failed in 1F3: ValueError: all of them"):
        trained(tmp_path, loss_fn=failing)


@KINDS
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "1f1b"}, "schedule='1f1b' begins backwards before the last forward. Set schedule='gpipe'"),
        ({"schedule": "zb-h1"}, "schedule='zb-h1' begins backwards before"),
    ],
)
def test_schedules_that_begin_backwards_early_are_refused(
    kind: type[Towers], fields: Any, words: str, tmp_path: Path
) -> None:
    for over, before in (("minibatch", "loss_over='minibatch' is not possible: "), ("auto", "no weights of micro")):
        with pytest.raises(ConfigError) as refused:
            trainer(tmp_path, loss_over=over, kind=kind, **fields).plan()
        assert before in str(refused.value)
        assert words in str(refused.value)


def test_asynchronous_schedules_and_weights_are_refused() -> None:
    for fields, words in (
        ({"schedule": "2bw"}, "loss_over='minibatch' is not possible with schedule='2bw'"),
        ({"loss_reduction": "mean"}, "loss_reduction='mean' has no effect with loss_over='minibatch'"),
    ):
        with pytest.raises(ConfigError, match=words):
            PipelineConfig(loss_over="minibatch", **fields)


class Spread(nn.Sequential):
    """Normalises by the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 5))


def test_outputs_that_depend_on_the_batch_are_refused() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(16, 6), torch.randn(16, 5))
    made = trainer_of(
        Spread(), loss_fn=nn.functional.mse_loss, optimizer=Recorder(torch.optim.SGD, lr=0.1), train_data=data,
        loss_over="minibatch", partitioner="auto",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="outputs for a mini-batch are not those of its micro-batches"):
        made.plan()


@KINDS
def test_the_plan_says_so_and_holds_all_micro_batches(kind: type[Towers], tmp_path: Path) -> None:
    """And what the loss takes over the mini-batch, which grows with its square."""
    job = trainer(tmp_path, kind=kind, partitioner="auto")._prepared()
    assert job.plan.schedule.kind == "gpipe"
    assert any("once over the whole mini-batch" in note for note in job.plan.notes)
    assert "schedule: gpipe, because the loss is computed over the whole mini-batch" in job.plan.explain()
    assert job.plan.prediction is not None
    assert [stage.in_flight for stage in job.plan.prediction.stages] == [4, 4]
    captured, rule = job.opened.captured, job.settings.loss_reduction
    assert dict(job.plan.prediction.stages[-1].memory)["workspace"] >= (loss_bytes(captured, rule, MINIBATCH) or 0) > 0
    assert (loss_bytes(captured, rule, 1024) or 0) > 2 * 4 * 1024**2


def test_a_run_may_get_replicas_of_the_last_stage_later(tmp_path: Path) -> None:
    job = trainer(tmp_path, num_lanes=2)._prepared()
    later = later_plan(another(job.basis, job.plan, num_stages=2, replicas=2))
    assert later.plan.partition.replicas == (2, 2)

"""Replicas of stages change no bit: gradients are summed in the same lanes, whatever worker computes them."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.engine.optim import all_reduce
from raypipe.errors import ConfigError, PlanError, StageError
from raypipe.ir.plan import Plan
from raypipe.prepare.policies import refuse_replicas
from tests.exactness import SHAPES, Run, differences, expected, same_bits, train

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

LANES = 6
MANNER: dict[str, Any] = {"max_grad_norm": 0.5}
PLACED = [(2, 1), (1, 2), (3, 1), (2, 2), (3, 2)]


@cache
def alone(name: str, stages: int, shape: str, lanes: int, **more: Any) -> Run:
    """One worker per stage, its gradients in so many lanes."""
    return train(name, stages, SHAPES[shape], "1f1b", "adamw", lanes=lanes, **MANNER, **more)


@pytest.mark.parametrize("replicas", PLACED)
def test_the_same_bits_as_one_worker_per_stage(replicas: tuple[int, ...]) -> None:
    """Losses, norms, gradients and parameters; in the last mini-batch of an epoch some replicas have nothing to do."""
    run = train("mlp", 2, SHAPES["ragged-epoch"], "1f1b", "adamw", replicas=replicas, lanes=LANES, **MANNER)
    assert differences(run, alone("mlp", 2, "ragged-epoch", LANES)) == []
    assert len({report.worker for report in run.reports[0]}) == sum(replicas)


@pytest.mark.parametrize(
    ("name", "replicas", "schedule", "shape", "more"),
    [
        ("mlp", (2, 1, 2), "gpipe", "even", {}),
        ("masked", (2, 2), "kfkb2", "ragged-microbatch", {"loss_reduction": "valid_tokens"}),
        ("frozen-below", (2, 2), "slack", "even", {}),
        ("frozen-middle", (1, 2, 1), "1f1b", "indivisible-by-k", {}),
        ("dropout-sequential", (2, 1), "gpipe", "even", {"recompute": "always"}),
        ("tied-lm", (2, 1, 2), "1f1b", "even", {}),
        ("mlp", (2, 1, 2), "zb-h1", "even", {}),
        ("frozen-below", (1, 2), "zb-h1", "ragged-epoch", {}),
    ],
)
def test_any_model_and_schedule(
    name: str, replicas: tuple[int, ...], schedule: str, shape: str, more: dict[str, Any]
) -> None:
    stages = len(replicas)
    run = train(name, stages, SHAPES[shape], schedule, "adamw", replicas=replicas, lanes=2, **MANNER, **more)
    assert differences(run, alone(name, stages, shape, 2, **more)) == []


def test_fifteen_replicas_and_one() -> None:
    """PipeDream's plan for VGG-16, each replica with less than a whole micro-batch per step."""
    run = train("mlp", 2, SHAPES["even"], "1f1b", "adamw", 2, replicas=(15, 1), lanes=15, **MANNER)
    one = train("mlp", 2, SHAPES["even"], "1f1b", "adamw", 2, lanes=15, **MANNER)
    assert differences(run, one) == []
    assert len(run.reports[0]) == 16


def test_lanes_sum_in_another_order_than_plain_pytorch_and_nothing_else() -> None:
    """One lane is plain PyTorch's order. With several the first loss is the same, and the movement to a millionth.

    A parameter itself is rounded once more, to its own last bit, which may be more than that of what it moved.
    """
    shape = SHAPES["even"]
    plain, start = expected("mlp", shape, "sgd"), train("mlp", 2, shape, "1f1b", "sgd", 0).parameters
    assert differences(train("mlp", 2, shape, "1f1b", "sgd", lanes=1), plain) == []
    run = train("mlp", 2, shape, "1f1b", "sgd", replicas=(2, 1), lanes=2)
    assert run.losses[0] == plain.losses[0]
    for name, parameter in plain.parameters.items():
        moved = (parameter - start[name]).abs().max()
        torch.testing.assert_close(run.parameters[name], parameter, rtol=2.0**-23, atol=float(moved) * 1e-6)


def test_bytes_of_the_all_reduce_are_those_of_a_ring() -> None:
    """2 (R - 1) / R times the gradients, from each replica, besides a byte for each use site, and the losses."""
    for count in (2, 3):
        run = train("mlp", 1, SHAPES["even"], "1f1b", "sgd", 1, replicas=count, lanes=count)
        gradients = sum(p.numel() * 4 for p in run.parameters.values())
        for report in run.reports[0]:
            assert report.sent_bytes == (0, 0), "nothing goes to another stage"
            assert 0 <= report.exchanged_bytes - 2 * (count - 1) / count * gradients <= 60 * (count - 1)


X, Y = torch.randn(27, 6), torch.randint(0, 3, (27,))
EVEN = 26
"""Samples of which no micro-batch has a lone one, on which a batch norm does not train."""


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def trainer(
    folder: Path, name: str, model: nn.Module | None = None, samples: int = len(X), **config: Any
) -> PipelineTrainer:
    given = {"num_stages": 2, "minibatch_size": 8, "num_microbatches": 4, "partitioner": "parameters"} | config
    return PipelineTrainer(
        model or net(nn.Dropout(0.2)),
        loss_fn=functional.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        train_data=TensorDataset(X[:samples], Y[:samples]),
        eval_data=TensorDataset(X[:11], Y[:11]),
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).double().mean()},
        pipeline=PipelineConfig(verify="off", **{"eval_interval_steps": 2} | given),
        run_config=SimpleNamespace(name=name, storage_path=str(folder)),
    )


def told(folder: Path) -> tuple[list[tuple[Any, ...]], dict[str, torch.Tensor]]:
    names = ("step", "loss", "grad_norm", "eval_loss", "eval_accuracy")
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    return [tuple(row[name] for name in names) for row in rows], load_state_dict(folder)


def test_a_run_with_replicas_is_the_run_without_and_goes_on_without_them(tmp_path: Path) -> None:
    """Evaluations and checkpoints too; what was begun with two replicas of a stage is ended with one."""
    trainer(tmp_path, "one", num_lanes=2).fit(num_steps=6, local=True, progress=False)
    trainer(tmp_path, "two", num_replicas=[2, 1]).fit(num_steps=3, local=True, progress=False)
    trainer(tmp_path, "two", num_replicas=[1, 2]).fit(num_steps=5, local=True, progress=False)
    trainer(tmp_path, "two", num_lanes=2).fit(num_steps=6, local=True, progress=False)
    (rows, one), (others, two) = told(tmp_path / "one"), told(tmp_path / "two")
    assert [row[:3] for row in rows] == [row[:3] for row in others]
    assert rows[5] == others[5]
    assert rows[3] == others[3]
    assert all(same_bits(tensor, two[name]) for name, tensor in one.items())
    with pytest.raises(ConfigError, match=r"num_lanes \(or num_replicas.*\): was 2, is 1"):
        trainer(tmp_path, "two").fit(num_steps=8, local=True, progress=False)
    trainer(tmp_path, "plain").fit(num_steps=1, local=True, progress=False)
    with pytest.raises(ConfigError, match=r"num_lanes \(or num_replicas.*\): was 1, is 2"):
        trainer(tmp_path, "plain", num_replicas=[2, 1]).fit(num_steps=2, local=True, progress=False)


def test_a_run_whose_versions_depend_on_replicas_says_so_when_others_go_on(tmp_path: Path) -> None:
    """In "pipedream" replicas decide how old weights are; in "2bw" they do not."""
    trainer(tmp_path, "one", num_replicas=[2, 1], schedule="pipedream").fit(num_steps=1, local=True, progress=False)
    with pytest.raises(ConfigError, match="num_replicas: was 2-1, is 1-2"):
        trainer(tmp_path, "one", num_replicas=[1, 2], schedule="pipedream").fit(num_steps=2, local=True)
    trainer(tmp_path, "two", num_replicas=[2, 1], schedule="2bw").fit(num_steps=1, local=True, progress=False)
    trainer(tmp_path, "two", num_replicas=[1, 2], schedule="2bw").fit(num_steps=2, local=True, progress=False)


class Unnamed(torch.optim.Optimizer):
    """Its rate has a name of its own."""

    def __init__(self, named: Any) -> None:
        super().__init__(named, {"rate": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["rate"])


def test_an_optimizer_without_a_learning_rate_trains_and_is_not_scaled(tmp_path: Path) -> None:
    def unnamed(name: str, **more: Any) -> PipelineTrainer:
        return PipelineTrainer(
            net(),
            loss_fn=functional.cross_entropy,
            optimizer=Unnamed,
            train_data=TensorDataset(X, Y),
            pipeline=PipelineConfig(
                verify="off", num_stages=2, minibatch_size=8, num_microbatches=4, partitioner="parameters",
                num_replicas=[2, 1], loss_reduction="mean", **more,
            ),
            run_config=SimpleNamespace(name=name, storage_path=str(tmp_path)),
        )  # fmt: skip

    unnamed("one").fit(num_steps=2, local=True, progress=False)
    scaled = unnamed("two", schedule="pipedream", update_interval="per_replica")
    with pytest.raises(StageError, match="Unnamed has groups whose 'lr' is missing or not a number"):
        scaled.fit(num_steps=2, local=True, progress=False)


def test_the_plan_says_who_holds_what(tmp_path: Path) -> None:
    plan = trainer(tmp_path, "plan", num_replicas=[2, 1]).plan()
    assert "2 on 3 workers, gradients summed in 2 lanes. Stage 0 (2 workers)" in str(plan)
    assert type(plan).from_json(plan.to_json()) == plan
    for stages in (1, 2):
        words = str(trainer(tmp_path, "plan", num_stages=stages, num_lanes=2).plan())
        assert f"{stages}, gradients summed in 2 lanes. Stage 0" in words
    timed = trainer(tmp_path, "plan", num_replicas=[1, 3], partitioner="auto", profile_budget_s=0.01).plan()
    assert timed.partition.replicas == (1, 3)
    assert timed.prediction is not None
    assert timed.prediction.step_s > 0


def test_what_cannot_be_replicated_is_refused_by_name(tmp_path: Path) -> None:
    batch_norm = trainer(tmp_path, "norm", net(nn.BatchNorm1d(16)), EVEN, num_replicas=[2, 1])
    with pytest.raises(PlanError, match=r"Stage 0 changes '1\..*' in every forward, so that its 2 replicas"):
        batch_norm.plan()
    trainer(tmp_path, "norm", net(nn.BatchNorm1d(16)), EVEN, num_replicas=[1, 2]).plan()
    with pytest.raises(PlanError, match="replicated_buffers=True means nothing here"):
        trainer(tmp_path, "norm", net(nn.BatchNorm1d(16)), EVEN, num_replicas=[1, 2], replicated_buffers=True).plan()
    workers = SimpleNamespace(num_workers=(2, 4))
    refuse_replicas(trainer(tmp_path, "replicas", num_replicas=[2, 1]).plan(), workers)
    aged = trainer(tmp_path, "aged", num_replicas=[2, 1], schedule="pipedream").plan()
    with pytest.raises(PlanError, match=r"num_workers=\(2, 4\)\) with num_replicas=2-1 .* Give num_workers=3"):
        refuse_replicas(aged, workers)


@pytest.mark.parametrize(
    "mode",
    [
        {"codec_forward": "int8", "codec_backward": "bf16", "precision": "bf16-autocast", "schedule": "slack"},
        {"precision": "fp16", "max_grad_norm": 0.5, "recompute": "always", "schedule": "gpipe"},
    ],
    ids=["codecs", "fp16"],
)
def test_codecs_and_precisions_keep_their_bits(mode: dict[str, Any], tmp_path: Path) -> None:
    """What a codec rounds depends on stage and micro-batch, and all replicas move the loss scale together."""
    trainer(tmp_path, "one", num_lanes=2, **mode).fit(num_steps=4, local=True, progress=False)
    trainer(tmp_path, "two", num_replicas=2, **mode).fit(num_steps=4, local=True, progress=False)
    (rows, one), (others, two) = told(tmp_path / "one"), told(tmp_path / "two")
    assert repr(rows) == repr(others)  # a step that overflowed has the norm nan
    assert math.isfinite(rows[-1][2])
    assert all(same_bits(tensor, two[name]) for name, tensor in one.items())


def test_replicas_that_change_buffers_each_keep_their_own_where_asked_to(tmp_path: Path) -> None:
    """BatchNorm trains by its micro-batch, so that parameters are exact; statistics are those of the first replica."""
    asked = trainer(tmp_path, "two", net(nn.BatchNorm1d(16)), EVEN, num_replicas=[2, 1], replicated_buffers=True)
    assert "Each of the 2 replicas of stage 0 keeps what its own micro-batches make of '1.running_mean'" in str(
        asked.plan().explain()
    )
    asked.fit(num_steps=3, local=True, progress=False)
    trainer(tmp_path, "one", net(nn.BatchNorm1d(16)), EVEN, num_lanes=2).fit(num_steps=3, local=True, progress=False)
    (rows, one), (others, two) = told(tmp_path / "one"), told(tmp_path / "two")
    assert [row[:3] for row in rows] == [row[:3] for row in others]
    statistics = {name for name in one if name.startswith("1.") and not name.endswith(("weight", "bias"))}
    assert len(statistics) == 3
    assert [name for name in one if not same_bits(one[name], two[name])] == sorted(statistics, key=list(one).index)
    assert (int(one["1.num_batches_tracked"]), int(two["1.num_batches_tracked"])) == (12, 6)


class Scaled(nn.Module):
    """Reads a buffer that it never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Late(nn.Module):
    """Counts forwards once the optimizer has moved its parameter, in a way that torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(16))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shift.detach().abs().max() > 0:
            self.count.data.add_(1)
        return x + self.shift


def test_a_child_with_a_constant_buffer_has_replicas(tmp_path: Path) -> None:
    """No graph says what an untraced child does; the trial saw no change, and every step looks again."""
    trainer(tmp_path, "two", net(Scaled()), num_replicas=2).fit(num_steps=3, local=True, progress=False)
    trainer(tmp_path, "one", net(Scaled()), num_lanes=2).fit(num_steps=3, local=True, progress=False)
    (rows, one), (others, two) = told(tmp_path / "one"), told(tmp_path / "two")
    assert rows == others
    assert all(same_bits(tensor, two[name]) for name, tensor in one.items())
    asked = trainer(tmp_path, "asked", net(Scaled()), num_replicas=2, replicated_buffers=True)
    assert "No forward changed a buffer of stage 1 when the model was tried" in str(asked.plan().explain())


def test_a_child_that_begins_to_change_a_buffer_ends_a_run_with_replicas(tmp_path: Path) -> None:
    run = trainer(tmp_path, "late", net(Late()), num_replicas=[2, 1])
    with pytest.raises(
        StageError, match=r"Stage 0 changed buffer '1\.count' in this step, but not when the model was tried"
    ):
        run.fit(num_steps=3, local=True, progress=False)
    trainer(tmp_path, "single", net(Late()), num_lanes=2).fit(num_steps=3, local=True, progress=False)
    kept = {"num_replicas": [2, 1], "replicated_buffers": True}
    trainer(tmp_path, "kept", net(Late()), **kept).fit(num_steps=3, local=True, progress=False)


OPEN = {
    "num_replicas": "auto", "num_stages": "auto", "partitioner": "auto", "num_microbatches": "auto",
    "minibatch_size": 24, "profile_budget_s": 0.01,
}  # fmt: skip


def kept_plan(folder: Path) -> Plan:
    return Plan.from_json((folder / "plan.json").read_text())


def test_the_chosen_plan_runs_and_another_run_has_its_bits(tmp_path: Path) -> None:
    trainer(tmp_path, "chosen", **OPEN).fit(num_steps=4, local=True, progress=False)
    plan = kept_plan(tmp_path / "chosen")
    assert {(2,), (1, 1)} <= {each.workers for each in plan.candidates}
    (chosen,) = (each for each in plan.candidates if each.chosen)
    assert chosen.workers == plan.partition.replicas
    given = {
        "num_stages": plan.partition.num_stages, "num_replicas": list(plan.partition.replicas),
        "num_lanes": plan.schedule.wiring.lanes, "num_microbatches": plan.num_microbatches, "minibatch_size": 24,
    }  # fmt: skip
    trainer(tmp_path, "given", **given).fit(num_steps=4, local=True, progress=False)
    (rows, one), (others, two) = told(tmp_path / "chosen"), told(tmp_path / "given")
    assert [row[:2] for row in rows] == [row[:2] for row in others]
    assert all(same_bits(tensor, two[name]) for name, tensor in one.items())


def test_a_run_goes_on_in_its_lanes_whatever_would_be_chosen_today(tmp_path: Path) -> None:
    """Two lanes where nothing is replicated: the planner would choose one for a pipeline."""
    trainer(tmp_path, "kept", num_lanes=2, num_microbatches=4, minibatch_size=24).fit(
        num_steps=2, local=True, progress=False
    )
    trainer(tmp_path, "kept", **OPEN).fit(num_steps=4, local=True, progress=False)
    plan = kept_plan(tmp_path / "kept")
    assert plan.schedule.wiring.lanes == 2
    assert max(plan.partition.replicas) <= 2
    config = json.loads((tmp_path / "kept" / "plan.json").read_text())
    assert config["num_microbatches"] == 4


def test_what_changes_buffers_is_not_replicated_and_the_table_says_so(tmp_path: Path) -> None:
    plan = trainer(tmp_path, "norm", net(nn.BatchNorm1d(16)), **OPEN).plan()
    assert plan.partition.replicas == (1, 1)
    refused = {each.workers: each.refused for each in plan.candidates}
    assert refused[2,] == "a stage with several workers would change buffers in every forward"
    assert "  data parallelism  " in str(plan)
    with pytest.raises(PlanError, match="in every forward, so that its 2 replicas"):
        trainer(tmp_path, "norm", net(nn.BatchNorm1d(16)), num_stages=1, num_replicas=2).plan()


def test_stages_that_begin_at_named_modules_have_replicas_on_the_workers_that_are_offered(tmp_path: Path) -> None:
    """Stages are counted by the modules then, not by workers."""
    made = trainer(tmp_path, "named", num_stages="auto", partitioner=("3",), num_replicas=[2, 1])
    made._scaling = SimpleNamespace(num_workers=3)
    assert made.plan().partition.replicas == (2, 1)


def test_fields_for_replicas_that_the_chosen_plan_has_no_use_for_are_named(tmp_path: Path) -> None:
    made = trainer(tmp_path, "single", **OPEN, replicated_buffers=True, codec_sums="bf16")
    made._scaling = SimpleNamespace(num_workers=1)
    notes = " ".join(made.plan().notes)
    assert "replicated_buffers=True changes nothing" in notes
    assert "codec_sums changes nothing" in notes


def wide() -> nn.Sequential:
    """Layers of 256 KiB and more, which are exchanged early, and their biases, which are not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.Dropout(0.1), nn.Linear(256, 280), nn.ReLU(),
        nn.Linear(280, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("replicas", "more"),
    [
        ([3], {"num_stages": 1, "num_lanes": 3}),
        ([2], {"num_stages": 1, "num_lanes": 2, "codec_sums": "bf16"}),
        ([2, 2], {"num_lanes": 4, "schedule": "gpipe", "recompute": "always", "max_grad_norm": 0.1}),
        ([2, 2, 2, 2], {"num_stages": 4, "num_lanes": 2, "schedule": "interleaved"}),
    ],
)
def test_gradients_exchanged_during_the_backward_have_the_same_bits(
    replicas: list[int], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = []
    inner = all_reduce._ThreadedExchange.completed
    monkeypatch.setattr(
        all_reduce._ThreadedExchange, "completed", lambda begun, site: (completed.append(site), inner(begun, site))[1]
    )
    trainer(tmp_path, "one", wide(), **more).fit(num_steps=3, local=True, progress=False)
    assert completed == []
    trainer(tmp_path, "many", wide(), num_replicas=replicas, **more).fit(num_steps=3, local=True, progress=False)
    assert completed, "layers were exchanged as their gradients came"
    (rows, one), (others, two) = told(tmp_path / "one"), told(tmp_path / "many")
    assert rows == others
    assert all(same_bits(tensor, two[name]) for name, tensor in one.items())


def test_layers_of_16_bits_are_exchanged_as_early_as_their_sums_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """88 KiB of fp32, whose leaf has 44: chunks are exchanged in their order, so one that is late delays all others."""
    completed = []
    inner = all_reduce._ThreadedExchange.completed
    monkeypatch.setattr(
        all_reduce._ThreadedExchange, "completed", lambda begun, site: (completed.append(site), inner(begun, site))[1]
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 150), nn.ReLU(), nn.Linear(150, 150), nn.ReLU(), nn.Linear(150, 3))
    more: dict[str, Any] = {"num_stages": 1, "precision": "bf16"}
    trainer(tmp_path, "two", net, num_replicas=2, **more).fit(num_steps=2, local=True, progress=False)
    assert set(completed) == {2}, "the weight of the second layer, and nothing that is small"


@pytest.mark.parametrize(
    ("name", "schedule", "stages", "replicas", "lanes", "shape", "more"),
    [
        ("mlp", "zb-v", 4, 2, 2, "even", {}),
        ("mlp", "interleaved", 4, 2, 2, "even", {}),
        ("mlp", "interleaved", 4, 3, 6, "ragged-epoch", {}),
        ("mlp", "zb-v", 4, 2, 5, "ragged-epoch", {}),
        ("tied-lm", "interleaved", 4, 2, 2, "even", {}),
        ("tied-lm", "zb-v", 2, 2, 2, "ragged-microbatch", {}),
        ("frozen-below", "zb-v", 4, 2, 4, "ragged-epoch", {}),
        ("frozen-middle", "interleaved", 4, 2, 2, "indivisible-by-k", {}),
        ("masked", "zb-v", 4, 2, 2, "ragged-microbatch", {"loss_reduction": "valid_tokens"}),
        ("dropout-sequential", "interleaved", 4, 2, 2, "even", {"recompute": "always"}),
    ],
)
def test_replicas_of_workers_with_several_stages_have_the_same_bits(
    name: str, schedule: str, stages: int, replicas: int, lanes: int, shape: str, more: dict[str, Any]
) -> None:
    """Losses, norms, gradients, parameters and buffers, to the unreplicated run of the same lanes."""
    workers = stages // 2
    run = train(name, stages, SHAPES[shape], schedule, "adamw", workers=replicas * workers, replicas=replicas,
                lanes=lanes, **MANNER, **more)  # fmt: skip
    one = train(name, stages, SHAPES[shape], schedule, "adamw", workers=workers, lanes=lanes, **MANNER, **more)
    plain = train(name, stages, SHAPES[shape], "1f1b", "adamw", lanes=lanes, **MANNER, **more)
    assert differences(run, one) == []
    assert differences(one, plain) == []
    assert {report.worker for report in run.reports[0]} == set(range(replicas * workers))

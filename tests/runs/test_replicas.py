"""Replicas of stages change no bit: gradients are summed in the same lanes, whatever worker computes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raypipe import PipelineTrainer, load_state_dict
from raypipe.engine.optim import all_reduce
from raypipe.errors import ConfigError, PlanError, StageError
from raypipe.ir.plan import Plan
from raypipe.prepare.policies import refuse_replicas
from tests.exactness import SHAPES, Run, differences, expected, same_bits, train
from tests.nets import Late
from tests.trainers import adamw, trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

Counts = int | tuple[int, ...]
MANNER: dict[str, Any] = {"max_grad_norm": 0.5}
VALID, AGAIN = {"loss_reduction": "valid_tokens"}, {"recompute": "always"}


@cache
def alone(name: str, stages: int, shape: str, lanes: int, **more: Any) -> Run:
    """One worker per stage, its gradients in so many lanes."""
    return train(name, stages, SHAPES[shape], "1f1b", "adamw", lanes=lanes, **MANNER, **more)


# Replicas of each stage, which has workers of its own; or, if there is one number, of workers with two of four stages.
@pytest.mark.parametrize(
    ("name", "schedule", "replicas", "lanes", "shape", "more"),
    [
        *(("mlp", "1f1b", replicas, 6, "ragged-epoch", {}) for replicas in ((2, 1), (1, 2), (3, 1), (2, 2), (3, 2))),
        ("mlp", "1f1b", (15, 1), 15, "even", {}),  # PipeDream's plan for VGG-16, more replicas than micro-batches
        ("mlp", "gpipe", (2, 1, 2), 2, "even", {}),
        ("masked", "kfkb2", (2, 2), 2, "ragged-microbatch", VALID),
        ("frozen-below", "slack", (2, 2), 2, "even", {}),
        ("frozen-middle", "1f1b", (1, 2, 1), 2, "indivisible-by-k", {}),
        ("dropout-sequential", "gpipe", (2, 1), 2, "even", AGAIN),
        ("tied-lm", "1f1b", (2, 1, 2), 2, "even", {}),
        ("mlp", "zb-h1", (2, 1, 2), 2, "even", {}),
        ("frozen-below", "zb-h1", (1, 2), 2, "ragged-epoch", {}),
        ("mlp", "zb-v", 2, 2, "even", {}),
        ("mlp", "interleaved", 3, 6, "ragged-epoch", {}),
        ("mlp", "zb-v", 2, 5, "ragged-epoch", {}),
        ("tied-lm", "interleaved", 2, 2, "even", {}),
        ("tied-lm", "zb-v", 2, 2, "ragged-microbatch", {}),
        ("frozen-below", "zb-v", 2, 4, "ragged-epoch", {}),
        ("frozen-middle", "interleaved", 2, 2, "indivisible-by-k", {}),
        ("masked", "zb-v", 2, 2, "ragged-microbatch", VALID),
        ("dropout-sequential", "interleaved", 2, 2, "even", AGAIN),
    ],
)
def test_the_same_bits_as_one_worker_per_stage(
    name: str, schedule: str, replicas: Counts, lanes: int, shape: str, more: dict[str, Any]
) -> None:
    """Losses, norms, gradients and parameters; in the last mini-batch of an epoch some replicas have nothing to do."""
    stages, workers = (4, 2 * replicas) if isinstance(replicas, int) else (len(replicas), sum(replicas))
    given = {"workers": workers} if isinstance(replicas, int) else {}
    run = train(
        name, stages, SHAPES[shape], schedule, "adamw", replicas=replicas, lanes=lanes, **given, **MANNER, **more
    )
    assert differences(run, alone(name, stages, shape, lanes, **more)) == []
    assert {report.worker for report in run.reports[0]} == set(range(workers))


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


X, Y = torch.randn(27, 6), torch.randint(0, 3, (27,))
EVEN = 26
"""Samples of which no micro-batch has a lone one, on which a batch norm does not train."""


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def trainer(
    folder: Path, name: str, model: nn.Module | None = None, samples: int = len(X), **config: Any
) -> PipelineTrainer:
    return trainer_of(
        model or net(nn.Dropout(0.2)), folder, name, optimizer=adamw,
        train_data=TensorDataset(X[:samples], Y[:samples]), eval_data=TensorDataset(X[:11], Y[:11]),
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).double().mean()},
        **{"verify": "off", "eval_interval_steps": 2} | config,
    )  # fmt: skip


def assert_same_bits(
    folder: Path, make: Callable[[], nn.Module], replicas: int | list[int], lanes: int = 2, **mode: Any
) -> None:
    """Train without replicas and with them, to the same bits."""
    trainer(folder, "one", make(), num_lanes=lanes, **mode).fit(num_steps=4, local=True, progress=False)
    trainer(folder, "many", make(), num_replicas=replicas, num_lanes=lanes, **mode).fit(4, local=True, progress=False)
    (rows, one), (others, many) = told(folder / "one"), told(folder / "many")
    assert repr(rows) == repr(others)  # a step that overflowed has the norm nan
    assert math.isfinite(rows[-1][2])
    assert all(same_bits(tensor, many[name]) for name, tensor in one.items())


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


def test_an_optimizer_without_a_learning_rate_is_not_scaled(tmp_path: Path) -> None:
    more = {"schedule": "pipedream", "update_interval": "per_replica", "loss_reduction": "mean"}
    scaled = trainer(tmp_path, "scaled", net(), num_replicas=[2, 1], **more)
    scaled._arguments = scaled._arguments._replace(optimizer=Unnamed)
    with pytest.raises(ConfigError, match=r"'per_replica' multiplies .* Unnamed has groups whose 'lr' is missing"):
        scaled.plan()
    even = trainer(tmp_path, "even", net(), num_replicas=[2, 2], **more)
    even._arguments = even._arguments._replace(optimizer=Unnamed)
    even.fit(num_steps=2, local=True, progress=False)


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
    with pytest.raises(PlanError, match="replicated_buffers=True has no effect here"):
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
    assert_same_bits(tmp_path, lambda: net(nn.Dropout(0.2)), 2, **mode)


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


def test_a_child_with_a_constant_buffer_has_replicas(tmp_path: Path) -> None:
    """No graph says what an untraced child does; the trial saw no change, and every step looks again."""
    assert_same_bits(tmp_path, lambda: net(Scaled()), 2)
    asked = trainer(tmp_path, "asked", net(Scaled()), num_replicas=2, replicated_buffers=True)
    assert "No forward changed a buffer of stage 1 when the model was tried" in str(asked.plan().explain())


def test_a_child_that_begins_to_change_a_buffer_ends_a_run_with_replicas(tmp_path: Path) -> None:
    run = trainer(tmp_path, "late", net(Late(is_counted=False)), num_replicas=[2, 1])
    with pytest.raises(
        StageError, match=r"Stage 0 changed buffer '1\.count' in this step, but not when the model was tried"
    ):
        run.fit(num_steps=3, local=True, progress=False)
    trainer(tmp_path, "single", net(Late(is_counted=False)), num_lanes=2).fit(num_steps=3, local=True, progress=False)
    kept = {"num_replicas": [2, 1], "replicated_buffers": True}
    trainer(tmp_path, "kept", net(Late(is_counted=False)), **kept).fit(num_steps=3, local=True, progress=False)


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
    """Layers whose sums are exchanged early, and biases, which are not; the second, in 16 bits, has half of it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 150), nn.ReLU(), nn.Linear(150, 150), nn.Dropout(0.1), nn.Linear(150, 420), nn.ReLU(),
        nn.Linear(420, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("replicas", "lanes", "more"),
    [
        ([3], 3, {"num_stages": 1}),
        ([2], 2, {"num_stages": 1, "codec_sums": "bf16"}),
        ([2], 2, {"num_stages": 1, "precision": "bf16"}),
        ([2, 2], 4, {"schedule": "gpipe", "recompute": "always", "max_grad_norm": 0.1}),
        ([2, 2, 2, 2], 2, {"num_stages": 4, "schedule": "interleaved"}),
    ],
)
def test_gradients_exchanged_during_the_backward_have_the_same_bits(
    replicas: list[int], lanes: int, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = set()
    inner = all_reduce._ThreadedExchange.completed
    monkeypatch.setattr(
        all_reduce._ThreadedExchange, "completed", lambda begun, site: (completed.add(site), inner(begun, site))[1]
    )
    assert_same_bits(tmp_path, wide, replicas, lanes, **more)
    assert completed, "layers were exchanged as their gradients came"
    if len(replicas) == 1:
        assert completed == {2, 4}, "the weights of the second and third layer, and nothing that is small"

"""Evaluations while a run trains: numbers as plain PyTorch's, no bit of training changed, the same after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import EarlyStopping, PipelineTrainer, load_state_dict
from raypipe.engine.io.checkpoint.find_checkpoint import read_manifest
from raypipe.engine.io.storage import Place
from raypipe.errors import ConfigError
from tests.exactness import same_bits, unequal
from tests.models import Records
from tests.trainers import trainer_of

pytestmark = pytest.mark.engine

X, Y = torch.randn(32, 6), torch.randint(0, 3, (32,))
EX, EY = torch.randn(21, 6), torch.randint(0, 3, (21,))


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).double().mean()


def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output.argmax(1) == target).sum(), len(target)


class Largest:
    """As torchmetrics' objects are: it remembers between micro-batches."""

    def __init__(self) -> None:
        self.value = -math.inf

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.value = max(self.value, float(output.max()))

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.value)

    def reset(self) -> None:
        self.value = -math.inf


METRICS: dict[str, Any] = {"accuracy": accuracy, "counted": counted, "largest": Largest()}


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))


def trainer(folder: Path, name: str = "run", config: dict[str, Any] | None = None, **more: Any) -> PipelineTrainer:
    given = {"optimizer": sgd, "train_data": TensorDataset(X, Y), "loss_reduction": "mean"} | (config or {}) | more
    return trainer_of(given.pop("model", None) or model(), folder, name, **given)


def fit(folder: Path, steps: int = 8, name: str = "run", config: dict[str, Any] | None = None, **more: Any) -> Any:
    return trainer(folder, name, config, **more).fit(num_steps=steps, local=True, progress=False)


def evaluated(folder: Path, steps: int = 8, name: str = "run", **more: Any) -> Any:
    more = {"eval_data": TensorDataset(EX, EY), "metrics": METRICS} | more
    return fit(folder, steps, name, {"eval_interval_steps": 2}, **more)


def numbers(result: Any) -> list[dict[str, float]]:
    return [dict(record.evaluation) for record in result.records]


@pytest.mark.usefixtures("shared_captures")
def test_metrics_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    result = evaluated(tmp_path, metrics=METRICS)
    trained = model().eval()
    trained.load_state_dict(load_state_dict(result.checkpoint))
    with torch.no_grad():
        outputs = [trained(x) for x in EX.split(2)]
    output = torch.cat(outputs)
    right = int((output.argmax(1) == EY).sum())
    assert result.metrics["eval_counted"] == right / 21
    assert result.metrics["eval_accuracy"] == pytest.approx(right / 21, rel=1e-12)
    assert result.metrics["eval_largest"] == float(output.max())
    assert result.metrics["eval_loss"] == pytest.approx(float(functional.cross_entropy(output, EY)), rel=1e-6)
    assert METRICS["largest"].value == -math.inf, "the user's own object is not touched"


def spread(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if len(output) < 2:
        raise ValueError("needs at least two samples")
    return output.var(0).mean()


@pytest.mark.usefixtures("shared_captures")
def test_a_metric_that_takes_no_single_row_is_refused_by_the_plan(tmp_path: Path) -> None:
    """21 rows of eval_data leave one in the last micro-batch of 2."""
    with pytest.raises(ConfigError, match=r"at least two samples.*An evaluation of 21 samples has a micro-batch of 1"):
        evaluated(tmp_path, metrics={"spread": spread})
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("shared_captures")
def test_evaluate_beside_fit_gives_the_same_numbers(tmp_path: Path) -> None:
    made = trainer(tmp_path, config={"eval_interval_steps": 4}, eval_data=TensorDataset(EX, EY), metrics=METRICS)
    result = made.fit(num_steps=4, local=True, progress=False)
    found = made.evaluate(local=True)
    assert {name: found[name] for name in found if name.startswith("eval_")} == dict(result.records[-1].evaluation)
    assert made.predict(TensorDataset(EX, EY), local=True).shape == (21, 3)


@pytest.mark.usefixtures("shared_captures")
def test_a_run_that_goes_on_has_the_same_evaluations(tmp_path: Path) -> None:
    whole = evaluated(tmp_path, name="whole")
    evaluated(tmp_path, steps=3)
    parts = evaluated(tmp_path)
    expected = numbers(whole)
    found = numbers(parts)
    assert found.pop(2), "the end of the first submission has one more"
    expected.pop(2)
    assert found == expected
    frame = parts.metrics_dataframe
    assert list(frame["eval_loss"].dropna().index) == [1, 2, 3, 5, 7]
    table = pq.read_table(Path(parts.path) / "metrics.parquet")
    assert {"eval_loss", "eval_accuracy", "eval_counted", "eval_largest", "lr"} <= set(table.column_names)


@pytest.mark.usefixtures("shared_captures")
def test_the_best_checkpoint_by_a_metric_is_kept(tmp_path: Path) -> None:
    kept = SimpleNamespace(num_to_keep=1, checkpoint_score_attribute="eval_largest", checkpoint_score_order="min")
    place = SimpleNamespace(name="run", storage_path=str(tmp_path), checkpoint_config=kept)
    result = fit(
        tmp_path, 8, "run", {"eval_interval_steps": 2, "checkpoint_interval_steps": 1}, run_config=place,
        eval_data=TensorDataset(EX, EY), metrics=METRICS,
    )  # fmt: skip
    scores = {step + 1: of_step["eval_largest"] for step, of_step in enumerate(numbers(result)) if of_step}
    assert set(scores) == set(range(1, 9)), "a score of every checkpoint"
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    best = min(scores, key=lambda step: (scores[step], -step))
    assert {int(folder.name.split("_")[1]) for folder in folders} == {best, 8}
    assert read_manifest(Place.of(str(folders[0]))).metrics["eval_largest"] == scores[best]
    assert result.get_best_checkpoint("eval_largest", "min") == str(folders[0])
    assert result.checkpoint == str(folders[-1])


@pytest.mark.usefixtures("shared_captures")
def test_patience_counts_no_evaluation_but_those_at_the_interval(tmp_path: Path) -> None:
    """The end of each submission has one more, and a score has one with every checkpoint."""
    kept = SimpleNamespace(num_to_keep=1, checkpoint_score_attribute="eval_same", checkpoint_score_order="min")
    more: dict[str, Any] = {
        "config": {"eval_interval_steps": 2, "checkpoint_interval_steps": 1}, "eval_data": TensorDataset(EX, EY),
        "metrics": {"same": lambda output, target: 1.0}, "early_stopping": EarlyStopping("eval_same", patience=3),
        "run_config": SimpleNamespace(name="run", storage_path=str(tmp_path), checkpoint_config=kept),
    }  # fmt: skip
    for steps in (1, 3, 5, 7):
        assert not fit(tmp_path, steps, "run", **more).stopped
    result = fit(tmp_path, 20, "run", **more)
    assert (len(result.records), result.stopped) == (8, "eval_same has not got better than 1 for 3 evaluations")
    assert all(numbers(result)), "every checkpoint has its score"
    again = fit(tmp_path, 20, "run", **more)
    assert (len(again.records), again.stopped) == (8, result.stopped), "it ends again when it is submitted again"


class OfAllClasses(Largest):
    """As an AUC is: of no use on two rows."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.seen += target.tolist()

    def compute(self) -> int:
        if set(self.seen) != {0, 1, 2}:
            raise ValueError("only some classes are there")
        return len(self.seen)

    def reset(self) -> None:
        self.seen = []


@pytest.mark.usefixtures("shared_captures")
def test_a_metric_that_computes_nothing_of_few_rows(tmp_path: Path) -> None:
    """An object sees every micro-batch, so it is tried on more rows; a function is called with one of them."""
    metrics = {"accuracy": accuracy, "seen": OfAllClasses()}
    found = evaluated(tmp_path, 2, metrics=metrics, eval_data=TensorDataset(EX, torch.arange(21) % 3))
    assert [list(one) for one in numbers(found) if one] == [["eval_loss", "eval_accuracy", "eval_seen"]]
    assert numbers(found)[-1]["eval_seen"] == 21
    with pytest.raises(ConfigError, match=r"'seen' failed in compute\(\).*It was called on 21 rows of the data"):
        evaluated(tmp_path, 2, metrics=metrics, eval_data=TensorDataset(EX, torch.arange(21) % 2))


@pytest.mark.usefixtures("shared_captures")
def test_a_metric_without_a_number_ends_a_run_in_its_own_words(tmp_path: Path) -> None:
    stops = EarlyStopping("eval_none", patience=2)
    result = evaluated(tmp_path, 20, metrics={"none": lambda output, target: math.nan}, early_stopping=stops)
    assert result.stopped == "eval_none has been no finite number for 2 evaluations"


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("values", "stops"),
    [([3, 2, 1], False), ([1, 2, 3], False), ([1, 2, 3, 4], True), ([1, math.nan, 2, 0.99, 1, 1], False)],
)
def test_patience_counts_evaluations_that_are_no_better(values: list[float], stops: bool) -> None:
    assert bool(EarlyStopping(patience=3).verdict(values)) == stops


def named(x: torch.Tensor, y: torch.Tensor) -> Records:
    return Records([{"x": one, "labels": label} for one, label in zip(x, y, strict=True)])


class OwnLoss(nn.Module):
    """As models of transformers: a loss, logits, and much that nobody asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.a(x))
        logits = self.c(torch.relu(self.b(hidden)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits, "hidden": hidden}


@pytest.mark.usefixtures("shared_captures")
def test_a_model_that_returns_its_own_loss_keeps_what_metrics_read(tmp_path: Path) -> None:
    torch.manual_seed(1)
    own = OwnLoss()
    more: dict[str, Any] = {
        "model": own, "loss_fn": None, "train_data": named(X, Y), "eval_data": named(EX, EY),
        "metrics": {"accuracy": lambda output, batch: counted(output.logits, batch["labels"])},
    }  # fmt: skip
    result = evaluated(tmp_path, 4, **more)
    plain = OwnLoss()
    plain.load_state_dict(load_state_dict(result.checkpoint))
    with torch.no_grad():
        found = plain(EX, EY)
    assert result.metrics["eval_accuracy"] == int((found["logits"].argmax(1) == EY).sum()) / 21
    assert result.metrics["eval_loss"] == pytest.approx(float(found["loss"]), rel=1e-6)
    without = fit(tmp_path, 4, "plain", **more | {"eval_data": None, "metrics": None})
    ours, theirs = load_state_dict(result.checkpoint), load_state_dict(without.checkpoint)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    job = trainer(tmp_path, "job", **more)._prepared()
    assert job.programs[0].eval.num_outputs == 1, "hidden crosses for the loss alone, nothing for the metric"  # type: ignore[union-attr]


@pytest.mark.usefixtures("shared_captures")
def test_the_learning_rate_of_every_step_is_told(tmp_path: Path) -> None:
    result = fit(tmp_path, 4, lr_scheduler=halving)
    assert [record.lr for record in result.records] == [0.1 * 0.5**step for step in range(4)]
    assert result.metrics["samples_per_s"] > 0


class OnlyLoss(OwnLoss):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, labels)["loss"]


def both(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    return {"mean": accuracy(output, target), "count": (len(target), 1)}


def no_number(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"config": {"eval_interval_steps": 2}}, "eval_interval_steps=2 would have no effect without eval_data"),
        ({"metrics": [accuracy]}, "metrics is a list; give functions by name"),
        ({"metrics": {"loss": accuracy}}, "metrics has the name 'loss'"),
        ({"metrics": {"a": 3}}, r"metrics\['a'\] is a int; give a function"),
        ({"early_stopping": EarlyStopping()}, "there is no eval_data"),
        ({"metrics": {"a": no_number}, "eval_data": TensorDataset(EX, EY)}, "'a' returned a tensor of shape"),
        ({"metrics": {"a": lambda x: x}, "eval_data": TensorDataset(EX, EY)}, "The metric 'a' failed"),
        ({"metrics": {"a": both, "a_mean": accuracy}, "eval_data": TensorDataset(EX, EY)}, "have the name 'a_mean'"),
        ({"metrics": {"a": both}, "eval_data": TensorDataset(EX, EY), "early_stopping": EarlyStopping("eval_a_man"),
          "config": {"eval_interval_steps": 2}}, "give eval_loss, eval_a_mean, eval_a_count. Name one of them"),
        ({"metrics": {"a": accuracy}, "eval_data": named(EX, EY), "train_data": named(X, Y), "loss_fn": None,
          "model": OnlyLoss()}, "OnlyLoss returns only its loss"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_the_run(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path, 2, "run", **more)


class Follows(nn.Module):
    """Keeps an average of what it sees, in training and in evaluation alike, and computes with it."""

    average: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x - self.average


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), Follows(16), nn.BatchNorm1d(16), nn.ReLU(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8)), Follows(8), nn.BatchNorm1d(8), nn.Linear(8, 3),
    )  # fmt: skip


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("make", [_layers, Traced])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"recompute": "always"},
        {"schedule": "pipedream", "checkpoint_interval_steps": 2},
        {"schedule": "2bw", "checkpoint_interval_steps": 2},
    ],
)
def test_buffers_are_those_of_a_run_without_evaluations(make: Any, config: dict[str, Any], tmp_path: Path) -> None:
    """An asynchronous run empties its pipeline for an evaluation: the other one does so for a checkpoint."""
    plain = fit(tmp_path, 8, "plain", config, model=make())
    found = fit(
        tmp_path, 8, "evaluated", config | {"eval_interval_steps": 2}, model=make(), eval_data=TensorDataset(EX, EY),
        metrics=METRICS,
    )  # fmt: skip
    assert [(r.loss, r.grad_norm) for r in found.records] == [(r.loss, r.grad_norm) for r in plain.records]
    assert unequal(found.checkpoint, plain.checkpoint) == []
    assert [bool(r.evaluation) for r in found.records] == [False, True] * 4


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("make", [_layers, Traced])
def test_an_evaluation_is_that_of_a_copy_of_the_model(make: Any, tmp_path: Path) -> None:
    """What its forwards change counts for the samples behind them, as in plain PyTorch, and then no more."""
    result = fit(tmp_path, 2, "run", {"eval_interval_steps": 1}, model=make(), eval_data=TensorDataset(EX, EY))
    copy = make().eval()
    copy.load_state_dict(load_state_dict(result.checkpoint))
    with torch.no_grad():
        total = sum(
            float(nn.functional.cross_entropy(copy(x), y)) * len(x)
            for x, y in zip(EX.split(2), EY.split(2), strict=True)
        )
    assert result.metrics["eval_loss"] == pytest.approx(total / len(EX), rel=1e-6)


# Traced anew in each test: equal modules of other attributes would share a capture.


class Switches(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two, self.head, self.aux = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        middle = torch.tanh(self.one(x))
        logits = self.head(torch.relu(self.two(middle)))
        if self.kind == "keys":
            return (
                {"logits": logits, "aux": self.aux(middle)} if self.training else {"probabilities": logits.softmax(1)}
            )
        if self.kind == "flag":
            return logits + self.aux(middle), self.training
        if self.kind == "gradients":
            return logits + self.aux(middle) if torch.is_grad_enabled() else logits
        return (logits, self.aux(middle)) if self.training else logits


def keys(output: Any, target: torch.Tensor) -> torch.Tensor:
    if "logits" in output:
        return functional.cross_entropy(output["logits"], target) + functional.cross_entropy(output["aux"], target)
    return functional.nll_loss(output["probabilities"].log(), target)


def flag(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output[0], target) * (1 if output[1] else 2)


def fewer(output: Any, target: torch.Tensor) -> torch.Tensor:
    parts = output if isinstance(output, tuple) else (output,)
    return sum(functional.cross_entropy(part, target) for part in parts)  # type: ignore[return-value]


def gradients(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target)


def tensors_of(output: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
@pytest.mark.parametrize("loss_fn", [keys, flag, fewer, gradients])
def test_evaluations_and_predictions_are_those_of_the_model(loss_fn: Any, precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Switches(loss_fn.__name__)
    made = trainer(
        tmp_path, config={"precision": precision}, model=model, loss_fn=loss_fn, eval_data=TensorDataset(EX, EY),
        metrics={"width": lambda output, _: float(len(tensors_of(output)))},
    )  # fmt: skip
    result = made.fit(num_steps=3, local=True, progress=False)
    model.load_state_dict(load_state_dict(result.checkpoint))
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32"):
        parts = list(zip(EX.split(2), EY.split(2), strict=True))
        wanted = [model(x) for x, _ in parts]
        losses = [loss_fn(output, y).float() for output, (_, y) in zip(wanted, parts, strict=True)]
        widths = [len(tensors_of(output)) for output in wanted]
    mean = sum(float(loss) * len(y) for loss, (_, y) in zip(losses, parts, strict=True)) / len(EY)
    assert result.metrics["eval_loss"] == pytest.approx(mean, rel=1e-6)
    assert result.metrics["eval_width"] == widths[0]
    found = made.predict(TensorDataset(EX), result.checkpoint, local=True)
    assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(wanted[0])
    for at, tensor in enumerate(tensors_of(found)):
        assert same_bits(tensor, torch.cat([tensors_of(output)[at] for output in wanted]))

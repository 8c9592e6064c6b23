"""Metrics of evaluations: several numbers of one metric, and the parts of a model's output that a metric reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from raypipe.engine.stage.user_metrics import UserMetrics, fields_of, names_of, parts_by_key
from raypipe.errors import StageError

pytestmark = pytest.mark.engine

OUTPUTS, TARGETS = torch.randn(21, 3, generator=torch.Generator().manual_seed(0)), torch.arange(21) % 3


def both(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    right = output.argmax(1) == target
    return {"mean": right.double().mean(), "of 1": (right[target == 1].sum(), (target == 1).sum())}


class Kept:
    """Outputs of all micro-batches, from which ``give`` makes what it computes."""

    def __init__(self, give: Any) -> None:
        self.give, self.seen = give, []  # type: ignore[var-annotated]

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.seen.append(output)

    def compute(self) -> Any:
        return self.give(torch.cat(self.seen))

    def reset(self) -> None:
        self.seen = []


def measured(metrics: dict[str, Any], rows: int = 4) -> dict[str, float]:
    meter = UserMetrics(metrics)
    for _ in range(2):  # the second evaluation knows nothing of the first
        meter.begin()
        for output, target in zip(OUTPUTS.split(rows), TARGETS.split(rows), strict=True):
            meter.add(output, [target], len(output))
    return dict(meter.results())


def test_a_dict_is_told_key_by_key_each_weighed_as_it_says() -> None:
    right = OUTPUTS.argmax(1) == TARGETS
    found = measured({"right": both, "one": lambda output, target: 1})
    assert list(found) == ["right_mean", "right_of_1", "one"]
    assert found["right_mean"] == pytest.approx(float(right.double().mean()), rel=1e-12)
    assert found["right_of_1"] == float(right[TARGETS == 1].sum()) / 7


def test_what_an_object_computes_for_each_class_is_told_by_number() -> None:
    found = measured({"largest": Kept(lambda seen: seen.max(0).values), "of": Kept(lambda seen: {"all": seen.max()})})
    assert found == {
        **{f"largest_{column}": float(OUTPUTS[:, column].max()) for column in range(3)}, "of_all": float(OUTPUTS.max()),
    }  # fmt: skip


def test_a_metric_that_saw_nothing_is_nan() -> None:
    meter = UserMetrics({"right": both})
    assert [(name, math.isnan(value)) for name, value in meter.results()] == [("right", True)]


def test_a_collection_of_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    kinds = {"accuracy": "MulticlassAccuracy", "f1": "MulticlassF1Score"}
    made = {name: getattr(torchmetrics.classification, kind)(3, average=None) for name, kind in kinds.items()}
    collection = torchmetrics.MetricCollection(
        {"micro": torchmetrics.classification.MulticlassAccuracy(3, average="micro")}
    )
    found = measured({"scores": collection, **made})
    assert found["scores_micro"] == pytest.approx(float((OUTPUTS.argmax(1) == TARGETS).float().mean()), rel=1e-6)
    for name, metric in made.items():
        expected = metric(OUTPUTS, TARGETS)
        assert [found[f"{name}_{of}"] for of in range(3)] == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (lambda output, target: {}, "gave numbers under no name"),
        (lambda output, target: {"a b": 1, "a.b": 2}, "gave numbers under 'a b', 'a.b'"),
        (lambda output, target: {"each": output[:, 0]}, r"The metric 'm_each' returned a tensor of shape \(4,\)"),
        (Kept(lambda seen: seen), r"The metric 'm' returned a tensor of shape \(21, 3\)"),
    ],
)
def test_what_is_no_number_is_refused_by_name(metric: Any, said: str) -> None:
    with pytest.raises(StageError, match=said):
        measured({"m": metric})


class Pair(NamedTuple):
    loss: float
    logits: float


def recorded(output: Any) -> tuple[Any, dict[Any, None]]:
    read: dict[Any, None] = {}
    return fields_of(parts_by_key(output), names_of(output), read), read


@pytest.mark.parametrize("output", [{"loss": 1.0, "logits": 2.0}, SimpleNamespace(loss=1.0, logits=2.0)])
def test_what_has_names_is_a_mapping_of_them(output: Any) -> None:
    found, read = recorded(output)
    assert isinstance(found, Mapping)
    assert (list(found), len(found), "logits" in found, "other" in found) == (["loss", "logits"], 2, True, False)
    assert read == {}
    assert (found.logits, found["logits"], found[1], found[-1], found.get("other")) == (2.0, 2.0, 2.0, 2.0, None)
    assert list(read) == ["logits", 1]
    assert dict(found) == {"loss": 1.0, "logits": 2.0}
    with pytest.raises(AttributeError, match="there is no 'other'; there are loss, logits"):
        _ = found.other


@pytest.mark.parametrize("output", [(1.0, 2.0), [1.0, 2.0], Pair(1.0, 2.0)])
def test_a_tuple_is_unpacked(output: Any) -> None:
    found, read = recorded(output)
    assert isinstance(found, Sequence)
    loss, logits = found
    assert (loss, logits, len(found), found[-1], found[:1]) == (1.0, 2.0, 2, 2.0, (1.0,))
    assert list(read) == [0, 1]
    with pytest.raises(IndexError):
        _ = found[2]


def test_a_named_tuple_goes_by_name_too() -> None:
    found, read = recorded(Pair(1.0, 2.0))
    assert (found.logits, list(read)) == (2.0, ["logits"])


def test_what_is_not_kept_is_refused_and_not_left_out() -> None:
    found = fields_of({"logits": 2.0}, ("loss", "logits"))
    assert list(found) == ["loss", "logits"]
    for read in (lambda: found["loss"], lambda: found.loss, lambda: found.get("loss"), lambda: found[0]):
        with pytest.raises(LookupError, match="is not kept in evaluations, because no metric read it"):
            read()

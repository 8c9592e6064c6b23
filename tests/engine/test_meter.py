"""Metrics that give several numbers: dicts, values of each class, collections of torchmetrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from raypipe.engine.meter import Meter
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
    meter = Meter(metrics)
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
    meter = Meter({"right": both})
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

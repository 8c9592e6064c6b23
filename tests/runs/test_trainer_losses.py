"""Losses of a script's own in raypipe.hf.PipelinedTrainer, beside the same script with transformers.Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from raypipe import PipelineConfig
from raypipe.engine.torch_settings import one_thread
from raypipe.errors import RaypipeError
from tests.exactness import unequal

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

from raypipe.hf import PipelinedTrainer  # noqa: E402
from tests.runs.test_pipelined_trainer import (  # noqa: E402
    BERT,
    bert,
    both,
    gpt2,
    history,
    marian,
    parameters,
    texts,
    trainer_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread_only")]


@pytest.fixture(name="one_thread_only")
def _one_thread_only() -> Iterator[None]:
    with one_thread():
        yield


def weighted(base: Any) -> Any:
    """Classes with weights, which the trainer holds."""

    class Weighted(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.class_weights = torch.tensor([0.2, 1.0, 3.0])

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = torch.nn.CrossEntropyLoss(weight=self.class_weights)(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    return Weighted


def focal(base: Any) -> Any:
    """A mean of each batch, which Trainer divides by the number of batches."""

    class Focal(base):
        loss_is_scaled_for_ga = False

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs.get("labels")
            outputs = model(**inputs)
            each = functional.cross_entropy(outputs["logits"], labels, reduction="none")
            loss = ((1 - torch.exp(-each)) ** 2 * each).mean()
            return (loss, outputs) if return_outputs else loss

    return Focal


def distilled(base: Any) -> Any:
    """A teacher with dropout, in evaluation mode."""

    class Distilled(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            torch.manual_seed(5)
            config = transformers.BertConfig(**BERT | {"hidden_dropout_prob": 0.5, "hidden_size": 24})
            self.teacher = transformers.BertForSequenceClassification(config).eval()

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            outputs = model(**inputs)
            with torch.no_grad():
                taught = self.teacher(**inputs)
            divergence = functional.kl_div(
                functional.log_softmax(outputs.logits / 2.0, dim=-1),
                functional.softmax(taught.logits / 2.0, dim=-1),
                reduction="batchmean",
            )
            loss = 0.5 * outputs.loss + 0.5 * 4.0 * divergence
            return (loss, outputs) if return_outputs else loss

    return Distilled


def rows_weighted(base: Any) -> Any:
    """A column of the data that the model does not take, and the loss of another trainer beside it."""

    class RowsWeighted(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            weights = inputs.pop("weight")
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            each = functional.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
            loss = loss + (weights * each).mean()
            return (loss, outputs) if return_outputs else loss

    return RowsWeighted


@pytest.mark.parametrize("own", [weighted, focal, distilled, rows_weighted])
def test_a_compute_loss_of_a_subclass_has_the_bits_of_trainer(tmp_path: Path, own: Callable[[Any], Any]) -> None:
    rows, more = texts(21, classes=3, longest=6), {}
    if own is rows_weighted:
        rows, more = [{**row, "weight": n / 10} for n, row in enumerate(rows)], {"remove_unused_columns": False}
    plain, piped = both(
        tmp_path, bert, rows, rows[:8], kinds=(own(transformers.Trainer), own(PipelinedTrainer)),
        eval_strategy="epoch", **more,
    )  # fmt: skip
    assert history(piped) == history(plain)
    assert unequal(parameters(piped), parameters(plain)) == []


@pytest.mark.parametrize(("own", "bound", "of_weights"), [(focal, 0.0, 0.0), (distilled, 0.01, 1e-3)])
def test_in_bf16_an_own_loss_is_under_autocast_too(
    tmp_path: Path, own: Callable[[Any], Any], bound: float, of_weights: float
) -> None:
    """Cross entropy is computed in fp32 either way. A teacher, which Trainer calls in fp32, is not."""
    kinds = own(transformers.Trainer), own(PipelinedTrainer)
    plain, piped = both(tmp_path, bert, texts(21, classes=3, longest=6), kinds=kinds, bf16=True)
    for ours, theirs in zip(history(piped), history(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=bound, abs=0.0)
    theirs = parameters(plain)
    assert max(float((p - theirs[name]).abs().max()) for name, p in parameters(piped).items()) <= of_weights


def items_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Loss of each token, divided by the number of tokens in the mini-batch."""
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


def squares(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Mean, which Trainer does not divide by the number of batches."""
    return (outputs["logits"] - functional.one_hot(labels, 3)).square().mean()


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (bert, {"label_smoothing_factor": 0.1}),
        (gpt2, {"label_smoothing_factor": 0.1}),
        (marian, {"label_smoothing_factor": 0.1}),
        (gpt2, {"compute_loss_func": items_loss}),
        (bert, {"compute_loss_func": squares}),
    ],
)
def test_label_smoothing_and_a_loss_function_have_the_bits_of_trainer(
    tmp_path: Path, make: Callable[[], Any], more: dict[str, Any]
) -> None:
    rows = texts(21, classes=3 if make is bert else 0, longest=6)
    if make is marian:  # as DataCollatorForSeq2Seq does
        rows = [{**row, "decoder_input_ids": [0, *row["labels"][:-1]]} for row in rows]
    plain, piped = both(tmp_path, make, rows, rows[:8], eval_strategy="epoch", **more)
    if make is marian:  # its embeddings are shared: their gradients are added in another order
        for ours, theirs in zip(history(piped), history(plain), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        return
    assert history(piped) == history(plain)
    assert unequal(parameters(piped), parameters(plain)) == []


@pytest.mark.parametrize("own", [weighted, focal, distilled])
def test_a_batch_with_a_loss_of_its_own_is_cut_into_micro_batches(tmp_path: Path, own: Callable[[Any], Any]) -> None:
    rows = texts(24, classes=3, longest=6)
    more = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 1}
    config = PipelineConfig(num_stages=2, num_microbatches=4, partitioner="parameters")
    plain = trainer_of(own(transformers.Trainer), tmp_path / "plain", bert(), rows, **more)
    piped = trainer_of(own(PipelinedTrainer), tmp_path / "piped", bert(), rows, pipeline=config, **more)
    plain.train()
    piped.train()
    for ours, theirs in zip(history(piped), history(plain), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


class ReadsStep(PipelinedTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return super().compute_loss(model, inputs, **more) * (1 + self.state.global_step)


class Counts(PipelinedTrainer):
    calls = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        self.calls += 1
        return super().compute_loss(model, inputs, **more) * self.calls


class Reads(PipelinedTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs, **more)
        return loss * (2.0 if loss.item() > 1 else 1.0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ReadsStep, r"ReadsStep.compute_loss reads self.state"),
        (Counts, r"trainer.calls with every call"),
        (Reads, r"loss.item\(\) > 1"),
    ],
)
def test_a_loss_that_changes_from_step_to_step_is_refused(tmp_path: Path, kind: Any, message: str) -> None:
    with pytest.raises(RaypipeError, match=message):
        trainer_of(kind, tmp_path, bert(), texts(8, classes=3, longest=6)).train()


def test_a_forward_that_was_replaced_on_the_model_is_refused(tmp_path: Path) -> None:
    model = bert()
    model.forward = lambda **inputs: type(model).forward(model, **inputs)
    with pytest.raises(RaypipeError, match="The forward of this BertForSequenceClassification was replaced"):
        trainer_of(PipelinedTrainer, tmp_path, model, texts(8, classes=3, longest=6)).train()

"""The trial of a loss: what it must not be, and what must not disturb it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe.errors import CaptureError, ConfigError
from tests.trainers import trainer_of

pytestmark = pytest.mark.engine

X, Y = torch.linspace(-1, 1, 96).view(16, 6), torch.arange(16) % 3


def prepared(model: nn.Module, loss_fn: Any = functional.cross_entropy, inputs: Any = X, **fields: Any) -> Any:
    return trainer_of(model, loss_fn=loss_fn, train_data=TensorDataset(inputs, Y), **fields)._prepared()


def net(*extra: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *extra, nn.Linear(16, 3))


class Counts(nn.Module):
    """A layer, or a loss, that counts its calls, in every mode, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: torch.Tensor, *target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        factor = 1 + self.calls / 100
        return functional.cross_entropy(output, *target) * factor if target else output * factor


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.dropout(output), target)


def noise(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output + torch.randn_like(output), target)


@pytest.mark.parametrize("fields", [{}, {"loss_reduction": "mean"}, {"num_microbatches": 1}, {"verify": "off"}])
@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (Counts, "loss_fn changes its buffer 'calls' in every call"),
        (Noisy, "loss_fn draws random numbers"),
        (lambda: noise, "loss_fn draws random numbers"),
    ],
)
def test_a_loss_that_is_no_function_of_its_arguments_is_refused(
    loss_fn: Any, words: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(CaptureError, match=words):
        prepared(net(), loss_fn(), **fields)


def test_a_loss_without_dropout_in_its_own_mode_is_none_of_these() -> None:
    assert prepared(net(), Noisy().eval()).settings.loss_reduction.words == "labels other than -100"


def test_a_buffer_that_every_forward_of_the_model_changes_disturbs_no_trial() -> None:
    """Losses of micro-batches are compared with that of all rows: each as if it were the first call."""
    assert prepared(net(Counts())).settings.loss_reduction.words == "labels other than -100"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_16_bits_is_not_taken_for_one_that_compares_rows(dtype: torch.dtype) -> None:
    assert prepared(net().to(dtype), inputs=X.to(dtype)).settings.loss_reduction.words == "labels other than -100"


def flooded(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (functional.cross_entropy(output, target) - 0.1).abs() + 0.1


def clamped(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 2 * functional.cross_entropy(output, target).clamp(min=0.1) + output.pow(2).mean()


class WithLoss(nn.Module):
    """Returns its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return flooded(self.net(x), target)


@pytest.mark.parametrize(("model", "loss_fn"), [(net, flooded), (net, clamped), (WithLoss, None)])
def test_a_loss_that_bends_an_average_is_refused_before_it_gets_there(model: Any, loss_fn: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes (abs|clamp) of an average over the samples.*num_microbatches=1"):
        prepared(model(), loss_fn, loss_over="microbatch")
    prepared(model(), loss_fn, num_microbatches=1)
    assert prepared(model(), loss_fn, loss_reduction="mean").settings.loss_reduction == "mean"


def test_what_is_bent_sample_by_sample_is_an_average() -> None:
    prepared(net(), lambda output, target: (output - 0.1).abs().mean() + functional.cross_entropy(output, target))


class KeepsMore(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def test_what_modules_keep_besides_their_tensors_is_noted() -> None:
    notes = prepared(nn.Sequential(nn.Linear(6, 16), KeepsMore(16, 3))).plan.notes
    (note,) = (note for note in notes if "extra_state" in note)
    assert note.startswith("no checkpoint holds what get_extra_state() of the module '1' (KeepsMore) returns")


class Encoder(nn.Module):
    """Its masks are not padding in every row, which torch's fast path of evaluations asks of all rows together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.words, self.encoder, self.head = nn.Embedding(9, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(ids), src_key_padding_mask=ids == 0)).mean(1)


def test_an_encoder_with_masks_is_not_taken_for_one_that_compares_rows() -> None:
    ids = 1 + torch.arange(96).view(16, 6) % 8
    for row in range(16):
        ids[row, slice(3 + row % 3, None) if row % 3 else 1 + row % 5] = 0  # at the end, as padding, or within
    assert prepared(Encoder(), inputs=ids).settings.loss_reduction.words == "labels other than -100"
    assert torch.backends.mha.get_fastpath_enabled()

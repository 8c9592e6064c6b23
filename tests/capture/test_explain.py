"""Errors of the user's model in the words of its cause."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe.errors import CaptureError, DataError, RaypipeError
from tests.trainers import trainer_of

pytestmark = pytest.mark.engine


class Net(nn.Module):
    def __init__(self, within: Any) -> None:
        super().__init__()
        self.first, self.last, self.within = nn.Linear(4, 8), nn.Linear(8, 3), within
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.within(self, self.first(x)))


def spectrum(_: Net, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(x), n=8)


def average(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.mean.lerp_(x.detach().mean(0), 0.1)
    return x


def weighed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output, target, weight=torch.ones(3))


@pytest.mark.parametrize(
    ("within", "loss_fn", "precision", "said"),
    [
        (spectrum, functional.cross_entropy, "bf16", r"in plain PyTorch too, .*Convert it to the type"),
        (average, functional.cross_entropy, "bf16-autocast", r"in plain PyTorch too, .*Convert it to the type"),
        (lambda _, x: x, weighed, "bf16", r"loss_fn cannot take .*Convert it to the type.*precision='bf16-autocast'"),
    ],
)  # fmt: skip
def test_the_cause_is_named_with_its_cure(within: Any, loss_fn: Any, precision: str, said: str) -> None:
    data = TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    trainer = trainer_of(Net(within), loss_fn=loss_fn, train_data=data, precision=precision)
    with pytest.raises(RaypipeError, match=said):
        trainer.plan()


def test_columns_of_doubles_get_no_advice_on_precision() -> None:
    """As a table of pandas or polars holds them."""
    data = TensorDataset(torch.ones(8, 4, dtype=torch.float64), torch.zeros(8, dtype=torch.int64))
    with pytest.raises(RaypipeError, match=r"column 0 of the data, .*type float64.*, as in x\.float\(\)\.$"):
        trainer_of(Net(lambda _, x: x), train_data=data).plan()


@pytest.mark.parametrize("verify", ["first_step", "off"])
def test_parameters_without_numbers_are_told_when_a_run_begins_whatever_is_verified(verify: Any) -> None:
    def made() -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))

    data = TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    trainer = trainer_of(made, train_data=data, verify=verify)
    assert len(trainer.plan().partition.stages) == 2
    with pytest.raises(RaypipeError, match=r"on the meta device, .*init_from, or set weights_on='workers'"):
        trainer.fit(num_steps=1, local=True, progress=False)


class Boxes(nn.Module):
    """Looks up tokens, then coordinates of a second column, then positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.positions = nn.Embedding(9, 4), nn.Embedding(11, 4), nn.Embedding(6, 4)

    def forward(self, ids: torch.Tensor, bbox: torch.Tensor) -> torch.Tensor:
        return (self.words(ids) + self.places(bbox[:, :, 0]) + self.positions(torch.arange(ids.shape[1]))).mean()


class Pooled(Net):
    """Has an output for every other sample, which its loss takes with a label for each."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return nn.CrossEntropyLoss()(super().forward(x)[::2], y)


def test_the_column_that_does_not_fit_is_described() -> None:
    data = TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    said = r"made in forward, CrossEntropyLoss\(\), cannot take column 1 of the data, shape \(2,\) and type int64"
    with pytest.raises(RaypipeError, match=said):
        trainer_of(Pooled(lambda _, x: x), loss_fn=None, train_data=data).plan()


class Widths(Boxes):
    """Looks up widths, as LayoutLM does, or tokens that parameters choose."""

    def __init__(self, chosen: bool) -> None:
        super().__init__()
        self.chosen, self.head, self.last = chosen, nn.Linear(4, 30), nn.Embedding(20, 4)

    def forward(self, ids: torch.Tensor, bbox: torch.Tensor) -> torch.Tensor:
        if self.chosen:
            return self.last(self.head(self.words(ids)).argmax(-1) * 0 + 25).mean()
        return self.words(ids).mean() + self.places(bbox[:, :, 2] - bbox[:, :, 0] * 2).mean()


class Filled(Boxes):
    """Looks up coordinates that ``fill`` writes into a new tensor."""

    def __init__(self, fill: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, ids: torch.Tensor, bbox: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(bbox.shape, dtype=torch.int64)
        self.fill(made, bbox)
        return self.words(ids).mean() + self.places(made).mean()


def assigned(made: torch.Tensor, bbox: torch.Tensor) -> None:
    made[...] = bbox


def assigned_to_a_view(made: torch.Tensor, bbox: torch.Tensor) -> None:
    made[0][1:] = bbox[0][1:]


@pytest.mark.parametrize(
    "fill",
    [
        assigned,
        assigned_to_a_view,
        lambda made, bbox: torch.add(bbox, 0, out=made),
        lambda made, bbox: made[0].copy_(bbox[0]),
    ],
)
def test_a_tensor_that_data_are_written_into_is_of_the_data(fill: Any) -> None:
    rows = [{"ids": torch.zeros(5, dtype=torch.int64), "bbox": torch.full((5, 4), 12)} for _ in range(8)]
    said = r"'places', .*, cannot take what forward computes from column 'bbox' of the data"
    with pytest.raises(DataError, match=said):
        trainer_of(Filled(fill), loss_fn=None, train_data=rows).plan()


@pytest.mark.parametrize(
    ("model", "length", "largest", "kind", "said"),
    [
        (Boxes, 5, 12, DataError, r"'places', Embedding\(11, 4\), cannot take column 'bbox' of the data, .* to 12"),
        (Boxes, 8, 10, DataError, r"'positions', .* cannot take its input, which depends on sizes only, .*from 0 to 7"),
        (
            partial(Widths, False),
            5,
            3,
            DataError,
            r"'places', .*, cannot take what forward computes from column 'bbox'",
        ),
        (partial(Widths, True), 5, 3, CaptureError, r"'last', .* cannot take its input, .*from 25 to 25"),
    ],
)
def test_an_index_out_of_range_is_of_the_data_unless_parameters_have_a_part_in_it(
    model: Callable[[], nn.Module], length: int, largest: int, kind: type[RaypipeError], said: str
) -> None:
    rows = [{"ids": torch.zeros(length, dtype=torch.int64), "bbox": torch.full((length, 4), largest)} for _ in range(8)]
    with pytest.raises(kind, match=f"{said}.*out of range"):
        trainer_of(model(), loss_fn=None, train_data=rows).plan()


class Packs(nn.Module):
    """Takes the last state of an RNN, of packed sequences or of padded ones."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed, self.words, self.rnn = packed, nn.Embedding(9, 4, padding_idx=0), nn.GRU(4, 8, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, lengths = self.words(ids), (ids != 0).sum(1)
        if self.packed:
            pack = nn.utils.rnn.pack_padded_sequence
            return self.rnn(pack(x, lengths.cpu(), batch_first=True, enforce_sorted=False))[1][-1]
        y, _ = self.rnn(x)
        return y[torch.arange(len(y), device=y.device), lengths - 1]


class Classifies(nn.Module):
    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.encoder, self.head = Packs(packed), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(ids))


def test_packed_sequences_are_named_with_what_gives_the_same_outputs() -> None:
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 0, 0, 0], [8, 1, 2, 0]]).repeat(2, 1)
    data = TensorDataset(ids, torch.zeros(8, dtype=torch.int64))
    with pytest.raises(
        CaptureError, match=r"Classifies packs sequences at .*Leave the sequences padded and take .* len"
    ):
        trainer_of(Classifies(packed=True), train_data=data).plan()
    packed, padded = Classifies(packed=True), Classifies(packed=False)
    padded.load_state_dict(packed.state_dict())
    torch.testing.assert_close(padded(ids), packed(ids))
    for cure in (padded, nn.Sequential(Packs(packed=True), nn.Linear(8, 8), nn.Linear(8, 3))):
        assert len(trainer_of(cure, train_data=data).plan().partition.stages) == 2

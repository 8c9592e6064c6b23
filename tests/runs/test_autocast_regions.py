"""Regions of a model in which autocast is off, and operations that autocast treats otherwise than their trace says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.errors import CaptureError
from tests.runs.plain_precision import train_plain
from tests.runs.test_precision import FIELDS, adamw, children, data_of, faults, microbatches_of, of_words, trainer

pytestmark = pytest.mark.slow  # traced each time: equal modules of other attributes would share a capture


class Switching(nn.Module):
    """As models of transformers do around rotary angles and routers: some products are not of 16 bits."""

    def __init__(self, *, switches: bool = True) -> None:
        super().__init__()
        self.one, self.again, self.other, self.switches = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), switches
        self.register_buffer("table", torch.linspace(-1, 1, 48).view(6, 8))
        self.register_buffer("square", torch.linspace(-1, 1, 64).view(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        with torch.no_grad(), torch.autocast(kind, enabled=not self.switches):
            angles = (x @ self.table).float()
        with torch.autocast(kind, enabled=not self.switches):
            h = torch.relu_(self.one(x) + angles.cos())
            with torch.autocast(kind, torch.bfloat16):  # on again, as it is around the whole
                h = h + self.again(h)
            h = functional.dropout(h, 0.0, self.training) * x.shape[1]
        return self.other(h)


class Routed(Switching):
    """Ends a region in a product, and switches autocast on again in the middle of one that ends in another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=not self.switches, cache_enabled=False):
            h = self.one(x.float())
        with torch.autocast(x.device.type, enabled=not self.switches):
            h = torch.relu(h)
            with torch.autocast(x.device.type, torch.bfloat16):
                again = self.again(h)
            h = (h + again) @ self.square
        return self.other(h)


class Mapped(Switching):
    """Maps a function over rows where autocast is off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        with torch.autocast(x.device.type, enabled=not self.switches):
            h = torch.vmap(lambda row: row @ self.square)(h.float())
        return self.other(h)


class Recurrent(Switching):
    """What follows an LSTM depends on the type of what it returns."""

    def __init__(self, *, kind: str = "") -> None:
        super().__init__()
        self.kind, self.lstm, self.gru = kind, nn.LSTM(6, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = self.lstm(x[:, None])
        if self.kind == "gru":
            h, _ = self.gru(h)
        elif self.kind == "finfo":
            h = h + torch.finfo(h.dtype).eps
        else:
            h = torch.zeros(8, dtype=h.dtype) + h.float()
        return self.other(h[:, 0].float() if self.switches else h[:, 0].bfloat16().float())


@pytest.mark.parametrize(
    "fields", [{"partitioner": "prefix_sum"}, {"schedule": "zb-h1", "recompute": "always"}], ids=["profiled", "split"]
)
@pytest.mark.parametrize("made", [Switching, Routed, Mapped])
def test_where_a_model_switches_autocast_off_it_is_off(
    made: type[Switching], fields: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    model = made()
    steps = microbatches_of(data_of(children()))
    plain = train_plain(model, of_words, steps, adamw, "bf16-autocast", FIELDS["max_grad_norm"])
    given = {"precision": "bf16-autocast", "data": data_of(children()), **fields}
    assert faults(model, tmp_path, plain, **given) == []
    model.switches = False
    other = train_plain(model, of_words, steps, adamw, "bf16-autocast", FIELDS["max_grad_norm"])
    assert other.losses != plain.losses, "it makes no difference"


class Choosing(Switching):
    """Switches autocast off in one of two ways."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def off(h: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.other(h.float())

        return torch.cond(x.sum() > 0, off, lambda h: self.other(h).float(), (self.one(x),))


def test_autocast_that_is_switched_off_in_one_of_two_ways_is_refused(tmp_path: Path) -> None:
    made = trainer(Choosing(), tmp_path, precision="bf16-autocast", data=data_of(children()))
    with pytest.raises(CaptureError, match=r"switches autocast off inside torch.cond.*precision='bf16'"):
        made.plan()


class Chosen(Switching):
    """Chooses where autocast is off; torch.export keeps no such region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=not self.switches):
            h = torch.cond(h.sum() > 0, lambda z: z * 2, lambda z: z * 3, (h.float(),))
        return self.other(h)


@pytest.mark.parametrize(("switches", "precision"), [(True, "bf16-autocast"), (False, "fp32")])
def test_a_choice_within_a_region_is_refused(switches: bool, precision: str, tmp_path: Path) -> None:
    """In fp32 the region would switch autocast on, which is refused elsewhere by its region."""
    made = trainer(Chosen(switches=switches), tmp_path, precision=precision, data=data_of(children()))
    with pytest.raises(CaptureError, match=r"torch\.cond in a region of torch\.autocast at .*test_autocast_regions"):
        made.plan()


@pytest.mark.parametrize("kind", ["gru", "finfo", "zeros"])
def test_what_follows_an_lstm_meets_its_real_type(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = Recurrent(kind=kind)
    steps = microbatches_of(data_of(children()))
    plain = train_plain(model, of_words, steps, adamw, "bf16-autocast", FIELDS["max_grad_norm"])
    assert faults(model, tmp_path, plain, precision="bf16-autocast", data=data_of(children())) == []

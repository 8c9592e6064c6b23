"""LayerDrop of probability 0 draws a number for each layer and drops none: traced, with the draws of plain PyTorch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.errors import CaptureError
from raypipe.testing import reference
from tests.exactness import same_bits
from tests.models import vectors

STEPS = 3


class Dropping(nn.Module):
    """Layers that are left out with a probability, or kept with one, as written in Hugging Face's models."""

    def __init__(self, dropped: float, *, kept: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.last, self.dropped, self.kept = nn.Linear(6, 3), dropped, kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training:
                drawn = torch.rand([])
                if drawn < self.dropped:
                    continue
                if self.kept and not drawn >= self.dropped:
                    continue
            x = functional.dropout(torch.relu(layer(x)), 0.2, self.training)
        return self.last(x)


def given(dropped: float, *, kept: bool = False) -> dict[str, object]:
    torch.manual_seed(3)
    return {
        "model": Dropping(dropped, kept=kept), "loss_fn": functional.cross_entropy,
        "optimizer": partial(torch.optim.SGD, lr=0.1), "train_data": vectors(40),
        "pipeline": PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=4, partitioner="parameters",
                                   loss_reduction="mean"),
    }  # fmt: skip


@pytest.mark.parametrize(("dropped", "kept"), [(0.0, False), (0.0, True), (0, False), (1.0, False)])
def test_the_bits_of_plain_pytorch(dropped: float, *, kept: bool, tmp_path: Path) -> None:
    asked = given(dropped, kept=kept)
    place = SimpleNamespace(name="run", storage_path=str(tmp_path))
    if dropped == 1.0:  # every layer, and with it all that could be a first stage
        asked["pipeline"] = PipelineConfig(num_stages=1, minibatch_size=8, num_microbatches=4, loss_reduction="mean")
    result = PipelineTrainer(**asked, run_config=place).fit(STEPS, local=True, progress=False)  # type: ignore[arg-type]
    plain = reference(**given(dropped, kept=kept), num_steps=STEPS)  # type: ignore[arg-type]
    assert [record.loss for record in result.records] == list(plain.losses)
    trained = load_state_dict(str(tmp_path / "run"))
    assert all(same_bits(trained[name], x) for name, x in plain.parameters.items())


def test_a_branch_that_may_go_either_way_is_refused(tmp_path: Path) -> None:
    place = SimpleNamespace(name="run", storage_path=str(tmp_path))
    with pytest.raises(CaptureError, match="decides by values of its data"):
        PipelineTrainer(**given(0.5), run_config=place).plan()  # type: ignore[arg-type]

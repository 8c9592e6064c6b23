"""nn.LSTM, GRU and RNN train in stages as in plain PyTorch: whatever their layers, directions, layout and dropout."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.randomness import num_draws
from tests.exactness import captured
from tests.operations import as_in_plain_pytorch

aten = torch.ops.aten


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "lstm", "lstm-deep", "lstm-both-ways", "lstm-projected", "gru", "gru-deep", "rnn-deep", "recurrent-sequential",
    ],
)  # fmt: skip
def test_recurrent_networks(name: str) -> None:
    # One state before the last step of the last layer is zero in the reverse direction, so nothing learns from it.
    assert as_in_plain_pytorch(name, still=("recurrent.weight_hh_l1_reverse",)) == []


def test_draws_are_counted_by_layers() -> None:
    """And what comes behind has the number behind."""
    graph = captured("lstm-deep")[1].model.train.traced  # type: ignore[union-attr]
    assert graph.num_draws == 3
    assert captured("lstm-deep")[1].model.eval.traced.num_draws == 0  # type: ignore[union-attr]
    x, state, weights = torch.ones(1, 2, 3), [torch.ones(4, 2, 5)] * 2, [torch.ones(1)]
    counted = {
        (layers, dropout, train): num_draws(
            aten.lstm.input, (x, state, weights, True, layers, dropout, train, False, True), {}
        )
        for layers in (1, 4)
        for dropout in (0.0, 0.5, 1.0)
        for train in (True, False)
    }
    assert {case for case, count in counted.items() if count} == {(4, 0.5, True)}
    assert counted[4, 0.5, True] == 3

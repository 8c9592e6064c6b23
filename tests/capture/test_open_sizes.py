"""Sizes that a trace leaves open: lengths, and what values decide (boolean masks and nonzero), within one stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from raypipe.capture import TracedModel, capture
from raypipe.capture.analyse import is_open
from raypipe.errors import ConfigError
from raypipe.profiling import estimate_graph
from tests.exactness import captured


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked-elements", "nonzero-rows"])
def test_no_cut_parts_what_has_such_a_size(name: str) -> None:
    made = captured(name)[1]
    assert isinstance(made.model, TracedModel)
    nodes = made.model.train.nodes
    picked = [at for at, node in enumerate(nodes) if is_open(node.meta["val"])]
    assert picked
    order = {node: at for at, node in enumerate(nodes)}
    inside = {
        place for at in picked for user in nodes[at].users if user in order for place in range(at + 1, order[user] + 1)
    }
    positions = made.graph.cut_positions()
    assert positions
    assert not inside & set(positions)
    assert all(made.graph.nodes[at].output_bytes > 0 for at in picked)


@pytest.mark.slow
def test_what_depends_on_values_is_not_estimated() -> None:
    with pytest.raises(ConfigError, match=r"size of 'index_tensor' depends on values.*Profile it on an example"):
        estimate_graph(captured("masked-elements")[1], 2)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNN], num_layers: int, *, both: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(12 if both else 6, 3)
        self.layers = kind(4, 6, num_layers, batch_first=True, bidirectional=both)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(ids))[0]).mean(1)


@pytest.mark.parametrize(("num_layers", "both"), [(1, False), (2, True)])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_leave_the_length_open(kind: type[nn.RNN], num_layers: int, both: bool) -> None:
    ids, kinds = torch.ones(2, 5, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    made = capture(Recurrent(kind, num_layers, both=both), (ids, kinds), (0, 1), cross_entropy)
    for mode in ("train", "eval"):
        assert [made.misfit(mode, {0: (8, length), 1: (8,)}) for length in (2, 5, 99)] == [""] * 3

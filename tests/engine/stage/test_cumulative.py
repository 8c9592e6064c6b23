"""Operations that read values: BatchNorm over all batches so far, boolean masks and nonzero, within one stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypipe.capture import TracedModel
from raypipe.capture.analyse import is_open
from raypipe.engine.stage.generated_source import cumulative_norms
from raypipe.errors import ConfigError
from raypipe.profiling import estimate_graph
from tests.exactness import SHAPES, captured, same_bits
from tests.operations import as_in_plain_pytorch


@pytest.mark.slow
def test_batch_norm_over_all_batches() -> None:
    # The bias before a BatchNorm has a gradient of rounding errors, on some processors of exactly zero.
    assert as_in_plain_pytorch("cumulative", SHAPES["even"], still=("one.bias", "two.bias")) == []


def test_the_operation_is_the_module() -> None:
    theirs, ours = nn.BatchNorm2d(3, momentum=None), nn.BatchNorm2d(3, momentum=None)
    for _ in range(3):
        x = torch.randn(4, 3, 2, 2)
        expected = theirs(x)
        with cumulative_norms():
            found = ours(x)
        assert same_bits(found, expected)
    assert all(map(same_bits, ours.state_dict().values(), theirs.state_dict().values()))
    assert int(ours.num_batches_tracked) == 3  # type: ignore[arg-type]
    with cumulative_norms():
        assert same_bits(ours.eval()(x), theirs.eval()(x))
        assert nn.BatchNorm1d(3)(torch.randn(4, 3)).shape == (4, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked-elements", "nonzero-rows"])
def test_sizes_that_values_decide(name: str) -> None:
    assert as_in_plain_pytorch(name) == []


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

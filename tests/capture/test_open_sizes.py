"""Sizes that values decide, as of boolean masks and nonzero: within one stage, and not estimated."""

from __future__ import annotations

import pytest

from raypipe.capture import TracedModel
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

"""evaluate() and predict() on Ray actors have the bits of those in threads, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import ConfigError, RaypipeError
from tests.api.test_evaluate import fit, trainer
from tests.exactness import same_bits
from tests.models import CASES

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_captures")]


def test_actors_find_what_threads_find(cluster: None, tmp_path: Path) -> None:
    data = CASES["cnn"].data(19)
    made = trainer(tmp_path, "cnn", eval_data=data)
    result = fit(made)
    assert made.evaluate() == {
        "eval_loss": result.metrics["eval_loss"], "samples": 19, "checkpoint": result.checkpoint,
    }  # fmt: skip
    assert same_bits(made.predict(data), made.predict(data, local=True))


def test_a_failure_leaves_nothing_either(cluster: None, tmp_path: Path) -> None:
    made = trainer(tmp_path, "mlp", run=None)
    with pytest.raises(RaypipeError, match="Column 0 came with shape"):
        made.predict(CASES["cnn"].data(9))
    with pytest.raises(ConfigError, match=r"^data "):
        made.predict(Locked())


class Locked:
    """Rows that cannot travel."""

    def __init__(self) -> None:
        import threading

        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        return CASES["mlp"].data(9)[index]

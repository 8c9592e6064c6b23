"""``raypipe data``: the first batch as a person reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from raypipe.cli import app

pytestmark = pytest.mark.engine

MODULE = """
import torch
def model(): raise RuntimeError("the model is not built")
def rows(): return [{"input_ids": list(range(1, n % 3 + 3)), "text": "a"} for n in range(9)]
def pad(items):
    from raypipe.data import Pad
    return Pad(5, labels="input_ids")(items)
"""
RUN = """
model: {target: "given:model"}
optimizer: {target: "torch.optim:SGD", args: {lr: 0.1}}
train_data: {target: "given:rows"}
eval_data: {target: "given:rows"}
collate_fn: {target: COLLATE}
pipeline: {num_stages: 2, minibatch_size: 4, num_microbatches: 2}
num_steps: 1
"""


@pytest.mark.parametrize("collate", ['"given:pad"', '"raypipe.data:Pad", args: {lengths: 5, labels: input_ids}'])
def test_the_first_batch_is_shown(collate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "given.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(RUN.replace("COLLATE", collate))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = CliRunner().invoke(app, ["data", "run.yaml"])
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0] == "train_data: 9 samples, of which the first 4 of epoch 0"
    assert [line.split()[:4] for line in lines[1:4]] == [
        ["input_ids", "(4,", "5)", "int64"], ["attention_mask", "(4,", "5)", "int64"], ["labels", "(4,", "5)", "int64"],
    ]  # fmt: skip
    assert "-100 in" in lines[3]
    assert lines[4] == "eval_data: 9 samples, of which the first 4"

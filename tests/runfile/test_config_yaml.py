"""config.yaml of a run from Python: what has a name trains again, what has none is told in words, all at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.api.from_file import make_trainer
from raypipe.errors import ConfigError
from raypipe.runfile.config_yaml import describe
from raypipe.runfile.run_file import read_runfile
from tests.exactness import unequal

pytestmark = pytest.mark.ray

HERE = Path(__file__).name
MODULE = """
import torch

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, row):
        return torch.full((4,), row / 24), torch.tensor(row % 3)

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))

def seeded():
    torch.manual_seed(0)  # as a file does before it makes its model
    return model()

def loss_fn(output, target):
    return torch.nn.functional.cross_entropy(output, target)

def count(target):
    return float(len(target))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "named_parts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import named_parts  # type: ignore[import-not-found]

    yield named_parts
    del sys.modules["named_parts"]


def lines(values: dict[str, Any], **more: Any) -> str:
    return describe(PipelineConfig(**more), None, None, values, "lm", 7)


def given(module: Any) -> dict[str, Any]:
    return {
        "model": module.seeded,
        "loss_fn": module.loss_fn,
        "optimizer": partial(torch.optim.AdamW, lr=3e-4, betas=(0.8, 0.9)),
        "lr_scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=2),
        "train_data": module.Data(),
    }


def test_a_run_of_named_parts_trains_again_and_goes_on(module: Any, tmp_path: Path) -> None:

    rows = [module.Data()[row] for row in range(24)]
    x = pa.array([x.tolist() for x, _ in rows], pa.list_(pa.float32()))
    pq.write_table(pa.table({"x": x, "y": [int(y) for _, y in rows]}), tmp_path / "data.pq")
    parts = {**given(module), "train_data": tmp_path / "data.pq"}
    pipeline = PipelineConfig(
        num_stages=2, minibatch_size=8, num_microbatches=2, partitioner="parameters", loss_reduction=module.count
    )
    run = SimpleNamespace(
        name="lm", storage_path=str(tmp_path / "runs"), checkpoint_config=SimpleNamespace(num_to_keep=2)
    )
    first = PipelineTrainer(parts.pop("model"), **parts, pipeline=pipeline, run_config=run)
    once = first.fit(num_steps=3, local=True, progress=False)
    config = Path(once.path) / "config.yaml"
    again = make_trainer(read_runfile(config, ["run_config.name=other"]))
    twice = again.fit(num_steps=3, local=True, progress=False)
    assert unequal(once.checkpoint, twice.checkpoint) == []
    on = make_trainer(read_runfile(config, ["num_steps=5"])).fit(num_steps=5, local=True, progress=False)
    assert (on.path, len(on.records)) == (once.path, 5)
    assert read_runfile(config).values["run_config"]["checkpoint_config"] == {"num_to_keep": 2}


def inner() -> Callable[..., Any]:
    def built() -> nn.Module:
        return nn.Linear(2, 2)

    return built


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("model", nn.Linear(2, 2), "a Linear that the program made; give a function that makes it"),
        ("model", inner(), f"the function inner.built ({HERE}, line "),
        ("loss_fn", lambda output, y: output.sum(), f"a lambda ({HERE}, line "),
        ("loss_fn", nn.CrossEntropyLoss(ignore_index=3), "a CrossEntropyLoss that the program made"),
        ("optimizer", partial(torch.optim.SGD, lr=torch.tensor(0.1)), "a partial with arguments that YAML cannot hold"),
        ("train_data", [(1, 2)], "a list that the program made; give a function that makes it, or a path"),
        ("eval_data", [(1, 2)], "a list that the program made; give a function that makes it, or a path"),
    ],
)
def test_what_has_no_name_is_told_in_words(module: Any, tmp_path: Path, part: str, value: Any, words: str) -> None:
    text = lines({**given(module), "train_data": "here", part: value})
    (tmp_path / "config.yaml").write_text(text)
    assert f"#   {part}: {words}" in text
    with pytest.raises(ConfigError, match="had parts that no file can name") as refused:
        read_runfile(tmp_path / "config.yaml")
    assert f"{part} was {words}" in str(refused.value)
    override = f'{part}={{target: "named_parts:model"}}'
    assert read_runfile(tmp_path / "config.yaml", [override]).values[part] == {"target": "named_parts:model"}


def test_all_of_them_are_told_at_once(module: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        lines({**given(module), "model": nn.Linear(2, 2)}, loss_reduction=lambda y: 1.0)
    )
    with pytest.raises(ConfigError) as refused:
        read_runfile(tmp_path / "config.yaml")
    for part in ("model was a Linear", "train_data was a Data", "pipeline.loss_reduction was a lambda"):
        assert part in str(refused.value)


def test_names_of_torch(module: Any, tmp_path: Path) -> None:
    values = {**given(module), "train_data": "here", "loss_fn": nn.CrossEntropyLoss()}
    (tmp_path / "config.yaml").write_text(lines(values))
    found = read_runfile(tmp_path / "config.yaml").values
    assert found["loss_fn"] == {"target": "torch.nn.modules.loss:CrossEntropyLoss"}
    assert found["optimizer"] == {"target": "torch.optim.adamw:AdamW", "args": {"lr": 3e-4, "betas": [0.8, 0.9]}}
    assert found["train_data"] == str(Path("here").absolute())
    assert found["num_steps"] == 7


def test_a_script_is_no_module(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def built() -> nn.Module:
        return nn.Linear(2, 2)

    built.__module__, built.__qualname__ = "__main__", "built"
    script = SimpleNamespace(built=built, __spec__=None)
    monkeypatch.setitem(sys.modules, "__main__", script)  # type: ignore[arg-type]
    assert f"the function built of the program itself ({HERE}, line" in lines({"model": built})
    script.__spec__ = SimpleNamespace(name="package.train")  # python -m package.train
    assert "target: package.train:built" in lines({"model": built})


def test_a_file_system_of_the_program_has_no_name(tmp_path: Path) -> None:
    run = SimpleNamespace(storage_filesystem=object(), storage_path="bucket/runs")
    text = describe(PipelineConfig(), None, run, {}, "lm", 7)
    assert "#   run_config: storage_filesystem is an object of the program; give a URI as storage_path" in text

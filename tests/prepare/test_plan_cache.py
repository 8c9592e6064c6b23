"""Saved plans: read if nothing has changed that a plan follows from, and made anew after any change."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import Plan
from raypipe.profiling.json_cache import JsonCache
from raypipe.runfile.cluster_file import read_cluster

pytestmark = pytest.mark.engine

CODE = """\
import torch

SCALE = 2.0

class Net(torch.nn.Module):
    def __init__(self, width, value, dtype):
        super().__init__()
        self.options = {"value": value}
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 3)).to(dtype)
        self.register_buffer("shift", torch.full((8,), float(value), dtype=dtype))

    def forward(self, x):
        OPENED
        return self.layers((x * SCALE + self.shift).to(self.shift.dtype)).float()

class Rows(torch.utils.data.Dataset):
    def __init__(self, count, value):
        self.count, self.value = count, value

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.full((8,), float(i + self.value)), torch.tensor(i % 3)
"""
CLUSTER = "hosts: 2\nper_host: 1\ndevice: {memory: 1 GiB}\nbetween: {bandwidth: 25 Gbit/s, latency: 20 us}\n"
NUMBERS = itertools.count()
LATER_S = 1000.0
"""Seconds by which a process of a test pretends to have begun after its files were written."""


class Bench:
    """Planner of a small model whose code lies in a file of its own."""

    def __init__(self, folder: Path) -> None:
        self.name = f"planned_model_{next(NUMBERS)}"
        self.file = folder / f"{self.name}.py"
        self.write(CODE)
        self.cluster: Cluster | None = None
        self.fields: dict[str, Any] = {"partitioner": "parameters", "num_stages": 2, "minibatch_size": 8}
        self.model = {"width": 4, "value": 1, "dtype": torch.float32}
        self.data = {"count": 16, "value": 0}
        self.began_s: float | None = None

    def write(self, code: str) -> None:
        self.file.write_text(code.replace("OPENED", "pass"))

    def plan(self) -> Plan:
        """Plan as a new process does it, which imports the code and has a time of its own at which it began."""
        code = importlib.import_module(self.name)
        exec(compile(self.file.read_text(), str(self.file), "exec"), vars(code))
        torch.manual_seed(0)
        trainer = PipelineTrainer(
            lambda: code.Net(**self.model),
            loss_fn=torch.nn.functional.cross_entropy,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            train_data=code.Rows(**self.data),
            pipeline=PipelineConfig(**self.fields),
        )
        trainer.began_s = self.began_s or time.time() + LATER_S
        return trainer.plan(cluster=self.cluster)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of saved plans."""
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture
def bench(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(tmp_path))
    return Bench(tmp_path)


def entries(saved: Path) -> Mapping[str, Any]:
    return {path.stem: JsonCache(saved).load(path.stem) for path in saved.glob("*.json")}


def mark(saved: Path) -> None:
    """Give all saved plans a generation that no new plan has, by which a plan that was read is recognized."""
    for key, content in entries(saved).items():
        content["plan"]["generation"] = 77
        JsonCache(saved).save(key, content)


def was_read(plan: Plan) -> bool:
    return plan.generation == 77


def test_a_plan_that_is_read_equals_the_one_that_was_made(bench: Bench, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    bench.cluster, bench.fields = read_cluster(tmp_path / "cluster.yaml"), {"minibatch_size": 8}
    bench.began_s = time.time() + LATER_S
    made = bench.plan()
    (key,) = entries(saved)
    again = bench.plan()
    assert again == made
    assert again.to_json() == made.to_json()
    assert str(again) == str(made)
    mark(saved)
    assert was_read(bench.plan())
    assert list(entries(saved)) == [key]


CHANGES: dict[str, Callable[[Bench, pytest.MonkeyPatch], object]] = {
    "the code of a layer": lambda b, p: b.write(CODE.replace("x * SCALE", "x + SCALE")),
    "a comment": lambda b, p: b.write(CODE + "# more\n"),
    "a global": lambda b, p: b.write(CODE.replace("SCALE = 2.0", "SCALE = 3.0")),
    "a value of the configuration": lambda b, p: b.model.update(value=2),
    "a shape": lambda b, p: b.model.update(width=5),
    "a dtype": lambda b, p: b.model.update(dtype=torch.bfloat16),
    "a row": lambda b, p: b.data.update(value=1),
    "the number of rows": lambda b, p: b.data.update(count=17),
    "a field": lambda b, p: b.fields.update(minibatch_size=4),
    "the seed": lambda b, p: b.fields.update(seed=1),
    "the version of torch": lambda b, p: p.setattr(torch, "__version__", "9.9"),
    "the environment": lambda b, p: p.setenv("WIDTH", "7"),
    "a setting of torch": lambda b, p: p.setattr(torch.backends.cudnn, "deterministic", True),
    "another folder": lambda b, p: p.chdir("/"),
    "the search path": lambda b, p: p.syspath_prepend("/"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_any_change_a_plan_is_made_anew(
    change: str, bench: Bench, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.plan()
    mark(saved)
    assert was_read(bench.plan())
    CHANGES[change](bench, monkeypatch)
    assert not was_read(bench.plan())


def test_a_file_that_was_imported_while_planning_counts(bench: Bench, saved: Path) -> None:
    later = bench.file.with_name(f"{bench.name}_later.py")
    later.write_text("OFFSET = 1.0\n")
    bench.write(CODE.replace("OPENED", f"import {later.stem}"))
    bench.began_s = time.time() + LATER_S
    bench.plan()
    mark(saved)
    assert str(later) in next(iter(entries(saved).values()))["files"]
    assert was_read(bench.plan())
    later.write_text("OFFSET = 2.0\n")
    assert not was_read(bench.plan())


def test_a_row_that_only_the_plan_has_read_counts(bench: Bench, saved: Path) -> None:
    bench.data = {"count": 64, "value": 0}
    bench.plan()
    mark(saved)
    ((key, content),) = entries(saved).items()
    epoch, start, count, columns, digest = content["rows"]["train"][0]
    assert was_read(bench.plan())
    content["rows"]["train"] = [[epoch, start, count, columns, digest[::-1]]]
    JsonCache(saved).save(key, content)
    assert not was_read(bench.plan())


def test_a_damaged_or_older_file_is_written_anew(bench: Bench, saved: Path) -> None:
    made = bench.plan()
    (path,) = saved.glob("*.json")
    whole = path.read_bytes()
    older = json.loads(whole)
    del older["content"]["rows"]
    JsonCache(saved).save("older", older["content"])
    contents = [b"", whole[: len(whole) // 2], whole.replace(b'"minibatch_size": 8', b'"minibatch_size": 9'), b"[]"]
    for content in (*contents, (saved / "older.json").read_bytes()):
        path.write_bytes(content)
        assert bench.plan() == made
        assert path.read_bytes() == whole


def test_a_refusal_is_saved_too(bench: Bench, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("1 GiB", "100 B"))
    bench.cluster, bench.fields = read_cluster(tmp_path / "cluster.yaml"), {"minibatch_size": 8}
    texts = []
    for _ in range(2):
        with pytest.raises(PlanError) as caught:
            bench.plan()
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert [content["refused"] for content in entries(saved).values()] == texts[:1]


def test_what_cannot_be_compared_is_not_saved(bench: Bench, saved: Path) -> None:
    bench.began_s = time.time()  # the code was written after that, or shortly before
    bench.plan()
    bench.began_s = None
    file = bench.file.with_suffix(".txt")
    file.write_text("1")
    bench.write(CODE.replace("OPENED", f"x = x * float(open({str(file)!r}).read())"))
    bench.plan()
    bench.write(CODE.replace('{"value": value}', "(x for x in [value])"))  # a generator, whose state is hidden
    bench.plan()
    assert not saved.exists()


def test_code_in_a_notebook_is_planned_anew(bench: Bench, saved: Path) -> None:
    trainer = PipelineTrainer(
        torch.nn.Linear(8, 3),
        loss_fn=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        train_data=torch.utils.data.TensorDataset(torch.ones(8, 8), torch.ones(8, 3)),
        pipeline=PipelineConfig(num_stages=1, minibatch_size=4, partitioner="parameters"),
    )
    trainer.plan()
    assert not saved.exists()
    assert "ray" not in sys.modules

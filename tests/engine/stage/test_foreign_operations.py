"""Operations of a user's module go with a stage to a process that has not imported it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

from raypipe import PipelineTrainer
from raypipe.capture import capture
from raypipe.engine.stage.generated_source import Registered, foreign_operations, with_structure
from raypipe.errors import ConfigError, StageError
from raypipe.planner.partition.chain import split_before
from tests.operations_of_ours import Returned, Squaring, square
from tests.sources import ROOT
from tests.trainers import trainer_of

pytestmark = pytest.mark.engine

X, Y = torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)


def loss_fn(output: Returned, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits, target)


def trainer(model: nn.Module, folder: Path) -> PipelineTrainer:
    given = {"loss_fn": loss_fn, "train_data": TensorDataset(X, Y)}
    return trainer_of(model, folder, **given, minibatch_size=4, num_microbatches=2)


def test_only_the_stage_that_calls_it_brings_its_module_and_another_process_imports_it() -> None:
    made = capture(Squaring(), (X, Y), (0, 1), loss_fn)
    first, last = made.programs([stage.stop for stage in split_before(made.graph, ["second"]).stages[:-1]])
    known = first.train.names["torch.ops.raypipe_tests.square"]  # type: ignore[attr-defined]
    assert (known.operation, known.module) == ("raypipe_tests::square", "tests.operations_of_ours")
    assert not any(isinstance(x, Registered) for x in last.train.names.values())  # type: ignore[attr-defined]
    script = (
        "import sys, pickle, torch; known = pickle.load(sys.stdin.buffer); "
        "print(torch.ops.raypipe_tests.square(torch.tensor(3.0)).item(), known.operation)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps(known),
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert ran.stdout.split() == [b"9.0", b"raypipe_tests::square"]


def test_what_no_worker_could_import_is_named_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(square._init_fn, "__module__", "__main__")
    with pytest.raises(
        ConfigError, match=r"calls raypipe_tests::square, .* this script registers.*a module of its own"
    ):
        trainer(Squaring(), tmp_path).plan()
    trainer(Squaring(), tmp_path).fit(num_steps=1, local=True, progress=False)
    arriving = pickle.dumps(Registered("nobodys::own", "no_such_module"))
    with pytest.raises(
        StageError, match=r"torch\.ops\.nobodys\.own, .*'no_such_module' .*cannot be imported.*runtime_env"
    ):
        pickle.loads(arriving)


def test_operations_of_torch_are_none_of_these() -> None:
    assert foreign_operations("torch.ops.aten.add.Tensor(x); torch.ops.higher_order.cond(a, b)") == {}


def test_a_dataclass_is_known_where_it_is_needed_first() -> None:
    """In the process that traced the model, torch knew it already."""

    @dataclass
    class Pair:
        one: int
        two: int

    torch.export.register_dataclass(Pair)
    leaves, spec = pytree.tree_flatten(Pair(1, 2))
    pytree._deregister_pytree_node(Pair)
    assert with_structure(leaves, spec) == Pair(1, 2)

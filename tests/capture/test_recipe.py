"""A captured model as data: it pickles, and what is cut out of the copy is what is cut out of the original."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raypipe.engine.stage.stage import GraphFunction, StageProgram
from tests.exactness import captured

CUT = """
import pickle, sys, torch
recipe = pickle.loads(open(sys.argv[1], "rb").read())
torch.export.export = torch.fx.Graph = None
position = recipe.graph.cut_positions()[-1]
sys.stdout.buffer.write(pickle.dumps([stage.train.source for stage in recipe.programs((position,))]))
"""


def content(program: StageProgram) -> list[object]:
    found: list[object] = [program.parameters, program.buffers, program.shared_with, program.num_sites]
    for function in program.modes.values():
        found += [function.sites, function.buffers, function.columns, function.num_inputs, function.num_outputs]
        if isinstance(function, GraphFunction):
            found += [function.source, function.sizes, len(function.constants)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "noisy", "buffers", "masked", "tied-lm", "sequential"])
def test_a_copy_is_cut_alike_at_every_place(name: str) -> None:
    recipe = captured(name)[1].recipe
    copy = pickle.loads(pickle.dumps(recipe))
    assert copy.graph == recipe.graph
    for position in recipe.graph.cut_positions():
        pairs = zip(copy.programs((position,)), recipe.programs((position,)), strict=True)
        assert all(content(one) == content(other) for one, other in pairs)


@pytest.mark.slow
def test_another_process_cuts_it_without_fx_and_export(tmp_path: Path) -> None:
    recipe = captured("unet")[1].recipe
    (tmp_path / "recipe").write_bytes(pickle.dumps(recipe))
    found = subprocess.run(
        [sys.executable, "-c", CUT, str(tmp_path / "recipe")], capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    programs = recipe.programs((recipe.graph.cut_positions()[-1],))
    assert pickle.loads(found.stdout) == [program.train.source for program in programs]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_it_holds_no_tensor_of_the_user() -> None:
    model, made = captured("cnn")
    data = pickle.dumps(made.recipe)
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 8:
            assert tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() not in data

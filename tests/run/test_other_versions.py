"""What a run is goes by what its user gives: by the code of the model, and not by what raypipe or torch make of it."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from raypipe import Result
from raypipe.capture import capture
from raypipe.engine.io.storage import Place
from raypipe.errors import ConfigError
from raypipe.prepare.identity import model_labels
from raypipe.prepare.model_code import code_labels
from raypipe.run.same_run import CUTS, GRAPH, REDUCTION, compare, differences, read_settings
from raypipe.run.spec import RunIdentity
from tests.run import test_same_run

pytestmark = [pytest.mark.engine]

HELPERS = """
def shifted(x):
    return x + 1.0
"""
MODEL = '''
"""A user's file."""
import functools

import torch
from torch import nn

import helpers_of_a_user as helpers

SCALE = 0.5


def softcap(x):
    """Bend."""
    return SCALE * torch.tanh(x / SCALE)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2.0

    @staticmethod
    def backward(ctx, g):
        return g * 2.0


class Rope:
    def __init__(self, base):
        self.base = base

    def turned(self, x):
        return x * self.base


def doubling(function):
    factor = 2.5

    @functools.wraps(function)
    def wrapped(self, x):
        return function(self, x) * factor

    return wrapped


class Base(nn.Module):
    """A block."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)
        self.act = nn.ReLU()
        self.gate = torch.sigmoid
        self.rope = Rope(7.0)
        self._slope = 3
        self.last = lambda x: x - 4.0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        # a comment
        return helpers.shifted(self.rope.turned(softcap(self.fc(x))))

    def unused(self):
        return "nothing"

    @doubling
    def forward(self, x):
        """Compute."""
        return Double.apply(self.gate(self.act(self.inner(x)))) * self._slope


class Net(Base):
    def forward(self, x):
        return self.last(super().forward(x))[:, :3] + torch.tensor([0.125, 0.0, 0.0])
'''
GIVEN = {
    ("+ torch.tensor", "- torch.tensor"): "forward of Net in model.py: changed",
    ("* self._slope", "* self._slope * 1"): "forward of Base in model.py: changed",
    ("softcap(self.fc(x))", "self.fc(x)"): "inner of Base in model.py: changed",
    ("torch.tanh(x / SCALE)", "torch.tanh(x)"): "softcap in model.py: changed",
    ("SCALE = 0.5", "SCALE = 0.25"): "constant 'SCALE': was 0.5, is 0.25",
    ("return x * 2.0", "return x * 4.0"): "forward of Double in model.py: changed",
    ("return x * self.base", "return x + self.base"): "turned of Rope in model.py: changed",
    ("Rope(7.0)", "Rope(8.0)"): "base of Rope: was 7.0, is 8.0",
    ("factor = 2.5", "factor = 2.0"): "constant 'factor': was 2.5, is 2.0",
    ("function(self, x) *", "function(self, x) /"): "forward of Base in model.py: changed",
    ("nn.ReLU()", "nn.Tanh()"): "module 'act': was ReLU, is Tanh",
    ("torch.sigmoid", "torch.tanh"): "gate of Net: was 'sigmoid', is 'tanh'",
    ("_slope = 3", "_slope = 2"): "_slope of Net: was 3, is 2",
    ("x - 4.0", "x - 5.0"): "<lambda> of Base.__init__.<locals> in model.py: changed",
    ("nn.ReLU()", "nn.LeakyReLU(0.1)"): "module 'act': was ReLU, is LeakyReLU",
}
LAYOUT = {
    ("# a comment", "# another comment\n        # of two lines"): "a comment",
    ('"""Compute."""', '"""Compute it.\n\n        In two lines.\n        """'): "a docstring",
    ('"""A user\'s file."""', '"""Another."""\n\n\n'): "the docstring of the file",
    ("(self, x: torch.Tensor) -> torch.Tensor:", "(self, x):"): "annotations",
    ("x / SCALE)", "\n        (x / SCALE),\n    )"): "layout",
    ('return "nothing"', "return 17"): "a method that forward does not reach",
    ("SCALE = 0.5", "import math\n\nSCALE = 0.50\nOTHER = 3"): "the spelling of a number, and another name",
}


@pytest.fixture
def helpers(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "helpers_of_a_user.py"
    file.write_text(HELPERS)
    sys.modules["helpers_of_a_user"] = loaded(file)
    yield file
    del sys.modules["helpers_of_a_user"]


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def labels_of(folder: Path, *edits: tuple[str, str], name: str = "model.py") -> dict[str, Any]:
    return json.loads(json.dumps(code_labels(model_of(folder, *edits, name=name))))


def model_of(folder: Path, *edits: tuple[str, str], name: str = "model.py") -> nn.Module:
    text = MODEL
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    # Each text lies in a folder of its own: Python remembers the lines of a file.
    file = folder / str(len(list(folder.iterdir()))) / name
    file.parent.mkdir()
    file.write_text(text)
    torch.manual_seed(3)
    return loaded(file).Net()


@pytest.mark.parametrize("edit", GIVEN, ids=GIVEN.values())
def test_what_forward_reaches_is_named(edit: tuple[str, str], helpers: Path, tmp_path: Path) -> None:
    lines = differences(labels_of(tmp_path), labels_of(tmp_path, edit)).values()
    assert GIVEN[edit] in lines
    assert len(lines) <= 4, lines


@pytest.mark.parametrize("edit", LAYOUT, ids=LAYOUT.values())
def test_what_computes_the_same_is_no_difference(edit: tuple[str, str], helpers: Path, tmp_path: Path) -> None:
    assert differences(labels_of(tmp_path), labels_of(tmp_path, edit, name="renamed.py")) == {}


def test_code_of_another_file_of_the_user_counts(helpers: Path, tmp_path: Path) -> None:
    was = labels_of(tmp_path)
    helpers = tmp_path / "new" / helpers.name
    helpers.parent.mkdir()
    helpers.write_text(HELPERS.replace("1.0", "2.0"))
    sys.modules["helpers_of_a_user"] = loaded(helpers)
    assert list(differences(was, labels_of(tmp_path)).values()) == ["shifted in helpers_of_a_user.py: changed"]


def test_tensors_in_the_code_count(helpers: Path, tmp_path: Path) -> None:
    """Their numbers are no part of the operations."""
    example = (torch.randn(2, 5), torch.tensor([0, 1]))
    traced = ("Double.apply", "")  # whose backward a trace would lose
    models = [model_of(tmp_path, traced, ("0.125", number)) for number in ("0.125", "0.125", "0.25")]
    made = (capture(model, example, (0, 1), nn.functional.cross_entropy) for model in models)
    found = [model_labels(*both) for both in zip(models, made, strict=True)]
    assert found[0] == found[1]
    assert list(differences(found[0], found[2]).values()) == ["tensor 0 in the code of the model: another content"]


# -- Runs --------------------------------------------------------------------------------------------------------------

SAVED, STEPS = 2, 4
PLAIN = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(5, 5)

    def forward(self, x):
        # a comment
        return self.fc(x) * 2.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Block(), nn.Linear(5, 3)

    def forward(self, x):
        return self.two(self.one(x))


def make(traced):
    torch.manual_seed(3)
    return Net() if traced else nn.Sequential(Block(), nn.Linear(5, 3))
"""


def fit(folder: Path, steps: int, text: str = PLAIN, *, traced: bool = True, **given: Any) -> Result:
    file = folder / f"{len(list(folder.iterdir()))}" / "model.py"
    file.parent.mkdir()
    file.write_text(text)
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    return test_same_run.fit(folder / "runs", steps, model=loaded(file).make(traced), optimizer=optimizer, **given)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Make settings.json one that another raypipe has written."""
    file = folder / "runs/run/settings.json"
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))


def by_another(found: dict[str, Any], *, format: int = 2) -> None:
    """As a raypipe with another form of graphs would have written it, or one that knew of no code."""
    found["versions"]["raypipe"] = "0.1.0"
    found["format"] = format
    if GRAPH in found["fixed"] or format == 1:
        found["fixed"][GRAPH] = {"sha256": "0"}
    if format == 1:
        del found["given"]


def event(folder: Path, decision: str) -> dict[str, Any]:
    lines = (folder / "runs/run/events.jsonl").read_text().splitlines()
    return [found for found in map(json.loads, lines) if found["decision"] == decision][-1]


@pytest.mark.parametrize("traced", [True, False])
def test_an_edit_of_forward_is_refused_and_one_of_a_comment_is_not(traced: bool, tmp_path: Path) -> None:
    fit(tmp_path, SAVED, traced=traced)
    edited = PLAIN.replace("* 2.0", "* 3.0")
    for other in (False, True):
        if other:
            rewritten(tmp_path, by_another)
        with pytest.raises(ConfigError) as refused:
            fit(tmp_path, STEPS, edited, traced=traced)
        assert "\n  forward of Block in model.py: changed\n" in str(refused.value)
        assert "another name" in str(refused.value)
    assert len(fit(tmp_path, STEPS, PLAIN.replace("# a", "# another"), traced=traced).records) == STEPS


def test_code_that_only_may_compute_otherwise_can_be_taken_over(tmp_path: Path) -> None:
    """With other versions the graph proves nothing, so whoever knows better may say so."""
    fit(tmp_path, SAVED)
    rewritten(tmp_path, by_another)
    renamed = PLAIN.replace("self.two(self.one(x))", "self.two(input=self.one(x))")
    with pytest.raises(ConfigError, match=r"forward of Net in model\.py: changed\nGive resume=True"):
        fit(tmp_path, STEPS, renamed)
    assert len(fit(tmp_path, STEPS, renamed, resume=True).records) == STEPS
    assert event(tmp_path, "change")["reason"] == "forward of Net in model.py: changed"


def test_the_same_operations_are_the_same_model_however_it_is_written(tmp_path: Path) -> None:
    fit(tmp_path, SAVED)
    renamed = PLAIN.replace("self.two(self.one(x))", "self.two(input=self.one(x))")
    assert len(fit(tmp_path, STEPS, renamed).records) == STEPS


@pytest.mark.parametrize(("number", "traced"), [(1, True), (2, False)])
def test_a_run_of_another_raypipe_goes_on(number: int, traced: bool, tmp_path: Path) -> None:
    fit(tmp_path, SAVED, traced=traced)
    rewritten(tmp_path, partial(by_another, format=number))
    result = fit(tmp_path, STEPS, traced=traced)
    assert len(result.records) == STEPS
    told = event(tmp_path, "continue")
    assert re.match(rf"continued by raypipe \S+, until step {SAVED} by raypipe 0\.1\.0", told["reason"])
    assert ("not compared" in told["reason"]) == (number == 1)
    with pytest.raises(ConfigError, match=r"forward of Block in model\.py: changed"):
        fit(tmp_path, STEPS + 1, PLAIN.replace("* 2.0", "* 3.0"), traced=traced)


def test_a_later_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    fit(tmp_path, SAVED)
    rewritten(tmp_path, lambda found: found.update(format=3, versions={"raypipe": "9.8.7"}, fixed=None))
    with pytest.raises(ConfigError, match=r"has format 3 of raypipe 9\.8\.7; this is raypipe \S+, which reads up to"):
        fit(tmp_path, STEPS)


def test_each_field_counts_if_its_user_gives_it_and_never_if_raypipe_derives_it(tmp_path: Path) -> None:
    """Every label of a run, changed, left out and added."""
    fit(tmp_path, SAVED)
    found = read_settings(Place.of(tmp_path / "runs/run"))
    assert found is not None
    now = found.settings
    old = replace(now, versions={**now.versions, "raypipe": "0.1.0"})
    derived = {GRAPH, REDUCTION, CUTS}
    assert compare(old, now) == ({}, {}, "")
    for part in ("fixed", "free"):
        for label, value in getattr(now, part).items():
            changed = replace_in(old, part, label, another(value))
            assert bool([*compare(changed, now).fixed, *compare(changed, now).free]) == (label not in derived), label
            same_versions = replace(changed, versions=now.versions)
            assert label in {**compare(same_versions, now).fixed, **compare(same_versions, now).free}, label
    for label, value in now.given.items():
        changed = replace_in(replace_in(old, "given", label, another(value)), "fixed", GRAPH, {"sha256": "0"})
        if label == REDUCTION:
            changed = replace_in(changed, "free", REDUCTION, "words")
        assert label in compare(changed, now).free, label
    for label in ("fastest of group 0", "gamma of the lr_scheduler", "train_data, sample 17, column 0"):
        assert compare(replace_in(old, "free", label, 1), now)[:2] == ({}, {}), "an option that torch has, or had"
    lacks = replace(old, free={label: value for label, value in old.free.items() if label != "max_grad_norm"})
    assert compare(lacks, now)[:2] == ({}, {}), "a field that raypipe did not have, with its default"
    assert compare(lacks, replace_in(now, "free", "max_grad_norm", 1.0)).free == {
        "max_grad_norm": "max_grad_norm: was None, is 1.0"
    }


def replace_in(settings: RunIdentity, part: str, label: str, value: Any) -> RunIdentity:
    return replace(settings, **{part: {**getattr(settings, part), label: value}})


def another(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: another(inner) for key, inner in value.items() if key != "file"} | {
            key: inner for key, inner in value.items() if key == "file"
        }
    if isinstance(value, list):
        return [another(inner) for inner in value] or [1]
    if isinstance(value, bool) or value is None:
        return "another"
    return value + 1 if isinstance(value, int | float) else f"another {value}"

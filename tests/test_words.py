"""Words that must not be in the tree: paths of one machine, anything that unpickles, and riddles in what is printed."""

from __future__ import annotations

import ast
import re

import pytest

from tests.sources import FILES, ROOT, tree_of

FOLDERS = ("raypipe", "jobs", "tests", "docs", "dashboards", ".ci")
KINDS = {"", ".py", ".md", ".toml", ".cfg", ".txt", ".yaml", ".yml", ".json", ".csv", ".ipynb", ".sh"}
TEXTS = sorted(
    path
    for path in (*ROOT.iterdir(), *(found for folder in FOLDERS for found in (ROOT / folder).rglob("*")))
    if path.is_file() and path.suffix in KINDS and "__pycache__" not in path.parts and path.name != ".git"
)
# Put together from pieces, so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.~$})-])/(?:" + "|".join(["work", "home", "root", "Users", "mnt", "opt"]) + r")/\w")
UNPICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def test_no_path_of_one_machine() -> None:
    found = {path: MACHINE_PATH.search(path.read_text(encoding="utf-8", errors="replace")) for path in TEXTS}
    assert len(found) > 400
    assert {str(path.relative_to(ROOT)): match[0] for path, match in found.items() if match} == {}


def test_the_pattern_finds_paths() -> None:
    slash = "/"
    assert MACHINE_PATH.search(f"open('{slash}home{slash}me/x')")
    assert MACHINE_PATH.search(f"cd {slash}work{slash}main")
    assert not MACHINE_PATH.search(f"runs{slash}work{slash}x, https:{slash}{slash}host{slash}home{slash}x")


def unpicklers(tree: ast.Module) -> list[str]:
    """Everything in a module that could run code out of a message or a file."""
    found = []
    nodes = list(ast.walk(tree))
    safe = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _weights_only(node)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module for _ in [0] if node.module.split(".")[0] in UNPICKLERS]
            found += [f"torch.{a.name}" for a in node.names if (node.module, a.name) == ("torch", "load")]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and id(node) not in safe:
            found += [f"torch.{node.attr}" for _ in [0] if (node.value.id, node.attr) == ("torch", "load")]
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


def _weights_only(call: ast.Call) -> bool:
    """torch's own reader of tensors and plain values, which runs nothing that is in the file."""
    return any(
        word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in call.keywords
    )


@pytest.mark.slow
def test_nothing_unpickles() -> None:
    assert len(FILES) > 150
    found = {str(path.relative_to(ROOT)): unpicklers(tree_of(path)) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from cloudpickle import loads",
        "import torch\ntorch.load('x')",
        "torch.load('x', weights_only=False)",
        "torch.load('x', weights_only=safe)",
        "from torch import load",
        "numpy.load('x', allow_pickle=True)",
    ],
)
def test_unpicklers_are_found(source: str) -> None:
    assert len(unpicklers(ast.parse(source))) == 1


RIDDLES = (
    "decided by",
    "poor line",
    "closed form",
    "before scaling",
    "free links",
    "bubble {",
    "bound: ",
    "as asked for",
)


def spoken(tree: ast.Module) -> list[str]:
    """All texts of a module that a person may see: strings and the fixed parts of f-strings, no docstrings."""
    nodes = list(ast.walk(tree))
    silent = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    found = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            found.append("".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            found.append(node.value)
    return found


def riddles(tree: ast.Module) -> list[str]:
    """Texts that whoever did not write the planner would not understand at first reading."""
    return [text for text in spoken(tree) if any(riddle in text for riddle in RIDDLES)]


@pytest.mark.slow
def test_nothing_that_is_printed_is_a_riddle() -> None:
    found = {str(path.relative_to(ROOT)): riddles(tree_of(path)) for path in FILES}
    assert {path: texts for path, texts in found.items() if texts} == {}


@pytest.mark.parametrize(
    "source", ["x = 'decided by optimum'", "x = f'{a}, bubble {b:.0%}'", "print(f'{a} before scaling')"]
)
def test_riddles_are_found(source: str) -> None:
    assert riddles(ast.parse(source))
    assert not riddles(ast.parse("'''The closed form, decided by the free links.'''"))


def test_reading_weights_only_is_no_unpickling() -> None:
    assert unpicklers(ast.parse("import torch\ntorch.load('x', weights_only=True)")) == []

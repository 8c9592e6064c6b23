"""Words that must not be in the tree: paths of one machine, anything that unpickles, riddles, and a private language.

``python tests/test_words.py`` lists what breaks the rules of language.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # to run this file by its name

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


def unpicklers(tree: ast.Module) -> list[str]:
    """Everything in a module that could run code out of a message or a file."""
    found = []
    nodes = list(ast.walk(tree))
    safe = {id(node.func) for node in nodes if isinstance(node, ast.Call) and _weights_only(node)}
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLERS]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            writes = (node.module, names) == ("pickle", ["Pickler"])
            found += [node.module for _ in [0] if node.module.split(".")[0] in UNPICKLERS and not writes]
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
    silent |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
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


PROSE = [
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/design/0*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
]

FIRST = re.compile(
    r"(Of|By|As|For|With|Where|When|So|From|To|In|On|At|If|Through|Until|Beside|Behind|Below|What|Who|Whom|Whose|Whether"
    r"|Which|Why|How|That|Those|The same|Such|Another)\b(?!-)"
)
IS_NONE = re.compile(r"\b(?:is|are|was|were|be) none\b")
PEOPLE = re.compile(r"\b(?:nobody|somebody|everybody|whoever|whomever|people)\b", re.IGNORECASE)
TALK = re.compile(
    r"\b(?:tells?|told|telling|hears?|heard|hearing|say|says|said|saying|asks?|asked|asking)\b", re.IGNORECASE
)
STANDING = re.compile(r"\b(?:stands?|stood|standing|lies|lay|lying)\b", re.IGNORECASE)


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield every docstring of a module, those of attributes below their assignment among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from filter(None, [ast.get_docstring(node)])
        if isinstance(node, ast.Module | ast.ClassDef):
            for above, below in itertools.pairwise(node.body):
                match above, below:
                    case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str() as text)):
                        yield text


def sentences(path: Path) -> list[str]:
    """List what a reader of a file reads: docstrings and messages of a module, a page without its code."""
    if path.suffix == ".md":
        return [re.sub(r"```.*?```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)]
    return [*docstrings(tree_of(path)), *(text for text in spoken(tree_of(path)) if " " in text)]


def beginnings(path: Path) -> int:
    """Count the docstrings of a module that begin with a preposition, a question word, "That" or "The same"."""
    return sum(FIRST.match(text) is not None for text in docstrings(tree_of(path)))


def matches(pattern: re.Pattern[str]) -> Callable[[Path], int]:
    """Make a rule that counts the matches of a pattern in the sentences of a file."""
    return lambda path: sum(len(pattern.findall(text)) for text in sentences(path))


def public_classes(path: Path) -> list[str]:
    """List the public classes at the top of a module."""
    return [node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]


MODULES = [*FILES, *sorted((ROOT / "jobs").rglob("*.py"))]
NO_PATHS = "no path of one machine"
NO_PICKLES = "nothing unpickles"
NO_RIDDLES = "nothing that is printed is a riddle"
BEGINNINGS = "a docstring begins with a verb or a noun"
NAMED = 'None, NaN and "not found" have their names'
NO_PEOPLE = "no people in code and messages"
NO_TALK = "programs neither talk nor hear"
NO_STANDING = "things neither stand nor lie in the documents"
RULES: dict[str, tuple[list[Path], Callable[[Path], int]]] = {
    NO_PATHS: (TEXTS, lambda path: len(MACHINE_PATH.findall(path.read_text(encoding="utf-8", errors="replace")))),
    NO_PICKLES: (FILES, lambda path: len(unpicklers(tree_of(path)))),
    NO_RIDDLES: (FILES, lambda path: len(riddles(tree_of(path)))),
    BEGINNINGS: (MODULES, beginnings),
    NAMED: ([*MODULES, *PROSE], matches(IS_NONE)),
    NO_PEOPLE: ([*MODULES, *PROSE], matches(PEOPLE)),
    NO_TALK: ([*MODULES, *PROSE], matches(TALK)),
    NO_STANDING: (PROSE, matches(STANDING)),
}
FILE_NAMES = "a file name is used once"
CLASS_NAMES = "a public class name is used once"


def broken() -> dict[str, dict[str, int]]:
    """Count what breaks each rule: by file, or by the name that is used more than once."""
    counts = {
        rule: {str(path.relative_to(ROOT)): count for path in paths if (count := count_in(path))}
        for rule, (paths, count_in) in RULES.items()
    }
    files = Counter(path.name for path in FILES if path.name != "__init__.py")
    classes = Counter(name for path in FILES for name in public_classes(path))
    for rule, names in ((FILE_NAMES, files), (CLASS_NAMES, classes)):
        counts[rule] = {name: count for name, count in sorted(names.items()) if count > 1}
    return counts


SLASH = "/"
GOOD = f"""'Return the plan, or None if no such part exists; the closed form decided by optimum has free links.'
torch.load("runs{SLASH}work{SLASH}x, https:{SLASH}{SLASH}host{SLASH}home{SLASH}x", weights_only=True)
"""


@pytest.mark.slow
def test_the_house_speaks_the_language_of_its_field() -> None:
    assert len(TEXTS) > 400
    assert len(FILES) > 150
    assert {rule: counts for rule, counts in broken().items() if counts} == {}


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (NO_PATHS, f"open('{SLASH}home{SLASH}me/x')"),
        (NO_PATHS, f"# cd {SLASH}work{SLASH}main"),
        (NO_PICKLES, "import pickle"),
        (NO_PICKLES, "def f():\n    from cloudpickle import loads"),
        (NO_PICKLES, "import torch\ntorch.load('x')"),
        (NO_PICKLES, "torch.load('x', weights_only=False)"),
        (NO_PICKLES, "torch.load('x', weights_only=safe)"),
        (NO_PICKLES, "from torch import load"),
        (NO_PICKLES, "numpy.load('x', allow_pickle=True)"),
        (NO_RIDDLES, "x = 'decided by optimum'"),
        (NO_RIDDLES, "x = f'{a}, bubble {b:.0%}'"),
        (NO_RIDDLES, "print(f'{a} before scaling')"),
        (BEGINNINGS, "'Whether it is.'"),
        (BEGINNINGS, "LIMIT = 3\n'Of a run.'"),
        (NAMED, "raise ValueError(f'{x} is none of them')"),
        (NO_PEOPLE, "def f():\n    'Return a line, for whoever reads it.'"),
        (NO_TALK, "class Watcher:\n    'Publishes what it is told.'"),
        (NO_STANDING, "def f():\n    'Return where the run stands.'"),
    ],
)
def test_words_are_found(rule: str, source: str, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    bad.write_text(source, encoding="utf-8")
    good.write_text(GOOD, encoding="utf-8")
    _, count_in = RULES[rule]
    assert (count_in(bad), count_in(good)) == (1, 0)


if __name__ == "__main__":
    for rule, places in broken().items():
        print(f"{rule}: {places or 'no breach'}")

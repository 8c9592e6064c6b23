"""What is written is read back as the same, numbers are what they look like, and nothing runs."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ConfigError
from raypipe.runfile.yaml_text import dump, parse, parse_value

TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8),
    st.sampled_from(
        ["no", "on", "~", "", "3e-4", "1e6", "010", "1:30", "0x1F", "2024-01-01", "<<", "1_000", ".inf", "="]
    ),
)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=10
)


def typed(value: Any) -> Any:
    """1, 1.0 and True are equal to Python; they must not be to this test."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else (type(value), value)


@pytest.mark.slow
@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_what_is_written_is_read_here_and_by_any_other_reader(values: dict[str, Any]) -> None:
    text = dump(values)
    assert typed(parse(text, "x.yaml")[0]) == typed(values)
    assert typed(yaml.safe_load(text)) == typed(values)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("1E-3", 1e-3), ("1e6", 1_000_000), ("8e9", 8 * 10**9), ("1.5e3", 1500.0), ("-2e2", -200),
        ("1_000", 1000), ("010", 10), (".5", 0.5), ("5.", 5.0), (".inf", float("inf")), ("-.inf", -float("inf")),
        ("true", True), ("no", "no"), ("on", "on"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("1f1b", "1f1b"),
        ("'3e-4'", "3e-4"), ("~", None), ("", None), ("[0.9, 95e-2]", [0.9, 0.95]), ("1e999", float("inf")),
    ],
)  # fmt: skip
def test_values_are_what_they_look_like(text: str, value: object) -> None:
    assert typed(parse_value(text)) == typed(value)
    assert typed(parse(f"key: {text}", "x.yaml")[0]["key"]) == typed(value)


def test_every_key_has_its_line() -> None:
    _, lines = parse("a: 1\n\nb:\n  c: 2\n  d: {e: 3}\n", "x.yaml")
    assert lines == {("a",): 1, ("b",): 3, ("b", "c"): 4, ("b", "d"): 5, ("b", "d", "e"): 5}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", ["x.yaml, line 3", "a occurs twice"]),
        ("a:\n  b: 1\n  b: 2\n", ["line 3", "b occurs twice"]),
        ("a: [1,\n", ["x.yaml is not YAML", "line 2"]),
        ("- 1\n", ["one list where settings belong"]),
        ("", ["nothing where settings belong"]),
        ("a: !!python/object/apply:os.getcwd []", ["is not YAML", "line 1"]),
        ("a: &a {b: *a}", ["is not YAML"]),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x.yaml")
    for word in words:
        assert word in str(caught.value)

"""YAML with plain numbers and flags, and the line of every key; nothing in a file can run code.

PyYAML's safe loader reads YAML 1.1, where ``3e-4`` is a string, ``no`` is False, ``010`` is eight and ``1:30``
is ninety. Here numbers are what they look like, only ``true`` and ``false`` are flags, and everything else that
is not quoted is a string. A duplicate key is refused, where PyYAML drops the first one.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from raypipe.errors import ConfigError

Path = tuple[str, ...]
"""Keys from the top of a file down, as in ("pipeline", "schedule")."""

_INTEGER = re.compile(r"[-+]?\d(?:_?\d)*$")
_FLOAT = re.compile(r"[-+]?(?:\d(?:_?\d)*\.?(?:\d(?:_?\d)*)?|\.\d(?:_?\d)*)(?:[eE][-+]?\d+)?$")
_WHOLE = re.compile(r"([-+]?\d(?:_?\d)*)[eE]\+?(\d{1,2})$")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$")
_LITERALS = {
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    "null": (re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "int": (re.compile(f"{_INTEGER.pattern}|{_WHOLE.pattern}"), "-+0123456789"),
    "float": (re.compile(f"{_FLOAT.pattern}|{_SPECIAL.pattern}"), "-+.0123456789"),
    "merge": (re.compile(r"<<$"), "<"),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (replaces PyYAML's own table)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"line {line}: {key.value} occurs twice in the same place. Keep one of the two.")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes strings which this module's loader, or one for YAML 1.1, would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    # 1e6 micro-seconds or 8e9 bytes are counts, although they are written like floats.
    whole = _WHOLE.match(text)
    return int(whole[1]) * 10 ** int(whole[2]) if whole else int(text)


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = str(loader.construct_scalar(node)).replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


for _class in (_Loader, _Dumper):
    for _tag, (_pattern, _first) in _LITERALS.items():
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def parse(text: str, name: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """Parse a file; return (its settings, {path of a key: its line, from 1}).

    Args:
        name: name of the file, for errors.

    Raises:
        ConfigError: not YAML, not a mapping, or a duplicate key; the message has the line.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines = dict(_lines(node, ()))
        document = loader.construct_document(node) if node is not None else None
    except ConfigError as error:
        raise ConfigError(f"{name}, {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{name} is not YAML: {_one_line(error)}. Compare the indentation and quotes there."
        ) from None
    finally:
        loader.dispose()
    if not isinstance(document, dict):
        raise ConfigError(f"{name} holds {_kind(document)} where settings belong, as in 'num_steps: 500'.")
    return document, lines


def parse_value(text: str) -> Any:
    """Parse one value, as the right-hand side of ``key: value``.

    Raises:
        ConfigError: the text is not a YAML value.
    """
    try:
        # _Loader is a SafeLoader: plain data only.
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{text!r} is not a YAML value: {_one_line(error)}. Quote it.") from None


def dump(values: Mapping[str, Any]) -> str:
    """Return YAML text that ``parse`` reads as the same values, in their order."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _lines(node: Any, path: Path) -> Any:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = (*path, str(key.value))
            yield below, key.start_mark.line + 1
            yield from _lines(value, below)


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    return where + " ".join(str(getattr(error, "problem", None) or error).split())


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"one {type(value).__name__}"

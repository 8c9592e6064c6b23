"""What metrics are given of a model with its own loss behaves as what the model returned, and notes what is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from raypipe.engine.meter import names_of, parts_by_key
from raypipe.engine.metric_fields import fields_of

pytestmark = pytest.mark.engine


class Pair(NamedTuple):
    loss: float
    logits: float


def given(output: Any) -> tuple[Any, dict[Any, None]]:
    read: dict[Any, None] = {}
    return fields_of(parts_by_key(output), names_of(output), read), read


@pytest.mark.parametrize("output", [{"loss": 1.0, "logits": 2.0}, SimpleNamespace(loss=1.0, logits=2.0)])
def test_what_has_names_is_a_mapping_of_them(output: Any) -> None:
    found, read = given(output)
    assert isinstance(found, Mapping)
    assert (list(found), len(found), "logits" in found, "other" in found) == (["loss", "logits"], 2, True, False)
    assert read == {}
    assert (found.logits, found["logits"], found[1], found[-1], found.get("other")) == (2.0, 2.0, 2.0, 2.0, None)
    assert list(read) == ["logits", 1]
    assert dict(found) == {"loss": 1.0, "logits": 2.0}
    with pytest.raises(AttributeError, match="there is no 'other'; there are loss, logits"):
        _ = found.other


@pytest.mark.parametrize("output", [(1.0, 2.0), [1.0, 2.0], Pair(1.0, 2.0)])
def test_a_tuple_is_unpacked(output: Any) -> None:
    found, read = given(output)
    assert isinstance(found, Sequence)
    loss, logits = found
    assert (loss, logits, len(found), found[-1], found[:1]) == (1.0, 2.0, 2, 2.0, (1.0,))
    assert list(read) == [0, 1]
    with pytest.raises(IndexError):
        _ = found[2]


def test_a_named_tuple_goes_by_name_too() -> None:
    found, read = given(Pair(1.0, 2.0))
    assert (found.logits, list(read)) == (2.0, ["logits"])


def test_what_is_not_kept_is_refused_and_not_left_out() -> None:
    found = fields_of({"logits": 2.0}, ("loss", "logits"))
    assert list(found) == ["loss", "logits"]
    for read in (lambda: found["loss"], lambda: found.loss, lambda: found.get("loss"), lambda: found[0]):
        with pytest.raises(LookupError, match="is not kept in evaluations, because no metric read it"):
            read()

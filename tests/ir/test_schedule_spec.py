"""The one form of a schedule: as text and JSON and back, and what makes no sense is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import ScheduleError
from raypipe.ir.schedule_spec import AUTO_KINDS, KINDS, ScheduleSpec, kinds_to_search, takes

VALUES = {
    "group_size": st.integers(1, 9),
    "slack": st.lists(st.integers(1, 9), max_size=4).map(tuple),
    "lag": st.lists(st.integers(0, 9), max_size=5).map(tuple),
    "chunks": st.integers(1, 4),
    "update_interval": st.none() | st.integers(1, 9),
}


@st.composite
def specs(draw: st.DrawFn) -> ScheduleSpec:
    kind = draw(st.sampled_from(sorted(KINDS)))
    numbers = {name: draw(VALUES[name]) for name in KINDS[kind].takes}
    if kind == "pipedream" and draw(st.booleans()):
        numbers |= {"replicas": (2, 1), "lanes": 2, "per_replica": draw(st.booleans())}
    return ScheduleSpec(
        kind, draw(st.integers(1, 99)), first_trainable=draw(st.integers(0, 3)), overlap=draw(st.booleans()), **numbers
    )


@given(specs())
def test_text_and_json_give_the_same_spec_back(spec: ScheduleSpec) -> None:
    assert ScheduleSpec.parse(str(spec)) == spec
    assert ScheduleSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert hash(ScheduleSpec.parse(str(spec))) == hash(spec)
    assert ScheduleSpec.parse(spec.name).name == spec.name


def test_how_it_reads() -> None:
    spec = ScheduleSpec("slack", 8, slack=(2, 2, 1), first_trainable=1)
    assert (spec.name, str(spec)) == ("slack r=2,2,1", "slack r=2,2,1, M=8, first_trainable=1")
    assert str(ScheduleSpec("pipedream", 4, slack=(1,), update_interval=2, overlap=True)) == (
        "pipedream r=1 u=2, M=4, overlap"
    )
    assert ScheduleSpec("kfkb", 8, group_size=3).name == "kfkb k=3"
    assert ScheduleSpec("zb-h1", 8, slack=(2, 1), lag=(0, 2, 1)).name == "zb-h1 r=2,1 w=0,2,1"


def test_fewer_micro_batches_make_groups_smaller() -> None:
    spec = ScheduleSpec("kfkb", 8, group_size=3, first_trainable=1, overlap=True)
    assert spec.with_microbatches(2) == ScheduleSpec("kfkb", 2, group_size=2, first_trainable=1, overlap=True)
    assert spec.as_kind("slack", slack=(2,)) == ScheduleSpec("slack", 8, slack=(2,), first_trainable=1, overlap=True)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: ScheduleSpec("kfkbb"), f"choose one of {', '.join(KINDS)}. Did you mean 'kfkb'?"),
        (lambda: ScheduleSpec("1f1b", 2, group_size=2), "'1f1b' has no group_size: leave out group_size=2"),
        (lambda: ScheduleSpec("zb-v", 2, slack=(2,)), "'zb-v' has no slack: leave out slack=(2,)"),
        (lambda: ScheduleSpec("kfkb", 2, group_size=0), "'kfkb' with group_size=0: it must be at least 1"),
        (lambda: ScheduleSpec("gpipe", 0), "'gpipe' with num_microbatches=0: it must be at least 1"),
        (lambda: ScheduleSpec("interleaved", 2, chunks=0), "'interleaved' with chunks=0: it must be at least 1"),
        (lambda: ScheduleSpec("slack", 2, slack=(1, 0)), "every hop needs at least 1"),
        (lambda: ScheduleSpec("zb-h1", 2, slack=(1,), lag=(0, -1)), "every stage needs at least 0"),
        (lambda: ScheduleSpec("slack", 2, slack=(1,), lag=(0, 0)), "'slack' has no lag: leave out lag=(0, 0)"),
        (lambda: ScheduleSpec.parse("slack r=2;1, M=8"), "'r=2;1' in the schedule 'slack r=2;1, M=8' cannot be read"),
        (lambda: ScheduleSpec.parse("slack q=2"), "'q=2' in the schedule 'slack q=2' cannot be read"),
        (lambda: ScheduleSpec.parse(""), "There is no schedule ''"),
    ],
)
def test_what_makes_no_sense_is_refused(make, part: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make()
    assert part in str(caught.value)


def test_unlike_names_get_no_suggestion() -> None:
    with pytest.raises(ScheduleError) as caught:
        ScheduleSpec("zzz")
    assert "Did you mean" not in str(caught.value)


def test_the_table_says_what_the_controller_may_do() -> None:
    assert kinds_to_search("auto") == AUTO_KINDS
    assert [name for name in KINDS if kinds_to_search(name)] == ["kfkb", "slack", "zb-h1"]
    assert [name for name, kind in KINDS.items() if not kind.turned] == ["interleaved", "zb-v", "pipedream", "2bw"]
    assert [name for name in KINDS if takes(name, "slack")] == ["slack", "zb-h1", "pipedream", "2bw"]
    assert not takes("auto", "slack")

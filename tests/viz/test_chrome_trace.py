"""The trace that Perfetto reads, held against the rules of the Trace Event Format."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest

from raypipe.ir.schedule import parse_action
from raypipe.ir.schedule_spec import KINDS
from raypipe.ir.timeline import Span, Timeline, messages_of
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulator import Costs, simulate
from raypipe.viz.chrome_trace import chrome_trace_json
from tests.ir.test_timeline import TWO_STAGES
from tests.planner.specs import spec_for


def _trace(*timelines: Timeline) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(chrome_trace_json(timelines))["traceEvents"]
    return found


def test_predicted_and_measured_lie_in_one_trace() -> None:
    trace = json.loads(chrome_trace_json([Timeline(TWO_STAGES.spans, "simulated"), TWO_STAGES]))
    titles = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert titles == {0: "simulated", 1: "measured"}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 1]
    assert {e["name"]: (e["tid"], e["ts"], e["dur"]) for e in spans} == {
        "0F0": (0, 0.0, 1e6),
        "0B0": (0, 4e6, 2e6),
        "1RECV_F0": (3, 0.0, 1e6),
        "1F0": (2, 1e6, 1e6),
        "1B0": (2, 2e6, 2e6),
    }


def _simulated(kind: str, latency_s: float) -> Timeline:
    schedule = schedule_of(spec_for(kind, 4, 8, group_size=2, chunks=2), 4)
    return simulate(lower(schedule), Costs.uniform(4, 0.010, 0.020, latency_s=latency_s))


def _tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return found


@pytest.mark.parametrize("kind", [kind for kind, of in KINDS.items() if of.synchronous])
@pytest.mark.parametrize("latency_s", [0.0, 0.004])
def test_it_keeps_the_rules_of_the_format(kind: str, latency_s: float) -> None:
    """What a trace processor drops or draws wrongly where it is not so."""
    timeline = _simulated(kind, latency_s)
    events = _trace(timeline, dataclasses.replace(timeline, source="measured"))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    tracks = _tracks(events)
    for track, slices in tracks.items():
        assert track in named
        assert all(one["dur"] >= 0 and one["ts"] >= 0 for one in slices)
        for one, after in pairwise(sorted(slices, key=lambda e: (e["ts"], e["dur"]))):
            assert one["ts"] + one["dur"] <= after["ts"] + 0.002, "slices of a track lie one after the other"
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    crossing = list(messages_of(timeline.spans))
    assert 2 * len(crossing) == len(begins) == len([e for e in events if e["ph"] in "sf"]) // 2 > 0
    assert begins.keys() == ends.keys()
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] <= end["ts"]
        assert end["bp"] == "e", "it binds to the slice around it, not to the next one"
        source, target = _around(tracks, begin), _around(tracks, end)
        assert source["args"]["microbatch"] == target["args"]["microbatch"]
        assert abs(source["args"]["stage"] - target["args"]["stage"]) == 1
        forwards = [one["cat"].endswith("F") for one in (source, target)]
        assert forwards[0] == forwards[1], "forwards to forwards, backwards to backwards"


def _around(tracks: dict[tuple[int, int], list[dict[str, Any]]], flow: dict[str, Any]) -> dict[str, Any]:
    """The one slice that an end of a flow binds to."""
    track = tracks[flow["pid"], flow["tid"]]
    (found,) = [one for one in track if one["ts"] <= flow["ts"] < one["ts"] + one["dur"]]
    return found


def test_counters_count_what_is_held() -> None:
    timeline = _simulated("1f1b", 0.001)
    events = [event for event in _trace(timeline) if event["ph"] == "C"]
    for stage, most in enumerate(timeline.peak_in_flight):
        counts = [e["args"]["count"] for e in events if e["name"] == f"micro-batches held by stage {stage}"]
        assert max(counts) == most == 4 - stage
        assert counts[-1] == 0
    ways = [e["args"]["count"] for e in events if e["name"] == "messages on their way"]
    assert min(ways) >= 0
    assert ways[-1] == 0
    for name in {e["name"] for e in events}:
        times = [e["ts"] for e in events if e["name"] == name]
        assert times == sorted(set(times))


def test_a_first_stage_without_gradients_of_inputs_takes_messages_for_its_weights() -> None:
    """Its I takes no time, and whatever takes none is no box that an arrow could end at."""
    names = [(0, "0F0", 0, 1), (1, "1F0", 1, 2), (1, "1I0", 2, 3), (0, "0I0", 3, 3), (1, "1W0", 3, 4), (0, "0W0", 3, 4)]
    spans = [Span(worker, parse_action(name), float(begin), float(end)) for worker, name, begin, end in names]
    told = [(str(one.action), one.start_s, one.taken_s) for one in messages_of(spans)]
    assert told == [("0SEND_F0", 1.0, 1.0), ("1SEND_B0", 3.0, 3.0)]

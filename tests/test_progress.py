"""What a person sees of a run: what it waits for, where it goes on, its steps."""

from __future__ import annotations

import io
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import LinkError
from raypipe.ir.report import StepRecord
from raypipe.progress import ProfilingBar, RunProgress, progress_shown
from raypipe.run.journal import Journal
from raypipe.run.spec import Outcome

pytestmark = pytest.mark.engine


def record(step: int) -> StepRecord:
    return StepRecord(step, 8, 0.5, 1.0, 0.25, 0.1, 2e6, 2, "1f1b")


def test_a_slow_start_says_once_what_it_waits_for() -> None:
    journal, stream = Journal("digits", "runs/digits"), io.StringIO()
    watch = RunProgress(["a note"], stream, late_s=0.0)
    for doing in ("waiting for the places and processes of 2 stages", "sending 2 stages their parameters"):
        journal.begins(doing, num_steps=3)
        for _ in range(3):
            watch(journal.news(0, 0.0))
    journal.begins()
    watch(journal.news(0, 0.0))
    assert journal.news(0, 0.0).status.message == ""
    for step in range(3):
        journal.step(record(step), (), ())
    watch(journal.news(0, 0.0))
    assert stream.getvalue().splitlines()[:5] == [
        "note: a note",
        "digits: its folder is runs/digits",
        "digits: waiting for the places and processes of 2 stages",
        "digits: sending 2 stages their parameters",
        "step 1/3  loss 0.5000  grad norm 1.000  32 samples/s  idle 10%  sent 2.0 MB/s  1f1b  left 0:00",
    ]
    assert "step 3/3" in stream.getvalue().splitlines()[-1]
    journal.end(Outcome((("eval_loss", 0.5),), "runs/digits/checkpoint_000003", 3), None)
    watch(journal.news(3, 0.0))
    assert stream.getvalue().splitlines()[-1] == "digits: finished, step 3/3; its folder is runs/digits"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_done_before_a_run_shows_on_a_terminal_at_once() -> None:
    shown, hidden = Terminal(), io.StringIO()
    for stream in (shown, hidden):
        bar = ProfilingBar(stream, every_s=600.0)
        bar.say("tracing the model")
        bar(48, 120)
        bar.close()
    assert hidden.getvalue() == ""
    lines = [text.removesuffix("\x1b[K") for text in shown.getvalue().split("\r")[1:]]
    assert lines == ["tracing the model", "profiling 48 of 120 operations", ""]


class Written(io.StringIO):
    """Tells when a line was written."""

    def __init__(self) -> None:
        super().__init__()
        self.line = threading.Event()

    def flush(self) -> None:
        self.line.set()


def test_a_log_hears_of_what_takes_long_before_a_run() -> None:
    stream = Written()
    bar = ProfilingBar(stream, every_s=0.01)
    for done in (48, 96):
        stream.line.clear()
        bar(done, 120)
        assert stream.line.wait(30.0)
    bar.close()
    assert stream.getvalue() == "profiling 48 of 120 operations\nprofiling 96 of 120 operations\n"


def test_nobody_is_told_who_did_not_ask() -> None:
    stream = Terminal()
    with progress_shown(False):
        bar = ProfilingBar(stream)
        bar.say("tracing the model")
        bar.close()
    assert stream.getvalue() == ""
    with progress_shown(True):
        ProfilingBar(stream).say("tracing the model")
    assert stream.getvalue()


@pytest.mark.parametrize("kind", ["waits", "alert"])
def test_what_happens_is_shown_at_once(kind: str) -> None:
    journal, stream = Journal("digits", "runs/digits"), io.StringIO()
    watch = RunProgress([], stream, late_s=0.0)
    journal.begins(num_steps=3)
    says = journal.waits if kind == "waits" else partial(journal.alert, "worker 1: stopped")
    with ThreadPoolExecutor() as threads:
        heard = threads.submit(journal.news, 0, 600.0)
        while not heard.done():  # whenever the other thread begins to wait
            says("Stage 1 has been stopped")
            heard_now = wait([heard], timeout=0.05).done
        watch(heard.result())
    assert heard_now == {heard}
    assert heard.result().records == []
    assert stream.getvalue().splitlines()[1].startswith("digits: ")
    assert stream.getvalue().splitlines()[1].endswith("Stage 1 has been stopped")
    journal.step(record(0), (), ())
    status = journal.news(0, 0.0).status
    assert status.message == "", "what it waits for, the next step takes back"
    assert len(status.alerts) == (kind == "alert"), "an alert stays"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["checkpoint failed", "callback Fails.on_step", "file not written"]),
            st.booleans(),  # it fails again
            st.booleans(),  # the client looks
            st.floats(0.0, 50.0),  # seconds until the next
        ),
        max_size=60,
    )
)
def test_each_kind_of_alert_is_shown_once_a_minute_with_its_count_however_seldom_a_client_looks(
    happens: list[tuple[str, bool, bool, float]],
) -> None:
    journal, stream, now_s = Journal("digits", "runs/digits"), io.StringIO(), 0.0
    watch = RunProgress([], stream, clock=lambda: now_s)
    counts, rows, shown = Counter[str](), Counter[str](), dict[str, list[float]]()

    def look() -> None:
        before = len(stream.getvalue().splitlines())
        watch(journal.news(0, 0.0))
        for kind in counts:
            lines = [line for line in stream.getvalue().splitlines()[before:] if kind in line]
            assert len(lines) <= 1
            shown.setdefault(kind, []).extend([now_s] * len(lines))
            if lines and rows[kind] > 1:
                assert f"{rows[kind]} times in a row" in lines[0]

    for step, (kind, again, looks, wait_s) in enumerate(happens):
        journal.step(record(step), (), ())
        counts[kind] += 1
        rows[kind] = rows[kind] + 1 if again else 1
        journal.alert(kind, f"{kind}: number {counts[kind]}", in_a_row=rows[kind])
        if looks:
            look()
            assert shown[kind], "the first is shown at once"
        now_s += wait_s
    assert all(later - sooner >= 60.0 for times in shown.values() for sooner, later in pairwise(times))
    journal.end(Outcome((), "", len(happens)), None)
    look()
    alerts = journal.news(0, 0.0).status.alerts
    assert {alert.kind: alert.count for alert in alerts} == counts
    for alert in alerts:
        assert shown[alert.kind]
        assert alert.message == f"{alert.kind}: number {alert.count}"
        assert alert.message in stream.getvalue(), "at the end the last one has been shown too"
        steps = [step + 1 for step, (kind, *_) in enumerate(happens) if kind == alert.kind]
        assert (alert.first_step, alert.last_step) == (steps[0], steps[-1])


def test_where_a_run_goes_on_is_what_it_went_on_from_and_not_what_it_has_saved_since() -> None:
    journal, stream = Journal("digits", "runs/digits"), io.StringIO()
    watch = RunProgress([], stream)
    journal.resumed([record(0), record(1)], 2, "step_0000002", "from step_0000002", ())
    journal.begins(num_steps=6)
    for step in (2, 3):
        journal.step(record(step), (), ())
    journal.update(checkpoint="step_0000004")
    watch(journal.news(0, 0.0))
    lines = stream.getvalue().splitlines()
    assert lines[1] == "digits goes on after step 2, from step_0000002"
    assert lines[2].startswith("step 3/6 ")


def test_a_run_that_fails_before_it_has_steps_shows_none_and_no_empty_message() -> None:
    journal, stream = Journal("s1", "runs/s1"), io.StringIO()
    watch = RunProgress([], stream, late_s=0.0)
    for message in ("waiting for the places and processes of 2 stages", ""):
        journal.update(message=message)
        watch(journal.news(0, 0.0))
    journal.end(None, LinkError("every port is taken."))
    watch(journal.news(0, 0.0))
    assert stream.getvalue().splitlines() == [
        "s1: its folder is runs/s1",
        "s1: waiting for the places and processes of 2 stages",
        "s1: failed; its folder is runs/s1",
    ]
    assert str(journal.status) == "s1: failed; every port is taken."


def without_a_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def of_a_terminal_that_is_gone() -> TextIO:
    terminal, end = os.openpty()
    os.close(terminal)
    return os.fdopen(end, "w")


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [without_a_reader, of_a_terminal_that_is_gone, closed, lambda: None])
def test_a_run_does_not_end_for_the_sake_of_its_progress(
    make: Callable[[], TextIO | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make()
    monkeypatch.setattr("sys.stderr", stream)  # None is what Python has where it was started with it closed
    journal, watch = Journal("digits", "runs/digits"), RunProgress(["a note"], late_s=0.0)
    journal.begins("waiting", num_steps=1)
    bar = ProfilingBar()
    bar.say("tracing the model")
    bar.close()
    watch(journal.news(0, 0.0))
    journal.step(record(0), (), ())
    journal.end(Outcome((), "", 1), None)
    watch(journal.news(0, 0.0))
    if stream is not None:
        stream.close()  # as Python does at its exit: nothing is left that fails

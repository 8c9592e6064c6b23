"""What a person sees of a run: what it waits for, where it goes on, its steps."""

from __future__ import annotations

import io
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from raypipe.ir.report import StepRecord
from raypipe.progress import ProfilingBar, RunProgress, heard
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.spec import Outcome

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
        journal.step(record(step), ())
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


def test_a_quick_start_says_only_where() -> None:
    journal, stream = Journal("digits", "runs/digits"), io.StringIO()
    watch = RunProgress([], stream)
    journal.begins("waiting")
    watch(journal.news(0, 0.0))
    assert stream.getvalue() == "digits: its folder is runs/digits\n"


def test_a_wish_to_stop_is_seen_until_the_end() -> None:
    journal = Journal("digits", "runs/digits")
    journal.begins("waiting")
    journal.stopping("enough")
    journal.begins("sending")
    journal.begins(num_steps=3)
    status = journal.news(0, 0.0).status
    assert (status.state, status.message, status.num_steps) == ("stopping", "enough", 3)


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
    with heard(False):
        bar = ProfilingBar(stream)
        bar.say("tracing the model")
        bar.close()
    assert stream.getvalue() == ""
    with heard(True):
        ProfilingBar(stream).say("tracing the model")
    assert stream.getvalue()


def test_what_happens_is_heard_at_once_and_taken_back_by_the_next_step() -> None:
    journal, stream = Journal("digits", "runs/digits"), io.StringIO()
    watch = RunProgress([], stream, late_s=0.0)
    journal.begins(num_steps=3)
    with ThreadPoolExecutor() as threads:
        heard = threads.submit(journal.news, 0, 600.0)
        while not heard.done():  # whenever the other thread begins to wait
            journal.alert("Stage 1 has been stopped")
            heard_now = wait([heard], timeout=0.05).done
        watch(heard.result())
    assert heard_now == {heard}
    assert heard.result().records == []
    assert stream.getvalue().splitlines()[-1] == "digits: Stage 1 has been stopped"
    journal.tell(message="the disk is full")
    journal.step(record(0), ())
    assert journal.news(0, 0.0).status.message == "the disk is full"
    journal.alert("Stage 1 is slow")
    journal.step(record(1), ())
    assert journal.news(0, 0.0).status.message == ""


def test_where_a_run_goes_on_is_what_it_went_on_from_and_not_what_it_has_saved_since() -> None:
    journal, stream = Journal("digits", "runs/digits"), io.StringIO()
    watch = RunProgress([], stream)
    journal.resumed([record(0), record(1)], 2, "step_0000002", "from step_0000002")
    journal.begins(num_steps=6)
    for step in (2, 3):
        journal.step(record(step), ())
    journal.tell(checkpoint="step_0000004")
    watch(journal.news(0, 0.0))
    lines = stream.getvalue().splitlines()
    assert lines[1] == "digits goes on after step 2, from step_0000002"
    assert lines[2].startswith("step 3/6 ")

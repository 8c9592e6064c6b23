"""Generations between two steps: each is answered, and none keeps the run from training, stopping or changing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypipe.errors import LinkError, RaypipeError, StageError
from raypipe.run.generate_loop import HaltedError
from raypipe.run.requests import Requests
from raypipe.run.texts import Texts
from raypipe.run.threads import ThreadConnection
from tests.run.plans.test_planning import trainer
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

TOKENS = torch.tensor([[7]])


class Asked:
    """Clients that each request a generation; ``found`` has their answers by number."""

    def __init__(self, requests: Requests, does: Sequence[Callable[[Callable[[], bool]], torch.Tensor]]) -> None:
        self._requests, self.found = requests, dict[int, Any]()
        self._threads = list[threading.Thread]()
        for on in does:
            self.ask(on)

    def ask(self, on: Callable[[Callable[[], bool]], torch.Tensor]) -> None:
        number, queued = len(self._threads), self._requests.num_texts
        text = SimpleNamespace(on=lambda *_stages, halted: on(halted))
        generation: Any = lambda: text  # noqa: E731

        def client() -> None:
            try:
                self.found[number] = self._requests.generate(generation, 60.0)
            except RaypipeError as error:
                self.found[number] = str(error)

        self._threads.append(threading.Thread(target=client, daemon=True))
        self._threads[-1].start()
        wait_until(lambda: self._requests.num_texts > queued)

    def over(self) -> dict[int, Any]:
        self._requests.end()
        for thread in self._threads:
            thread.join(30)
        return self.found


def texts_of(requests: Requests) -> Callable[[], None]:
    stages = SimpleNamespace(setup=SimpleNamespace(programs=()), plan=SimpleNamespace(schedule=SimpleNamespace()))
    stages.plan.schedule.wiring = SimpleNamespace(placement=())
    spec, fleet, reporter = SimpleNamespace(callbacks=()), SimpleNamespace(decoding=None), SimpleNamespace()
    reporter.log = lambda *_what, **_numbers: None
    texts = Texts(spec, fleet, requests, reporter)  # type: ignore[arg-type]
    return lambda: texts.answer(stages, 3)  # type: ignore[arg-type]


def test_a_client_that_generates_again_and_again_waits_for_a_step() -> None:
    requests = Requests()
    clients = Asked(requests, ())

    def again(_halted: Callable[[], bool]) -> torch.Tensor:
        clients.ask(again)
        return TOKENS

    clients.ask(again)
    clients.ask(again)
    texts_of(requests)()
    assert requests.num_texts == 2
    found = clients.over()
    assert [torch.equal(found[number], TOKENS) for number in (0, 1)] == [True, True]
    assert all("The run is over" in found[number] for number in (2, 3))


@pytest.mark.parametrize("act", [lambda requests: requests.stop(""), lambda requests: requests.leave({"node"})])
def test_a_stop_and_a_change_come_before_further_generations(act: Callable[[Requests], None]) -> None:
    requests = Requests()

    def acts(_halted: Callable[[], bool]) -> torch.Tensor:
        act(requests)
        return TOKENS

    clients = Asked(requests, (acts, acts))
    texts_of(requests)()
    assert requests.num_texts == 1
    clients.over()


def test_a_stop_ends_a_generation() -> None:
    requests = Requests()

    def long(halted: Callable[[], bool]) -> torch.Tensor:
        assert not halted()
        requests.stop("")
        assert halted()
        raise HaltedError

    clients = Asked(requests, (long,))
    texts_of(requests)()
    assert "The run is over" in clients.over()[0]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LinkError("Stage 1 is gone"), "The text was not generated: Stage 1 is gone. Request it again."),
        (StageError("Give fewer."), "Give fewer."),
        (ValueError("no"), "The text was not generated: no."),
        (ValueError(), "The text was not generated: ValueError."),
    ],
)
def test_only_errors_that_may_not_recur_ask_for_another_request(error: Exception, message: str) -> None:
    def fails(_halted: Callable[[], bool]) -> torch.Tensor:
        raise error

    requests = Requests()
    clients = Asked(requests, (fails,))
    try:
        texts_of(requests)()
    except LinkError:
        assert isinstance(error, LinkError)
    assert clients.over() == {0: message}


def test_a_run_that_ends_before_its_loop_answers(tmp_path: Path) -> None:
    made = trainer(tmp_path, "run", "noisy")
    job, asked = made._prepared(), threading.Event()

    def no_fleet(*_given: Any) -> Any:
        asked.wait(60)
        raise StageError("no room")

    run = ThreadConnection(made._blueprint(job, 2, local=True), job.planned, no_fleet)
    clients = Asked(run._requests, (lambda _halted: TOKENS,))
    asked.set()
    wait_until(lambda: 0 in clients.found)
    assert "The run is over" in clients.found[0]

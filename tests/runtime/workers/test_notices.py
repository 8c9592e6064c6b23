"""What clouds announce, read from servers that answer as their metadata servers do: headers, codes and waits."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from raypipe.runtime.workers import notices
from raypipe.runtime.workers.notices import ASKED, Announced, Kind, Look, Notice, aws, azure, cloud_here, gcp, watch

pytestmark = pytest.mark.engine

NOW_S = 1_800_000_000.0


class Cloud(ThreadingHTTPServer):
    """A metadata server on loopback.

    Attributes:
        values: what it has to say, by key; missing ones are 404.
        changed: notified when ``values`` changed.
        asked: paths of the requests so far.
    """

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def say(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()


class Handler(BaseHTTPRequestHandler):
    server: Cloud

    def log_message(self, format: str, *args: Any) -> None: ...

    def answer(self, code: int, text: str = "", **headers: str) -> None:
        data = text.encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def value(self, key: str) -> None:
        found = self.server.values.get(key)
        self.answer(404) if found is None else self.answer(200, found)


class Aws(Handler):
    """Version 2 only: without a token every question is refused."""

    def do_PUT(self) -> None:
        self.server.asked.append(self.path)
        ttl = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        good = self.path == "/latest/api/token" and ttl.isdigit() and 1 <= int(ttl) <= 21600
        self.answer(200, "a-token") if good else self.answer(400)

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.headers.get("X-aws-ec2-metadata-token") != "a-token":
            self.answer(401)
        else:
            self.value(self.path.removeprefix("/latest/meta-data/"))


class Gcp(Handler):
    """Answers whoever brings its header, and keeps those waiting who ask for a change."""

    def do_PUT(self) -> None:
        self.answer(405)

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.headers.get("Metadata-Flavor") != "Google":
            self.answer(403)
            return
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        key = path.removeprefix("/computeMetadata/v1/instance/")
        if query.get("wait_for_change") == ["true"]:
            timeout_s, etag = float(query["timeout_sec"][0]), query["last_etag"][0]
            with self.server.changed:
                self.server.changed.wait_for(lambda: self.etag(key) != etag, timeout_s)
        found = self.server.values.get(key)
        if found is None:
            self.answer(404)
        else:
            self.answer(200, found, ETag=self.etag(key), Metadata_Flavor="Google")

    def etag(self, key: str) -> str:
        return f"e{hash(self.server.values.get(key)) & 0xFFFF:x}"


class Azure(Handler):
    def do_PUT(self) -> None:
        self.answer(405)

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        split = urlsplit(self.path)
        if self.headers.get("Metadata") != "true" or "api-version" not in parse_qs(split.query):
            self.answer(400)
        else:
            self.value(split.path.removeprefix("/metadata/"))


@contextmanager
def serving(handler: type[Handler], **values: str) -> Iterator[Cloud]:
    with Cloud(handler) as server:
        server.values |= {key.replace("__", "/").replace("_", "-"): value for key, value in values.items()}
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def scheduled(*events: dict[str, Any]) -> str:
    return json.dumps({"DocumentIncarnation": 1, "Events": list(events)})


def event(kind: str, resource: str = "me", not_before: str = "Mon, 19 Sep 2016 18:29:47 GMT") -> dict[str, Any]:
    return {
        "EventId": "A1", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [resource],
        "EventStatus": "Scheduled" if not_before else "Started", "NotBefore": not_before, "Description": "because",
        "EventSource": "Platform", "DurationInSeconds": 5,
    }  # fmt: skip


class TestAws:
    def test_nothing_is_announced(self) -> None:
        with serving(Aws) as server:
            assert aws(server.url)(0.0) == []

    def test_an_interruption_and_an_advice(self) -> None:
        with serving(Aws) as server:
            server.say("spot/instance-action", '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}')
            server.say("events/recommendations/rebalance", '{"noticeTime": "2017-09-18T08:10:00Z"}')
            assert aws(server.url)(0.0) == [
                Notice(Kind.GOES, 1505722920.0, "AWS: terminate at 2017-09-18T08:22:00Z"),
                Notice(Kind.AT_RISK, None, "AWS: rebalance recommended at 2017-09-18T08:10:00Z"),
            ]

    @pytest.mark.parametrize("text", ["", "no JSON", "[]", '"terminate"', "3"])
    def test_an_answer_that_says_nothing(self, text: str) -> None:
        with serving(Aws) as server:
            server.say("spot/instance-action", text)
            assert aws(server.url)(0.0) == []

    def test_a_time_that_is_none(self) -> None:
        with serving(Aws) as server:
            server.say("spot/instance-action", '{"action": "stop", "time": "soon"}')
            assert aws(server.url)(0.0) == [Notice(Kind.GOES, None, "AWS: stop at soon")]


class TestGcp:
    def test_nothing_is_announced(self) -> None:
        with serving(Gcp, preempted="FALSE", maintenance_event="NONE") as server:
            assert gcp(server.url)(0.0) == []

    @pytest.mark.parametrize(
        ("text", "kind"),
        [("MIGRATE_ON_HOST_MAINTENANCE", Kind.PAUSES), ("TERMINATE_ON_HOST_MAINTENANCE", Kind.GOES)],
    )
    def test_maintenance(self, text: str, kind: Kind) -> None:
        with serving(Gcp, preempted="FALSE", maintenance_event=text) as server:
            found = gcp(server.url, clock=lambda: NOW_S)(0.0)
            assert found == [Notice(kind, NOW_S + 60.0, f"GCP: {text}")]

    def test_a_preemption_ends_the_wait_for_it(self) -> None:
        with serving(Gcp, preempted="FALSE", maintenance_event="NONE") as server:
            look = gcp(server.url, clock=lambda: NOW_S)
            assert look(60.0) == [], "the first answer comes at once"
            timer = threading.Timer(0.2, server.say, ("preempted", "TRUE"))
            timer.start()
            assert look(60.0) == [Notice(Kind.GOES, NOW_S + 30.0, "GCP: preempted")]
            timer.join()
        assert sum("wait_for_change=true&timeout_sec=60" in path for path in server.asked) == 2


class TestAzure:
    def test_nothing_is_announced(self) -> None:
        with serving(Azure, instance__compute__name="me", scheduledevents=scheduled()) as server:
            assert azure(server.url)(0.0) == []

    @pytest.mark.parametrize(
        ("what", "kind"),
        [("Preempt", Kind.GOES), ("Terminate", Kind.GOES), ("Reboot", Kind.GOES), ("Freeze", Kind.PAUSES)],
    )
    def test_events_of_this_machine(self, what: str, kind: Kind) -> None:
        found = scheduled(event(what, "another"), event(what))
        with serving(Azure, instance__compute__name="me", scheduledevents=found) as server:
            look = azure(server.url)
            assert look(0.0) == look(0.0) == [Notice(kind, 1474309787.0, f"Azure: {what} A1 because")]
        assert sum("compute/name" in path for path in server.asked) == 1

    @pytest.mark.parametrize("not_before", ["", "soon"])
    def test_an_event_that_has_begun(self, not_before: str) -> None:
        found = scheduled(event("Preempt", not_before=not_before))
        with serving(Azure, instance__compute__name="me", scheduledevents=found) as server:
            assert azure(server.url, clock=lambda: NOW_S)(0.0) == [
                Notice(Kind.GOES, NOW_S, "Azure: Preempt A1 because")
            ]

    @pytest.mark.parametrize("text", ["", "{}", '{"Events": {}}', '{"Events": [3, {}]}'])
    def test_an_answer_that_says_nothing(self, text: str) -> None:
        with serving(Azure, instance__compute__name="me", scheduledevents=text) as server:
            assert azure(server.url)(0.0) == []


CLOUDS: list[tuple[type[Handler], dict[str, str], Callable[[str], Look]]] = [
    (Aws, {"spot__instance_action": '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'}, aws),
    (Gcp, {"preempted": "TRUE", "maintenance_event": "NONE"}, gcp),
    (Azure, {"instance__compute__name": "me", "scheduledevents": scheduled(event("Preempt"))}, azure),
]


@pytest.mark.parametrize(("handler", "values", "look"), CLOUDS)
def test_the_cloud_that_answers_is_found(
    handler: type[Handler], values: dict[str, str], look: Callable[[str], Look]
) -> None:
    with serving(handler, **values) as server:
        found = cloud_here(server.url)
        assert found is not None
        said, expected = found(0.0), look(server.url)(0.0)
        assert said is not None
        assert expected is not None
        assert [(n.kind, n.reason) for n in said] == [(n.kind, n.reason) for n in expected]


@pytest.mark.parametrize("look", [aws, gcp, azure])
def test_a_server_that_is_gone_says_nothing(look: Callable[[str], Look]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert look(url)(0.0) is None
        assert cloud_here(url) is None


def test_a_server_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        assert aws(f"http://127.0.0.1:{deaf.getsockname()[1]}")(0.0) is None


def test_the_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with serving(Aws) as server:
        assert aws(server.url)(0.0) == []


def test_every_notice_is_told_once() -> None:
    """Not again while it stands, nor after a look without an answer; but again when it was taken back."""
    one, two = Notice(Kind.PAUSES, 1.0, "one"), Notice(Kind.GOES, None, "two")
    later = one._replace(deadline_s=2.0)
    script: list[list[Notice] | None] = [[], [one], [later, two], None, [later, two], [two], [one, two]]
    told: list[Notice] = []
    stop = threading.Event()

    def look(wait_s: float) -> list[Notice] | None:
        if len(script) == 1:
            stop.set()
        return script.pop(0)

    watch(look, told.append, stop, every_s=0.0)
    assert told == [one, two, one]


def test_the_watch_ends_when_it_is_stopped() -> None:
    stop, looked = threading.Event(), threading.Event()

    def look(wait_s: float) -> list[Notice]:
        looked.set()
        return []

    thread = threading.Thread(target=watch, args=(look, lambda notice: None, stop, 3600.0))
    thread.start()
    assert looked.wait(10.0)
    stop.set()
    thread.join(10.0)
    assert not thread.is_alive()


def test_the_server_that_the_environment_names_is_asked_in_the_background() -> None:
    with serving(Aws) as server:
        server.say("spot/instance-action", '{"action": "stop", "time": "2017-09-18T08:22:00Z"}')
        found = Announced({ASKED: server.url})
        deadline_s = time.monotonic() + 30.0
        while not found.notices:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        found.close()
        assert found.notices == (Notice(Kind.GOES, 1505722920.0, "AWS: stop at 2017-09-18T08:22:00Z"),)


def test_nobody_is_asked_where_the_address_is_empty() -> None:
    before = threading.active_count()
    assert Announced({ASKED: ""}).notices == ()
    assert threading.active_count() == before

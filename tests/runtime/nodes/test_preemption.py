"""Nodes that are about to go: notices of clouds, Ray's list, and stages that move away with the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import ray

from raypipe.runtime.nodes import preemption
from raypipe.runtime.nodes.preemption import (
    ASKED,
    Announced,
    DrainWatch,
    Notice,
    NoticeKind,
    NoticeReader,
    aws,
    azure,
    cloud_here,
    gcp,
    watch_notices,
)
from tests import processes
from tests.runtime.raylets import TOKEN, private_cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.ray


NOW_S = 1_800_000_000.0
EVENT_DATE = "Mon, 19 Sep 2016 18:29:47 GMT"


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

    def do_PUT(self) -> None:
        self.answer(405)

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


def event(kind: str, resource: str = "me", not_before: str = EVENT_DATE) -> dict[str, Any]:
    return {
        "EventId": "A1", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [resource],
        "EventStatus": "Scheduled" if not_before else "Started", "NotBefore": not_before, "Description": "because",
        "EventSource": "Platform", "DurationInSeconds": 5,
    }  # fmt: skip


Look = Callable[[str], NoticeReader]
GCP: Look = partial(gcp, clock=lambda: NOW_S)
AZURE: Look = partial(azure, clock=lambda: NOW_S)
NAMED = {"instance__compute__name": "me"}


def of_azure(kind: str, not_before: str = EVENT_DATE) -> dict[str, str]:
    """An event of another machine, and one of this machine."""
    return {**NAMED, "scheduledevents": scheduled(event(kind, "another"), event(kind, not_before=not_before))}


def gone_to(text: str, deadline_s: float | None) -> Notice:
    return Notice(NoticeKind.GOES, deadline_s, text)


@pytest.mark.parametrize(
    ("handler", "look", "values", "notices"),
    [
        (Aws, aws, {}, []),
        *((Aws, aws, {"spot__instance_action": text}, []) for text in ("", "no JSON", "[]", '"terminate"', "3")),
        (
            Aws, aws, {"spot__instance_action": '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'},
            [gone_to("AWS: terminate at 2017-09-18T08:22:00Z", 1505722920.0)],
        ),
        (
            Aws, aws, {"spot__instance_action": '{"action": "stop", "time": "soon"}'},
            [gone_to("AWS: stop at soon", None)],
        ),
        (
            Aws, aws, {"events__recommendations__rebalance": '{"noticeTime": "2017-09-18T08:10:00Z"}'},
            [Notice(NoticeKind.AT_RISK, None, "AWS: rebalance recommended at 2017-09-18T08:10:00Z")],
        ),
        (Gcp, GCP, {"preempted": "FALSE", "maintenance_event": "NONE"}, []),
        (
            Gcp, GCP, {"preempted": "FALSE", "maintenance_event": "MIGRATE_ON_HOST_MAINTENANCE"},
            [Notice(NoticeKind.PAUSES, NOW_S + 60.0, "GCP: MIGRATE_ON_HOST_MAINTENANCE")],
        ),
        (
            Gcp, GCP, {"preempted": "FALSE", "maintenance_event": "TERMINATE_ON_HOST_MAINTENANCE"},
            [gone_to("GCP: TERMINATE_ON_HOST_MAINTENANCE", NOW_S + 60.0)],
        ),
        *(
            (Azure, AZURE, {**NAMED, "scheduledevents": text}, [])
            for text in (scheduled(), "", "{}", '{"Events": {}}', '{"Events": [3, {}]}')
        ),
        *(
            (Azure, AZURE, of_azure(kind), [gone_to(f"Azure: {kind} A1 because", 1474309787.0)])
            for kind in ("Preempt", "Terminate", "Reboot")
        ),
        (
            Azure, AZURE, of_azure("Freeze"),
            [Notice(NoticeKind.PAUSES, 1474309787.0, "Azure: Freeze A1 because")],
        ),
        *(
            (Azure, AZURE, of_azure("Preempt", begun), [gone_to("Azure: Preempt A1 because", NOW_S)])
            for begun in ("", "soon")
        ),
    ],
)  # fmt: skip
def test_what_a_cloud_announces(
    handler: type[Handler], look: Look, values: dict[str, str], notices: list[Notice]
) -> None:
    with serving(handler, **values) as server:
        assert look(server.url)(0.0) == notices
        found = cloud_here(server.url)
        assert found is not None, "the cloud that answers is found"
        said = found(0.0)
        assert said is not None
        assert [(one.kind, one.reason) for one in said] == [(one.kind, one.reason) for one in notices]


def test_a_preemption_by_gcp_ends_the_wait_for_it() -> None:
    with serving(Gcp, preempted="FALSE", maintenance_event="NONE") as server:
        look = gcp(server.url, clock=lambda: NOW_S)
        assert look(60.0) == [], "the first answer comes at once"
        timer = threading.Timer(0.2, server.say, ("preempted", "TRUE"))
        timer.start()
        assert look(60.0) == [Notice(NoticeKind.GOES, NOW_S + 30.0, "GCP: preempted")]
        timer.join()
    assert sum("wait_for_change=true&timeout_sec=60" in path for path in server.asked) == 2


@pytest.mark.parametrize("look", [aws, gcp, azure])
def test_a_server_that_is_gone_says_nothing(look: Callable[[str], NoticeReader]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert look(url)(0.0) is None
        assert cloud_here(url) is None


def test_a_server_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        assert aws(f"http://127.0.0.1:{deaf.getsockname()[1]}")(0.0) is None


def test_the_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with serving(Aws) as server:
        assert aws(server.url)(0.0) == []


def test_every_notice_is_told_once() -> None:
    """Not again while it stands, nor after a look without an answer; but again when it was taken back."""
    one, two = Notice(NoticeKind.PAUSES, 1.0, "one"), Notice(NoticeKind.GOES, None, "two")
    later = one._replace(deadline_s=2.0)
    script: list[list[Notice] | None] = [[], [one], [later, two], None, [later, two], [two], [one, two]]
    told: list[Notice] = []
    stop = threading.Event()

    def look(wait_s: float) -> list[Notice] | None:
        if len(script) == 1:
            stop.set()
        return script.pop(0)

    watch_notices(look, told.append, stop, every_s=0.0)
    assert told == [one, two, one]


def test_the_watch_ends_when_it_is_stopped() -> None:
    stop, looked = threading.Event(), threading.Event()

    def look(wait_s: float) -> list[Notice]:
        looked.set()
        return []

    thread = threading.Thread(target=watch_notices, args=(look, lambda notice: None, stop, 3600.0))
    thread.start()
    assert looked.wait(60.0)
    stop.set()
    thread.join(60.0)
    assert not thread.is_alive()


def test_the_server_that_the_environment_names_is_asked_in_the_background() -> None:
    with serving(Aws) as server:
        server.say("spot/instance-action", '{"action": "stop", "time": "2017-09-18T08:22:00Z"}')
        found = Announced({ASKED: server.url})
        wait_until(lambda: found.notices != ())
        found.close()
        assert found.notices == (Notice(NoticeKind.GOES, 1505722920.0, "AWS: stop at 2017-09-18T08:22:00Z"),)


def test_nobody_is_asked_where_the_address_is_empty() -> None:
    before = threading.active_count()
    assert Announced({ASKED: ""}).notices == ()
    assert threading.active_count() <= before


def test_a_release_of_ray_without_it_is_met_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_module", lambda name: None)
    assert preemption.draining_nodes() == {}
    assert "no interface for it" in preemption.drain_node("ab" * 28, "", None)


SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from raypipe.runtime.nodes.preemption import draining_nodes
from raypipe.runtime.nodes.preemption import ASKED
from tests.runtime.fleet.test_recovery import ENDLESS, as_undisturbed, events, reached, stopped, surviving

folder, moves = Path(sys.argv[1]), []
ray.init(address="auto", namespace="raypipe", log_to_driver=False, logging_level="ERROR")
handle = surviving(folder, "drained", "noisy", max_failures=0, sample_s=0.01).start(ENDLESS)
here = ray.get_runtime_context().get_node_id()
for by in ("cloud", "ray"):
    reached(handle, handle.status().step + 5)
    before = handle.status().stages
    node = min({stage["node"] for stage in before} - {here})
    if by == "ray":  # as a pod does it before it stops
        leave = [sys.executable, "jobs/clusters/leave.py", "worker", "--seconds", "110", "--node", node]
        leaving = subprocess.Popen(leave)
    else:
        there = ray.remote(num_cpus=0)(lambda: os.environ[ASKED])
        affinity = NodeAffinitySchedulingStrategy(node, soft=False)
        print("announce at", ray.get(there.options(scheduling_strategy=affinity).remote()), flush=True)
    deadline_s = time.monotonic() + 120
    while len(events(folder / "drained", "move")) <= len(moves):
        assert time.monotonic() < deadline_s, handle.status()
        time.sleep(0.05)
    after = handle.status().stages
    # One that is drained and has nothing to do ends, while the run goes on.
    known = node in draining_nodes() or not any(one["Alive"] for one in ray.nodes() if one["NodeID"] == node)
    if by == "ray":
        assert leaving.wait(150) == 0
    drain = events(folder / "drained", "drain")[len(moves)]
    moves.append({
        "nodes": len({stage["node"] for stage in after} & {stage["node"] for stage in before}),
        "kept": len({stage["process"] for stage in after} & {stage["process"] for stage in before}),
        "left": node not in {stage["node"] for stage in after},
        "ray_knows": known,
        "reason": drain["reason"].replace(node, "it"),
        "in_time": 0 < drain["seconds_left"] < 120,
    })
reached(handle, handle.status().step + 5)
steps, checkpoint = stopped(handle)
print(json.dumps({
    "differ": as_undisturbed(folder, checkpoint, "noisy", steps),
    "drains": len(events(folder / "drained", "drain")),
    "moves": moves,
}))
"""
MOVED = {"nodes": 1, "kept": 1, "left": True, "ray_knows": True, "in_time": True}


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_stages_leave_a_machine_that_its_cloud_takes_away_and_a_node_that_ray_drains(tmp_path: Path) -> None:
    """One after the other: of four nodes, the stages end on the two that nobody takes."""
    with contextlib.ExitStack() as clouds, private_cluster() as home:
        servers = {server.url: server for server in (clouds.enter_context(serving(Aws)) for _ in range(4))}
        for url in servers:
            home.start(cpus=1, **TOKEN, **{ASKED: url})
        with script(home.address, tmp_path) as (process, result):
            line = process.stdout.readline()
            assert line.startswith("announce at "), line
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
            action = json.dumps({"action": "terminate", "time": when})
            servers[line.split()[-1]].say("spot/instance-action", action)
            moves = [{**MOVED, "reason": reason} for reason in (f"AWS: terminate at {when}", "Ray drains it")]
            assert result() == {"differ": [], "drains": 2, "moves": moves}


@contextlib.contextmanager
def script(address: str, folder: Path) -> Any:
    """The process of SCRIPT, and what waits for the line in which it tells how it went."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env={**os.environ, **TOKEN, "RAY_ADDRESS": address}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def result() -> dict[str, Any]:
        said, complaints = process.communicate(timeout=400)
        assert process.returncode == 0, said[-2000:] + complaints[-4000:]
        found: dict[str, Any] = processes.said_last(said)
        return found

    try:
        yield process, result
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_pause_is_told_and_nobody_leaves(local_ray: None) -> None:
    node, left, told = ray.get_runtime_context().get_node_id(), [], []
    pause = Notice(NoticeKind.PAUSES, time.time() + 60.0, "GCP: MIGRATE_ON_HOST_MAINTENANCE")
    heard = threading.Event()

    def event(decision: str, reason: str, **numbers: Any) -> None:
        told.append((decision, reason, numbers["node"], 50 < numbers["seconds_left"] <= 60))
        heard.set()

    watch = DrainWatch(lambda: {node}, lambda: {node: [pause, pause]}, left.append, event)
    wait_until(heard.is_set, 60.0)
    watch.close()
    assert told == [("notice", "GCP: MIGRATE_ON_HOST_MAINTENANCE: the machine pauses", node, True)]
    assert left == []

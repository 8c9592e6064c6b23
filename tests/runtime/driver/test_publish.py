"""Metrics as Prometheus sees them: scraped from the metrics port of a real node, and asked of a real Prometheus."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from raypipe.engine.io.storage import Place
from raypipe.engine.optim.state import Settings
from raypipe.engine.setup import RunSetup
from raypipe.ir.report import StepRecord, StepReport
from raypipe.metrics import METRICS, Kind, exported_name
from raypipe.runtime.driver.publish import DETAILS_EVERY_S, Publisher
from raypipe.runtime.worker.worker import StageActor
from tests.runtime.raylets import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

HOMES = ((0,), (1,), (2,))
RUN = "published run"
NO_NORM = "no norm"
PATIENCE_S = 180.0
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def reports(step: int, end_s: float, busy_s: float = 0.25) -> list[StepReport]:
    """Three stages; stage 1 sends 3000 bytes on and 500 back."""
    sent = [(1000, 0), (3000, 500), (0, 700)]
    return [
        StepReport(s, step, 8, 2.5, 1.5, end_s - 1, end_s, busy_s, 0.125, sent[s], peak_in_flight=3 - s)
        for s in range(3)
    ]


def record(step: int, grad_norm: float = 1.5) -> StepRecord:
    return StepRecord(step, 8, 2.5, grad_norm, 0.5, 0.25, 10_400.0, 3)


class _Driver:
    """Publishes as the driver of a run does."""

    def __init__(self) -> None:
        self.publisher = Publisher(RUN, HOMES)

    def publish(self) -> None:
        publisher = self.publisher
        publisher.step(record(0), reports(0, 10.0))
        publisher.step(record(1), reports(1, 10.0 + DETAILS_EVERY_S / 2, busy_s=9.0))  # too early for details
        publisher.step(record(2), reports(2, 20.0))
        Publisher(NO_NORM, HOMES).step(record(0, grad_norm=math.nan), [])
        publisher.event("failures")
        publisher.event("failures", 2)
        publisher.event("retunes", 0)
        publisher.event("recovery_seconds", 3.5)
        publisher.event("generation", 4)
        publisher.event("codec_ratio", 1.75, link="0->1")

    def repeat(self) -> None:
        """Ray forgets a gauge that is not set again."""
        self.publisher.repeat()


@pytest.fixture(scope="module")
def published() -> Iterator[Any]:
    """A driver that has published, on a node of its own that reports every second."""
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=True,  # it writes the file in which Prometheus finds the nodes
        dashboard_port=0,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config={"metrics_report_interval_ms": 1000},
    )
    try:
        driver = ray.remote(num_cpus=0)(_Driver).remote()
        ray.get(driver.publish.remote(), timeout=240)
        yield driver
    finally:
        ray.shutdown()


def until(found: Callable[[], Any]) -> Any:
    """The first answer that is something."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            if answer := found():
                return answer
        except OSError:  # nobody listens yet
            pass
        time.sleep(0.5)
    pytest.fail(f"nothing within {PATIENCE_S:.0f} s")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def scrape(run: str = RUN) -> Series:
    """All series of a run on the node's metrics port; the tags that Ray adds are left out."""
    (node,) = ray.nodes()
    text = get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics")
    found = {}
    for name, tags, value in re.findall(r"^(ray_raypipe_\w+)\{(.*)\} (\S+)", text, re.MULTILINE):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        if pairs.get("run") == run:
            own = {key: pairs[key] for key in ("run", "stage", "link", "le") if key in pairs}
            found[name, frozenset(own.items())] = float(value)
    return found


def of(series: Series, name: str, **tags: str) -> float:
    return series[f"ray_raypipe_{name}", frozenset({"run": RUN, **tags}.items())]


def test_a_node_shows_the_metrics_and_nothing_that_was_not_told(published: Any) -> None:
    """NaN stands for what no stage reported; the other numbers of the same step are there."""
    until(lambda: any("codec_ratio" in name for name, _ in scrape()))  # which is told last
    series = scrape()
    assert of(series, "step_seconds") == 0.5
    assert of(series, "samples_per_second") == 16.0
    assert of(series, "loss") == 2.5
    assert of(series, "bubble_fraction") == 0.25
    assert [of(series, "stage_busy_seconds", stage=str(s)) for s in range(3)] == [0.25] * 3
    assert [of(series, "link_wait_seconds", stage=str(s)) for s in range(3)] == [0.125] * 3
    links = {tags: value for (name, tags), value in series.items() if name == "ray_raypipe_link_bytes_per_second"}
    assert {dict(tags)["link"]: value for tags, value in links.items()} == {
        "0->1": 2000.0, "1->2": 6000.0, "1->0": 1000.0, "2->1": 1400.0,
    }  # fmt: skip
    assert of(series, "failures_total") == 3.0
    assert of(series, "generation") == 4.0
    assert of(series, "codec_ratio", link="0->1") == 1.75
    assert of(series, "recovery_seconds_sum") == 3.5
    assert of(series, "recovery_seconds_count") == 1.0
    assert (of(series, "recovery_seconds_bucket", le="2.0"), of(series, "recovery_seconds_bucket", le="5.0")) == (0, 1)
    names = {name for name, _ in series}
    assert not {"ray_raypipe_peak_memory_bytes", "ray_raypipe_retunes_total"} & names
    told = {exported_name(found): found for found in METRICS}
    for name in names:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert base in told, name
        assert (base != name) == (told[base].kind is Kind.HISTOGRAM)
    without = {name for name, _ in until(lambda: scrape(NO_NORM))}
    assert ("ray_raypipe_loss" in without, "ray_raypipe_grad_norm" in without) == (True, False)
    assert "ray_raypipe_grad_norm" in names


PROMETHEUS = shutil.which("prometheus")


@pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus on this machine")
def test_prometheus_finds_the_node_and_the_run(published: Any, tmp_path: Path) -> None:
    """A real Prometheus with Ray's own service discovery file."""
    assert PROMETHEUS is not None
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    discovery = session / "prom_metrics_service_discovery.json"
    until(discovery.exists)
    config = tmp_path / "prometheus.yml"
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [str(discovery)]}]}],
            }
        )
    )
    port = free_port()
    options = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [PROMETHEUS, *options, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    try:
        asked = urllib.parse.quote(f'ray_raypipe_step_seconds{{run="{RUN}"}}')
        url = f"http://127.0.0.1:{port}/api/v1/query?query={asked}"

        def answers() -> Any:
            ray.get(published.repeat.remote(), timeout=60)
            return json.loads(get(url))["data"]["result"]

        (answer,) = until(answers)
    finally:
        process.terminate()
        process.wait(60)
    assert answer["metric"]["run"] == RUN
    assert float(answer["value"][1]) == 0.5


def test_a_stage_tells_that_it_does_not_hear_its_driver(published: Any) -> None:
    """Whose own series are gone by then. Heard again, it says so; else it ends."""
    stage = StageActor.options(num_cpus=0).remote(60.0)  # type: ignore[attr-defined]
    run = RunSetup(torch.optim.SGD, None, {}, Settings(0, "mean", None, 60.0), place=Place.of("/runs/silent"))
    ray.get([stage.join.remote(1, run), stage.heartbeat.remote(1, 16.0)], timeout=240)

    def share() -> float | None:
        return scrape("silent").get(("ray_raypipe_driver_silence_fraction", frozenset({("run", "silent")})))

    assert 0.25 <= until(share) < 1.0
    ray.get(stage.heartbeat.remote(1, 60.0), timeout=60)
    until(lambda: share() in (0.0, None))
    assert ray.get(stage.heartbeat.remote(1, 2.0), timeout=60) is not None
    until(lambda: _is_gone(stage))


def _is_gone(actor: Any) -> bool:
    try:
        ray.get(actor.facts.remote(), timeout=60)
    except ray.exceptions.RayActorError:
        return True
    return False

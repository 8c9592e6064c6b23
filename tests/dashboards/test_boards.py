"""Boards and alerts: made from the table of metrics, and files that Grafana, Prometheus and Kubernetes take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dashboards.alerts import ALERTS
from dashboards.boards import BOARDS, Board
from dashboards.generate import FOLDER, generated
from raypipe.cli import app
from raypipe.dashboards.install import contents
from raypipe.metrics import METRICS, Kind, exported_name

PROMTOOL = shutil.which("promtool")
EXPRESSIONS = [query.expression for board in BOARDS for panel in board.panels for query in panel.queries]


def test_what_is_installed_is_what_is_generated() -> None:
    """After a change of the boards: ``python -m dashboards.generate``."""
    for name, text in generated().items():
        assert (FOLDER / name).read_text("utf-8") == text, name
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".yaml")} == set(generated())


KNOWN = {
    exported_name(found) + ending: set(found.tags)
    for found in METRICS
    for ending in (("_bucket", "_sum", "_count") if found.kind is Kind.HISTOGRAM else ("",))
}
"""Series as Prometheus names them, and their labels."""


@pytest.mark.parametrize("expression", sorted({*EXPRESSIONS, *(alert.expression for alert in ALERTS)}))
def test_an_expression_asks_for_what_is_published(expression: str) -> None:
    assert set(re.findall(r"ray_raypipe_\w+", expression)) <= set(KNOWN)
    grouped = re.findall(r"by \(([\w, ]+)\) \((?:\w+\((?:[\d.]+, )?)?(?:time\(\) - )?(ray_raypipe_\w+)", expression)
    assert grouped
    for by, name in grouped:
        assert set(by.split(", ")) - {"le"} <= KNOWN[name]


def test_every_metric_is_on_a_board() -> None:
    shown = {name for expression in EXPRESSIONS for name in re.findall(r"ray_raypipe_\w+", expression)}
    missing = {found.name for found in METRICS if not any(name.startswith(exported_name(found)) for name in shown)}
    assert missing == {
        "raypipe_samples_total",
        "raypipe_tokens_total",
        "raypipe_running",
    }  # for sums over days, and for alerts


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_board_is_laid_out(board: Board) -> None:
    found = json.loads((FOLDER / f"{board.uid}.json").read_text("utf-8"))
    assert (found["uid"], found["title"]) == (board.uid, board.title)
    assert [v["name"] for v in found["templating"]["list"]] == ["datasource", "run"]
    assert [panel["title"] for panel in found["panels"]] == [panel.title for panel in board.panels]
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] in ("stat", "timeseries")
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"] in ("short", "s", "percentunit", "Bps", "bytes")
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
    assert len({panel["id"] for panel in found["panels"] if panel.get("id") is not None}) in (0, len(found["panels"]))


def test_the_command_writes_what_the_readers_need(tmp_path: Path) -> None:
    folder = tmp_path / "boards"
    done = CliRunner().invoke(app, ["dashboards", "install", str(folder), "--prometheus", "http://prom:9090"])
    assert done.exit_code == 0, done.output
    assert f"wrote 11 files to {folder}" in done.output
    (provider,) = yaml.safe_load((folder / "grafana/provisioning/dashboards/raypipe.yaml").read_text())["providers"]
    boards = sorted(path.name for path in Path(provider["options"]["path"]).iterdir())
    assert boards == sorted(f"{board.uid}.json" for board in BOARDS)
    (source,) = yaml.safe_load((folder / "grafana/provisioning/datasources/raypipe.yaml").read_text())["datasources"]
    assert source["url"] == "http://prom:9090"
    kinds = {path.name: yaml.safe_load(path.read_text()) for path in (folder / "kuberay").iterdir()}
    assert {name: found["kind"] for name, found in kinds.items()} == {
        "dashboards.yaml": "ConfigMap", "podmonitor.yaml": "PodMonitor", "rules.yaml": "PrometheusRule",
    }  # fmt: skip
    data = kinds["dashboards.yaml"]["data"]
    assert {name: json.loads(text)["uid"] for name, text in data.items()} == {f"{b.uid}.json": b.uid for b in BOARDS}
    assert len(json.dumps(data)) < 1 << 20  # what Kubernetes takes in one ConfigMap
    assert kinds["dashboards.yaml"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert [rule["alert"] for rule in kinds["rules.yaml"]["spec"]["groups"][0]["rules"]] == [a.name for a in ALERTS]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["dashboards", "install", str(tmp_path / "file")])
    assert done.exit_code == 1
    assert "cannot be written" in str(done.exception)


needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool on this machine")


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=120, check=False)


@needs_promtool
def test_prometheus_takes_the_configuration(tmp_path: Path) -> None:
    for name, text in contents(tmp_path, "http://localhost:9090", str(tmp_path / "nodes.json")).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = promtool("check", "config", str(tmp_path / "prometheus/prometheus.yml"))
    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@needs_promtool
@pytest.mark.slow
def test_each_alert_fires_under_its_fault_and_not_otherwise(tmp_path: Path) -> None:
    cases = Path(__file__).with_name("alerts_test.yaml")
    done = promtool("test", "rules", str(cases))
    assert done.returncode == 0, done.stdout + done.stderr
    told = {
        case["alertname"] for test in yaml.safe_load(cases.read_text())["tests"] for case in test["alert_rule_test"]
    }
    assert told == {alert.name for alert in ALERTS}
    # The cases can fail: without what they are about, and with what holds always.
    rules = (FOLDER / "rules.yaml").read_text("utf-8")
    for changed in (rules.replace("> 0.15", "> 0.5"), rules.replace("> 2 *", "> 0 *"), rules.replace(">= 3", ">= 1"),
                    rules.replace("0.75 *", "0.1 *"), rules.replace("== 1", ">= 0")):  # fmt: skip
        (tmp_path / "rules.yaml").write_text(changed)
        (tmp_path / "cases.yaml").write_text(cases.read_text().replace("../../raypipe/dashboards/", ""))
        assert promtool("test", "rules", str(tmp_path / "cases.yaml")).returncode != 0

"""Files for Prometheus, Grafana and Kubernetes in a folder of the user's.

    DIR/grafana/dashboards/*.json               the boards
    DIR/grafana/provisioning/dashboards/...     where Grafana finds them
    DIR/grafana/provisioning/datasources/...    where Grafana finds Prometheus
    DIR/prometheus/prometheus.yml               scrapes the nodes of a Ray cluster on this machine
    DIR/prometheus/rules.yaml                   the alerts
    DIR/kuberay/*.yaml                          the same for KubeRay, with Prometheus' operator and Grafana's sidecar

Ray generates boards of its own into its session folder and rewrites that at every start of the head, so nothing of ours
is put there.
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from raypipe.errors import ConfigError

DISCOVERY = "/tmp/ray/prom_metrics_service_discovery.json"
"""File in which Ray's head lists the nodes, unless it was started with another --temp-dir."""
POD_METRICS = "metrics"
"""Name that KubeRay gives to port 8080 of head and workers."""


def install(folder: Path, prometheus: str, discovery: str = DISCOVERY) -> list[Path]:
    """Write all files, and return their paths. Files of an earlier installation are replaced, other files stay.

    Args:
        prometheus: address of Prometheus, for Grafana.
        discovery: Ray's file that lists the nodes, for Prometheus.

    Raises:
        ConfigError: ``prometheus`` is not an address, or the folder cannot be written.
    """
    if not re.match(r"https?://[^\s/]+", prometheus):
        raise ConfigError(f"--prometheus {prometheus} is no address: give it as in http://localhost:9090.")
    written = []
    for name, text in contents(folder.absolute(), prometheus, discovery).items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}. Give a folder of your own.") from error
        written.append(path)
    return written


def contents(folder: Path, prometheus: str, discovery: str) -> dict[str, str]:
    """Return the text of every file, by its path below ``folder``."""
    boards = {file.name: file.read_text("utf-8") for file in files(__package__).iterdir() if _is_board(file.name)}
    rules = (files(__package__) / "rules.yaml").read_text("utf-8")
    grafana = folder / "grafana"
    texts = {f"grafana/dashboards/{name}": text for name, text in sorted(boards.items())}
    texts["grafana/provisioning/dashboards/raypipe.yaml"] = _yaml(_provider(grafana / "dashboards"))
    texts["grafana/provisioning/datasources/raypipe.yaml"] = _yaml(_source(prometheus))
    texts["prometheus/prometheus.yml"] = _yaml(_scraping(discovery))
    texts["prometheus/rules.yaml"] = rules
    texts["kuberay/dashboards.yaml"] = _yaml(_config_map(boards))
    texts["kuberay/podmonitor.yaml"] = _yaml(_pod_monitor())
    texts["kuberay/rules.yaml"] = _yaml(_prometheus_rule(yaml.safe_load(rules)))
    return texts


def _is_board(name: str) -> bool:
    return name.endswith(".json")


def _yaml(content: Any) -> str:
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _provider(boards: Path) -> dict[str, Any]:
    one = {"name": "raypipe", "folder": "raypipe", "type": "file", "options": {"path": str(boards)}}
    return {"apiVersion": 1, "providers": [one]}


def _source(prometheus: str) -> dict[str, Any]:
    one = {"name": "raypipe", "type": "prometheus", "access": "proxy", "url": prometheus}
    return {"apiVersion": 1, "datasources": [one]}


def _scraping(discovery: str) -> dict[str, Any]:
    """Build prometheus.yml, which collects metrics every 10 s, as often as Ray does."""
    ray = {"job_name": "ray", "file_sd_configs": [{"files": [discovery]}]}
    return {
        "global": {"scrape_interval": "10s", "evaluation_interval": "10s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [ray],
    }


def _meta(name: str, **labels: str) -> dict[str, Any]:
    return {"name": name, "labels": {"app.kubernetes.io/part-of": "raypipe", **labels}}


def _config_map(boards: dict[str, str]) -> dict[str, Any]:
    """Build a ConfigMap of the boards; its label makes the sidecar of Grafana's chart load it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta("raypipe-dashboards", grafana_dashboard="1"),
        "data": boards,
    }


def _pod_monitor() -> dict[str, Any]:
    """Build a PodMonitor for head and workers of every RayCluster in the namespace."""
    nodes = {"key": "ray.io/node-type", "operator": "In", "values": ["head", "worker"]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _meta("raypipe-ray-nodes"),
        "spec": {
            "jobLabel": "ray.io/cluster",
            "selector": {"matchExpressions": [nodes]},
            "podMetricsEndpoints": [{"port": POD_METRICS, "interval": "10s"}],
        },
    }


def _prometheus_rule(rules: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": _meta("raypipe-alerts"),
        "spec": rules,
    }

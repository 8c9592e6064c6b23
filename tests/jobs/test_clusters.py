"""Clusters to start with Ray's launcher: Ray's own schema takes them, and their spot workers come and go."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.sources import ROOT

pytestmark = pytest.mark.core  # it reads files of Ray's, and does not import it

FILES = [ROOT / "jobs" / "clusters" / f"{cloud}.yaml" for cloud in ("aws", "gcp")]


def schema() -> dict[str, Any]:
    found = importlib.util.find_spec("ray")
    assert found is not None
    assert found.origin is not None
    text = (Path(found.origin).parent / "autoscaler" / "ray-schema.json").read_text("utf-8")
    return dict(json.loads(text))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_cluster_is_as_ray_wants_it(path: Path) -> None:
    cluster = yaml.safe_load(path.read_text("utf-8"))
    jsonschema.validate(cluster, schema())
    assert cluster["provider"]["type"] == path.stem
    head, spot = (cluster["available_node_types"][name] for name in ("head", "spot"))
    assert cluster["head_node_type"] == "head"
    assert head["resources"] == {"CPU": 0}
    assert (spot["min_workers"], spot["max_workers"]) == (0, cluster["max_workers"])
    node = spot["node_config"]
    assert node.get("InstanceMarketOptions") == {"MarketType": "spot"} or node["scheduling"] == [{"preemptible": True}]
    commands = " ".join(cluster["head_start_ray_commands"]), " ".join(cluster["worker_start_ray_commands"])
    assert all("RAY_AUTH_MODE=token" in command and "--metrics-export-port=8080" in command for command in commands)
    assert "--autoscaling-config=" in commands[0]
    for name in ("initial_delay_ms", "period_ms", "timeout_ms", "failure_threshold"):
        assert f"RAY_health_check_{name}=" in commands[0]
    wrong = copy.deepcopy(cluster)
    wrong["available_node_types"]["spot"]["min_workers"] = "none"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema())

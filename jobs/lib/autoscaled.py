"""A cluster on this machine that Ray's autoscaler grows and shrinks, with nodes that are processes of this machine.

    with autoscaled({"CPU": 1}, most=4) as cluster:
        ray.init(address=cluster.address)         the head has no CPU, and there are no other nodes yet
        cluster.grant(2)                          the cloud has two machines
        cluster.nodes(), cluster.demand()

It is what ``ray.cluster_utils.AutoscalingCluster`` makes, with the same provider of fake nodes. That class cannot be
used: its template is missing from Ray's wheel (2.60), it listens on fixed ports, and its start ends every other Ray on
the machine (``ray stop --force``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.autoscaler.v2.sdk import get_cluster_status

from tests.lab.network import ROOT
from tests.runtime.raylets import private_cluster

__all__ = ["Autoscaled", "autoscaled"]

HEAD_ID = "f" * 51 + "00000"
"""Id of the head in Ray's fake provider."""
HEAD_TYPE, NODE_TYPE = "ray.head.default", "node"
STORE_BYTES = 80_000_000


class Autoscaled(NamedTuple):
    """Cluster that ``autoscaled`` yields."""

    address: str
    granted: Path

    def grant(self, count: int) -> None:
        """Allow ``count`` nodes at the same time from now on; running nodes stay."""
        new = self.granted.with_suffix(".new")
        new.write_text(str(count))
        new.replace(self.granted)

    def nodes(self) -> int:
        """Count the living nodes besides the head; a driver must be connected."""
        return sum(node["Alive"] for node in ray.nodes()) - 1

    def demand(self) -> list[dict[str, float]]:
        """List pending demands in the autoscaler: placement groups, tasks, actors, ``request_resources``."""
        found = get_cluster_status(self.address).resource_demands
        demands = [*found.placement_group_demand, *found.ray_task_actor_demand, *found.cluster_constraint_demand]
        return [dict(bundle.bundle) for one in demands for bundle in one.bundles_by_count for _ in range(bundle.count)]


@contextmanager
def autoscaled(resources: Mapping[str, float], most: int, idle_s: float = 10.0) -> Iterator[Autoscaled]:
    """Start a head without processors, and nodes on demand; everything is removed afterwards.

    Args:
        resources: resources of each node.
        most: most nodes that the autoscaler may request.
        idle_s: seconds after which an idle node is stopped.
    """
    with private_cluster() as home:
        cluster = Autoscaled(home.address, home.folder / "granted")
        cluster.grant(0)
        file = home.folder / "autoscaling.json"
        file.write_text(json.dumps(_configuration(cluster, resources, most, idle_s)))
        home.start(
            cpus=0, store_bytes=STORE_BYTES, options=[f"--autoscaling-config={file}"],
            RAY_FAKE_CLUSTER="1", RAY_OVERRIDE_NODE_ID_FOR_TESTING=HEAD_ID, AUTOSCALER_UPDATE_INTERVAL_S="1",
            PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        )  # fmt: skip
        yield cluster


def _configuration(cluster: Autoscaled, resources: Mapping[str, float], most: int, idle_s: float) -> dict[str, Any]:
    """Build the configuration for ``ray start --autoscaling-config``, with all fields that Ray requires."""
    node = {
        "resources": {**resources, "object_store_memory": STORE_BYTES},
        "node_config": {"granted": str(cluster.granted)}, "min_workers": 0, "max_workers": most,
    }  # fmt: skip
    head = {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0}
    no_commands = [
        "initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
        "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter",
    ]  # fmt: skip
    return {
        "cluster_name": "loopback",
        "max_workers": most,
        "provider": {
            "type": "external", "module": "jobs.lib.granted_nodes.GrantedNodes", "gcs_address": cluster.address,
            "head_node_id": HEAD_ID, "use_node_id_as_ip": True, "disable_node_updaters": True,
            "disable_launch_config_check": True, "foreground_node_launch": True,
        },
        "available_node_types": {NODE_TYPE: node, HEAD_TYPE: head},
        "head_node_type": HEAD_TYPE,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": idle_s / 60,
        "auth": {}, "docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False,
        **{name: [] for name in no_commands},
    }  # fmt: skip
